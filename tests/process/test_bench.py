"""Benchmarks as a user runs them, with little to measure: the figures are in `tests/bench/README.md`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]

BENCH = [sys.executable, "-P", "-m", "llmnode.node", "bench"]
QUALITY = [*BENCH, "quality", "--json"]
LLMNODE = BENCH[:-1]
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


@pytest.mark.timeout(620)  # some 90 s of nothing else, but eight servers want more than two cores
def test_table1_is_exact_whatever_fails_and_counts_what_was_drawn() -> None:
    done = subprocess.run(
        [*BENCH, "table1", "--thin", "--json"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [row["tokens"] for row in report["rows"]] == [128] * 3 + [1024] * 3
    ours, restarts, no_cache, ours_long, restarts_long, no_cache_long = report["rows"]
    for row in (ours, no_cache, ours_long, no_cache_long):
        assert row["at 0"]["median"] > 0
        assert row["at 0.01"]["median"] > 0
    for row, pauses in ((ours, 2), (ours_long, 1)):
        assert row["pauses"] == row["pause / prefill"]["repeats"] == pauses
        assert row["until replaced, ms"]["low"] > 0
        for overhead in (row["recovery costs, %"], row["with receipts, %"]):
            assert overhead["low"] <= overhead["estimate"] <= overhead["high"]
    assert restarts["at 0.01"]["median"] < 0.2 * restarts["at 0"]["median"]
    assert restarts["timed"].endswith("; at 0.01 calculated")
    assert restarts_long["at 0.01"] == "-", "nobody gets through 1024 steps"
    assert no_cache_long["at 0"]["median"] < ours_long["at 0"]["median"]

    assert report["environment"]["indirect_steps"] < 0.1 * report["environment"]["choices"]
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert len(aims) == 6
    assert aims["wrong tokens"]["value"] == 0
    assert aims["near ties, of all choices"]["holds"]
    assert report["environment"]["choices"] > 300


def test_forwarding_compares_direct_with_relayed_steps_over_links_of_a_known_delay() -> None:
    command = [*LLMNODE, "bench", "forwarding", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [(row["round trip, ms"], row["path"]) for row in report["rows"]] == [
        (0, "direct"), (0, "relayed"), (20, "direct"), (20, "relayed"),
    ]  # fmt: skip
    assert [row["went direct"] for row in report["rows"]] == [1, 0, 1, 0]
    # Through no link is there a way round its proxy: four delays of 10 ms, and six.
    assert report["rows"][2]["waiting"]["low"] >= 40
    assert report["rows"][3]["waiting"]["low"] >= 60
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert aims["different outputs of all variants and rounds"]["holds"]
    assert {"at 20 ms: waiting over relayed", "at 20 ms: step over compute and 4 ways of TCP"} <= aims.keys()


def test_a_soak_leaves_no_session_and_no_kv_and_every_choice_is_exact() -> None:
    command = [*LLMNODE, "bench", "soak", "--thin", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    seen = report["environment"]
    assert seen["sessions"] >= 3 and seen["tokens"] > 0 and seen["choices_compared"] > 0
    assert seen["errors"] == []
    aims = {aim["name"]: aim for aim in report["aims"]}
    for name in ("wrong tokens", "sessions that failed", "sessions in the end", "kv_tokens_reserved in the end"):
        assert aims[name]["value"] == 0
    quantities = {(row["process"], row["quantity"]) for row in report["rows"]}
    assert {("a server", "streams"), ("a server", "memory, MiB"), ("the clients", "tasks")} <= quantities
    for row in report["rows"]:  # whether it holds is not to be seen in so short a time
        assert row["slope an hour"]["low"] <= row["slope an hour"]["estimate"] <= row["slope an hour"]["high"]
    assert "a server: files grew, %, low end of the interval" in aims


def test_a_soak_that_is_interrupted_leaves_no_process_behind() -> None:
    command = [*LLMNODE, "bench", "soak", "--thin", "--minutes", "10", "--saturate"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(" min, " in line for line in process.stderr), "it never began"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    _, alive = psutil.wait_procs(children, timeout=20)
    for child in alive:
        child.kill()
    assert not alive, f"left behind: {alive}"
    assert process.returncode == 130
    assert len(children) > 4, "servers, proxies and burners"
