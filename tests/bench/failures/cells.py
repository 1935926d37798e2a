"""The faults of `tests/bench/run failures`: their kind, the moment in the dialogue, and the spans that they hit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from llmnode.errors import ConfigError

SPANS = 3
PROMPT_TOKENS = 256
CHUNK_TOKENS = 64
EACH = [(span,) for span in range(SPANS)]
TWO = (0, 2)
ALL = tuple(range(SPANS))


class Fault(StrEnum):
    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    WAKE = "SIGSTOP, SIGCONT after the failover"
    RESTART = "SIGKILL, restart, then its twin"
    """The session has to return to a peer that it has lost. The peer has the same identity and address, but no KV."""
    LEAVE = "SIGTERM, leaves at once"
    STARVE = "worker out of memory"
    CUT = "network cut"
    """All links to a server that others have dialled are silent until the cell's end."""
    CUT_OFF = "all links cut for 7 s"
    """The links of the client, and those between servers."""


class Moment(Enum):
    """Its description, and the act of the dialogue to which it belongs. It is the beginning of that act by default."""

    OPEN = "open", "open"
    PREFILL = "prefill, in its 2nd chunk", "prefill"
    BETWEEN = "between decodes", "decode 3"
    DECODE = "in a decode", "decode 3"
    PUSH = "as it pushes a late decode", "decode 6"
    ROLLBACK = "rollback", "rollback"
    REORDER = "beam reorder", "reorder"
    RECOVERY = "another recovery", "decode 3"

    @property
    def comes_back(self) -> str:
        """The act before which servers that were restarted, or told to leave, are back. It comes after the failover."""
        return {"decode 6": "decode 8", "reorder": "decode at last"}.get(self.value[1], "decode 7")


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault of the session's servers of `spans`."""

    fault: Fault
    moment: Moment
    spans: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.fault.name} {self.moment.name} {'+'.join(map(str, self.spans))}".lower()

    def delay_s(self, undisturbed_s: float) -> float:
        """The seconds from the act's beginning until the first of the lost servers computes, or pushes."""
        first = self.spans[0]
        match self.moment:
            case Moment.PREFILL:  # the second chunk, since chunks follow each other through the hops
                return (first + 1.5) / (PROMPT_TOKENS / CHUNK_TOKENS + SPANS - 1) * undisturbed_s
            case Moment.DECODE:
                return (first + 0.5) / SPANS * undisturbed_s
            case Moment.PUSH:
                return (first + 1) / SPANS * undisturbed_s
        return 0.0


def _full() -> list[Cell]:
    """SIGKILL at every moment with every span; each other fault at every moment, and with every span."""
    cells = []
    for number, fault in enumerate(Fault):
        for turn, moment in enumerate(Moment):
            if fault is Fault.CUT_OFF:
                chosen = [ALL]
            elif fault is Fault.KILL:
                chosen = [*EACH, TWO]
            else:
                chosen = [EACH[(number + turn) % SPANS], *([TWO] if (number + turn) % 2 else [])]
            if (fault, moment) != (Fault.RESTART, Moment.RECOVERY):  # SIGKILL covers it: all that died there come back
                cells += [Cell(fault, moment, spans) for spans in chosen]
    return cells


FULL = _full()
THIN = [
    Cell(Fault.KILL, Moment.DECODE, (1,)),
    Cell(Fault.KILL, Moment.DECODE, TWO),
    Cell(Fault.KILL, Moment.PREFILL, (1,)),
    Cell(Fault.KILL, Moment.PUSH, (0,)),
    Cell(Fault.KILL, Moment.REORDER, (1,)),
    Cell(Fault.KILL, Moment.RECOVERY, (1,)),
    Cell(Fault.WAKE, Moment.PREFILL, (0,)),
    Cell(Fault.RESTART, Moment.BETWEEN, (2,)),
    Cell(Fault.LEAVE, Moment.ROLLBACK, (0,)),
    Cell(Fault.STARVE, Moment.DECODE, (1,)),
    Cell(Fault.CUT, Moment.BETWEEN, (2,)),
    Cell(Fault.CUT_OFF, Moment.DECODE, ALL),
]
"""These cells take less than four minutes."""


def choose(*, thin: bool, only: str) -> list[Cell]:
    """The cells whose names begin with `only`. Raises ConfigError if there is none."""
    cells = [cell for cell in (THIN if thin else FULL) if str(cell).startswith(only)]
    if not cells:
        raise ConfigError(f"--only {only!r}: no cell is called so; they are as {FULL[0]!s}, {FULL[-1]!s}")
    return cells
