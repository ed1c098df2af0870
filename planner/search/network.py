"""The network before anything is placed: each instance's share of its node's cards, for ranking combinations.

Where an instance will stand is not known yet, so this is the best case: decode instances are spread evenly over the
nodes, prefill instances fill up around them, and KV stays inside the node as far as the counts allow. What is left
crosses the cards next to the instance's own GPUs. Placement and replay judge the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.cost.transfer import TransferCost
from planner.search.goodput import pool
from planner.search.joint import Combination
from planner.search.layouts import Kind
from planner.simulator.cluster import KvPath, System
from planner.specs.topology import Topology, Unit

_NEGLIGIBLE = 0.02
"""A network that is used this little, and a transfer that takes this share of the TTFT bound, rank no candidate."""


@dataclass(frozen=True, slots=True, eq=False)
class RoughNetwork:
    """Builds the system of a combination with links that its instances share in the best case."""

    topology: Topology
    settings: dict
    """What all systems of the problem have in common (`System`'s keywords)."""
    mean_prompt_tokens: float
    ttft_s: float

    def system(self, one: Combination) -> System:
        """Return the combination as a system; its network is free where it cannot matter."""
        system = pool(one.kinds, **self.settings)
        if one.kinds[0][0].phase == "aggregated":
            return system
        (prefill, at_p), (decode, at_d) = one.kinds
        local = self._local_share(prefill, at_p, decode, at_d)
        out = [self._bytes_per_s(prefill, local, up=True)] * at_p
        into = [self._bytes_per_s(decode, local, up=False)] * at_d
        if self._negligible(one, sum(out), sum(into), min(out[0], into[0])):
            return system
        fixed_s = TransferCost().fixed_s
        paths = tuple(
            KvPath(p, at_p + d, fixed_s, ((p, 1.0), (at_p + d, 1.0))) for p in range(at_p) for d in range(at_d)
        )
        return replace(system, paths=paths, link_bytes_per_s=(*out, *into))

    def _negligible(self, one: Combination, out: float, into: float, alone: float) -> bool:
        size = self.settings["kv_bytes_per_token"] * self.mean_prompt_tokens
        return one.bound_rps * size < _NEGLIGIBLE * min(out, into) and size / alone < _NEGLIGIBLE * self.ttft_s

    def _local_share(self, prefill: Kind, at_p: int, decode: Kind, at_d: int) -> float:
        """Return the share of the KV that can stay inside a node (or NVLink domain)."""
        if prefill.gpu != decode.gpu:
            return 0.0
        units = self._units(decode.gpu)
        size = max(len(unit.gpus) for unit in units)
        per_unit = -(-at_d // len(units))
        beside = max(size - per_unit * decode.gpus, 0) // prefill.gpus
        return min(1.0, beside / per_unit * at_d / at_p)

    def _bytes_per_s(self, kind: Kind, local: float, up: bool) -> float:
        """Return how fast [bytes/s] an instance moves KV of which `local` stays inside its node."""
        unit = max(self._units(kind.gpu), key=lambda u: len(u.gpus))
        share = kind.gpus / len(unit.gpus)
        through = self.topology.egress_bytes_per_s(unit) if up else self.topology.ingress_bytes_per_s(unit)
        inside = _inside_bytes_per_s(self.topology, unit) * kind.gpus
        slowest = max(local / inside, (1 - local) / (through * share) if through > 0 else 0.0)
        return 1 / slowest if slowest > 0 else inf

    def _units(self, gpu: str) -> Sequence[Unit]:
        return [unit for unit in self.topology.units() if unit.gpu.name == gpu]


def _inside_bytes_per_s(topology: Topology, unit: Unit) -> float:
    """Return the speed [bytes/s] between two GPUs of a unit."""
    return topology.path_bytes_per_s(unit.gpus[0], unit.gpus[1]) if len(unit.gpus) > 1 else inf
