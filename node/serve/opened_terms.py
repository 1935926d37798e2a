"""The terms that a client has opened a session with, which decide what it may become a copy of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.operations import NO_PROMPTS, DeepPrompts

if TYPE_CHECKING:
    from llmnode.core.model import Profile
    from llmnode.core.priority import Priority
    from llmnode.core.span import Span
    from llmnode.wire.payload import HiddenForm


@dataclass(frozen=True, slots=True)
class OpenedTerms:
    """The terms that a client has opened a session with."""

    span: Span
    form: HiddenForm
    profile: Profile
    priority: Priority
    keep_outputs: bool
    at_once: int = 0
    """The positions that come as soon as the session is open."""
    prompts: DeepPrompts = NO_PROMPTS
    prompts_digest: bytes = b""
    """Made once, and compared in the place of megabytes of prompts."""

    def with_prompts(self, prompts: DeepPrompts) -> OpenedTerms:
        return replace(self, prompts=prompts, prompts_digest=_native.blake3_digest(prompts.values))

    @property
    def kind(self) -> tuple[Span, HiddenForm, Profile, bool, bytes]:
        """A session becomes a copy only of one that has the same kind."""
        return self.span, self.form, self.profile, self.keep_outputs, self.prompts_digest
