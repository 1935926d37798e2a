"""The lines of a server until it serves, on stderr. In a terminal a line replaces the one that it continues.

"read 9 of 30 blocks" replaces "read 3 of 30 blocks", since both begin with the same word.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from llmnode.core.texts.visible import printable
from llmnode.node.terminal import open_console, show_json, tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from llmnode.node.watching import Notice


class Telling:
    """Within its context the last line turns, if `console` is a terminal; `stop` comes before what else is printed."""

    def __init__(self, console: Console | None) -> None:
        """None for plain lines."""
        self._console = console
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if self._console is not None and self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.stop()

    def tell(self, text: str) -> None:
        if self._status is None:
            tell(text)
            return
        from rich.text import Text

        if not continues(self._last, text):
            self._leave_standing()
        self._last = text
        self._status.update(Text(printable(text)))

    def notice(self, notice: Notice, *, as_json: bool) -> None:
        """A fault that only the reader can mend; with `as_json` programs read it on stdout, too."""
        if as_json:
            event = {"event": notice.event, **notice.more, "text": notice.text, "fix": notice.fix}
            show_json(event)
        self.tell(f"{notice.text}; {notice.fix}" if notice.fix else notice.text)

    def stop(self) -> None:
        """The last line stands, and those to come are plain."""
        if self._status is not None:
            self._status.stop()
            self._leave_standing()
            self._status = None

    def _leave_standing(self) -> None:
        from rich.text import Text

        if self._console is not None and self._last:
            self._console.print(Text(f"llmnode: {printable(self._last)}"), soft_wrap=True)


def terminal() -> Console | None:
    """That of stderr, if it is one: rich is not imported for nothing."""
    if not sys.stderr.isatty():
        return None
    return open_console(stderr=True)


def continues(before: str, text: str) -> bool:
    """Whether `text` says the same as the line `before`, later."""
    return before.partition(" ")[0] == text.partition(" ")[0]
