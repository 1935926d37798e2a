"""A plugin of pytest for PEFT's tests: models are distributed ones, and each result is written down with its reason.

A test that fails for no known reason runs again over the whole model in this process, as a control (`verdict.py`).

The plugin changes some of them. Cases of another model than the served one are left out, and counted. The mask of the
tests' own batch has its padding at the left. Behind a trained prompt it has it at the right, or none if the test
generates text. PEFT's has it in the middle of a row, which is refused. Libraries that the tests import and do not use
may be missing, and a few texts stand for a data set of the hub.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import types
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from peft import PromptLearningConfig
from transformers import AutoModelForCausalLM, Trainer

import llmnode
from bench.peft_tests.suite import LLAMA, MODELS
from bench.peft_tests.verdict import FAILED, Ended, does_not_apply, verdict
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNUSED = {"diffusers": ("StableDiffusionPipeline",), "datasets": ("load_dataset", "load_from_disk")}
"""Libraries that the tests import, and the names in them."""
GENERATING = ("generate", "disable_adapter")
"""Parts of the names of tests that generate text. It cannot go on behind padding."""
MODEL = MODELS[os.environ.get("LLMNODE_PEFT_FAMILY", "llama")]
"""The one that is served."""
_PEERS: list[str] = json.loads(os.environ.get("LLMNODE_PEFT_PEERS", "[]"))
_open: list[Any] = []
_found: list[dict[str, str]] = []
_left_out: Counter[str] = Counter()
"""Cases of other models."""
_ended: list[Ended] = []
"""How the run of the test that was run last ended."""
_load_whole = AutoModelForCausalLM.from_pretrained


class Served:
    """In the place of AutoModelForCausalLM."""

    is_control = False
    """Whether models are whole ones in this process."""

    @classmethod
    def from_pretrained(cls, name: str, *args: Any, **options: Any) -> Any:
        """A copy of the model over the one connection. Raises ConfigError for what is not served."""
        if cls.is_control:
            return _load_whole(name, *args, **options)
        if Path(name).resolve() != Path(MODEL).resolve():
            raise ConfigError(f"{name} is not served")
        if (dtype := options.pop("dtype", None)) not in (None, torch.float32):
            raise ConfigError(f"this swarm computes in float32, and not in {dtype}")
        if options.pop("quantization_config", None) is not None:
            raise ConfigError("this swarm computes in float32, and quantizes nothing")
        options.pop("device_map", None)  # of the client's part, which is on the CPU
        if options:
            raise ConfigError(f"this swarm serves the model as it is, without {', '.join(options)}")
        if not _open:
            _open.append(llmnode.connect(MODEL, peers=_PEERS))
        return copy.deepcopy(_open[0])


class Quotes:
    """In the place of a data set of the hub that the tests train with."""

    texts = ("Be yourself; everyone else is already taken.", "A room without books is like a body without a soul.") * 6

    def map(self, process: Callable[[dict[str, list[str]]], Any], **_options: Any) -> dict[str, list[dict[str, Any]]]:
        """The rows that `process` makes of all texts together."""
        made = process({"quote": list(self.texts)})
        return {"train": [{name: made[name][row] for name in made} for row in range(len(self.texts))]}


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
    testing_utils.load_dataset_english_quotes = Quotes
    kind: Any = AutoModelForCausalLM  # Any: its method is replaced
    kind.from_pretrained = Served.from_pretrained


def _inputs(mask: list[int]) -> Callable[[object], dict[str, torch.Tensor]]:
    """In the place of `prepare_inputs_for_testing`. `mask` is that of the second row."""
    return lambda _tests: {
        "input_ids": torch.tensor([[1, 1, 1], [1, 2, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1], mask]),
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [each for each in items if _model(each) != MODEL]
    _left_out.update(map(_model, others))
    config.hook.pytest_deselected(items=others)
    items[:] = [each for each in items if each not in others]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (tests := getattr(item, "cls", None)) is not None:
        mask = [0, 1, 1]
        if issubclass(_params(item).get("config_cls", object), PromptLearningConfig):
            mask = [1, 1, 1] if any(each in item.name for each in GENERATING) else [1, 1, 0]
        tests.prepare_inputs_for_testing = _inputs(mask)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    ended, over_whole = _ended.pop(), None
    if ended.outcome == FAILED and does_not_apply(ended) is None:
        over_whole = _control(item, nextitem)
    params, name = _params(item), getattr(item, "originalname", item.name)
    kind = params.get("config_cls")
    config = "" if kind is None else _config(kind.__name__, params.get("config_kwargs", {}))
    _found.append({"test": name, "config": config, **verdict(ended, over_whole)})
    return True


def _control(item: pytest.Item, nextitem: pytest.Item | None) -> Ended:
    """The same test over whole models."""
    Served.is_control = True
    try:
        again: Any = item  # Any: a function of pytest, which makes its fixtures anew
        again._initrequest()
        runtestprotocol(item, log=False, nextitem=nextitem)
        return _ended.pop()
    finally:
        Served.is_control = False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if call.when == "call" or report.outcome != "passed":
        error = None if call.excinfo is None else call.excinfo.value
        _ended[:] = [Ended(report.outcome, *(() if error is None else (type(error).__name__, str(error))))]


def pytest_sessionfinish() -> None:
    for each in _open:
        each.close()
    if file := os.environ.get("LLMNODE_PEFT_RESULTS"):
        Path(file).write_text(json.dumps({"tests": _found, "left_out": _left_out}))


def _params(item: pytest.Item) -> dict[str, Any]:
    found: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return found


def _model(item: pytest.Item) -> str:
    """The model that a case asks for."""
    return str(_params(item).get("model_id", LLAMA))


def _config(kind: str, options: dict[str, Any]) -> str:
    more = [name for name in ("alora_invocation_tokens", "trainable_token_indices") if name in options]
    return " ".join([kind.removesuffix("Config"), *more])
