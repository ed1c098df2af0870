"""What is asked of the cluster: how long prompts and answers are, and how their arrivals bunch.

`WorkloadSpec` is the YAML. `Workload` is the same with its file read: a table of requests that `generate`
plays at any rate, for any time, as many different times (seeds) as wanted. Time is counted in mean gaps while
a sequence is drawn and divided by the rate at the end, so request i has the same lengths and the same
relative gap at every rate: two rates, or two plans, are compared on the same luck (common random numbers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from planner.errors import Fault, InputError
from planner.specs.base import Spec
from planner.specs.units import Count, Name, RequestsPerSecond, Seconds, SecondsOrZero

SourceName = Literal["azure", "mooncake", "burstgpt", "lengths", "fixed", "trace"]
ArrivalProcess = Literal["trace", "poisson", "gamma", "constant", "closed"]
OnBadRow = Literal["reject", "skip"]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

UNTIMED: tuple[SourceName, ...] = ("lengths", "fixed")
"""Sources that have lengths but no arrival times."""

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}

_MOST_REQUESTS = 50_000_000
_SAME_INSTANT_S = 1e-9
_BLOCK_REQUESTS = 10.0
_SCAN_POINTS = 400
_SCAN_EVIDENCE = 15.0
_IDLE_FACTOR = 5.0
_IDLE_GAIN = 1.25


Scale = Annotated[float, Field(strict=True, gt=0, le=1000)]


class Slice(Spec):
    """A part of a trace: start_s <= time < end_s, counted from the first row, and at most max_requests."""

    start_s: SecondsOrZero = 0.0
    end_s: Seconds | None = None
    max_requests: Count | None = None


class WorkloadSpec(Spec):
    """Where requests come from. A trace brings its arrivals; lengths need a process (Poisson by default)."""

    source: SourceName
    name: Name | None = None
    file: str | None = None
    arrivals: ArrivalProcess | None = None
    cv: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    """Coefficient of variation of the gaps, for gamma arrivals; 1 is Poisson, more is burstier.

    In a closed loop that of the pauses: equal ones by default."""
    concurrency: Count | None = None
    """Clients of a closed loop (arrivals: closed): each sends its next request when its last one has ended."""
    think_s: SecondsOrZero = 0.0
    """Mean pause of a client of a closed loop between the end of a request and the next one."""
    ramp_s: SecondsOrZero = 0.0
    """Time over which the clients of a closed loop start, evenly; 0: all at once."""
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    prompt_scale: Scale = 1.0
    output_scale: Scale = 1.0
    """Every length of the source times this, rounded up: the same load for a model or machine of another size."""
    rate_rps: RequestsPerSecond | None = None
    """The load to plan for. A trace is brought to it by stretching time, which keeps its burstiness."""
    slice: Slice | None = None
    on_bad_row: OnBadRow = "reject"
    max_tokens: Count | None = None
    """Prompt plus output that the model can hold; longer requests are reported and left out."""
    block_s: Seconds = 60.0
    """Length of the pieces of a trace that are shuffled to make replicates, in the trace's own time."""
    citation: str = ""

    @property
    def process(self) -> ArrivalProcess:
        """How requests arrive, with the default filled in."""
        return self.arrivals or ("poisson" if self.source in UNTIMED else "trace")


@dataclass(frozen=True, slots=True)
class Clients:
    """A closed loop: so many clients, each of which sends its next request when its last one has ended.

    The rate follows from how fast the answers come: clients = requests/s x (latency + think time), Little's law.
    """

    count: int
    think_s: float = 0.0
    """Mean pause between the end of a request and the client's next one."""
    ramp_s: float = 0.0
    """The clients start evenly over this time; 0: all at once."""
    until_s: float = np.inf
    """From then on nobody sends; what is under way still ends."""
    cv: float = 0.0
    """Coefficient of variation of the pauses (gamma distributed): 0 equal, 1 exponential."""
    seed: int = 0
    """Luck of the pauses."""

    def starts_s(self, requests: int) -> FloatArray:
        """Return when each of so many requests is sent, as far as it is known ahead: inf beyond the clients' first."""
        times = np.full(requests, np.inf)
        first = np.arange(min(self.count, requests)) * (self.ramp_s / self.count)
        times[: len(first)] = np.where(first < self.until_s, first, np.inf)
        return times

    def pauses_s(self, requests: int) -> FloatArray:
        """Return the pause after each of so many requests; more of them begin alike."""
        if self.cv == 0.0:
            return np.full(requests, self.think_s)
        shape = 1.0 / self.cv**2
        stream = np.random.default_rng(np.random.SeedSequence(self.seed).spawn(3)[2])  # not that of times or lengths
        return stream.standard_gamma(shape, requests) * (self.think_s / shape)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests as columns of equal length, in order of arrival."""

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    slo_class: IntArray
    prefix_blocks: tuple[tuple[int, ...], ...] | None = None
    """Ids of the 512-token blocks of each prompt; equal ids mean equal prompts up to the end of that
    block."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Requests:
        """Return the given rows, by index or by mask."""
        blocks = self.prefix_blocks
        if blocks is not None:
            blocks = tuple(blocks[row] for row in np.arange(len(self))[rows].tolist())
        return Requests(
            self.arrival_s[rows],
            self.prompt_tokens[rows],
            self.output_tokens[rows],
            self.slo_class[rows],
            blocks,
        )


def make_requests(
    arrival_s: FloatArray,
    prompt_tokens: IntArray,
    output_tokens: IntArray,
    prefix_blocks: tuple[tuple[int, ...], ...] | None = None,
) -> Requests:
    """Return Requests of the one class 0."""
    return Requests(arrival_s, prompt_tokens, output_tokens, np.zeros(len(arrival_s), np.int64), prefix_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A workload with its data at hand.

    `base` has every usable row of the source, in the file's time or stretched to `spec.rate_rps`, from 0.
    `table` has what `generate` plays: the steady part of `base`, without failed rows, from 0, with at least
    one output token.
    """

    name: str
    spec: WorkloadSpec
    base: Requests
    table: Requests
    block_s: float
    read_notes: tuple[str, ...]
    digest: str
    """sha256 of the data file, or of the numbers where there is no file."""

    @property
    def clients(self) -> Clients | None:
        """The closed loop that sends it; None where requests arrive on their own (an open load)."""
        spec = self.spec
        if spec.concurrency is None:
            return None
        return Clients(spec.concurrency, spec.think_s, spec.ramp_s, cv=spec.cv or 0.0)

    @property
    def timed(self) -> bool:
        """True when the source has arrival times of its own."""
        return self.spec.source not in UNTIMED

    @property
    def failed(self) -> int:
        """Rows without output that the source's users know as failed requests; they are never played."""
        return int((self.base.output_tokens == 0).sum()) if self.spec.source == "burstgpt" else 0

    @property
    def prefill_only(self) -> int:
        """Rows without output that did succeed; played as requests of one token, the first."""
        return int((self.base.output_tokens == 0).sum()) - self.failed

    @property
    def mean_rate_rps(self) -> float | None:
        """Served requests per second of the whole file; without times, the rate asked for or None."""
        return _rate_rps(_served(self.spec, self.base).arrival_s) if self.timed else self.spec.rate_rps

    @property
    def steady_rate_rps(self) -> float | None:
        """Requests per second of the steady part (see `steady_rows`), which is what sizing starts from."""
        return _rate_rps(self.table.arrival_s) if self.timed else self.spec.rate_rps

    @property
    def design_rate_rps(self) -> float | None:
        """The rate to plan for: the one asked for, else the steady rate; None where neither is known."""
        return self.spec.rate_rps or self.steady_rate_rps

    def peak_rate_rps(self, window_s: float = 60.0) -> float | None:
        """Return the highest rate in any window of that length, or of the steady part if that is shorter."""
        if not self.timed or (steady := self.steady_rate_rps) is None:
            return self.steady_rate_rps
        times = self.table.arrival_s
        window_s = min(window_s, len(times) / steady)
        most = (np.searchsorted(times, times + window_s) - np.arange(len(times))).max()
        return float(most / window_s)

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt length of what is played [tokens]."""
        return float(self.table.prompt_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length of what is played [tokens]."""
        return float(self.table.output_tokens.mean())

    @property
    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50, p90, p99 and max of the lengths of what is played [tokens], by nearest rank."""
        columns = {"prompt_tokens": self.table.prompt_tokens, "output_tokens": self.table.output_tokens}
        return {
            name: {label: float(np.percentile(column, q, method="inverted_cdf")) for label, q in PERCENTILES.items()}
            for name, column in columns.items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything that was skipped, sorted, left out or assumed, one sentence each."""
        zeros = []
        if self.failed:
            zeros.append(f"failed requests (no output), not played: {self.failed} of {len(self.base)}")
        if self.prefill_only:
            zeros.append(f"prefill-only requests, played with one token: {self.prefill_only} of {len(self.base)}")
        return (*self.read_notes, *zeros, *_steady_note(self))

    def limited_to(self, max_tokens: int) -> Workload:
        """Return the workload without requests of more than `max_tokens` (prompt plus output), and say how
        many.

        Raises InputError when none is left.
        """
        total = self.base.prompt_tokens + self.base.output_tokens
        fits = total <= max_tokens
        if fits.all():
            return self
        count, rows = int((~fits).sum()), len(fits)
        if count == rows:
            raise InputError(
                Fault(f"no request fits in {max_tokens} tokens; the shortest has {total.min()}", self.name)
            )
        note = (
            f"unserveable requests, longer than {max_tokens} tokens and left out: {count} of {rows} "
            f"(the longest has {total.max()})"
        )
        return _with_base(self, self.base.take(fits), (*self.read_notes, note))

    def generate(self, rate_rps: float, duration_s: float, seed: int, *, prefix_blocks: bool = False) -> Requests:
        """Return the requests of [0, duration_s) at a mean rate of `rate_rps`.

        Equal seeds give the same sequence of lengths and relative gaps at every rate. For trace arrivals,
        seed 0 starts with the trace itself and every other stretch is made of pieces of it (see
        `_trace_times`). With `prefix_blocks`, a row that is played again gets block ids of its own: a repeat
        made by us is no cache hit. Raises InputError for a rate or duration that is not a positive number, for
        too many requests, or for a closed loop, which has no rate (see `draw`).
        """
        if self.clients is not None:
            raise InputError(f"workload {self.name} is a closed loop, which has no rate; simulate it with its clients")
        length = _length(rate_rps, duration_s, seed)
        if self.spec.process == "trace":
            times, rows = _trace_times(self, length, seed)
        else:
            times, rows = _process_times(self.spec, len(self.table), length, seed)
        blocks = _replayed_blocks(self.table.prefix_blocks, rows) if prefix_blocks else None
        return make_requests(times / rate_rps, self.table.prompt_tokens[rows], self.table.output_tokens[rows], blocks)

    def draw(self, count: int, seed: int) -> Requests:
        """Return `count` requests in the order in which a closed loop sends them; their arrivals are not known yet.

        Lengths are drawn from the table with repeats, as for an arrival process; more of them begin alike.
        """
        rows = _drawn_rows(_streams(seed)[1], len(self.table), count)
        unknown = np.full(count, np.inf)
        return make_requests(unknown, self.table.prompt_tokens[rows], self.table.output_tokens[rows])


def make_workload(name: str, spec: WorkloadSpec, base: Requests, notes: tuple[str, ...], digest: str) -> Workload:
    """Return the Workload of `base` (sorted by arrival), scaled, limited to `spec.max_tokens`, brought to its rate.

    Raises InputError when nothing is left to play, or when trace arrivals are asked for and there is no rate
    in it.
    """
    base, scaled = _scaled(spec, base)
    workload = _with_base(Workload(name, spec, base, base, spec.block_s, (), digest), base, (*notes, *scaled))
    if spec.max_tokens is not None:
        workload = workload.limited_to(spec.max_tokens)
    return _stretched(workload)


def _scaled(spec: WorkloadSpec, base: Requests) -> tuple[Requests, tuple[str, ...]]:
    """Return the rows with scaled lengths, and a note. What had none keeps none; blocks of a prompt have no scale."""
    if (spec.prompt_scale, spec.output_scale) == (1.0, 1.0):
        return base, ()
    prompts, outputs = (
        np.ceil(tokens * scale).astype(np.int64)
        for tokens, scale in ((base.prompt_tokens, spec.prompt_scale), (base.output_tokens, spec.output_scale))
    )
    blocks = base.prefix_blocks if spec.prompt_scale == 1.0 else None
    note = f"lengths scaled: prompts times {spec.prompt_scale:g}, outputs times {spec.output_scale:g}"
    return replace(base, prompt_tokens=prompts, output_tokens=outputs, prefix_blocks=blocks), (note,)


def _with_base(workload: Workload, base: Requests, notes: tuple[str, ...]) -> Workload:
    """Return the workload on other rows. Raises InputError when these cannot be played."""
    base = replace(base, arrival_s=base.arrival_s - base.arrival_s[0])
    workload = replace(workload, base=base, table=_playable(workload.spec, base), read_notes=notes)
    if not len(workload.table):
        raise InputError(Fault("no requests: every row is a failed request (no output tokens)", workload.name))
    if workload.spec.process == "trace" and workload.steady_rate_rps is None:
        way_out = "use arrivals: poisson and a rate_rps"
        raise InputError(Fault(f"all requests arrive at one instant, which has no rate; {way_out}", workload.name))
    return workload


def _stretched(workload: Workload) -> Workload:
    """Return the workload with its time stretched so that the steady part has `spec.rate_rps`."""
    steady, wanted = workload.steady_rate_rps, workload.spec.rate_rps
    if not workload.timed or steady is None or wanted is None:
        return workload
    factor = steady / wanted
    base = replace(workload.base, arrival_s=workload.base.arrival_s * factor)
    table = replace(workload.table, arrival_s=workload.table.arrival_s * factor)
    return replace(workload, base=base, table=table, block_s=workload.block_s * factor)


def _served(spec: WorkloadSpec, base: Requests) -> Requests:
    """Return the rows that got an answer: all, but for the failed ones of a source that marks them so."""
    return base.take(base.output_tokens > 0) if spec.source == "burstgpt" else base


def _playable(spec: WorkloadSpec, base: Requests) -> Requests:
    """Return the steady part of the served rows, from 0, each with at least the token that prefill makes."""
    table = _served(spec, base)
    if len(table):
        first, last = steady_rows(table.arrival_s)
        table = table.take(np.arange(first, last + 1))
        table = replace(table, arrival_s=table.arrival_s - table.arrival_s[0])
    return replace(table, output_tokens=np.maximum(table.output_tokens, 1))


def _rate_rps(arrival_s: FloatArray) -> float | None:
    """Return gaps per second; None where there is no time between the first and the last arrival."""
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    return (len(arrival_s) - 1) / span_s if span_s > _SAME_INSTANT_S else None


def steady_rows(arrival_s: FloatArray) -> tuple[int, int]:
    """Return the first and last row of the steady part: all rows, unless some of the time is as good as idle.

    Among windows with at least half of the requests, takes the one that a two-rate Poisson model likes best:
    the scan statistic, log-likelihood ratio of one rate inside and another outside (Kulldorff, 1997, section
    3). It counts as the steady part only if the rest is at least 5 times slower, so that an ordinary swing of
    the day is kept whole, and if it matters (1.25 times the mean rate). Window ends are rows, every n/400-th,
    so dense parts are resolved best.
    """
    whole = (0, len(arrival_s) - 1)
    if _rate_rps(arrival_s) is None:
        return whole
    ends = np.unique(np.linspace(0, len(arrival_s) - 1, min(len(arrival_s), _SCAN_POINTS)).round().astype(np.intp))
    span_s = arrival_s[-1] - arrival_s[0]
    times = arrival_s[ends] / span_s
    gaps, width = ends[None, :] - ends[:, None], times[None, :] - times[:, None]
    usable = (2 * gaps >= ends[-1]) & (width * span_s > _SAME_INSTANT_S) & (width < 1)
    if not usable.any():
        return whole
    start, end = np.nonzero(usable)
    inside, share = gaps[start, end] / ends[-1], width[start, end]
    evidence = ends[-1] * (inside * np.log(inside / share) + _entropy(1 - inside, 1 - share))
    best = int(np.argmax(np.where(inside > share, evidence, -np.inf)))
    gain, rest = inside[best] / share[best], (1 - inside[best]) / (1 - share[best])
    if evidence[best] < _SCAN_EVIDENCE or gain < _IDLE_GAIN or rest * _IDLE_FACTOR > gain:
        return whole
    return int(ends[start[best]]), int(ends[end[best]])


def _entropy(count: FloatArray, share: FloatArray) -> FloatArray:
    """Return count * log(count / share), which is 0 for a count of 0."""
    return np.where(count > 0, count * np.log(np.where(count > 0, count, 1.0) / share), 0.0)


def _steady_note(workload: Workload) -> tuple[str, ...]:
    """Return the sentence that says sizing is on a part of the trace, with the rates of whole and rest."""
    served = len(_served(workload.spec, workload.base))
    mean, steady = workload.mean_rate_rps, workload.steady_rate_rps
    rest = served - len(workload.table)
    if not rest or mean is None or steady is None:
        return ()
    rest_s = (served - 1) / mean - (len(workload.table) - 1) / steady
    return (
        f"the rate of the whole file is {mean:.3g} req/s, but its steady part ({len(workload.table)} of "
        f"{served} requests) runs at {steady:.3g} req/s, {steady / mean:.3g} times the mean and "
        f"{steady * rest_s / rest:.3g} times the rest; planned on the steady part",
    )


def _length(rate_rps: float, duration_s: float, seed: int) -> float:
    """Return how many mean gaps fit into the duration."""
    length = rate_rps * duration_s
    if not (rate_rps > 0 and duration_s > 0 and length <= _MOST_REQUESTS and seed >= 0):
        raise InputError(
            f"expected a positive rate and duration, at most {_MOST_REQUESTS} requests and a seed from 0 on, "
            f"got {rate_rps} req/s for {duration_s} s and seed {seed}"
        )
    return length


def _streams(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Return two independent generators, one for times and one for lengths, so neither shifts the other."""
    times, lengths = np.random.SeedSequence(seed).spawn(2)
    return np.random.default_rng(times), np.random.default_rng(lengths)


def _process_times(
    spec: WorkloadSpec, table_rows: int, length: float, seed: int
) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return arrival times [mean gaps] below `length`, and the table row (drawn with repeats) of each."""
    times_stream, lengths_stream = _streams(seed)
    if spec.process == "constant":
        times = np.arange(np.ceil(length), dtype=float)
    elif spec.process == "gamma":
        shape = 1.0 / (spec.cv or 1.0) ** 2
        times = _renewals(lambda count: times_stream.standard_gamma(shape, count) / shape, length)
    else:
        times = _renewals(times_stream.standard_exponential, length)
    return times, _drawn_rows(lengths_stream, table_rows, len(times))


def _drawn_rows(stream: np.random.Generator, table_rows: int, count: int) -> NDArray[np.intp]:
    """Return `count` rows of the table, drawn with repeats."""
    return (stream.random(count) * table_rows).astype(np.intp)


def _renewals(draw_gaps: Callable[[int], FloatArray], length: float) -> FloatArray:
    """Return the running sum of gaps while below `length`; a longer call only appends to a shorter one."""
    times = np.cumsum(draw_gaps(int(length + 4 * length**0.5) + 16))
    while times[-1] < length:
        more = np.cumsum(np.concatenate((times[-1:], draw_gaps(len(times)))))[1:]
        times = np.concatenate((times, more))
    return times[: np.searchsorted(times, length)]


def _trace_times(workload: Workload, length: float, seed: int) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return arrival times [mean gaps] below `length` and their table rows: the trace, then pieces of it.

    The trace is taken as a circle. Pieces of `block_s` (of 10 requests at least) start anywhere on it with
    equal chance, so the mean rate stays the trace's and bursts up to the size of a piece stay whole (circular
    block bootstrap, Politis and Romano, 1992). Swings slower than a piece are shuffled: give a longer
    `block_s` to keep them.
    """
    arrival_s = workload.table.arrival_s
    rate_rps = _rate_rps(arrival_s)
    assert rate_rps is not None, "make_workload refuses a trace without a rate"
    unit, circle = arrival_s * rate_rps, float(len(arrival_s))
    whole = circle if seed == 0 else 0.0
    block = min(max(workload.block_s * rate_rps, _BLOCK_REQUESTS), circle)
    times, rows = _pieces(unit, block, int(max(0.0, length - whole) / block) + 1, _streams(seed)[0])
    if seed == 0:
        times, rows = np.concatenate((unit, times + whole)), np.concatenate((np.arange(len(unit)), rows))
    times = np.maximum.accumulate(times) if len(times) else times
    end = np.searchsorted(times, length)
    return times[:end], rows[:end]


def _pieces(
    unit: FloatArray, block: float, count: int, stream: np.random.Generator
) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return `count` random pieces of the circle `unit`, end to end: times and rows."""
    rows_round = len(unit)
    twice = np.concatenate((unit, unit + rows_round))
    starts = stream.random(count) * rows_round
    low, high = np.searchsorted(twice, starts), np.searchsorted(twice, starts + block)
    sizes = high - low
    piece = np.repeat(np.arange(count), sizes)
    index = np.arange(len(piece)) + np.repeat(low - (np.cumsum(sizes) - sizes), sizes)
    return twice[index] - starts[piece] + piece * block, index % rows_round


def _replayed_blocks(
    blocks: tuple[tuple[int, ...], ...] | None, rows: NDArray[np.intp]
) -> tuple[tuple[int, ...], ...] | None:
    """Return the block ids of each played row, shifted out of the way for its second and later turns."""
    if blocks is None:
        return None
    step = 1 + max((max(ids) for ids in blocks if ids), default=0)
    shifts = (_turns(rows) * step).tolist()
    return tuple(
        tuple(block + shift for block in blocks[row]) if shift else blocks[row]
        for row, shift in zip(rows.tolist(), shifts, strict=True)
    )


def _turns(rows: NDArray[np.intp]) -> IntArray:
    """Return for each entry how many equal entries came before it."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.searchsorted(ordered, ordered)
    turns = np.empty(len(rows), np.int64)
    turns[order] = np.arange(len(rows)) - first
    return turns
