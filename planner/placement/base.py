"""What goes into the placement program and what comes out of it. See `program.py` for the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from planner.errors import PlannerError
from planner.specs.layout import Layout, Phase
from planner.specs.topology import GpuId, Topology, Unit

Objective = Literal["max_goodput", "min_gpus"]
Kind = tuple[Phase, Layout, str]
"""What makes instances interchangeable: phase, layout and GPU type."""


class Unplaceable(PlannerError):
    """The wanted instances do not fit on this cluster, or cannot reach the wanted rate. `reason` says why."""

    exit_code = 2

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


class Candidate(NamedTuple):
    """One kind of instance and the request rate that ONE instance of it sustains in a pool of its kind."""

    phase: Phase
    layout: Layout
    gpu: str
    rate_rps: float

    @property
    def kind(self) -> Kind:
        """Return the key under which `Program.counts` forces a number of these."""
        return (self.phase, self.layout, self.gpu)

    def __str__(self) -> str:
        return f"{self.phase} {self.layout} on {self.gpu}"


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance on named GPUs: `stages[s][r]` is the GPU of pipeline stage s, tensor-parallel rank r."""

    name: str
    phase: Phase
    layout: Layout
    gpu: str
    stages: tuple[tuple[GpuId, ...], ...]

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Return all its GPUs, stage by stage."""
        return tuple(gpu for stage in self.stages for gpu in stage)

    @property
    def kind(self) -> Kind:
        """Return the key of the candidate it was made from."""
        return (self.phase, self.layout, self.gpu)


@dataclass(frozen=True, slots=True)
class KvFlow:
    """KV caches that one prefill instance hands to one decode instance, and their share of its requests."""

    prefill: str
    decode: str
    rate_rps: float
    share: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances on named GPUs, the flows between them, and how good that provably is.

    `value_rps` is what the flows carry; no placement of these candidates beats `bound_rps`. For `min_gpus` it
    is the demand, and `bound_gpus` says how few GPUs could do. `gap` is how far the objective (rate or
    GPUs) is from its bound, relative to the larger; `seconds` is the processor time of solving.
    """

    instances: tuple[PlacedInstance, ...]
    flows: tuple[KvFlow, ...]
    value_rps: float
    bound_rps: float
    gap: float
    seconds: float
    solver: str
    idle: tuple[GpuId, ...]
    bound_gpus: float | None = None

    @property
    def gpus(self) -> int:
        """Return how many GPUs the instances take."""
        return sum(instance.layout.gpus for instance in self.instances)


class Nic(NamedTuple):
    """The network card (or bundle) that carries the traffic of these GPUs; effective speeds [bytes/s]."""

    gpus: tuple[GpuId, ...]
    egress_bytes_per_s: float
    ingress_bytes_per_s: float


class Pool(NamedTuple):
    """GPUs among which a tensor-parallel group may lie: a node, or an NVLink domain over several nodes.

    `groups` are its fastest-linked sets of GPUs (NVLink bridge pairs, or all of them). GPUs behind no card of
    `nics` reach no other pool.
    """

    name: str
    gpu: str
    groups: tuple[tuple[GpuId, ...], ...]
    nics: tuple[Nic, ...] = ()
    rack: str = ""

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """Return its GPUs, group by group."""
        return tuple(gpu for group in self.groups for gpu in group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return how many GPUs each fast group holds."""
        return tuple(len(group) for group in self.groups)

    @property
    def egress_bytes_per_s(self) -> float:
        """Return what all its cards can send."""
        return sum(nic.egress_bytes_per_s for nic in self.nics)

    @property
    def ingress_bytes_per_s(self) -> float:
        """Return what all its cards can receive."""
        return sum(nic.ingress_bytes_per_s for nic in self.nics)


class Uplink(NamedTuple):
    """What a rack can exchange with the other racks, or a GPU with all others, each way [bytes/s]."""

    egress_bytes_per_s: float
    ingress_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster as the program sees it.

    `uplinks` are of those racks whose uplink can bind; `ports` say, per GPU type, over which fastest link KV
    leaves a GPU and enters it.
    """

    pools: tuple[Pool, ...]
    uplinks: Mapping[str, Uplink] = field(default_factory=dict)
    ports: Mapping[str, Uplink] = field(default_factory=dict)

    def most_rps(self, candidate: Candidate, kv_bytes: float) -> float:
        """Return the rate of one instance [requests/s], bound by the ports of its GPUs."""
        port = self.ports.get(candidate.gpu)
        if port is None or kv_bytes <= 0 or candidate.phase == "aggregated":
            return candidate.rate_rps
        speed = port.egress_bytes_per_s if candidate.phase == "prefill" else port.ingress_bytes_per_s
        return min(candidate.rate_rps, candidate.layout.gpus * speed / kv_bytes)

    def rack(self, pool: Pool) -> str:
        """Return the pool's rack where its uplink can bind, else "" (one flat network)."""
        return pool.rack if pool.rack in self.uplinks else ""

    def classes(self) -> list[list[Pool]]:
        """Return pools grouped by all that the program tells apart, in order of first appearance.

        Interchangeable pools are what makes a placement program slow: any permutation of them is as good.
        """
        groups: dict[tuple[object, ...], list[Pool]] = {}
        for pool in self.pools:
            cards = sorted((len(nic.gpus), *nic[1:]) for nic in pool.nics)
            groups.setdefault((pool.gpu, pool.sizes, self.rack(pool), tuple(cards)), []).append(pool)
        return list(groups.values())


def site(topology: Topology | Site) -> Site:
    """Return what the program needs to know of a cluster."""
    if isinstance(topology, Site):
        return topology
    pools = tuple(_pool(topology, unit) for unit in topology.units())
    uplinks = {
        rack: Uplink(topology.links[up].bytes_per_s, topology.links[down].bytes_per_s)
        for rack, (up, down) in sorted(topology.uplinks.items())
    }
    binding = {rack: uplink for rack, uplink in uplinks.items() if _can_bind(rack, uplink, pools)}
    return Site(pools, binding, _ports(topology))


def _ports(topology: Topology) -> dict[str, Uplink]:
    kind = {(node.name, index): node.gpu.name for node in topology.nodes for index in node.indices}
    ports = {name: Uplink(0.0, 0.0) for name in kind.values()}
    for link in topology.links:
        for end, vertex in enumerate((link.source, link.target)):
            if vertex.kind == "gpu":
                speeds = list(ports[name := kind[vertex.owner, vertex.number]])
                speeds[end] = max(speeds[end], link.bytes_per_s)
                ports[name] = Uplink(*speeds)
    return ports


def _pool(topology: Topology, unit: Unit) -> Pool:
    nodes = [topology.node(name) for name in unit.nodes]
    groups: tuple[tuple[GpuId, ...], ...] = (unit.gpus,)
    if len(nodes) == 1:
        lists = [*nodes[0].tp_groups]
        lists += [(i,) for i in nodes[0].indices if not any(i in group for group in lists)]
        groups = tuple(tuple(GpuId(nodes[0].name, i) for i in group) for group in lists)
    ports = [tuple(GpuId(node.name, i) for i in port.gpus) for node in nodes for port in node.nics if port.gpus]
    parts = [replace(unit, gpus=gpus) for gpus in ports]
    nics = [Nic(p.gpus, topology.egress_bytes_per_s(p), topology.ingress_bytes_per_s(p)) for p in parts]
    return Pool(unit.name, unit.gpu.name, groups, tuple(nics), unit.racks[0])


def _can_bind(rack: str, uplink: Uplink, pools: tuple[Pool, ...]) -> bool:
    """False when all cards of the rack together cannot fill its uplink: then the rack is no limit at all."""
    sent = sum(pool.egress_bytes_per_s for pool in pools if pool.rack == rack)
    received = sum(pool.ingress_bytes_per_s for pool in pools if pool.rack == rack)
    return uplink.egress_bytes_per_s < sent or uplink.ingress_bytes_per_s < received


@dataclass(frozen=True, slots=True)
class Program:
    """One placement question. The candidates are either all aggregated, or prefill and decode.

    `rate_rps` is the demand of `min_gpus`, and a cap where the objective is `max_goodput`. `counts` forces
    exact numbers of instances (a kind it does not name gets none), to place a plan searched elsewhere.
    """

    topology: Topology | Site
    candidates: tuple[Candidate, ...]
    kv_bytes_per_request: float = 0.0
    objective: Objective = "max_goodput"
    rate_rps: float | None = None
    counts: Mapping[Kind, int] | None = None
    gap: float = 1e-3
    time_limit_s: float = 10.0
