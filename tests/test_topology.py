"""Clusters as graphs: who is joined to whom, how fast, and every mistake at its line."""

import time
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planner.errors import InputError
from planner.specs.base import dump_yaml, load_preset, parse, preset_names
from planner.specs.cluster import Cluster, find_gpu, gpu_presets
from planner.specs.topology import GpuId, Topology, build, read_cluster

CASES = Path(__file__).parent / "cases"
FOUR_CARDS = "nics: {count: 4, bytes_per_s: 400Gb/s, kind: infiniband}"


def read(text: str) -> Topology:
    return read_cluster(parse(text, "cluster.yaml"))


def preset(name: str) -> Topology:
    document = load_preset("clusters", name)
    assert document is not None
    return read_cluster(document)


def faults(text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(text)
    return [str(fault) for fault in caught.value.faults]


def kinds(topology: Topology, a: GpuId, b: GpuId) -> list[str]:
    return [topology.links[id_].kind for id_ in topology.path(a, b)]


# --- presets


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_shipped_cluster_joins_all_its_gpus(name):
    topology = preset(name)
    assert topology.name == name
    first = topology.gpus[0]
    for gpu in topology.gpus[1:]:
        assert topology.path(first, gpu)
    assert networkx.is_strongly_connected(topology.graph)


@pytest.mark.parametrize("gpu", gpu_presets(), ids=lambda gpu: gpu.name)
def test_every_shipped_gpu_is_found_by_each_of_its_names(gpu):
    assert all(find_gpu(name.upper()) == gpu for name in (gpu.name, *gpu.aliases))
    assert gpu.source


def test_no_two_shipped_gpus_share_a_name():
    names = [name.lower() for gpu in gpu_presets() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


def test_the_distserve_testbed_has_fast_nodes_and_a_slow_network():
    topology = preset("a100-distserve")
    a, same, other = GpuId("node0", 0), GpuId("node0", 7), GpuId("node1", 0)
    assert topology.path_bytes_per_s(a, same) == pytest.approx(300e9 * 0.78)
    assert topology.path_bytes_per_s(a, other) == pytest.approx(25e9 / 8 * 0.6)
    assert topology.classes() == ((0, 1, 2, 3),)


# --- efficiency (case 55)


def test_a_link_without_a_measurement_says_that_its_efficiency_is_assumed_and_why():
    topology = preset("h100-2x8")
    assert all(link.assumed and link.why and link.efficiency < 1 for link in topology.links if link.kind != "pcie")
    text = "\n".join(topology.assumptions())
    assert "infiniband: 74% of the nominal speed is assumed" in text and "Mooncake#1668" in text
    # 352 of 450 GB/s and 37 of 50 GB/s: the measurements the defaults come from
    assert topology.path_bytes_per_s(GpuId("node0", 0), GpuId("node0", 1)) == pytest.approx(352e9, rel=0.01)
    assert topology.path_bytes_per_s(GpuId("node0", 0), GpuId("node1", 0)) == pytest.approx(37e9)


def test_a_measured_efficiency_replaces_the_assumption_by_kind_or_by_node():
    text = """
    nodes:
      - name: a
        count: 2
        gpu: h100
        gpus: 2
        links: {kind: nvswitch, efficiency: 90%}
        nics: {count: 1, bytes_per_s: 50GB/s, kind: roce}
    efficiency: {roce: 0.5, pcie: 0.9}
    """
    topology = read(text)
    assert topology.assumptions() == ()
    assert topology.path_bytes_per_s(GpuId("a0", 0), GpuId("a0", 1)) == pytest.approx(450e9 * 0.9)
    assert topology.path_bytes_per_s(GpuId("a0", 0), GpuId("a1", 0)) == pytest.approx(25e9)


# --- case 21: nodes that look alike and are not


def uneven() -> Topology:
    """The case's own neutral format, put into ours."""
    data = yaml.safe_load((CASES / "21-cluster-uneven-7gpu" / "cluster.yaml").read_text())
    nodes = [
        {
            "name": node["name"],
            "gpu": node["gpu"],
            "gpus": node["gpus"],
            "links": {"kind": "nvswitch"},
            "nics": {"count": node["nics"], "bytes_per_s": f"{node['nic_gbps']}Gb/s", "kind": "infiniband"},
        }
        for node in data["nodes"]
    ]
    return read(dump_yaml({"nodes": nodes}))


def test_an_uneven_cluster_has_23_gpus_and_skips_the_drained_one():
    topology = uneven()
    assert len(topology.gpus) == 23
    assert GpuId("n2", 5) not in topology.gpus and GpuId("n2", 7) in topology.gpus
    assert topology.node("n2").tp_groups == ((0, 1, 2, 3, 4, 6, 7),)
    with pytest.raises(InputError, match="no GPU 5 on node 'n2'"):
        topology.path(GpuId("n0", 0), GpuId("n2", 5))


def test_a_drained_gpu_leaves_the_cards_of_the_others_where_they_were():
    topology = uneven()
    assert topology.nic_names(GpuId("n2", 6)) == ("nic6",)
    assert topology.nic_names(GpuId("n1", 7)) == ("nic3",)


def test_what_a_node_can_send_is_bounded_by_the_slower_end():
    topology = uneven()
    n0, n1, n2 = topology.units()
    # nominal 8 x 50, 4 x 25 and (one card stands beside the drained GPU) 7 x 50 GB/s, times 0.74
    assert topology.egress_bytes_per_s(n0) == pytest.approx(400e9 * 0.74)
    assert topology.ingress_bytes_per_s(n1) == pytest.approx(100e9 * 0.74)
    assert topology.egress_bytes_per_s(n2) == pytest.approx(350e9 * 0.74)
    assert topology.path_bytes_per_s(n0.gpus[0], n1.gpus[0]) == pytest.approx(25e9 * 0.74)


def test_nodes_that_differ_in_cards_or_gpus_are_of_different_classes():
    assert uneven().classes() == ((0,), (1,), (2,))


def test_which_device_is_drained_does_not_make_a_class_of_its_own():
    node = f"{{name: %s, gpu: h100, gpus: %s, links: {{kind: nvswitch}}, {FOUR_CARDS}}}"
    text = f"nodes: [{node % ('a', '[0, 1, 3]')}, {node % ('b', '[0, 2, 3]')}, {node % ('c', '[0, 1, 2, 3]')}]"
    assert read(text).classes() == ((0, 1), (2,))


# --- case 08: NVLink over several nodes


def trays(*racks: str, nics: str = "") -> str:
    rows = [
        f"  - {{name: {rack}-tray{i:02}, gpus: 4, gpu: GB200, nvlink_domain: {rack}{nics}}}"
        for rack in racks
        for i in range(18)
    ]
    return "nodes:\n" + "\n".join(rows)


def test_the_trays_of_one_domain_are_one_unit_of_nvlink():
    topology = read(trays("rack0"))
    (unit,) = topology.units()
    assert (unit.name, len(unit.gpus), len(unit.nodes)) == ("rack0", 72, 18)
    eight = unit.gpus[:8]  # over two trays
    assert {gpu.node for gpu in eight} == {"rack0-tray00", "rack0-tray01"}
    assert topology.rank_link(eight) == (pytest.approx(900e9 * 0.78), pytest.approx(1e-6))
    assert kinds(topology, eight[0], eight[7]) == ["nvlink", "nvlink"]


def test_nvlink_stops_at_the_domains_boundary():
    topology = read(trays("rack0", "rack1", nics=f", {FOUR_CARDS}"))
    first, second = topology.units()
    assert len(first.gpus) == len(second.gpus) == 72
    assert "nvlink" not in kinds(topology, first.gpus[-1], second.gpus[0])
    assert topology.path_bytes_per_s(first.gpus[-1], second.gpus[0]) == pytest.approx(37e9)
    assert topology.classes() == ((0, 1),)


def test_two_domains_without_a_network_are_disconnected():
    found = faults(trays("rack0", "rack1"))
    assert "no way from node 'rack0-tray00' to the others: give it nics" in found[0]


def test_without_a_domain_no_nvlink_joins_nodes():
    text = trays("rack0", nics=f", {FOUR_CARDS}")
    topology = read(text.replace(", nvlink_domain: rack0", ", links: {kind: nvswitch}"))
    assert len(topology.units()) == 18
    assert "nvlink" not in kinds(topology, topology.gpus[3], topology.gpus[4])


def test_the_name_of_a_gpu_does_not_make_nvlink():
    # case 16: a machine that hides NVLink, whatever HBM3 and SXM promise
    topology = read("nodes: [{name: vm, gpu: H100-SXM, gpus: 8}]")
    assert {link.kind for link in topology.links} == {"pcie"}


# --- cases 05 and 22: pairs, sockets and slow slots


def test_bridged_pairs_are_never_taken_for_one_nvlink_domain():
    topology = preset("a40-pairs")
    (node,) = topology.nodes
    assert node.tp_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    ids = node.gpus
    pair, four = topology.rank_link(ids[:2])[0], topology.rank_link(ids[:4])[0]
    assert pair == pytest.approx(56.25e9 * 0.78)
    assert four == topology.rank_link(ids)[0] == pytest.approx(31.5e9 * 0.61)
    assert kinds(topology, ids[0], ids[1]) == ["nvlink"] * 2
    assert kinds(topology, ids[1], ids[2]) == ["pcie"] * 2  # one socket
    assert kinds(topology, ids[0], ids[7]) == ["pcie"] * 4  # through the host


def test_a_drained_device_leaves_its_bridge_partner_alone():
    topology = read("nodes: [{name: n, gpu: a40, gpus: [0, 1, 2, 3, 4, 6, 7], links: {kind: nvlink-pairs}}]")
    assert topology.nodes[0].tp_groups == ((0, 1), (2, 3), (4,), (6, 7))


def test_explicit_nvlink_groups_need_not_follow_the_index():
    topology = read(
        "nodes: [{name: n, gpu: l40s, gpus: 5, links: {kind: nvlink, bytes_per_s: 50GB/s, groups: [[0, 3], [4, 1]]}}]"
    )
    assert topology.nodes[0].tp_groups == ((0, 3), (1, 4), (2,))


def test_a_slow_slot_bounds_every_group_it_is_in():
    # case 22: x4 and x8 of PCIe 3.0 among x16
    topology = read(
        "nodes: [{name: n, gpu: rtx4090, gpus: 4, links: {kind: pcie, bytes_per_s: 15.8GB/s, "
        "efficiency: 1.0, "
        "ports: [{gpu: 0, bytes_per_s: 3.9GB/s}, {gpu: 3, bytes_per_s: 7.9GB/s}]}}]"
    )
    speeds = [topology.rank_link([GpuId("n", i) for i in group])[0] for group in ((0, 1), (1, 2), (2, 3), (0, 1, 2, 3))]
    assert speeds == pytest.approx([3.9e9, 15.8e9, 7.9e9, 3.9e9])


def test_a_measured_pair_wins_over_the_class_of_its_link():
    topology = read(
        "nodes: [{name: n, gpu: rtx4090, gpus: 4, links: {kind: pcie, "
        "roots: [{gpus: [0, 1]}, {gpus: [2, 3]}], "
        "measured: [{gpus: [0, 1], bytes_per_s: 10GB/s}, {gpus: [0, 2], bytes_per_s: 12GB/s}]}}]"
    )
    one, two = (topology.rank_link([GpuId("n", 0), GpuId("n", i)])[0] for i in (1, 2))
    assert (one, two) == (10e9, 12e9)
    assert not topology.links[topology.path(GpuId("n", 2), GpuId("n", 0))[0]].assumed


# --- cases 17, 03, 04, 08, 01: which card serves which GPU


def cards(text: str, gpus: str = "8") -> list[tuple[str, ...]]:
    links = "{kind: nvswitch, roots: ROOTS}"
    node = f"{{name: n, count: 2, gpu: a100, gpus: {gpus}, links: {links}, nics: {text}}}"
    roots = "[{gpus: [0, 1, 2, 3]}, {gpus: [4, 5, 6, 7]}]" if gpus == "8" else "null"
    topology = read(f"nodes: [{node.replace('ROOTS', roots)}]")
    return [topology.nic_names(gpu) for gpu in topology.nodes[0].gpus]


def test_two_cards_serve_four_gpus_each():
    assert cards("{count: 2, bytes_per_s: 400Gb/s, kind: roce}") == [("nic0",)] * 4 + [("nic1",)] * 4


def test_cards_are_taken_from_the_near_list_and_not_by_index():
    near = "[[0], [1], [2], [4], [3], [5], [6], [7]]"
    names = "[mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_11]"
    found = cards(f"{{count: 8, bytes_per_s: 400Gb/s, kind: infiniband, near: {near}, names: {names}}}")
    assert found[3] == ("mlx5_4",) and found[4] == ("mlx5_3",) and found[7] == ("mlx5_11",)


def test_a_gpu_without_a_card_of_its_own_uses_one_of_its_socket():
    near = "[[1], [3], [5], [7]]"  # case 03
    found = cards(f"{{count: 4, bytes_per_s: 400Gb/s, kind: roce, near: {near}}}")
    assert [name for (name,) in found] == ["nic0", "nic0", "nic1", "nic1", "nic2", "nic2", "nic3", "nic3"]


def test_cards_without_affinity_are_spread_and_never_all_on_the_first():
    found = cards("{count: 6, bytes_per_s: 400Gb/s, kind: infiniband, near: [[], [], [], [], [], []]}", gpus="4")
    assert sorted(name for names in found for name in names) == [f"nic{k}" for k in range(6)]
    assert all(found)


def test_cards_near_the_same_gpus_act_as_one():
    near = "[[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]"  # case 01
    text = f"{{count: 8, bytes_per_s: 10GB/s, kind: infiniband, near: {near}, efficiency: 1.0}}"
    assert cards(text)[5] == ("nic4", "nic5")
    topology = read(f"nodes: [{{name: n, count: 2, gpu: a100, gpus: 8, links: {{kind: nvswitch}}, nics: {text}}}]")
    # two cards carry 20 GB/s, the GPU's own port 31.5 x 0.61 = 19.2 GB/s
    assert topology.path_bytes_per_s(GpuId("n0", 0), GpuId("n1", 0)) == pytest.approx(31.5e9 * 0.61)
    assert topology.egress_bytes_per_s(topology.units()[0]) == pytest.approx(80e9)


def test_a_card_on_the_other_socket_is_reached_through_the_host():
    text = """
    nodes:
      - name: n
        count: 2
        gpu: l40s
        gpus: 4
        links: {kind: pcie, roots: [{gpus: [0, 1], bytes_per_s: 20GB/s}, {gpus: [2, 3], bytes_per_s: 20GB/s}]}
        nics: {count: 2, bytes_per_s: 100Gb/s, kind: roce, near: [[2, 3], [2, 3]]}
    """
    topology = read(text)  # case 04
    far, near = (topology.path(GpuId("n0", i), GpuId("n1", 2)) for i in (0, 2))
    assert len(far) == len(near) + 2
    assert topology.path_bytes_per_s(GpuId("n0", 0), GpuId("n1", 2)) == pytest.approx(20e9 * 0.61)


# --- racks

TWO_RACKS = """
nodes:
  - name: a
    count: 2
    gpu: h100
    gpus: 8
    links: {kind: nvswitch}
    nics: {count: 8, bytes_per_s: 50GB/s, kind: roce}
    rack: r1
  - name: b
    count: 2
    gpu: h100
    gpus: 8
    links: {kind: nvswitch}
    nics: {count: 8, bytes_per_s: 50GB/s, kind: roce}
    rack: r2
network: {racks: [{name: r2, oversubscription: 8}], spine_latency_s: 3us}
efficiency: {roce: 1.0, uplink: 1.0}
"""


def test_racks_are_joined_by_uplinks_as_fast_as_their_oversubscription_leaves():
    topology = read(TWO_RACKS)
    assert topology.uplink_bytes_per_s("r1") == pytest.approx(2 * 8 * 50e9)
    assert topology.uplink_bytes_per_s("r2") == pytest.approx(2 * 8 * 50e9 / 8)
    a0, a1, b0 = GpuId("a0", 0), GpuId("a1", 0), GpuId("b0", 0)
    assert "uplink" not in kinds(topology, a0, a1) and kinds(topology, a0, b0).count("uplink") == 2
    assert topology.path_latency_s(a0, b0) - topology.path_latency_s(a0, a1) == pytest.approx(3e-6)
    assert topology.classes() == ((0, 1), (2, 3))


def test_a_single_rack_has_no_uplink_to_bind():
    assert preset("h100-4x8").uplinks == {}


# --- mistakes


def h100(rest: str) -> str:
    """A cluster of one node, whose entry goes on with `rest`."""
    return f"nodes: [{{name: a, gpu: h100, {rest}}}]"


def joined(rest: str) -> str:
    return h100(f"gpus: 4, links: {{{rest}}}")


def carded(rest: str) -> str:
    return h100(f"gpus: 2, nics: {{{rest}}}")


ONE = "bytes_per_s: 1GB/s"
CARD = f"nics: {{count: 1, {ONE}, kind"

MISTAKES = [
    ("nodes: []", "cluster.yaml:1:8: nodes: expected at least one node"),
    (h100("gpus: 0"), "expected at least 1"),
    (h100("gpus: []"), "expected at least one GPU, got an empty list"),
    (h100("gpus: eight"), "nodes[0].gpus"),
    (h100("gpus: [0, 1, 1]"), "nodes[0].gpus: 1 is listed 2 times"),
    (h100("gpus: [-1]"), "expected at least 0"),
    ("nodes: [{name: a, gpu: h1000, gpus: 1}]", "unknown GPU 'h1000'; did you mean 'h100-80gb'?"),
    (
        "nodes:\n- {name: a, gpu: h100, gpus: 1}\n- {name: a, gpu: h100, gpus: 1}",
        "cluster.yaml:3:10: nodes[1].name: two nodes",
    ),
    (
        "nodes: [{name: a, count: 2, gpu: h100, gpus: 1}, {name: a1, gpu: h100, gpus: 1}]",
        "two nodes are called 'a1'",
    ),
    ("nodes: [{name: a, count: 1000000000, gpu: h100, gpus: 1}]", "expected at most 100000"),
    ("nodes: [{name: a, count: 100000, gpu: h100, gpus: 8}]", "at most 100,000 GPUs in all, got 800,000"),
    (joined("kind: nvlink"), "nodes[0].links: kind nvlink needs groups"),
    (joined("kind: nvlink, groups: [[0, 5]]"), "links.groups[0]: GPU 5 is not among this node's GPUs 0 to 3"),
    (joined("kind: nvlink, groups: [[0, 1], [1, 2]]"), "1 is listed 2 times"),
    (joined("kind: nvswitch, groups: [[0, 1]]"), "groups belong to kind nvlink"),
    (joined("kind: pcie, roots: [{gpus: [0, 1]}]"), "missing: [2, 3]"),
    (joined("kind: pcie, ports: [{gpu: 4, bytes_per_s: 1GB/s}]"), "links.ports[0]: GPU 4 is not among"),
    (joined("kind: pcie, measured: [{gpus: [1, 1], bytes_per_s: 1GB/s}]"), "expected two different GPUs"),
    (joined("kind: nvlink-mesh"), "nodes[0].links.kind: expected"),
    (
        "nodes: [{name: a, gpu: rtx4090, gpus: 4, links: {kind: nvswitch}}]",
        "NVLink speed of rtx4090 is not on record",
    ),
    (carded("count: 2, bytes_per_s: 50GB/s, kind: roce, near: [[0]]"), "one entry per card (2), got 1"),
    (carded("count: 1, bytes_per_s: 50GB/s, kind: roce, near: [[0, 7]]"), "nics.near[0]: GPU 7 is not among"),
    (carded("count: 1, bytes_per_s: 400, kind: myrinet"), "nics.kind: expected"),
    (carded("count: 1, bytes_per_s: 400Gbit, kind: roce"), "unknown unit 'Gbit'"),
    (carded("count: 1, bytes_per_s: 0GB/s, kind: roce"), "expected more than 0"),
    (carded("count: 2, bytes_per_s: 1GB/s, kind: roce, names: [x, x]"), "x is listed 2 times"),
    (
        "nodes: [{name: a, gpu: h100, gpus: 1}, {name: b, gpu: h100, gpus: 1}]",
        "no way from node 'a' to the others: give it nics or a common nvlink_domain",
    ),
    (
        f"nodes:\n- {{name: a, gpu: h100, gpus: 1, {CARD}: roce}}}}\n"
        f"- {{name: b, gpu: h100, gpus: 1, {CARD}: infiniband}}}}",
        "cluster.yaml:3:76: nodes[1].nics.kind: no way from node 'b' to the others: it is on InfiniBand",
    ),
    (h100("gpus: 1, nvlink_domain: d, links: {kind: pcie}"), "needs links of kind nvswitch, got pcie"),
    (
        "nodes:\n- {name: a, gpu: h100, gpus: 1, nvlink_domain: d}\n- {name: b, gpu: h200, gpus: 1, nvlink_domain: d}",
        "one domain holds one GPU type",
    ),
    (
        "nodes: [{name: a, gpu: h100, gpus: 1, rack: row1}]\nnetwork: {racks: [{name: row2}]}",
        "no node stands in rack 'row2'; did you mean 'row1'?",
    ),
    (
        "nodes: [{name: a, gpu: h100, gpus: 1}]\n"
        "network: {racks: [{name: default, oversubscription: 2, uplink_bytes_per_s: 1GB/s}]}",
        "not both",
    ),
    ("nodes: [{name: a, gpu: h100, gpus: 1}]\nefficiency: {nvlink: 1.2}", "expected at most 1"),
    (h100("gpus: 1, gpuz: 1"), "unknown key"),
    ("nodes: {name: a}", "nodes: expected a list"),
    ("gpus: [{name: x}]\nnodes: [{name: a, gpu: x, gpus: 1}]", "gpus[0].memory_bytes: is required"),
    ("- 1", "expected a preset name, a file or a mapping"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_a_mistake_is_named_at_its_line(text, expected):
    found = faults(text)
    assert any(expected in line for line in found), found
    assert all(line.startswith("cluster.yaml:") for line in found)


def test_all_mistakes_are_told_at_once():
    found = faults("nodes:\n- {name: a, gpu: h1000, gpus: [0, 0]}\n- {name: a, gpu: v1, gpus: 1}")
    assert len(found) == 6  # two GPUs, one index, one name, two nodes without a way to each other


def test_a_cluster_made_in_python_is_checked_too():
    with pytest.raises(InputError, match=r"nodes\[0\].gpu: unknown GPU 'h9'"):
        build(Cluster.model_validate({"nodes": [{"name": "a", "gpu": "h9", "gpus": 1}]}))


def test_a_gpu_type_may_be_defined_in_the_cluster_file():
    gpu = (
        "{name: mine, memory_bytes: 96GB, memory_bytes_per_s: 1.8TB/s, fp16_flop_per_s: 500TFLOP/s, "
        "host_bytes_per_s: 63GB/s}"
    )
    topology = read(f"gpus: [{gpu}]\nnodes: [{{name: a, gpu: Mine, gpus: 2}}]")
    assert topology.gpu_of(GpuId("a", 1)).memory_bytes == 96 * 10**9


def test_two_hundred_nodes_are_built_within_a_second():
    node = f"{{name: n, count: 200, gpu: h100, gpus: 8, links: {{kind: nvswitch}}, {FOUR_CARDS}}}"
    start = time.process_time()
    topology = read(f"nodes: [{node}]")
    assert topology.path(topology.gpus[0], topology.gpus[-1])
    assert len(topology.classes()) == 1
    assert time.process_time() - start < 1


# --- properties


@st.composite
def clusters(draw):
    """Any legal cluster: mixed GPUs, links, drained devices, cards, racks."""
    nodes = []
    for n in range(draw(st.integers(1, 4))):
        indices = sorted(draw(st.sets(st.integers(0, 8), min_size=1, max_size=8)))
        links = {"kind": draw(st.sampled_from(["nvswitch", "nvlink-pairs", "pcie"]))}
        cut = draw(st.integers(0, len(indices)))
        if 0 < cut < len(indices):
            links["roots"] = [{"gpus": indices[:cut]}, {"gpus": indices[cut:], "bytes_per_s": "9GB/s"}]
        count = draw(st.integers(1, 9))
        nics = {"count": count, "bytes_per_s": draw(st.sampled_from([3e9, 50e9])), "kind": "roce"}
        if draw(st.booleans()):
            nics["near"] = [sorted(draw(st.sets(st.sampled_from(indices)))) for _ in range(count)]
        node = {
            "name": f"n{n}",
            "gpu": draw(st.sampled_from(["a100", "h100"])),
            "gpus": indices,
            "links": links,
        }
        nodes.append({**node, "nics": nics, "rack": draw(st.sampled_from(["r0", "r1"]))})
    return build(Cluster.model_validate({"nodes": nodes}))


@settings(max_examples=30, deadline=None)
@given(clusters())
def test_every_path_is_a_walk_in_the_graph_and_as_fast_both_ways(topology):
    for a in topology.gpus:
        for b in topology.gpus:
            walk = [topology.links[id_] for id_ in topology.path(a, b)]
            if a == b:
                assert not walk
                continue
            assert (walk[0].source.owner, walk[0].source.number) == a
            assert (walk[-1].target.owner, walk[-1].target.number) == b
            assert all(one.target == two.source for one, two in pairwise(walk))
            assert len({link.name for link in walk}) == len(walk)
            assert all(topology.graph.edges[link.source, link.target]["kind"] == link.kind for link in walk)
            assert topology.path_bytes_per_s(a, b) == topology.path_bytes_per_s(b, a)
            assert topology.path_latency_s(a, b) == pytest.approx(topology.path_latency_s(b, a))


@settings(max_examples=30, deadline=None)
@given(clusters())
def test_no_unit_can_send_more_than_its_egress(topology):
    """Oracle: the linear program over the real routes to one GPU elsewhere, whose own port is left out."""
    for unit in topology.units():
        others = [gpu for gpu in topology.gpus if gpu.node not in unit.nodes]
        routes = [topology.path(gpu, others[0]) for gpu in unit.gpus] if others else []
        mine = sorted({i for route in routes for i in route if topology.links[i].source.owner in unit.nodes})
        if mine:
            rows = [[float(i in route) for route in routes] for i in mine]
            limits = [topology.links[i].bytes_per_s for i in mine]
            best = -linprog([-1.0] * len(routes), A_ub=rows, b_ub=limits, bounds=(0, None)).fun
            assert best <= topology.egress_bytes_per_s(unit) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(clusters())
def test_classes_and_groups_split_what_they_divide(topology):
    assert sorted(p for class_ in topology.classes() for p in class_) == list(range(len(topology.units())))
    for node in topology.nodes:
        assert sorted(i for group in node.tp_groups for i in group) == list(node.indices)
        assert sorted(i for port in node.nics for i in port.gpus) == list(node.indices)


FULL = {
    "name": "full",
    "gpus": [
        {
            "name": "mine",
            "memory_bytes": "96GB",
            "memory_bytes_per_s": "1.8TB/s",
            "fp16_flop_per_s": "500TFLOP/s",
            "host_bytes_per_s": "63GB/s",
        }
    ],
    "nodes": [
        {
            "name": "a",
            "count": 2,
            "gpu": "mine",
            "gpus": [0, 1, 3],
            "links": {
                "kind": "nvlink",
                "bytes_per_s": "50GB/s",
                "groups": [[0, 1]],
                "roots": [{"gpus": [0, 1], "bytes_per_s": "9GB/s"}, {"gpus": [3]}],
                "ports": [{"gpu": 3, "bytes_per_s": "4GB/s"}],
                "measured": [{"gpus": [0, 3], "bytes_per_s": "5GB/s"}],
            },
            "nics": {
                "count": 2,
                "bytes_per_s": "50GB/s",
                "kind": "roce",
                "near": [[0], [3]],
                "names": ["x", "y"],
            },
            "rack": "r1",
        },
        {"name": "b", "gpu": "a40", "gpus": 2, "nics": {"count": 1, "bytes_per_s": "1GB/s", "kind": "tcp"}},
    ],
    "network": {"latency_s": "5us", "racks": [{"name": "r1", "oversubscription": 2}]},
    "efficiency": {"roce": 0.7},
}


def places(data, at=()):
    """Every path into nested data."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    5,
    10**12,
    1.5,
    "",
    "a",
    "b",
    "r1",
    "1GB/s",
    "nan",
    [],
    {},
    [0, 0],
    [[0]],
    {"a": 1},
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(places(FULL))[1:]), st.sampled_from([*JUNK, "drop"])), max_size=3))
def test_a_damaged_cluster_file_is_an_input_error_or_a_cluster(damage):
    data = deepcopy(FULL)
    for path, value in damage:
        inner = data
        for key in path[:-1]:
            inner = inner[key] if isinstance(inner, dict | list) and key in dict(_items(inner)) else None
        if isinstance(inner, dict | list) and path[-1] in dict(_items(inner)):
            if value == "drop":
                del inner[path[-1]]
            else:
                inner[path[-1]] = deepcopy(value)
    try:
        topology = read(dump_yaml(data))
    except InputError as error:
        assert error.faults
        return
    first = topology.gpus[0]
    for gpu in topology.gpus[:50]:
        topology.path(first, gpu)
    assert topology.classes() and all(topology.egress_bytes_per_s(unit) >= 0 for unit in topology.units())


def _items(data):
    return data.items() if isinstance(data, dict) else enumerate(data)
