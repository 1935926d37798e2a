"""Benchmarks as a user runs them, with little to measure: the figures are in `tests/bench/README.md`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from llmnode.node.batch_generate import AT_ONCE_PER_STAGE
from process import in_process
from process.forked import Forked

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]
BENCH = [*LLMNODE, "bench"]
TOKENS, CHUNKS = 2, 2


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `llmnode bench` in this process. Its servers are copies of one that has done their imports: see `forked.py`.

    The benchmarks of the daily run start theirs as a user does.
    """
    with patch.object(subprocess, "Popen", Forked):
        return in_process.llmnode("bench", *arguments)


@pytest.mark.timeout(920)  # some 140 s, and twice that where the machine is slow: eight servers, one after the other
def test_quality_compares_every_variant_with_transformers() -> None:
    options = ["--json", "--thin", "--tokens", str(TOKENS), "--chunks", str(CHUNKS)]
    done = bench("quality", *options)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    baseline, raw, *lossy, whole, in_int8 = report["rows"]
    kept = [row["variant"] for row in lossy] + report["environment"]["left_out"]
    assert kept[:3] == ["activations in fp16", "activations in bf16", "activations in int8"]
    assert set(kept[3:]) == {"servers in bf16", "servers in fp16", "weights in int8", "weights in nf4", "KV in int8"}

    assert baseline["variant"] == "transformers, fp32, 1 process"
    assert (baseline["forced: same"], baseline["free: same prefix"]) == (1, TOKENS)
    assert (raw["forced: same"], raw["free: same prefix"]) == (1, TOKENS)
    assert raw["change of NLL, %"]["estimate"] == pytest.approx(0, abs=1e-3)
    assert 10 < baseline["next word, %"] < 60
    assert raw["next word, %"] == pytest.approx(baseline["next word, %"], abs=100 / report["environment"]["words"])
    least_same = {"weights in int8": 0.8, "weights in nf4": 0.6}
    for row in lossy:
        change = row["change of NLL, %"]
        assert change["low"] <= change["estimate"] <= change["high"]
        assert change["estimate"] != 0, f"{row['variant']} is lossy"
        assert abs(change["estimate"]) < (20 if row["variant"] == "weights in nf4" else 5)
        assert row["text: same"] > least_same.get(row["variant"], 0.9)
        assert row["tokens/s, of fp32's blocks"]["median"] > 0
    weights = {row["variant"]: row["weights, MB"] / baseline["weights, MB"] for row in [raw, *lossy]}
    assert weights["activations in int8"] == weights[raw["variant"]] < 0.19, "the same, in as few bits as it needs"
    assert weights["weights in nf4"] < 0.15 < weights["weights in int8"] < 0.26
    assert (whole["variant"], in_int8["variant"]) == ("llama-34m, weights in fp32", "llama-34m, weights in int8")
    assert in_int8["of fp32's, end to end"]["median"] == pytest.approx(
        in_int8["tokens/s, end to end"]["median"] / whole["tokens/s, end to end"]["median"]
    )
    exact, equal, *bounds, of_blocks, end_to_end = report["aims"]
    assert exact["holds"] and equal["holds"]
    assert (of_blocks["aim"], end_to_end["aim"]) == (">= 1.5", ">= 1.3")
    assert {aim["aim"] for aim in bounds} == {"<= 1"}
    assert report["environment"]["text"].startswith("pydoc_data.topics: ")


def test_more_chunks_than_text_are_refused() -> None:
    done = bench("quality", "--chunks", "100000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("llmnode: --chunks 100000: the text has ")


def test_the_swarm_of_any_model_is_compared_with_transformers_and_is_exact() -> None:
    done = bench("swarm", "--model", "llama-34m", "--repeats", "1", "--tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [row["variant"] for row in report["rows"]] == [
        "transformers, 1 process",
        "1 server",
        "2 servers",
        "3 servers",
    ]
    assert report["environment"]["model"] == "llama-34m"
    exact, *_speeds = report["aims"]
    assert exact["holds"] and exact["value"] == 0


def test_clients_are_compared_with_one_alone_and_are_exact(tmp_path: Path) -> None:
    drawn = tmp_path / "sharing.svg"
    command = ["clients", "--thin", "--repeats", "1", "--tokens", "4", "--plot", str(drawn), "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    levels = [(row["level"], row["variant"]) for row in report["rows"][:4]]
    assert levels == [(level, each) for level in ("session.step", "end to end") for each in ("1 client", "8 clients")]
    assert [row["of one client"]["median"] for row in report["rows"][:4:2]] == [1, 1]
    besides = [row["level"].removeprefix("decodes beside ") for row in report["rows"][4:]]
    assert besides == ["a prefill", "a prefill", "training", "a prefill", "a prefill"]
    for row in report["rows"][4:]:
        assert row["p95, of alone"]["median"] > 0 and row["work, of alone"]["median"] > 0
    exact, *speeds = report["aims"]
    assert exact["holds"] and exact["value"] == 0
    assert [aim["aim"] for aim in speeds] == [">= 3", ">= 2.2", "<= 2.5", "<= 2.5", "<= 3", ">= 0.3"]
    assert report["environment"]["texts"] == 8
    assert all(name in drawn.read_text() for name in ("chunks of 512", "stretch 1.75", "chunks whole"))


def test_a_forward_of_a_batch_is_compared_with_one_process_and_is_exact() -> None:
    command = ["forward", "--thin", "--repeats", "1", "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [row["batch"] for row in report["rows"]] == ["1 x 128", "4 x 128"]
    for row in report["rows"]:
        one, both = (row[f"of 1 process, threads of {servers}"]["median"] for servers in ("one server", "both"))
        assert row["positions/s"]["median"] > 0 and one > 0 and both > 0
    exact, speed = report["aims"]
    assert exact["holds"] and exact["value"] == 0
    assert speed["aim"] == ">= 0.95"
    assert report["environment"]["positions"] == 4 * 128


@pytest.mark.daily
def test_device_compares_servers_with_transformers_in_the_same_precision() -> None:
    command = ["device", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    command += ["--device", "cpu", "--model", "llama-34m", "--precision", "float32", "bfloat16"]
    done = in_process.llmnode("bench", *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    theirs, one, two, theirs_in_bf16, in_bf16 = report["rows"]
    assert [one["variant"], two["variant"], in_bf16["variant"]] == [
        "1 server, float32", "2 servers, float32", "1 server, bfloat16"
    ]  # fmt: skip
    columns = ["tokens/s, alone", "tokens/s, rows at once", "prompt, positions/s", "training, positions/s"]
    for column in columns:
        for row, other in ((one, theirs), (two, theirs), (in_bf16, theirs_in_bf16)):
            share = row[column]["median"] / other[column]["median"]
            assert row[f"{column}, of theirs"]["median"] == pytest.approx(share) and share > 0
    assert all(aim["holds"] for aim in report["aims"]) and len(report["aims"]) == 2
    assert one["transformers' tokens"] == two["transformers' tokens"] == 1
    assert 1e-4 < in_bf16["gradients, off by"] < 0.1, "it computes in 16 bits, and much the same"


def test_training_through_servers_learns_as_one_process_does_and_leaves_nothing() -> None:
    command = ["training", "--thin", "--repeats", "1", "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    one, alone, both, decodes, beside, small, large, memory = report["rows"]
    assert one["of one process"]["median"] > 0
    assert alone["of one client"]["median"] == 1 and both["of one client"]["median"] > 0
    assert decodes["p95, of alone"]["median"] > 0 and beside["speed, of alone"]["median"] > 0
    for row, values in ((small, 460_800), (large, 4_884_480)):  # numbers of the adapter, in 32 bits
        mib = 4 * values / 2**20
        assert mib < row["a version, MiB"] < 1.05 * mib + 0.3
        assert row["received, MiB"] > mib, "its gradients, and those for hidden states"
        assert 0 < row["sent, MiB"] < 0.9, "64 hidden states, six times: a version that is known is not sent again"
    assert memory["MiB"]["median"] > 0
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert aims["losses, off from one process"]["holds"]
    for name in ("sessions", "kv_tokens_reserved"):
        assert aims[f"{name} when the clients have gone"]["value"] == 0


@pytest.mark.daily
def test_table1_is_exact_whatever_fails_and_counts_what_was_drawn() -> None:
    done = in_process.llmnode("bench", "table1", "--thin", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert [row["tokens"] for row in report["rows"]] == [128] * 3 + [512] * 3
    ours, restarts, no_cache, ours_long, restarts_long, no_cache_long = report["rows"]
    for row in (ours, no_cache, ours_long, no_cache_long):
        assert row["at 0"]["median"] > 0
        assert row["at 0.02"]["median"] > 0
    for row, pauses in ((ours, 2), (ours_long, 1)):
        assert row["pauses"] == row["pause / prefill"]["repeats"] == pauses
        assert row["until replaced, ms"]["low"] > 0
        for overhead in (row["recovery costs, %"], row["with receipts, %"]):
            assert overhead["low"] <= overhead["estimate"] <= overhead["high"]
    (steps,) = re.findall(r"128 tokens, restarts.* failure rate 0.02: .*calculated: (\d+) steps", done.stderr)
    assert int(steps) > 5 * 128
    assert restarts["timed"].endswith("; at 0.02 calculated")
    assert restarts_long["at 0.02"] == "-", "nobody gets through 512 steps"
    assert no_cache_long["at 0"]["median"] < ours_long["at 0"]["median"]

    assert report["environment"]["indirect_steps"] < 0.1 * report["environment"]["choices"]
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert len(aims) == 6
    assert aims["wrong tokens"]["value"] == 0
    assert aims["near ties, of all choices"]["holds"]
    assert report["environment"]["choices"] > 300


@pytest.mark.daily
def test_table2_is_within_the_limit_of_its_links_and_of_what_servers_are_charged() -> None:
    command = ["table2", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    done = in_process.llmnode("bench", *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    one_form = [
        ("steps at 128", 1), ("steps at 128", 2), ("forward of rows: 2", 1), ("training forward of rows: 2", 1),
    ]  # fmt: skip
    assert [(row["what"], row["clients"]) for row in report["rows"]] == 2 * one_form
    real, charged = report["rows"][: len(one_form)], report["rows"][len(one_form) :]
    assert {row["form"] for row in real} == {"SmolLM2-135M"}
    for row in report["rows"]:
        assert 0 < row["a second"]["median"] <= row["limit"]["median"], "a link has a way round its proxy"
        assert row["CPU ms: proxies"]["median"] > 0
    # Three ways of 50 ms through two servers, each of which has five of BLOOM's 70 blocks. A step takes its all 741 ms.
    least_s = 3 * 0.05 + 10 / 70 / 1.35
    assert least_s < 1 / charged[0]["limit"]["median"] < 1.1 * least_s
    assert charged[0]["of the limit"]["median"] > 0.5
    assert real[0]["CPU ms: blocks"]["median"] > 0 == charged[0]["CPU ms: blocks"]["median"]
    at_most = report["aims"][-1]
    assert at_most["name"] == "of the limit, at most" and at_most["holds"]


def test_forwarding_compares_direct_with_relayed_steps_over_links_of_a_known_delay() -> None:
    command = ["forwarding", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    done = bench(*command)
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
    assert aims["different texts of all variants and rounds"]["holds"]
    assert aims["prefills of all variants and rounds, most apart"]["holds"]
    assert {"at 20 ms: waiting over relayed", "at 20 ms: step over compute and 4 ways of TCP"} <= aims.keys()


def test_plan_forecasts_the_route_that_a_session_takes() -> None:
    command = ["plan", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {row["quantity"]: row for row in report["rows"]}
    assert rows.keys() == {"tokens/s", "first token, s", "servers compute, ms", "the rest of a token, ms"}
    # Four ways of 15 ms; three servers whose ten blocks take 3 ms and 2.5 ms, twice.
    assert rows["the rest of a token, ms"]["forecast"] >= 60
    assert rows["servers compute, ms"]["forecast"] >= 80
    assert all(0.3 < row["forecast"] / row["measured"]["median"] < 3 for row in rows.values())
    *_errors, routes = report["aims"]
    assert routes["holds"]


@pytest.mark.daily
def test_routing_tries_every_route_and_takes_the_nearer_of_two_equal_servers() -> None:
    command = ["routing", "--thin", "--tokens", "4", "--json"]
    done = in_process.llmnode("bench", *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    row, decisions = report["rows"]
    assert (row["routes"], row["hops of the best"]) == (2, 2)
    # Three ways of 2 ms or more, 30 blocks of 1 ms; the other route has two ways of 30 ms more.
    assert 36 < row["the best, ms"] < row["the median, ms"]
    assert row["chosen"] == row["chosen after sessions"] == row["beam of 1"] == 1.0
    assert decisions["a decision, ms"] > decisions["the search, ms"] > 0


def test_checkouts_compares_this_one_with_itself() -> None:
    root = Path(__file__).parents[2]
    command = ["bench", "checkouts", str(root), "--thin", "--repeats", "1", "--tokens", "2", "--json"]
    done = in_process.llmnode(*command)  # its nodes are of that checkout
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["swarm"] == "1 server, 1 client"
    for quantity in ("time", "CPU of nodes", "CPU of workers", "CPU of clients"):
        assert 0.05 < row[f"{quantity}, ratio"]["median"] < 20, quantity


def test_workers_compares_a_thread_with_a_process_alone_and_under_load() -> None:
    command = ["workers", "--thin", "--repeats", "1", "--tokens", "4", "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(row["what"], row["worker"]) for row in report["rows"]] == [
        (what, worker)
        for what in ("crossing, 1 position", "crossing, 512 positions", "hop, idle", "hop, under load")
        for worker in ("thread", "process")
    ]
    for row in report["rows"]:
        assert 0 < row["p50, ms"]["median"] <= row["p99, ms"]["median"]
    assert [aim["aim"] for aim in report["aims"]] == ["<= 0.3"] * 4


@pytest.mark.daily
def test_a_pipeline_of_three_nodes_is_faster_than_one_and_no_faster_than_its_stages_can_be(tmp_path: Path) -> None:
    drawn = tmp_path / "pipeline.svg"
    options = ["--thin", "--repeats", "2", "--tokens", "6", "--plot", str(drawn), "--json"]
    done = in_process.llmnode("bench", "pipeline", *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    alone, _both, _three_in_turn, three = report["rows"]
    texts = f"3 nodes, emulated: {3 * AT_ONCE_PER_STAGE} texts at once"
    assert three["variant"] == texts
    assert three["of 1 node, in turn"]["high"] > 1
    assert 0 < three["of the bound"]["median"] < 1.1, "no stage works for longer than it takes"
    assert 0 < three["of the bound alone"]["median"] < AT_ONCE_PER_STAGE, "for no less than one of them costs"
    assert 0 < three["slowest stage, ms"]["median"] < 0.5 * alone["slowest stage, ms"]["median"]
    assert f"of the bound, {texts}" in {aim["name"] for aim in report["aims"]}
    assert b"<svg" in drawn.read_bytes()


def test_a_soak_leaves_no_session_and_no_kv_and_every_choice_is_exact() -> None:
    command = ["soak", "--thin", "--json"]
    done = bench(*command)
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


@pytest.mark.daily
def test_churn_kills_a_server_and_starts_it_again_while_texts_stay_exact() -> None:
    command = ["churn", "--thin", "--json"]
    done = in_process.llmnode("bench", *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (row,) = report["rows"]
    assert row["servers"] == 4 and row["sessions"] > 0 and row["tokens/s"] > 0
    assert done.stderr.count("killing ") == report["environment"]["kills"] == 1
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert aims["tokens that are not transformers', and no near tie"]["value"] == 0
    assert aims["sessions that failed"]["value"] == 0


def test_packing_is_measured_on_hidden_states_that_it_makes_smaller() -> None:
    from bench.codec.packing import packings
    from llmnode.core.policy import PackPolicy

    most = {"float32": 0.88, "float32 of bfloat16": 0.4, "float16": 0.92, "bfloat16": 0.75}
    measured = list(packings())
    assert [(each.values, each.positions) for each in measured] == [(name, n) for name in most for n in (512, 1)]
    for each in measured:
        each.measure(keep=True)
        row = each.row()
        assert 0.3 < row["of the bytes"] < most[each.values], each.values
        assert row["pays below, MB/s"].median == pytest.approx(PackPolicy().margin * row["is done below, MB/s"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads what only Linux says of processes")
def test_memory_is_accounted_for() -> None:
    done = subprocess.run(
        [*BENCH, "memory", "--thin", "--json"], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {row["server"]: row for row in report["rows"]}
    tensors = [rows[f"S, {blocks} blocks"]["tensors"] for blocks in (1, 4, 8)]
    assert tensors[2] == pytest.approx(2 * tensors[1]) == pytest.approx(8 * tensors[0])
    reserved, used = (
        rows[f"S, 8 blocks: one session, 4096 reserved, {used} used"]["resident"] for used in ("none", "20")
    )
    assert used - reserved < 20, "128 MiB are reserved"
    ready, full, closed = (
        rows[f"S, 8 blocks{what}"]["resident"] for what in ("", ": 8 sessions, all KV used", ": sessions closed")
    )
    assert closed - ready < 0.3 * (full - ready), "KV that is freed is given back"
    *ours, _petals = report["aims"]
    assert [aim["holds"] for aim in ours] == [True] * 3


@pytest.mark.daily
def test_pefts_own_tests_pass_or_do_not_apply() -> None:
    command = [*BENCH, "peft-tests", "--thin", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode == 2 and "cannot be downloaded" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["counts"]["passed"] > 5
    assert "failed" not in report["counts"]
    outcomes = {each["outcome"] for each in report["tests"] if each["test"] == "test_training_decoders"}
    assert "passed" in outcomes
