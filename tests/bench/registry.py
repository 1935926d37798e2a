"""The benchmarks by name. The module of each has `add(parser)`, which declares its options, and `run(options)`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING

from bench.kit.report import Report
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

    from bench.kit.options import Options


@dataclass(frozen=True, slots=True)
class Bench:
    """`about` says in a line what it measures. Its module loads torch: it is imported when it is needed."""

    module: str
    about: str
    needs: tuple[str, ...] = ()
    """An example of the arguments that it cannot do without."""

    def declare(self, parser: argparse.ArgumentParser) -> None:
        self._imported().add(parser)

    def run(self, options: Options) -> Report | int:
        """The report, or an exit status if it prints for itself."""
        from llmnode.node.stopping import run_async

        run = self._imported().run
        result = run_async(run, options) if iscoroutinefunction(run) else run(options)
        assert isinstance(result, Report | int)
        return result

    def _imported(self) -> ModuleType:
        try:
            return import_module(f"bench.{self.module}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("bench", "llmnode"):
                raise
            raise ConfigError(f"this benchmark needs {error.name}: tests/bench/run sets up what is missing") from error


BENCHES = {
    "at-once": Bench("at_once", "how many texts at once are worth having, through real servers"),
    "checkouts": Bench(
        "checkouts.checkouts", "decodes of this checkout against those of another one, in turn", ("../older",)
    ),
    "churn": Bench("churn.churn", "twelve real servers that are killed and come back, and how they move meanwhile"),
    "clients": Bench("clients.clients", "1 to 16 clients of one server, and decodes beside a prefill or training"),
    "codec": Bench("codec.codec", "activations in 8 bits against bitsandbytes and others, and packing without loss"),
    "compiled": Bench("compiled", "what torch.compile gives a decode on a CPU"),
    "decodes": Bench("decodes", "decodes by Rust, by torch and by transformers' own forward"),
    "device": Bench("device.device", "servers whose blocks are on a GPU, against transformers on the same one"),
    "failures": Bench("failures.failures", "a session while its servers are killed, frozen, stopped and cut off"),
    "few-positions": Bench("few_positions", "up to how many positions Rust is faster than torch"),
    "forward": Bench("forward", "batches of rows through two servers against one process"),
    "forwarding": Bench("forwarding", "hidden states from server to server against by way of the client"),
    "hostile": Bench("hostile.hostile", "honest clients of real servers while hostile peers attack these"),
    "kv-dtype": Bench("kv_dtype", "decodes with KV in 8 bits"),
    "memory": Bench("memory", "the memory of a server against its tensors and its KV"),
    "narrow": Bench("narrow", "weights in as few bits as they need"),
    "opening": Bench("opening", "the time until a client has its first token from a swarm that is far away"),
    "peft-tests": Bench("peft_tests.peft_tests", "PEFT's own tests of decoder models, against a swarm"),
    "pipeline": Bench("pipeline.pipeline", "several texts at once through 1 to 4 servers"),
    "placement": Bench("placement.placement", "which blocks servers choose, against Petals' rule, optima and Helix"),
    "plan": Bench("plan.plan", "forecasts of `llmnode plan` against sessions, over links of several delays and rates"),
    "products": Bench("products", "matrix products of a few rows in several forms"),
    "quality": Bench("quality.quality", "tokens and likelihood under lossy codecs, dtypes and weights"),
    "ragged-attention": Bench("ragged_attention", "attention over sequences of unequal length"),
    "routing": Bench("routing.routing", "the route that a client chooses, against all routes tried one by one"),
    "sampling": Bench("sampling", "choosing a token against transformers' sampling"),
    "soak": Bench("soak.soak", "what servers have open after many sessions over links that break"),
    "spot-tolerance": Bench("spot_tolerance", "how far honest peers are apart, and how far a fake"),
    "swarm": Bench("swarm", "generation through 1, 2 and 3 servers against transformers in one process"),
    "table1": Bench("table1.table1", "the Petals paper's table of speeds when stages fail"),
    "table2": Bench("table2.table2", "the Petals paper's table of slow networks, as shares of the physical limit"),
    "token-loop": Bench("token_loop", "the client's token loop against transformers' generate, through a swarm"),
    "training": Bench("training.training", "clients that train LoRA through two servers, against one process"),
    "transformers-tests": Bench(
        "transformers_tests", "transformers' own tests of generate, against a swarm", ("../transformers",)
    ),
    "transport": Bench("transport.transport", "our Noise and yamux against go-libp2p, py-libp2p and bare TCP"),
    "workers": Bench("workers.workers", "a hop with its blocks in a thread, and in a process of their own"),
}
