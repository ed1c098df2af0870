"""A result as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from planner.bench.intervals import Interval
from planner.bench.measured import OUTSIDE, TERMS
from planner.bench.result import Attainment, Pair, Result
from planner.bench.server import Server
from planner.specs.units import show_seconds

if TYPE_CHECKING:
    from rich.table import Table

_NONE = "-"
_NAMES = {"mean": "mean TTFT", "handoff": "hand-off", "first_decode_wait": "first decode wait", OUTSIDE: "outside"}


def render(result: Result, server: Server) -> Iterator[Table | str]:
    """Yield the tables and lines of a result, for the console."""
    yield _title(result, server)
    yield _table(result)
    if any(isfinite(result.terms[name].measured.value) for name in TERMS) or result.prediction is not None:
        yield _terms(result)
    yield from _lines(result)


def _title(result: Result, server: Server) -> str:
    load, measured = result.load, result.measured
    how = f"at {load.rate_rps:.4g} requests/s" if load.clients is None else f"from {load.clients.count} clients"
    cut = f"; interrupted after {len(measured.sent)}" if result.interrupted else ""
    return (
        f"{server.model} at {server.url}: {load.name} {how}, {result.counted} of {len(measured.sent)} requests counted "
        f"(warm-up {show_seconds(measured.warmup_s)}){cut}"
    )


def _table(result: Result) -> Table:
    """Return attainment, TTFT, TPOT and throughput: measured, predicted, difference."""
    table = _empty("", "measured", "95 % interval", "predicted", "difference")
    for one in result.attainment:
        name = f"attainment of {one.name}" if len(result.attainment) > 1 else "attainment"
        table.add_row(
            name,
            _share(one.measured.value),
            _ends(one.measured, _share),
            _share(one.predicted),
            _points(one.measured.value, one.predicted),
        )
    for name, pairs in (("TTFT", result.ttft), ("TPOT", result.tpot)):
        for percentile, pair in pairs.items():
            table.add_row(f"{name} {percentile}", *_row(pair))
    mine, other = result.throughput, result.predicted.throughput if result.predicted is not None else None
    for name, key, unit in (
        ("answered", "requests_per_s", "/s"),
        ("goodput here", "attaining_requests_per_s", "/s"),
        ("output tokens", "output_tokens_per_s", "/s"),
    ):
        value, predicted = getattr(mine, key), getattr(other, key) if other is not None else float("nan")
        shown = [f"{one:.4g} {unit}" if isfinite(one) else _NONE for one in (value, predicted)]
        table.add_row(name, shown[0], _NONE, shown[1], _relative(value, predicted))
    return table


def _row(pair: Pair) -> tuple[str, str, str, str]:
    return (
        _time(pair.measured.value),
        _ends(pair.measured, _time),
        _time(pair.predicted),
        _relative(pair.measured.value, pair.predicted),
    )


def _terms(result: Result) -> Table:
    """Return the terms of TTFT, means."""
    table = _empty("TTFT, mean of", "measured", "predicted", "difference")
    for name in (*TERMS, OUTSIDE, "mean"):
        pair = result.terms[name]
        value, predicted = pair.measured.value, pair.predicted
        apart = value - predicted
        shown = f"{'+' if apart >= 0 else '-'}{show_seconds(abs(apart))}" if isfinite(apart) else _NONE
        label = "all terms (TTFT)" if name == "mean" else _NAMES.get(name, name)
        table.add_row(label, _time(value), _time(predicted), shown)
    return table


def _lines(result: Result) -> Iterator[str]:
    client = result.client
    yield (
        f"client: requests left {show_seconds(max(client.late_p99_s, 0.0))} late at p99, its loop "
        f"{show_seconds(max(client.beat_late_p99_s, 0.0))}; {client.cpu_share:.0%} of a core"
    )
    for note in result.load.notes:
        yield f"note: {note}"
    for warning in result.warnings:
        yield f"warning: {warning}"
    if result.prediction is not None:
        yield from _verdict(result)


def _verdict(result: Result) -> Iterator[str]:
    """Yield what the file claims, and whether it held."""
    prediction = result.prediction
    assert prediction is not None
    claim = prediction.claim
    low, high = claim.low_rps, claim.high_rps
    if claim.wide_low_rps is not None and claim.wide_high_rps is not None:
        low, high = claim.wide_low_rps, claim.wide_high_rps
    yield f"claim: {claim.goodput_rps:.4g} requests/s ({low:.4g} to {high:.4g}), layout {claim.layout}"
    for one in result.attainment:
        if isfinite(one.stated):
            yield f"the file states {one.stated:.1%} attainment at this rate, over its own longer runs"
        yield _held(one)


def _held(one: Attainment) -> str:
    of = "" if one.name == "all" else f" of {one.name}"
    seen = f"{_share(one.measured.value)} ({_ends(one.measured, _share)})"
    expected = f"{_share(one.predicted)} predicted, {_share(one.predicted_low)} at the claim's lower end"
    if one.held is None:
        return f"attainment{of}: nothing to compare"
    verdict = "held" if one.held else "MISSED: all of the interval lies below"
    return f"attainment{of}: {seen} against {expected}: {verdict}"


def _empty(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _time(value: float) -> str:
    return show_seconds(value) if isfinite(value) else _NONE


def _share(value: float) -> str:
    return f"{value:.1%}" if isfinite(value) else _NONE


def _ends(interval: Interval, show: Any) -> str:
    return f"{show(interval.low)} to {show(interval.high)}" if isfinite(interval.low) else _NONE


def _points(value: float, predicted: float) -> str:
    return f"{100 * (value - predicted):+.1f} points" if isfinite(value - predicted) else _NONE


def _relative(value: float, predicted: float) -> str:
    return f"{value / predicted - 1:+.1%}" if isfinite(value - predicted) and predicted > 0 else _NONE


def to_json(result: Result, server: Server, prompt_seed: int) -> dict[str, Any]:
    """Return the result as plain data: times in seconds, shares of 1, null where there is no value."""
    load, measured, prediction = result.load, result.measured, result.prediction
    data = {
        "url": server.url,
        "model": server.model,
        "workload": load.name,
        "rate_rps": load.rate_rps,
        "clients": load.clients and {key: getattr(load.clients, key) for key in ("count", "think_s", "cv", "ramp_s")},
        "seed": load.seed,
        "prompt_seed": prompt_seed,
        "interrupted": result.interrupted,
        "warmup_s": measured.warmup_s,
        "sending_s": measured.ends_s,
        "requests": {"sent": len(measured.sent), "counted": result.counted, **result.statuses},
        "attainment": {one.name: _attainment_json(one) for one in result.attainment},
        "ttft": {name: _pair_json(pair) for name, pair in result.ttft.items()},
        "tpot": {name: _pair_json(pair) for name, pair in result.tpot.items()},
        "ttft_terms": {name: _pair_json(result.terms[name]) for name in (*TERMS, OUTSIDE, "mean")},
        "throughput": {
            "measured": asdict(result.throughput),
            "predicted": asdict(result.predicted.throughput) if result.predicted is not None else None,
        },
        "claim": prediction and prediction.claim.model_dump(mode="json"),
        "at_claim": prediction is not None and prediction.at_claim,
        "held": result.held,
        "client": asdict(result.client),
        "notes": list(load.notes),
        "warnings": list(result.warnings),
    }
    return {key: _finite(value) for key, value in data.items()}


def _attainment_json(one: Attainment) -> dict[str, Any]:
    measured, predicted = one.measured, one.predicted
    return {
        "target": one.target,
        "measured": measured.value,
        "low": measured.low,
        "high": measured.high,
        "predicted": predicted,
        "predicted_low": one.predicted_low,
        "difference": measured.value - predicted,
        "stated": one.stated,
        "held": one.held,
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    measured, predicted = pair.measured, pair.predicted
    return {
        "measured_s": measured.value,
        "low_s": measured.low,
        "high_s": measured.high,
        "predicted_s": predicted,
        "difference": measured.value / predicted - 1 if predicted > 0 else float("nan"),
    }


def _finite(value: Any) -> Any:
    """Return the data with null for what is no number."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
