"""Tables of single operators, put together into whole instances. Assembled, never timed end to end.

A step is layers x (operators + attention + collectives), plus embedding, last norm and vocabulary projection.
What a table lacks is worked out from the data sheet and named in the notes. Host work between kernels is in
none of them, so an assembled step is a lower estimate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from planner.errors import Fault, InputError
from planner.sources.tables import Row, read_table, seconds, slug
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile, Provenance, Sample, Samples
from planner.specs.step_tables import StepTables

# The same typical shares as in `cost.physics` (with their sources), which this package may not import.
ATTENTION_EFFICIENCY, KV_EFFICIENCY, STREAM_EFFICIENCY = 0.55, 0.8, 0.8
_POINTS = 24
_CONTEXTS = (256, 1024, 4096)
_LARGEST_BATCH = 512
Curve = Callable[[float], float]

_VIDUR_ONCE = ("emb",)
_SIM_ONCE = ("embedding", "final_layernorm")
_SIM_TWICE = ("layernorm",)
_SIM_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")


def vidur(
    path: str | Path, model: ModelSpec, gpu: Gpu, tp: int | None = None, all_reduce: str | Path | None = None
) -> Profile:
    """Return the profile put together from Vidur's table of one layer's matrices and of all-reduces [ms].

    `tp`: one degree, else every one in the table. Attention is not in these tables: it comes from the data
    sheet.
    """
    tables = _vidur_layers(path)
    if tp is not None and tp not in tables:
        known = ", ".join(map(str, sorted(tables)))
        raise InputError(Fault(f"no rows of TP{tp}; the table has TP {known}", str(path)))
    degrees = [tp] if tp is not None else sorted(tables)
    if max(degrees) > 1 and all_reduce is None:
        raise InputError(Fault(f"TP{max(degrees)} needs the table of all-reduce times (all_reduce=FILE)", str(path)))
    samples: list[Sample] = []
    for degree in degrees:
        reduce = _vidur_all_reduce(all_reduce, degree) if degree > 1 and all_reduce else _nothing
        samples += _vidur_instance(model, gpu, degree, tables[degree], reduce)
    notes = (
        f"attention: not in the tables; FLOP at {ATTENTION_EFFICIENCY:g} of the peak, KV reads at "
        f"{KV_EFFICIENCY:g} of the bandwidth",
        f"vocabulary projection: not in the tables; weights read at {STREAM_EFFICIENCY:g} of the bandwidth",
        "host work between kernels: not in the tables, not added",
    )
    return Profile(
        name=slug("vidur", model.name, gpu.name),
        model=model.name,
        gpu=gpu.name,
        engine="kernels as timed by Vidur",
        dtype="float16",
        interconnect="NVLink inside one DGX",
        provenance=Provenance(
            method="assembled",
            source="microsoft/vidur, data/profiling",
            url="https://github.com/microsoft/vidur",
            revision="7d47513",
            licence="MIT",
            citation="Agrawal et al., Vidur: A Large-Scale Simulation Framework for LLM Inference, MLSys '24",
            notes=notes,
        ),
        samples=Samples.of(samples),
    )


def _nothing(_: float) -> float:
    return 0.0


def _vidur_layers(path: str | Path) -> dict[int, dict[str, dict[int, float]]]:
    """Return per degree the time [s] by tokens of one layer's operators, and of what happens once."""
    rows = read_table(path, ("num_tokens", "num_tensor_parallel_workers", "time_stats.mlp_up_proj.median"))
    operators = [name for name in rows[0].cells if name.startswith("time_stats.") and name.endswith(".median")]
    times: dict[int, dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: {"layer": defaultdict(list), "once": defaultdict(list)}
    )
    for row in rows:
        tp, tokens = row.count("num_tensor_parallel_workers"), row.count("num_tokens")
        for part in ("layer", "once"):
            names = [name for name in operators if (name.split(".")[1] in _VIDUR_ONCE) == (part == "once")]
            times[tp][part][tokens].append(sum(row.number(name, -1e-12) for name in names) / 1e3)
    return {
        tp: {part: {n: float(np.median(v)) for n, v in points.items()} for part, points in parts.items()}
        for tp, parts in times.items()
    }


def _vidur_all_reduce(path: str | Path, tp: int) -> Curve:
    """Return the time [s] of one all-reduce by its bytes, inside one node where the table has that."""
    column = "time_stats.all_reduce.median"
    rows = read_table(path, ("num_workers", "size", "devices_per_node", column))
    rows = [row for row in rows if row.count("num_workers") == tp]
    if not rows:
        raise InputError(Fault(f"no rows with num_workers {tp}", str(path)))
    packed = max(row.count("devices_per_node") for row in rows)
    rows = [row for row in rows if row.count("devices_per_node") == packed]
    return _curve((row.number("size"), row.number(column) / 1e3) for row in rows)


def _vidur_instance(
    model: ModelSpec, gpu: Gpu, tp: int, table: dict[str, dict[int, float]], reduce: Curve
) -> list[Sample]:
    layer, once = _curve(table["layer"].items()), _curve(table["once"].items())
    head_s = model.head_flops_per_token / (tp * gpu.memory_bytes_per_s * STREAM_EFFICIENCY)

    def step_s(tokens: int) -> float:
        """All but attention. With 2-byte weights the last projection reads a byte for each of its FLOP."""
        collectives = 2 * reduce(tokens * model.activation_bytes_per_token)
        return model.layers * (layer(tokens) + collectives) + once(tokens) + head_s

    def prefill_s(tokens: int) -> float:
        return step_s(tokens) + model.attention_flops(tokens) / (tp * gpu.fp16_flop_per_s * ATTENTION_EFFICIENCY)

    def decode_s(batch: int, context: int) -> float:
        read = batch * sum(model.stage_kv_bytes(Layout(tp), context))
        return step_s(batch) + read / (gpu.memory_bytes_per_s * KV_EFFICIENCY)

    counts = _thin(table["layer"])
    prompts = [Sample("prefill", tp, 1, 1, n, 0, 0, seconds(prefill_s(n))) for n in counts if n >= 16]
    steps = [
        Sample("decode", tp, 1, batch, 0, 0, context, seconds(decode_s(batch, context)))
        for batch in counts
        if batch <= _LARGEST_BATCH
        for context in _CONTEXTS
    ]
    return [*prompts, *steps]


def llmservingsim(
    path: str | Path,
    model: ModelSpec,
    gpu: Gpu,
    attention: str | Path,
    per_sequence: str | Path,
    tp: int = 1,
) -> Profile:
    """Return the profile put together from LLMServingSim's dense, attention and per-sequence tables [us].

    `path`: the dense table. Rows that mix chunks and decoding requests are not used, and attention rows that
    would read KV faster than the GPU's memory, or compute faster than its peak, are left out and counted.
    """
    dense, tail = _curve(_sim_dense(path, model).items()), _curve(_sim_per_sequence(per_sequence).items())
    rows = read_table(attention, _SIM_ATTENTION)
    pure = [row for row in rows if (row.count("prefill_chunk", 0) > 0) != (row.count("n_decode", 0) > 0)]
    kept = [row for row in pure if _possible(row, model, gpu, tp)]
    samples = [_sim_sample(row, model, tp, dense, tail) for row in kept]
    if not samples:
        raise InputError(Fault("no usable row of only a chunk or only decoding requests", str(attention)))
    notes = [
        f"left out {len(rows) - len(pure)} attention rows that mix phases",
        f"left out {len(pure) - len(kept)} attention rows faster than the GPU's memory or peak",
        "host work between kernels: not in the tables, not added",
    ]
    if tp > 1:
        notes.append("tensor-parallel collectives: not in the tables, not added")
    return Profile(
        name=slug("llmservingsim", model.name, gpu.name),
        model=model.name,
        gpu=gpu.name,
        engine="vLLM 0.19.0, layer by layer",
        dtype=model.dtype,
        provenance=Provenance(
            method="assembled",
            source="casys-kaist/LLMServingSim, profiler tables",
            url="https://github.com/casys-kaist/LLMServingSim",
            revision="5daddb2",
            licence="MIT",
            citation="Cho et al., LLMServingSim: A HW/SW Co-Simulation Infrastructure for LLM Inference "
            "Serving at Scale, IISWC '24",
            notes=tuple(notes),
        ),
        samples=Samples.of(sorted(samples)),
    )


def llmservingsim_steps(
    path: str | Path, model: ModelSpec, gpu: Gpu, attention: str | Path, per_sequence: str | Path, tp: int = 1
) -> StepTables:
    """Return the same tables as `llmservingsim` reads, whole: the rows that mix phases included, nothing fitted."""
    rows = read_table(attention, _SIM_ATTENTION)
    kept = [row for row in rows if _possible(row, model, gpu, tp)]
    if not kept:
        raise InputError(Fault("no row that this GPU could have taken", str(attention)))
    notes = [f"left out {len(rows) - len(kept)} attention rows faster than the GPU's memory or peak"]
    if tp > 1:
        notes.append("tensor-parallel collectives: not in the tables, not added")
    columns = [[row.number(name, -1) for row in kept] for name in _SIM_ATTENTION]
    table = np.array(columns).T
    table[:, 4] *= model.layers / 1e6
    return StepTables(_points(_sim_dense(path, model)), _points(_sim_per_sequence(per_sequence)), table, tuple(notes))


def _points(curve: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    where = sorted(curve)
    return np.array(where, float), np.array([curve[x] for x in where])


def _sim_dense(path: str | Path, model: ModelSpec) -> dict[int, float]:
    """Return the time [s] of all dense operators of a step by its tokens."""
    total: dict[int, float] = defaultdict(float)
    seen: dict[str, set[int]] = defaultdict(set)
    for row in read_table(path, ("layer", "tokens", "time_us")):
        name, tokens = row.text("layer"), row.count("tokens")
        times = 1 if name in _SIM_ONCE else model.layers * (2 if name in _SIM_TWICE else 1)
        total[tokens] += times * row.number("time_us") / 1e6
        seen[name].add(tokens)
    shared = set.intersection(*seen.values())
    if not shared:
        raise InputError(Fault("no number of tokens at which every layer was timed", str(path)))
    return {tokens: total[tokens] for tokens in sorted(shared)}


def _sim_per_sequence(path: str | Path) -> dict[int, float]:
    """Return the time [s] of vocabulary projection and sampler by the number of sequences."""
    total: dict[int, float] = defaultdict(float)
    for row in read_table(path, ("layer", "sequences", "time_us")):
        total[row.count("sequences")] += row.number("time_us") / 1e6
    return dict(total)


def _sim_sample(row: Row, model: ModelSpec, tp: int, dense: Curve, tail: Curve) -> Sample:
    chunk, batch = row.count("prefill_chunk", 0), row.count("n_decode", 0)
    attention_s = model.layers * row.number("time_us") / 1e6
    if chunk:
        time_s = seconds(attention_s + dense(chunk) + tail(1))
        return Sample("prefill", tp, 1, 1, chunk, row.count("kv_prefill", 0), 0, time_s)
    time_s = seconds(attention_s + dense(batch) + tail(batch))
    return Sample("decode", tp, 1, batch, 0, 0, row.count("kv_decode"), time_s)


def _possible(row: Row, model: ModelSpec, gpu: Gpu, tp: int) -> bool:
    """False when one layer's attention would beat the data sheet."""
    chunk, batch = row.count("prefill_chunk", 0), row.count("n_decode", 0)
    work, read = 0.0, 0.0
    if chunk:
        work = model.attention_flops(chunk, row.count("kv_prefill", 0)) / model.layers
    if batch:
        read = batch * sum(model.stage_kv_bytes(Layout(tp), row.count("kv_decode"))) / model.layers
    floor_s = max(work / (tp * gpu.fp16_flop_per_s), read / gpu.memory_bytes_per_s)
    return floor_s <= row.number("time_us") / 1e6


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return the interpolation of the medians: flat below the first point, straight on behind the last."""
    grouped: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        grouped[float(x)].append(y)
    xs = np.array(sorted(grouped))
    ys = np.array([np.median(grouped[x]) for x in xs])
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0

    def value(x: float) -> float:
        return float(np.interp(x, xs, ys)) + slope * max(0.0, x - float(xs[-1]))

    return value


def _thin(points: Iterable[int]) -> list[int]:
    """Return at most 24 of the points, evenly spaced in the logarithm, ends included."""
    found = np.array(sorted(points))
    wanted = np.geomspace(found[0], found[-1], min(_POINTS, len(found)))
    nearest = {int(found[np.abs(np.log(found / x)).argmin()]) for x in wanted}
    return sorted(nearest)
