"""Which file is what, by its columns alone: our own profiles and the tables that others published.

To add a kind: a function Raw, Given -> Table, and a line in KINDS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.errors import bad_row
from planner.lint import layers, whole
from planner.lint.base import Law, Table, Whole
from planner.lint.given import Given
from planner.lint.raw import Raw, read_csv, read_parquet
from planner.sources import distserve, splitwise
from planner.sources.profiles import read_profile
from planner.specs.base import Document, load
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile


class Kind(NamedTuple):
    """A kind of foreign CSV table: the columns that only it has."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Raw, Given], Table]


KINDS = (
    Kind("splitwise", splitwise.COLUMNS, whole.splitwise_table),
    Kind("measured serving", whole.SERVING, whole.serving),
    Kind("attention", layers.ATTENTION, layers.attention),
    Kind("dense", ("layer", "tokens", "time_us"), layers.dense),
    Kind("per sequence", ("layer", "sequences", "time_us"), layers.per_sequence),
    Kind("vidur mlp", layers.VIDUR_MLP, layers.vidur_mlp),
    Kind("vidur collective", ("collective", "size", "num_workers", "devices_per_node"), layers.vidur_collective),
    Kind("frontier attention", layers.FRONTIER, layers.frontier),
    Kind("apex collective", layers.APEX, layers.apex),
    Kind("gemm", ("device", "gemm_dtype", "m", "n", "k", "latency"), layers.gemm),
    Kind("kernel attention", layers.KERNEL_ATTENTION, layers.kernel_attention),
    Kind("kernel collective", ("device", "num_gpus", "message_size", "latency"), layers.kernel_collective),
)


def read(path: str | Path, given: Given) -> Table:
    """Return a file as a table. Raises InputError when it is of no known kind."""
    if str(path).endswith((".yaml", ".yml", ".json")):
        return _document(load(path), given)
    raw = read_parquet(path) if str(path).endswith(".parquet") else read_csv(path)
    return _kind(raw.file, set(raw.columns)).read(raw, given)


def _kind(file: str, header: set[str]) -> Kind:
    """Return the kind of a table. Raises InputError that names the closest kinds and the columns they lack."""
    if full := [kind for kind in KINDS if header.issuperset(kind.columns)]:
        return max(full, key=lambda kind: len(kind.columns))
    share = {kind: len(header.intersection(kind.columns)) / len(kind.columns) for kind in KINDS}
    close = [kind for kind in KINDS if share[kind] == max(share.values()) >= 0.5]
    if close:
        told = (f"{', '.join(name for name in kind.columns if name not in header)} ({kind.name})" for kind in close)
        raise bad_row(file, 1, f"expected more columns: {' or '.join(told)}")
    got, known = ", ".join(sorted(header))[:120], ", ".join(kind.name for kind in KINDS)
    raise bad_row(file, 1, f"no known kind of table has these columns: {got}; known: {known}")


def _document(document: Document, given: Given) -> Table:
    """Return our own profile, or published fits: a mapping of models to degrees to coefficients."""
    data = document.data
    if isinstance(data, dict) and data and all(_is_fits(value) for value in data.values()):
        return _fits(document, given)
    profile = read_profile(document)
    count = len(profile.samples.rows) if profile.samples else 0
    rows = [document.marks[("samples", "rows", i)][0] for i in range(count)]
    laws = [document.marks[("coefficients", i)][0] for i in range(len(profile.coefficients))]
    lines = (rows, laws) if len({*rows, *laws}) == len(rows) + len(laws) else _counted(len(rows), len(laws))
    model, gpu = given.model_called(profile.model), given.gpu_called(profile.gpu)
    return of_profile(profile, model, gpu, document.file, lines)


def _counted(samples: int, laws: int) -> tuple[list[int], list[int]]:
    """Return row numbers where there are no lines to tell rows apart by: samples from 1 on, then coefficients."""
    return list(range(1, samples + 1)), list(range(samples + 1, samples + laws + 1))


def _is_fits(value: object) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(v, dict) and "prefill" in v for v in value.values())
    )


def _fits(document: Document, given: Given) -> Table:
    laws = []
    for name in document.data:
        profile = distserve.load(document.file, model=name)
        model = given.model_called(name)
        gpu = given.gpu or given.gpu_called(profile.gpu)
        for fit in profile.coefficients:
            line = document.marks[(name, str(fit.tp))][0]
            laws.append(Law(f"{name} TP{fit.tp}", name, line, fit, model, gpu))
    notes = whole.unknown(sum(law.model is None for law in laws), 0, "fits")
    return Table(document.file, "published fits", np.zeros(0, dtype=int), laws=tuple(laws), found=notes)


def of_profile(
    profile: Profile,
    model: ModelSpec | None,
    gpu: Gpu | None,
    file: str = "",
    lines: tuple[list[int], list[int]] | None = None,
) -> Table:
    """Return a profile as a table. `lines` are those of its samples and coefficients, else they count on from 1."""
    samples = tuple(profile.samples.each) if profile.samples else ()
    rows, law_rows = lines or _counted(len(samples), len(profile.coefficients))
    laws = tuple(
        Law(f"{profile.model} TP{fit.tp}", profile.model, line, fit, model, gpu)
        for fit, line in zip(profile.coefficients, law_rows, strict=True)
    )
    groups: dict[tuple[int, int], list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault((sample.tp, sample.pp), []).append(row)
    wholes = tuple(
        Whole(f"TP{tp}" + (f" PP{pp}" if pp > 1 else ""), np.array(found), tuple(samples[row] for row in found))
        for (tp, pp), found in sorted(groups.items())
    )
    return Table(
        file or profile.name,
        "profile",
        np.array(rows, dtype=int),
        series=whole.of_samples(samples, model, gpu),
        laws=laws,
        wholes=wholes,
        found=whole.unknown(model is None and len(samples) + len(laws), gpu is None and len(samples) + len(laws)),
    )
