"""The performance table of Splitwise (Patel et al., ISCA '24): end-to-end times of whole instances.

Columns: prompt_time [ms, the whole batch], token_time [ms per output token, the whole batch], e2e_time [ms].
Two kinds of rows are no measurements of a batch and are left out, each with a counted reason:
copies (another hardware's rows times a constant) and queued batches (the times do not add up to the end-to-
end time).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planner.errors import Fault, InputError
from planner.sources.tables import pick, read_table, seconds, slug
from planner.specs.profile import Profile, Provenance, Sample, Samples

COLUMNS = (
    "model",
    "hardware",
    "prompt_size",
    "batch_size",
    "token_size",
    "prompt_time",
    "token_time",
    "e2e_time",
    "tensor_parallel",
)
_SAME = 1e-9
QUEUED = 0.95
_LEAST_COPIES = 3
_CONTEXT_NOTE = "decode context: the prompt plus half of the tokens made, which e2e_time bounds"


class Run(NamedTuple):
    """One row, in seconds."""

    model: str
    hardware: str
    tp: int
    batch: int
    prompt: int
    asked: int
    prompt_s: float
    token_s: float
    e2e_s: float

    @property
    def setting(self) -> tuple[int, int, int, int]:
        """What was varied."""
        return self.tp, self.batch, self.prompt, self.asked

    @property
    def told_share(self) -> float:
        """Share of the end-to-end time that the prompt and all tokens asked for would take."""
        return (self.prompt_s + self.token_s * (self.asked - 1)) / self.e2e_s

    @property
    def context(self) -> int:
        """KV tokens per request at the middle of the run. Generation may have stopped early."""
        made = min(float(self.asked), 1.0 + (self.e2e_s - self.prompt_s) / self.token_s)
        return max(1, round(self.prompt + max(made, 1.0) / 2))


def load(path: str | Path, model: str | None = None, gpu: str | None = None) -> Profile:
    """Return the profile of one model on one hardware. Raises InputError; copied hardware is an error too."""
    runs = _read(path)
    model = pick(path, "model", model, {run.model for run in runs})
    runs = [run for run in runs if run.model == model]
    gpu = pick(path, "gpu", gpu, {run.hardware for run in runs})
    copies = _copies(runs)
    if gpu in copies:
        original, factor = copies[gpu]
        raise InputError(
            Fault(
                f"the rows of {gpu} are those of {original} times {factor:.6g}, copies; use {original}",
                str(path),
            )
        )
    own = [run for run in runs if run.hardware == gpu]
    kept = [run for run in own if run.told_share >= QUEUED]
    if not kept:
        raise InputError(Fault(f"no row of {model} on {gpu} adds up to its end-to-end time", str(path)))
    return _profile(model, gpu, kept, [*_left_out(own, kept), *_copied(runs, gpu, copies), _CONTEXT_NOTE])


def _left_out(own: list[Run], kept: list[Run]) -> list[str]:
    if len(own) == len(kept):
        return []
    return [
        f"left out {len(own) - len(kept)} of {len(own)} rows: prompt_time + token_time x (tokens - 1) is far "
        "below e2e_time, so the batch had queued"
    ]


def _copied(runs: list[Run], gpu: str, copies: dict[str, tuple[str, float]]) -> list[str]:
    return [
        f"left out {sum(run.hardware == name for run in runs)} rows of {name}: {gpu}'s times {factor:.6g}"
        for name, (original, factor) in sorted(copies.items())
        if original == gpu
    ]


def _profile(model: str, gpu: str, runs: list[Run], notes: list[str]) -> Profile:
    prefill = [Sample("prefill", r.tp, 1, r.batch, r.prompt, 0, 0, seconds(r.prompt_s)) for r in runs]
    decode = [
        Sample("decode", r.tp, 1, r.batch, r.prompt, 0, r.context, seconds(r.token_s), r.asked)
        for r in runs
        if r.asked > 1
    ]
    return Profile(
        name=slug("splitwise", model, gpu),
        model=model,
        gpu=gpu,
        engine="as in the Splitwise paper, section III",
        interconnect="NVLink inside one DGX",
        provenance=Provenance(
            method="measured",
            source="Mutinifni/splitwise-sim, data/perf-model.csv",
            url="https://github.com/Mutinifni/splitwise-sim",
            revision="8f99e7d",
            licence="MIT",
            citation="Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA '24",
            notes=tuple(notes),
        ),
        samples=Samples.of(sorted(prefill) + sorted(decode)),
    )


def _read(path: str | Path) -> list[Run]:
    return [
        Run(
            row.text("model"),
            row.text("hardware"),
            row.count("tensor_parallel"),
            row.count("batch_size"),
            row.count("prompt_size"),
            row.count("token_size"),
            row.number("prompt_time") / 1e3,
            row.number("token_time") / 1e3,
            row.number("e2e_time") / 1e3,
        )
        for row in read_table(path, COLUMNS)
    ]


def _copies(runs: list[Run]) -> dict[str, tuple[str, float]]:
    """Return each hardware whose rows are another's times a constant, with that other and the constant.

    Of the two the copy is the one whose times add up to its end-to-end time less well.
    """
    names = list(dict.fromkeys(run.hardware for run in runs))
    found: dict[str, tuple[str, float]] = {}
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if (factor := _constant_factor(runs, first, second)) is None:
                continue
            if _misfit(runs, first) > _misfit(runs, second):
                found[first] = (second, 1 / factor)
            else:
                found[second] = (first, factor)
    return found


def _constant_factor(runs: list[Run], first: str, second: str) -> float | None:
    """Return the constant by which most times of `second` differ from those of `first`, or None.

    Measurements never agree to nine digits over several rows; in either column that is enough.
    """
    pairs = _pairs(runs, first, second)
    for times in ([(a.prompt_s, b.prompt_s) for a, b in pairs], [(a.token_s, b.token_s) for a, b in pairs]):
        ratios = [b / a for a, b in times]
        if len(ratios) < _LEAST_COPIES:
            continue
        middle = median(ratios)
        same = {a for (a, _), ratio in zip(times, ratios, strict=True) if abs(ratio / middle - 1) < _SAME}
        if len(same) >= max(_LEAST_COPIES, len({a for a, _ in times}) / 2):
            return middle
    return None


def _pairs(runs: list[Run], first: str, second: str) -> list[tuple[Run, Run]]:
    """Return the rows of both at equal settings, matched in the order of the file."""
    by_name: dict[str, dict[tuple[int, ...], list[Run]]] = {
        first: defaultdict(list),
        second: defaultdict(list),
    }
    for run in runs:
        if run.hardware in by_name:
            by_name[run.hardware][run.setting].append(run)
    shared = sorted(by_name[first].keys() & by_name[second].keys())
    return [pair for key in shared for pair in zip(by_name[first][key], by_name[second][key], strict=False)]


def _misfit(runs: list[Run], name: str) -> float:
    """Return the median gap between the told and the end-to-end time, of the runs that did not stop early."""
    shares = [abs(run.told_share - 1) for run in runs if run.hardware == name]
    return median(sorted(shares)[: max(1, len(shares) // 2)])
