"""Tables of whole instances: our own samples, Splitwise's runs, and serving measured end to end."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from planner.cost import physics
from planner.lint.base import Finding, Parts, Series, Table, Whole
from planner.lint.floors import COMPUTE, MEMORY, Floors
from planner.lint.given import Given
from planner.lint.raw import Raw
from planner.sources.splitwise import QUEUED, Run
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Sample

OPERAND_BYTES = {
    "float32": 4.0, "fp32": 4.0, "float": 4.0, "float16": 2.0, "fp16": 2.0, "half": 2.0, "bfloat16": 2.0, "bf16": 2.0,
    "fp8": 1.0, "fp8_block": 1.0, "int8": 1.0, "fp4": 0.5, "nvfp4": 0.5, "mxfp4": 0.5, "int4": 0.5,
}  # fmt: skip

_HOST_S = 1.0
"""Host work of a step is a tenth of this in the slowest engines on record."""
_QUEUE_S = 1e6
"""Requests of a loaded server may wait for as long as they like."""


def widths(names: np.ndarray) -> np.ndarray:
    """Return the bytes per operand of type names; NaN for what is empty or unknown."""
    return np.array([OPERAND_BYTES.get(str(name).lower(), np.nan) for name in names])


def unknown(no_model: int, no_gpu: int, things: str = "rows") -> tuple[Finding, ...]:
    """Return the note that the rates of some rows were not checked, for want of a model or a GPU, or nothing."""
    missing = [(name, count) for name, count in (("model", no_model), ("GPU", no_gpu)) if count]
    if not missing:
        return ()
    told = ", ".join(f"no known {name} for {count} {things}" for name, count in missing)
    flags = " and ".join(f"--{name.lower()}" for name, _ in missing)
    return (Finding("note", "unchecked", (), f"rates not checked: {told}", f"give {flags} (a preset or a file)"),)


def of_samples(samples: Sequence[Sample], model: ModelSpec | None, gpu: Gpu | None) -> tuple[Series, ...]:
    """Return the prefills and the decode steps of a profile."""
    column = {name: np.array([getattr(s, name) for s in samples], dtype=float) for name in Sample._fields[1:]}
    prefill = np.array([s.phase == "prefill" for s in samples], dtype=bool)
    floor = _floors(samples, [model] * len(samples), [gpu] * len(samples))
    series = []
    for phase, there, sizes in (
        ("prefill", prefill, ("batch", "prompt_tokens", "cached_tokens")),
        ("decode", ~prefill, ("batch", "context_tokens")),
    ):
        each = column["prompt_tokens"] if phase == "prefill" else column["context_tokens"]
        series.append(
            Series(
                phase,
                np.where(there, column["time_s"], np.nan),
                column,
                ("pp",),
                sizes,
                ranks="tp",
                floors={COMPUTE if phase == "prefill" else MEMORY: np.where(there, floor, np.nan)},
                work=column["batch"] * each if phase == "prefill" else None,
                work_unit="tokens",
                overhead_s=_HOST_S,
            )
        )
    return tuple(one for one in series if np.isfinite(one.time_s).any())


def _floors(samples: Sequence[Sample], models: Sequence[ModelSpec | None], gpus: Sequence[Gpu | None]) -> np.ndarray:
    """Return the least time [s] of each sample; NaN without a model or GPU. Stages share the work of one pass."""
    found = np.full(len(samples), np.nan)
    for row, (s, model, gpu) in enumerate(zip(samples, models, gpus, strict=True)):
        if model is None or gpu is None:
            continue
        if s.phase == "prefill":
            shape = (s.batch, s.prompt_tokens, s.cached_tokens)
            found[row] = physics.prefill_floor_s(model, gpu, s.tp, shape) / s.pp
        else:
            found[row] = physics.decode_floor_s(model, gpu, s.tp, s.batch, s.context_tokens) / s.pp
    return found


# -- Splitwise -------------------------------------------------------------------------------------------


def splitwise_table(raw: Raw, given: Given) -> Table:
    """Return Splitwise's runs [ms]: a prefill and a decode step per row, and the end-to-end time over both."""
    where: dict[str, np.ndarray] = {"model": raw.text("model"), "hardware": raw.text("hardware")}
    for name in ("tensor_parallel", "batch_size", "prompt_size", "token_size"):
        where[name] = raw.count(name)
    prompt_s, token_s, e2e_s = (raw.time_s(name, 1e-3) for name in ("prompt_time", "token_time", "e2e_time"))
    runs = [_run(where, times, row) for row, times in enumerate(zip(prompt_s, token_s, e2e_s, strict=True))]
    models = [given.model_called(str(name)) for name in where["model"]]
    gpus = [given.gpu_called(str(name)) for name in where["hardware"]]
    steps = [_samples(run) for run in runs]
    floors = np.full((2, len(raw)), np.nan)
    for row, pair in enumerate(steps):
        floors[: len(pair), row] = _floors(pair, [models[row]] * len(pair), [gpus[row]] * len(pair))
    labels = ("model", "hardware")
    series = (
        Series("prompt_time", prompt_s, where, labels, ("batch_size", "prompt_size"), "tensor_parallel",
               floors={COMPUTE: floors[0]}, work=where["batch_size"] * where["prompt_size"], work_unit="tokens",
               overhead_s=_HOST_S),
        Series("token_time", np.where(where["token_size"] > 1, token_s, np.nan), where, labels,
               ("batch_size", "prompt_size", "token_size"), "tensor_parallel", floors={MEMORY: floors[1]},
               overhead_s=_HOST_S),
    )  # fmt: skip
    told = np.array([run.told_share * run.e2e_s if run else np.nan for run in runs])
    return Table(
        raw.file,
        "splitwise",
        raw.lines,
        series,
        parts=(Parts("prompt_time + token_time x (token_size - 1) against e2e_time", e2e_s, told, QUEUED, _QUEUE),),
        wholes=_wholes(where, steps),
        texts=raw.texts,
        cells=raw.columns,
        found=(*raw.found, *unknown(_missing(models), _missing(gpus))),
    )


_QUEUE = "left out: requests queued, so this is no time of one batch"


def _missing(found: Sequence[object]) -> int:
    return sum(one is None for one in found)


def _run(where: dict[str, np.ndarray], times: tuple[float, float, float], row: int) -> Run | None:
    counts = [where[name][row] for name in ("tensor_parallel", "batch_size", "prompt_size", "token_size")]
    if not np.isfinite([*counts, *times]).all():
        return None
    tp, batch, prompt, asked = map(int, counts)
    return Run(str(where["model"][row]), str(where["hardware"][row]), tp, batch, prompt, asked, *times)


def _samples(run: Run | None) -> list[Sample]:
    if run is None:
        return []
    prefill = Sample("prefill", run.tp, 1, run.batch, run.prompt, 0, 0, run.prompt_s)
    decode = Sample("decode", run.tp, 1, run.batch, 0, 0, run.context, run.token_s)
    return [prefill, decode] if run.asked > 1 else [prefill]


def _wholes(where: dict[str, np.ndarray], steps: list[list[Sample]]) -> tuple[Whole, ...]:
    groups: dict[tuple[str, str, int], list[tuple[int, Sample]]] = {}
    for row, pair in enumerate(steps):
        for sample in pair:
            key = (str(where["model"][row]), str(where["hardware"][row]), sample.tp)
            groups.setdefault(key, []).append((row, sample))
    return tuple(
        Whole(f"{model} on {gpu} TP{tp}", np.array([row for row, _ in found]), tuple(s for _, s in found))
        for (model, gpu, tp), found in sorted(groups.items())
    )


# -- serving, end to end ---------------------------------------------------------------------------------

SERVING = ("silicon_ttft_ms", "silicon_tpot_ms", "silicon_data_source", "system", "model_path", "precision", "mode",
           "isl", "osl", "batch_size", "tp_size")  # fmt: skip
_TIMES = ("silicon_ttft_ms", "silicon_tpot_ms")
_NAMES = ("id", "silicon_data_source")


def serving(raw: Raw, given: Given) -> Table:
    """Return measured TTFT and TPOT [ms] of whole servers; everything but the id, remarks and times is the setting."""
    rest = [name for name in raw.columns if name not in (*_TIMES, *_NAMES)]
    numeric = ("isl", "osl", "batch_size", "tp_size")
    where: dict[str, np.ndarray] = {name: raw.text(name) for name in rest if name not in numeric}
    for name in ("isl", "osl"):
        where[name] = raw.count(name)
    where["tp_size"] = np.nan_to_num(raw.optional("tp_size"))
    where["concurrency"] = _concurrency(raw)
    where["bytes per weight"] = widths(where["precision"])
    typed = ("precision", "gemm_quant_mode", "moe_quant_mode")
    labels = ("osl", *(name for name in rest if name not in (*numeric, *typed)))
    floors = _serving_floors(raw, where, given)
    series = tuple(
        Series(name.removeprefix("silicon_").removesuffix("_ms"), raw.time_s(name, 1e-3), where, labels,
               ("isl", "concurrency"), "tp_size", "bytes per weight", floors[name],
               overhead_s=_QUEUE_S)
        for name in _TIMES
    )  # fmt: skip
    models = [given.model_called(str(name)) for name in where["model_path"]]
    gpus = [given.gpu_called(str(name)) for name in where["system"]]
    return Table(
        raw.file,
        "measured serving",
        raw.lines,
        series,
        texts=raw.texts,
        cells=raw.columns,
        wanted=tuple(name for name in ("backend_version", "precision") if name in raw.columns),
        found=(*raw.found, *unknown(_missing(models), _missing(gpus))),
    )


def _concurrency(raw: Raw) -> np.ndarray:
    """Return the clients of the closed loop; disaggregated rows have them in their remarks only."""
    found = [re.search(r"concurrency=(\d+)", text) for text in raw.columns["silicon_data_source"]]
    said = np.array([float(match[1]) if match else np.nan for match in found])
    batch = raw.optional("batch_size")
    return np.where(np.isfinite(batch), batch, said)


def _serving_floors(raw: Raw, where: dict[str, np.ndarray], given: Given) -> dict[str, Floors]:
    """Return the floors of TTFT (its prompt's FLOP) and TPOT (a token's weights) over all GPUs of an instance.

    GPUs are counted generously, so that a floor is one: with data-parallel attention a request uses fewer.
    """
    size = {name: np.nan_to_num(raw.optional(name)) for name in raw.columns if name.endswith("_size")}
    floors = np.full((2, len(raw)), np.nan)
    for row in range(len(raw)):
        model, gpu = given.model_called(str(where["model_path"][row])), given.gpu_called(str(where["system"][row]))
        width = where["bytes per weight"][row]
        if model is None or gpu is None or not width > 0:
            continue
        active = model.matrix_flops_per_token - model.head_flops_per_token
        flops = gpu.fp8_flop_per_s if width == 1 and gpu.fp8_flop_per_s else gpu.fp16_flop_per_s
        if width >= 1 and (gpus := _gpus(size, row, "prefill_")):
            floors[0, row] = active * where["isl"][row] / (gpus * flops)
        if gpus := _gpus(size, row, "decode_"):
            floors[1, row] = active / 2 * width / (gpus * gpu.memory_bytes_per_s)
    return {_TIMES[0]: {COMPUTE: floors[0]}, _TIMES[1]: {MEMORY: floors[1]}}


def _gpus(size: dict[str, np.ndarray], row: int, phase: str) -> float:
    """Return at most how many GPUs one instance has; aggregated rows have no phase in their columns."""
    for prefix in ("", phase):
        value = {name: size[f"{prefix}{name}"][row] for name in _DEGREES if f"{prefix}{name}" in size}
        tp, pp, dp = (value.get(name, 0.0) for name in ("tp_size", "pp_size", "attention_dp_size"))
        experts = value.get("moe_tp_size", 0.0) * value.get("moe_ep_size", 0.0)
        if tp:
            return max(pp, 1.0) * max(tp * max(dp, 1.0), experts)
    return 0.0


_DEGREES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
