"""`llmnode layout`: the blocks of each machine of a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench.placement.layouts import read_cluster
from llmnode.core.placement.stages import best_of, layouts
from llmnode.node.cli import main

if TYPE_CHECKING:
    from pathlib import Path

MACHINES = "host,blocks,tokens_per_s\nbig,6,30\nsmall,2,20\nsmall,4,10\nother,4,10\n"


@pytest.fixture
def machines(tmp_path: Path) -> str:
    file = tmp_path / "machines.csv"
    file.write_text(MACHINES)
    return str(file)


def test_each_machine_has_blocks_that_it_can_hold_and_together_they_have_all(
    machines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", machines, "--model-blocks", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    held, most = set[int](), {"big": 6, "small": 4, "other": 4}
    for each in found["machines"]:
        start, end = each["blocks"]
        assert 0 <= start < end <= 8
        assert end - start <= most.pop(each["host"])
        held.update(range(start, end))
    assert not most
    assert held == set(range(8))
    assert 0 < found["tokens_per_s"] <= found["bound_tokens_per_s"]


def test_people_read_a_row_for_each_machine_and_a_line_about_all(
    machines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", machines, "--model-blocks", "8"]) == 0
    *rows, _ = (lines := capsys.readouterr().out.splitlines())[1:]
    assert [row.split()[0] for row in rows][:3] == ["big", "other", "small"]
    assert "tokens/s of many sessions" in " ".join(lines)


def test_machines_that_are_too_small_are_told_what_to_do(machines: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", machines, "--model-blocks", "20"]) == 2
    assert "its machines hold 14 of 20 blocks together: add some" in capsys.readouterr().err


def test_a_cluster_of_helix_has_the_layout_of_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, file = read_cluster("24", "llama30b"), tmp_path / "machines.csv"
    rows = [
        f"{number:03},{blocks},{speed!r}"
        for number, speeds in cluster.speeds.items()
        for blocks, speed in enumerate(speeds, 1)
    ]
    file.write_text("\n".join(["host,blocks,tokens_per_s", *rows]))
    layers = cluster.model.layers
    assert main(["layout", str(file), "--model-blocks", str(layers), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["machines"]
    best = best_of(layers, layouts(layers, cluster.machines()))
    assert [each["blocks"] for each in found] == [[each.span.start, each.span.end] for each in best]
