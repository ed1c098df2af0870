"""One line per request that was sent, as CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from planner.bench.measured import OUTSIDE, TERMS, Measured
from planner.bench.result import Result
from planner.errors import InputError
from planner.simulator.metrics import attained
from planner.specs.base import check_output, write_bytes, write_text

_DIGITS = 6
"""Of times [s]: a microsecond is finer than any clock on the way."""


def check_records(path: Path) -> None:
    """Raise InputError when the file cannot be written: before the run, not after it."""
    if path.suffix not in (".csv", ".parquet"):
        raise InputError(f"--records: expected a file that ends in .csv or .parquet, got {str(path)!r}")
    check_output(path)
    if path.suffix == ".parquet":
        _pyarrow()


def write_records(path: Path, result: Result) -> None:
    """Write the records whole or not at all."""
    columns = columns_of(result)
    if path.suffix == ".parquet":
        write_bytes(path, _parquet(columns))
    else:
        write_text(path, _csv(columns))


def columns_of(result: Result) -> dict[str, list[Any]]:
    """Return the records by column. Times count from the start of the replay [s]; None where it never happened."""
    measured, load = result.measured, result.load
    names = [slo.name or "all" for slo in load.slos]
    each: dict[str, Callable[[Any], Any]] = {
        "status": lambda answer: answer.status,
        "error": lambda answer: answer.error,
        "pieces": lambda answer: answer.pieces,
        "max_gap_s": lambda answer: _time(answer.max_gap_s),
        "server_prompt_tokens": lambda answer: answer.prompt_tokens,
        "server_output_tokens": lambda answer: answer.output_tokens,
        "prefill_at": lambda answer: answer.times.get("prefill_at"),
        "decode_at": lambda answer: answer.times.get("decode_at"),
        "retries": lambda answer: answer.times.get("retries"),
        "cached_tokens": lambda answer: answer.times.get("cached_tokens"),
    }
    return {
        "request": measured.row.tolist(),
        "slo_class": [names[at] for at in measured.slo_class.tolist()],
        "counted": measured.counted.tolist(),
        "due_s": _times(measured.due_s),
        "sent_s": _times(measured.sent_s),
        "first_token_s": _times(measured.first_token_s),
        "last_token_s": _times(measured.last_token_s),
        "prompt_tokens": load.requests.prompt_tokens[measured.row].tolist(),
        "output_tokens": load.requests.output_tokens[measured.row].tolist(),
        "ttft_s": _times(measured.ttft_s),
        "tpot_s": _times(measured.tpot_s),
        "attained": measured.met.tolist(),
        **{name: [one(sent.answer) for sent in measured.sent] for name, one in each.items()},
        **{f"{term}_s": _times(measured.terms[term]) for term in (*TERMS, OUTSIDE)},
        **_predicted(result, measured),
    }


def _predicted(result: Result, measured: Measured) -> dict[str, list[Any]]:
    """Return what was predicted of the same requests; in a closed loop they are not the same."""
    if result.prediction is None or result.load.clients is not None:
        return {}
    run, rows = result.prediction.run, measured.row
    met = attained(run, result.load.slos)[rows]
    return {
        "predicted_ttft_s": _times(run.ttft_s[rows]),
        "predicted_tpot_s": _times(run.tpot_s[rows]),
        "predicted_attained": met.tolist(),
    }


def _times(values: np.ndarray) -> list[float | None]:
    return [_time(value) for value in values.tolist()]


def _time(value: float) -> float | None:
    return round(value, _DIGITS) if isfinite(value) else None


def _csv(columns: dict[str, list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        ["" if cell is None else int(cell) if isinstance(cell, bool) else cell for cell in row]
        for row in zip(*columns.values(), strict=True)
    )
    return text.getvalue()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    pyarrow = _pyarrow()
    from pyarrow import parquet

    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), buffer)
    return bytes(buffer.getvalue().to_pybytes())


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        way_out = "pip install 'goodput-planner[parquet]', or give a .csv"
        raise InputError(f"--records: Parquet needs pyarrow; {way_out}") from None
    return pyarrow
