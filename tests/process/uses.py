"""Uses of a causal LM, drawn by Hypothesis: calls of two models in step, of which one is distributed.

A use holds for both models alike: what one of them kept from an earlier call, the other kept too. After each call both
have given the same, or both have refused, or the distributed one has refused with a ConfigError and changed nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from llmnode.client.versions import CACHE, cache_of
from process.pairs import TOLERANCE

if TYPE_CHECKING:
    from process.pairs import Pair

SIZE = 30
"""Token ids that are drawn; prompts repeat themselves, as lookup in them needs."""
PADDING = 0


@dataclass(frozen=True)
class Rows:
    """A batch: `pads` are zeros of each row's mask at the left, or at the right, or after the first token."""

    tokens: list[list[int]]
    pads: list[int]
    side: str
    has_mask: bool

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor(self.tokens)

    @property
    def mask(self) -> torch.Tensor:
        mask = torch.ones_like(self.ids)
        for row, pads in enumerate(self.pads):
            columns = mask.shape[1]
            if self.side == "left":
                mask[row, : min(pads, columns)] = 0
            elif self.side == "right":
                mask[row, max(0, columns - pads) :] = 0
            else:
                mask[row, 1 : 1 + pads] = 0
        return mask


@st.composite
def rows(draw: Any, count: int | None = None, longest: int = 6) -> Rows:
    count = count or draw(st.integers(1, 3))
    columns = draw(st.integers(1, longest))
    row = st.lists(st.integers(1, SIZE), min_size=columns, max_size=columns)
    tokens = draw(st.lists(row, min_size=count, max_size=count))
    if draw(st.booleans()):
        tokens = [tokens[0]] * count
    pads = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    side = draw(st.sampled_from(["left", "left", "left", "right", "hole"]))
    return Rows(tokens, pads, side, draw(st.booleans()))


@dataclass(frozen=True)
class Forward:
    """A call of the model itself."""

    given: Rows
    cache: str
    positions: str
    keep: str
    mask_form: str
    use_cache: bool | None
    embedded: bool
    labelled: bool
    states: bool

    def run(self, pair: Pair) -> None:
        if self.cache != "kept":
            pair.forget()
        batch = self.given
        count = len(pair.masks) if pair.masks is not None else len(batch.tokens)
        ids = torch.cat([batch.ids] * count)[:count]
        new = torch.cat([batch.mask] * count)[:count] if batch.has_mask else torch.ones_like(ids)
        whole = new if pair.masks is None else torch.cat((pair.masks, new), dim=1)
        real = new.bool()

        def call(model: Any, side: int) -> Any:
            options: dict[str, Any] = {"use_cache": self.use_cache, "logits_to_keep": self._keep(ids, real)}
            if batch.has_mask:
                form = whole if pair.caches and isinstance(pair.caches[0], StaticCache) else None
                options["attention_mask"] = self._mask(whole, ids.shape[1]) if form is None else form
            if self.positions != "none":
                options["position_ids"] = self._positions(whole, ids.shape[1])
            if self.labelled:
                options["labels"] = torch.where(real, ids, -100)
            if self.states:
                options["output_hidden_states"] = True
            if pair.caches is not None:
                options[CACHE] = pair.caches[side]
            elif self.cache == "dynamic":
                options[CACHE] = DynamicCache(config=pair.alone.config)
            elif self.cache == "static":
                options[CACHE] = StaticCache(config=pair.alone.config, max_cache_len=40)
            if self.embedded:
                return model(inputs_embeds=pair.alone.get_input_embeddings()(ids), **options)
            return model(ids, **options)

        # A static cache has places for padding, of which a session keeps nothing; BLOOM cannot use one with a mask.
        is_static = self.cache == "static" or (pair.caches is not None and isinstance(pair.caches[0], StaticCache))
        if (answers := pair.both(call, may_exceed=is_static)) is None:
            return
        ours, theirs = answers[1], answers[0]
        kept = self._kept_real(ids, real)
        torch.testing.assert_close(ours.logits[kept], theirs.logits[kept], **TOLERANCE)
        if self.labelled:
            torch.testing.assert_close(ours.loss, theirs.loss, **TOLERANCE)
        if self.states:
            for place in (0, -1):
                torch.testing.assert_close(
                    ours.hidden_states[place][real], theirs.hidden_states[place][real], **TOLERANCE
                )
        # With use_cache=False GPT-2 forgets what it had.
        assert self.use_cache is False or (cache_of(ours) is None) == (cache_of(theirs) is None)
        if cache_of(theirs) is None:
            pair.forget()
        else:
            assert cache_of(ours).get_seq_length() == cache_of(theirs).get_seq_length()
            pair.caches, pair.masks = (cache_of(theirs), cache_of(ours)), whole

    def _keep(self, ids: torch.Tensor, real: torch.Tensor) -> int | torch.Tensor:
        last = ids.shape[1] - 1
        forms: dict[str, int | torch.Tensor] = {
            "all": 0,
            "last": 1,
            "many": 100,
            "named": torch.tensor([last, 0]),
            "by_row": torch.tensor([[0, last]] * len(ids)),
            "by_mask": real,
        }
        return forms["all" if self.labelled else self.keep]

    def _kept_real(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The returned scores without those of padding."""
        keep = self._keep(ids, real)
        if isinstance(keep, int):
            return real[:, -keep:] if keep else real
        if keep.dtype == torch.bool:
            return torch.ones(int(real.sum()), dtype=torch.bool)
        return real[:, keep] if keep.ndim == 1 else real.gather(1, keep)

    def _positions(self, whole: torch.Tensor, new: int) -> torch.Tensor:
        counted = (whole.cumsum(-1) - 1).clamp(min=0)[:, -new:]
        columns = torch.arange(whole.shape[1])[None, -new:].expand(len(whole), -1)
        forms = {"counted": counted, "columns": columns, "shifted": counted + 2, "gap": 2 * counted}
        return forms[self.positions]

    def _mask(self, whole: torch.Tensor, new: int) -> torch.Tensor:
        if self.mask_form == "flat" or self.cache == "static":
            return whole
        total = whole.shape[1]
        causal = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        allowed = causal & whole.bool()[:, None, None]
        if self.mask_form == "tree":
            allowed = allowed & ~torch.ones(new, total, dtype=torch.bool).tril(total - new - 1).triu(total - new - 1)
        if self.mask_form == "added":
            return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        return allowed


@dataclass(frozen=True)
class Handle:
    """The operations on a cache between calls."""

    what: str
    number: int

    def run(self, pair: Pair) -> None:
        if pair.caches is None or pair.masks is None:
            return
        count, columns = pair.masks.shape
        rows = {
            "reorder": [(row * self.number + 1) % count for row in range(count)],
            "select": list(range(count))[: max(1, self.number % (count + 1))],
            "repeat": [row for row in range(count) for _ in range(2)],
        }.get(self.what, list(range(count)))
        removed = min(self.number, columns)

        def call(_model: Any, side: int) -> Any:
            assert pair.caches is not None, "there is one"
            cache = pair.caches[side]
            if self.what == "crop":
                return cache.crop(-self.number)  # perhaps more than there is
            if self.what == "reorder":
                return cache.reorder_cache(torch.tensor(rows))
            if self.what == "select":
                return cache.batch_select_indices(torch.tensor(rows))
            if self.what == "repeat":
                return cache.batch_repeat_interleave(2)
            return copy.deepcopy(cache)

        if self.what == "repeat" and count > 3:
            return
        # Static caches cannot select rows, and those of windows not crop what they have lost.
        if (answers := pair.both(call, may_exceed=True)) is None:
            return
        if self.what == "copy":
            pair.forget()
            pair.caches = answers
        masks = torch.ones(count, columns, dtype=torch.long) if pair.masks is None else pair.masks
        pair.masks = masks[rows][:, : columns - (removed if self.what == "crop" else 0)]
        assert pair.caches is not None, "both have one"
        assert pair.caches[0].get_seq_length() == pair.caches[1].get_seq_length() == pair.masks.shape[1]


class Listener(BaseStreamer):
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.is_over = False

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_over = True


@dataclass(frozen=True)
class Generate:
    """A call of `generate`."""

    given: Rows
    new_tokens: int
    way: str
    options: tuple[tuple[str, Any], ...]
    cache: str
    listens: bool

    def run(self, pair: Pair) -> None:
        batch = self.given
        one = self.way in ("lookup", "draft")
        ids = batch.ids[:1] if one else batch.ids
        mask = batch.mask[:1] if one else batch.mask
        if self.cache != "kept" or pair.masks is None or len(pair.masks) != len(ids) or self.way == "beams":
            pair.forget()
        if pair.masks is not None:
            ids = torch.cat((torch.ones_like(pair.masks), ids), dim=1)
            mask = torch.cat((pair.masks, mask), dim=1)
        heard: list[list[list[int]]] = []

        def call(model: Any, side: int) -> Any:
            options: dict[str, Any] = {
                "max_new_tokens": self.new_tokens,
                "pad_token_id": PADDING,
                "return_dict_in_generate": True,
                "output_scores": True,
                **self._way(pair, ids),
                **dict(self.options),
            }
            if batch.has_mask:
                options["attention_mask"] = mask
            if pair.caches is not None:
                options[CACHE] = pair.caches[side]
                options.pop("cache_implementation", None)
            if self.listens and self.way != "beams":
                options["streamer"] = Listener()
            output = model.generate(ids, **options)
            if (listener := options.get("streamer")) is not None:
                assert listener.is_over
                heard.append(listener.heard)
            return output

        if (answers := pair.both(call)) is None:
            return
        theirs, ours = answers
        # A row of padding alone has nothing to go on from: each model makes something up.
        real = torch.ones(len(theirs.sequences), dtype=torch.bool)
        if batch.has_mask:
            real = mask.bool().any(dim=1).repeat_interleave(len(real) // len(mask))
        if not _same_until_a_tie(ours, theirs, real) or not real.all():
            pair.forget()
            return
        if len(heard) == 2:
            assert heard[0] == heard[1]
        if pair.caches is None or cache_of(ours) is not pair.caches[1]:
            pair.forget()
        if cache_of(theirs) is not None and cache_of(ours) is not None and self.way != "beams":
            assert cache_of(theirs).get_seq_length() == cache_of(ours).get_seq_length()
            columns = cache_of(ours).get_seq_length()
            repeats = len(theirs.sequences) // len(mask)
            grown = torch.ones(len(theirs.sequences), columns, dtype=torch.long)
            if batch.has_mask:
                before = mask.repeat_interleave(repeats, dim=0)[:, :columns]
                grown[:, : before.shape[1]] = before
            pair.caches, pair.masks = (cache_of(theirs), cache_of(ours)), grown
        else:
            assert (cache_of(theirs) is None) == (cache_of(ours) is None) or self.way == "beams"

    def _way(self, pair: Pair, ids: torch.Tensor) -> dict[str, Any]:
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"do_sample": False},
            "sample": {"do_sample": True, "top_k": 5, "temperature": 0.7},
            "several": {"do_sample": True, "num_return_sequences": 2},
            "beams": {"num_beams": 2, "do_sample": False, "num_return_sequences": 2},
            "lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
            "draft": {"assistant_model": pair.draft, "do_sample": False},
            "guided": {"guidance_scale": 1.5, "do_sample": False, "negative_prompt_ids": ids[:, -2:]},
        }
        return ways[self.way]


def _same_until_a_tie(ours: Any, theirs: Any, real: torch.Tensor) -> bool:
    """Whether all tokens are the same. Otherwise the scores of the first other one must have been as close."""
    length = min(ours.sequences.shape[1], theirs.sequences.shape[1])
    differ = (ours.sequences[:, :length] != theirs.sequences[:, :length]) & real[:, None]
    if not differ.any():
        assert ours.sequences.shape == theirs.sequences.shape or not real.all()
        return True
    column = int(differ.any(dim=0).nonzero()[0])
    step = column - (theirs.sequences.shape[1] - len(theirs.scores))
    found, wanted = ours.scores[step], theirs.scores[step]
    rows = real if len(real) == len(found) else torch.ones(len(found), dtype=torch.bool)
    torch.testing.assert_close(found[rows], wanted[rows], **TOLERANCE)
    return False


_CACHES = st.sampled_from(["none", "none", "kept", "kept", "kept", "dynamic", "static"])
forwards = st.builds(
    Forward,
    given=rows(),
    cache=_CACHES,
    positions=st.sampled_from(["none", "none", "none", "counted", "columns", "shifted", "gap"]),
    keep=st.sampled_from(["all", "all", "last", "many", "named", "by_row", "by_mask"]),
    mask_form=st.sampled_from(["flat", "flat", "flat", "allowed", "added", "tree"]),
    use_cache=st.sampled_from([None, True, True, False]),
    embedded=st.booleans(),
    labelled=st.booleans(),
    states=st.booleans(),
)
handles = st.builds(
    Handle, what=st.sampled_from(["crop", "reorder", "select", "repeat", "copy"]), number=st.integers(0, 9)
)
_OPTIONS = st.sampled_from(
    [
        (),
        (("repetition_penalty", 1.3),),
        (("no_repeat_ngram_size", 2), ("min_new_tokens", 2)),
        (("bad_words_ids", [[3], [4, 5]]),),
        (("use_cache", False),),
        (("cache_implementation", "static"),),
        (("cache_implementation", "dynamic"),),
        (("prefill_chunk_size", 2),),
        (("eos_token_id", [7, 8]),),
        (("output_logits", True), ("output_hidden_states", True)),
        (("watermarking_config", {"bias": 2.0, "seeding_scheme": "selfhash"}),),
    ]
)
generates = st.builds(
    Generate,
    given=rows(),
    new_tokens=st.integers(1, 5),
    way=st.sampled_from(["greedy", "greedy", "sample", "several", "beams", "lookup", "draft", "guided"]),
    options=_OPTIONS,
    cache=_CACHES,
    listens=st.booleans(),
)
uses = st.lists(st.one_of(forwards, forwards, handles, generates), min_size=1, max_size=5)
