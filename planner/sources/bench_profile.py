"""Benchmark runs of a real server -> a profile: prefills that met an idle server, and steps that only decoded.

A client sees tokens arrive, not steps. What it sees of a step: each running request gets one token. So the gap between
two tokens of a request is one step, the requests that were between their first and last token then are its batch, and
their lengths so far its contexts. A step during which any request waited for its first token may have held a prefill,
and is left out. What cannot be told apart is said in the profile's notes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import numpy as np

from planner.errors import Fault, InputError
from planner.sources.bench_runs import BenchRun, read_runs
from planner.specs.profile import KvTokens, Profile, Provenance, Sample, Samples

JITTER = 0.25
"""Tokens of one step reach the client a little apart: within this share of a step they count as one moment."""
TOUCH = 0.02
"""A request that ends within this share of another's time to first token has not kept it waiting."""
LEAST_STEPS = 5
"""A setting is the median of at least so many steps."""
_MOST_PREFILLS = 200
_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says where a file does not."""

    gpu: str
    model: str | None = None
    tp: int | None = None
    pp: int | None = None
    dtype: str | None = None
    name: str | None = None


def import_runs(paths: Sequence[str | Path], kind: str, given: Given) -> Profile:
    """Return the profile of one or more files of benchmark runs. Raises InputError, with the flag to give."""
    runs = [run for path in paths for run in read_runs(path, kind)]
    model = given.model or _one(runs, "model", "--model")
    samples: list[Sample] = []
    counts = {"prefill": 0, "decode": 0}
    left = 0
    for run in runs:
        layout = _layout(run, given)
        prefills = _prefills(run, *layout)
        decodes, left_out = _decodes(run, *layout)
        samples += [*prefills, *decodes]
        counts["prefill"] += len(prefills)
        counts["decode"] += len(decodes)
        left += left_out
    if not samples:
        raise _nothing(runs[0].file)
    return Profile(
        name=given.name or f"{Path(model).name.lower()}-{given.gpu}-{runs[0].engine.split()[0].lower()}",
        model=model,
        gpu=given.gpu,
        engine=_one(runs, "engine", "one engine a profile"),
        dtype=given.dtype or next((run.dtype for run in runs if run.dtype), "unstated"),
        provenance=Provenance(
            method="measured",
            source=", ".join(dict.fromkeys(Path(run.file).name for run in runs)),
            notes=tuple(_notes(runs, counts, left)),
        ),
        samples=Samples.of(samples),
        kv_tokens=_kv_tokens(runs, given),
    )


def _one(runs: Sequence[BenchRun], what: str, flag: str) -> str:
    """Return what all runs agree on. Raises InputError when they do not, or when none says it."""
    found = list(dict.fromkeys(getattr(run, what) for run in runs))
    if len(found) > 1:
        raise InputError(Fault(f"the runs are of {what}s {found[0]!r} and {found[1]!r}; give {flag}", runs[-1].file))
    if not found[0]:
        raise InputError(Fault(f"the file does not name the {what}; give {flag}", runs[0].file))
    return str(found[0])


def _layout(run: BenchRun, given: Given) -> tuple[int, int]:
    """Return the run's (TP, PP): as the file says, else as given; one stage where neither says."""
    tp = run.tp or given.tp
    if tp is None:
        raise InputError(Fault("the file does not say over how many GPUs the model was cut; give --tp", run.file))
    for flag, said, meant in (("--tp", run.tp, given.tp), ("--pp", run.pp, given.pp)):
        if said and meant and said != meant:
            raise InputError(Fault(f"the file says {flag[2:]} {said}, but {flag} says {meant}", run.file))
    return tp, run.pp or given.pp or 1


def _nothing(file: str) -> InputError:
    return InputError(
        Fault(
            "no prefill met an idle server and no step was without one, so nothing can be told apart; run the client "
            "with --max-concurrency 1 for prefills, and with a limit N and equal output lengths for decode",
            file,
        )
    )


# ---- prefills


def _prefills(run: BenchRun, tp: int, pp: int) -> list[Sample]:
    """Return the time to first token of each request that had the server to itself until then."""
    first_s, end_s = _first_s(run), _end_s(run)
    begun = np.searchsorted(np.sort(run.start_s), first_s, side="left")
    over = np.searchsorted(np.sort(end_s), run.start_s + TOUCH * run.ttft_s, side="right")
    alone = begun - over == 1
    cached = np.zeros(len(first_s), dtype=int) if run.cached_tokens is None else run.cached_tokens
    new = run.prompt_tokens - cached
    rows = [
        Sample("prefill", tp, pp, 1, int(new[at]), int(cached[at]), 0, float(run.ttft_s[at]))
        for at in np.flatnonzero(alone & (new > 0))
    ]
    return rows if len(rows) <= _MOST_PREFILLS else _thinned(rows)


def _thinned(rows: list[Sample]) -> list[Sample]:
    """Return the middle row, by time, of those whose lengths lie within a sixteenth of an octave."""
    cells: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for row in rows:
        cells[round(16 * log2(row.prompt_tokens)), round(16 * log2(1 + row.cached_tokens))].append(row)
    return [sorted(cell, key=lambda row: row.time_s)[len(cell) // 2] for _, cell in sorted(cells.items())]


def _first_s(run: BenchRun) -> np.ndarray:
    return np.asarray(run.start_s + run.ttft_s)


def _end_s(run: BenchRun) -> np.ndarray:
    return np.asarray(_first_s(run) + np.array([gaps.sum() for gaps in run.gaps_s]))


# ---- decode steps


def _decodes(run: BenchRun, tp: int, pp: int) -> tuple[list[Sample], int]:
    """Return the median step of each setting, and how many gaps were left out."""
    first_s, end_s = _first_s(run), _end_s(run)
    steady = np.array([len(gaps) == tokens - 1 for gaps, tokens in zip(run.gaps_s, run.output_tokens, strict=True)])
    tokens_s = [_token_times(run, at, float(first_s[at]), bool(steady[at])) for at in range(len(first_s))]
    gaps = [np.diff(tokens_s[at]) for at in np.flatnonzero(steady)]
    length_s = np.concatenate(gaps) if gaps else np.zeros(0)
    since_s = np.concatenate([tokens_s[at][:-1] for at in np.flatnonzero(steady)]) if gaps else np.zeros(0)
    moments = _Moments(run, first_s, end_s, np.sort(np.concatenate(tokens_s)))
    batch, context, pure = moments.at(since_s, length_s)
    kept = pure & (batch > 0) & (length_s > 0) & (context >= 1)
    return _settings(batch[kept], context[kept], length_s[kept], tp, pp), int((~kept).sum())


def _token_times(run: BenchRun, at: int, first_s: float, steady: bool) -> np.ndarray:
    """Return when each token of a request came; those that came several at a time are spread evenly."""
    gaps = run.gaps_s[at]
    if steady:
        return np.concatenate([[first_s], first_s + np.cumsum(gaps)])
    return np.linspace(first_s, first_s + float(gaps.sum()), max(1, int(run.output_tokens[at])))


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Who was on the server when."""

    run: BenchRun
    first_s: np.ndarray
    end_s: np.ndarray
    tokens_s: np.ndarray
    """When any request got a token, in order."""

    def at(self, since_s: np.ndarray, length_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each gap its batch, the mean context of it, and whether nobody can have prefilled in it."""
        begin, end = since_s + JITTER * length_s, since_s + (1 - JITTER) * length_s
        by_first, by_end = np.argsort(self.first_s, kind="stable"), np.argsort(self.end_s, kind="stable")
        decoding = np.searchsorted(self.first_s[by_first], begin, side="right")
        ended = np.searchsorted(self.end_s[by_end], end, side="left")
        sent = np.searchsorted(np.sort(self.run.start_s), end, side="left")
        prompts, outputs = self.run.prompt_tokens, self.run.output_tokens
        made = np.searchsorted(self.tokens_s, begin, side="right") - _up_to(outputs, by_end, ended)
        held = _up_to(prompts, by_first, decoding) - _up_to(prompts, by_end, ended)
        batch = decoding - ended
        return batch, (held + made) / np.maximum(batch, 1), sent == decoding


def _up_to(values: np.ndarray, order: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the sum of the first `count` of `values` in `order`."""
    return np.concatenate([[0], np.cumsum(values[order])])[count]


def _settings(batch: np.ndarray, context: np.ndarray, time_s: np.ndarray, tp: int, pp: int) -> list[Sample]:
    """Return one row per batch and quarter of an octave of contexts: the median of its steps, at their mean context."""
    cell = np.round(_PER_OCTAVE * np.log2(np.maximum(context, 1.0))).astype(int)
    cells = np.unique(np.c_[batch, cell], axis=0)
    found = []
    for requests, octave in cells.tolist():
        mine = (batch == requests) & (cell == octave)
        if mine.sum() >= LEAST_STEPS * requests:  # each step shows as one gap of every request in it
            mean, middle_s = round(float(context[mine].mean())), float(np.median(time_s[mine]))
            found.append(Sample("decode", tp, pp, requests, 0, 0, mean, middle_s))
    return found


# ---- what a reader has to know


def _kv_tokens(runs: Sequence[BenchRun], given: Given) -> tuple[KvTokens, ...]:
    found = {_layout(run, given): run.kv_tokens for run in runs if run.kv_tokens}
    return tuple(KvTokens(tp=tp, pp=pp, tokens=tokens) for (tp, pp), tokens in sorted(found.items()) if tokens)


def _notes(runs: Sequence[BenchRun], counts: dict[str, int], left_out: int) -> list[str]:
    notes = [
        "timed by a client: prefill is the time to first token of a request that met an idle server, with the way to "
        "it, its queue, tokenizer and sampling inside",
        f"decode is the median gap between tokens of a setting (batch, quarter octave of contexts); {left_out} gaps "
        "left out, during which a request waited for its first token or the batch could not be told",
    ]
    lumped = sum(len(g) != n - 1 for run in runs for g, n in zip(run.gaps_s, run.output_tokens, strict=True))
    if lumped:
        notes.append(f"{lumped} requests got several tokens at a time; they count in batches, their gaps do not")
    if not counts["prefill"]:
        notes.append("no prefill: no request met an idle server (run the client with --max-concurrency 1)")
    if not counts["decode"]:
        notes.append("no decode: no setting with enough steps free of prefills (limit --max-concurrency)")
    notes += dict.fromkeys(note for run in runs for note in run.notes)
    return notes
