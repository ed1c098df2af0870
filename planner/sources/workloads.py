"""A workload document -> the Workload with its data read, sliced, limited and stretched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from planner.errors import Fault, InputError
from planner.sources.traces import READERS, Table, cut
from planner.specs.base import Document, dump_json, locate, read_text, resolve, validate
from planner.specs.workload import UNTIMED, Workload, WorkloadSpec, make_requests, make_workload


def read_workload(document: Document) -> Workload:
    """Return the workload that a mapping (see `WorkloadSpec`) describes; its file is looked up beside the
    document.

    Raises InputError with the line of each mistake, in the document or in the data file.
    """
    document = resolve("workloads", document)
    spec = validate(WorkloadSpec, document)
    if faults := list(_mismatches(spec, document)):
        raise InputError(faults)
    if spec.source == "fixed":
        digest = hashlib.sha256(dump_json([spec.prompt_tokens, spec.output_tokens]).encode()).hexdigest()
        return _assembled("fixed", spec, _fixed(spec), digest, document)
    path = locate(document, spec.file or "", "file")
    table = READERS[spec.source](read_text(path), str(path), spec.on_bad_row)
    return _assembled(path.stem, spec, _sliced(table, spec, document), _digest(path), document)


def _assembled(stem: str, spec: WorkloadSpec, table: Table, digest: str, document: Document) -> Workload:
    try:
        return make_workload(spec.name or stem, spec, table.requests, table.notes, digest)
    except InputError as error:  # what cannot be played is the choice of source and arrivals, which has a line
        raise InputError([document.fault(fault.message, "source") for fault in error.faults]) from None


def _mismatches(spec: WorkloadSpec, document: Document) -> Iterator[Fault]:
    """Yield what does not fit together, each at its line."""
    fixed, untimed = spec.source == "fixed", spec.source in UNTIMED
    for key, value in (("prompt_tokens", spec.prompt_tokens), ("output_tokens", spec.output_tokens)):
        if fixed and value is None:
            yield document.fault("is required with source: fixed", key)
        if not fixed and value is not None:
            yield document.fault(f"is only used with source: fixed, not with {spec.source}", key)
    if fixed and spec.file is not None:
        yield document.fault("is not used with source: fixed", "file")
    if not fixed and not spec.file:
        yield document.fault(f"is required with source: {spec.source}", "file")
    if untimed and spec.process == "trace":
        way_out = "use poisson, gamma, constant or closed"
        yield document.fault(f"source: {spec.source} has no arrival times; {way_out}", "arrivals")
    if spec.process == "gamma" and spec.cv is None:
        yield document.fault("is required with arrivals: gamma (1 is Poisson, more is burstier)", "cv")
    if spec.process not in ("gamma", "closed") and spec.cv is not None:
        yield document.fault(f"is only used with arrivals: gamma or closed, not with {spec.process}", "cv")
    if spec.process != "trace" and "block_s" in spec.model_fields_set:
        yield document.fault(f"is only used with arrivals: trace, not with {spec.process}", "block_s")
    yield from _loop_mismatches(spec, document)
    yield from _slice_mismatches(spec, document)


def _loop_mismatches(spec: WorkloadSpec, document: Document) -> Iterator[Fault]:
    """Yield what a closed loop lacks, or what only one can have."""
    if spec.process == "closed":
        if spec.concurrency is None:
            yield document.fault("is required with arrivals: closed (how many clients)", "concurrency")
        if spec.cv is not None and spec.think_s == 0:
            yield document.fault("is the variation of the pauses, and there are none; give think_s", "cv")
        if spec.rate_rps is not None:
            yield document.fault(
                "is not used with arrivals: closed, where the rate follows from the answers", "rate_rps"
            )
        return
    for key in ("concurrency", "think_s", "ramp_s"):
        if key in spec.model_fields_set:
            yield document.fault(f"is only used with arrivals: closed, not with {spec.process}", key)


def _slice_mismatches(spec: WorkloadSpec, document: Document) -> Iterator[Fault]:
    if spec.slice is None:
        return
    if spec.source == "fixed":
        yield document.fault("is not used with source: fixed", "slice")
    elif spec.source in UNTIMED and {"start_s", "end_s"} & spec.slice.model_fields_set:
        yield document.fault(f"source: {spec.source} has no times to slice; use max_requests", "slice")
    if spec.slice.end_s is not None and spec.slice.end_s <= spec.slice.start_s:
        yield document.fault(f"expected more than start_s ({spec.slice.start_s:g} s)", "slice", "end_s")


def _fixed(spec: WorkloadSpec) -> Table:
    prompt, output = (np.array([tokens], dtype=np.int64) for tokens in (spec.prompt_tokens, spec.output_tokens))
    return Table(make_requests(np.zeros(1), prompt, output), ())


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(Fault(f"cannot be read: {error.strerror or error}", str(path))) from None


def _sliced(table: Table, spec: WorkloadSpec, document: Document) -> Table:
    if spec.slice is None:
        return table
    kept = cut(table, spec.slice.start_s, spec.slice.end_s, spec.slice.max_requests)
    if not len(kept.requests):
        last_s = table.requests.arrival_s[-1]
        raise InputError(document.fault(f"no requests in this slice; the trace runs from 0 to {last_s:g} s", "slice"))
    part = f"{len(kept.requests)} of {len(table.requests)} requests are in the slice"
    return kept._replace(notes=(*kept.notes, part))
