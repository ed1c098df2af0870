"""What people see of a cluster: tables and a picture."""

import subprocess
import sys
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from planner.errors import InputError
from planner.specs.base import load_preset, parse, preset_names
from planner.specs.topology import GpuId, Topology, read_cluster
from planner.topology_svg import to_svg
from planner.topology_view import describe, describe_path, parse_gpu


def preset(name: str) -> Topology:
    document = load_preset("clusters", name)
    assert document is not None
    return read_cluster(document)


def text_of(renderable) -> str:
    out = StringIO()
    Console(width=160, file=out).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_shipped_cluster_can_be_shown_and_drawn(name):
    topology = preset(name)
    shown = text_of(describe(topology))
    assert f"{name}: {len(topology.gpus)} GPU" in shown
    root = ElementTree.fromstring(to_svg(topology))
    gpus = [shape for shape in root if shape.get("class") == "gpu"]
    assert len(gpus) == len(topology.gpus)


def test_the_tables_give_nominal_and_planned_speeds_and_say_what_is_assumed():
    shown = text_of(describe(preset("a40-pairs")))
    assert "0,1  2,3  4,5  6,7" in shown
    assert "56.2 GB/s" in shown and "78% (assumed)" in shown and "43.9 GB/s" in shown
    assert "assumed  nvlink: 78% of the nominal speed is assumed: NCCL send/recv" in shown


def test_a_path_marks_the_hop_that_binds():
    topology = preset("a100-distserve")
    shown = text_of(describe_path(topology, GpuId("node0", 0), GpuId("node3", 7)))
    assert "node0:0 to node3:7: 1.88 GB/s" in shown
    binding = [line for line in shown.splitlines() if "binds" in line]
    assert binding and all("TCP" in line for line in binding)
    assert "nothing moves" in text_of(describe_path(topology, GpuId("node0", 0), GpuId("node0", 0)))


def test_a_gpu_is_named_by_node_and_index():
    topology = preset("h100-2x8")
    assert parse_gpu(topology, "node1:7") == GpuId("node1", 7)
    for bad in ("node1", "node1:", "node1:x", "node1:-1", ":3", "nod1:0", "node1:8", "node1:٣", ""):
        with pytest.raises(InputError):
            parse_gpu(topology, bad)


def test_a_picture_is_the_same_bytes_every_time_and_stays_on_its_page():
    for name in preset_names("clusters"):
        svg = to_svg(preset(name))
        assert svg == to_svg(preset(name))
        root = ElementTree.fromstring(svg)
        width, height = int(root.get("width")), int(root.get("height"))
        for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y = int(shape.get("x", 0)), int(shape.get("y", 0))
            assert x >= 0 and x + int(shape.get("width")) <= width
            assert y >= 0 and y + int(shape.get("height")) <= height


def test_a_large_cluster_is_drawn_once_per_class():
    node = "{name: n, count: 500, gpu: h100, gpus: 8, nics: {count: 8, bytes_per_s: 50GB/s, kind: roce}}"
    svg = to_svg(read_cluster(parse(f"nodes: [{node}]", "cluster.yaml")))
    assert svg.count('class="gpu"') == 8 and "n0 and 499 equal: h100-80gb" in svg


def test_reading_a_cluster_does_not_load_rich_or_networkx():
    code = (
        "import sys, planner.topology_svg, planner.specs.topology as t, planner.specs.base as b\n"
        "t.read_cluster(b.load_preset('clusters', 'h100-2x8')).units()\n"
        "print(*sorted({'rich', 'networkx', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == ""
