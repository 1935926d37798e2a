"""A profile's wire form: the same fields in every message that has one.

The precision's field is called `dtype`, its name since protocol 1. `adapter` is left out where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypedDict

from llmnode.core.model import Profile, precision_named

if TYPE_CHECKING:
    from llmnode.wire.fields import Digest, Name


class ProfileFields(TypedDict):
    model_digest: bytes
    dtype: str
    adapter: bytes | None


class HasProfile(Protocol):
    """A message with these fields."""

    @property
    def model_digest(self) -> Digest: ...

    @property
    def dtype(self) -> Name: ...

    @property
    def adapter(self) -> Digest | None: ...


def profile_fields(profile: Profile) -> ProfileFields:
    return {"model_digest": profile.model_digest, "dtype": profile.precision.name, "adapter": profile.adapter}


def profile_of(message: HasProfile) -> Profile:
    return Profile(message.model_digest, precision_named(message.dtype), message.adapter)
