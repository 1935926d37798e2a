"""A forward of a batch: it runs rows through their sessions, scores the results, and makes transformers' output of it.

`batch.py` decides the input of each row's session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from llmnode.client.row_adapters import only_row
from llmnode.client.versions import chosen_indices
from llmnode.core.texts.beams import first_alike
from llmnode.errors import ConfigError
from llmnode.models.packed_ends import MOST_ROWS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.client.batch import PaddedBatch, ScoredColumns
    from llmnode.client.cache import SessionCache
    from llmnode.client.ends import SharedEnds
    from llmnode.core.model import ModelInfo


OF_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
"""Arguments of a forward that go to the loss."""
_WITHOUT_EFFECT = frozenset({*OF_LOSS, "tokenizer", "assistant_tokenizer", "is_causal", "cache_position"})
"""Arguments that transformers' own models take and ignore."""


def given_states(
    input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, embedding_size: int
) -> torch.Tensor:
    """Token ids (rows, columns), or embeddings (rows, columns, size). Raises ConfigError for anything else."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ConfigError("give input_ids or inputs_embeds, one of them")
    if input_ids is not None:
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
            raise ConfigError(f"input_ids of shape {tuple(input_ids.shape)}: expected whole numbers, (rows, tokens)")
        return input_ids.cpu().long()
    assert inputs_embeds is not None, "one of them is there"
    if inputs_embeds.ndim != 3 or not inputs_embeds.numel() or inputs_embeds.shape[2] != embedding_size:
        shape = tuple(inputs_embeds.shape)
        raise ConfigError(f"inputs_embeds of shape {shape}: expected (rows, tokens, {embedding_size})")
    return inputs_embeds.cpu()


def check_others(others: dict[str, Any], config: Any) -> None:  # Any: each family's config has attributes of its own
    """Raises ConfigError for unknown arguments that would change the result."""
    ignored = {
        "labels",
        "output_hidden_states",
        *_WITHOUT_EFFECT,
        *(() if config.model_type == "gpt2" else ("token_type_ids",)),
    }
    wrong = [name for name, value in others.items() if value is not None and value is not False and name not in ignored]
    if others.get("labels") is not None and _gives_router_logits(config):
        wrong.append("the loss of a router (output_router_logits in the config)")
    is_causal = others.get("is_causal")
    if (getattr(config, "is_causal", None) if is_causal is None else is_causal) is False:
        wrong.append("is_causal=False")
    if wrong:
        raise ConfigError(f"not supported by a distributed model: {', '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class Ran:
    """Hidden states (tokens, hidden_size) of each row's real tokens: before the first block, and after the last one.

    None for a row without any. real: (rows, columns), bool. `firsts` says which rows are copies of which.
    """

    real: torch.Tensor
    entered: Sequence[torch.Tensor | None]
    left: Sequence[torch.Tensor | None]
    firsts: Sequence[int]
    by_row: Sequence[torch.nn.Module] = ()
    """Layers of the ends that have another adapter for each row (`told_by_row`)."""


def run(
    ends: SharedEnds,
    cache: SessionCache,
    batch: PaddedBatch,
    given: torch.Tensor,
    by_row: Sequence[torch.nn.Module] = (),
) -> Ran:
    """Run the real ones of `given`: token ids (rows, columns), or embeddings (rows, columns, size).

    Rows that are equal, have the same adapter and have nothing before them are run once. `by_row` is that of the
    result. Raises as `SessionCache.run_rows`.
    """
    if (prefix := cache.prefix_due) is not None:
        cache.begin(ends.enter(prefix, torch.arange(len(prefix))))
    rows = [row[kept] for row, kept in zip(given, batch.real, strict=True)]
    are_tokens = given.ndim == 2
    names = [row.flatten().tolist() for row in rows]
    are_alike = cache.is_empty and batch.is_uniform and not by_row
    named = [(kind, *name) for kind, name in zip(cache.kinds, names, strict=True)]
    firsts = first_alike(named) if are_alike else list(range(len(rows)))
    embed = ends.embed_at if are_tokens else ends.enter
    entered: list[torch.Tensor | None] = []
    for index, (row, ids, first) in enumerate(zip(rows, batch.position_ids, firsts, strict=True)):
        with only_row(by_row, index):
            entered.append(embed(row, ids + cache.prefix) if len(row) and first == index else None)
    left = cache.run_first(entered, names) if are_alike and are_tokens else cache.run_rows(entered)
    cache.reorder(firsts)
    cache.add_columns(batch.real, batch.offsets)
    return Ran(batch.real, entered, left, firsts, by_row)


def scores(ends: SharedEnds, ran: Ran, kept: ScoredColumns, vocabulary: int) -> torch.Tensor:
    """The scores (rows, columns, vocabulary) at the columns `kept`; zeros for padding."""
    wanted = _real_columns(ran, kept)
    if len(ran.firsts) == 1 and wanted and wanted[0][1].all():  # nothing is put together, and copies take long
        with only_row(ran.by_row, 0):
            scored = ends.logits(wanted[0][2]).clone()  # else transformers could not change scores in place
        return scored[None] if kept.are_apart else scored
    found = [torch.zeros(len(columns), vocabulary, dtype=torch.float32) for columns in kept.columns]
    longest = max((len(states) for _, _, states in wanted), default=1)
    together = 1 if ran.by_row else max(1, MOST_ROWS // max(1, longest))
    for start in range(0, len(wanted), together):
        some = wanted[start : start + together]
        with only_row(ran.by_row, some[0][0]):
            scored = ends.logits(torch.cat([states for _, _, states in some]))
        for (row, places, _), own in zip(some, scored.split([len(states) for _, _, states in some]), strict=True):
            found[row][places] = own
    rows = [
        found[first] if _is_scored_as(first, row, ran, kept) else found[row] for row, first in enumerate(ran.firsts)
    ]
    return torch.stack(rows) if kept.are_apart else torch.cat(rows)


def _real_columns(ran: Ran, kept: ScoredColumns) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each row to be scored: which of its `kept` columns are real, and the states after the last block there."""
    wanted = []
    for row, (first, columns) in enumerate(zip(ran.firsts, kept.columns, strict=True)):
        states = ran.left[first]
        if states is None or _is_scored_as(first, row, ran, kept):
            continue
        chosen = torch.tensor(columns, dtype=torch.long)
        is_real = ran.real[row][chosen]
        if is_real.any():
            places = ran.real[row].cumsum(dim=0) - 1  # of each column, in the session
            wanted.append((row, is_real, states[places[chosen[is_real]]]))
    return wanted


def _is_scored_as(first: int, row: int, ran: Ran, kept: ScoredColumns) -> bool:
    """Whether the scores of `row` are those of another one, which has the same tokens in the same columns."""
    return first != row and kept.columns[first] == kept.columns[row] and torch.equal(ran.real[first], ran.real[row])


class WithServers:
    """Stands for a value that only the servers have: `what` names it. Using it raises ConfigError.

    It has the `shape` of the real one, and a part of it is itself, so that transformers may split its outputs.
    """

    def __init__(self, what: str, shape: Sequence[int] = ()) -> None:
        self._what = what
        self.shape = torch.Size(shape)

    def __getitem__(self, _part: object) -> Self:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, _function: object, _types: object, args: Sequence[Any] = (), kwargs: object = None
    ) -> NoReturn:
        given = [*args, *(each for some in args if isinstance(some, (list, tuple)) for each in some)]
        next(each for each in given if isinstance(each, cls))._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"{self._what} with the servers")


def chosen_states(asked: Any, embedding: Any, blocks: int) -> frozenset[int] | None:  # Any: whatever a config says
    """The indices, of blocks + 1 hidden states, that `output_hidden_states` asks for, as transformers reads it.

    None if it asks for nothing. Some families give all of them for any choice. Raises ConfigError for no choice.
    """
    if not asked:
        return None
    if "hidden_states" not in _recorded(embedding):
        return frozenset(range(blocks + 1))
    try:
        return chosen_indices(asked, embedding, blocks + 1)
    except TypeError as error:
        raise ConfigError(f"output_hidden_states is {asked!r}: give True, False, an index or several") from error


def hidden_states(
    ends: SharedEnds, ran: Ran, model: ModelInfo, chosen: frozenset[int] | None, *, are_normed: bool
) -> tuple[torch.Tensor | WithServers | None, ...] | None:
    """Hidden states in the form of transformers: before the first block, after each, and after the last one, None if
    not `chosen`.

    Those that a client has are (rows, columns, size), with zeros for padding. `are_normed` says whether the last are
    those after the last norm.
    """
    if chosen is None:
        return None
    first = _padded(ran, ran.entered, model.hidden_size)
    last = [ends.normed(states) if are_normed and states is not None else states for states in ran.left]
    return all_states(first, _padded(ran, last, model.hidden_size), model.blocks, chosen)


def all_states(
    first: torch.Tensor, last: torch.Tensor, blocks: int, chosen: frozenset[int]
) -> tuple[torch.Tensor | WithServers | None, ...]:
    """The hidden states before the first block, after each, and after the last one, None if not `chosen`."""
    what = "hidden_states[0] and hidden_states[-1] are here, and the hidden states between blocks are"
    states: tuple[torch.Tensor | WithServers, ...] = (first, *[WithServers(what, first.shape)] * (blocks - 1), last)
    return tuple(each if index in chosen else None for index, each in enumerate(states))


def are_last_normed(config: Any, embedding: torch.nn.Module) -> bool:  # Any: as above
    """Whether the last hidden states of a model are those after the last norm, by its config."""
    return getattr(config, "tie_last_hidden_states", None) is not False or "hidden_states" not in _recorded(embedding)


def of_servers(config: Any, rows: int, columns: int, all_columns: int) -> dict[str, Any]:
    """Other outputs that a config asks transformers for, and that only the servers have."""
    blocks = config.num_hidden_layers
    given: dict[str, Any] = {}
    if getattr(config, "output_attentions", False):
        shape = (rows, config.num_attention_heads, columns, all_columns)
        given["attentions"] = (WithServers("the weights of attention are", shape),) * blocks
    if _gives_router_logits(config):
        given["router_logits"] = (WithServers("the scores of experts are"),) * blocks
        given["aux_loss"] = WithServers("the scores of experts, from which a router's loss is made, are")
    return given


def _gives_router_logits(config: Any) -> bool:
    """Whether the family has a router, and the config asks for its scores."""
    return hasattr(type(config), "output_router_logits") and bool(config.output_router_logits)


def _recorded(module: torch.nn.Module) -> Collection[str]:
    """The outputs that transformers records in models of this class by its own means."""
    recorded: Collection[str] = getattr(module, "_can_record_outputs", None) or ()
    return recorded


def _padded(ran: Ran, rows: Sequence[torch.Tensor | None], size: int) -> torch.Tensor:
    size = next((states.shape[1] for states in rows if states is not None), size)
    whole = torch.zeros(*ran.real.shape, size, dtype=torch.float32)
    for row, first in enumerate(ran.firsts):
        states = rows[first]
        if states is not None:
            whole[row, ran.real[row]] = states
    return whole
