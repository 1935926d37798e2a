"""Two models that are called in step: transformers' own, and the same one through two servers."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import llmnode
from llmnode.client.adopted import sessions_behind
from llmnode.client.heads import HEADS
from llmnode.errors import ConfigError
from llmnode.models.families import family_of
from llmnode.node import Node
from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOLERANCE: dict[str, Any] = {"atol": 2e-3, "rtol": 1e-3, "equal_nan": True}


@dataclass
class Pair:
    """`alone` is transformers' own model, `served` the same through servers. The caches are of the last calls."""

    alone: Any
    served: Any
    draft: Any
    folder: str
    peers: list[str]
    caches: tuple[Any, Any] | None = None
    masks: torch.Tensor | None = None
    said: list[str] = field(default_factory=list)

    def forget(self) -> None:
        if self.caches is not None:
            behind = sessions_behind(self.caches[1])
            (self.caches[1] if behind is None else behind).close()
        self.caches = self.masks = None

    def both(self, call: Any, *, may_exceed: bool = False) -> tuple[Any, Any] | None:
        """The results of both models for `call(model, side)`; None if it was refused, after which nothing is kept.

        `may_exceed` says that the distributed one may do what transformers' own classes cannot.
        """
        columns = self.caches[1].get_seq_length() if self.caches else 0
        answers: list[Any] = []
        for side, model in enumerate((self.alone, self.served)):
            torch.manual_seed(0)
            try:
                with torch.no_grad():
                    answers.append(call(model, side))
            except ConfigError as error:
                assert side, "transformers knows none of our errors"
                self.said.append(str(error))
                assert self.caches is None or self.caches[1].get_seq_length() == columns, "it was refused too late"
                self.forget()
                return None
            except (ValueError, IndexError, RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
                answers.append(error.with_traceback(None))  # which would keep what the call had open
        if isinstance(answers[0], Exception):
            assert may_exceed or isinstance(answers[1], Exception), f"only transformers refuses: {answers[0]!r}"
            self.forget()
            return None
        if isinstance(answers[1], Exception):
            raise answers[1]
        return answers[0], answers[1]


@contextmanager
def open_pair(family: str, folder: Path, spans: tuple[str, str] = ("0:2", f"2:{BLOCKS}")) -> Iterator[Pair]:
    """A small model of the family, saved in `folder` and served from there: a server for each of `spans`."""
    torch.set_num_threads(1)
    model = make_model(family, tied=False)
    model.save_pretrained(folder)
    with ExitStack() as stack:
        config = {"worker": "thread", "threads": 1, "kv_tokens": 20_000}
        first = stack.enter_context(Node(str(folder), blocks=spans[0], **config))
        stack.enter_context(Node(str(folder), blocks=spans[1], peers=first.addresses, **config))
        served = stack.enter_context(llmnode.connect(str(folder), peers=first.addresses))
        draft = make_model(family, tied=False, seed=1, num_hidden_layers=1)
        yield Pair(model, served, draft, str(folder), list(first.addresses))


def with_head(pair: Pair, head: str, **options: Any) -> tuple[Any, Any]:
    """Transformers' model with a head, and the distributed one, with the same weights."""
    torch.manual_seed(3)
    ours = pair.served.with_head(head, pad_token_id=0, **options).eval()
    config = copy.deepcopy(pair.alone.config)
    config.update({"pad_token_id": 0, **options})
    theirs = HEADS[head].from_config(config).eval()
    weights = {name: each for name, each in pair.alone.state_dict().items() if not name.startswith("lm_head")}
    own = {name: each for name, each in ours.state_dict().items() if name not in weights}
    theirs.load_state_dict({**weights, **own})
    assert all(name.startswith(("score", "classifier")) for name in own)
    theirs.requires_grad_(False)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(name in own)
    assert [name for name, each in ours.named_parameters() if each.requires_grad] == list(own)
    return theirs, ours


def after_blocks(model: Any, blocks: int, module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The scores of a model of transformers in which `module` changes the states after this many `blocks`."""

    def changed(_block: object, _args: object, output: Any) -> Any:
        return (module(output[0]), *output[1:]) if isinstance(output, tuple) else module(output)

    handle = blocks_of(model)[blocks - 1].register_forward_hook(changed)
    try:
        scores: torch.Tensor = model(ids, use_cache=False).logits
    finally:
        handle.remove()
    return scores


def blocks_of(model: Any) -> Any:
    family = family_of(model.config)
    return getattr(model.get_submodule(family.decoder), family.blocks)


@contextmanager
def prompted(model: Any, prompts: torch.Tensor) -> Iterator[None]:
    """Deep prompts, (blocks, rows, positions, hidden_size), in a model of transformers. Pad on the right."""

    def added(index: int, _block: object, args: Any, kwargs: Any) -> tuple[Any, Any]:
        states = args[0] if args else kwargs["hidden_states"]
        rows = prompts[index].expand(len(states), -1, -1)
        states = torch.cat([states[:, : rows.shape[1]] + rows, states[:, rows.shape[1] :]], dim=1)
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    with ExitStack() as stack:
        for index, block in enumerate(blocks_of(model)):
            handle = block.register_forward_pre_hook(partial(added, index), with_kwargs=True)
            stack.callback(handle.remove)
        yield
