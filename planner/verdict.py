"""Does disaggregation help this load? Both ways on equal GPUs, compared by their intervals, with the deciding term."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Literal

import numpy as np

from planner.cost.base import BatchShape
from planner.errors import InfeasibleError
from planner.options import Option, Trials, free_network_rps
from planner.search.kinds import Kinds
from planner.search.layouts import Kind
from planner.simulator.metrics import binding_term
from planner.sources.problem import Problem
from planner.specs.slo import Slo
from planner.specs.units import show_seconds

Mode = Literal["disaggregated", "aggregated"]
MODES: tuple[Mode, ...] = ("disaggregated", "aggregated")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, by how much it is better per GPU (with the interval), and which term decides."""

    mode: Mode
    tie: bool
    gain: float | None
    """Goodput per GPU of the disaggregated way relative to the aggregated one, minus 1; None without a rival."""
    gain_low: float | None
    gain_high: float | None
    reason: str

    @property
    def headline(self) -> str:
        """The one line that a person reads first."""
        advice = "Disaggregate" if self.mode == "disaggregated" else "Do not disaggregate"
        if self.tie:
            advice += " (too close to call)"
        if self.gain is None:
            return advice
        low, high = self.gain_low or 0.0, self.gain_high or 0.0
        return f"{advice}: goodput per GPU {self.gain:+.0%} [{low:+.0%}, {high:+.0%}] against aggregated"


def judge(problem: Problem, trials: Trials, disaggregated: Option | None, aggregated: Option | None) -> Verdict:
    """Return the verdict. At least one option must be there and able to serve."""
    if disaggregated is None or disaggregated.rate.goodput_rps <= 0:
        return Verdict("aggregated", False, None, None, None, "no disaggregated plan meets the SLO at any rate")
    if aggregated is None or aggregated.rate.goodput_rps <= 0:
        return Verdict("disaggregated", False, None, None, None, "no aggregated plan meets the SLO at any rate")
    gain, low, high = _gain(problem, disaggregated, aggregated)
    if (verdict := _by_demand(problem, disaggregated, aggregated, (gain, low, high))) is not None:
        return verdict
    if low > 0:
        return Verdict(
            "disaggregated", False, gain, low, high, _interference(problem, trials, disaggregated, aggregated)
        )
    reason = _cost_of_splitting(problem, trials, disaggregated, aggregated)
    return Verdict("aggregated", high >= 0, gain, low, high, reason)


def _gain(problem: Problem, one: Option, other: Option) -> tuple[float, float, float]:
    """Return the relative gain per GPU of `one` over `other` with its interval (independent errors, first order).

    To get the most out of a cluster both have all its GPUs, so one that a layout leaves idle counts against it; to
    serve a given load each has the GPUs that it takes.
    """
    ratio = one.rate.goodput_rps / other.rate.goodput_rps
    if problem.objective == "min_gpus":
        ratio *= other.gpus / one.gpus
    spread = [(o.rate.high_rps - o.rate.low_rps) / 2 / o.rate.goodput_rps for o in (one, other)]
    half = ratio * hypot(*spread)
    return ratio - 1, ratio - half - 1, ratio + half - 1


def _by_demand(problem: Problem, d: Option, a: Option, gain: tuple[float, float, float]) -> Verdict | None:
    """Return the verdict where the load asked for decides: who needs fewer GPUs for it."""
    rate_rps = problem.rate_rps
    if problem.objective != "min_gpus" or rate_rps is None:
        return None
    serves = {"disaggregated": d.rate.low_rps >= rate_rps, "aggregated": a.rate.low_rps >= rate_rps}
    if serves["aggregated"] and (not serves["disaggregated"] or a.gpus < d.gpus):
        needs = (
            f"needs {d.gpus}" if serves["disaggregated"] else f"reaches {d.rate.goodput_rps:.3g} requests/s on {d.gpus}"
        )
        reason = (
            f"the load decides: aggregated serves {rate_rps:.3g} requests/s on {a.gpus} GPU{'s' * (a.gpus > 1)} "
            f"(up to {a.rate.goodput_rps:.3g}), disaggregated {needs} (a prefill and a decode side at least)"
        )
        return Verdict("aggregated", False, *gain, reason)
    if serves["disaggregated"] and (not serves["aggregated"] or d.gpus < a.gpus):
        needs = (
            f"needs {a.gpus}" if serves["aggregated"] else f"reaches {a.rate.goodput_rps:.3g} requests/s on {a.gpus}"
        )
        reason = (
            f"the load decides: disaggregated serves {rate_rps:.3g} requests/s on {d.gpus} GPUs, aggregated {needs}"
        )
        return Verdict("disaggregated", False, *gain, reason)
    return None


def _interference(problem: Problem, trials: Trials, d: Option, a: Option) -> str:
    """Return what keeps the aggregated way from the disaggregated way's rate."""
    rate_rps = d.per_gpu_rps * a.gpus
    run = trials.quoting.run(a.placed.system, rate_rps)
    bound, late, slow = binding_term([run], problem.slos, trials.quoting.warmup_s)
    return (
        f"interference decides: at this rate per GPU the aggregated way misses {bound} for {max(late, slow):.0%} of "
        f"requests (TTFT {late:.0%}, TPOT {slow:.0%}), because prompts and decode steps share its iterations"
    )


def _cost_of_splitting(problem: Problem, trials: Trials, d: Option, a: Option) -> str:
    """Return the term that costs the disaggregated way most: KV transfer, lost pooling, or nothing gained."""
    free = free_network_rps(problem, trials, d) / d.gpus
    terms = d.report.latencies
    if free > a.per_gpu_rps and free > 1.05 * d.per_gpu_rps:
        return (
            f"KV transfer decides: with a free network it would reach {free:.3g} requests/s per GPU instead of "
            f"{d.per_gpu_rps:.3g}; the hand-off takes {show_seconds(terms.handoff.p90_s)} (p90)"
        )
    busy = {phase: load.busy for phase, load in d.report.load.items()}
    idle = min(busy, key=lambda phase: busy[phase])
    if busy[idle] < 0.6:
        return (
            f"lost pooling decides: GPUs come in whole instances, and the {idle} side is busy {busy[idle]:.0%} of the "
            f"time at the claim while the other side binds ({d.rate.binding})"
        )
    tpot = a.report.latencies.tpot.p90_s
    return (
        f"there is little interference to save: aggregated serves its claim with a TPOT of {show_seconds(tpot)} (p90) "
        f"against a bound of {show_seconds(max(slo.tpot_s for slo in problem.slos))}"
    )


def infeasible(problem: Problem, kinds: Kinds) -> InfeasibleError:
    """Return the error that says which bound no layout can meet, the best achievable value, and what would help."""
    ttft = [_best_ttft(problem, kinds, slo) for slo in problem.slos]
    tpot = [_best_tpot(kinds)] * len(problem.slos)
    late = [(best[0] / slo.ttft_s, "TTFT", best, slo.ttft_s, slo) for best, slo in zip(ttft, problem.slos, strict=True)]
    slow = [(best[0] / slo.tpot_s, "TPOT", best, slo.tpot_s, slo) for best, slo in zip(tpot, problem.slos, strict=True)]
    factor, binding, (best_s, kind), bound_s, slo = max([*late, *slow], key=lambda item: item[0])
    where = f"{kind.layout} on {kind.gpu}"
    of_class = f" of class {slo.name}" if slo.name else ""
    if factor <= 1.0:
        message = (
            f"infeasible: each bound{of_class} can be met alone, but not both by {slo.attainment:.0%} of requests "
            f"together; closest is {binding} at {show_seconds(best_s)} ({where}, one request at a time) for a bound of "
            f"{show_seconds(bound_s)}"
        )
    else:
        message = (
            f"infeasible: no layout meets {binding} <= {show_seconds(bound_s)}{of_class}; the best achievable for "
            f"{slo.attainment:.0%} of requests is {show_seconds(best_s)} ({where}, one request at a time), "
            f"{factor:.1f}x the bound"
        )
    field = "ttft_s" if binding == "TTFT" else "tpot_s"
    way_out = (
        f"more replicas do not help, since they do not speed up a single request; set {field} to at least "
        f"{show_seconds(best_s * 1.1)}, or use a faster GPU or a wider layout"
    )
    return InfeasibleError(message, binding=binding, best_s=best_s, bound_s=bound_s, way_out=way_out)


def _best_ttft(problem: Problem, kinds: Kinds, slo: Slo) -> tuple[float, Kind]:
    """Return the least TTFT [s] that `slo.attainment` of the prompts could get, each alone on its best layout."""
    share = slo.attainment * 100
    prompt = int(np.percentile(problem.workload.table.prompt_tokens, share, method="inverted_cdf"))
    sides = [kind for kind in kinds.all_legal if kind.phase == "prefill"]
    return min(((k.cost.iteration_s(BatchShape.prefill(prompt)), k) for k in sides), key=lambda item: item[0])


def _best_tpot(kinds: Kinds) -> tuple[float, Kind]:
    """Return the least time [s] of a decode step of one short request."""
    sides = [kind for kind in kinds.all_legal if kind.phase == "decode"]
    return min(((k.cost.iteration_s(BatchShape.decode(1, 1)), k) for k in sides), key=lambda item: item[0])
