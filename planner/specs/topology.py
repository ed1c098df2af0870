"""The cluster as a graph: GPUs, switches and network cards, joined by links with a speed and a latency.

    gpu -> nvswitch -> gpu                                   inside a node or an NVLink domain
    gpu -> root [-> host -> root] -> gpu                     over PCIe (cores: memory), between sockets by the host
    gpu -> root -> nic -> leaf [-> spine -> leaf] -> nic -> root -> gpu      between nodes

Ways are never searched: NVLink before PCIe before the network, each GPU over the card nearest to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.errors import Fault, InputError
from planner.specs.base import Document, resolve, show_path, validate
from planner.specs.cluster import (
    EFFICIENCY,
    LATENCY_S,
    NO_RACK,
    Cluster,
    LinkKind,
    Links,
    NodeGroup,
    Rack,
    find_gpu,
    mistakes,
)
from planner.specs.gpu import Gpu
from planner.specs.wiring import NodePlan

if TYPE_CHECKING:
    import networkx


SLOWEST_BYTES_PER_S = 1e5
"""The KV cache of one prompt would take an hour on such a link; less is a typing mistake."""


class GpuId(NamedTuple):
    """One GPU: its node's name and its device index there."""

    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"{self.node}:{self.index}"


class Vertex(NamedTuple):
    """A point of the graph. `owner` is the node, NVLink domain or rack it belongs to."""

    kind: str
    owner: str = ""
    number: int = 0

    def __str__(self) -> str:
        single = self.kind in ("host", "leaf", "spine", "nvdomain")
        return ":".join(part for part in (self.owner, self.kind if single else f"{self.kind}{self.number}") if part)


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of one cable or bus."""

    kind: LinkKind
    source: Vertex
    target: Vertex
    nominal_bytes_per_s: float
    efficiency: float
    assumed: bool
    """True when nobody measured the efficiency on this cluster."""
    latency_s: float
    why: str = ""
    """Where the efficiency comes from."""

    @property
    def name(self) -> str:
        """`n0:gpu3->n0:nvswitch0`."""
        return f"{self.source}->{self.target}"

    @property
    def bytes_per_s(self) -> float:
        """The speed to plan with [bytes/s]: nominal times efficiency."""
        return self.nominal_bytes_per_s * self.efficiency


@dataclass(frozen=True, slots=True)
class NicPort:
    """Network cards that serve the same GPUs of a node. A transfer stripes over them, so they act as one."""

    cards: tuple[int, ...]
    names: tuple[str, ...]
    gpus: tuple[int, ...]
    """Device indexes whose traffic leaves here."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    gpu: Gpu
    indices: tuple[int, ...]
    rack: str
    domain: str | None
    nvlink_groups: tuple[tuple[int, ...], ...]
    """Device indexes that NVLink joins; empty without NVLink."""
    tp_groups: tuple[tuple[int, ...], ...]
    """Device indexes joined by the fastest kind of link here: all, pairs, or those below one PCIe root."""
    roots: tuple[tuple[int, ...], ...]
    nics: tuple[NicPort, ...]

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Its GPUs, by index."""
        return tuple(GpuId(self.name, index) for index in self.indices)


@dataclass(frozen=True, slots=True)
class Unit:
    """Where one tensor-parallel group may lie: a node, or all nodes of one NVLink domain."""

    name: str
    gpu: Gpu
    gpus: tuple[GpuId, ...]
    nodes: tuple[str, ...]
    racks: tuple[str, ...]


_Way = tuple[tuple[int, int], tuple[int, int]]
"""Of one port: link ids (up, down) of its slot, then of its cable."""


@dataclass(frozen=True, slots=True)
class _Ways:
    """Link ids around one GPU: up towards others, down from them, by the vertex they go through."""

    nvlink: tuple[Vertex, int, int] | None
    root: Vertex
    pcie: tuple[int, int]
    nic: tuple[tuple[int, ...], tuple[int, ...]] | None
    """From the GPU to its leaf switch, and back."""


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Nodes and directed links of one cluster. Links are named by their position in `links`."""

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    uplinks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per rack the link up to the spine and the one down; empty with a single rack."""
    _kinds: dict[str, tuple[Any, ...]] = field(default_factory=dict, repr=False)
    _ways: dict[GpuId, _Ways] = field(default_factory=dict, repr=False)
    _host: dict[Vertex, tuple[int, int]] = field(default_factory=dict, repr=False)
    _direct: dict[tuple[GpuId, GpuId], int] = field(default_factory=dict, repr=False)
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Every GPU, in the order of the file."""
        return self._once("gpus", lambda: tuple(self._ways))

    def with_gpus(self, gpus: Mapping[str, Gpu]) -> Topology:
        """Return the same with other figures for the GPU types of these names."""
        nodes = tuple(replace(node, gpu=gpus.get(node.gpu.name, node.gpu)) for node in self.nodes)
        return replace(self, nodes=nodes, _cache={})

    def with_links(self, change: Callable[[Link], Link]) -> Topology:
        """Return the same with every link as `change` makes it; ends and kinds must stay."""
        return replace(self, links=tuple(map(change, self.links)), _cache={})

    def node(self, name: str) -> Node:
        """Return the node called `name`. Raises InputError when there is none."""
        by_name = self._once("nodes", lambda: {node.name: node for node in self.nodes})
        if name not in by_name:
            raise InputError(f"no node {name!r} in cluster {self.name}")
        return by_name[name]

    def gpu_of(self, gpu: GpuId) -> Gpu:
        """Return the type of one GPU."""
        return self.node(gpu.node).gpu

    @property
    def graph(self) -> networkx.DiGraph:
        """The same as a networkx graph over `Vertex`; edges carry `link` (its id), speed, latency, kind."""
        return self._once("graph", self._build_graph)

    def _build_graph(self) -> networkx.DiGraph:
        import networkx

        graph = networkx.DiGraph(name=self.name)
        for id_, link in enumerate(self.links):
            figures = {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s, "kind": link.kind}
            graph.add_edge(link.source, link.target, link=id_, **figures)
        return graph

    def path(self, a: GpuId, b: GpuId) -> tuple[int, ...]:
        """Return the ids of the links from `a` to `b`; none from a GPU to itself.

        A measured pair wins, then NVLink, then PCIe, then the network. Raises InputError for an unknown GPU.
        """
        key = (a, b)
        if key not in self._cache:
            self._cache[key] = self._path(a, b)
        return self._cache[key]

    def _path(self, a: GpuId, b: GpuId) -> tuple[int, ...]:
        from_, to = self._ways_of(a), self._ways_of(b)
        if a == b:
            return ()
        if (a, b) in self._direct:
            return (self._direct[a, b],)
        if from_.nvlink and to.nvlink and from_.nvlink[0] == to.nvlink[0]:
            return (from_.nvlink[1], to.nvlink[2])
        if a.node == b.node:
            between = () if from_.root == to.root else (self._host[from_.root][0], self._host[to.root][1])
            return (from_.pcie[0], *between, to.pcie[1])
        if from_.nic is None or to.nic is None:
            raise InputError(f"no way from {a} to {b}: give their nodes nics or a common nvlink_domain")
        racks = self.node(a.node).rack, self.node(b.node).rack
        above = () if racks[0] == racks[1] else (self.uplinks[racks[0]][0], self.uplinks[racks[1]][1])
        return (*from_.nic[0], *above, *to.nic[1])

    def _ways_of(self, gpu: GpuId) -> _Ways:
        if gpu not in self._ways:
            raise InputError(f"no GPU {gpu.index} on node {gpu.node!r} in cluster {self.name}")
        return self._ways[gpu]

    def path_bytes_per_s(self, a: GpuId, b: GpuId) -> float:
        """Return the speed [bytes/s] of one transfer alone from `a` to `b`: its slowest link's."""
        return min((self.links[id_].bytes_per_s for id_ in self.path(a, b)), default=inf)

    def path_latency_s(self, a: GpuId, b: GpuId) -> float:
        """Return the latency [s] from `a` to `b`."""
        return sum(self.links[id_].latency_s for id_ in self.path(a, b))

    def rank_link(self, gpus: Iterable[GpuId]) -> tuple[float, float]:
        """Return the speed [bytes/s] and latency [s] of the slowest step of a ring through `gpus`.

        What a collective of one tensor-parallel group runs at. (inf, 0) for a single GPU.
        """
        ring = sorted(set(gpus))
        steps = list(zip(ring, ring[1:] + ring[:1], strict=True)) if len(ring) > 1 else []
        slowest = min((self.path_bytes_per_s(a, b) for a, b in steps), default=inf)
        return slowest, max((self.path_latency_s(a, b) for a, b in steps), default=0.0)

    def units(self) -> tuple[Unit, ...]:
        """Return where tensor-parallel groups may lie, in the order of the file."""
        return self._once("units", self._build_units)

    def _build_units(self) -> tuple[Unit, ...]:
        pools: dict[tuple[str, str], list[Node]] = {}
        for node in self.nodes:
            key = ("domain", node.domain) if node.domain is not None else ("node", node.name)
            pools.setdefault(key, []).append(node)
        return tuple(
            Unit(
                name=name,
                gpu=nodes[0].gpu,
                gpus=tuple(gpu for node in nodes for gpu in node.gpus),
                nodes=tuple(node.name for node in nodes),
                racks=tuple(dict.fromkeys(node.rack for node in nodes)),
            )
            for (_, name), nodes in pools.items()
        )

    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Return units (by position) that no placement can tell apart: same GPUs, links, cards and rack."""
        return self._once("classes", self._build_classes)

    def _build_classes(self) -> tuple[tuple[int, ...], ...]:
        alike: dict[Any, list[int]] = {}
        for position, unit in enumerate(self.units()):
            kinds = tuple(sorted((self._kinds[node] for node in unit.nodes), key=repr))
            alike.setdefault(kinds, []).append(position)
        return tuple(tuple(positions) for positions in alike.values())

    def egress_bytes_per_s(self, unit: Unit) -> float:
        """Return how fast [bytes/s] a unit's GPUs can send to other units at most, over all their cards."""
        return self._through_nics(unit, up=True)

    def ingress_bytes_per_s(self, unit: Unit) -> float:
        """Return how fast [bytes/s] a unit's GPUs can receive from other units at most."""
        return self._through_nics(unit, up=False)

    def _through_nics(self, unit: Unit, up: bool) -> float:
        """Cards that no GPU is near to carry nothing; a card is no faster than the GPUs' ports behind it."""
        cards: dict[int, float] = {}
        ports: dict[int, float] = {}
        for gpu in unit.gpus:
            ways = self._ways[gpu]
            if ways.nic is None:
                continue
            nic = ways.nic[0][-1] if up else ways.nic[1][0]
            cards[nic] = self.links[nic].bytes_per_s
            ports[nic] = ports.get(nic, 0.0) + self.links[ways.pcie[0 if up else 1]].bytes_per_s
        return sum(min(speed, ports[nic]) for nic, speed in cards.items())

    def uplink_bytes_per_s(self, rack: str) -> float:
        """Return the speed [bytes/s] from a rack to the others; inf when there is a single rack."""
        return self.links[self.uplinks[rack][0]].bytes_per_s if rack in self.uplinks else inf

    def nic_names(self, gpu: GpuId) -> tuple[str, ...]:
        """Return the cards that carry this GPU's traffic, for device lists; none without a network."""
        ports = (port for port in self.node(gpu.node).nics if gpu.index in port.gpus)
        return next((port.names for port in ports), ())

    def assumptions(self) -> tuple[str, ...]:
        """Return one line per kind of link whose efficiency nobody measured here, with its origin."""
        lines = {
            f"{link.kind}: {link.efficiency:.0%} of the nominal speed is assumed: {link.why}"
            for link in self.links
            if link.assumed
        }
        return tuple(sorted(lines))

    def _once(self, key: str, make: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def read_cluster(document: Document) -> Topology:
    """Return the topology a cluster document (mapping, preset name or file) describes.

    Raises InputError with the line of every mistake.
    """
    document = resolve("clusters", document)
    cluster = validate(Cluster, document)
    if faults := [document.fault(message, *path) for message, path in mistakes(cluster)]:
        raise InputError(faults)
    topology = _Builder(cluster).build()
    slowest = min(topology.links, key=lambda link: link.bytes_per_s, default=None)
    if slowest is not None and slowest.bytes_per_s < SLOWEST_BYTES_PER_S:
        message = (
            f"link {slowest.name} comes to {slowest.bytes_per_s:.3g} bytes/s (speed x efficiency / oversubscription); "
            f"expected at least {SLOWEST_BYTES_PER_S:g}"
        )
        raise InputError(document.fault(message, "network"))
    return topology


def build(cluster: Cluster) -> Topology:
    """Return the topology of `cluster`. Raises InputError with every mistake."""
    if faults := [Fault(message, field=show_path(path)) for message, path in mistakes(cluster)]:
        raise InputError(faults)
    return _Builder(cluster).build()


class _Builder:
    """Collects nodes and links; one method per kind of link."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.links: list[Link] = []
        self.nodes: list[Node] = []
        self.ways: dict[GpuId, _Ways] = {}
        self.host: dict[Vertex, tuple[int, int]] = {}
        self.direct: dict[tuple[GpuId, GpuId], int] = {}
        self.kinds: dict[str, tuple[Any, ...]] = {}
        self.cards_bytes_per_s: dict[str, float] = {}

    def build(self) -> Topology:
        for group in self.cluster.nodes:
            gpu = find_gpu(group.gpu, self.cluster.gpus)
            assert gpu is not None, "mistakes() found every GPU"
            plan = NodePlan.of(group, gpu)
            for name in group.node_names:
                self._add_node(name, group, plan)
        return Topology(
            name=self.cluster.name,
            nodes=tuple(self.nodes),
            uplinks=self._add_uplinks(),
            links=tuple(self.links),
            _kinds=self.kinds,
            _ways=self.ways,
            _host=self.host,
            _direct=self.direct,
        )

    def _pair(
        self,
        kind: LinkKind,
        ends: tuple[Vertex, Vertex],
        bytes_per_s: float,
        latency_s: float,
        own: float | None,
    ) -> tuple[int, int]:
        """Add a link each way; return both ids. `own` is the efficiency the file gives for this very link."""
        given = own if own is not None else getattr(self.cluster.efficiency, kind, None)
        efficiency, why = (given, "given in the cluster file") if given is not None else EFFICIENCY[kind]
        for source, target in (ends, ends[::-1]):
            link = Link(kind, source, target, bytes_per_s, efficiency, given is None, latency_s, why)
            self.links.append(link)
        return len(self.links) - 2, len(self.links) - 1

    def _add_node(self, name: str, group: NodeGroup, plan: NodePlan) -> None:
        rack = group.rack or NO_RACK
        roots = self._add_roots(name, plan)
        nics = self._add_nics(name, rack, group, plan)
        for index in group.indices:
            gpu = Vertex("gpu", name, index)
            root = roots[plan.root_of(index)]
            speed = plan.port_bytes_per_s(index)
            kind = plan.slot_kind
            pcie = self._pair(kind, (gpu, root), speed, LATENCY_S[kind] / 2, plan.pcie_own)
            self.ways[GpuId(name, index)] = _Ways(
                nvlink=self._add_nvlink(gpu, group, plan),
                root=root,
                pcie=pcie,
                nic=self._way_out(index, root, pcie, nics, plan),
            )
        self._add_measured(name, plan.links)
        cards = tuple(NicPort(p.cards, _card_names(group, p.cards), p.gpus) for p in plan.nics)
        node = Node(
            name=name,
            gpu=plan.gpu,
            indices=group.indices,
            rack=rack,
            domain=group.nvlink_domain,
            nvlink_groups=plan.nvlink_groups,
            tp_groups=plan.tp_groups,
            roots=plan.roots,
            nics=cards,
        )
        self.nodes.append(node)
        self.kinds[name] = (*plan.kind, rack)

    def _add_roots(self, name: str, plan: NodePlan) -> list[Vertex]:
        roots = [Vertex("root", name, r) for r in range(len(plan.roots))]
        if len(roots) > 1:
            for root, speed in zip(roots, plan.root_bytes_per_s, strict=True):
                ends = (root, Vertex("host", name))
                kind = plan.slot_kind
                self.host[root] = self._pair(kind, ends, speed, LATENCY_S[kind] / 2, plan.pcie_own)
        return roots

    def _add_nvlink(self, gpu: Vertex, group: NodeGroup, plan: NodePlan) -> tuple[Vertex, int, int] | None:
        own = plan.links
        group_at = next((g for g, indexes in enumerate(plan.nvlink_groups) if gpu.number in indexes), None)
        if group_at is None:
            return None
        switch = Vertex("nvswitch", gpu.owner, group_at)
        if group.nvlink_domain is not None:
            switch = Vertex("nvdomain", group.nvlink_domain)
        latency_s = LATENCY_S["nvlink"] if own.latency_s is None else own.latency_s
        ids = self._pair("nvlink", (gpu, switch), plan.nvlink_bytes_per_s, latency_s / 2, own.efficiency)
        return (switch, *ids)

    def _add_nics(self, name: str, rack: str, group: NodeGroup, plan: NodePlan) -> list[_Way]:
        """Return, per port of the plan, its links to and from PCIe and the leaf switch."""
        made: list[_Way] = []
        for port in plan.nics:
            assert group.nics is not None, "ports come from nics"
            nic, at = Vertex("nic", name, port.cards[0]), port.root
            above = Vertex("host", name) if at is None else Vertex("root", name, at)
            speed = len(port.cards) * group.nics.bytes_per_s
            # The card's own slot is taken to be no bottleneck: it is made for the card.
            slot = self._pair("pcie", (above, nic), max(speed, plan.pcie_bytes_per_s), 0.0, 1.0)
            latency_s = self.cluster.network.latency_s
            latency_s = LATENCY_S[group.nics.kind] if latency_s is None else latency_s
            ends = (nic, Vertex("leaf", rack))
            wire = self._pair(group.nics.kind, ends, speed, latency_s / 2, group.nics.efficiency)
            self.cards_bytes_per_s[rack] = self.cards_bytes_per_s.get(rack, 0.0) + speed
            made.append((slot, wire))
        return made

    def _way_out(
        self,
        index: int,
        root: Vertex,
        pcie: tuple[int, int],
        nics: list[_Way],
        plan: NodePlan,
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the links from a device to its leaf switch and back; None without a card."""
        at = next((p for p, port in enumerate(plan.nics) if index in port.gpus), None)
        if at is None:
            return None
        (slot, wire), nic_root = nics[at], plan.nics[at].root
        out: tuple[int, ...] = ()
        back: tuple[int, ...] = ()
        if nic_root != root.number and root in self.host:
            out, back = (self.host[root][0],), (self.host[root][1],)
            if nic_root is not None:
                far = self.host[Vertex("root", root.owner, nic_root)]
                out, back = (*out, far[1]), (far[0], *back)
        return (pcie[0], *out, slot[0], wire[0]), (wire[1], slot[1], *back, pcie[1])

    def _add_measured(self, name: str, links: Links) -> None:
        for pair in links.measured:
            a, b = (Vertex("gpu", name, index) for index in pair.gpus)
            there, back = self._pair("measured", (a, b), pair.bytes_per_s, LATENCY_S["pcie"], 1.0)
            self.direct[GpuId(name, a.number), GpuId(name, b.number)] = there
            self.direct[GpuId(name, b.number), GpuId(name, a.number)] = back

    def _add_uplinks(self) -> dict[str, tuple[int, int]]:
        """Give every rack its way to the spine, unless there is only one."""
        network = self.cluster.network
        if len(self.cards_bytes_per_s) < 2:
            return {}
        latency_s = LATENCY_S["uplink"] if network.spine_latency_s is None else network.spine_latency_s
        by_name = {rack.name: rack for rack in network.racks}
        uplinks = {}
        for name, below in self.cards_bytes_per_s.items():
            rack = by_name.get(name, Rack(name=name))
            speed = rack.uplink_bytes_per_s or below / (rack.oversubscription or network.oversubscription)
            ends = (Vertex("leaf", name), Vertex("spine"))
            uplinks[name] = self._pair("uplink", ends, speed, latency_s / 2, None)
        return uplinks


def _card_names(group: NodeGroup, cards: Sequence[int]) -> tuple[str, ...]:
    names = group.nics.names if group.nics and group.nics.names else None
    return tuple(names[k] if names else f"nic{k}" for k in cards)
