"""A worker process without torch, which fails as it is told: by the model's name, or a position's first byte."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import llmnode
from llmnode.compute.child import serve_node
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.ports import Loaded

if __name__ == "__main__":  # of this package, two files: all of it would take longer than the rest of a start
    bare = ModuleType("llmnode.testing")
    bare.__path__ = [str(Path(llmnode.__file__).with_name("testing"))]
    sys.modules[bare.__name__] = bare

from llmnode.testing.exact_blocks import EXACT_MODEL
from llmnode.testing.worker import ExactExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.loading import Wanted
    from llmnode.core.model import ModelInfo, Precision
    from llmnode.core.operations import Buffer, Pass, Slice
    from llmnode.ports import Executor

MEET, PART, EXIT, SEIZE, FAIL, STUMBLE, DIE, HANG = 246, 247, 248, 249, 250, 251, 252, 253
"""A pass and a forward meet: the forward begins when the pass has. The pass ends when a forward says that they part.
End the process, never let another thread run, raise what torch raises, raise what nobody foresaw, be killed, never
answer."""
UNKNOWN, ABORT, STUCK, LONG = "unknown", "abort", "stuck", "long"
"""Raise what the user can mend, crash, wait for ever, compute for `LONG_S`."""
SHORT = "short"
"""Be short of memory, in every process after a first that has loaded; `SHORT:FILE`, until there is FILE."""
TOO_LARGE = "too large"
"""`TOO_LARGE:FILE`: crash while loading, if there is no FILE yet; else do not fit."""
ALONE, SHORT_BESIDE, ENDLESS, FAILS, STUCK_BESIDE = "alone", "short beside", "endless", "fails", "stuck beside"
"""Beside another executor: have no memory for it, run out of it, load for ever and say so again and again, raise what
torch raises, wait for ever."""
LASTING, SWITCHES = "lasting", "switches"
"""An executor beside another does not end when it is dropped; say how long a thread keeps Python's lock."""
LONG_S = 0.5
MEETING_S = 30.0
TOKENS_BESIDE_PID = 100_000
"""KV tokens of a process that takes a share of the memory: these and its process id, which a test can tell apart."""


class Meeting:
    """That of a pass and a forward."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()


class TroubledExecutor(ExactExecutor):
    def __init__(self, span: Span, kv_tokens: int, meeting: Meeting) -> None:
        super().__init__(span, EXACT_ROW, kv_tokens)
        self._meeting = meeting

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        told = {each.hidden[0] for each in slices if not each.first}
        if MEET in told:
            _wait_for(self._meeting.has_begun)
        if PART in told:
            self._meeting.may_end.set()
        _obey(told)
        return super().forward(slices)

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        told = {each.hidden[0] for each in passes}
        self._meeting.has_begun.set()
        if MEET in told:
            _wait_for(self._meeting.may_end)
        _obey(told)
        return super().run(passes)


def _wait_for(event: threading.Event) -> None:
    """Not for ever: a thread of the test's own process cannot be ended by the test's deadline."""
    if not event.wait(MEETING_S):
        raise RuntimeError(f"nobody came in {MEETING_S:g} s")


def _obey(told: set[int]) -> None:
    if SEIZE in told:
        ctypes.PyDLL(None).pause()  # a call of C that keeps the GIL
    if HANG in told:
        signal.pause()
    if DIE in told:
        os.kill(os.getpid(), signal.SIGKILL)
    if EXIT in told:
        raise SystemExit("as told")
    if FAIL in told:
        raise RuntimeError("out of memory, as told")
    if STUMBLE in told:
        raise KeyError("as told")


class LastingExecutor(TroubledExecutor):
    def __del__(self) -> None:
        signal.pause()


class TroubledLoader:
    def __init__(self, wanted: Wanted, report: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._report = report
        self.meeting = Meeting()

    def open_model(self) -> ModelInfo:
        if self._wanted.model == UNKNOWN:
            raise ConfigError("no such model, as told")
        if self._wanted.model == ABORT:
            os.abort()
        if self._wanted.model == STUCK:
            signal.pause()
        if self._wanted.model == LONG:
            end_s = time.process_time() + LONG_S
            while time.process_time() < end_s:
                pass
        self._report("opening")
        return EXACT_MODEL

    def fitting_blocks(self) -> int:
        return 3

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return [Candidate(each, self.fitting_blocks(), 1.0, each.dtype == "bfloat16") for each in precisions]

    def load(self, span: Span) -> Loaded:
        self._report("loading")
        if (self._wanted.model or "").startswith(TOO_LARGE):
            file = Path((self._wanted.model or "").partition(":")[2])
            if not file.exists():
                file.touch()
                os.abort()
            raise ConfigError("blocks do not fit, as told")
        if self._is_short():
            raise ConfigError("blocks do not fit, as told")
        kv_tokens = self._wanted.kv_tokens
        if self._wanted.kv_memory is not None and not self._wanted.is_announced:
            kv_tokens = TOKENS_BESIDE_PID + os.getpid()
        executor: Any = TroubledExecutor(span, kv_tokens, self.meeting)
        return Loaded(executor, tensor_bytes=12)

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        assert isinstance(held, TroubledExecutor)
        if self._wanted.model == ALONE:
            return None
        while self._wanted.model == ENDLESS:
            self._report("loading beside")
            time.sleep(0.001)
        if self._wanted.model == SHORT_BESIDE:
            raise MemoryError("as told")
        if self._wanted.model == FAILS:
            raise RuntimeError("as told")
        if self._wanted.model == STUCK_BESIDE:
            threading.Event().wait()
        self._report(f"{sys.getswitchinterval():g}" if self._wanted.model == SWITCHES else "loading beside")
        made = LastingExecutor if self._wanted.model == LASTING else TroubledExecutor
        executor: Any = made(span, kv_tokens, self.meeting)
        return Loaded(executor, tensor_bytes=24)

    def _is_short(self) -> bool:
        kind, _, file = (self._wanted.model or "").partition(":")
        if kind != SHORT or not self._wanted.is_announced:
            return False
        was_there = bool(file) and Path(file).exists()
        if file:
            Path(file).touch()
        return not was_there


EXACT_ROW = 2


if __name__ == "__main__":
    serve_node(TroubledLoader)
