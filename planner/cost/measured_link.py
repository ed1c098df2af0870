"""What a measured table of transfers says of a link: a fixed time and a bandwidth, with their held-out error."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.cost.base import TermError
from planner.cost.operator_physics import Link
from planner.cost.operators import fit_operator
from planner.cost.transfer import TransferCost
from planner.specs import topology as graph
from planner.specs.profile import Profile

_FEWEST = 3
"""Sizes that a fixed time and a rate can be told apart with."""
_QUANTILES_APART = 2.56
"""Standard deviations between the 10 % and the 90 % quantile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link as it was timed: fixed_s + bytes / bytes_per_s. The rate is effective, for a topology's link."""

    fixed_s: float
    bytes_per_s: float
    error: TermError

    def transfer_cost(self) -> TransferCost:
        """Return what a transfer costs beside its bytes; posting one message is inside its fixed time."""
        return TransferCost(fixed_s=self.fixed_s, per_piece_s=0.0)


def with_measured_memory(topology: graph.Topology, profiles: Iterable[Profile]) -> graph.Topology:
    """Return the cluster with the memory that cores share as fast as profiles have seen KV blocks pulled through it.

    Only where a profile is of the node's cores; its own words of the cluster file stand for all other links.
    """
    for profile in profiles:
        rows = next((each.rows for each in profile.transfers if each.what == "pull"), ())
        if len(rows) < _FEWEST:
            continue
        sizes, time_s, low_s, high_s = np.array(rows).T
        link = measured_link(sizes, time_s, (high_s - low_s) / _QUANTILES_APART / time_s)
        nodes = {node.name for node in topology.nodes if profile.is_of(node.gpu)}
        topology = topology.with_links(partial(_as_measured, nodes, link, f"profile {profile.name}"))
    return topology


def _as_measured(nodes: Container[str], found: MeasuredLink, why: str, link: graph.Link) -> graph.Link:
    """Return the link as it was measured, if it is memory of these nodes: of the two on a way, half the fixed time."""
    if link.kind != "memory" or link.source.owner not in nodes:
        return link
    return replace(
        link,
        nominal_bytes_per_s=found.bytes_per_s,
        efficiency=1.0,
        assumed=False,
        latency_s=found.fixed_s / 2,
        why=why,
    )


def measured_link(sizes: np.ndarray, time_s: np.ndarray, spread: np.ndarray | None = None) -> MeasuredLink:
    """Return the link that predicts these transfers best in relative error.

    sizes: (n,) [bytes]; time_s: (n,); spread: (n,), standard deviation over repeats, relative. Raises InputError.
    """
    law = fit_operator(np.asarray(sizes, dtype=float)[:, None], time_s, Link(), spread)
    fixed_s, per_byte_s = np.exp(law.parameters)
    return MeasuredLink(float(fixed_s), float(1.0 / per_byte_s), law.error)
