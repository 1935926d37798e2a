"""A node that joins a swarm finds out by itself how others serve the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from llmnode.core.announcement import PeerState
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.span import Span
from llmnode.net.invite import Invite, read_invite, write_invite
from llmnode.net.swarm_key import make_key
from llmnode.node import Node, app, cli
from llmnode.node.commands import serve
from llmnode.node.commands.options import access, worker_config
from llmnode.node.running_node import RunningNode
from llmnode.node.settings import parse
from unit.exact_nodes import ExactLoader, exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.compute.loading import Wanted

NO_SETTINGS = {"LLMNODE_CONFIG": "/dev/null"}


def invite_of(node: RunningNode) -> str:
    return write_invite(Invite(tuple(node.addresses)))


async def until_online(node: RunningNode) -> None:
    while node.role.offer().state is not PeerState.ONLINE:
        await node.swarm.wait_changed()


@in_trio
async def test_a_server_that_names_no_precision_joins_in_that_of_the_swarm() -> None:
    told: list[str] = []
    auto = {"dtype": "auto", "quant": "auto", "kv_dtype": "auto"}
    async with exact_node(**auto) as first:
        assert first.model.precision.name == "float32", "as suits this device"
    async with exact_node(blocks="0:3", dtype="bfloat16", quant="int8") as first:
        await until_online(first)
        async with exact_node(**auto, peers=first.addresses, report=told.append) as second:
            assert second.model.precision.name == "bfloat16+int8"
            assert "bfloat16+int8: the swarm lacks blocks [3, 6) in it, and this node serves them" in told
        async with exact_node(dtype="auto", peers=first.addresses) as third:
            assert third.model.precision.name == "float32", "quant was named: none"


@in_trio
async def test_a_server_that_names_no_precision_serves_blocks_that_nobody_has_in_one() -> None:
    """Though another precision is whole, which clients use: this one is of use then too."""
    told: list[str] = []
    async with (
        exact_node() as whole,
        exact_node(blocks="0:4", dtype="bfloat16", peers=whole.addresses) as front,
    ):
        await until_online(front)
        async with exact_node(blocks="2", dtype="auto", peers=front.addresses, report=told.append) as back:
            assert (back.model.precision.name, back.role.span) == ("bfloat16", Span(4, 6))
            assert told[-2].startswith("bfloat16: the swarm lacks blocks [4, 6) in it, and this node serves them")


@in_trio
async def test_an_invite_is_enough_for_a_node() -> None:
    async with exact_node(blocks="0:3") as first:
        await until_online(first)
        async with Node(invite_of(first), worker="thread", make_loader=ExactLoader, blocks="3") as second:
            assert second.blocks == (3, 6), "those that the swarm lacks"


@in_trio
async def test_a_model_of_this_machine_alone_is_named_by_those_who_are_invited(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with exact_node(blocks="0:3") as node:
        serve._ready(node)
        _, _, use, join = capsys.readouterr().out.splitlines()
        line = use.removeprefix("to use it: llmnode ")
        used = access(parse(*cli._parser(), line.replace("MODEL", "folder").split(), NO_SETTINGS))
        assert (used.model, used.way_in) == ("folder", Invite(tuple(node.addresses)))
        line = join.removeprefix("to join it: llmnode ")
        joined = worker_config(parse(*cli._parser(), line.replace("MODEL", "folder").split(), NO_SETTINGS))
        assert (joined.model, joined.way_in()) == ("folder", Invite(tuple(node.addresses)))
        serve._ready_json(node)
        ready = json.loads(capsys.readouterr().out)
        assert read_invite(ready["invite"]) == Invite(tuple(node.addresses)), "no model, and above all no other one"


@in_trio
async def test_a_private_node_goes_on_when_its_key_file_has_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_key(path := tmp_path / "swarm.key")
    async with exact_node(blocks="0:3", swarm_key=path) as node:
        path.unlink()
        serve._ready_json(node)
        assert json.loads(capsys.readouterr().out)["invite"] is None, "it would have the key in it"
        serve._ready(node, path)
        out = capsys.readouterr().out
        assert f"llmnode invite --swarm-key {path} --peers {' '.join(node.addresses)}\n" in out
        assert "llmnode-invite-" not in out


@in_trio
async def test_a_node_takes_the_model_of_an_invite_from_the_hub() -> None:
    opened: list[str | None] = []

    def make_loader(wanted: Wanted, report: Callable[[str], None]) -> ExactLoader:
        opened.append(wanted.model)
        return ExactLoader(wanted, report)

    async with exact_node(blocks="0:3") as first:
        await until_online(first)
        invite = write_invite(Invite(tuple(first.addresses), None, "org/name"))
        async with Node(invite, worker="thread", make_loader=make_loader, blocks="3:6"):
            assert opened == ["hub:org/name"], "never a folder of this machine"


@pytest.mark.parametrize(("blocks", "is_free"), [("auto", True), ("3", True), ("0:3", False)])
@in_trio
async def test_a_server_that_is_free_to_choose_its_blocks_looks_again_while_it_loads(
    blocks: str, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking: list[RebalancePolicy] = []

    async def look(_role: object, _swarm: object, _report: object, policy: RebalancePolicy) -> None:
        looking.append(policy)

    monkeypatch.setattr(app, "look_again", look)
    async with exact_node(blocks=blocks):
        assert looking == [RebalancePolicy()] * is_free
