"""Operator laws on published tables of single kernels (tests/data/operators), trained on a few rows of each.

Which rows are trained on is settled by their sizes alone: powers of two of the tokens, graded sizes of collectives,
points of attention that fill the space. No constant was chosen on the rest (docs/decisions/0010-operator-laws.md says
what was seen of it).
"""

from __future__ import annotations

import csv
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.cost.chip import Chip, chip
from planner.cost.measured_link import measured_link
from planner.cost.operator_physics import Collective, Gemm, Streaming, attention_families
from planner.cost.operators import OperatorLaw, fit_operator, graded, spread_out
from planner.specs.cluster import find_gpu

DATA = Path(__file__).parents[1] / "tests" / "data" / "operators"
Array = np.ndarray

TOKENS = 2.0 ** np.arange(13)
"""Token counts that the matrices are trained on: 1 to 4096."""
SIZES, POINTS = 13, 64
TPS = (1, 2, 4, 8)

# Llama-2-70B, as Vidur shards it: outputs and inputs of each matrix at TP1, and which of the two TP divides
MATRICES = {
    "attn_pre_proj": (10240, 8192, "outputs"),  # 64 query and 2 x 8 KV heads of 128
    "attn_post_proj": (8192, 8192, "inputs"),
    "mlp_up_proj": (2 * 28672, 8192, "outputs"),  # gate and up
    "mlp_down_proj": (8192, 28672, "inputs"),
}
MOVERS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")


class Result(NamedTuple):
    """Relative errors, (tested,), of what was predicted from `trained` rows."""

    data: str
    trained: int
    errors: Array
    target: tuple[float, float] | None = None


def rows() -> list[Result]:
    """Return all results, those with a target first."""
    return [*layers(), *attention(), *collectives(), *links(), *checks()]


@cache
def read(name: str) -> dict[str, Array]:
    """Return the columns of a table; words stay words."""
    found = list(csv.DictReader((DATA / name).read_text().splitlines()))
    return {key: _column([row[key] for row in found]) for key in found[0]}


def _column(cells: list[str]) -> Array:
    try:
        return np.array([float(cell) for cell in cells])
    except ValueError:
        return np.array(cells)


def a_chip(name: str) -> Chip:
    """Return a GPU of our presets."""
    gpu = find_gpu(name)
    assert gpu is not None, name
    return chip(gpu)


# --- one layer of a model, all its operators but attention


def layers() -> list[Result]:
    """Return the errors of a whole layer's time, per GPU and TP, and of all together."""
    found = [layer(gpu, tp) for gpu in ("a100", "h100") for tp in TPS]
    return [
        _together("Vidur layer, all GPUs and TPs", found, (0.03, 0.15)),
        *(_together(f"  {gpu}", found[at : at + 4], (0.03, 0.15)) for gpu, at in (("A100", 0), ("H100", 4))),
        *found,
    ]


def layer(gpu: str, tp: int) -> Result:
    """Return the errors of the sum of one layer's operators at every token count that was not trained on."""
    table = read(f"vidur_mlp_llama2-70b_{gpu}.csv")
    mask = table["tp"] == tp
    tokens, names = table["tokens"][mask], [*MATRICES, *MOVERS]
    counts = np.unique(tokens)
    measured_s = _medians(counts, tokens, sum(table[f"{name}_ms"][mask] for name in names) / 1e3)
    predicted_s = sum(_matrix_s(gpu, name, tp, counts) for name in MATRICES)
    predicted_s += sum(mover(gpu, name, tp).time_s(counts[:, None]) for name in MOVERS)
    test = ~np.isin(counts, TOKENS)
    return Result(f"    {gpu} TP{tp}", len(TOKENS), np.abs(predicted_s / measured_s - 1.0)[test])


def _medians(counts: Array, tokens: Array, time_s: Array) -> Array:
    return np.array([np.median(time_s[tokens == count]) for count in counts])


def _matrix_s(gpu: str, name: str, tp: int, counts: Array) -> Array:
    outputs, inputs = shard(name, tp)
    return matrices(gpu).time_s(np.c_[counts, np.full(len(counts), outputs), np.full(len(counts), inputs)])


def shard(name: str, tp: int) -> tuple[int, int]:
    """Return outputs and inputs of one rank's part of a matrix."""
    outputs, inputs, cut = MATRICES[name]
    return (outputs // tp, inputs) if cut == "outputs" else (outputs, inputs // tp)


@cache
def matrices(gpu: str) -> OperatorLaw:
    """Return the law of all matrix products of one GPU, from the token counts to train on."""
    table = read(f"vidur_mlp_llama2-70b_{gpu}.csv")
    train = np.isin(table["tokens"], TOKENS)
    points, time_s = [], []
    for name in MATRICES:
        shapes = np.array([shard(name, int(tp)) for tp in table["tp"][train]])
        points.append(np.c_[table["tokens"][train], shapes])
        time_s.append(table[f"{name}_ms"][train] / 1e3)
    return fit_operator(np.concatenate(points), np.concatenate(time_s), Gemm(a_chip(f"{gpu}-80gb")))


@cache
def mover(gpu: str, name: str, tp: int) -> OperatorLaw:
    """Return the law of an operator that only moves data; its amount is the number of tokens."""
    table = read(f"vidur_mlp_llama2-70b_{gpu}.csv")
    train = (table["tp"] == tp) & np.isin(table["tokens"], TOKENS)
    return fit_operator(table["tokens"][train][:, None], table[f"{name}_ms"][train] / 1e3, Streaming())


# --- attention


def attention() -> list[Result]:
    """Return the errors of decode and prefill attention on A800, each from 64 points."""
    decode, prefill = frontier("decode"), frontier("prefill")
    return [
        Result("Frontier A800 attention, decode", POINTS, decode, (0.06, 0.2)),
        Result("Frontier A800 attention, prefill", POINTS, prefill),
    ]


def frontier(phase: str) -> Array:
    """Return the errors of one phase; A800 is A100 with slower links."""
    table = read("frontier_attention_a800_llama2-7b.csv")
    mask = table["phase"] == phase
    batch, chunk, kv = (table[name][mask] for name in ("batch", "chunk", "kv"))
    points = np.c_[batch, np.maximum(chunk, 1.0), kv, np.tile([32.0, 32.0, 128.0], (len(kv), 1))]
    return attention_errors(points, table["median_ms"][mask] / 1e3, a_chip("a100-80gb"))


def attention_errors(points: Array, time_s: Array, on: Chip) -> Array:
    """Return the errors of all points but the 64 that fill the space of batch, chunk and KV length."""
    distinct, group = np.unique(points, axis=0, return_inverse=True)
    median_s = np.array([np.median(time_s[group.ravel() == i]) for i in range(len(distinct))])
    chosen = spread_out(distinct[:, :3], POINTS)
    law = fit_operator(distinct[chosen], median_s[chosen], attention_families(on))
    return np.delete(np.abs(law.time_s(distinct) / median_s - 1.0), chosen)


# --- collectives


def collectives() -> list[Result]:
    """Return the errors of all-reduce and of send and receive, per table of one size of group and of all."""
    found = []
    for operator, target in (("all_reduce", (0.013, 0.25)), ("send_recv", (0.026, 0.2))):
        each = collectives_of(operator)
        steady = _together("  where repeats agree within 5 %", collectives_of(operator, repeats_within=0.05))
        found += [_together(f"Vidur {operator}, all groups", each, target), steady, *each]
    return found


def collectives_of(operator: str, repeats_within: float = np.inf) -> list[Result]:
    """Return the errors of one operator per table, from 13 sizes each."""
    found = []
    for gpu in ("a100", "h100"):
        for name, sizes, time_s, spread in groups(operator, gpu):
            train = graded(sizes, SIZES)
            law = fit_operator(sizes[train, None], time_s[train], (Streaming(), Collective()), spread[train])
            error = np.abs(law.time_s(sizes[:, None]) / time_s - 1.0)
            test = ~np.isin(np.arange(len(sizes)), train) & (spread <= repeats_within)
            found.append(Result(name, len(train), error[test]))
    return found


def groups(operator: str, gpu: str) -> list[tuple[str, Array, Array, Array]]:
    """Return (name, sizes [bytes], time [s], relative spread of repeats) per number of ranks and ranks per node."""
    table = read(f"vidur_{operator}_{gpu}.csv")
    keys = np.c_[table["workers"], table["per_node"]]
    found = []
    for key in np.unique(keys, axis=0):
        mask = (keys == key).all(axis=1)
        sizes = np.unique(table["bytes"][mask])
        columns = (_medians(sizes, table["bytes"][mask], table[name][mask]) for name in ("median_ms", "spread"))
        time_ms, spread = columns
        found.append((f"    {gpu}, {key[0]:.0f} ranks, {key[1]:.0f} a node", sizes, time_ms / 1e3, spread))
    return found


def links() -> list[Result]:
    """Return the errors of a plan's two numbers per link: a fixed time and a bandwidth."""
    found = []
    for gpu in ("a100", "h100"):
        for name, sizes, time_s, spread in groups("send_recv", gpu):
            train = graded(sizes, SIZES)
            link = measured_link(sizes[train], time_s[train], spread[train])
            error = np.abs((link.fixed_s + sizes / link.bytes_per_s) / time_s - 1.0)
            label = f"{name.replace(' 2 ranks,', '')}: {link.fixed_s * 1e6:.0f} us, {link.bytes_per_s / 1e9:.0f} GB/s"
            found.append(Result(label, len(train), np.delete(error, train)))
    return [_together("Vidur send_recv as two numbers", found), *found]


# --- the same laws elsewhere


def checks() -> list[Result]:
    """Return the errors on aiconfigurator's tables, which had no say in any choice."""
    return [*_products(), *_h200_attention()]


def _products() -> list[Result]:
    """A100 products of 48 shapes: a quarter trained at powers of two, the others not at all."""
    table = read("aiconfigurator_gemm_a100.csv")
    points = np.c_[table["tokens"], table["outputs"], table["inputs"]]
    shapes, group = np.unique(points[:, 1:], axis=0, return_inverse=True)
    known = np.isin(group.ravel(), np.arange(0, len(shapes), 4))
    power = np.isin(points[:, 0], 2.0 ** np.arange(14))
    law = fit_operator(points[known & power], table["ms"][known & power] / 1e3, Gemm(a_chip("a100-80gb")))
    error = np.abs(law.time_s(points) / (table["ms"] / 1e3) - 1.0)
    trained = int((known & power).sum())
    return [
        Result("A100 products, other tokens", trained, error[known & ~power]),
        Result("A100 products, other shapes", trained, error[~known]),
    ]


def _h200_attention() -> list[Result]:
    """FlashAttention-3 on H200, bfloat16, heads of 128."""
    table = read("aiconfigurator_attention_h200.csv")
    found = []
    order = np.lexsort((table["kv_heads"], table["heads"], table["phase"]))
    for key, members in groupby(order, key=lambda i: (table["phase"][i], table["heads"][i], table["kv_heads"][i])):
        i = np.array(list(members))
        columns = [table[name][i] for name in ("batch", "chunk", "kv", "heads", "kv_heads")]
        points = np.c_[columns[0], np.maximum(columns[1], 1.0), *columns[2:], np.full(len(i), 128.0)]
        errors = attention_errors(points, table["ms"][i] / 1e3, a_chip("h200"))
        found.append(Result(f"H200 {key[0]}, {key[1]:.0f}/{key[2]:.0f} heads", POINTS, errors))
    return found


def _together(data: str, results: list[Result], target: tuple[float, float] | None = None) -> Result:
    return Result(data, results[0].trained, np.concatenate([result.errors for result in results]), target)
