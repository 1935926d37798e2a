"""The Rust extension: what is measured to be hot, functions of bytes, protocol machines
without I/O, and forwards of a few positions.

Its source is in `transport_rs/`.

A buffer is anything of the buffer protocol that is C-contiguous and has a shape: `bytes`, `bytearray`, `memoryview`,
NumPy arrays of any element type, read-only ones too. It is read in place, as the bytes that lie in memory. Do not write
to it during a call, nor read an `out`: from 1 MiB on, and in a forward, the GIL is released, and the result would be
that of bytes which never stood there together.

All functions raise `TypeError` for what is no buffer, and `BufferError` for a buffer with gaps or in another order
(`array[::2]`, `array.T`) or without a shape (a 0-d array), or for an `out` that is read-only.

The blockwise codec makes 8 bits of each value: the scale of a block is its largest magnitude, a code says how much of
it a value is. `[scales: float32, little-endian][codes: a byte each]`; dtype, block and code map are not in there, both
sides must know them. What is guaranteed stands in `transport_rs/src/codec/mod.rs`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer as _PythonBuffer

# NumPy's stubs call an array a buffer only from Python 3.12 on.
_Buffer: TypeAlias = _PythonBuffer | NDArray[Any]  # any element type will do

_Dtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
_Code: TypeAlias = Literal["linear", "dynamic"]

__all__ = [
    "Connection",
    "LlamaAdapter",
    "LlamaBlocks",
    "NoiseHandshake",
    "NoiseSession",
    "Product",
    "SequenceSlabs",
    "__version__",
    "are_within",
    "blake3_digest",
    "blake3_digest_parts",
    "crc32c",
    "dequantize_blockwise",
    "dequantize_blockwise_into",
    "frame_crc32c",
    "pack",
    "pack_q4",
    "pack_q8",
    "quantize_blockwise",
    "quantize_blockwise_into",
    "quantized_bytes",
    "unpack",
    "widen",
]

__version__: str
"""The version of the crate that this was built from."""

def crc32c(data: _Buffer, seed: int = 0) -> int:
    """The CRC-32C (Castagnoli) of `data`, going on from `seed`, the CRC of what came before it.

    `crc32c(b, crc32c(a))` is the CRC of `a` followed by `b`. Raises `OverflowError` unless 0 <= seed < 2**32.
    """

def frame_crc32c(parts: Sequence[_Buffer]) -> int:
    """The CRC-32C of `parts` as if they were joined, without joining them."""

def blake3_digest(data: _Buffer) -> bytes:
    """The BLAKE3 digest of `data`, 32 bytes. One thread, whatever the size."""

def blake3_digest_parts(parts: Sequence[_Buffer]) -> bytes:
    """The BLAKE3 digest of `parts` as if they were joined, without joining them: 32 bytes."""

def quantized_bytes(count: int, block: int = 64) -> int:
    """The length of `count` quantized values, of any dtype and with either code map: 4 bytes a block, 1 a value."""

def quantize_blockwise(
    data: _Buffer, dtype: _Dtype, *, block: int = 64, code: _Code = "dynamic", threads: int = 1
) -> bytes:
    """The values of `data`, which are `dtype` in this machine's byte order, as `[scales][codes]`.

    `block`: how many values share a scale, a power of two from 64 to 4096. One that divides the length of a row keeps
    rows apart: each is then quantized as if it were alone.
    `code`: "linear" has the multiples of scale / 127; "dynamic" is the map of Dettmers et al., fine near zero and
    coarse near the scale.
    `threads`: a limit; each gets at least 4 MiB of values. The result depends neither on it nor on the processor.

    Raises `ValueError` for a NaN or an infinity, naming the first; for bytes that are no whole number of values; and
    for a dtype, block or code that there is not.
    """

def quantize_blockwise_into(
    data: _Buffer, dtype: _Dtype, out: _Buffer, *, block: int = 64, code: _Code = "dynamic", threads: int = 1
) -> None:
    """As `quantize_blockwise`, into the `quantized_bytes(count, block)` bytes of `out`, without reserving memory.

    Raises `ValueError` too for an `out` of another length or one that shares memory with `data`. After an error its
    contents are not specified.
    """

def dequantize_blockwise(
    data: _Buffer, dtype: _Dtype, count: int, *, block: int = 64, code: _Code = "dynamic", threads: int = 1
) -> bytearray:
    """The `count` values in `data` as `dtype`, which need not be the one they were quantized from. They are finite.

    `data` may come from anywhere. Raises `ValueError` if it is not as long as `count` values are, before any memory is
    reserved; for a scale that is negative, not finite or beyond `dtype`; and for a dtype, block or code that there is
    not. `OverflowError` for a negative count.
    """

def dequantize_blockwise_into(
    data: _Buffer, dtype: _Dtype, out: _Buffer, *, block: int = 64, code: _Code = "dynamic", threads: int = 1
) -> None:
    """As `dequantize_blockwise`, into `out`, whose length says how many values there are, without reserving memory.

    Raises `ValueError` too for an `out` that shares memory with `data`. After an error its contents are not specified.
    """

def are_within(data: _Buffer, width: int, largest: int, *, signed: bool = True) -> bool:
    """Whether the bits of all numbers in `data`, of `width` bytes (2 or 4, little-endian), are at most `largest`.

    `signed`: their sign is left out. The bits of infinities and NaNs are larger than those of all numbers.

    Raises `ValueError` for another width, and for bytes that are no whole number of values; `OverflowError` for a
    `largest` that is not of 32 bits.
    """

def pack(data: _Buffer, width: int) -> bytes:
    """`data` in fewer bytes without loss, if it is numbers of floating point of `width` bytes, 2 or 4.

    Their exponents go through zstd, see `transport_rs/src/packing.rs`. What is no such number comes out some bytes
    longer. Raises `ValueError` for another width, and from 4 GiB on.
    """

def unpack(packed: _Buffer, bytes_max: int) -> bytearray:
    """The bytes that `pack` was given, whatever their width.

    `packed` may come from anywhere. Raises `ValueError` if it is not what `pack` makes, and if it would be more than
    `bytes_max`, before any memory is reserved. `OverflowError` for negative `bytes_max`.
    """

_Events: TypeAlias = tuple[list[int], list[int], list[int], list[int]]
"""The streams that the other side opened, that can be read (data, or their end), that can be written again, and that
the other side reset."""

@final
class NoiseHandshake:
    """The handshake `Noise_XX_25519_ChaChaPoly_SHA256`, each message with its 16-bit length, as libp2p has it.

    The initiator sends, receives, sends; the other side the reverse. What the payloads prove is the caller's to verify,
    before it uses the session. Raises `ValueError` for a message that is malformed, forged or out of turn; the
    handshake is then of no use any more.
    """

    def __new__(cls, static_key: bytes, *, initiator: bool, swarm_key: bytes | None = None) -> NoiseHandshake:
        """`static_key`: a private X25519 key, 32 bytes. Raises `ValueError` for another length.

        With the `swarm_key`, 32 bytes too, of a private swarm it is `Noise_XXpsk0_25519_ChaChaPoly_SHA256`: who has
        another one, or none, cannot complete it.
        """

    def send(self, payload: _Buffer) -> bytes:
        """The next message, to be sent as it is."""

    def receive(self, data: _Buffer) -> bytes | None:
        """The payload of the other side's next message, once `data`, of any length, completes it."""

    @property
    def remote_static_key(self) -> bytes | None:
        """The other side's public X25519 key: what its payload must be signed for."""

    def finish(self) -> tuple[NoiseSession, bytes]:
        """The session, and the bytes that arrived after the handshake. The handshake is of no use any more."""

@final
class NoiseSession:
    """Both directions of an encrypted connection, after its handshake."""

    def seal(self, data: _Buffer) -> bytes:
        """`data`, of any length, as messages to be sent in the order of the calls."""

    def open(self, data: _Buffer) -> bytes:
        """The plaintext of all messages that `data`, of any length, completes.

        Raises `ValueError` for what the other side did not encrypt as its next message; the session is then of no use.
        """

@final
class Connection:
    """Streams (`/yamux/1.0.0`) over a Noise session: what the socket gives goes in, what it is to send comes out.

    What it holds is bounded whatever the other side does, see `Limits` in `transport_rs/src/yamux/mod.rs`. After
    `ValueError`, which says what the other side did against the protocol, `seal_output` still has the farewell.
    """

    def __new__(cls, session: NoiseSession, *, initiator: bool) -> Connection:
        """`session` is taken over, and of no use to the caller any more."""

    def receive(self, data: _Buffer, now_s: float) -> _Events:
        """Take what the socket gave. Raises `ValueError`.

        `now_s` counts from any moment: now and then the other side is asked for a sign, to know how long the way is.
        """

    def receive_plaintext(self, data: _Buffer, now_s: float) -> _Events:
        """Take what `session` had decrypted before it came here. Raises `ValueError`."""

    def open_stream(self) -> int | None:
        """The number of a new stream, which may be used at once. None: as many as may be are open; try again later.

        Raises `EOFError` if no stream can be opened on this connection any more.
        """

    def has_stream(self, stream: int) -> bool:
        """Whether the stream is open in at least one direction, or unread."""

    def write(self, stream: int, data: _Buffer, *, gently: bool = False) -> int | None:
        """How many bytes from the front of `data` were taken: 0 if the window is used up, or too much waits to be sent.

        If `gently`, no more than the other side takes in soon; the stream is writable again when it has. None if the
        stream was closed or is gone.
        """

    def read(self, stream: int, bytes_max: int, now_s: float, window_bytes: int) -> bytes | None:
        """What has arrived, up to `bytes_max`. Empty: the stream has ended or is gone. None: nothing has arrived yet.

        `now_s` counts from any moment: how fast a window is used up decides whether it grows, up to `window_bytes`.
        """

    def close_stream(self, stream: int) -> None:
        """Send the end of the stream. It can still be read."""

    def reset_stream(self, stream: int) -> None:
        """Give the stream up in both directions."""

    def go_away(self) -> None:
        """Say that the connection is about to end."""

    def seal_output(self) -> bytes:
        """Take all that is to be sent, encrypted."""

_Floats: TypeAlias = NDArray[np.float32]
_Halves: TypeAlias = tuple[Literal["bfloat16", "float16"], NDArray[np.uint16]]
_Q4: TypeAlias = tuple[Literal["q4"], NDArray[np.uint8], _Floats]  # as `pack_q4` writes them
_Q8: TypeAlias = tuple[Literal["q8"], NDArray[np.int8], _Floats]  # as `pack_q8` does
_Codes: TypeAlias = tuple[Literal["int8"], NDArray[np.int8], _Floats]  # with a scale for each output: LLM.int8
_KV: TypeAlias = tuple[_Floats, _Floats] | tuple[NDArray[np.int8], _Floats]
_Weight: TypeAlias = _Floats | _Halves | _Q4 | _Q8 | _Codes  # (outputs, inputs)

class _LlamaBlock(TypedDict):
    """The weights of a block, which stay where they are, and what it does with them.

    Products are joined: queries, keys and values; gate and up. `head_norms` are RMS norms of each head of queries and
    of keys, `scaling` is of scores of attention. Each position looks at `window`, itself too; None: at all.
    """

    attended_norm: _Floats
    qkv: _Weight
    qkv_bias: _Floats | None
    head_norms: tuple[_Floats, _Floats] | None
    output: _Weight
    output_bias: _Floats | None
    fed_norm: _Floats
    gate_up: _Weight
    gate_up_bias: _Floats | None
    down: _Weight
    down_bias: _Floats | None
    scaling: float
    is_rotated: bool
    window: int | None

def pack_q4(weights: _Floats, codes: NDArray[np.uint8], levels: _Floats) -> bool:
    """Whether `weights` are of 4 bits: each of 32 that follow each other is a step, times 0 to 15, plus the least.

    As GGUF's Q4_1 and Q4_0 have them, whose steps are of `binary16`. Of each 32 are written 16 bytes of `codes`, the
    first 16 weights in their lower halves, and step and least into `levels`; what, if this is False, is not specified.

    Raises `ValueError` if `out` is not exactly as long, or if any two of the three overlap.
    """

def pack_q8(weights: _Floats, codes: NDArray[np.int8], steps: _Floats) -> bool:
    """As `pack_q4`, of 8 bits, as GGUF's Q8_0 has them: each of 32 weights is their step, times -127 to 127."""

def widen(weight: _Q4 | _Q8, out: _Floats) -> None:
    """Write the weights that `pack_q4` or `pack_q8` was given into `out`, exactly. The GIL is released.

    Raises `ValueError` if they are not as many as `out` holds, or if that overlaps them.
    """

@final
class Product:
    """Of a few rows with a weight, which stays where it is. Exact as `LlamaBlocks` is."""

    def __new__(cls, weight: _Weight, outputs: int, inputs: int, threads: int) -> Product:
        """Raises as `LlamaBlocks`."""

    def into(self, rows: _Floats, out: _Floats) -> None:
        """Write the product of `rows`, (rows, inputs), into `out`, (rows, outputs). The GIL is released.

        Raises `ValueError` if those are of other sizes, or if `out` overlaps what is read.
        """

@final
class LlamaBlocks:
    """Blocks of the Llama kind, for forwards of a few positions: RMS norms, attention, a MLP gated by SiLU.

    What comes out at a position depends neither on what else is in the forward nor on threads or vectors: not by a bit.
    """

    def __new__(
        cls,
        blocks: Sequence[_LlamaBlock],
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        inner: int,
        epsilon: float,
        frequencies: Sequence[float],
        rotary_scaling: float,
        threads: int,
    ) -> LlamaBlocks:
        """`frequencies` are of rotary embeddings, halves of a head as pairs. `threads`: 1 is the caller's own.

        Raises `ValueError` for sizes that are no multiples of 16, heads of queries that do not share those of keys
        evenly, and weights that do not fit; `TypeError`, naming the weight, for one that is in no form of `_Weight`,
        or not aligned.
        """

    @staticmethod
    def is_fast() -> bool:
        """Whether this processor has vector instructions that we know. Without, torch is faster."""

    def forward(
        self,
        first: int,
        end: int,
        pieces: Sequence[tuple[SequenceSlabs, int, int, _Buffer]],
        adapters: Sequence[LlamaAdapter | None] | None = None,
    ) -> list[bytes]:
        """Hidden states after the blocks `[first, end)`, of each piece: positions of a sequence that follow each other.

        A piece is `(slabs, passed, start, hidden states before those blocks)`: the first `passed` of its slabs are of
        blocks before. `adapters` has the adapter of each piece; neighbours with the same one are computed together. The
        GIL is released.

        Raises `ValueError` for a piece that does not fit its slabs, that is no whole number of positions, or goes
        through blocks that are not here, and for adapters that do not fit these blocks or pieces; `RuntimeError` if a
        sequence is given twice.
        """

_Update: TypeAlias = tuple[int, _Floats, _Floats, float]
"""To some outputs of a joined product, from the first number on, `scale * b (a x)` is added.

It is `(first, a, b, scale)`. `a` is `(rank, inputs)`, and `b` is `(rank, outputs)`, with outputs a multiple of 16."""

class _Updates(TypedDict):
    """The updates of the linear layers of one block, which stay where they are."""

    qkv: Sequence[_Update]
    output: Sequence[_Update]
    gate_up: Sequence[_Update]
    down: Sequence[_Update]

@final
class LlamaAdapter:
    """Low-rank updates of `LlamaBlocks`: `y = W x` becomes `y = W x + scale * b (a x)`."""

    def __new__(cls, of_blocks: Sequence[_Updates]) -> LlamaAdapter:
        """One for each block of those that it is for. Sizes are checked in a forward."""

@final
class SequenceSlabs:
    """Where keys and values of one sequence lie, of each block.

    As they are: keys and values, `(kv_heads, capacity, head_dim)` each. Or in 8 bits, first the keys: codes,
    `(2, kv_heads, capacity, head_dim)`, and the scale of each position and head, `(2, kv_heads, capacity)`.
    """

    def __new__(cls, of_blocks: Sequence[_KV], capacity: int) -> SequenceSlabs:
        """No other `SequenceSlabs` may have the same memory. Raises `ValueError` for slabs that overlap."""
