"""`serve`, `generate` and other commands, as a user runs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.core.span import Span
from process import forked, in_process
from process.described import positions
from process.forked import Forked
from process.other_policies import with_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.process, pytest.mark.slow]

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]
SHORT_S = 3
LOOKS_SHORTLY = with_policies({"RecoveryPolicy.timeout_s": SHORT_S})
"""`llmnode` whose sessions look for a replacement of a lost server for `SHORT_S`."""
PROMPT = "A prompt that is so long that it would be a waste to compute it anew for each of its answers:"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, once for each command. Otherwise `in_process` runs it in this one."""
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_generate_prints_the_text_and_its_json(nodes: list[Any]) -> None:
    addresses = [node.address for node in nodes]
    done = _run(*LLMNODE, "generate", "--json", "--max-new-tokens", "6", "--prompt", "1, 2, 3,", "--peers", *addresses)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert len(summary["token_ids"]) == 6
    assert "1, 2, 3," + summary["text"] in done.stderr
    wire = summary["wire"]
    assert wire["positions"] == len(summary["prompt_token_ids"]) + 5
    for way in ("sent", "received"):  # on loopback nothing is packed
        assert wire[f"{way}_bytes"] == wire[f"{way}_plain_bytes"] == 576 * 4 * wire["positions"]
        assert wire[f"{way}_bytes_per_token"] == 576 * 4
    assert "2.3 kB out and 2.3 kB in a token" in done.stderr


def test_what_the_servers_signed_for_can_be_verified(nodes: list[Any], tmp_path: Path) -> None:
    file, addresses = tmp_path / "receipts.json", [node.address for node in nodes]
    done = in_process.llmnode("generate", "--peers", *addresses, "--max-new-tokens", "8", "--receipts", str(file))
    assert done.returncode == 0, done.stderr
    found = _run(*LLMNODE, "verify", str(file), "--json")
    assert found.returncode == 0, found.stdout
    assert {tuple(part["blocks"]) for part in json.loads(found.stdout)["parts"]} == {(0, 12), (12, 30)}
    file.write_text(file.read_text().replace('"raw"', '"fp16"'))
    assert in_process.llmnode("verify", str(file)).returncode == 1


def test_a_hole_in_the_route_is_named(start_servers: Callable[..., list[Any]]) -> None:
    (alone,) = start_servers([Span(12, 13)])  # clients of the others have introduced them to each other
    done = in_process.llmnode("generate", "--peers", alone.address)
    assert done.returncode == 1
    assert "no peer holds blocks [0, 12), [13, 30)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_is_known_by_the_address_that_it_announces() -> None:
    forwarded = "/ip4/203.0.113.7/tcp/4001"
    command = [*LLMNODE, "serve", "--blocks", "12:13", "--threads", "1", "--announce", forwarded]
    with Forked(
        [*command, "--json", "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ready = next(event for event in map(json.loads, server.stdout) if event["event"] == "ready")
        told = f"{forwarded}/p2p/{ready['peer']}"
        assert ready["addresses"] == [told]
        shown = json.loads(in_process.llmnode("status", "--json", "--peers", *ready["listening"]).stdout)
        assert shown["models"][0]["servers"][0]["addresses"] == [told]
        server.communicate(timeout=20)
    assert server.returncode == 0


def test_a_server_that_others_cannot_dial_is_told_so_and_what_to_do(nodes: list[Any]) -> None:
    command = [*LLMNODE, "serve", "--blocks", "12:13", "--threads", "1", "--peers", nodes[0].address]
    command += ["--listen", "/ip4/127.0.0.3/tcp/0"]  # it is seen at 127.0.0.1
    with Forked(
        [*command, "--json", "--until-stdin-closes"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        told = next(event for event in map(json.loads, server.stdout) if event["event"] == "unreached")
        assert told["host"] == "127.0.0.1"
        assert "cannot dial it" in told["text"] and "--relay" in told["fix"]
        _, said = server.communicate(timeout=20)
    assert told["fix"] in said


def test_a_server_says_what_it_has_open_when_it_is_signalled(nodes: list[Any]) -> None:
    for node in nodes:
        node.process.send_signal(signal.SIGUSR1)
        event = node.next_event("readout")
        assert (event["sessions"], event["kv_tokens_reserved"]) == (0, 0)
        assert set(event) == {
            "sessions", "kv_tokens_reserved", "links", "relayed", "connections", "streams", "tasks", "files", "peers",
            "adapter_bytes",
        }  # fmt: skip
        assert event["tasks"] > 1 and event["files"] > 3 and event["peers"] >= 1


def test_the_speed_of_this_machine_is_measured_as_a_server_would_serve() -> None:
    done = _run(*LLMNODE, "speed", "--blocks", "2:5", "--rounds", "2", "--threads", "1", "--json")
    measured = json.loads(done.stdout)
    assert (measured["blocks"], measured["sessions"], measured["prompt_tokens"]) == ([2, 5], 8, 512)
    for kind in ("decode", "decode_shared", "prefill"):
        assert len(measured[f"{kind}_tokens_per_s"]) == 2
    shown = in_process.llmnode("speed", "--blocks", "1", "--rounds", "1", "--worker", "thread").stdout
    assert "decode, 8 sessions at once" in shown and "prefill of 512 tokens" in shown
    assert measured["announced_tokens_per_s"] is None, "nobody was named to measure the network against"


def test_a_plan_names_the_blocks_that_a_server_would_take_and_what_they_give(
    nodes: list[Any], peers: list[str]
) -> None:
    done = _run(
        *LLMNODE, "plan", "--blocks", "3", "--threads", "1", "--prompt-tokens", "16", "--json", "--peers", *peers
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    node, without, with_it = plan["node"], plan["without"], plan["with"]
    assert (plan["servers"], plan["missing"], len(plan["round_trips_us"])) == (2, [], 2)
    assert node["blocks"][1] - node["blocks"][0] == 3
    assert 0 < node["announced_tokens_per_s"] <= node["shared_tokens_per_s"] + 1
    assert node["upload_bytes_per_s"] > 0 and node["kv_bytes"] > 0 and node["weights_bytes"] > 0
    assert [hop[1:] for hop in without["session"]["hops"]] == [[0, 12], [12, 30]]
    assert with_it["tokens_per_s"] >= without["tokens_per_s"] > 0
    parts = [without["session"][f"{part}_s"] for part in ("compute", "ways", "send", "client")]
    assert all(part > 0 for part in parts)
    assert 1 / sum(parts) == pytest.approx(without["session"]["tokens_per_s"])

    said = in_process.llmnode("generate", "--max-new-tokens", "80", "--json", "--peers", *peers).stderr
    (tokens_per_s,) = re.findall(r"then ([\d.]+) tokens/s", said)
    assert 0.2 < without["session"]["tokens_per_s"] / float(tokens_per_s) < 5, "the benchmark `plan` is more exact"
    _check_figures(nodes, peers)


def _check_figures(nodes: list[Any], peers: list[str]) -> None:
    """Servers tell what was predicted for them, beside what they do: a session has shown their speed."""
    done = in_process.llmnode("status", "--json", "--peers", *peers)
    (model,) = json.loads(done.stdout)["models"]
    assert len(model["servers"]) == 2
    for server in model["servers"]:
        figures = server["figures"]
        assert 1 <= figures["sessions_at_once"] < 2
        assert 0.3 < figures["measured_tokens_per_s"] / figures["predicted_tokens_per_s"] < 3
        assert figures["tokens_per_s_error"] == pytest.approx(
            figures["predicted_tokens_per_s"] / figures["measured_tokens_per_s"] - 1
        )
        assert abs(figures["memory_error"]) < 0.25
        assert server["stays"], "it was told its blocks"
    shown = in_process.llmnode("status", "--peers", *peers).stdout
    assert "predicted" in shown and "measured" in shown
    nodes[0].process.send_signal(signal.SIGUSR1)
    assert nodes[0].next_event("figures")["measured_memory_bytes"] > 100 << 20


def test_who_watches_a_swarm_sees_what_it_does_until_he_stops(nodes: list[Any], peers: list[str]) -> None:
    command = [*LLMNODE, "status", "--watch", "--every", "0.5", "--json", "--peers", *peers]
    with Forked(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        looks = map(json.loads, watching.stdout)
        assert next(looks)["models"][0]["tokens_per_s"] is None, "nothing is known at first"
        in_process.llmnode("generate", "--max-new-tokens", "40", "--peers", *peers)
        seen = next(look["models"][0] for look in looks if look["models"][0]["tokens_per_s"])
        assert len(seen["servers"]) == len(nodes)
        assert all(each["tokens_per_s"] >= seen["tokens_per_s"] for each in seen["servers"])
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=20)
    assert watching.returncode == 0


def test_a_plan_without_a_swarm_says_what_to_name() -> None:
    done = _run(*LLMNODE, "plan", "--no-mdns")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no peers are named" in line and "--peers" in line


def test_more_kv_than_there_is_memory_for_is_refused_with_numbers() -> None:
    done = _run(*LLMNODE, "serve", "--blocks", "0:3", "--kv-memory", "90000GiB")
    assert done.returncode == 2
    assert "blocks [0, 3) of HuggingFaceTB/SmolLM2-135M-Instruct do not fit: " in done.stderr
    assert "their weights take 8, KV for 4294967295 positions 18874368" in done.stderr


def test_so_is_what_was_asked_for_in_positions() -> None:
    done = forked.run([*LLMNODE, "serve", "--blocks", "3", "--kv-tokens", "4000000000", "--json"])
    assert done.returncode == 2
    assert "do not fit: " in done.stderr and "Traceback" not in done.stderr
    assert "serve fewer --blocks, lower --kv-tokens or --kv-memory, raise the container's limit" in done.stderr


def test_too_many_tokens_are_refused_before_any_work(nodes: list[Any]) -> None:
    addresses = [node.address for node in nodes]
    done = in_process.llmnode("generate", "--max-new-tokens", "9000", "--prompt", "one", "--peers", *addresses)
    assert done.returncode == 2
    assert "ask for at most 8191" in done.stderr


def test_a_file_of_prompts_gives_a_json_line_each(nodes: list[Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\n\nTwo\n")
    addresses = [node.address for node in nodes]
    options = ["--prompts", str(prompts), "--json", "--max-new-tokens", "3", "--temperature", "0.9", "--seed", "7"]
    done = in_process.llmnode("generate", *options, "--peers", *addresses)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["One", "Two"]
    assert all(len(answer["token_ids"]) == 3 for answer in answers)


def test_several_texts_at_once_are_those_of_one_after_another(nodes: list[Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\nTwo, three and\n")
    options = ["--prompts", str(prompts), "--samples", "3", "--temperature", "0.9", "--seed", "7"]
    command = ["generate", *options, "--json", "--max-new-tokens", "6", "--peers"]
    command += [node.address for node in nodes]
    at_once, in_turn = in_process.llmnode(*command), in_process.llmnode(*command, "--at-once", "1")
    assert at_once.returncode == in_turn.returncode == 0, at_once.stderr + in_turn.stderr
    assert at_once.stdout == in_turn.stdout
    answers = [json.loads(line) for line in at_once.stdout.splitlines()]
    assert [(answer["prompt"], answer["sample"]) for answer in answers] == [
        (prompt, sample) for prompt in ("One", "Two, three and") for sample in range(3)
    ]
    assert len({answer["text"] for answer in answers}) > 2
    assert "6 of 6 texts" in at_once.stderr
    assert "6 texts, 36 tokens" in at_once.stderr


def test_a_prompt_that_is_too_long_is_refused_before_any_text_is_begun(nodes: list[Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\n\n" + 9000 * "two " + "\n")
    done = in_process.llmnode("generate", "--prompts", str(prompts), "--peers", *(node.address for node in nodes))
    assert done.returncode == 2
    assert f"--prompts {prompts}, line 3: 900" in done.stderr
    assert "exceed the model's context of 8192" in done.stderr
    assert not done.stdout
    assert "texts" not in done.stderr


def test_texts_that_are_done_are_printed_before_the_swarm_fails(
    start_servers: Callable[..., list[Any]], tmp_path: Path
) -> None:
    kept, dying = start_servers([Span(0, 15), Span(15, 30)])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{number}, {number + 1},\n" for number in range(200)))
    command = [*LOOKS_SHORTLY, "generate", "--prompts", str(prompts), "--json", "--max-new-tokens", "40"]
    with Forked(
        [*command, "--peers", kept.address, dying.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as generating:
        assert generating.stdout is not None
        assert generating.stderr is not None
        lines = [generating.stdout.readline()]
        dying.process.kill()
        lines += generating.stdout
        stderr = generating.stderr.read()
    answers = [json.loads(line) for line in lines]
    assert generating.returncode == 1
    numbers = [int(answer["prompt"].split(",")[0]) for answer in answers]
    assert numbers[0] == 0
    assert numbers == sorted(numbers)
    assert len(answers) == stderr.count(" tokens; "), "as many as are told of as done"
    assert stderr.splitlines()[-1].startswith("llmnode: no peer holds blocks [15, 30)")


def test_a_prompt_with_several_samples_is_computed_once(nodes: list[Any]) -> None:
    addresses, samples = [node.address for node in nodes], 4
    before = positions(addresses)
    options = ["--prompt", PROMPT, "--samples", str(samples), "--max-new-tokens", "3", "--json"]
    done = in_process.llmnode("generate", *options, "--temperature", "0.9", "--seed", "7", "--peers", *addresses)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == samples
    prompt = len(answers[0]["prompt_token_ids"])
    assert prompt > 10
    # Each text runs the prompt's last token, and all of its own but the last.
    expected = prompt - 1 + sum(len(answer["token_ids"]) for answer in answers)
    assert [now - then for now, then in zip(positions(addresses), before, strict=True)] == [expected] * len(nodes)


class Chat:
    """`llmnode chat` with a pipe for a terminal."""

    def __init__(
        self, *options: str, program: Sequence[str] = LLMNODE, popen: type[subprocess.Popen[str]] = Forked
    ) -> None:
        self.process = popen(
            [*program, "chat", "--temperature", "0", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def hear(self, characters: int) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read(characters)

    def finish(self) -> tuple[str, str]:
        stdout, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr
        return stdout, stderr


def test_chat_remembers_until_reset(nodes: list[Any]) -> None:
    chat = Chat("--max-new-tokens", "24", "--peers", *(node.address for node in nodes))
    chat.say("My name is \\")
    chat.say("Zaphod.")
    chat.say("What is my name?")
    chat.say("/reset")
    chat.say("What is my name?")
    chat.say("/quit")
    stdout, stderr = chat.finish()
    _, remembered, *forgotten = stdout.splitlines()
    assert "Zaphod" in remembered
    assert "Zaphod" not in "".join(forgotten)
    assert "can read this dialogue" in stderr
    assert stderr.count("tokens: the first after") == 3


def test_ctrl_c_stops_the_answer_and_not_the_program(nodes: list[Any]) -> None:
    peers = [node.address for node in nodes]
    chat = Chat("--max-new-tokens", "2000", "--peers", *peers, popen=subprocess.Popen)
    chat.say("Write a very long story about the sea.")
    chat.hear(20)
    chat.process.send_signal(signal.SIGINT)
    chat.say("Say yes.")
    chat.say("/exit")
    _, stderr = chat.finish()
    assert stderr.count("tokens: the first after") == 2, "the second answer came"


def test_blocks_that_nobody_holds_any_more_are_waited_for_and_then_named(
    start_servers: Callable[..., list[Any]],
) -> None:
    kept, dying = start_servers([Span(0, 15), Span(15, 30)])
    chat = Chat("--max-new-tokens", "2000", "--peers", kept.address, dying.address, program=LOOKS_SHORTLY)
    chat.say("Write a very long story about the sea.")
    assert chat.hear(20)
    dying.process.kill()
    _, stderr = chat.process.communicate(timeout=90)
    assert chat.process.returncode == 1
    assert "no peer holds blocks [15, 30); " in stderr
    assert f"; trying again for {SHORT_S} s" in stderr
    assert stderr.splitlines()[-1].startswith("llmnode: no peer holds blocks [15, 30)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_server_stops_on_a_signal(number: signal.Signals) -> None:
    server = subprocess.Popen(
        [*LLMNODE, "serve", "--blocks", "0:1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline().startswith("ready: blocks [0, 1) of HuggingFaceTB/SmolLM2-135M-Instruct at /ip4/")
    server.send_signal(number)
    _, stderr = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "Traceback" not in stderr
