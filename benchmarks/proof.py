"""Whether a prediction holds: profile this machine, plan for it, serve the plan, measure it, and set both side by side.

Run it with `make proof`, or with options: python -m benchmarks.proof --help. Everything it starts is the program as
users have it (`planner profile`, `serve`, `bench`), each as a process of its own; only the planning of both layouts
happens here, since the two share one search. An idle machine is assumed.
"""

from __future__ import annotations

import argparse
import csv
import json
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from planner.errors import InputError, PlannerError
from planner.specs.base import load, resolve, write_text

ROOT = Path(__file__).resolve().parents[1]
MODES = ("disaggregated", "aggregated")
LOADS = (0.5, 1.0, 1.3)
"""Shares of the claimed goodput."""
ATTAINMENT_POINTS, MEDIAN_SHARE = 0.05, 0.15
"""How far measured and predicted may lie apart: attainment, and the medians of TTFT and TPOT."""
_FRESH_S = 24 * 3600.0
_START_S, _STOP_S = 180.0, 60.0
_LONE, _LONE_TOKENS = 7, (64, 12)
"""Lone requests that measure the machine's speed, and their tokens: prompt, answer."""
_SERVING = re.compile(r"serving on (http://\S+)")
_BENCH_CODES = (0, 3)
"""Of `planner bench`: 3 says that the prediction did not hold, which is for us to say too."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    problem: Path
    out: Path
    profile_s: float
    bench_s: float
    warmup_s: float
    seed: int
    fresh: bool
    planner: tuple[str, ...] = (sys.executable, "-m", "planner")


@dataclass(frozen=True, slots=True)
class Claim:
    """One way of serving, and the goodput that the plan claims for it."""

    mode: str
    deployment: Path
    goodput_rps: float
    layout: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one run, measured and predicted."""

    name: str
    measured: float | None
    predicted: float | None
    low: float | None = None
    high: float | None = None
    """The 95 % interval of what was measured."""
    at_speed: float | None = None
    """Predicted for the speed that the machine had during the run, rather than that of the profile."""

    @property
    def is_share(self) -> bool:
        """True for attainment, which is compared in points; times are compared as a share of the prediction."""
        return self.name == "attainment"

    @property
    def difference(self) -> float | None:
        """Measured minus predicted: in shares of 1 for attainment, else relative to the prediction."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured - self.predicted if self.is_share else self.measured / self.predicted - 1.0

    @property
    def holds(self) -> bool:
        """True when both lie as near to each other as was promised."""
        most = ATTAINMENT_POINTS if self.is_share else MEDIAN_SHARE
        return self.difference is not None and abs(self.difference) <= most

    @property
    def as_of_the_run(self) -> Figure:
        """The same figure with the prediction for the speed of the run in the place of the profile's."""
        return replace(self, predicted=self.at_speed)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `planner bench`."""

    mode: str
    load: float
    """Share of the claimed goodput."""
    rate_rps: float
    requests: int
    target: float
    """The attainment asked for."""
    figures: tuple[Figure, ...]
    prefill_slower: float = 0.0
    """By which share a lone prompt took longer around the run than when the profile was taken."""
    step_slower: float = 0.0
    """The same of a lone request's decode steps."""

    @property
    def attainment(self) -> float:
        """Measured; 0 where nothing was answered."""
        return self.figures[0].measured or 0.0


# ---- from the profile to the deployments


def profile(options: Options) -> Path:
    """Return the profile that the problem names, measured on this machine unless it was within the last day."""
    path = profile_path(options.problem)
    if not options.fresh and path.exists() and time.time() - path.stat().st_mtime < _FRESH_S:
        _say(f"profile {path} is of today: used again (--fresh measures anew)")
        return path
    _say(f"measuring the engine for {options.profile_s:.0f} s")
    stale = options.fresh or path.exists()  # a journal without its profile is of a run that was stopped: it goes on
    command = [*options.planner, "profile", *profile_arguments(options, path), *["--fresh"] * stale]
    _run(command, options.out / "profile.log")
    return path


def profile_path(problem: Path) -> Path:
    """Return where the problem expects its one profile. Raises InputError when it names another kind of thing."""
    document = load(problem)
    named = document.data.get("profiles") if isinstance(document.data, dict) else None
    if not isinstance(named, str) or not named.endswith(".yaml"):
        raise InputError(document.fault("expected one profile, a file, that the proof may measure", "profiles"))
    return (problem.parent / named).resolve()


def profile_arguments(options: Options, path: Path) -> list[str]:
    """Return the options of `planner profile`: one core per instance, its neighbour at work as when both serve."""
    beside, longest = _cores(options.problem) - 1, str(_longest(options.problem))
    return [
        *("--model", "smollm2", "--dtype", "float32", "--device", "cpu", "--tp", "1", "--pp", "1"),
        *("--threads", "1", "--beside", str(beside), "--max-tokens", longest, "--max-context", longest),
        *("--time-budget", f"{options.profile_s:.0f}s", "--name", path.stem, "-o", str(path)),
    ]


def _cores(problem: Path) -> int:
    """Return how many cores the problem's cluster has."""
    from planner.specs.topology import read_cluster

    return len(read_cluster(resolve("clusters", load(problem).at("cluster"))).gpus)


def _longest(problem: Path) -> int:
    """Return the tokens of the problem's longest request, up to the next power of two."""
    from planner.sources.workloads import read_workload

    table = read_workload(resolve("workloads", load(problem).at("workload"))).table
    return 1 << (int((table.prompt_tokens + table.output_tokens).max()) - 1).bit_length()


def plan_both(options: Options) -> list[Claim]:
    """Return both ways to serve the problem, each with its deployment on disk."""
    from planner.deploy import deployment_of, to_yaml
    from planner.pipeline import plan
    from planner.sources.problem import read_problem

    found = plan(read_problem(options.problem), lambda step: None)
    claims = []
    for mode in MODES:
        deployment = deployment_of(found.prefer(mode))
        path = options.out / f"{mode}.yaml"
        write_text(path, to_yaml(deployment))
        claim = deployment.prediction.claim
        claims.append(Claim(mode, path, claim.goodput_rps, claim.layout))
    return claims


# ---- serving, and measuring it


@contextmanager
def serving(options: Options, claim: Claim) -> Iterator[str]:
    """Serve a deployment; yield its URL. Raises InputError when it does not come up, or ends meanwhile."""
    log = options.out / f"{claim.mode}.log"
    command = [*options.planner, "serve", str(claim.deployment), "--port", "0"]
    lines: queue.Queue[str | None] = queue.Queue()
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as server,
    ):
        # what it prints later is read too, so that no pipe fills up
        reader = threading.Thread(target=_drain, args=(server.stdout, lines), daemon=True)
        reader.start()
        try:
            yield _url(lines, log)
            if (code := server.poll()) is not None:
                raise InputError(f"the server ended by itself with {code}; {_end(log)}")
        finally:
            _stop(server)
            reader.join()


def _url(lines: queue.Queue[str | None], log: Path) -> str:
    """Return what the server prints when it is ready."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise InputError(f"the server is not ready after {_START_S:.0f} s; see {log}") from None
        if line is None:
            raise InputError(f"the server ended before it was ready; {_end(log)}")
        if found := _SERVING.search(line):
            return found[1]


def _drain(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _stop(server: subprocess.Popen[str]) -> None:
    """End the server as an operator would; kill it where that is not enough."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        _say(f"the server did not stop within {_STOP_S:.0f} s of SIGTERM and was killed")


@dataclass(frozen=True, slots=True)
class Speed:
    """How long a lone request's prompt and decode steps take on the running engine [s]: a yardstick of the machine.

    Rented machines change their speed from minute to minute, by more than what is to be shown here.
    """

    prefill_s: float
    step_s: float

    @classmethod
    def of(cls, url: str) -> Speed:
        """Measure: medians over a few requests, one at a time."""
        found = []
        luck = random.Random()  # other prompts each time: one that was seen before is found in the prefix cache
        for _ in range(_LONE + 1):
            prompt = [luck.randrange(100, 40_000) for _ in range(_LONE_TOKENS[0])]
            asked = {"prompt": prompt, "max_tokens": _LONE_TOKENS[1], "ignore_eos": True, "return_times": True}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode())
            with urllib.request.urlopen(request, timeout=60) as answer:
                times = json.load(answer)["times"]
            step_s = (times["finish_s"] - times["ttft_s"]) / (_LONE_TOKENS[1] - 1)
            found.append((times["prefill_s"], step_s))
        prefills_s, steps_s = zip(*found[1:], strict=True)
        return cls(median(prefills_s), median(steps_s))


def measure(options: Options, claim: Claim, url: str, share: float) -> Measured:
    """Return what `planner bench` sees at a share of the claimed goodput."""
    rate_rps = share * claim.goodput_rps
    records = options.out / f"{claim.mode}-{share:g}.csv"
    command = [
        *(*options.planner, "bench", "--url", url, "--deployment", str(claim.deployment)),
        *("--workload", str(workload_path(options.problem)), "--rate", f"{rate_rps:.6g}"),
        *("--duration", f"{options.bench_s:.0f}s", "--warmup", f"{options.warmup_s:.0f}s"),
        *("--seed", str(options.seed), "--records", str(records), "--json"),
    ]
    text = _run(command, options.out / f"{claim.mode}-{share:g}.log", _BENCH_CODES)
    try:
        data = json.loads(text)
    except ValueError:
        raise InputError(f"planner bench printed no JSON document but {text[:200]!r}") from None
    return measured_of(claim.mode, share, rate_rps, data)


def workload_path(problem: Path) -> Path | str:
    """Return the workload that the problem names: a file, or a preset."""
    named = load(problem).data.get("workload")
    if not isinstance(named, str):
        raise InputError(
            load(problem).fault("expected a file or a preset, which planner bench can be given", "workload")
        )
    return (problem.parent / named).resolve() if named.endswith((".yaml", ".yml", ".json")) else named


def measured_of(mode: str, share: float, rate_rps: float, data: dict[str, Any]) -> Measured:
    """Return the figures that count, out of the document of `planner bench --json`."""
    attained = next(iter(data["attainment"].values()))
    figures = [
        Figure("attainment", attained["measured"], attained["predicted"], attained["low"], attained["high"]),
        *(
            Figure(f"median {name.upper()}", one["measured_s"], one["predicted_s"], one["low_s"], one["high_s"])
            for name, one in (("ttft", data["ttft"]["p50"]), ("tpot", data["tpot"]["p50"]))
        ),
    ]
    return Measured(mode, share, rate_rps, data["requests"]["counted"], attained["target"], tuple(figures))


def at_speed(options: Options, claim: Claim, run: Measured, slower: tuple[float, float]) -> Measured:
    """Return a run with what is predicted of its very requests when prefills and steps take longer by such shares."""
    import numpy as np

    from planner.deploy import read_deployment, system_of
    from planner.simulator.cluster import simulate
    from planner.simulator.metrics import attained
    from planner.specs.workload import Requests

    with (options.out / f"{claim.mode}-{run.load:g}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [np.array([float(row[name]) for row in rows]) for name in ("due_s", "prompt_tokens", "output_tokens")]
    requests = Requests(columns[0], columns[1].astype(int), columns[2].astype(int), np.zeros(len(rows), int))
    deployment = read_deployment(load(claim.deployment))
    system = system_of(deployment)
    instances = tuple(
        replace(one, cost=one.cost.slower("prefill", slower[0]).slower("decode", slower[1])) for one in system.instances
    )
    found = simulate(replace(system, instances=instances), requests, deployment.slo)
    counted = np.array([row["counted"] == "1" for row in rows])
    values = (
        float(attained(found, deployment.slo)[counted].mean()),
        float(np.nanmedian(found.ttft_s[counted])),
        float(np.nanmedian(found.tpot_s[counted])),
    )
    figures = tuple(replace(one, at_speed=value) for one, value in zip(run.figures, values, strict=True))
    return replace(run, figures=figures, prefill_slower=slower[0], step_slower=slower[1])


def slower_than(reference: Speed, seen: Sequence[Speed]) -> tuple[float, float]:
    """Return by which shares prefills and steps took longer, on average over `seen`, than in the reference."""
    return (
        fmean(each.prefill_s for each in seen) / reference.prefill_s - 1.0,
        fmean(each.step_s for each in seen) / reference.step_s - 1.0,
    )


def reference_speed(options: Options, url: str) -> Speed:
    """Return the speed that goes with the profile: kept beside it, measured now for one that is new."""
    path = profile_path(options.problem)
    kept = path.with_suffix(".speed.json")
    if kept.exists() and kept.stat().st_mtime >= path.stat().st_mtime:
        return Speed(**json.loads(kept.read_text(encoding="utf-8")))
    speed = Speed.of(url)
    write_text(kept, json.dumps(asdict(speed)))
    return speed


def _run(command: Sequence[str], log: Path, good: Sequence[int] = (0,)) -> str:
    """Return what a command printed; its progress goes to the log. Raises InputError with the log's end."""
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, check=False)
    if done.returncode not in good:
        raise InputError(f"{' '.join(command[:4])} ended with {done.returncode}; {_end(log)}")
    return done.stdout


def _end(log: Path) -> str:
    """Return the last line of a log, and where it is."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"{log} ends: {last}" if last else f"{log} is empty"


def _say(what: str) -> None:
    print(f"proof: {what}", file=sys.stderr, flush=True)


# ---- what came of it


def measured_goodput_rps(runs: Sequence[Measured]) -> tuple[float, str]:
    """Return the highest rate [requests/s] at which the target was still attained, straight between two loads.

    With a sign: `>` where it was attained at the highest load, `<` where it was missed at the lowest.
    """
    ordered = sorted(runs, key=lambda run: run.rate_rps)
    target = ordered[0].target
    if ordered[0].attainment < target:
        return ordered[0].rate_rps, "<"
    for below, above in pairwise(ordered):
        if above.attainment < target:
            share = (below.attainment - target) / (below.attainment - above.attainment)
            return below.rate_rps + share * (above.rate_rps - below.rate_rps), ""
    return ordered[-1].rate_rps, ">"


@dataclass(frozen=True, slots=True)
class Sign:
    """Which way of serving is better, predicted and measured."""

    predicted: str
    measured: str
    """`open` where the loads that were measured leave it so."""
    goodputs_rps: dict[str, tuple[float, float, str]]
    """Per mode: predicted, measured, and the sign of the latter."""

    @property
    def holds(self) -> bool:
        """True when both agree."""
        return self.predicted == self.measured


def sign_of(claims: Sequence[Claim], runs: Sequence[Measured]) -> Sign:
    """Return which of the two ways had the higher goodput, by the plan and by the clock."""
    claimed = {claim.mode: claim.goodput_rps for claim in claims}
    found = {mode: measured_goodput_rps([run for run in runs if run.mode == mode]) for mode in claimed}
    predicted = max(claimed, key=lambda mode: claimed[mode])
    measured = next(
        (mode for mode in claimed if all(_above(found[mode], found[o]) for o in found if o != mode)), "open"
    )
    return Sign(predicted, measured, {mode: (claimed[mode], *found[mode]) for mode in claimed})


def _above(one: tuple[float, str], other: tuple[float, str]) -> bool:
    """True when a measured goodput is above another for certain: `<` says that it lies anywhere below, `>` above."""
    least = 0.0 if one[1] == "<" else one[0]
    most = float("inf") if other[1] == ">" else other[0]
    return least > most or (least == most and other[1] == "<")


def to_json(claims: Sequence[Claim], runs: Sequence[Measured], spent_s: float) -> dict[str, Any]:
    """Return everything as plain data."""
    sign = sign_of(claims, runs)
    return {
        "layouts": {claim.mode: {"layout": claim.layout, "goodput_rps": claim.goodput_rps} for claim in claims},
        "runs": [
            {
                **{key: value for key, value in asdict(run).items() if key != "figures"},
                "figures": {
                    one.name: {
                        **asdict(one),
                        "difference": one.difference,
                        "holds": one.holds,
                        "holds_at_speed": one.as_of_the_run.holds,
                    }
                    for one in run.figures
                },
            }
            for run in runs
        ],
        "sign": {**asdict(sign), "holds": sign.holds},
        "holds": _holds(claims, runs),
        "spent_s": spent_s,
    }


def _holds(claims: Sequence[Claim], runs: Sequence[Measured]) -> bool:
    return sign_of(claims, runs).holds and all(one.holds for run in runs for one in run.figures)


def table(claims: Sequence[Claim], runs: Sequence[Measured]) -> Any:
    """Return measured | predicted | difference, a line per figure."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = []
    for claim in claims:
        title = f"{claim.mode}: {claim.layout}, {claim.goodput_rps:.3g} requests/s claimed"
        found = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
        for heading in ("load", "per s", "", "measured", "predicted", "off", "at speed", "off"):
            found.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
        for run in runs:
            if run.mode == claim.mode:
                _add(found, run)
        parts += [found, *(Text(_pace(run)) for run in runs if run.mode == claim.mode), Text()]
    return Group(*parts, *(Text(line) for line in verdict(claims, runs)))


def _add(found: Any, run: Measured) -> None:
    first = f"{run.load:g} x", f"{run.rate_rps:.3g}"
    for one in run.figures:
        now = one.as_of_the_run
        each = (_shown(one, one.measured), _shown(one, one.predicted), _off(one), _shown(one, one.at_speed), _off(now))
        found.add_row(*first, one.name, *each)
        first = "", ""


def _pace(run: Measured) -> str:
    """Return how fast the machine was during a run."""
    prefills, steps = f"{run.prefill_slower:+.0%}", f"{run.step_slower:+.0%}"
    return f"machine at {run.load:g} x: lone prefills {prefills}, steps {steps} against when it was profiled"


def _shown(figure: Figure, value: float | None) -> str:
    from planner.specs.units import show_seconds

    if value is None:
        return "-"
    return f"{value:.1%}" if figure.is_share else show_seconds(value)


def _off(figure: Figure) -> str:
    if figure.difference is None:
        return "-"
    off = f"{100 * figure.difference:+.1f} pt" if figure.is_share else f"{figure.difference:+.0%}"
    return off if figure.holds else f"{off} !"


def verdict(claims: Sequence[Claim], runs: Sequence[Measured]) -> list[str]:
    """Return in words which way is better by either account, and how many figures hold."""
    sign = sign_of(claims, runs)
    goodputs = "; ".join(
        f"{mode} {predicted:.3g} predicted, {mark}{measured:.3g} measured"
        for mode, (predicted, measured, mark) in sign.goodputs_rps.items()
    )
    figures = [one for run in runs for one in run.figures]
    held, held_now = sum(one.holds for one in figures), sum(one.as_of_the_run.holds for one in figures)
    return [
        f"more goodput: {sign.predicted} predicted, {sign.measured} measured ({'as' if sign.holds else 'not as'} told)",
        f"goodput [requests/s]: {goodputs}",
        f"within {100 * ATTAINMENT_POINTS:.0f} points of attainment or {MEDIAN_SHARE:.0%} of a median: {held} of "
        f"{len(figures)} figures, {held_now} of them for the speed that the machine had",
    ]


def prove(options: Options, loads: Sequence[float] = LOADS) -> tuple[list[Claim], list[Measured]]:
    """Return what was claimed and what was measured. Raises InputError with the reason when a step fails."""
    options.out.mkdir(parents=True, exist_ok=True)
    profile(options)
    _say("planning both ways to serve")
    claims = plan_both(options)
    return claims, measure_all(options, claims, loads)


def measure_all(options: Options, claims: Sequence[Claim], loads: Sequence[float] = LOADS) -> list[Measured]:
    """Return a run at every load, of each of the ways to serve, one after the other."""
    runs = []
    for claim in claims:
        _say(f"starting {claim.layout}")
        with serving(options, claim) as url:
            reference, before = reference_speed(options, url), Speed.of(url)
            for share in loads:
                _say(f"{claim.mode} at {share:g} x {claim.goodput_rps:.3g} requests/s for {options.bench_s:.0f} s")
                run, after = measure(options, claim, url, share), Speed.of(url)
                runs.append(at_speed(options, claim, run, slower_than(reference, (before, after))))
                before = after
    return runs


def main(arguments: list[str] | None = None) -> int:
    """Run the proof; return 0 when everything held, 3 when something did not, 1 when it could not be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description="Predict, serve, measure, compare.")
    parser.add_argument("--problem", type=Path, default=ROOT / "examples" / "smollm2-localhost.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "proof", help="for deployments, records and logs")
    parser.add_argument("--profile-s", type=float, default=150.0, help="seconds for the profile")
    parser.add_argument("--bench-s", type=float, default=85.0, help="seconds of each of the six runs")
    parser.add_argument("--warmup-s", type=float, default=10.0, help="of which are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="measure the profile anew")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    begun_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the server is stopped on the way out
    try:
        claims, runs = prove(Options(**given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except PlannerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    spent_s = round(time.monotonic() - begun_s, 1)
    if as_json:
        print(json.dumps(to_json(claims, runs, spent_s), indent=2))
    else:
        _print(claims, runs, spent_s)
    return 0 if _holds(claims, runs) else 3


def _print(claims: Sequence[Claim], runs: Sequence[Measured], spent_s: float) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False)
    console.print(table(claims, runs))
    console.print(f"{spent_s / 60:.1f} minutes in all")


if __name__ == "__main__":
    sys.exit(main())
