"""`tests/bench/run quality`: what lossy codecs, dtypes and weights cost in tokens and likelihood, against transformers.

Two real server processes with uneven spans serve the embedded model. At the end the blocks of each precision are timed.
All other figures are the same in every run on one machine. Each variant gives its own greedy text after each prompt. It
also gives its next token at each position of the *baseline's* text: with teacher forcing, an early difference counts
once. For chunks of a text that comes with Python it gives the likelihood and the next words (`words.py`). `int8.py`
measures on another model how much faster weights of 8 bits are.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from bench.kit.decoding import decode_ratios
from bench.kit.options import add_thin, add_threads, add_tokens, count
from bench.kit.paired import change_percent, compare_choices, equal_prefix
from bench.kit.report import Report, Row, at_most, exactly
from bench.quality.int8 import measure_int8
from bench.quality.words import count_right, words_of
from llmnode.client.model import connect
from llmnode.core.model import PRECISIONS
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.embedded import open_embedded
from llmnode.models.text.tokenizer import load_tokenizer
from llmnode.node.processes import START_TIMEOUT_S, STOP_TIMEOUT_S, ServerDied
from llmnode.node.settings import without_settings
from llmnode.node.stopping import run_async
from llmnode.wire.payload import Codec, payload_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from llmnode.models.text.tokenizer import Tokenizer

PROMPTS = (
    "The three laws of thermodynamics are",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Dear Sir or Madam, I am writing to complain about",
    "Photosynthesis is the process by which",
    "To bake bread you need flour, water, salt and",
    "SELECT name, age FROM users WHERE",
    "Il était une fois une petite fille qui",
)
TOPICS = ("types", "compound", "specialnames")
"""Chapters of Python's Language Reference in `help()` (PSF licence): prose, code and lists, some 36,000 tokens."""
CHUNK_TOKENS = 128
SPANS = (Span(0, 11), Span(11, 30))
WHOLE = Span(0, 30)
NEAR_TIE = 0.1
"""The likeliest token leads the next by less than this logit: it is at most 1.1 times as likely."""
MOST_CHANGE_PERCENT = 1.0
SLOWEST = 10.0
"""A dtype is left out if its products take this multiple of fp32's time: this processor only emulates it."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """A lossy way to use the swarm. `dtype` is a precision, such as "float32+int8"."""

    name: str
    codec: Codec = Codec.RAW
    dtype: str = "float32"
    aim: bool = False
    """Whether its likelihood has to stay within `MOST_CHANGE_PERCENT`."""


RAW = _Variant("swarm, fp32, raw")
VARIANTS = (
    RAW,
    _Variant("activations in fp16", Codec.FP16),
    _Variant("activations in bf16", Codec.BF16, aim=True),
    _Variant("activations in int8", Codec.INT8, aim=True),
    _Variant("servers in bf16", dtype="bfloat16", aim=True),
    _Variant("servers in fp16", dtype="float16"),
    _Variant("weights in int8", dtype="float32+int8", aim=True),
    _Variant("weights in nf4", dtype="float32+nf4"),
    _Variant("KV in int8", dtype="float32+kv-int8", aim=True),
)


@dataclass(frozen=True, slots=True)
class _Material:
    """Token ids: prompts to continue, and chunks of text to score."""

    prompts: list[list[int]]
    chunks: list[list[int]]
    words: list[list[range]]
    """The words of each chunk."""
    text_sha256: str


@dataclass(slots=True)
class _Measured:
    """The results of one model. `gaps` are the leads of its first choice over its second, in logits."""

    free: list[list[int]] = field(default_factory=list)  # by prompt
    forced: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)  # the next token at each position of the chunks
    read_gaps: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)  # by chunk, summed over its tokens
    words: list[int] = field(default_factory=list)  # the number of right ones, by chunk
    tensor_bytes: int = 0  # the size of the weights of all blocks


def add(parser: argparse.ArgumentParser) -> None:
    add_tokens(parser, 32, "new tokens after each prompt")
    parser.add_argument(
        "--chunks", type=count(), default=32, metavar="N", help=f"of text, of {CHUNK_TOKENS} tokens (default 32)"
    )
    add_thin(parser)
    add_threads(parser)


def run(options: Options) -> Report:
    """`--thin` takes two prompts and two servers, for fp32 alone, and times the blocks once."""
    folder = open_embedded()
    assert SPANS[-1].end == folder.info.blocks
    material = _material(load_tokenizer(folder), PROMPTS[:2] if options.thin else PROMPTS, options.chunks)
    slowness = {dtype: _slowness(dtype) for dtype in dict.fromkeys(_plain(variant) for variant in VARIANTS)}
    variants = [variant for variant in VARIANTS if slowness[_plain(variant)] <= SLOWEST]

    print("transformers in one process", file=sys.stderr)
    whole = AutoModelForCausalLM.from_pretrained(folder.path, local_files_only=True).eval()
    baseline = _measure(whole, material, options.tokens)
    baseline.tensor_bytes = sum(each.nbytes for each in whole.model.layers.parameters())
    del whole
    measured = _measure_swarms(variants, options, material, baseline.free)
    print("speed of the blocks", file=sys.stderr)
    rounds = 1 if options.thin else 5
    speeds = decode_ratios(folder, SPANS[0], [variant.dtype for variant in variants], rounds=rounds)
    print("weights in int8 where all bits are needed", file=sys.stderr)
    name = "llama-34m" if options.thin else "llama-222m"
    gain = run_async(measure_int8, name, rounds, options.tokens, options.threads)

    words = sum(map(len, material.words))
    conditions = {
        "model": folder.info.name,
        "spans": [[span.start, span.end] for span in SPANS],
        "prompts": len(material.prompts),
        "tokens": options.tokens,
        "text": f"pydoc_data.topics: {', '.join(TOPICS)}",
        "text_sha256": material.text_sha256,
        "chunks": options.chunks,
        "chunk_tokens": CHUNK_TOKENS,
        "words": words,
        "near_tie_logits": NEAR_TIE,
        "near_ties": sum(gap < NEAR_TIE for gap in baseline.gaps),
        "slowness_of_dtypes": slowness,
        "left_out": [variant.name for variant in VARIANTS if variant not in variants],
    }
    rows = [_row("transformers, fp32, 1 process", baseline, baseline, words)]
    rows[0]["weights, MB"] = baseline.tensor_bytes / 1e6
    for variant, each in zip(variants, measured, strict=True):
        sent_bytes = payload_bytes(variant.codec, folder.info.hidden_size)
        memory: Row = {"weights, MB": each.tensor_bytes / 1e6, "tokens/s, of fp32's blocks": speeds[variant.dtype]}
        rows.append(_row(variant.name, each, baseline, words, sent_bytes) | memory)
    rows += gain.rows()
    aims = [*_aims(dict(zip(variants, measured, strict=True)), baseline), *gain.aims()]
    legend = (
        f"{options.tokens} tokens after each of {conditions['prompts']} prompts, {conditions['near_ties']} of them "
        f"near ties (lead below {NEAR_TIE:g} logits); {options.chunks} chunks of {CHUNK_TOKENS} tokens of Python's "
        f"reference ({conditions['text']}), {words} words of which are asked for; 95 % intervals; "
        "speed: median (lowest-highest)"
    )
    return Report(rows, aims, conditions, legend)


def _measure_swarms(
    variants: Sequence[_Variant], options: Options, material: _Material, texts: list[list[int]]
) -> list[_Measured]:
    """The results in the order of `variants`. Neighbours of the same dtype share their servers."""
    measured: list[_Measured] = []
    with ExitStack() as stack:
        dtype, servers = "", list[_Ready]()
        for variant in variants:
            print(variant.name, file=sys.stderr)
            if variant.dtype != dtype:
                stack.close()
                dtype = variant.dtype
                spans = (WHOLE,) if options.thin and variant != RAW else SPANS
                servers = stack.enter_context(_servers(spans, dtype, options.threads))
            peers = [server.address for server in servers]
            with connect(peers=peers, codec=variant.codec, dtype=variant.dtype) as model:
                measured.append(_measure(model, material, options.tokens, texts))
            measured[-1].tensor_bytes = sum(server.tensor_bytes for server in servers)
    return measured


@torch.inference_mode()
def _measure(
    model: Any, material: _Material, tokens: int, texts: list[list[int]] | None = None
) -> _Measured:  # Any: a transformers model, whole or with its blocks in a swarm
    """`texts` are forced after each prompt. By default they are the model's own."""
    measured = _Measured()
    model.generation_config.eos_token_id = None  # every text gets its full length
    for prompt in material.prompts:
        ids = torch.tensor([prompt])
        chosen = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        measured.free.append(chosen[0, len(prompt) :].tolist())
    for prompt, text in zip(material.prompts, texts or measured.free, strict=True):
        logits = model(torch.tensor([prompt + text]), logits_to_keep=tokens + 1).logits[0, :-1]  # (tokens, vocabulary)
        _note_choices(logits, measured.forced, measured.gaps)
    for chunk, words in zip(material.chunks, material.words, strict=True):
        ids = torch.tensor(chunk)
        logits = model(ids[None]).logits[0, :-1]  # (tokens - 1, vocabulary)
        _note_choices(logits, measured.read, measured.read_gaps)
        measured.words.append(count_right(words, chunk, measured.read[1 - len(chunk) :]))
        measured.nll.append(torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="sum").item())
    return measured


def _note_choices(logits: torch.Tensor, choices: list[int], gaps: list[float]) -> None:
    values, tokens = logits.topk(2)
    choices += tokens[:, 0].tolist()
    gaps += (values[:, 0] - values[:, 1]).tolist()


def _row(name: str, measured: _Measured, baseline: _Measured, words: int, sent_bytes: int = 0) -> Row:
    forced = compare_choices(baseline.forced, measured.forced, baseline.gaps, NEAR_TIE)
    read = compare_choices(baseline.read, measured.read, baseline.read_gaps, NEAR_TIE)
    row: Row = {
        "variant": name,
        "bytes/token": sent_bytes,
        "forced: same": forced.share,
        "differ": forced.differing,
        "near ties": forced.near_ties,
        "free: same prefix": statistics.mean(map(equal_prefix, baseline.free, measured.free)),
        "text: same": read.share,
        "text: differ": read.differing,
        "text: near ties": read.near_ties,
        "NLL/token": sum(measured.nll) / len(measured.read),
        "next word, %": 100 * sum(measured.words) / words,
    }
    if measured is not baseline:
        row["change of NLL, %"] = change_percent(baseline.nll, measured.nll)
        row["change of words, %"] = change_percent(baseline.words, measured.words)
    return row


def _aims(measured: Mapping[_Variant, _Measured], baseline: _Measured) -> Iterator[Aim]:
    raw = measured[RAW]
    forced = compare_choices(baseline.forced, raw.forced, baseline.gaps, NEAR_TIE).share
    equal = [equal_prefix(*texts) for texts in zip(baseline.free, raw.free, strict=True)]
    free = sum(equal) / sum(map(len, baseline.free))
    yield exactly(f"{RAW.name}: same token, forced", forced, 1)
    yield exactly(f"{RAW.name}: equal prefix of all that is generated", free, 1)
    for variant, each in measured.items():
        if variant.aim:
            change = change_percent(baseline.nll, each.nll)
            furthest = max(abs(change.low), abs(change.high))
            name = f"{variant.name}: |change of NLL| at the further end of its interval, %"
            yield at_most(name, furthest, MOST_CHANGE_PERCENT)


def _material(tokenizer: Tokenizer, prompts: Sequence[str], chunks: int) -> _Material:
    """Chunks from all over the text. Raises ConfigError if it has fewer than `chunks`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python comes without pydoc_data, whose text is needed: install all of it") from error
    text = "\n\n".join(topics[name] for name in TOPICS)
    # The tokenizer warns of a text that is longer than the model's context, so it gets paragraphs.
    ids = [token for paragraph in text.split("\n\n") for token in tokenizer.encode(f"{paragraph}\n\n")]
    most = len(ids) // CHUNK_TOKENS
    if chunks > most:
        raise ConfigError(f"--chunks {chunks}: the text has {most}")
    parts = [ids[start : start + CHUNK_TOKENS] for start in range(0, chunks * (len(ids) // chunks), len(ids) // chunks)]
    return _Material(
        [tokenizer.encode(prompt) for prompt in prompts],
        parts,
        [words_of([tokenizer.decode([each]) for each in part]) for part in parts],
        hashlib.sha256(text.encode()).hexdigest(),
    )


def _plain(variant: _Variant) -> str:
    return PRECISIONS[variant.dtype].dtype


@torch.inference_mode()
def _slowness(dtype: str) -> float:
    """The time of a product in `dtype`, as in a prefill, in multiples of fp32's."""

    def fastest_s(dtype: torch.dtype) -> float:
        layer = torch.nn.Linear(576, 1536, bias=False, dtype=dtype)
        rows = torch.ones(CHUNK_TOKENS, 576, dtype=dtype)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            layer(rows)
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    return fastest_s(getattr(torch, dtype)) / fastest_s(torch.float32)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The ready event of a server."""

    address: str
    tensor_bytes: int


@contextmanager
def _servers(spans: Sequence[Span], dtype: str, threads: int) -> Iterator[list[_Ready]]:
    """A server process for each of `spans`. They end with the context. Raises ServerDied.

    `private_swarm` cannot be used, since its servers compute in fp32.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(span, dtype, threads)) for span in spans]
        yield [_ready(span, process) for span, process in zip(spans, processes, strict=True)]


@contextmanager
def _process(span: Span, dtype: str, threads: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "llmnode.node", "serve", "--blocks", f"{span.start}:{span.end}"]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--json", "--until-stdin-closes"]
    asked = PRECISIONS[dtype]
    command += ["--dtype", asked.dtype, "--quant", asked.quant, "--kv-dtype", asked.kv_dtype]
    command += ["--threads", str(threads), "--device", "cpu"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=without_settings(os.environ),
        start_new_session=True,  # a Ctrl-C in the terminal does not reach it: it ends when its stdin closes
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(span: Span, process: subprocess.Popen[str]) -> _Ready:
    """Wait for a server's ready event. Its errors go to our stderr."""
    assert process.stdout is not None
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return _Ready(str(event["addresses"][0]), int(event["tensor_bytes"]))
    finally:
        timer.cancel()
    raise ServerDied(f"the server of blocks {span} ended before it was ready, or was not in {START_TIMEOUT_S:g} s")
