"""The verdict on one of PEFT's tests, by its error over a distributed model and by that over the whole model."""

from __future__ import annotations

import re
from dataclasses import dataclass

PASSED, FAILED, SKIPPED, NOT_APPLICABLE = "passed", "failed", "skipped", "not applicable"

REFUSED: dict[str, str] = {
    r"servers compute LoRA alone": "a method other than LoRA inside the blocks, which are with the servers",
    r"servers compute plain LoRA": "a variant of LoRA (aLoRA, DoRA, a bias), which servers do not compute",
    r"adapters are active at once": "several adapters active at once: servers compute one",
    r"weights are with the servers|cannot be merged": (
        "merging, or an initialization that changes weights: those are with the servers"
    ),
    r"prefix tuning makes keys and values": "prefix tuning makes keys and values, which are with the servers",
    r"this swarm computes in": "another precision than that of the swarm",
    r"this swarm serves the model as it is": "a change of the model's config, which is that of the served model",
    r"a hook on it would not run": "hooks on layers, which would not run: the layers are with the servers",
    r"the client's part of the model stays on the CPU": "a change of dtype or device of the client's part",
}
"""Our own refusals (ConfigError), and why the test does not apply."""
BY_LIBRARIES: dict[str, str] = {
    r"more than one element of the written-to tensor": (
        "merging, or an initialization that changes weights: those are with the servers"
    ),
    r"is not a plain torch.nn.Linear": "a method other than LoRA inside the blocks, which are with the servers",
    r"find a `nn.ModuleList` of decoder layers": "ShadowPEFT copies layers of blocks, which are with the servers",
}
"""Errors of torch and PEFT about layers that are not there."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run of a test ended. `error` is the name of the class of its error, and `said` is its message."""

    outcome: str
    error: str = ""
    said: str = ""

    def __str__(self) -> str:
        return f"{self.error}: {self.said}" if self.error else self.said


def does_not_apply(ended: Ended) -> str | None:
    """Why a test that failed over a distributed model does not apply, by its error alone. None if that says nothing."""
    known = REFUSED if ended.error == "ConfigError" else BY_LIBRARIES
    return next((why for pattern, why in known.items() if re.search(pattern, ended.said)), None)


def verdict(ended: Ended, over_whole: Ended | None) -> dict[str, str]:
    """The outcome of a test over a distributed model, and the reason for it.

    `over_whole` is the same test over the whole model in one process. It is needed if the test failed and
    `does_not_apply` says nothing. A test that fails there, too, asks for something that is not the swarm's to give.
    """
    if ended.outcome != FAILED:
        return {"outcome": ended.outcome, "reason": ended.said if ended.outcome == SKIPPED else ""}
    if (why := does_not_apply(ended)) is not None:
        return {"outcome": NOT_APPLICABLE, "reason": why}
    if over_whole is not None and over_whole.outcome == FAILED:
        why = f"it fails over the whole model in one process, too: {_first_line(over_whole)}"
        return {"outcome": NOT_APPLICABLE, "reason": why}
    return {"outcome": FAILED, "reason": str(ended)}


def _first_line(ended: Ended) -> str:
    return str(ended).strip().splitlines()[0][:160]
