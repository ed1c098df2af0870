"""The KV cache on its way from prefill to decode: which links carry which share, and how long it takes."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.transfer import Route, TransferCost, route
from planner.errors import InputError
from planner.report import _notes, to_json
from planner.specs.base import load_preset, parse
from planner.specs.topology import GpuId, Topology, read_cluster
from tests.planning import fixed, slo, solved

CASE = Path(__file__).parent / "cases" / "55-kv-transfer-bandwidth-table"


def preset(name: str) -> Topology:
    document = load_preset("clusters", name)
    assert document is not None
    return read_cluster(document)


H100 = preset("h100-2x8")
A100 = preset("a100-4x200")


def shards(node: str, stages: int, ranks: int, first: int = 0) -> list[list[GpuId]]:
    return [[GpuId(node, first + s * ranks + r) for r in range(ranks)] for s in range(stages)]


def by_kind(topology: Topology, found: Route, kind: str) -> dict[str, float]:
    return {topology.links[i].name: share for i, share in found.shares if topology.links[i].kind == kind}


def two_nodes(speed: str) -> Topology:
    """A pair of GPUs whose network gives exactly `speed`."""
    text = f"""
    nodes: [{{name: n, count: 2, gpu: h100, gpus: 1, nics: {{count: 1, bytes_per_s: {speed}, kind: roce}}}}]
    efficiency: {{roce: 1.0, pcie: 1.0}}
    """
    return read_cluster(parse(text, "cluster.yaml"))


# --- the law (case 55)


def test_a_prompt_moves_in_13_ms_at_49_gb_s_and_in_1_3_s_at_half_a_gb_s():
    request = yaml.safe_load((CASE / "request.yaml").read_text())
    kv_bytes = request["kv_bytes_per_token"] * request["isl"]
    assert kv_bytes == 655_360_000
    times = {}
    for row in csv.DictReader((CASE / "measured.csv").read_text().splitlines()):
        if row["source"] == "vllm#52607":
            topology = two_nodes(f"{row['gb_s']}GB/s")
            found = route(topology, shards("n0", 1, 1), shards("n1", 1, 1))
            times[float(row["gb_s"])] = found.alone_s(kv_bytes, topology)
    assert times[49] == pytest.approx(0.0134, rel=0.02)  # 0.65536 / 49
    assert times[0.5] == pytest.approx(1.311, rel=0.01)  # 0.65536 / 0.5
    left_s = (request["slo"]["ttft_ms"] - request["prefill_ms"]) / 1e3
    assert times[49] < left_s < times[0.5]


def unverified_pair(**network: object) -> dict:
    """Two nodes of one H100; 66.2 GB/s of RoCE, of which 0.74 are planned with: 49 GB/s."""
    nics = {"count": 1, "bytes_per_s": "66.22GB/s", "kind": "roce"}
    pcie = {"pcie": 1.0}
    return {"name": "pair", "nodes": [{"name": "n", "count": 2, "gpu": "h100-80gb", "gpus": 1, "nics": nics}],
            "efficiency": {**pcie, **network}}  # fmt: skip


def case_55(**network: object) -> dict:
    """The request of case 55: 5000 tokens of 131,072 B each, as Llama-3.1-8B has them, within 400 ms."""
    load = {"model": "llama3.1-8b", "cluster": unverified_pair(**network), "workload": fixed(5000, 20)}
    return {**load, "slo": slo("400ms", "40ms"), "engine": {"max_batch": 64}}


def test_a_plan_over_an_unverified_path_shows_what_it_would_take_at_both_speeds():
    """Case 55.1: 13 ms at 49 GB/s, which meets 400 ms, and 1.3 s at 0.5 GB/s, which does not."""
    found = solved(**case_55())
    (note,) = [str(note) for note in _notes(found) if "that path is unverified" in str(note)]
    assert "(655 MB) moves in 1" in note and "it would take 1.31 s of a TTFT bound of 400 ms" in note
    told = to_json(found)["kv_transfer"]
    assert told["bytes"] == 655_360_000 and told["verified"] is False
    assert told["planned_s"] == pytest.approx(0.0135, rel=0.02)
    assert told["planned_s"] < 0.4 < told["fallen_back_s"] == pytest.approx(1.311, rel=0.01)


def test_a_plan_on_assumed_speeds_says_which_share_of_the_line_rate_it_takes():
    """Case 55.2."""
    notes = [str(note) for note in _notes(solved(**case_55()))]
    assert any("roce: 74% of the nominal speed is assumed" in note for note in notes)


def test_a_measured_path_needs_no_second_figure():
    found = solved(**case_55(roce=0.7))
    assert not any("unverified" in str(note) for note in _notes(found))
    assert to_json(found)["kv_transfer"]["fallen_back_s"] is None and to_json(found)["kv_transfer"]["verified"]


def test_posting_small_pieces_explains_the_9_gb_s_that_were_measured():
    # vllm#53825: 32k descriptors of 16 KB, 9 of 50 GB/s
    topology = preset("h100-2x8")
    cost = TransferCost(fixed_s=0.0, piece_bytes=16_384)
    found = route(topology, shards("node0", 1, 1), shards("node1", 1, 1), cost=cost)
    kv_bytes = 32_000 * 16_384
    assert kv_bytes / found.alone_s(kv_bytes, topology) == pytest.approx(9e9, rel=0.03)


def test_ranks_post_their_pieces_side_by_side():
    cost = TransferCost(fixed_s=0.0, per_piece_s=1e-3, piece_bytes=100)
    one = route(H100, shards("node0", 1, 1), shards("node1", 1, 1), cost=cost)
    four = route(H100, shards("node0", 1, 4), shards("node1", 1, 4), cost=cost)
    # 1000 bytes: ten pieces of one rank, or ceil(2.5) = 3 of each of four
    assert one.setup_s(1000) - one.latency_s == pytest.approx(10e-3)
    assert four.setup_s(1000) - four.latency_s == pytest.approx(3e-3)


def test_nothing_moves_within_one_gpu():
    same = shards("node0", 2, 2)
    found = route(H100, same, same)
    assert found == Route(())
    assert found.alone_s(1e9, H100) == 0.0


# --- which link carries what


def test_equal_layouts_send_each_shard_over_its_own_card():
    found = route(H100, shards("node0", 1, 4), shards("node1", 1, 4))
    wires = by_kind(H100, found, "infiniband")
    assert wires == {
        **{f"node0:nic{i}->default:leaf": 0.25 for i in range(4)},
        **{f"default:leaf->node1:nic{i}": 0.25 for i in range(4)},
    }
    assert found.pieces == 4
    assert found.bytes_per_s(H100) == pytest.approx(4 * 37e9)


def test_the_narrower_side_bounds_the_transfer():
    # TP4 sends over 4 cards, TP1 receives over one: 37 GB/s
    found = route(H100, shards("node0", 1, 4), shards("node1", 1, 1))
    assert found.bytes_per_s(H100) == pytest.approx(37e9)
    assert found.pieces == 4


def test_gpus_that_share_a_card_share_its_speed():
    # four cards for eight GPUs: TP2 on GPUs 0 and 1 leaves over one card, TP8 over four (case 17's rule)
    two = route(A100, shards("node0", 1, 2), shards("node1", 1, 2))
    eight = route(A100, shards("node0", 1, 8), shards("node1", 1, 8))
    assert two.bytes_per_s(A100) == pytest.approx(25e9 * 0.74)
    assert eight.bytes_per_s(A100) == pytest.approx(4 * 25e9 * 0.74)


def test_pipeline_stages_of_other_depths_exchange_the_layers_they_have_in_common():
    # 80 layers: prefill PP2 (0-40, 40-80), decode PP4 (0-20, ...): a target stage draws on one source stage
    found = route(H100, shards("node0", 2, 1), shards("node1", 4, 1), layers=80)
    assert found.pieces == 4
    into = {n: s for n, s in by_kind(H100, found, "infiniband").items() if n.startswith("default")}
    assert sorted(into.values()) == [0.25] * 4


def test_uneven_stages_carry_their_own_layers():
    # 61 layers over 8 stages: five of 8, three of 7
    found = route(H100, shards("node0", 8, 1), shards("node1", 1, 1), layers=61)
    out = [s for n, s in by_kind(H100, found, "infiniband").items() if n.startswith("node0")]
    assert sorted(out) == pytest.approx([7 / 61] * 3 + [8 / 61] * 5)


def test_nvlink_carries_what_stays_inside_the_node():
    found = route(H100, shards("node0", 1, 2), shards("node0", 1, 2, first=2))
    assert not by_kind(H100, found, "infiniband")
    assert found.bytes_per_s(H100) == pytest.approx(2 * 450e9 * 0.78)


def test_every_rank_gets_its_copy_of_a_latent_that_all_heads_share():
    # One KV head, TP4 both sides: four whole copies arrive, each from a source rank of its own
    found = route(H100, shards("node0", 1, 4), shards("node1", 1, 4), kv_heads=1)
    assert set(by_kind(H100, found, "infiniband").values()) == {1.0}
    assert found.pieces == 4


def test_copies_at_the_source_share_the_work():
    # 2 KV heads at TP4: ranks 0-1 hold head 0, ranks 2-3 head 1; TP2 takes one copy of each
    found = route(H100, shards("node0", 1, 4), shards("node1", 1, 2), kv_heads=2)
    assert found.pieces == 2
    assert found.widest == 0.5


@pytest.mark.parametrize("bad", [[], [[]], [[GpuId("node0", 0)], []], [[GpuId("node0", 9)]], [[GpuId("x", 0)]]])
def test_an_instance_that_cannot_be_is_an_input_error(bad):
    with pytest.raises(InputError):
        route(H100, bad, shards("node1", 1, 1))


# --- properties


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 8), (3, 1), (2, 4), (1, 3)]),
    target=st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 3), (8, 1), (5, 1)]),
    layers=st.sampled_from([None, 40, 61, 80]),
)
def test_a_route_conserves_bytes(source, target, layers):
    giving, taking = shards("node0", *source), shards("node1", *target)
    found = route(H100, giving, taking, layers=layers)
    out, into = defaultdict(float), defaultdict(float)
    for id_, share in found.shares:
        link = H100.links[id_]
        if link.source.kind == "gpu":
            out[link.source.number] += share
        if link.target.kind == "gpu":
            into[link.target.number] += share
    assert sum(out.values()) == pytest.approx(1) and sum(into.values()) == pytest.approx(1)
    assert len(out) == source[0] * source[1] and len(into) == target[0] * target[1]
    assert found.shares == tuple(sorted(found.shares))
    # and no more time than one GPU alone would take on each side
    single = route(H100, shards("node0", 1, 1), shards("node1", 1, 1))
    assert found.alone_s(1e9, H100) <= single.alone_s(1e9, H100) * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    tps=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    heads=st.sampled_from([1, 2, 4, 8, 32]),
)
def test_every_target_rank_receives_exactly_its_heads(tps, heads):
    found = route(H100, shards("node0", 1, tps[0]), shards("node1", 1, tps[1]), kv_heads=heads)
    into = {n: s for n, s in by_kind(H100, found, "infiniband").items() if n.startswith("default")}
    assert list(into.values()) == pytest.approx([1 / min(tps[1], heads)] * tps[1])
