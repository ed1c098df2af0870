"""Does disaggregation help this load? Both ways on equal GPUs, compared by their intervals, with the deciding term."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log
from typing import Literal

from planner.options import Option, Trials, free_network_gain
from planner.replay import Report, report
from planner.search.kinds import Kinds
from planner.simulator.metrics import binding_term
from planner.sources.problem import Problem
from planner.specs.units import show_seconds
from planner.sureness import spread, weakest

Mode = Literal["disaggregated", "aggregated"]
MODES: tuple[Mode, ...] = ("disaggregated", "aggregated")
_NOTABLE = 0.05
"""Less than that a free network would give is not worth a word."""
_FULL = 0.8
"""From that share of its saturation on a side has nothing to spare."""


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


def judge(
    problem: Problem, kinds: Kinds, trials: Trials, disaggregated: Option | None, aggregated: Option | None
) -> Verdict:
    """Return the verdict. At least one option must be there and able to serve."""
    if problem.workload.table.output_tokens.max() < 2:
        return Verdict("aggregated", False, None, None, None, "answers of one token leave nothing for a decode side")
    if disaggregated is None or disaggregated.rate.goodput_rps <= 0:
        why = "no disaggregated plan meets the SLO at any rate"
        if len(problem.topology.gpus) < 2:
            why = "a single GPU cannot hold a prefill and a decode side"
        return Verdict("aggregated", False, None, None, None, why)
    if aggregated is None or aggregated.rate.goodput_rps <= 0:
        return Verdict("disaggregated", False, None, None, None, "no aggregated plan meets the SLO at any rate")
    gain, low, high = _gain(problem, disaggregated, aggregated)
    if (verdict := _by_demand(problem, disaggregated, aggregated, (gain, low, high))) is not None:
        return verdict
    by_luck = _gain(problem, disaggregated, aggregated, luck_alone=True)
    if by_luck[1] > 0:
        mode, reason = MODES[0], _interference(problem, trials, gain, aggregated)
    else:
        mode, reason = MODES[1], _cost_of_splitting(problem, kinds, trials, gain, disaggregated, aggregated)
    tie = low <= 0 <= high
    if tie:
        reason += f"; but {_doubt(by_luck, disaggregated, aggregated)}"
    return Verdict(mode, tie, gain, low, high, reason)


def _doubt(by_luck: tuple[float, float, float], d: Option, a: Option) -> str:
    """Return what a tie comes from: luck alone, or latencies that may be off."""
    if by_luck[1] <= 0 <= by_luck[2]:
        return "the seeds alone leave open which is better"
    both = {**d.responses, **a.responses}
    latency = weakest(both)
    assert latency is not None, "an interval wider than luck has its reason"
    return (
        f"the latencies are only known so well ({latency} to {both[latency].error:.0%}), and within that either may win"
    )


def _gain(problem: Problem, one: Option, other: Option, luck_alone: bool = False) -> tuple[float, float, float]:
    """Return the relative gain per GPU of `one` over `other` with its interval, luck and latency errors in it.

    To get the most out of a cluster both have all its GPUs, so one that a layout leaves idle counts against it; to
    serve a given load each has the GPUs that it takes.
    """
    ratio = one.rate.goodput_rps / other.rate.goodput_rps
    if problem.objective == "min_gpus":
        ratio *= other.gpus / one.gpus
    down, up = spread(one.rate, {}, {}) if luck_alone else spread(one.rate, one.responses, other.responses)
    luck = log(other.rate.high_rps / other.rate.low_rps) / 2
    return ratio - 1, ratio * exp(-hypot(down, luck)) - 1, ratio * exp(hypot(up, luck)) - 1


def _by_demand(problem: Problem, d: Option, a: Option, gain: tuple[float, float, float]) -> Verdict | None:
    """Return the verdict where the load asked for decides: who needs fewer GPUs for it."""
    rate_rps = problem.demand_rps
    if rate_rps is None:
        return None
    d_serves, a_serves = d.rate.goodput_rps >= rate_rps, a.rate.goodput_rps >= rate_rps
    if d_serves == a_serves and d.gpus == a.gpus:
        return None
    if a_serves and d.gpus < a.gpus and d.rate.low_rps < rate_rps:
        edge = f"its interval [{d.rate.low_rps:.3g}, {d.rate.high_rps:.3g}] leaves open whether it does"
        reason = (
            f"the load is at the edge: disaggregated may serve {rate_rps:.3g} requests/s on {d.gpus} GPUs instead of "
            f"{a.gpus}, but {edge}"
        )
        return Verdict("aggregated", d_serves, *gain, reason)
    aggregated_wins = a_serves and (not d_serves or a.gpus < d.gpus)
    mode: Mode = "aggregated" if aggregated_wins else "disaggregated"
    winner, loser, loser_serves = (a, d, d_serves) if aggregated_wins else (d, a, a_serves)
    other = "disaggregated" if aggregated_wins else "aggregated"
    outcome = f"needs {loser.gpus}" if loser_serves else f"reaches {loser.rate.goodput_rps:.3g} on {loser.gpus}"
    both = ", since it takes an instance of each phase" if aggregated_wins and loser_serves and d.gpus <= 2 else ""
    reason = (
        f"the load decides: {mode} serves {rate_rps:.3g} requests/s on {winner.gpus} GPU{'s' * (winner.gpus > 1)} "
        f"(up to {winner.rate.goodput_rps:.3g}), {other} {outcome}{both}"
    )
    return Verdict(mode, False, *gain, reason)


def _interference(problem: Problem, trials: Trials, gain: float, a: Option) -> str:
    """Return what keeps the aggregated way from the disaggregated way's rate."""
    run = trials.quoting.run(a.placed.system, a.rate.goodput_rps * (1 + gain))
    bound, late, slow = binding_term([run], problem.slos, trials.quoting.warmup_s)
    return (
        f"interference decides: at this rate per GPU the aggregated way misses {bound} for {max(late, slow):.0%} of "
        f"requests (TTFT {late:.0%}, TPOT {slow:.0%}), because prompts and decode steps share its iterations"
    )


def _cost_of_splitting(problem: Problem, kinds: Kinds, trials: Trials, gain: float, d: Option, a: Option) -> str:
    """Return the term that costs the disaggregated way most: KV transfer, lost pooling, or nothing gained.

    KV transfer is judged by what a free network would give, under the same luck; it decides when that closes half of
    the gap, or turns a tie.
    """
    at_claim = report(problem, trials.quoting, d.placed, d.rate.goodput_rps)
    freed = free_network_gain(trials, d)
    if freed > max(0.5 * -gain / (1 + gain), _NOTABLE):
        return (
            f"KV transfer decides: with a free network the disaggregated way would reach {freed:+.0%}; its "
            f"hand-off takes {show_seconds(at_claim.latencies.handoff.p90_s)} (p90), where the TTFT bound is "
            f"{_bounds(problem, 'ttft_s')}"
        )
    full = {phase: _fullness(kinds, d, phase) for phase in ("prefill", "decode")}
    side = _binding_side(d, at_claim)
    idler = "decode" if side == "prefill" else "prefill"
    if full[idler][1] > _FULL:
        return (
            f"there is little interference to save: at {a.report.rate_rps:.3g} requests/s aggregated has a TPOT of "
            f"{show_seconds(a.report.latencies.tpot.p90_s)} (p90) against a bound of {_bounds(problem, 'tpot_s')}"
        )
    gpus, share = zip(*(full[phase] for phase in ("prefill", "decode")), strict=True)
    return (
        f"lost pooling decides: {gpus[0]} of {d.gpus} GPUs take prompts (at {share[0]:.0%} of their saturation) and "
        f"{gpus[1]} decode (at {share[1]:.0%}); the {side} side binds ({d.rate.binding}) and cannot use what the "
        f"{idler} side has to spare"
    )


def _fullness(kinds: Kinds, d: Option, phase: str) -> tuple[int, float]:
    """Return the GPUs of one side, and its share of the rate that would saturate it.

    How busy it is says less: a decode instance with a single request is busy all the time.
    """
    own = [kind for kind in d.placed.kinds if kind.phase == phase]
    return sum(kind.gpus for kind in own), d.rate.goodput_rps / sum(kinds.saturation[kind] for kind in own)


def _binding_side(d: Option, at_claim: Report) -> str:
    """Return which side keeps the rate from rising: who makes requests slow, or wait for their first token."""
    terms = at_claim.latencies
    waits_for_decode_s = terms.handoff.p90_s + terms.first_decode_wait.p90_s
    late_by_prefill = d.rate.binding == "TTFT" and terms.queue.p90_s + terms.prefill.p90_s >= waits_for_decode_s
    return "prefill" if late_by_prefill else "decode"


def _bounds(problem: Problem, name: str) -> str:
    """Return the classes' bounds on one time, such as `200 ms` or `1 s/5 s`."""
    return "/".join(show_seconds(getattr(slo, name)) for slo in problem.slos)
