"""Plan -> what a person reads (rich tables, 80 columns) and what a machine reads (one JSON document)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import expm1, isfinite, isnan
from typing import TYPE_CHECKING, Any

from planner.cost.base import CostModel
from planner.cost.fit import fit_report
from planner.cost.mixed import mixed_error
from planner.cost.transfer import FALLBACK_BYTES_PER_S, Route
from planner.deploy import claim_of, deployment_of
from planner.options import Option
from planner.pipeline import Plan
from planner.search.crossover import crossovers
from planner.search.joint import Scored
from planner.search.layouts import Kind, by_reason
from planner.specs.slo import Slo
from planner.specs.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan as plain data: the deployment, both options, runners-up, rejected layouts."""
    return {
        "deployment": deployment_of(plan).model_dump(mode="json"),
        "verdict": {
            "mode": plan.verdict.mode,
            "tie": plan.verdict.tie,
            "gain": plan.verdict.gain,
            "gain_low": plan.verdict.gain_low,
            "gain_high": plan.verdict.gain_high,
            "reason": plan.verdict.reason,
        },
        "options": {
            name: claim.model_dump(mode="json") if (claim := claim_of(option)) is not None else None
            for name, option in (
                ("disaggregated", plan.disaggregated),
                ("aggregated", plan.aggregated),
                *plan.compared.items(),
            )
        },
        "latency_errors": [
            {
                "way": way,
                "latency": str(latency),
                "error": answer.error,
                "goodput_if_slower": expm1(answer.slower),
                "goodput_if_faster": expm1(answer.faster),
            }
            for way, option in (("disaggregated", plan.disaggregated), ("aggregated", plan.aggregated))
            for latency, answer in (option.responses.items() if option is not None else ())
        ],
        "capacity_bound_rps": plan.capacity_bound_rps,
        "runners_up": [
            {"layout": layout, "gpus": gpus, "goodput_rps": rps, "why": why}
            for layout, gpus, rps, why in _runners_up(plan)
        ],
        "rejected": [
            {"phase": r.phase, "tp": r.layout.tp, "pp": r.layout.pp, "gpu": r.gpu, "reason": r.reason}
            for r in plan.kinds.rejected
        ],
        "kv_transfer": _transfer_json(plan),
        "prefill_crossovers": [
            {
                "gpu": one.tensor.gpu,
                "tensor": str(one.tensor.layout),
                "pipeline": str(one.pipeline.layout),
                "tensor_alone_s": one.tensor_s[0],
                "pipeline_alone_s": one.pipeline_s[0],
                "tensor_next_s": one.tensor_s[1],
                "pipeline_next_s": one.pipeline_s[1],
                "rate_rps": one.rate_rps,
            }
            for one in crossovers(plan.kinds.all_legal, round(plan.problem.workload.mean_prompt_tokens))
        ],
        "simulations": plan.trials.ranking.tally[0] + plan.trials.quoting.tally[0],
        "cpu_s": plan.cpu_s,
    }


def _transfer_json(plan: Plan) -> dict[str, Any] | None:
    """Return what the slowest hand-off of a mean prompt takes: as planned, and where an unverified path falls back."""
    way, size, topology = _slowest_route(plan), plan.problem.kv_bytes_per_request, plan.problem.topology
    if way is None:
        return None
    verified = way.is_verified(topology)
    return {
        "bytes": size,
        "planned_s": way.alone_s(size, topology),
        "verified": verified,
        "fallen_back_s": None if verified else way.fallen_back_s(size),
    }


def render(plan: Plan) -> Iterator[RenderableType]:
    """Yield the report, piece by piece, most important first."""
    from rich.text import Text

    style = "green" if plan.verdict.mode == "disaggregated" else "yellow"
    yield Text(plan.verdict.headline, style=f"bold {style}")
    yield Text(plan.verdict.reason[0].upper() + plan.verdict.reason[1:] + ".")
    yield Text(_question(plan), style="dim")
    yield Text(_confidence(plan), style="dim")
    yield _options(plan)
    ways = (("disaggregated", plan.disaggregated), ("aggregated", plan.aggregated))
    if any(option is not None and option.responses for _, option in ways):
        yield _sureness(ways)
    yield _instances(plan.chosen)
    yield _latencies(plan.chosen, plan.problem.slos)
    yield _busy(plan.chosen)
    yield _bounds(plan)
    yield _fit(plan)
    if rows := _runners_up(plan):
        yield _others(rows)
    yield from _rejected(plan)
    yield from _notes(plan)


def _table(title: str, *columns: str, right: int = 99) -> Table:
    """Return an empty table; columns from the `right`-th on hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at >= right else "left", overflow="fold")
    return table


def _question(plan: Plan) -> str:
    problem, workload = plan.problem, plan.problem.workload
    bounds = "; ".join(
        f"{slo.name + ': ' if slo.name else ''}TTFT {show_seconds(slo.ttft_s)}, TPOT {show_seconds(slo.tpot_s)}, "
        f"{slo.attainment:.0%} of requests"
        for slo in problem.slos
    )
    load = f"for {problem.rate_rps:.3g} requests/s, " if problem.rate_rps else ""
    lengths = f"{workload.mean_prompt_tokens:.0f} prompt and {workload.mean_output_tokens:.0f} output tokens on average"
    return (
        f"{problem.model.name} on {problem.topology.name}, {load}{workload.name} ({lengths}, {workload.spec.process} "
        f"arrivals), {bounds}"
    )


def _confidence(plan: Plan) -> str:
    """Return how well the latencies of the instances in question are known."""
    costs = _costs_used(plan)
    if any(cost.unprofiled for cost in costs):
        worst = max(error.median for cost in costs if (error := cost.decode_error) is not None)
        return (
            f"Latencies are data-sheet estimates, off by {worst:.0%} at the median elsewhere: profile these GPUs "
            "before you rely on this."
        )
    errors_ = [error for cost in costs for error in (cost.prefill_error, cost.decode_error) if error is not None]
    if any(not error.settings for error in errors_):
        worst = max(error.median for error in errors_)
        return (
            f"Latencies are in part carried over from other measurements, off by up to {worst:.0%} at the median where "
            "that could be checked: profile before you rely on this."
        )
    known = {
        "prefill": [cost.prefill_error.median for cost in costs if cost.prefill_error is not None],
        "decode": [cost.decode_error.median for cost in costs if cost.decode_error is not None],
    }
    parts = [f"{max(errors):.1%} in {phase}" for phase, errors in known.items() if errors]
    if not parts:
        return "Latencies are published fits without a held-out error."
    return f"Latencies are off by up to {' and '.join(parts)} at the median, on measurements left out of the fit."


def _costs_used(plan: Plan) -> list[CostModel]:
    """Return the cost models of the GPU types and tensor-parallel degrees that either way uses."""
    options = [option for option in (plan.disaggregated, plan.aggregated) if option is not None]
    used = {(kind.gpu, kind.layout.tp) for option in options for kind in option.placed.kinds}
    return [cost for cost in plan.kinds.costs if (cost.gpu, cost.layout.tp) in used]


def _rps(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _interval(low_rps: float, high_rps: float) -> str:
    return "" if isnan(low_rps) else f"[{_rps(low_rps)}, {_rps(high_rps)}]"


def _options(plan: Plan) -> RenderableType:
    """Both ways to serve, side by side."""
    table = _table(
        "Goodput, replayed [95% interval by luck, and below it with errors of the latencies]",
        "way",
        "layout",
        "GPUs",
        "requests/s",
        "per GPU",
        "binds",
        right=2,
    )
    rows = [("disaggregated", plan.disaggregated), ("aggregated", plan.aggregated), *plan.compared.items()]
    for name, option in rows:
        if option is None:
            table.add_row(name, "meets the SLO at no rate", "", "", "", "")
            continue
        rate, mark = option.rate, " *" if option is plan.chosen else ""
        table.add_row(
            name + mark,
            option.placed.layout,
            str(option.gpus),
            f"{_rps(rate.goodput_rps)} {_interval(rate.low_rps, rate.high_rps)}"
            f"\n{_interval(rate.wide_low_rps, rate.wide_high_rps)}",
            _rps(option.per_gpu_rps),
            rate.binding,
        )
    return table


def _sureness(options: Iterable[tuple[str, Option | None]]) -> RenderableType:
    """What goodput would be if a latency that it rests on were off by its typical error: what to measure better."""
    table = _table(
        "If a latency is off by its typical error, goodput changes by", "way", "latency", "error", "slower", "faster",
        right=2,
    )  # fmt: skip
    for way, option in options:
        for latency, answer in option.responses.items() if option is not None else ():
            changes = (f"{expm1(change):+.0%}" for change in (answer.slower, answer.faster))
            table.add_row(way, str(latency), f"{answer.error:.0%}", *changes)
    return table


def _instances(option: Option) -> RenderableType:
    """The chosen instances on named GPUs, with their limits."""
    table = _table("Instances", "name", "layout", "GPUs", "batch", "tokens", "KV tokens", right=3)
    for placed, kind in zip(option.placed.placement.instances, option.placed.kinds, strict=True):
        limits = kind.limits
        where = " | ".join(_where(stage) for stage in placed.stages)
        tokens = str(limits.max_tokens) if kind.phase != "decode" else "-"
        table.add_row(
            placed.name,
            str(placed.layout),
            where,
            str(limits.max_batch),
            tokens,
            f"{limits.kv_blocks * limits.block_tokens:,}",
        )
    return table


def _where(stage: tuple) -> str:
    """Return `node0:0-3` for a stage's GPUs."""
    nodes: dict[str, list[int]] = {}
    for gpu in stage:
        nodes.setdefault(gpu.node, []).append(gpu.index)
    return " ".join(f"{node}:{_ranges(indexes)}" for node, indexes in nodes.items())


def _ranges(indexes: list[int]) -> str:
    """Return `0-2,5` for [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


_TERMS = {
    "queue": "queue",
    "prefill": "+ prefill",
    "handoff": "+ hand-off",
    "first_decode_wait": "+ first decode wait",
    "ttft": "= TTFT",
    "tpot": "TPOT",
}


_HANDOFF = ("handoff", "first_decode_wait")


def _latencies(option: Option, slos: tuple[Slo, ...]) -> RenderableType:
    """TTFT itemised, and TPOT, at the rate of the report."""
    report = option.report
    attained = ", ".join(
        f"{slo.name + ' ' if slo.name else ''}{share:.1%}" for slo, share in zip(slos, report.attainment, strict=True)
    )
    title = f"At {_rps(report.rate_rps)} requests/s ({attained} attain)"
    table = _table(title, "term", "mean", "p50", "p90", "p99", right=1)
    for name, label in _TERMS.items():
        spread = getattr(report.latencies, name)
        values = (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)
        if name in _HANDOFF and "decode" not in report.load:
            continue
        table.add_row(label, *(show_seconds(v) if isfinite(v) else "-" for v in values))
    return table


def _busy(option: Option) -> RenderableType:
    """How busy the sides and the busiest links are."""
    from rich.text import Text

    sides = ", ".join(
        f"{phase} {load.busy:.0%} (batch {load.batch:.3g} on average, KV {load.kv_peak:.0%} full at worst)"
        for phase, load in option.report.load.items()
    )
    links = ", ".join(f"{name} {share:.1%}" for name, share in option.report.link_utilisation[:2])
    swaps = f"; {option.report.preemptions} preemptions" if option.report.preemptions else ""
    return Text(f"Busy at that rate: {sides}{'; busiest links ' + links if links else ''}{swaps}", overflow="fold")


def _bounds(plan: Plan) -> RenderableType:
    """The three numbers: claim, program, capacity."""
    from rich.console import Group
    from rich.text import Text

    option = plan.chosen
    lines = [f"Claim ({plan.mode}, replayed): {_rps(option.rate.goodput_rps)} requests/s"]
    if (program := option.program) is not None:
        what = (
            f"{_rps(program.value_rps)} requests/s"
            if plan.problem.objective == "max_goodput"
            else f"{program.gpus} GPUs"
        )
        lines.append(
            f"Placement program (pool rates): {what}, bound {_rps(program.bound_rps)}, gap {program.gap:.2%}, "
            f"{program.seconds:.2f} CPU s ({program.solver})"
        )
    lines.append(f"Capacity bound (saturation, no placement can beat it): {_rps(plan.capacity_bound_rps)} requests/s")
    lines += _arithmetic(plan, option)
    return Group(*(Text(line) for line in lines), Text(""))


def _arithmetic(plan: Plan, option: Option) -> list[str]:
    """Return how the sides' saturation comes about: count x rate per instance."""
    lines = []
    counts: dict[Kind, int] = {}
    for kind in option.placed.kinds:
        counts[kind] = counts.get(kind, 0) + 1
    for kind, count in counts.items():
        each = plan.kinds.saturation[kind]
        lines.append(f"  {kind}: {count} x {_rps(each)} requests/s at saturation = {_rps(count * each)}")
    return lines


def _fit_table(costs: list[CostModel]) -> Table:
    """Return the held-out errors of the cost models, with the GPU types where there are several."""
    several = len({cost.gpu for cost in costs}) > 1
    names = ("GPU",) * several + ("phase", "layout", "family")
    table = _table("Fit, error on settings left out", *names, "settings", "median", "p95", "worst", right=len(names))
    for row in fit_report(costs):
        errors = [f"{e:.1%}" if e is not None else "-" for e in (row.median, row.p95, row.worst)]
        cells = (row.gpu,) * several + (row.phase, row.layout, row.family)
        table.add_row(*cells, str(row.settings or "-"), *errors)
    return table


def _fit_notes(costs: list[CostModel]) -> list[str]:
    """Return what the cost models did not get from data, each line once."""
    several = len({cost.gpu for cost in costs}) > 1
    lines = [
        f"{cost.gpu + ' ' if several else ''}{cost.layout}: {note}"
        for cost in costs
        for note in (*cost.from_physics, *cost.notes)
    ]
    return list(dict.fromkeys(lines))


def _fit(plan: Plan) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    costs = _costs_used(plan)
    return Group(_fit_table(costs), *(Text(f"  {note}", style="dim") for note in _fit_notes(costs)), Text(""))


def _runners_up(plan: Plan) -> list[tuple[str, int, float, str]]:
    """Return (layout, GPUs, goodput, why it lost) of what came next, no two with the same instances."""
    rows: list[tuple[str, int, float, str]] = []
    demand_rps = plan.problem.demand_rps
    for option in (plan.disaggregated, plan.aggregated):
        if option is None:
            continue
        seen = {option.placed.layout}
        replayed = {str(one.combination): rps for one, rps in option.replayed}
        for one in option.ranked:
            name = str(one.combination)
            if name in seen or len(seen) > 4:
                continue
            seen.add(name)
            rows.append((name, one.combination.gpus, *_why(option, one, replayed, demand_rps)))
    return rows


def _why(option: Option, one: Scored, replayed: dict[str, float], demand_rps: float | None) -> tuple[float, str]:
    """Return the goodput of a runner-up and why it lost.

    Candidates were ranked in short runs, so their rates are brought to the scale of the claim by what the winner
    reached in those.
    """
    real_rps, winner = replayed.get(str(one.combination)), option.placed.layout
    if demand_rps is not None and (real_rps is None or real_rps >= demand_rps):
        more = one.combination.gpus - option.gpus
        return one.goodput_rps, f"{more:+d} GPUs for the same load" if more else "as few GPUs; not looked at further"
    rps = one.goodput_rps if real_rps is None else real_rps
    behind = rps / replayed.get(winner, option.rate.goodput_rps or option.report.rate_rps) - 1
    shown_rps = option.rate.goodput_rps * (1 + behind)
    if behind > -0.03:
        more = one.combination.gpus - option.gpus
        return shown_rps, "as good within the noise" + (f", {more:+d} GPUs" if more else "")
    if real_rps is not None and real_rps < 0.97 * one.goodput_rps:
        return shown_rps, f"{behind:+.0%}; the network takes {1 - real_rps / one.goodput_rps:.0%} of its rate"
    weaker = " (weaker side)" if len({kind.phase for kind, _ in one.combination.kinds}) > 1 else ""
    return shown_rps, f"{behind:+.0%}; saturates at {_rps(one.combination.bound_rps)}{weaker}"


def _others(rows: list[tuple[str, int, float, str]]) -> RenderableType:
    table = _table("Runners-up", "layout", "GPUs", "requests/s", "why not", right=1)
    table.columns[3].justify = "left"
    for layout, gpus, rps, why in rows:
        table.add_row(layout, str(gpus), _rps(rps), why)
    return table


def _rejected(plan: Plan) -> Iterator[RenderableType]:
    from rich.text import Text

    groups = by_reason(plan.kinds.rejected)
    if groups:
        yield Text("Not considered", style="bold")
    for reason, ones in groups.items():
        several = len(plan.problem.gpus) > 1
        names = ", ".join(dict.fromkeys(f"{one} on {one.gpu}" if several else str(one) for one in ones))
        yield Text(f"  {names}: {reason}", style="dim")


def _speed_up(plan: Plan) -> list[str]:
    """Return a warning where the trace is played much faster than it was recorded."""
    recorded = plan.problem.workload.steady_rate_rps
    if plan.problem.workload.spec.process != "trace" or not recorded:
        return []
    factor = plan.chosen.report.rate_rps / recorded
    text = (
        f"the trace's {recorded:.3g} requests/s are played {factor:.1f}x faster at this rate, and its bursts with them"
    )
    return [text] if factor > 2 else []


def _mixed_steps(plan: Plan) -> list[str]:
    """Return what the aggregated way's latencies rest on."""
    if plan.aggregated is None:
        return []
    what = "aggregated steps that mix prompt chunks with decodes follow a stated law"
    kinds = {(kind.gpu, kind.layout): kind.cost for kind in plan.aggregated.placed.kinds}
    lines = []
    for (gpu, layout), cost in kinds.items():
        profile = plan.problem.profile_of(plan.problem.gpus[gpu])
        if (found := mixed_error(cost, profile) if profile is not None else None) is not None:
            settings = f"{found.settings} measured setting{'s' * (found.settings > 1)}"
            lines.append(f"{what}, at {layout} off by {found.median:+.1%} at the median of {settings}")
    return lines or [f"{what}; no profile measured one"]


def _pipelines(plan: Plan) -> list[str]:
    """Return from which rate on a prefill pipeline answers sooner than tensor parallelism on as many GPUs."""
    tokens = round(plan.problem.workload.mean_prompt_tokens)
    return [
        f"prefill {one.pipeline.layout} instead of {one.tensor.layout}: a prompt of {tokens} tokens alone takes "
        f"{show_seconds(one.pipeline_s[0])} instead of {show_seconds(one.tensor_s[0])}, but the next may follow after "
        f"{show_seconds(one.pipeline_s[1])} instead of {show_seconds(one.tensor_s[1])}; it answers sooner from "
        f"{_rps(one.rate_rps)} requests/s per instance on"
        for one in crossovers(plan.kinds.all_legal, tokens)
    ]


def _slowest_route(plan: Plan) -> Route | None:
    """Return the route on which the disaggregated way moves a mean prompt's KV most slowly, if there is one."""
    routes = plan.disaggregated.placed.routes.values() if plan.disaggregated is not None else ()
    size, topology = plan.problem.kv_bytes_per_request, plan.problem.topology
    return max(routes, key=lambda way: way.alone_s(size, topology), default=None)


def _unverified(plan: Plan) -> list[str]:
    """Return what the hand-off takes at the planned speed and at worst, where nobody has verified the path."""
    way, size, topology = _slowest_route(plan), plan.problem.kv_bytes_per_request, plan.problem.topology
    if way is None or way.is_verified(topology):
        return []
    bounds = "/".join(show_seconds(slo.ttft_s) for slo in plan.problem.slos)
    return [
        f"the KV of a mean prompt ({show_bytes(size)}) moves in {show_seconds(way.alone_s(size, topology))} at the "
        f"planned {way.bytes_per_s(topology) / 1e9:.3g} GB/s, but that path is unverified: where it fell back to TCP, "
        f"{FALLBACK_BYTES_PER_S / 1e9:g} GB/s were left (vllm#52607), and it would take "
        f"{show_seconds(way.fallen_back_s(size))} of a TTFT bound of {bounds}; measure it and give `efficiency`"
    ]


def _notes(plan: Plan) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text("")
    for note in (*_speed_up(plan), *_mixed_steps(plan), *_pipelines(plan), *_unverified(plan), *plan.problem.notes):
        yield Text(f"Note: {note}", style="dim")
    runs = plan.trials.ranking.tally[0] + plan.trials.quoting.tally[0]
    requests = plan.trials.ranking.tally[1] + plan.trials.quoting.tally[1]
    yield Text(
        f"{runs} simulations of {plan.trials.quoting.duration_s:.0f} s or {plan.trials.ranking.duration_s:.0f} s each, "
        f"{requests:,} requests; {plan.cpu_s:.1f} CPU s; KV of a mean prompt "
        f"{show_bytes(plan.problem.kv_bytes_per_request)}",
        style="dim",
    )
