"""`llmnode bench quality` as a user runs it, with little to measure: the figures are in `tests/bench/README.md`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]

QUALITY = [sys.executable, "-P", "-m", "llmnode.node", "bench", "quality", "--json"]
TOKENS, CHUNKS = 2, 2


def test_quality_compares_every_variant_with_transformers() -> None:
    command = [*QUALITY, "--tokens", str(TOKENS), "--chunks", str(CHUNKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    baseline, raw, *lossy = report["rows"]
    kept = [row["variant"] for row in lossy] + report["environment"]["left_out"]
    assert kept[:3] == ["activations in fp16", "activations in bf16", "activations in int8"]
    assert set(kept[3:]) == {"servers in bf16", "servers in fp16"}

    assert baseline["variant"] == "transformers, fp32, 1 process"
    assert (baseline["forced: same"], baseline["free: same prefix"]) == (1, TOKENS)
    assert (raw["forced: same"], raw["free: same prefix"]) == (1, TOKENS)
    assert raw["change of NLL, %"]["estimate"] == pytest.approx(0, abs=1e-3)
    for row in lossy:
        change = row["change of NLL, %"]
        assert change["low"] <= change["estimate"] <= change["high"]
        assert change["estimate"] != 0, f"{row['variant']} is lossy"
        assert abs(change["estimate"]) < 5
        assert row["text: same"] > 0.9
    exact, equal, *bounds = report["aims"]
    assert exact["holds"] and equal["holds"]
    assert {aim["aim"] for aim in bounds} == {"<= 1"}
    assert report["environment"]["text"].startswith("pydoc_data.topics: ")


def test_more_chunks_than_text_are_refused() -> None:
    done = subprocess.run([*QUALITY, "--chunks", "100000"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("llmnode: --chunks 100000: the text has ")
