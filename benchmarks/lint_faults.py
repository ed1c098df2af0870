"""Print how many injected faults the profile lint finds, and how many sound rows it blames beside them.

    python -m benchmarks.lint_faults

One time of one row, drawn at random, is multiplied by a factor, as a slipped unit or a disturbed run would; 24 rows
per table and factor, seed 0. `rejected` and `flagged` are the shares of these rows that are new to a report; `beside`
is how many other rows are, per fault: a wrong row makes its neighbours look odd, too.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

from planner.lint.check import Report, lint
from planner.lint.given import Given

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
TABLES = (
    ("whole instances", "profiles/splitwise_perf_model.csv", ("prompt_time",), (None, None)),
    ("attention", "vllm_runs/attention_RTX4090.csv", ("time_us",), ("rtx4090", "llama3.1-8b")),
    ("dense operators", "vllm_runs/dense_RTX4090.csv", ("time_us",), ("rtx4090", "llama3.1-8b")),
    ("matrix products", "lint/a100_sxm_gemm_vllm_0.14.0.csv", ("latency",), (None, None)),
    ("decode kernels", "lint/h200_sxm_generation_attention_vllm_0.24.0.csv", ("latency",), (None, None)),
    ("NCCL", "lint/h200_sxm_nccl_2.29.2.csv", ("latency",), (None, None)),
    (
        "send-receive",
        "lint/vidur_send_recv_a100.csv",
        tuple(f"time_stats.send_recv.{part}" for part in ("min", "median", "max")),
        ("a100-80gb", None),
    ),
)
FACTORS = (1e-3, 0.1, 1 / 3, 3.0, 10.0, 1e3)
ROWS = 24


def main() -> None:
    """Print one line per table and factor."""
    print(f"{'table':16} {'rows':>5} {'factor':>8} {'rejected':>9} {'flagged':>8} {'missed':>7} {'beside':>7}")
    for name, path, columns, known in TABLES:
        header, *rows = csv.reader((DATA / path).read_text().splitlines())
        rows = _thinned(header, rows)
        for factor in FACTORS:
            rejected, flagged, beside = _tried(header, rows, columns, Given.of(*known), factor)
            missed = 1 - rejected - flagged
            print(f"{name:16} {len(rows):5} {factor:8.3g} {rejected:9.0%} {flagged:8.0%} {missed:7.0%} {beside:7.1f}")


def _thinned(header: list[str], rows: list[list[str]]) -> list[list[str]]:
    """Return the table without rows that are copies, and of the large attention grid a smaller one."""
    if "hardware" in header:
        return [row for row in rows if row[1] != "h100-80gb-pcap"]
    if "kv_prefill" in header:
        return [row for row in rows if row[0] in ("0", "64", "512") and row[2] in ("0", "1", "8", "64")]
    return rows


def _tried(
    header: list[str], rows: list[list[str]], columns: tuple[str, ...], known: Given, factor: float
) -> tuple[float, float, float]:
    """Return the shares of faulty rows that are rejected, or else flagged, and how many others are per fault."""
    before = _blamed(_lint(header, rows, known))
    clean = [line for line in range(2, len(rows) + 2) if line not in before["reject"] | before["flag"]]
    chosen = np.random.default_rng(0).choice(clean, ROWS, replace=False)
    counts = np.zeros(3)
    for line in chosen.tolist():
        broken = [list(row) for row in rows]
        for column in columns:
            cell = header.index(column)
            broken[line - 2][cell] = repr(float(broken[line - 2][cell]) * factor)
        after = _blamed(_lint(header, broken, known))
        new = {severity: after[severity] - before[severity] for severity in after}
        rejected = line in new["reject"]
        counts += rejected, not rejected and line in new["flag"], len((new["reject"] | new["flag"]) - {line})
    return tuple(counts / ROWS)  # type: ignore[return-value]


def _lint(header: list[str], rows: list[list[str]], known: Given) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return lint(path, known)


_OF_A_TABLE = ("identify", "knee", "elements")
"""Flags on what a table can tell as a whole blame no single row."""


def _blamed(report: Report) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"reject": set(), "flag": set()}
    for finding in report.findings:
        if finding.severity != "note" and finding.rule not in _OF_A_TABLE:
            found[finding.severity] |= set(finding.rows)
    return found


if __name__ == "__main__":
    main()
