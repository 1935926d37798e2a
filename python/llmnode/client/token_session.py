"""Petals' session: rows of tokens that go on from one `generate` to the next, or of hidden states, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from llmnode.client.hidden_session import HiddenSession
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from llmnode.client.cache import SessionCache
    from llmnode.client.causal_lm import DistributedModelForCausalLM


class InferenceSession:
    """Rows of a batch that go on. Its sessions open with the first rows that it is given; then it has a cache.

    A context manager. `output_ids` are all tokens of `generate` until now, (rows, tokens), or None.
    """

    def __init__(self, model: DistributedModelForCausalLM, max_length: int) -> None:
        self.max_length = max_length
        self.model = model
        self.output_ids: torch.Tensor | None = None
        self._cache: SessionCache | None = None
        self._states_from: int | None = None  # the first position that `step` has run
        self._prompts = 0  # positions at which servers add deep prompts
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sessions. Safe to call twice."""
        self._is_closed = True
        if self._cache is not None:
            self._cache.close()

    def cache(self, rows: int, prompts: torch.Tensor | None = None) -> SessionCache:
        """The cache of our models that it is. Raises ConfigError for another number of rows, or if it is closed.

        It is opened anew, with the deep `prompts` of `open_cache`, if nothing was run since it had others.
        """
        if self._is_closed:
            raise ConfigError("this session is closed: open another one")
        if self._cache is not None and not self.position and (self._prompts or prompts is not None):
            self._cache.close()  # nothing was run, and its servers have other prompts
            self._cache = None
        if self._cache is None:
            self._cache = self.model.open_cache(self.max_length, rows, prompts=prompts)
            self._prompts = 0 if prompts is None else prompts.shape[2]
        if self._cache.rows != rows:
            raise ConfigError(f"{rows} rows for a session of {self._cache.rows}")
        return self._cache

    @property
    def position(self) -> int:
        """Positions behind us. Set a lower one to roll back to it.

        Raises ConfigError for one among those that have deep prompts, unless it is 0: then the next step says its own.
        """
        return 0 if self._cache is None else self._cache.columns

    @position.setter
    def position(self, position: int) -> None:
        if position != self.position:
            if self._cache is None:
                raise ConfigError(f"cannot go to position {position}: nothing was run")
            if 0 < position < self._prompts:
                raise ConfigError(f"cannot go to position {position}, among {self._prompts} deep prompts: go to 0")
            self._cache.truncate(position)
        if self.output_ids is not None:
            self.output_ids = self.output_ids[:, :position]
        if self._states_from is not None and position <= self._states_from:
            self._states_from = None

    def tokens_with(
        self, inputs: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, SessionCache]:
        """All tokens with `inputs` (rows, tokens) after them, their mask, and the cache that is to run what it lacks.

        `attention_mask` is that of `inputs`, or of all tokens. The cache forgets what a call that failed or was
        interrupted has run beyond the known tokens. Raises ConfigError without any token, and if the cache holds hidden
        states that `step` has run.
        """
        parts = [each for each in (self.output_ids, inputs) if each is not None]
        if not parts:
            raise ConfigError("a session without tokens has nothing to go on from: give inputs")
        if self._states_from is not None:
            raise ConfigError(
                f"this session holds hidden states from position {self._states_from} on, and no tokens: set its "
                "position to that or less, or open another session"
            )
        cache, whole = self.cache(len(parts[-1])), torch.cat(parts, dim=1)
        known = whole.shape[1] - (0 if inputs is None else inputs.shape[1])
        if known and (attention_mask is None or attention_mask.shape[1] < whole.shape[1]):
            seen, new = cache.real[:, :known], attention_mask
            if new is None:
                new = torch.ones_like(whole[:, known:])
            # The last token before is not in the cache yet.
            between = torch.ones_like(whole[:, seen.shape[1] : known])
            attention_mask = torch.cat([seen.to(new), between.to(new), new], dim=1)
        cache.truncate(min(cache.columns, known, whole.shape[1] - 1))
        return whole, attention_mask, cache

    def step(
        self, inputs: torch.Tensor, prompts: torch.Tensor | None = None, hypo_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states (rows, tokens, hidden_size) through all blocks. `hypo_ids` reorders the rows before.

        The first step takes deep `prompts`, (blocks, rows, positions, hidden_size), which are added at its first
        positions before each block. Raises ConfigError for prompts of other steps, and of rows that differ in them.
        """
        if prompts is not None:
            prompts = self._of_first_step(prompts, inputs)
        if inputs.ndim == 3 and not inputs.shape[1]:
            return inputs.clone()
        cache = self.cache(len(inputs), prompts)
        if hypo_ids is not None:
            cache.reorder(hypo_ids.tolist())
            self.output_ids = None if self.output_ids is None else self.output_ids[hypo_ids]
        began = cache.columns
        outputs = HiddenSession(cache).step(inputs)
        self._states_from = began if self._states_from is None else self._states_from
        return outputs

    def _of_first_step(self, prompts: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """One row of prompts for all rows of `inputs`."""
        if self.position:
            raise ConfigError(
                f"prompts at position {self.position}: the first step of a session takes them. Set its position to 0, "
                "or open another session"
            )
        prompts = self.model.remote_blocks.fitting_prompts(prompts, len(inputs), inputs.shape[1])
        if not prompts.eq(prompts[:, :1]).all():
            raise ConfigError("the rows of a session have the same prompts: open a session for each row")
        return prompts[:, :1]
