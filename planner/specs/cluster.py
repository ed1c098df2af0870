"""The cluster file: which GPUs stand where and what joins them. `topology.py` turns it into a graph.

Speeds are per direction and nominal, as the vendor prints them; how much of one is really reached is its
efficiency. Where neither the file nor a default that somebody measured says so, it is marked assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from planner.specs.base import Path_, Spec, load_preset, preset_names, suggest, validate
from planner.specs.gpu import Gpu
from planner.specs.units import BytesPerSecond, Name, SecondsOrZero, Share

LinkKind = Literal["nvlink", "pcie", "memory", "infiniband", "roce", "efa", "tcp", "uplink", "measured"]
NicKind = Literal["infiniband", "roce", "efa", "tcp"]
MAX_GPUS = 100_000
NO_RACK = "default"


class Default(NamedTuple):
    """What is taken for a kind of link when the file does not say: share of the nominal speed, and why."""

    efficiency: float
    source: str


# The measurements behind these are of other machines than the user's; therefore every one counts as assumed.
EFFICIENCY: dict[str, Default] = {
    "nvlink": Default(0.78, "NCCL send/recv, H200: 134 MB in 381 us, 352 of 450 GB/s (apex_plus)"),
    "pcie": Default(0.61, "two L40S: 1.07 GB exchanged in 56.0 ms, 19.2 of 31.5 GB/s (aiconfigurator)"),
    "memory": Default(0.5, "a copy reads and writes; what one core really reaches, planner profile measures"),
    "infiniband": Default(0.74, "KV over 2 x 200 Gb/s: 37 of 50 GB/s (Mooncake#1668); NCCL 35 of 50 (Vidur)"),
    "roce": Default(0.74, "KV over 2 x 200 Gb/s: 37 of 50 GB/s (Mooncake#1668)"),
    "efa": Default(0.6, "no measurement at hand; one report of 0.3 GB/s (nixl#1021): measure it"),
    "tcp": Default(0.6, "no share measured; sockets copy through host memory; 0.26 GB/s was reported (Mooncake#6)"),
    "uplink": Default(0.74, "as the network cards below it; flows that hash onto one cable share it"),
}
# One way. NVLink: 14 ring steps of an 8-GPU all-reduce take 14 us (apex_plus, H100). Network: NCCL send/recv
# of 2 kB takes 17 us between nodes and 5 us inside one (Vidur, H100).
LATENCY_S: dict[str, float] = {
    "nvlink": 1e-6,
    "pcie": 2e-6,
    "memory": 1e-6,
    "infiniband": 12e-6,
    "roce": 12e-6,
    "efa": 25e-6,
    "tcp": 50e-6,
    "uplink": 1e-6,
}
# Per GPU and direction; vendors print the sum of both directions.
NVLINK_BYTES_PER_S: dict[str, float] = {
    "a40": 56.25e9,
    "a100-80gb": 300e9,
    "h100-80gb": 450e9,
    "h200": 450e9,
    "gb200": 900e9,
}

Index = Annotated[int, Field(strict=True, ge=0, le=4095)]
Indexes = tuple[Index, ...]


class Root(Spec):
    """GPUs below one PCIe root or NUMA node; `bytes_per_s` is its way to the other roots."""

    gpus: Indexes
    bytes_per_s: BytesPerSecond | None = None


class Port(Spec):
    """One GPU whose PCIe slot is not as fast as the others' (negotiated x4, say)."""

    gpu: Index
    bytes_per_s: BytesPerSecond


class Measured(Spec):
    """What was measured between two GPUs. It wins over every class of link."""

    gpus: tuple[Index, Index]
    bytes_per_s: BytesPerSecond


class Links(Spec):
    """How the GPUs inside a node are joined.

    nvswitch: all of them; nvlink-pairs: bridges between devices 0-1, 2-3, ...; nvlink: the `groups` given;
    pcie: no NVLink at all; memory: processor cores, which copy out of the memory they share. `bytes_per_s` is per GPU
    and direction, of the kind named.
    """

    kind: Literal["nvswitch", "nvlink-pairs", "nvlink", "pcie", "memory"]
    bytes_per_s: BytesPerSecond | None = None
    groups: tuple[Indexes, ...] | None = None
    pcie_bytes_per_s: BytesPerSecond | None = None
    """Of each GPU's PCIe port; else `host_bytes_per_s` of the GPU."""
    roots: tuple[Root, ...] | None = None
    ports: tuple[Port, ...] = ()
    measured: tuple[Measured, ...] = ()
    efficiency: Share | None = None
    latency_s: SecondsOrZero | None = None


class Nics(Spec):
    """The network cards of one node. `near[k]` lists the GPUs beside card k; else they are spread evenly."""

    count: Annotated[int, Field(strict=True, ge=1, le=256)]
    bytes_per_s: BytesPerSecond
    kind: NicKind
    near: tuple[Indexes, ...] | None = None
    names: tuple[Name, ...] | None = None
    """As the transport library calls them (mlx5_0), for emitted device lists."""
    efficiency: Share | None = None


class NodeGroup(Spec):
    """`count` equal nodes. More than one are called name0, name1, ..."""

    name: Name
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)] = 1
    gpu: Annotated[str, Field(min_length=1, max_length=200)]
    gpus: Annotated[int, Field(strict=True, ge=1, le=1024)] | Indexes
    """How many, or which device indexes (leave out the drained ones)."""
    links: Links | None = None
    nics: Nics | None = None
    nvlink_domain: Name | None = None
    """Nodes of one domain share one NVLink switch. Without it no NVLink between nodes is assumed."""
    rack: Name | None = None

    @property
    def indices(self) -> Indexes:
        """Device indexes, in order."""
        return tuple(range(self.gpus)) if isinstance(self.gpus, int) else tuple(sorted(self.gpus))

    @property
    def node_names(self) -> tuple[str, ...]:
        """One name per node."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}{i}" for i in range(self.count))


class Rack(Spec):
    """One leaf switch: its way up, as a speed or as the ratio of speed below to speed above."""

    name: Name
    uplink_bytes_per_s: BytesPerSecond | None = None
    oversubscription: Annotated[float, Field(ge=1, le=1e6)] | None = None


class Network(Spec):
    """What lies between nodes: a leaf switch per rack, one spine above them."""

    latency_s: SecondsOrZero | None = None
    """One way between two nodes below the same leaf."""
    spine_latency_s: SecondsOrZero | None = None
    """Added between racks."""
    oversubscription: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    racks: tuple[Rack, ...] = ()


class Efficiency(Spec):
    """Measured share of the nominal speed, by kind of link. Whatever is given is no longer assumed."""

    nvlink: Share | None = None
    pcie: Share | None = None
    memory: Share | None = None
    infiniband: Share | None = None
    roce: Share | None = None
    efa: Share | None = None
    tcp: Share | None = None
    uplink: Share | None = None


class Cluster(Spec):
    """The cluster file."""

    name: Name = "cluster"
    gpus: tuple[Gpu, ...] = ()
    """GPU types that are no preset."""
    nodes: tuple[NodeGroup, ...]
    network: Network = Network()
    efficiency: Efficiency = Efficiency()
    source: str = ""


@lru_cache(maxsize=1)
def gpu_presets() -> tuple[Gpu, ...]:
    """Return the shipped GPU types, by name."""
    documents = (load_preset("gpus", name) for name in preset_names("gpus"))
    return tuple(validate(Gpu, document) for document in documents if document is not None)


def find_gpu(name: str, inline: Sequence[Gpu] = ()) -> Gpu | None:
    """Return the GPU type called `name` (aliases count, case does not): out of `inline`, else a preset."""
    return next((gpu for gpu in (*inline, *gpu_presets()) if gpu.is_called(name)), None)


def known_gpus(inline: Sequence[Gpu] = ()) -> list[str]:
    """Return every name a GPU type goes by, for a suggestion."""
    return [name for gpu in (*inline, *gpu_presets()) for name in (gpu.name, *gpu.aliases)]


def nvlink_bytes_per_s(gpu: Gpu) -> float | None:
    """Return the NVLink speed [bytes/s] of one such GPU, one way, or None when it is not on record."""
    names = {gpu.name.lower(), *(alias.lower() for alias in gpu.aliases)}
    return next((speed for name, speed in NVLINK_BYTES_PER_S.items() if name in names), None)


class Mistake(NamedTuple):
    """A message and the path in the file it is about."""

    message: str
    path: Path_


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield what is wrong with a cluster beyond the type of its fields."""
    if not cluster.nodes:
        yield Mistake("expected at least one node", ("nodes",))
    for g, group in enumerate(cluster.nodes):
        yield from _group_mistakes(cluster, group, ("nodes", g))
    sizes = [group.count * len(group.indices) for group in cluster.nodes]
    if sum(sizes) > MAX_GPUS:
        yield Mistake(f"expected at most {MAX_GPUS:,} GPUs in all, got {sum(sizes):,}", ("nodes",))
        return
    yield from _name_mistakes(cluster)
    yield from _domain_mistakes(cluster)
    yield from _rack_mistakes(cluster)
    yield from _gap_mistakes(cluster)


def _group_mistakes(cluster: Cluster, group: NodeGroup, at: Path_) -> Iterator[Mistake]:
    gpu = find_gpu(group.gpu, cluster.gpus)
    if gpu is None:
        known = sorted({g.name for g in (*cluster.gpus, *gpu_presets())})
        near = suggest(group.gpu, known_gpus(cluster.gpus))
        way_out = f"known: {', '.join(known)}, or define it under gpus"
        yield Mistake(f"unknown GPU {group.gpu!r}{near}; {way_out}", (*at, "gpu"))
    if not isinstance(group.gpus, int):
        if not group.gpus:
            yield Mistake("expected at least one GPU, got an empty list", (*at, "gpus"))
        yield from _twice(group.gpus, (*at, "gpus"))
    if group.links:
        yield from _links_mistakes(group, group.links, (*at, "links"))
    if group.nics:
        yield from _nics_mistakes(group, group.nics, (*at, "nics"))
    speed_given = group.links is not None and group.links.bytes_per_s is not None
    if gpu and uses_nvlink(group) and not speed_given and nvlink_bytes_per_s(gpu) is None:
        message = f"NVLink speed of {group.gpu} is not on record: give links.bytes_per_s (one way)"
        yield Mistake(message, (*at, "links") if group.links else at)


def uses_nvlink(group: NodeGroup) -> bool:
    """True when the file says that the node has NVLink. The name of a GPU never says so."""
    return group.links.kind not in ("pcie", "memory") if group.links else group.nvlink_domain is not None


def _twice(values: Sequence[object], at: Path_) -> Iterator[Mistake]:
    for value, times in Counter(values).items():
        if times > 1:
            yield Mistake(f"{value} is listed {times} times", at)


def _inside(indexes: Sequence[int], group: NodeGroup, at: Path_) -> Iterator[Mistake]:
    have = group.indices
    for index in sorted(set(indexes) - set(have)):
        yield Mistake(f"GPU {index} is not among this node's {_ranges(have)}", at)


def _ranges(indexes: Sequence[int]) -> str:
    if len(indexes) > 2 and indexes[-1] - indexes[0] == len(indexes) - 1:
        return f"GPUs {indexes[0]} to {indexes[-1]}"
    return "GPUs " + ", ".join(str(index) for index in indexes[:16]) + (", ..." if len(indexes) > 16 else "")


def _links_mistakes(group: NodeGroup, links: Links, at: Path_) -> Iterator[Mistake]:
    if links.kind == "nvlink" and not links.groups:
        yield Mistake("kind nvlink needs groups, such as [[0, 1], [2, 3]]; for all GPUs say nvswitch", at)
    if links.groups is not None and links.kind != "nvlink":
        yield Mistake(f"groups belong to kind nvlink, not to {links.kind}", (*at, "groups"))
    if links.kind in ("pcie", "memory") and links.bytes_per_s and links.pcie_bytes_per_s:
        yield Mistake(f"with kind {links.kind} give bytes_per_s only", (*at, "pcie_bytes_per_s"))
    for key, lists in (("groups", links.groups), ("roots", [r.gpus for r in links.roots or ()])):
        for i, indexes in enumerate(lists or ()):
            yield from _inside(indexes, group, (*at, key, i))
        yield from _twice([index for indexes in lists or () for index in indexes], (*at, key))
    if links.roots is not None:
        missing = set(group.indices) - {index for root in links.roots for index in root.gpus}
        if missing:
            yield Mistake(f"expected every GPU under one root; missing: {sorted(missing)}", (*at, "roots"))
    for i, port in enumerate(links.ports):
        yield from _inside([port.gpu], group, (*at, "ports", i))
    yield from _twice([port.gpu for port in links.ports], (*at, "ports"))
    for i, pair in enumerate(links.measured):
        yield from _inside(pair.gpus, group, (*at, "measured", i))
        if pair.gpus[0] == pair.gpus[1]:
            yield Mistake("expected two different GPUs", (*at, "measured", i, "gpus"))
    yield from _twice([tuple(sorted(pair.gpus)) for pair in links.measured], (*at, "measured"))


def _nics_mistakes(group: NodeGroup, nics: Nics, at: Path_) -> Iterator[Mistake]:
    for key, values in (("near", nics.near), ("names", nics.names)):
        if values is not None and len(values) != nics.count:
            yield Mistake(f"expected one entry per card ({nics.count}), got {len(values)}", (*at, key))
    for k, near in enumerate(nics.near or ()):
        yield from _inside(near, group, (*at, "near", k))
        yield from _twice(near, (*at, "near", k))
    yield from _twice(nics.names or (), (*at, "names"))


def _name_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    seen: set[str] = set()
    for g, group in enumerate(cluster.nodes):
        for name in group.node_names:
            if name in seen:
                yield Mistake(f"two nodes are called {name!r}", ("nodes", g, "name"))
                break
            seen.add(name)
    names = Counter(gpu.name.lower() for gpu in cluster.gpus)
    for i, gpu in enumerate(cluster.gpus):
        if names[gpu.name.lower()] > 1:
            yield Mistake(f"two GPU types are called {gpu.name!r}", ("gpus", i, "name"))


def _domain_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    first: dict[str, NodeGroup] = {}
    for g, group in enumerate(cluster.nodes):
        if group.nvlink_domain is None:
            continue
        at = ("nodes", g, "nvlink_domain")
        if group.links and group.links.kind != "nvswitch":
            yield Mistake(f"an NVLink domain needs links of kind nvswitch, got {group.links.kind}", at)
        other = first.setdefault(group.nvlink_domain, group)
        if find_gpu(other.gpu, cluster.gpus) != find_gpu(group.gpu, cluster.gpus):
            message = f"one domain holds one GPU type: {group.name} has {group.gpu}, {other.name} {other.gpu}"
            yield Mistake(message, at)


def _rack_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    known = sorted({group.rack or NO_RACK for group in cluster.nodes})
    for r, rack in enumerate(cluster.network.racks):
        at = ("network", "racks", r)
        if rack.name not in known:
            near = suggest(rack.name, known)
            message = f"no node stands in rack {rack.name!r}{near}; racks: {', '.join(known)}"
            yield Mistake(message, (*at, "name"))
        if rack.uplink_bytes_per_s is not None and rack.oversubscription is not None:
            yield Mistake("give uplink_bytes_per_s or oversubscription, not both", at)
    yield from _twice([rack.name for rack in cluster.network.racks], ("network", "racks"))


FABRIC = {"infiniband": "InfiniBand", "roce": "Ethernet", "tcp": "Ethernet", "efa": "EFA"}


def _gap_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Nodes that no path joins to the others."""
    groups = cluster.nodes
    domains = {group.nvlink_domain for group in groups}
    alone = len(groups) == 1 and groups[0].count == 1
    if not groups or alone or (len(domains) == 1 and None not in domains):
        return
    wired = [group.nics.kind for group in groups if group.nics]
    for g, group in enumerate(groups):
        if group.nics is None:
            way_out = "give it nics" + ("" if group.nvlink_domain else " or a common nvlink_domain")
            yield Mistake(f"no way from node {group.node_names[0]!r} to the others: {way_out}", ("nodes", g))
        elif (own := FABRIC[group.nics.kind]) != (first := FABRIC[wired[0]]):
            message = (
                f"no way from node {group.node_names[0]!r} to the others: it is on {own}, the nodes before "
                f"it on {first}; use one network, or plan two clusters"
            )
            yield Mistake(message, ("nodes", g, "nics", "kind"))
