"""Clusters and layouts of Helix (ASPLOS 2025), and their worth: the maximal flow of tokens from source to sink.

A machine passes at most its tokens a second at its number of layers, and a link its bandwidth over the bytes of one
position. An edge runs from the holder of layers up to k to each holder of layer k + 1. Latency plays no part.
"""

from __future__ import annotations

import ast
import csv
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import networkx

from llmnode.core.ids import PeerId
from llmnode.core.placement.servers import PlacedServer
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).parent / "helix"
SOURCE, SINK = "source", "sink"
MBPS = 1e6
"""The unit of the files. With it, 1250 mbps is a link of 10 Gbit/s, so it counts bytes."""
TOKEN_BYTES = 2
Published = dict[int, Span]
"""The layers of each machine, by its number."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of Helix."""

    layers: int
    position_bytes: int
    """The size of the hidden states of one position."""


MODELS = {"llama30b": Model(60, 13312), "llama70b": Model(80, 16384)}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines by number, with their speeds for one model, and the links between them."""

    model: Model
    speeds: Mapping[int, tuple[float, ...]]
    links_bytes_per_s: Mapping[tuple[str, str], float]

    def machines(self) -> list[PlacedServer]:
        """All machines, before anybody has chosen their layers."""
        return self.placed(dict.fromkeys(self.speeds, Span(0, 1)))

    def placed(self, layout: Published) -> list[PlacedServer]:
        """The machines of a published layout."""
        return [PlacedServer(PeerId(f"{node:03}"), span, self.speeds[node]) for node, span in layout.items()]

    def flow(self, layout: Sequence[PlacedServer]) -> float:
        """The most tokens a second that pass through a layout."""
        graph = networkx.DiGraph()
        for machine in layout:
            node, span = int(machine.peer), machine.span
            graph.add_edge(f"{node} in", f"{node} out", capacity=machine.speed)
            if span.start == 0:
                graph.add_edge(SOURCE, f"{node} in", capacity=self._link(SOURCE, node, TOKEN_BYTES))
            if span.end == self.model.layers:
                graph.add_edge(f"{node} out", SINK, capacity=self._link(node, SINK, TOKEN_BYTES))
            for after in layout:
                if after is not machine and after.span.start <= span.end < after.span.end:
                    other = int(after.peer)
                    capacity = self._link(node, other, self.model.position_bytes)
                    graph.add_edge(f"{node} out", f"{other} in", capacity=capacity)
        if SOURCE not in graph or SINK not in graph:
            return 0.0
        return float(networkx.maximum_flow_value(graph, SOURCE, SINK))

    def _link(self, start: int | str, end: int | str, size_bytes: int) -> float:
        links = self.links_bytes_per_s
        return links.get((str(start), str(end)), links.get((str(end), str(start)), 0.0)) / size_bytes


def read_cluster(name: str, model: str) -> Cluster:
    """The cluster of 24 or of 42 machines."""
    by_type: dict[str, list[float]] = {}
    with (FOLDER / "speeds.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["cluster"], row["model"]) == (name, model):
                by_type.setdefault(row["machine"], []).append(float(row["tokens_per_s"]))
    parser = ConfigParser()
    parser.read(FOLDER / name / "cluster.ini")
    speeds, links = {}, {}
    for section in parser.sections():
        kind, _, rest = section.partition("-")
        if kind == "ComputeNode":
            speeds[int(rest)] = tuple(by_type[parser[section]["type"]])
        elif kind == "Link":
            start, _, end = rest.partition("-")
            amount, _, unit = parser[section]["bandwidth"].partition("*")
            assert unit.strip() == "mbps"
            links[start, end] = float(amount) * MBPS
    return Cluster(MODELS[model], speeds, links)


def read_layout(file: str, nodes: Sequence[int] | None = None) -> Published:
    """A published layout. `nodes` are the machines of the cluster that its own numbers stand for."""
    parser = ConfigParser()
    parser.read(FOLDER / file)
    offset = int(parser["Settings"]["offset"])
    layout = {}
    for name, text in parser["Solution"].items():
        layers, number = ast.literal_eval(text), int(name.rpartition("_")[2]) - offset
        if layers:
            layout[number if nodes is None else nodes[number]] = Span(layers[0], layers[-1] + 1)
    return layout


def read_published(name: str, model: str, cluster: Cluster) -> dict[str, Published]:
    """The layouts by Petals' greedy rule, by SWARM's, and by an integer program that ran for up to hours."""
    layouts = {who: read_layout(f"{name}/{model}.{who}.ini") for who in ("petals", "swarm")}
    if (FOLDER / name / f"{model}.ilp.ini").exists():
        return layouts | {"ilp": read_layout(f"{name}/{model}.ilp.ini")}
    # One pipeline for each type of machine. Each numbers its own machines from 0.
    together: Published = {}
    for machine, most in (("a100", 18), ("l4", 11), ("t4", 7)):
        nodes = [node for node, speeds in cluster.speeds.items() if len(speeds) == most]
        together |= read_layout(f"{name}/{model}.ilp.{machine}.ini", nodes)
    return layouts | {"ilp": together}
