"""Tables of single operators and collectives, as their publishers name the columns."""

from __future__ import annotations

import numpy as np

from planner.lint import floors
from planner.lint.base import Finding, Series, Table
from planner.lint.floors import Floors
from planner.lint.given import Given
from planner.lint.raw import Raw
from planner.lint.whole import unknown, widths
from planner.specs.cluster import nvlink_bytes_per_s
from planner.specs.gpu import Gpu
from planner.specs.model import DTYPE_BYTES, ModelSpec

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
VIDUR_MLP = ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head",
             "use_gated_mlp")  # fmt: skip
FRONTIER = ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", "num_tensor_parallel_workers", "n_embd",
            "n_q_head", "n_kv_head")  # fmt: skip
APEX = ("gpu", "num_nodes", "num_gpus_per_node", "dtype", "size(kb)", "time(us)")
KERNEL_ATTENTION = ("device", "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim",
                    "window_size", "kv_cache_dtype", "latency")  # fmt: skip


def _table(raw: Raw, kind: str, series: list[Series], notes: tuple[Finding, ...]) -> Table:
    return Table(
        raw.file, kind, raw.lines, tuple(series), texts=raw.texts, cells=raw.columns, found=(*raw.found, *notes)
    )


def _unnamed(raw: Raw, given: Given, model: bool = True) -> tuple[Finding, ...]:
    """Return the note for a table that names neither its GPU nor its model."""
    return unknown(len(raw) * (model and given.model is None), len(raw) * (given.gpu is None))


# -- LLMServingSim: one layer inside vLLM [us] -----------------------------------------------------------


def attention(raw: Raw, given: Given) -> Table:
    """Return attention over a prefill chunk, decoding requests, or both."""
    names = ATTENTION[:-1]
    where: dict[str, np.ndarray] = {name: raw.count(name, 0) for name in names}
    chunk, cached, decodes, context = (where[name] for name in names)
    least = (
        floors.attention(given.model, given.gpu, given.tp, (chunk, cached, decodes, context))
        if given.model and given.gpu
        else {}
    )
    work = chunk * (cached + chunk / 2) + decodes * context
    kinds = np.where(chunk > 0, np.where(decodes > 0, "mixed", "prefill"), "decode").astype(object)
    series = Series(
        "time_us", raw.time_s("time_us", 1e-6), where | {"batch of": kinds}, ("batch of",), names,
        floors=least, work=work, work_unit="query-key pairs",
    )  # fmt: skip
    return _table(raw, "attention", [series], _unnamed(raw, given))


def dense(raw: Raw, given: Given) -> Table:
    """Return operators over tokens: products, norms, activations."""
    return _operators(raw, given, "dense", "tokens")


def per_sequence(raw: Raw, given: Given) -> Table:
    """Return what runs once per sequence: the vocabulary projection and the sampler."""
    return _operators(raw, given, "per sequence", "sequences")


def _operators(raw: Raw, given: Given, kind: str, size: str) -> Table:
    where = {"layer": raw.text("layer"), size: raw.count(size)}
    least: Floors = {}
    if given.model and given.gpu:
        parts = []
        for layer in dict.fromkeys(where["layer"].tolist()):
            rows = np.flatnonzero(where["layer"] == layer)
            if shape := _shape(given.model, str(layer), given.tp):
                width = DTYPE_BYTES[given.model.dtype]
                parts.append((rows, floors.product(*shape, where[size][rows], given.gpu, width)))
        least = floors.merge(len(raw), parts)
    series = Series(
        "time_us",
        raw.time_s("time_us", 1e-6),
        where,
        ("layer",),
        (size,),
        floors=least,
        work=where[size],
        work_unit=size,
    )
    return _table(raw, kind, [series], _unnamed(raw, given))


def _shape(model: ModelSpec, layer: str, tp: int) -> tuple[float, float] | None:
    """Return inputs and outputs of one rank's share of a matrix product, by the name that engines give it."""
    heads, kv = -(-model.heads // tp) * model.head_dim, -(-model.kv_heads // tp) * model.head_dim
    inner, hidden = (model.intermediate_size or 0) / tp, model.hidden_size
    shapes = {
        "qkv_proj": (hidden, heads + 2 * kv),
        "o_proj": (heads, hidden),
        "gate_up_proj": (hidden, 2 * inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
        "lm_head": (hidden, model.vocab_size / tp),
    }
    dense = not model.quantisation and not model.mla and not model.moe
    return shapes.get(layer) if dense and shapes.get(layer, (0, 0))[1] else None


# -- Vidur and Frontier [ms] -----------------------------------------------------------------------------

_VIDUR_SHAPES = {"attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"}
_VIDUR_BYTES = 2


def _stats(raw: Raw) -> list[str]:
    """Return the operators that the table has statistics of."""
    return [name.split(".")[1] for name in raw.columns if name.startswith("time_stats.") and name.endswith(".median")]


def _spread(raw: Raw, name: str) -> np.ndarray | None:
    std, middle = (f"time_stats.{name}.{part}" for part in ("std", "mean"))
    if std not in raw.columns or middle not in raw.columns:
        return None
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # a mean of 1e-320 is a cell like any other
        return raw.optional(std) / raw.optional(middle)


def vidur_mlp(raw: Raw, given: Given) -> Table:
    """Return one layer's operators but attention, by tokens and degree; the columns give every shape."""
    where = {"num_tokens": raw.count("num_tokens"), "tp": raw.count("num_tensor_parallel_workers")}
    series = [
        Series(name, raw.time_s(f"time_stats.{name}.median", 1e-3), where, (), ("num_tokens",), "tp",
               floors=_vidur_floors(raw, where, name, given.gpu), work=where["num_tokens"], work_unit="tokens",
               spread=_spread(raw, name))
        for name in _stats(raw)
    ]  # fmt: skip
    return _table(raw, "vidur mlp", series, _unnamed(raw, given, model=False))


def _vidur_floors(raw: Raw, where: dict[str, np.ndarray], name: str, gpu: Gpu | None) -> Floors:
    if gpu is None or name not in _VIDUR_SHAPES:
        return {}
    hidden, inner, heads, kv = (raw.optional(column) for column in ("n_embd", "n_expanded_embd", "n_head", "n_kv_head"))
    tp, width = where["tp"], hidden / heads
    gated = np.array([1.0 + (cell.strip().lower() == "true") for cell in raw.columns["use_gated_mlp"]])
    inputs, outputs = {
        "attn_pre_proj": (hidden, (heads / tp + 2 * np.ceil(kv / tp)) * width),
        "attn_post_proj": (hidden / tp, hidden),
        "mlp_up_proj": (hidden, gated * inner / tp),
        "mlp_down_proj": (inner / tp, hidden),
    }[name]
    return floors.product(inputs, outputs, where["num_tokens"], gpu, _VIDUR_BYTES)


def vidur_collective(raw: Raw, given: Given) -> Table:
    """Return all-reduces and send-receives by bytes, ranks and how many of them share a node.

    Every rank must at least send, or receive, the whole message once: a ring all-reduce moves almost twice as much,
    switches that sum on the way do not.
    """
    where = {"collective": raw.text("collective")}
    for name in ("num_workers", "devices_per_node", "size"):
        where[name] = raw.count(name)
    nodes = np.maximum(1.0, where["num_workers"] / where["devices_per_node"])
    where["nodes"] = nodes
    line_s = _line_s(where["size"], nodes, where["devices_per_node"], given.gpu)
    series = [
        Series(name, raw.time_s(f"time_stats.{name}.median", 1e-3), where,
               ("collective", "nodes", "num_workers"), ("size",), floors={floors.LINK: line_s}, work=where["size"],
               work_unit="bytes", spread=_spread(raw, name), element_bytes=np.where(nodes == 1, 2.0, np.nan),
               line_s=line_s)
        for name in _stats(raw)
    ]  # fmt: skip
    return _table(raw, "vidur collective", series, _unnamed(raw, given, model=False))


def _line_s(size: np.ndarray, nodes: np.ndarray, per_node: np.ndarray, gpu: Gpu | None) -> np.ndarray:
    """Return the time [s] of a message at the line rate; NaN without a GPU.

    NVLink (else PCIe) inside a node, the PCIe ports of all its ranks out of it: no card behind them is faster.
    """
    if gpu is None:
        return np.full(len(size), np.nan)
    inside = nvlink_bytes_per_s(gpu) or gpu.host_bytes_per_s
    return size / np.where(nodes > 1, per_node * gpu.host_bytes_per_s, inside)


def frontier(raw: Raw, given: Given) -> Table:
    """Return the attention kernels of one layer over batch, chunk and cached tokens."""
    sizes = ("batch_size", "prefill_chunk_size", "kv_cache_size")
    where: dict[str, np.ndarray] = {name: raw.count(name, 0) for name in sizes}
    labels = tuple(name for name in ("attention_backend", "block_size", "n_q_head", "n_kv_head") if name in raw.columns)
    where |= {name: raw.text(name) for name in labels}
    where["tp"] = raw.count("num_tensor_parallel_workers")
    prefill = np.array([cell.strip().lower() == "true" for cell in raw.columns["is_prefill"]])
    series = []
    for name in _stats(raw):
        only = prefill if "prefill" in name else ~prefill if "decode" in name else None
        value = raw.optional(f"time_stats.{name}.median")
        if only is None:  # one table for all: what takes no time at all was not run
            only = value > 0
        if not only.any():
            continue
        core = name in ("attn_prefill", "attn_decode")
        least = _frontier_floors(raw, where, prefill, given.gpu) if core and given.gpu else {}
        batch, chunk, cached = (where[size] for size in sizes)
        work = batch * np.where(prefill, chunk * (cached + chunk / 2), cached) if core else None
        series.append(
            Series(name, raw.time_s(f"time_stats.{name}.median", 1e-3, only), where, labels, _varied(sizes, name), "tp",
                   floors=least, work=work, work_unit="query-key pairs")
        )  # fmt: skip
    return _table(raw, "frontier attention", series, _unnamed(raw, given, model=False))


def _varied(sizes: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(size for size in sizes if "decode" not in name or "chunk" not in size)


def _frontier_floors(raw: Raw, where: dict[str, np.ndarray], prefill: np.ndarray, gpu: Gpu) -> Floors:
    """Return the floors out of the table's own shape columns; two bytes per value."""
    hidden, heads, kv = (raw.optional(column) for column in ("n_embd", "n_q_head", "n_kv_head"))
    width, tp = hidden / heads, where["tp"]
    batch, chunk, cached = (where[name] for name in ("batch_size", "prefill_chunk_size", "kv_cache_size"))
    kv_bytes = 2 * np.ceil(kv / tp) * width * _VIDUR_BYTES
    pairs = batch * np.where(prefill, chunk * (cached + chunk / 2), cached)
    return {
        floors.MEMORY: batch * cached * kv_bytes / gpu.memory_bytes_per_s,
        floors.COMPUTE: 4.0 * pairs * heads / tp * width / gpu.fp16_flop_per_s,
    }


# -- APEX: NCCL [us, kB] ---------------------------------------------------------------------------------


def apex(raw: Raw, given: Given) -> Table:
    """Return NCCL collectives by GPU, ranks, type and size; size 0 is the start-up alone.

    The table does not say which collective: all-to-all moves the least of them, all but a rank's own part.
    """
    where: dict[str, np.ndarray] = {"gpu": raw.text("gpu"), "dtype bytes": widths(raw.text("dtype"))}
    for name, least in (("num_nodes", 1), ("num_gpus_per_node", 1), ("size(kb)", 0)):
        where[name] = raw.count(name, least)
    gpus = [given.gpu_called(str(name)) for name in where["gpu"]]
    size, nodes, per_node = 1024.0 * where["size(kb)"], where["num_nodes"], where["num_gpus_per_node"]
    line_s = np.full(len(raw), np.nan)
    for name in dict.fromkeys(where["gpu"].tolist()):
        rows = where["gpu"] == name
        line_s[rows] = _line_s(size[rows], nodes[rows], per_node[rows], given.gpu_called(str(name)))
    ranks = nodes * per_node
    series = Series(
        "time", raw.time_s("time(us)", 1e-6), where, ("gpu", "num_nodes", "num_gpus_per_node"), ("size(kb)",),
        width="dtype bytes", floors={floors.LINK: line_s * (ranks - 1) / ranks}, work=size, work_unit="bytes",
        element_bytes=np.where(nodes == 1, where["dtype bytes"], np.nan), line_s=line_s,
    )  # fmt: skip
    return _table(raw, "apex collective", [series], unknown(0, sum(gpu is None for gpu in gpus)))


# -- aiconfigurator [ms] ---------------------------------------------------------------------------------

_ORIGIN = ("framework", "version", "device", "op_name", "kernel_source", "backend", "beam_width")


def _origin(raw: Raw) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the columns that say what ran where, and their names."""
    names = tuple(name for name in _ORIGIN if name in raw.columns)
    return {name: raw.text(name) for name in names}, names


def _device(raw: Raw, given: Given) -> tuple[Gpu | None, tuple[Finding, ...]]:
    """Return the one GPU of a table, and the note that it is not known or not the only one."""
    names = set(raw.text("device").tolist())
    gpu = given.gpu_called(names.pop()) if len(names) == 1 else None
    return gpu, unknown(0, len(raw) * (gpu is None))


def gemm(raw: Raw, given: Given) -> Table:
    """Return matrix products m x k by k x n, by type."""
    where, labels = _origin(raw)
    where |= {name: raw.count(name) for name in ("m", "n", "k")}
    where["bytes"] = widths(raw.text("gemm_dtype"))
    gpu, notes = _device(raw, given)
    least = floors.product(where["k"], where["n"], where["m"], gpu, where["bytes"]) if gpu else {}
    series = Series(
        "latency", raw.time_s("latency", 1e-3), where, labels, ("m", "n", "k"), width="bytes",
        floors=least, work=where["m"] * where["n"] * where["k"], work_unit="multiply-adds",
    )  # fmt: skip
    return _table(raw, "gemm", [series], notes)


def kernel_attention(raw: Raw, given: Given) -> Table:
    """Return attention of whole prompts (step 0) or of one new token behind `step` others, by heads and window."""
    where, labels = _origin(raw)
    shape = ("num_heads", "num_key_value_heads", "head_dim", "window_size")
    where |= {name: raw.count(name, 0) for name in (*shape, "batch_size", "isl", "step")}
    where["bytes of KV"] = widths(raw.text("kv_cache_dtype"))
    gpu, notes = _device(raw, given)
    batch, new, cached = (where[name] for name in ("batch_size", "isl", "step"))
    window = np.where(where["window_size"] > 0, where["window_size"], np.inf)
    seen = np.minimum(new + cached, window)  # what the last token attends to
    pairs = batch * np.where(cached > 0, new * seen, new * seen - np.minimum(new, seen) ** 2 / 2)
    least: Floors = {}
    if gpu:
        read = batch * np.where(cached > 0, seen, 0.0) * where["num_key_value_heads"] * where["head_dim"]
        flops = 4.0 * pairs * where["num_heads"] * where["head_dim"]
        least = {
            floors.MEMORY: 2.0 * read * where["bytes of KV"] / gpu.memory_bytes_per_s,
            floors.COMPUTE: flops / gpu.fp16_flop_per_s,
        }
    # the fewest key-value heads share the most queries: only with all else equal is more of one thing more work
    series = Series(
        "latency", raw.time_s("latency", 1e-3), where, (*labels, *shape), ("batch_size", "isl", "step"),
        width="bytes of KV", floors=least, work=pairs, work_unit="query-key pairs",
    )  # fmt: skip
    return _table(raw, "kernel attention", [series], notes)


def kernel_collective(raw: Raw, given: Given) -> Table:
    """Return collectives inside a node; whether `message_size` counts bytes or elements is for the checks to say."""
    where, labels = _origin(raw)
    where |= {name: raw.count(name) for name in ("num_gpus", "message_size")}
    kind = next((name for name in raw.columns if name.endswith("_dtype")), None)
    where["bytes"] = widths(raw.text(kind)) if kind else np.full(len(raw), np.nan)
    gpu, notes = _device(raw, given)
    size, ranks = where["message_size"], where["num_gpus"]
    line_s = _line_s(size, np.ones(len(raw)), ranks, gpu)
    moved = np.where(where["op_name"] == "all_reduce", 1.0, (ranks - 1) / ranks)
    series = Series(
        "latency", raw.time_s("latency", 1e-3), where, (*labels, "num_gpus"), ("message_size",), width="bytes",
        floors={floors.LINK: moved * line_s}, work=size, work_unit="of size", element_bytes=where["bytes"],
        line_s=line_s,
    )  # fmt: skip
    return _table(raw, "kernel collective", [series], notes)
