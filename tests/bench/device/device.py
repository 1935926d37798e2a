"""`tests/bench/run device`: servers whose blocks are on a GPU, or another device, against transformers on the same one.

For each precision the servers start, transformers loads the model in the same precision, and all take turns within each
round. A ratio compares two values of one round. The client is in this process, and has the ends of the model on its
CPU. Each of its tokens is judged by transformers on the device, teacher-forced. LoRA is trained on the side: gradients
against those of PEFT over transformers' model, and speed.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import trio
from transformers import BitsAndBytesConfig

from bench.kit.exact import Reference
from bench.kit.options import add_model, add_repeats, add_thin, add_threads, add_tokens
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, Series, at_most, exact_tokens, rounds
from bench.training.trainer import Adapter, Trainer, local_trainer, remote_trainer
from llmnode.client.model import connect
from llmnode.compute.loading import device_named
from llmnode.core.model import AUTO, EXACT, PRECISIONS
from llmnode.core.span import Span, split_evenly
from llmnode.errors import single_error
from llmnode.node.processes import all_ready, private_swarm

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.core.model import Precision
    from llmnode.models.sources.folder import ModelFolder

ALONE, AT_ONCE = "tokens/s, alone", "tokens/s, rows at once"
PROMPT, TRAINED = "prompt, positions/s", "training, positions/s"
OF_THEIRS = ", of theirs"
READY_S, EQUAL, GRADIENTS = "ready, s", "transformers' tokens", "gradients, off by"
MOST_GRADIENT_ERROR = 1e-4
ADAPTER = Adapter(8)


@dataclass(frozen=True, slots=True)
class _Size:
    """Tokens of a short prompt and of a long one, rows at once, and the rows and tokens of a step of training."""

    short: int = 12
    long: int = 1024
    rows: int = 16
    trained: tuple[int, int] = (8, 128)


THIN = _Size(6, 32, 2, (2, 16))


class _Variant:
    """Servers, or transformers if there are no `spans`. `texts` are what it has generated, each with its start."""

    def __init__(self, name: str, spans: Sequence[Span] = (), more: Sequence[str] = ()) -> None:
        self.name = name
        self.spans = spans
        self.more = more
        self.series = Series()
        self.texts: set[tuple[int, tuple[int, ...]]] = set()
        self.found: Row = {}

    def note(self, values: Mapping[str, float], theirs: Mapping[str, float]) -> None:
        """Takes the values of a round, and those of transformers in the same round."""
        self.series.note(values)
        if self.spans:
            self.series.note({name + OF_THEIRS: value / theirs[name] for name, value in values.items()})

    def row(self) -> Row:
        return {"variant": self.name} | self.found | self.series.row()


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default=AUTO,
        help="where the blocks are, as for `llmnode serve` (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=list(PRECISIONS),
        default=[EXACT.name],
        metavar="NAME",
        help="one or more to serve in, such as float32, bfloat16, bfloat16+nf4 (default: float32)",
    )
    add_model(parser)
    add_repeats(parser, 3)
    add_tokens(parser, 64)
    add_threads(parser)
    add_thin(parser)


async def run(options: Options) -> Report:
    rows: list[Row] = []
    aims: list[Aim] = []
    options.device = device_named(options.device)
    with opened(options.model) as folder, single_error():
        for name in options.precision or ():
            rig = _Rig(options, folder, PRECISIONS[name])
            await rig.measure()
            rows += rig.rows()
            aims += rig.aims()
    size = THIN if options.thin else _Size()
    return Report(rows, aims, {"model": folder.name, "device": _name_of(options.device), "prompt": size.long})


class _Rig:
    """Servers in one precision, and transformers' model in the same."""

    def __init__(self, options: Options, folder: ModelFolder, precision: Precision) -> None:
        self._options = options
        self._folder = folder
        self._precision = precision
        self._size = THIN if options.thin else _Size()
        self._wrong = self._vocabulary = 0
        self._gradient_error = 0.0
        blocks = folder.info.blocks
        self._theirs = _Variant(f"transformers, {precision.name}")
        self._ours = [_Variant(f"1 server, {precision.name}", [Span(0, blocks)])]
        if precision == EXACT:
            self._ours.append(_Variant(f"2 servers, {precision.name}", split_evenly(blocks, 2)))
        if precision == EXACT and options.device != "cpu":
            more = ("--kv-device", "cpu")
            self._ours.append(_Variant(f"1 server, {precision.name}, KV on the CPU", [Span(0, blocks)], more))

    async def measure(self) -> None:
        reference = await trio.to_thread.run_sync(partial(Reference, self._folder.path, **self._of_theirs()))
        self._vocabulary = reference.vocabulary
        async with AsyncExitStack() as stack:
            peers = []
            for variant in self._ours:
                began_s = time.perf_counter()
                peers.append(await stack.enter_async_context(self._servers(variant)))
                variant.found[READY_S] = time.perf_counter() - began_s
            await trio.to_thread.run_sync(self._measure_texts, reference, peers)
            await trio.to_thread.run_sync(self._measure_training, peers)
        await trio.to_thread.run_sync(self._judge, reference)

    def _of_theirs(self) -> dict[str, Any]:  # Any: as transformers takes them
        """The options of `from_pretrained` that give this precision on the device."""
        dtype = getattr(torch, self._precision.dtype)
        options: dict[str, Any] = {"dtype": dtype, "device_map": self._options.device}  # Any: likewise
        skipped: dict[str, Any] = {"llm_int8_skip_modules": ["lm_head", "score"]}  # Any: likewise
        if self._precision.quant == "nf4":
            four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
            options["quantization_config"] = BitsAndBytesConfig(**four_bits, **skipped)
        elif self._precision.quant == "int8":
            options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, **skipped)
        return options

    @asynccontextmanager
    async def _servers(self, variant: _Variant) -> AsyncIterator[list[str]]:
        """The addresses of servers that are ready."""
        form = self._precision
        flags = ["--device", self._options.device, "--dtype", form.dtype, "--quant", form.quant]
        flags += ["--kv-dtype", form.kv_dtype, *variant.more]
        threads, path = self._options.threads, str(self._folder.path)
        async with private_swarm(variant.spans, threads=threads, model=path, options=flags) as servers:
            await all_ready(servers)
            yield [server.address for server in servers]

    def _measure_texts(self, reference: Reference, peers: Sequence[Sequence[str]]) -> None:
        torch.set_num_threads(self._options.threads)
        with ExitStack() as stack:
            models = [stack.enter_context(connect(str(self._folder.path), peers=each)) for each in peers]
            for number in rounds(self._options.repeats, thin=self._options.thin):
                theirs = self._speeds(self._theirs, reference.model)
                found = [self._speeds(variant, model) for variant, model in zip(self._ours, models, strict=True)]
                self._note_round(number, [theirs, *found])

    def _note_round(self, number: int, found: Sequence[Mapping[str, float]]) -> None:
        """Notes what each variant has in a round. Transformers' comes first."""
        for variant, values in zip([self._theirs, *self._ours], found, strict=True):
            if number >= 0:
                variant.note(values, found[0])

    def _speeds(self, variant: _Variant, model: Any) -> dict[str, float]:  # Any: as transformers types its models
        size, tokens = self._size, self._options.tokens

        def generate(rows: int, length: int, tokens: int) -> float:
            """Returns the seconds that `tokens` more of each of the rows take."""
            generator = torch.Generator().manual_seed(length)
            prompts = torch.randint(1, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
            began_s = time.perf_counter()
            texts = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            ).tolist()
            took_s = time.perf_counter() - began_s
            variant.texts.update((length, tuple(text)) for text in texts)
            return took_s

        return {
            ALONE: tokens / generate(1, size.short, tokens),
            AT_ONCE: size.rows * tokens / generate(size.rows, size.short, tokens),
            PROMPT: size.long / generate(1, size.long, 1),
        }

    def _measure_training(self, peers: Sequence[Sequence[str]]) -> None:
        torch.set_num_threads(self._options.threads)
        rows, tokens = self._size.trained
        texts = torch.randint(1, self._vocabulary, (rows, tokens))
        with ExitStack() as stack:
            theirs = local_trainer(self._folder, ADAPTER, **self._of_theirs())
            ours = [stack.enter_context(remote_trainer(each, ADAPTER, str(self._folder.path))) for each in peers]
            theirs.gradients(texts)
            for variant, trainer in zip(self._ours, ours, strict=True):
                trainer.gradients(texts)
                variant.found[GRADIENTS] = error = _gradient_error(trainer, theirs)
                self._gradient_error = max(self._gradient_error, error)
            for number in rounds(self._options.repeats, thin=self._options.thin):
                found = [{TRAINED: texts.numel() / _seconds(partial(each.step, texts))} for each in (theirs, *ours)]
                self._note_round(number, found)

    def _judge(self, reference: Reference) -> None:
        for variant in self._ours:
            judged = [reference.judge(text, range(start, len(text))) for start, text in sorted(variant.texts)]
            ties, wrong = (sum(counts) for counts in zip(*judged, strict=True))
            variant.found[EQUAL] = 1 - (ties + wrong) / sum(len(text) - start for start, text in variant.texts)
            self._wrong += wrong

    def rows(self) -> Iterator[Row]:
        yield from (variant.row() for variant in (self._theirs, *self._ours))

    def aims(self) -> Iterator[Aim]:
        if self._precision == EXACT:
            yield exact_tokens(self._wrong)
            yield at_most("gradients, off from PEFT's in one process", self._gradient_error, MOST_GRADIENT_ERROR)


def _gradient_error(trainer: Trainer, expected: Trainer) -> float:
    """The largest difference of a gradient, as a share of the largest gradient."""
    found, wanted = (
        {name: each.grad.float().cpu() for name, each in sorted(one.model.named_parameters()) if each.grad is not None}
        for one in (trainer, expected)
    )
    assert found.keys() == wanted.keys(), "other parameters are trained"
    largest = max(float(each.abs().max()) for each in wanted.values())
    return max(float((found[name] - each).abs().max()) for name, each in wanted.items()) / largest


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device
