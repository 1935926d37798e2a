"""A model without its weights: enough to tell two models apart, and to size messages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, starmap
from typing import TYPE_CHECKING, Any

from llmnode.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

FP32_BYTES = 4
DTYPES = ("float32", "bfloat16", "float16")
"""The number formats in which blocks are computed. Only float32 is exact."""
QUANTS = ("none", "int8", "nf4")
"""The formats to which the weights of linear layers are rounded, in memory alone."""

AUTO = "auto"
"""Stands for the one that the swarm serves, or that suits the device."""
SAME = "same"
KV_DTYPES = (SAME, "int8")
"""The formats of keys and values: the one in which the blocks are computed, or 8 bits."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model is rounded: one each of `DTYPES`, `QUANTS` and `KV_DTYPES`."""

    dtype: str = "float32"
    quant: str = "none"
    kv_dtype: str = SAME

    @property
    def name(self) -> str:
        """All three in one word, for people and for the wire."""
        quant = "" if self.quant == "none" else f"+{self.quant}"
        kv_dtype = "" if self.kv_dtype == SAME else f"+kv-{self.kv_dtype}"
        return f"{self.dtype}{quant}{kv_dtype}"

    @property
    def is_known(self) -> bool:
        """Whether this llmnode can compute in it."""
        return self.name in PRECISIONS


PRECISIONS = {each.name: each for each in starmap(Precision, product(DTYPES, QUANTS, KV_DTYPES))}


EXACT = PRECISIONS["float32"]


@dataclass(frozen=True, slots=True)
class PrecisionWish:
    """The parts of a precision that somebody insists on. Each that is None may be any of its kind."""

    dtype: str | None = None
    quant: str | None = None
    kv_dtype: str | None = None

    def allows(self, precision: Precision) -> bool:
        """Whether `precision` has all the named parts."""
        pairs = (self.dtype, precision.dtype), (self.quant, precision.quant), (self.kv_dtype, precision.kv_dtype)
        return all(asked in (None, held) for asked, held in pairs)

    @property
    def nearest(self) -> Precision:
        """The precision with the named parts that is nearest to exact."""
        return Precision(self.dtype or EXACT.dtype, self.quant or EXACT.quant, self.kv_dtype or EXACT.kv_dtype)

    @classmethod
    def of(cls, dtype: str, quant: str, kv_dtype: str) -> PrecisionWish:
        """From names, each of which may be "auto"."""
        return cls(*(None if name == AUTO else name for name in (dtype, quant, kv_dtype)))

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return None in (self.dtype, self.quant, self.kv_dtype)


def wish_named(name: str) -> PrecisionWish:
    """The precision of this `name` and no other, or any if it is "auto". Raises ConfigError."""
    if name == AUTO:
        return PrecisionWish()
    if (only := PRECISIONS.get(name)) is None:
        raise ConfigError(f"there is no dtype {name!r}: choose one of {', '.join([AUTO, *PRECISIONS])}")
    return PrecisionWish.of(only.dtype, only.quant, only.kv_dtype)


def precision_named(name: str) -> Precision:
    """The precision of that `name`. A name that a newer peer uses gives a precision that equals no known one."""
    return PRECISIONS.get(name) or Precision(name)


@dataclass(frozen=True, slots=True)
class Profile:
    """Two servers of one profile compute the same from the same hidden states. Peers compare profiles whole.

    `adapter` is the digest of an adapter's weights, 32 bytes; None is the model as it is.
    """

    model_digest: bytes
    precision: Precision
    adapter: bytes | None = None

    @property
    def key(self) -> tuple[bytes, str, bytes]:
        """An order for lists of profiles."""
        return self.model_digest, self.precision.name, self.adapter or b""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as one node uses it.

    Two nodes use the same one if their profiles are equal; the other fields are for people and for limits.

    `digest` is 32 bytes: the origin and the fingerprint of the weights, hashes of their layout and of the config
    (`core/identity.py`).
    Hidden states between blocks are fp32 in every precision. `context_tokens` is the longest sequence that the model
    was made for, and `context_reason` says what is beyond it, if anything.
    """

    name: str
    digest: bytes
    blocks: int
    hidden_size: int
    context_tokens: int
    precision: Precision = PRECISIONS["float32"]
    context_reason: str = ""
    adapter: bytes | None = None

    @property
    def profile(self) -> Profile:
        return Profile(self.digest, self.precision, self.adapter)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ModelInfo:  # Any: as `asdict` types them
        """The one of which `asdict` made `values`."""
        return cls(**{**values, "precision": Precision(**values["precision"])})

    @property
    def context_text(self) -> str:
        """For messages."""
        return f"{self.context_tokens}" + (f" ({self.context_reason})" if self.context_reason else "")

    @property
    def row_bytes(self) -> int:
        """Size of one position's hidden state between blocks."""
        return FP32_BYTES * self.hidden_size
