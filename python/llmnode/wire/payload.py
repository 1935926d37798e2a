"""Hidden states as bytes: fp32 in memory, on the wire as a session's codec says.

`raw` is exact. The others are lossy and chosen by the client for a whole session: `fp16` and `bf16` halve the bytes,
`int8` takes a quarter (blockwise with the dynamic map; its quality is in `transport_rs/README.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.model import FP32_BYTES
from llmnode.errors import ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.wire.frame import Buffer, Frame

    Piece = tuple[Buffer, int]
    """A payload, and its number of positions."""

_FP16_MAX = 65504
_FP16_LARGEST = 0x7BFF
_FP16_LARGEST_IN_FP32 = 0x477FE000
_FP32_LARGEST = (127 + 56) << 23
"""2^56, as the bits of fp32. Their upper half is the same number in bf16."""
_INT8_BLOCK = 64
"""Values that share a scale: the default of `_native`."""


class Codec(StrEnum):
    """How hidden states cross the wire."""

    RAW = "raw"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


def payload_bytes(codec: Codec, values: int) -> int:
    """Size of `values` fp32 values on the wire."""
    match codec:
        case Codec.RAW:
            return FP32_BYTES * values
        case Codec.FP16 | Codec.BF16:
            return 2 * values
        case Codec.INT8:
            return _native.quantized_bytes(values)


def encode_hidden(hidden: Buffer, codec: Codec) -> Buffer:
    """fp32 `hidden` as it crosses the wire. Raises ConfigError for values that the codec cannot carry."""
    match codec:
        case Codec.RAW:
            return hidden
        case Codec.FP16:
            return _to_fp16(hidden)
        case Codec.BF16:
            return _to_bf16(hidden)
        case Codec.INT8:
            try:
                return _native.quantize_blockwise(hidden, "float32")
            except ValueError as error:
                raise ConfigError(f"hidden states cannot be sent as int8 ({error}): choose --codec raw") from error


def decode_hidden(payload: Buffer, codec: Codec, values: int) -> Buffer:
    """The `values` fp32 values of a payload of the right size. Raises RemoteProtocolError for bad scales."""
    match codec:
        case Codec.RAW:
            return payload
        case Codec.FP16:
            return _from_fp16(payload)
        case Codec.BF16:
            return _from_bf16(payload)
        case Codec.INT8:
            try:
                return _native.dequantize_blockwise(payload, "float32", values)
            except ValueError as error:
                raise RemoteProtocolError(f"hidden states in int8: {error}") from error


@dataclass(frozen=True, slots=True)
class HiddenForm:
    """The form of the payloads of one session."""

    hidden_size: int
    codec: Codec

    @property
    def value_bytes(self) -> int:
        """The size of a number of floating point in a payload; 0 if it has none. See `Frame`."""
        match self.codec:
            case Codec.RAW:
                return FP32_BYTES
            case Codec.FP16 | Codec.BF16:
                return 2
            case Codec.INT8:
                return 0

    def check(self, frame: Frame) -> None:
        """Require the payload to be hidden states (length, hidden_size) in this codec, with length >= 1."""
        expected = self.bytes_of(frame.length)
        if frame.length < 1 or len(frame.payload) != expected:
            raise RemoteProtocolError(
                f"{frame.type.name}: {len(frame.payload)} bytes for {frame.length} positions, expected {expected}"
            )

    def check_values(self, frame: Frame) -> None:
        """Require that blocks can compute with the numbers of a frame that `check` has passed."""
        if not self.is_sound(frame.payload, frame.length):
            raise RemoteProtocolError(f"{frame.type.name}: hidden states that are no numbers, or too large")

    def is_sound(self, payload: Buffer, length: int) -> bool:
        """Whether the hidden states of `length` positions are finite, and below 2^56 (in fp16: at most 65504).

        The sum of the squares of larger ones overflows fp32 in a norm: what comes of it would be no numbers.
        """
        match self.codec:
            case Codec.INT8:
                scales = memoryview(payload)[: len(payload) - length * self.hidden_size]
                return _native.are_within(scales, FP32_BYTES, _FP32_LARGEST, signed=False)
            case Codec.RAW:
                return _native.are_within(payload, FP32_BYTES, _FP32_LARGEST)
            case Codec.BF16:
                return _native.are_within(payload, 2, _FP32_LARGEST >> 16)
            case Codec.FP16:
                return _native.are_within(payload, 2, _FP16_LARGEST)

    def can_carry(self, hidden: Buffer) -> bool:
        """Whether fp32 `hidden` can be encoded, and is sound then. Costs one look at each number."""
        largest = _FP16_LARGEST_IN_FP32 if self.codec is Codec.FP16 else _FP32_LARGEST
        return _native.are_within(hidden, FP32_BYTES, largest)

    def bytes_of(self, positions: int) -> int:
        """The size of a payload."""
        return payload_bytes(self.codec, positions * self.hidden_size)

    def work_bytes(self, positions: int) -> int:
        """The memory for hidden states while a step is computed: decoded, computed and encoded again."""
        fp32_bytes = FP32_BYTES * positions * self.hidden_size
        return fp32_bytes if self.codec is Codec.RAW else 2 * fp32_bytes + self.bytes_of(positions)

    def pass_work_bytes(self, positions: int, halves: int) -> int:
        """The memory for a pass while it is computed: its `halves` decoded (hidden states, or also gradients), the
        results as they come, and these put together and encoded.
        """
        fp32_bytes = FP32_BYTES * positions * self.hidden_size
        decoded_bytes = (halves - 1 if self.codec is Codec.RAW else halves) * fp32_bytes
        return decoded_bytes + 2 * fp32_bytes + self.bytes_of(positions) * (self.codec is not Codec.RAW)

    def encode(self, hidden: Buffer) -> Buffer:
        return encode_hidden(hidden, self.codec)

    def decode(self, frame: Frame) -> Buffer:
        """The fp32 hidden states of a frame that `check` has passed."""
        return decode_hidden(frame.payload, self.codec, frame.length * self.hidden_size)

    def join(self, pieces: Sequence[Piece]) -> Buffer:
        """One payload of the positions of all `pieces`, in order, each with the hidden states that it had.

        Only where rows share int8's blocks they are quantized anew, and differ by its error.
        """
        if len(pieces) == 1:
            return pieces[0][0]
        if self.codec is not Codec.INT8:
            return b"".join(payload for payload, _ in pieces)
        if self.rows_share_blocks:
            return self.encode(b"".join(decode_hidden(*self._sized(piece)) for piece in pieces))
        edges = [length * self._row_scale_bytes for _, length in pieces]
        scales = (memoryview(payload)[:edge] for (payload, _), edge in zip(pieces, edges, strict=True))
        codes = (memoryview(payload)[edge:] for (payload, _), edge in zip(pieces, edges, strict=True))
        return b"".join([*scales, *codes])

    def cut(self, piece: Piece, start: int, stop: int) -> Buffer:
        """The payload of positions [start, stop) of `piece`, copied: a view would keep all of the piece in memory."""
        payload, length = memoryview(piece[0]), piece[1]
        if self.codec is not Codec.INT8:
            row_bytes = payload_bytes(self.codec, self.hidden_size)
            return bytes(payload[start * row_bytes : stop * row_bytes])
        if self.rows_share_blocks:
            row_bytes = self.hidden_size * FP32_BYTES
            return self.encode(memoryview(decode_hidden(*self._sized(piece)))[start * row_bytes : stop * row_bytes])
        scales = payload[start * self._row_scale_bytes : stop * self._row_scale_bytes]
        codes = payload[length * self._row_scale_bytes :]
        return b"".join([scales, codes[start * self.hidden_size : stop * self.hidden_size]])

    @property
    def _row_scale_bytes(self) -> int:
        return payload_bytes(Codec.INT8, self.hidden_size) - self.hidden_size

    @property
    def rows_share_blocks(self) -> bool:
        """Then int8 payloads cannot be cut or joined as they are, and are quantized anew."""
        return self.hidden_size % _INT8_BLOCK != 0

    def _sized(self, piece: Piece) -> tuple[Buffer, Codec, int]:
        return piece[0], self.codec, piece[1] * self.hidden_size


def _to_fp16(hidden: Buffer) -> Buffer:
    import numpy as np

    values = np.frombuffer(hidden, dtype="<f4")
    if not (np.abs(values) <= _FP16_MAX).all():  # a NaN is not either
        raise ConfigError(f"hidden states exceed fp16's {_FP16_MAX}: choose --codec bf16, int8 or raw")
    return values.astype("<f2").data.cast("B")


def _from_fp16(payload: Buffer) -> Buffer:
    import numpy as np

    return np.frombuffer(payload, dtype="<f2").astype("<f4").data.cast("B")


def _to_bf16(hidden: Buffer) -> Buffer:
    """The upper halves of fp32, rounded to nearest, ties to even. A NaN keeps its upper half, made quiet."""
    import numpy as np

    bits = np.frombuffer(hidden, dtype="<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype("<u2").data.cast("B")


def _from_bf16(payload: Buffer) -> Buffer:
    import numpy as np

    return (np.frombuffer(payload, dtype="<u2").astype("<u4") << 16).data.cast("B")
