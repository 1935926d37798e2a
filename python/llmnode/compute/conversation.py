"""Messages to and from a worker process over one socket, as the node's tasks send and receive them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.compute.worker_messages import Message, Messages

if TYPE_CHECKING:
    import socket

RECEIVE_BYTES = 1 << 16


class Ended(Exception):
    """The other side has ended, or this one was closed."""


class Conversation:
    """One task at a time may receive. The calls of `socket` are plain ones: with trio's own streams a decode's way
    there and back takes 1.5 times the time.
    """

    def __init__(self, end: socket.socket) -> None:
        """Owns `end`."""
        end.setblocking(False)
        self._socket = end
        self._messages = Messages()

    def send_some(self, message: bytes) -> memoryview:
        """Send the bytes that the socket takes now, usually all. Returns the rest, even if the other side has ended."""
        left = memoryview(message)
        with suppress(OSError):
            left = left[self._socket.send(left) :]
        return left

    async def send(self, message: bytes | memoryview) -> None:
        """Raises Ended."""
        left = memoryview(message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            except OSError as error:
                raise Ended from error

    async def receive(self) -> Message:
        """The next message. Raises Ended."""
        while True:
            for message in self._messages:
                return message
            try:
                await trio.lowlevel.wait_readable(self._socket)
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise Ended
            self._messages.feed(data)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()
