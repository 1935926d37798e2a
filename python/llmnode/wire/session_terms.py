"""The terms of a session, fixed before it opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.wire.payload import HiddenForm

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ClientPolicy
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.payload import Codec


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """The model, the number of positions that there is KV for, and how hidden states cross the wire.

    If there is an `adapter`, the `model` names it.
    """

    model: ModelInfo
    max_length: int
    codec: Codec
    policy: ClientPolicy
    adapter: Adapter | None = None
    prompts: DeepPrompts = NO_PROMPTS
    """They are those of all blocks of the model, for the first positions."""

    @property
    def form(self) -> HiddenForm:
        """The form of hidden states on the wire."""
        return HiddenForm(self.model.hidden_size, self.codec)
