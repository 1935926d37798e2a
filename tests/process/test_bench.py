"""Benchmarks as a user runs them, with little to measure: the figures are in `tests/bench/README.md`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from process import in_process
from process.forked import CodeForked, Forked

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS, CHUNKS = 2, 2


def bench(*arguments: str, popen: type[Forked] = Forked) -> subprocess.CompletedProcess[str]:
    """Runs `llmnode bench` in this process. Its servers are copies of one that has done their imports (`forked.py`)."""
    with patch.object(subprocess, "Popen", popen):
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


def test_training_through_servers_learns_as_one_process_does_and_leaves_nothing() -> None:
    command = ["training", "--thin", "--repeats", "1", "--json"]
    done = bench(*command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    one, alone, both, decodes, beside, small, large, memory, adapters = report["rows"]
    assert one["of one process"]["median"] > 0
    assert alone["of one client"]["median"] == 1 and both["of one client"]["median"] > 0
    assert decodes["p95, of alone"]["median"] > 0 and beside["speed, of alone"]["median"] > 0
    for row, values in ((small, 460_800), (large, 4_884_480)):  # numbers of the adapter, in 32 bits
        mib = 4 * values / 2**20
        assert mib < row["a version, MiB"] < 1.05 * mib + 0.3
        assert row["received, MiB"] > mib, "its gradients, and those for hidden states"
        assert 0 < row["sent, MiB"] < 0.9, "64 hidden states, six times: a version that is known is not sent again"
    assert memory["MiB"]["median"] > 0
    assert adapters["MiB"]["low"] > 1, "the servers hold their halves of the last versions"
    aims = {aim["name"]: aim for aim in report["aims"]}
    assert aims["losses, off from one process"]["holds"]
    assert aims["adapter cache of a server within its budget, MiB"]["holds"]
    for name in ("sessions", "kv_tokens_reserved"):
        assert aims[f"{name} when the clients have gone"]["value"] == 0


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


def test_placement_compares_the_plan_with_newcomers_optima_and_published_layouts(tmp_path: Path) -> None:
    drawn = tmp_path / "figure-4.svg"
    done = bench("placement", "--thin", "--plot", str(drawn), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {row["variant"]: row for row in report["rows"]}
    newcomers, plan, bound = (rows[name] for name in ("new servers only", "the plan", "bound on all placements"))
    assert 0 <= newcomers["net tokens/s"] < plan["net tokens/s"] < bound["net tokens/s"]
    assert newcomers["moves"] == 0 < plan["moves"]
    assert rows["the plan, first 2 h, 5 boasters, 5 ghosts"]["net tokens/s"] > 0
    without, beside = (rows[f"the plan, first 2 h, {who}"] for who in ("no liars", "5 boasters, 5 ghosts"))
    assert beside["net tokens/s"] > 0.5 * without["net tokens/s"]
    assert "the plan" in drawn.read_text()
    assert rows["small cases: the plan"]["worst"] <= 1 <= rows["small cases: bound on all placements"]["worst"]
    assert rows["200 servers"]["plan, ms"] > 0
    assert "llama30b on 24 machines: stages and the plan, of the best layout" in {aim["name"] for aim in report["aims"]}


def test_placement_simulates_hundreds_of_hosts_that_come_and_go() -> None:
    done = bench("placement", "--churn", "80", "240", "--minutes", "2", "--blocks", "20", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["variant"].split()[0] for row in rows] == ["80", "240"]
    for row in rows:
        assert 0.3 < row["of the bound"] <= 1
        assert row["decisions"] > row["on at the end"] > 0, "each host that is on decides once a minute"
        assert row["CPU, s per virtual hour"] > 0
    assert rows[1]["net tokens/s"] > 2 * rows[0]["net tokens/s"]


def test_placement_simulates_the_hosts_and_the_trace_of_files(tmp_path: Path) -> None:
    hosts, trace = tmp_path / "hosts.csv", tmp_path / "trace.csv"
    hosts.write_text("host,tokens_per_s,blocks\nfast,40,8\nslow,10,4\nother,10,4\n")
    # The slow two hold all eight blocks. The fast one holds them alone, is there for half of the time, and goes.
    trace.write_text("host,from_s,to_s\nslow,0,7200\nother,0,7200\nfast,1800,5400\n")
    files = ["--hosts", str(hosts), "--trace", str(trace), "--thin", "--json"]
    done = bench("placement", *files, "--blocks", "8")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = {row["variant"]: row for row in report["rows"]}
    assert rows.keys() == {"bound on all placements", "new servers only", "the plan"}
    assert rows["bound on all placements"]["net tokens/s"] == pytest.approx((10 + 50) / 2)
    assert 25 < rows["the plan"]["net tokens/s"] <= 30
    assert (report["environment"]["hosts"], report["environment"]["blocks"]) == (3, 8)

    refused = bench("placement", *files, "--blocks", "17")
    assert refused.returncode == 2
    assert "have memory for 16 blocks together, and the model has 17: add hosts, or give" in refused.stderr
    hosts.write_text("host,tokens_per_s,blocks\nfast,40,8\nslow,quick,4\n")
    refused = bench("placement", *files)
    assert refused.returncode == 2
    assert f"{hosts}, line 3: tokens_per_s is 'quick': write a number from 0.001 to 1e" in refused.stderr


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
    command = [sys.executable, "-P", "-m", "bench", "soak", "--thin", "--minutes", "10", "--saturate"]
    with Forked(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(" min, " in line for line in process.stderr), "it never began"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=100)
        finally:
            process.kill()
            _, alive = psutil.wait_procs(children, timeout=20)
            for child in alive:
                child.kill()
    assert not alive, f"left behind: {alive}"
    assert process.returncode == 130
    assert len(children) > 4, "servers, proxies and burners"


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
    done = bench("memory", "--thin", "--json", popen=CodeForked)  # its servers start as users' do
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
