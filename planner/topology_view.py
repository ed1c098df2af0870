"""A topology as tables for the terminal. `topology_svg` draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from planner.errors import InputError
from planner.specs.base import suggest
from planner.specs.topology import GpuId, Link, Node, Topology
from planner.specs.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

KIND = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "memory": "memory",
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
    "tcp": "TCP",
    "uplink": "leaf to spine",
    "measured": "measured pair",
}


def show_speed(bytes_per_s: float) -> str:
    """Return a speed as people read it: `450 GB/s`."""
    return f"{show_bytes(bytes_per_s)}/s"


def parse_gpu(topology: Topology, text: str) -> GpuId:
    """Return the GPU that `text` (`node0:3`) names. Raises InputError with the closest name."""
    node, colon, index = text.rpartition(":")
    names = [known.name for known in topology.nodes]
    if not colon or not index.isascii() or not index.isdigit():
        raise InputError(f"expected a GPU as node:index, such as {topology.gpus[0]}, got {text!r}")
    if node not in names:
        raise InputError(f"no node {node!r} in cluster {topology.name}{suggest(node, names)}")
    gpu = GpuId(node, int(index))
    if gpu not in topology.node(node).gpus:
        have = ", ".join(str(i) for i in topology.node(node).indices)
        raise InputError(f"no GPU {index} on node {node!r}; it has {have}")
    return gpu


def describe(topology: Topology) -> RenderableType:
    """Return the tables of a cluster: its units, its kinds of link, and what about them is assumed."""
    from rich.console import Group
    from rich.text import Text

    title = Text(f"{topology.name}: {amount(len(topology.gpus), 'GPU')}", style="bold")
    title.append(f" on {amount(len(topology.nodes), 'node')}")
    parts: list[RenderableType] = [title, _units_table(topology), _links_table(topology)]
    parts += [Text(f"assumed  {line}", style="yellow") for line in topology.assumptions()]
    return Group(*parts)


def amount(count: int, noun: str) -> str:
    """Return `1 node` or `3 nodes`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _units_table(topology: Topology) -> RenderableType:
    from rich.table import Table

    table = Table(title="Units (a tensor-parallel group lies inside one)", title_justify="left")
    for heading in (
        "unit",
        "nodes",
        "rack",
        "GPUs",
        "joined by the fastest link",
        "cards: GPUs they serve",
        "out",
    ):
        table.add_column(heading, justify="right" if heading == "out" else "left", overflow="fold")
    for class_ in topology.classes():
        units = [topology.units()[position] for position in class_]
        first = topology.node(units[0].nodes[0])
        egress = topology.egress_bytes_per_s(units[0])
        table.add_row(
            _names([unit.name for unit in units]),
            _names(units[0].nodes) if len(units[0].nodes) > 1 else "itself",
            ", ".join(units[0].racks),
            f"{len(units[0].gpus)} x {units[0].gpu.name}",
            _groups_text(first),
            _cards_text(first),
            show_speed(egress) if egress else "-",
        )
    return table


def _names(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _groups_text(node: Node) -> str:
    if len(node.tp_groups) == 1:
        return "all" + (f", and domain {node.domain}" if node.domain else "")
    return "  ".join(_indexes(group) for group in node.tp_groups)


def _cards_text(node: Node) -> str:
    ports = node.nics
    if ports and all(port.gpus == port.cards and len(port.cards) == 1 for port in ports):
        return f"one each, {ports[0].names[0]} ... {ports[-1].names[0]}" if len(ports) > 1 else ports[0].names[0]
    return "\n".join(f"{'+'.join(port.names)}: {_indexes(port.gpus) or 'no GPU'}" for port in ports) or "none"


def _indexes(indexes: Sequence[int]) -> str:
    """Return `0-3` for a run of device indexes, else `0,2,5`."""
    if len(indexes) > 2 and indexes[-1] - indexes[0] == len(indexes) - 1:
        return f"{indexes[0]}-{indexes[-1]}"
    return ",".join(str(index) for index in indexes)


class LinkRow(NamedTuple):
    """What equal links have in common."""

    kind: str
    nominal_bytes_per_s: float
    efficiency: float
    assumed: bool
    latency_s: float


def link_rows(topology: Topology) -> list[tuple[LinkRow, int]]:
    """Return the distinct links and how many pairs (both directions) there are of each."""
    order = {kind: k for k, kind in enumerate(KIND)}
    counts = Counter(
        LinkRow(link.kind, link.nominal_bytes_per_s, link.efficiency, link.assumed, link.latency_s)
        for link in topology.links
        if not _is_slot(link)
    )
    return sorted(((row, n // 2) for row, n in counts.items()), key=lambda item: (order[item[0].kind], item[0]))


def _is_slot(link: Link) -> bool:
    """True for a card's own slot, which never binds and would only be noise."""
    return link.kind == "pcie" and "nic" in (link.source.kind, link.target.kind)


def _links_table(topology: Topology) -> RenderableType:
    from rich.table import Table

    table = Table(title="Links (each direction)", title_justify="left")
    for heading in ("kind", "links", "nominal", "share", "planned with", "latency"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row, count in link_rows(topology):
        speed = row.nominal_bytes_per_s
        share = f"{row.efficiency:.0%}" + (" (assumed)" if row.assumed else "")
        planned = show_speed(speed * row.efficiency)
        latency = show_seconds(row.latency_s)
        table.add_row(KIND[row.kind], f"{count:,}", show_speed(speed), share, planned, latency)
    return table


def describe_path(topology: Topology, a: GpuId, b: GpuId) -> RenderableType:
    """Return the hops from `a` to `b` with their speeds, the tightest one marked."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    links = [topology.links[id_] for id_ in topology.path(a, b)]
    if not links:
        return Text(f"{a} to itself: nothing moves")
    slowest = topology.path_bytes_per_s(a, b)
    table = Table()
    for heading in ("from", "to", "kind", "nominal", "planned with", ""):
        table.add_column(heading, justify="right" if heading in ("nominal", "planned with") else "left")
    for link in links:
        marks = ["binds"] * (link.bytes_per_s == slowest) + ["assumed"] * link.assumed
        planned = show_speed(link.bytes_per_s)
        ends = str(link.source), str(link.target)
        table.add_row(*ends, KIND[link.kind], show_speed(link.nominal_bytes_per_s), planned, ", ".join(marks))
    latency = show_seconds(topology.path_latency_s(a, b))
    return Group(Text(f"{a} to {b}: {show_speed(slowest)}, {latency}", style="bold"), table)
