"""Print the README's table of twelve plans: four model and GPU pairs under three loads. `make table`."""

from __future__ import annotations

import sys
import time

from planner import InfeasibleError, parse, plan, problem_of
from planner.options import Option
from planner.pipeline import Plan

PAIRS = (
    ("opt-13b", "a100-4x200", "{ttft_s: 250ms, tpot_s: 100ms}"),  # DistServe, OSDI '24, table 1: chatbot
    ("opt-66b", "a100-4x200", "{ttft_s: 2.5s, tpot_s: 150ms}"),  # the same
    ("llama2-70b", "a100-4x200", "{ttft_s: 2s, tpot_s: 100ms}"),
    ("llama2-70b", "h100-4x8", "{ttft_s: 1s, tpot_s: 60ms}"),
)
LOADS = ("sharegpt", "azure-conversation", "azure-code")
COLUMNS = (
    "model | cluster | load | verdict | disaggregated | claim per GPU | aggregated | claim per GPU | program gap | "
    "capacity bound per GPU | CPU s"
)


def main() -> None:
    """Plan all twelve and print a Markdown table, one line as soon as it is known."""
    print(f"| {COLUMNS} |", "|" + "---|" * len(COLUMNS.split("|")), sep="\n")
    for model, cluster, slo in PAIRS:
        for load in LOADS:
            print(line(model, cluster, load, slo), flush=True)


def line(model: str, cluster: str, load: str, slo: str) -> str:
    """Return one line of the table."""
    text = f"model: {model}\ncluster: {cluster}\nworkload: {load}\nslo: {slo}\nobjective: max_goodput\n"
    started_s = time.process_time()
    try:
        found = plan(
            problem_of(parse(text, "table.yaml")), lambda step: print(f"{model} {load}: {step}", file=sys.stderr)
        )
    except InfeasibleError as error:
        return f"| {model} | {cluster} | {load} | {error} |" + " |" * 7
    return "| " + " | ".join([model, cluster, load, *cells(found), f"{time.process_time() - started_s:.1f}"]) + " |"


def cells(found: Plan) -> list[str]:
    """Return the cells that a plan fills."""
    verdict, d = found.verdict, found.disaggregated
    gain = "" if verdict.gain is None else f" ({verdict.gain:+.0%})"
    name = verdict.mode + (", tie" if verdict.tie else "")
    gap = f"{d.program.gap:.2%}" if d is not None and d.program is not None else "-"
    gpus = sum(len(unit.gpus) for unit in found.problem.topology.units())
    return [
        name + gain,
        *claim(d),
        *claim(found.aggregated),
        gap,
        f"{found.capacity_bounds_rps['disaggregated'] / gpus:.3g}",
    ]


def claim(option: Option | None) -> list[str]:
    """Return layout and goodput per GPU with its interval."""
    if option is None:
        return ["-", "none"]
    rate, gpus = option.rate, option.gpus
    return [
        option.placed.layout,
        f"{rate.goodput_rps / gpus:.3g} [{rate.low_rps / gpus:.3g}, {rate.high_rps / gpus:.3g}]",
    ]


if __name__ == "__main__":
    main()
