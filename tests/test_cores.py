"""Cores of a processor as devices: what a profile measured on one says of the cluster that it is planned on."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cost.base import BatchShape
from planner.cost.fit import fit_all
from planner.cost.measured_link import with_measured_memory
from planner.cost.mixed import mixed_error
from planner.cost.transfer import route
from planner.errors import InputError
from planner.pipeline import plan
from planner.search.kinds import find_kinds
from planner.sources.problem import problem_of
from planner.sources.profiles import to_yaml
from planner.specs.base import dump_yaml, load_preset, parse, validate
from planner.specs.gpu import Gpu
from planner.specs.measured import MixedSamples, Transfer
from planner.specs.model import ModelSpec
from planner.specs.profile import KvTokens, Profile, Provenance, Sample, Samples
from planner.specs.topology import GpuId, read_cluster
from tests.planning import QUICK, fixed

CORE = Gpu(
    name="cpu-core",
    memory_bytes=12 * 2**30,
    memory_bytes_per_s=17e9,
    fp16_flop_per_s=90e9,  # faster than the preset's 80: a fit must not call that impossible
    host_bytes_per_s=9e9,
)
FIXED_S, BYTES_PER_S = 1e-3, 4e9


def smollm2(dtype: str) -> ModelSpec:
    found = validate(ModelSpec, load_preset("models", "smollm2-135m"))
    return found.model_copy(update={"dtype": dtype})


def prefill_s(tokens: int) -> float:
    return 0.01 + 0.0026 * tokens


def decode_s(batch: int, context: int) -> float:
    return 0.045 + 0.001 * batch + 2e-6 * batch * context


def profile(**more: object) -> Profile:
    """Return a profile that follows the two laws above, and a link of a known speed."""
    rows = [Sample("prefill", 1, 1, 1, n, 0, 0, prefill_s(n)) for n in (16, 64, 256, 1024)]
    rows += [Sample("prefill", 1, 1, 4, n, 0, 0, prefill_s(4 * n)) for n in (16, 64, 256)]
    rows += [Sample("decode", 1, 1, b, 0, 0, c, decode_s(b, c)) for b in (1, 4, 16, 32) for c in (64, 256, 1024)]
    sizes = [737_280 * n for n in (1, 4, 16, 64)]
    times_s = [FIXED_S + size / BYTES_PER_S for size in sizes]
    return Profile(
        **{
            "name": "mine",
            "model": "smollm2-135m",
            "gpu": "cpu-core",
            "dtype": "float32",
            "provenance": Provenance(method="measured", source="made up"),
            "samples": Samples.of(rows),
            "kv_tokens": (KvTokens(tp=1, tokens=50_000),),
            "transfers": (
                Transfer(
                    what="pull",
                    over="shared memory",
                    ranks=2,
                    rows=tuple((n, t, t * 0.99, t * 1.01) for n, t in zip(sizes, times_s, strict=True)),
                ),
            ),
            "measured_model": smollm2("float32"),
            "measured_gpu": CORE,
            **more,
        }
    )


def cluster() -> dict:
    return {"like": "localhost-cpu"}


def problem(tmp_path, found: Profile, model: object = None, engine: dict | None = None):
    (tmp_path / "mine.yaml").write_text(to_yaml(found))
    parts = {
        "model": model or {"like": "smollm2-135m", "dtype": "float32"},
        "cluster": cluster(),
        "profiles": "mine.yaml",
        "workload": fixed(80, 20),
        "slo": {"ttft_s": "2s", "tpot_s": "150ms"},
        "objective": "max_goodput",
        "engine": {"first_token_at": "prefill", "max_batch": 32, "chunk_tokens": [128], **(engine or {})},
        "search": QUICK,
    }
    return problem_of(parse(dump_yaml(parts), str(tmp_path / "problem.yaml")))


def test_cores_of_a_processor_reach_each_other_over_memory():
    topology = read_cluster(parse("like: localhost-cpu", "c.yaml"))
    kinds = [topology.links[id_].kind for id_ in topology.path(GpuId("localhost", 0), GpuId("localhost", 1))]
    assert kinds == ["memory", "memory"]
    assert topology.node("localhost").nvlink_groups == () and any("memory" in line for line in topology.assumptions())


def test_what_was_measured_stands_for_the_stand_in(tmp_path):
    found = problem(tmp_path, profile())
    (gpu,) = found.gpus.values()
    assert (gpu.name, gpu.memory_bytes, gpu.fp16_flop_per_s) == ("cpu-core", 12 * 2**30, 90e9)


def test_pulled_blocks_price_the_hand_over_between_cores():
    topology = read_cluster(parse("like: localhost-cpu", "c.yaml"))
    measured = with_measured_memory(topology, [profile()])
    way = route(measured, [[GpuId("localhost", 0)]], [[GpuId("localhost", 1)]])
    assert way.bytes_per_s(measured) == pytest.approx(BYTES_PER_S, rel=0.02)
    assert way.latency_s == pytest.approx(FIXED_S, rel=0.05)
    assert way.is_verified(measured) and measured.assumptions() == ()
    assert not route(topology, [[GpuId("localhost", 0)]], [[GpuId("localhost", 1)]]).is_verified(topology)


def test_links_of_another_kind_stay_as_the_cluster_file_has_them():
    topology = read_cluster(parse("like: a100-4gpu", "c.yaml"))
    assert with_measured_memory(topology, [profile(gpu="a100-80gb")]).links == topology.links


def test_two_cores_are_planned_from_end_to_end(tmp_path):
    found = plan(problem(tmp_path, profile()))
    both = found.disaggregated, found.aggregated
    assert [option.placed.layout for option in both] == [
        "1 x prefill TP1 + 1 x decode TP1",
        "2 x aggregated TP1 (128 tokens)",
    ]
    prefill, decode = found.disaggregated.placed.system.instances
    assert prefill.limits.kv_blocks == decode.limits.kv_blocks == 50_000 // 16
    (path,) = found.disaggregated.placed.system.paths
    assert path.fixed_s == pytest.approx(FIXED_S, abs=2e-4)  # and the messages around the copy
    # 0.218 s a prompt: one core takes 4.6 of them per second at most
    assert 2.0 < found.disaggregated.rate.goodput_rps < 1 / prefill_s(80)


@pytest.mark.parametrize(
    ("engine", "blocks"),
    [
        ({}, 50_000 // 16),  # what was measured
        ({"memory_fraction": 0.99}, 50_000 // 16),  # 12 GiB hold far more: still no more than was found
        # 10 % of 12 GiB less 256 MiB, the weights and the activations of 32 tokens, in blocks of 737,280 bytes
        ({"memory_fraction": 0.1, "reserved_bytes": "256MiB"}, None),
    ],
)
def test_a_share_of_the_memory_that_is_asked_for_bounds_what_was_measured(tmp_path, engine, blocks):
    found = find_kinds(problem(tmp_path, profile(), engine=engine))
    (decode,) = (kind for kind in found.all_legal if kind.phase == "decode" and kind.gpus == 1)
    left = 0.1 * CORE.memory_bytes - 256 * 2**20 - smollm2("float32").weight_bytes
    low, high = (blocks, blocks) if blocks else (0.98 * left // 737_280, left // 737_280)
    assert low <= decode.limits.kv_blocks <= high < 50_000


def test_a_profile_of_another_type_of_weights_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(InputError, match=r"measured float32, the model here has bfloat16; .*dtype: float32") as error:
        problem(tmp_path, profile(), "smollm2-135m")
    assert len(error.value.faults) == 1 and error.value.faults[0].line is not None


def test_mixed_steps_say_how_far_the_law_is_off():
    found = profile()
    cost = fit_all(found, smollm2("float32"), CORE)[1]
    assert mixed_error(cost, found) is None
    shapes = [BatchShape(1, n, float(n) ** 2, b, b * 256) for n in (64, 256) for b in (2, 8)]
    rows = [
        (1, 1, 1, shape.tokens, 0, shape.decodes, 256, cost.iteration_s(shape) * factor)
        for shape, factor in zip(shapes, (1.25, 1.25, 1.25, 0.8), strict=True)
    ]
    error = mixed_error(cost, profile(mixed=MixedSamples(rows=tuple(rows))))
    # predicted over measured: 1 / 1.25 three times, 1 / 0.8 once
    assert (error.settings, error.median, error.worst) == (4, pytest.approx(-0.2), pytest.approx(0.25))


@pytest.mark.parametrize(("scale", "prompt", "output"), [(0.5, 5, 2), (0.3, 3, 1), (2.0, 20, 6)])
def test_lengths_are_scaled_and_rounded_up(scale, prompt, output):
    from planner.sources.workloads import read_workload

    text = {**fixed(10, 3), "prompt_scale": scale, "output_scale": scale}
    table = read_workload(parse(dump_yaml(text), "w.yaml")).table
    assert np.array_equal(table.prompt_tokens, [prompt]) and np.array_equal(table.output_tokens, [output])
