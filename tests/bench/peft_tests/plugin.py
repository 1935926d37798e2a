"""A plugin of pytest for PEFT's tests: models are distributed ones, and each result is written down with its reason.

It changes some of them. Tests of other models than the Llama are left out. LoRA's dropout is 0, since servers drop
nothing out. The mask of the tests' own batch has its padding at the left, or at the right behind a trained prompt, and
not in the middle of a row, which is refused. Libraries that the tests import and do not use may be missing.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import types
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PromptLearningConfig
from transformers import AutoModelForCausalLM, Trainer

import llmnode
from bench.peft_tests.suite import LLAMA
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNUSED = {"diffusers": ("StableDiffusionPipeline",), "datasets": ("load_dataset", "load_from_disk")}
"""Libraries that the tests import, and the names in them."""
REASONS: dict[str, str] = {
    r"servers compute LoRA alone": "a method other than LoRA inside the blocks, which are with the servers",
    r"servers compute plain LoRA": "a variant of LoRA (aLoRA, DoRA, a bias), which servers do not compute",
    r"adapters are active at once": "several adapters active at once: servers compute one",
    r"weights are with the servers|cannot be merged|more than one element of the written-to tensor": (
        "merging, or an initialization that changes weights: those are with the servers"
    ),
    r"prefix tuning makes keys and values": "prefix tuning makes keys and values, which are with the servers",
    r"this swarm computes in": "another precision than that of the swarm",
    r"servers drop nothing out": "dropout inside the blocks",
    r"would not run, since the layer is with the servers": "another adapter for each row, or other hooks on layers",
    r"is not a plain torch.nn.Linear": "a method other than LoRA inside the blocks, which are with the servers",
    r"ends in padding": "a text that goes on behind padding",
    r"leave gaps": "a mask with gaps, or a prompt before padding at the left, which leaves some",
    r"the client's part of the model stays on the CPU": "a change of dtype or device of the client's part",
}
"""Errors by which tests do not apply, and why. All others are failures."""
_PEERS: list[str] = json.loads(os.environ.get("LLMNODE_PEFT_PEERS", "[]"))
_open: list[Any] = []
_found: list[dict[str, str]] = []


class Served:
    """In the place of AutoModelForCausalLM."""

    @staticmethod
    def from_pretrained(name: str, *_args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        """A copy of the model over the one connection. Raises ConfigError for what is not served."""
        if name != LLAMA:
            raise ConfigError(f"{name} is not served")
        if dtype not in (None, torch.float32):
            raise ConfigError(f"this swarm computes in float32, and not in {dtype}")
        if options.pop("quantization_config", None) is not None:
            raise ConfigError("this swarm computes in float32, and quantizes nothing")
        if not _open:
            _open.append(llmnode.connect(name, peers=_PEERS))
        return copy.deepcopy(_open[0])


def pytest_configure(config: pytest.Config) -> None:
    assert Trainer is not None, "it has looked by now which libraries there are"
    for name, names in UNUSED.items():
        with suppress(ImportError):
            __import__(name)
            continue
        sys.modules[name] = types.ModuleType(name)
        for each in names:
            setattr(sys.modules[name], each, type(each, (), {}))
    sys.path.insert(0, str(config.rootpath))
    from tests import testing_utils  # type: ignore[attr-defined]  # PEFT's

    testing_utils.hub_online_once = lambda *_args, **_options: nullcontext()
    kind: Any = AutoModelForCausalLM  # Any: its method is replaced
    kind.from_pretrained = Served.from_pretrained


def _inputs(mask: list[int]) -> Callable[[object], dict[str, torch.Tensor]]:
    """In the place of `prepare_inputs_for_testing`. `mask` is that of the second row."""
    return lambda _tests: {
        "input_ids": torch.tensor([[1, 1, 1], [1, 2, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1], mask]),
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [each for each in items if _params(each).get("model_id", LLAMA) != LLAMA]
    config.hook.pytest_deselected(items=others)
    items[:] = [each for each in items if each not in others]
    for each in items:
        if "lora_dropout" in (given := _params(each).get("config_kwargs", {})):
            given["lora_dropout"] = 0.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (tests := getattr(item, "cls", None)) is not None:
        has_prompt = issubclass(_params(item).get("config_cls", object), PromptLearningConfig)
        tests.prepare_inputs_for_testing = _inputs([1, 1, 0] if has_prompt else [0, 1, 1])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if call.when == "call" or report.outcome != "passed":
        params = _params(item)
        kind = params.get("config_cls")
        config = "" if kind is None else _config(kind.__name__, params.get("config_kwargs", {}))
        name = getattr(item, "originalname", item.name)
        _found.append({"test": name, "config": config, **_judged(report, call)})


def pytest_sessionfinish() -> None:
    for each in _open:
        each.close()
    if file := os.environ.get("LLMNODE_PEFT_RESULTS"):
        Path(file).write_text(json.dumps(_found))


def _judged(report: Any, call: pytest.CallInfo[None]) -> dict[str, str]:
    error = None if call.excinfo is None else call.excinfo.value
    if report.outcome == "failed" and isinstance(error, (ConfigError, RuntimeError, ValueError)):
        for pattern, why in REASONS.items():
            if re.search(pattern, str(error)):
                return {"outcome": "not applicable", "reason": why}
    if report.outcome == "skipped":
        return {"outcome": "skipped", "reason": str(error)}
    return {"outcome": str(report.outcome), "reason": "" if error is None else f"{type(error).__name__}: {error}"}


def _params(item: pytest.Item) -> dict[str, Any]:
    found: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return found


def _config(kind: str, options: dict[str, Any]) -> str:
    more = [name for name in ("alora_invocation_tokens", "trainable_token_indices") if name in options]
    return " ".join([kind.removesuffix("Config"), *more])
