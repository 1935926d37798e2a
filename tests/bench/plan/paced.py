"""`llmnode serve` for the benchmarks `plan` and `routing`: the blocks of `pipeline.charged`, in a time that the
environment gives.

Positions of a prompt take a share of it. So servers are as fast as the benchmark wants, on a machine with fewer cores.
"""

from __future__ import annotations

import os
import random
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from bench.pipeline.charged import ChargedExecutor
from llmnode.compute.loading import SpanLoader
from llmnode.core.policy import BatchPolicy, ProbePolicy, ServePolicy
from llmnode.core.serving import load_average
from llmnode.node.cli import main, run
from llmnode.node.serve import network_speed
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.compute.loading import Wanted
    from llmnode.core.operations import Buffer, Slice
    from llmnode.core.span import Span
    from llmnode.core.speed import NetworkSpeed
    from llmnode.ports import Executor

BLOCK_US = "LLMNODE_BENCH_BLOCK_US"
HOST = "LLMNODE_BENCH_HOST"
QUIET = "LLMNODE_BENCH_QUIET"
"""Variables of the environment: the time of a block; the address from which the server dials, if it is not that of all;
and a file: if it is named, the server measures its network every `AGAIN_S`, but not while the file is there."""
AGAIN_S = 2.0
LOOK_S = 0.1
PROMPT_SHARE = 0.1
"""A position of a prompt takes this share of a decode."""
FLOAT_BYTES, LOW_BYTES = 4, 2
"""The size of a value, and the bytes of it that are zeros in an embedding which was stored in 16 bits."""


class PacedExecutor(ChargedExecutor):
    """Its prompts take time for each position. Links can pack its hidden states no better than those of real blocks."""

    def __init__(self, real: Executor, block_s: float) -> None:
        super().__init__(real, block_s)
        self._position_s = PROMPT_SHARE * block_s

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        decodes = [each for each in slices if each.length <= BatchPolicy().decode_positions]
        prompts = [each for each in slices if each.length > BatchPolicy().decode_positions]
        time.sleep(
            sum(self._position_s * each.length * len(each.blocks(self._spans[each.session])) for each in prompts)
        )
        computed = iter(super().forward(decodes))
        return [next(computed) if each in decodes else self._passed(each) for each in slices]

    def _passed(self, each: Slice) -> Buffer:
        hidden = super()._passed(each)
        size = len(hidden)
        return (int.from_bytes(hidden, "little") | _low_bits(size)).to_bytes(size, "little")


@cache
def _low_bits(size: int) -> int:
    """Random bits where this number of bytes of an embedding has zeros. To have them twice changes nothing."""
    rng, zeros = random.Random(0), bytes(FLOAT_BYTES - LOW_BYTES)
    return int.from_bytes(b"".join(rng.randbytes(LOW_BYTES) + zeros for _ in range(size // FLOAT_BYTES)), "little")


class PacedLoader(SpanLoader):
    """Makes executors of one pace."""

    def __init__(self, wanted: Wanted, report: Callable[[str], None], block_s: float | None = None) -> None:
        super().__init__(wanted, report)
        self._block_s = int(os.environ[BLOCK_US]) / 1e6 if block_s is None else block_s

    def load(self, span: Span) -> Loaded:
        loaded = super().load(span)
        return Loaded(PacedExecutor(loaded.executor, self._block_s), loaded.tensor_bytes)

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        assert isinstance(held, PacedExecutor)
        loaded = super().load_beside(span, held.real, kv_tokens)
        return loaded and Loaded(PacedExecutor(loaded.executor, self._block_s), loaded.tensor_bytes)


def prepare() -> None:
    """Let this process be one of several servers on one machine: all have one address group, and dial by `HOST`."""
    _set(ServePolicy, probes_burst=1000, probes_per_s=100.0)
    forget_load_soon()
    if QUIET in os.environ:
        _set(ProbePolicy, again_s=AGAIN_S, soon_s=AGAIN_S)
        measure = _unless(Path(os.environ[QUIET]), network_speed.measure_network)
        network_speed.measure_network = measure  # type: ignore[assignment] # the arguments are those of the other
    if HOST in os.environ:
        trio.open_tcp_stream = partial(trio.open_tcp_stream, local_address=os.environ[HOST])


def forget_load_soon() -> None:
    """In servers and clients: what the sessions of one topology leave of a load would steer those of the next one."""
    load_average.HALF_LIFE_S = 1.0


def _unless(quiet: Path, measure: Callable[..., Awaitable[NetworkSpeed]]) -> Callable[..., Awaitable[NetworkSpeed]]:
    """`measure` waits while the file `quiet` is there: probes would take the links from what the benchmark measures."""

    async def measure_later(*arguments: Any, **options: Any) -> NetworkSpeed:  # Any: those of `measure`
        while await trio.Path(quiet).exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(LOOK_S)
        return await measure(*arguments, **options)

    return measure_later


def _set(policy: type[ProbePolicy | ServePolicy], **values: float) -> None:
    names, defaults = [*policy.__dataclass_fields__], list(policy.__init__.__defaults__ or ())
    assert len(names) == len(defaults)
    for name, value in values.items():
        defaults[names.index(name)] = value
    policy.__init__.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    prepare()
    run(lambda: main(make_loader=PacedLoader))
