"""A topology as a picture (SVG text): nodes with their GPUs and cards, leaf switches, spine.

Laid out from the top down: title, spine, per rack a leaf switch and below it the nodes in rows. All lengths
are whole pixels, so that equal topologies give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from planner.specs.cluster import NO_RACK
from planner.specs.topology import Node, Topology
from planner.topology_view import KIND, amount, link_rows, show_speed

MAX_DRAWN = 32
_CELL, _GPU, _CARD, _PAD, _GAP, _COLUMNS = 30, 24, 26, 12, 20, 4
_NIC_Y, _ROOT_Y, _GPU_Y, _NVLINK_Y = 12, 44, 56, 90
_STYLE = """\
.page{fill:#fff} .rack{fill:#f6f8fa;stroke:#d0d7de} .node{fill:#fff;stroke:#8c959f}
.gpu{fill:#dafbe1;stroke:#2da44e} .nic{fill:#ddf4ff;stroke:#0969da} .switch{fill:#0969da}
.nvlink,.lane{stroke:#2da44e;stroke-linecap:round} .nvlink{stroke-width:5} .lane{stroke-width:3}
.domain0,.domain1,.domain2{stroke:#2da44e;stroke-width:3} .domain1{stroke:#8250df} .domain2{stroke:#bc4c00}
.pcie{stroke:#8c959f;stroke-width:1.5} .root{stroke:#8c959f;stroke-width:4;stroke-linecap:round}
.host{stroke:#8c959f;stroke-width:2;stroke-dasharray:2 3} .net{stroke:#0969da;stroke-width:1.5}
text{font:11px sans-serif;fill:#1f2328} .mid{text-anchor:middle} .small{font-size:9px}
.light{fill:#fff} .title{font:bold 14px sans-serif} .quiet{fill:#57606a}"""


class _Cell(NamedTuple):
    """One node to draw, standing for `count` equal ones."""

    node: Node
    count: int  # type: ignore[assignment]  # hides tuple.count

    @property
    def label(self) -> str:
        times = f" and {self.count - 1} equal" if self.count > 1 else ""
        return f"{self.node.name}{times}: {self.node.gpu.name}"

    def gpu_x(self, index: int) -> int:
        """Middle of a GPU, from the node's left edge."""
        return _PAD + _CELL * self.node.indices.index(index) + _CELL // 2

    def card_x(self) -> list[int]:
        """Middle of each card that serves a GPU: above those GPUs, none over another."""
        found: list[int] = []
        for port in sorted((port for port in self.node.nics if port.gpus), key=lambda port: port.cards):
            middles = [self.gpu_x(index) for index in port.gpus]
            found.append(max(sum(middles) // len(middles), found[-1] + _CELL if found else 0))
        return found


@dataclass(slots=True)
class _Sizes:
    """Of everything that is equal all over the picture."""

    node_width: int
    node_height: int
    wired: bool
    """True when there is a network to draw."""
    lanes: bool
    """True when an NVLink domain joins nodes."""
    rise: int
    """How much higher the GPUs stand where no node has a card."""


@dataclass(slots=True)
class _Canvas:
    shapes: list[str] = field(default_factory=list)

    def box(self, style: str, x: int, y: int, width: int, height: int, round_: int = 3) -> None:
        place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{round_}"'
        self.shapes.append(f'<rect class="{style}" {place}/>')

    def line(self, style: str, x1: int, y1: int, x2: int, y2: int) -> None:
        self.shapes.append(f'<line class="{style}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def text(self, x: int, y: int, text: str, style: str = "") -> None:
        self.shapes.append(f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>')


def to_svg(topology: Topology) -> str:
    """Return the picture of a cluster as SVG text. Beyond 32 nodes, equal ones are drawn once."""
    racks = _drawn(topology)
    cells = [cell for cells in racks.values() for cell in cells]
    sizes = _sizes(topology, cells)
    canvas = _Canvas()
    top = 34 + (44 if topology.uplinks else 0)
    x, bottom, middles = _GAP, 0, []
    for name, here in racks.items():
        width, height = _draw_rack(canvas, sizes, (name, here), x, top)
        if name in topology.uplinks:
            middles.append(x + width // 2)
        x, bottom = x + width + _GAP, max(bottom, top + height)
    if middles:
        canvas.box("switch", _GAP, 36, x - 2 * _GAP, 18, 4)
        canvas.text(x // 2, 49, "spine", "mid light")
        for middle in middles:
            canvas.line("net", middle, 54, middle, top + 10)
    title = f"{topology.name}: {amount(len(topology.gpus), 'GPU')} on {amount(len(topology.nodes), 'node')}"
    canvas.text(_GAP, 22, title, "title")
    legend = _legend(topology)
    for row, (style, line) in enumerate(legend):
        y = bottom + 22 + 18 * row
        canvas.line(style, _GAP + 4, y - 4, _GAP + 22, y - 4)
        canvas.text(_GAP + 32, y, line)
    width = max(x, 2 * _GAP + 40 + 6 * max(len(line) for _, line in legend), 2 * _GAP + 8 * len(title))
    return _page(canvas.shapes, width, bottom + 22 + 18 * len(legend))


def _page(shapes: Sequence[str], width: int, height: int) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{_STYLE}\n</style>'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, page, *shapes, "</svg>"]) + "\n"


def _drawn(topology: Topology) -> dict[str, list[_Cell]]:
    """Return per rack what to draw."""
    racks: dict[str, list[_Cell]] = {}
    if len(topology.nodes) <= MAX_DRAWN:
        for node in topology.nodes:
            racks.setdefault(node.rack, []).append(_Cell(node, 1))
        return racks
    for class_ in topology.classes():
        units = [topology.units()[position] for position in class_]
        node = topology.node(units[0].nodes[0])
        racks.setdefault(node.rack, []).append(_Cell(node, sum(len(unit.nodes) for unit in units)))
    return racks


def _sizes(topology: Topology, cells: Sequence[_Cell]) -> _Sizes:
    nodes = [cell.node for cell in cells]
    widest = max(_CELL * len(node.indices) for node in nodes)
    levels = max(len(_levels(cell)) for cell in cells)
    rise = 0 if any(node.nics for node in nodes) else _ROOT_Y - _NIC_Y
    return _Sizes(
        node_width=2 * _PAD + max(widest, *(6 * len(cell.label) for cell in cells)),
        node_height=_NVLINK_Y - rise + 10 * levels + 16,
        wired=len(topology.nodes) > 1 and any(node.nics for node in nodes),
        lanes=any(len(unit.nodes) > 1 for unit in topology.units()),
        rise=rise,
    )


def _draw_rack(canvas: _Canvas, sizes: _Sizes, rack: tuple[str, list[_Cell]], x: int, y: int) -> tuple[int, int]:
    """Draw one rack with its leaf switch and nodes; return its width and height."""
    name, cells = rack
    columns = min(_COLUMNS, len(cells))
    rows = [cells[at : at + columns] for at in range(0, len(cells), columns)]
    inner = columns * sizes.node_width + (columns - 1) * _GAP
    width = inner + 2 * _GAP + (_GAP if len(rows) > 1 else 0) * (sizes.wired + sizes.lanes)
    left = x + _GAP + (_GAP if sizes.wired and len(rows) > 1 else 0)
    step = sizes.node_height + _GAP * (1 + sizes.wired + sizes.lanes)
    first = y + (48 if sizes.wired else _GAP)
    height = first - y + len(rows) * step - _GAP * sizes.wired
    canvas.box("rack", x, y, width, height, 8)
    places = [
        [(cell, left + c * (sizes.node_width + _GAP), first + r * step) for c, cell in enumerate(row)]
        for r, row in enumerate(rows)
    ]
    if sizes.wired:
        _draw_leaf(canvas, name, (x, y, width), places)
    if sizes.lanes:
        _draw_lanes(canvas, sizes, x + width - _GAP, places)
    for row in places:
        for cell, node_x, node_y in row:
            _draw_node(canvas, sizes, cell, node_x, node_y)
    return width, height


_Places = list[list[tuple[_Cell, int, int]]]


def _draw_leaf(canvas: _Canvas, name: str, frame: tuple[int, int, int], places: _Places) -> None:
    """Draw the leaf switch and the cables to every card: a trunk on the left, a bus above each row."""
    x, y, width = frame
    for row in places:
        drops = [node_x + card_x for cell, node_x, _ in row for card_x in cell.card_x()]
        if not drops:
            continue
        bus_y = row[0][2] - 9
        foot = x + _GAP if len(places) > 1 else (min(drops) + max(drops)) // 2
        for drop in drops:
            canvas.line("net", drop, bus_y, drop, row[0][2] + _NIC_Y)
        canvas.line("net", min(*drops, foot), bus_y, max(*drops, foot), bus_y)
        canvas.line("net", foot, y + 20, foot, bus_y)
    canvas.box("switch", x + _GAP // 2, y + 10, width - _GAP, 18, 4)
    label = "leaf switch" if name == NO_RACK else f"leaf switch {name}"
    canvas.text(x + width // 2, y + 23, label, "mid light")


def _draw_lanes(canvas: _Canvas, sizes: _Sizes, trunk: int, places: _Places) -> None:
    """Draw what joins the nodes of each NVLink domain: a lane below each row, a trunk on the right."""
    domains = sorted({cell.node.domain for row in places for cell, _, _ in row if cell.node.domain})
    for k, domain in enumerate(domains):
        ends, style = [], f"domain{k % 3}"
        for row in places:
            mine = [(node_x, node_y) for cell, node_x, node_y in row if cell.node.domain == domain]
            if not mine:
                continue
            lane_y = mine[0][1] + sizes.node_height + 7 + 7 * (k % 3)
            middles = [node_x + _PAD + _CELL // 2 for node_x, _ in mine]
            for middle in middles:
                canvas.line(style, middle, mine[0][1] + sizes.node_height, middle, lane_y)
            ends.append((lane_y, min(middles), max(middles)))
        # On one row the lane needs no trunk.
        side = trunk + 6 * (k % 3) if len(ends) > 1 else ends[0][2]
        for lane_y, first, _ in ends:
            canvas.line(style, first, lane_y, side, lane_y)
        canvas.line(style, side, ends[0][0], side, ends[-1][0])


def _draw_node(canvas: _Canvas, sizes: _Sizes, cell: _Cell, x: int, y: int) -> None:
    canvas.box("node", x, y, sizes.node_width, sizes.node_height, 5)
    canvas.text(x + _PAD, y + sizes.node_height - 6, cell.label, "quiet")
    y -= sizes.rise
    _draw_roots(canvas, cell, x, y)
    for index in cell.node.indices:
        middle = x + cell.gpu_x(index)
        canvas.box("gpu", middle - _GPU // 2, y + _GPU_Y, _GPU, _GPU)
        canvas.text(middle, y + _GPU_Y + 16, str(index), "mid")
    for level, groups in enumerate(_levels(cell)):
        for group in groups:
            ends = [x + cell.gpu_x(index) for index in group]
            line_y = y + _NVLINK_Y + 10 * level
            for end in ends:
                canvas.line("lane", end, y + _GPU_Y + _GPU, end, line_y)
            canvas.line("nvlink", min(ends), line_y, max(ends), line_y)


def _draw_roots(canvas: _Canvas, cell: _Cell, x: int, y: int) -> None:
    """Draw the PCIe roots, the GPUs below them and the cards above."""
    node = cell.node
    spans = []
    for root in node.roots:
        ends = [x + cell.gpu_x(index) for index in root]
        spans.append((min(ends), max(ends)))
        canvas.line("root", min(ends), y + _ROOT_Y, max(ends), y + _ROOT_Y)
        for end in ends:
            canvas.line("pcie", end, y + _ROOT_Y, end, y + _GPU_Y)
    if len(spans) > 1:
        canvas.line("host", min(a for a, _ in spans), y + _ROOT_Y, max(b for _, b in spans), y + _ROOT_Y)
    ports = sorted((port for port in node.nics if port.gpus), key=lambda port: port.cards)
    for port, card_x in zip(ports, cell.card_x(), strict=True):
        middle = x + card_x
        canvas.line("pcie", middle, y + _NIC_Y + 16, middle, y + _ROOT_Y)
        canvas.box("nic", middle - _CARD // 2, y + _NIC_Y, _CARD, 16)
        last = f"-{port.cards[-1]}" if len(port.cards) > 1 else ""
        canvas.text(middle, y + _NIC_Y + 11, f"{port.cards[0]}{last}", "mid small")


def _levels(cell: _Cell) -> list[list[tuple[int, ...]]]:
    """Return the NVLink groups by the line they are drawn on, so that none crosses another."""
    levels: list[list[tuple[int, ...]]] = []
    at = cell.node.indices.index
    for group in sorted(cell.node.nvlink_groups):
        clear = (
            level
            for level in levels
            if all(at(other[-1]) < at(group[0]) or at(group[-1]) < at(other[0]) for other in level)
        )
        if (level := next(clear, None)) is None:
            levels.append(level := [])
        level.append(group)
    return levels


def _legend(topology: Topology) -> list[tuple[str, str]]:
    """Return a style and a line per distinct link."""
    style = {"nvlink": "nvlink", "measured": "pcie", "pcie": "root", "memory": "root"}
    lines = []
    for row, _ in link_rows(topology):
        speed = row.nominal_bytes_per_s
        assumed = ", assumed" if row.assumed else ""
        planned = f"planned with {show_speed(speed * row.efficiency)} ({row.efficiency:.0%}{assumed})"
        lines.append((style.get(row.kind, "net"), f"{KIND[row.kind]} {show_speed(speed)}, {planned}"))
    return list(dict.fromkeys(lines))
