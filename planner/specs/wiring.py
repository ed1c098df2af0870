"""What the nodes of one group have in common: who shares NVLink, a PCIe root, a network card."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.specs.cluster import LinkKind, Links, NodeGroup, nvlink_bytes_per_s, uses_nvlink
from planner.specs.gpu import Gpu

_BARE = ("pcie", "memory")
"""Kinds of links inside a node without NVLink."""


class Port(NamedTuple):
    """Network cards near the same GPUs, which act as one, and the GPUs they serve."""

    cards: tuple[int, ...]
    gpus: tuple[int, ...]
    root: int | None
    """The PCIe root it hangs below; None when it is equally far from several."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The wiring inside each node of one group; speeds nominal and one way."""

    gpu: Gpu
    links: Links
    nvlink_groups: tuple[tuple[int, ...], ...]
    nvlink_bytes_per_s: float
    tp_groups: tuple[tuple[int, ...], ...]
    roots: tuple[tuple[int, ...], ...]
    root_bytes_per_s: tuple[float, ...]
    pcie_bytes_per_s: float
    nics: tuple[Port, ...]
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, group: NodeGroup, gpu: Gpu) -> NodePlan:
        links = group.links or Links(kind="nvswitch" if uses_nvlink(group) else "pcie")
        pcie = links.pcie_bytes_per_s or (links.bytes_per_s if links.kind in _BARE else None)
        pcie = pcie or gpu.host_bytes_per_s
        roots = tuple(tuple(sorted(root.gpus)) for root in links.roots or ()) or (group.indices,)
        nvlink = _nvlink_groups(links, group.indices)
        speed = (links.bytes_per_s or nvlink_bytes_per_s(gpu) or 0.0) if nvlink else 0.0
        nics = _nic_ports(group, roots)
        root_speeds = tuple(root.bytes_per_s or pcie for root in links.roots or ()) or (pcie,)
        tp_groups = _with_singles(nvlink, group.indices) if nvlink else roots
        kind = _kind(group, gpu, (links, nvlink, speed, roots, root_speeds, pcie, nics))
        return cls(gpu, links, nvlink, speed, tp_groups, roots, root_speeds, pcie, nics, kind)

    def root_of(self, index: int) -> int:
        """Return the number of the PCIe root above a device."""
        return next(r for r, indexes in enumerate(self.roots) if index in indexes)

    def port_bytes_per_s(self, index: int) -> float:
        """Return the nominal speed [bytes/s] of a device's PCIe slot."""
        return next((port.bytes_per_s for port in self.links.ports if port.gpu == index), self.pcie_bytes_per_s)

    @property
    def pcie_own(self) -> float | None:
        """The efficiency that the file gives for PCIe (of cores: memory) in this node."""
        return self.links.efficiency if self.links.kind in _BARE else None

    @property
    def slot_kind(self) -> LinkKind:
        """What joins a device to the rest of its node, where NVLink does not."""
        return "memory" if self.links.kind == "memory" else "pcie"


def _nvlink_groups(links: Links, indices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if links.kind in _BARE:
        return ()
    if links.kind == "nvswitch":
        return (indices,)
    if links.kind == "nvlink":
        return tuple(tuple(sorted(group)) for group in links.groups or ())
    # A bridge joins slots 2k and 2k+1: where one of the two is drained, the other stands alone.
    pairs = ((i, i + 1) for i in indices if i % 2 == 0 and i + 1 in indices)
    return tuple(pairs)


def _with_singles(groups: tuple[tuple[int, ...], ...], indices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    covered = {index for group in groups for index in group}
    return tuple(sorted((*groups, *((index,) for index in indices if index not in covered))))


def _kind(group: NodeGroup, gpu: Gpu, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what makes two nodes alike. GPUs count by position: which device is drained does not matter."""
    links, nvlink, speed, roots, root_speeds, pcie, nics = parts
    at = {index: position for position, index in enumerate(group.indices)}

    def places(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(at[index] for index in indexes) for indexes in groups)

    ports = tuple(sorted((at[port.gpu], port.bytes_per_s) for port in links.ports))
    pairs = tuple(sorted((tuple(sorted(at[i] for i in pair.gpus)), pair.bytes_per_s) for pair in links.measured))
    cards = tuple((len(port.cards), places([port.gpus]), port.root) for port in nics if port.gpus)
    card = group.nics and (group.nics.kind, group.nics.bytes_per_s, group.nics.efficiency)
    lanes = (links.kind, places(nvlink), speed, links.efficiency, links.latency_s)
    return (gpu.name, len(at), lanes, places(roots), root_speeds, pcie, ports, pairs, cards, card)


def _nic_ports(group: NodeGroup, roots: tuple[tuple[int, ...], ...]) -> tuple[Port, ...]:
    """Return the ports of a node: cards near the same GPUs bonded, and every GPU given to one port."""
    if group.nics is None:
        return ()
    near = group.nics.near
    if near is None or not any(near):  # no affinity known: spread evenly, never all on the first card
        near = _spread(group.nics.count, group.indices)
    bonded: dict[tuple[int, ...], list[int]] = {}
    for card, gpus in enumerate(near):
        bonded.setdefault(tuple(sorted(gpus)), []).append(card)
    ports = [(tuple(cards), gpus, _root_above(gpus, roots)) for gpus, cards in bonded.items()]
    served = _serve(group.indices, ports, roots)
    return tuple(
        Port(cards, tuple(i for i in group.indices if served[i] == p), root) for p, (cards, _, root) in enumerate(ports)
    )


def _spread(cards: int, indices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs near each card when only the counts are known. A drained device keeps its slot."""
    slots = indices[-1] + 1
    near: list[tuple[int, ...]] = [()] * cards
    for card in range(cards):
        if cards <= slots:
            near[card] = tuple(i for i in indices if i * cards // slots == card)
        else:
            near[card] = tuple(i for i in indices if card * slots // cards == i)
    return tuple(near)


def _root_above(gpus: tuple[int, ...], roots: tuple[tuple[int, ...], ...]) -> int | None:
    above = {r for r, indexes in enumerate(roots) if set(indexes) & set(gpus)}
    return above.pop() if len(above) == 1 else None if len(roots) > 1 else 0


def _serve(
    indices: tuple[int, ...],
    ports: list[tuple[tuple[int, ...], tuple[int, ...], int | None]],
    roots: tuple[tuple[int, ...], ...],
) -> dict[int, int]:
    """Return the port of each GPU: the one nearest, of several the least shared; far GPUs are spread."""
    served: dict[int, int] = {}
    for index in indices:
        close = [p for p, (_, gpus, _) in enumerate(ports) if index in gpus]
        if close:
            served[index] = min(close, key=lambda p: (len(ports[p][1]), p))
    for r, indexes in enumerate(roots):
        far = [index for index in indexes if index not in served]
        same = [p for p, (_, gpus, root) in enumerate(ports) if gpus and root == r]
        choice = same or [p for p, (_, gpus, _) in enumerate(ports) if gpus]
        for position, index in enumerate(far):
            served[index] = choice[position * len(choice) // len(far)]
    return served
