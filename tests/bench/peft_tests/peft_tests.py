"""`tests/bench/run peft-tests`: PEFT's own tests of decoder models, with a small model whose blocks three servers have.

The tests are in PEFT's source package, and not in its wheel: `suite.py` gets that from the package registry. A run of
pytest with `plugin.py` gives them distributed models instead of whole ones. It prints how many passed, and for those
that do not apply why not; the exit status is that of the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from bench.kit.options import add_thin
from bench.peft_tests.suite import MODELS, copy_tests, name_all, save_model, unpacked
from llmnode.core.span import split_evenly
from llmnode.node.processes import all_ready, private_swarm
from llmnode.node.stopping import run_async

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options

BLOCKS = 3
SERVERS = 3
LEFT_OUT = "the servers of a run have one model, and these are cases of others"
THIN = (
    "(test_training_decoders or test_generate) and loraconfig and not "
    "(adalora or gralora or glora or delora or randlora or vblora or unilora or tinylora)"
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keyword", metavar="WORDS", default="", help="run the tests that -k of pytest chooses")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="PEFT's source package (default: it is downloaded)")
    families = f"of {', '.join(MODELS)}, one after the other (default: llama)"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama"], metavar="FAMILY", help=families)
    add_thin(parser)


def run(options: Options) -> int:
    """Run the tests and print their results. Returns the exit status."""
    tests = unpacked(options.sdist)
    keyword = THIN if options.thin else options.keyword
    found: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}
    for family in options.models:
        with tempfile.TemporaryDirectory() as made:
            folder, results = Path(made, "run"), Path(made, "results.json")
            copy_tests(tests, folder)
            save_model(folder / MODELS[family], family, BLOCKS)
            name_all(folder, MODELS[family])
            status = run_async(_run_tests, family, folder, results, keyword)
            if not results.is_file():
                print(f"pytest ended with status {status}, and has run nothing with {family}")
                return 1
            ran = json.loads(results.read_text())
        found += [{"model": family, **each} for each in ran["tests"]]
        left_out |= ran["left_out"]
    served = {MODELS[family] for family in options.models}
    _show(found, {name: count for name, count in left_out.items() if name not in served}, options.json)
    return 1 if any(each["outcome"] == "failed" for each in found) or not found else 0


async def _run_tests(family: str, folder: Path, results: Path, keyword: str) -> int:
    """Run pytest in `folder`, beside the servers. Returns its status."""
    command = [sys.executable, "-m", "pytest", "-p", "bench.peft_tests.plugin", "tests/test_decoder_models.py"]
    command += ["-q", "--no-header", "--tb=short", "--show-capture=no", "-k", keyword]
    async with private_swarm(split_evenly(BLOCKS, SERVERS), threads=1, model=str(folder / MODELS[family])) as servers:
        await all_ready(servers)
        environment = {
            **os.environ,
            "LLMNODE_CONFIG": os.devnull,
            "LLMNODE_PEFT_FAMILY": family,
            "LLMNODE_PEFT_PEERS": json.dumps([each.address for each in servers]),
            "LLMNODE_PEFT_RESULTS": str(results),
            "HF_HUB_OFFLINE": "1",
            "HF_TOKEN": "",
            "OMP_NUM_THREADS": "1",
        }
        ran = await trio.run_process(command, check=False, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    return ran.returncode


def _show(found: list[dict[str, Any]], left_out: dict[str, int], as_json: bool) -> None:
    """`left_out` counts the cases of models that were not served."""
    counts = Counter(each["outcome"] for each in found)
    if as_json:
        print(json.dumps({"counts": counts, "left out": {"reason": LEFT_OUT, "cases": left_out}, "tests": found}))
        return
    print(f"\nleft out, since {LEFT_OUT}: {sum(left_out.values())}")
    for name, count in left_out.items():
        print(f"  {count:4}  {name}")
    for outcome in ("not applicable", "skipped"):
        reasons = Counter(each["reason"] for each in found if each["outcome"] == outcome)
        print(f"\n{outcome}: {counts[outcome]}")
        for reason, count in reasons.most_common():
            print(f"  {count:4}  {reason}")
    for each in found:
        if each["outcome"] == "failed":
            print(f"\nFAILED {each['test']} [{each['model']}, {each['config']}]\n{each['reason']}")
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
