"""Which settings to measure: a base grid, settings that no fit will see, and then wherever the fit is least sure.

Everything is a function of the limits, the seed and what was measured, so that a run that was interrupted asks for the
same settings again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2

import numpy as np

from profiler.setting import Setting
from profiler.subject import Limits

SHORTEST_PROMPT, SHORTEST_CONTEXT = 16, 32
CACHED = (512, 2048, 8192, 32768)
REACH_OCTAVES = 1.5
"""How far a setting speaks for others, when the next ones are chosen; the fit's own residuals reach 2 octaves."""
_NOISE = 0.05
_DRAWS = 400

ExpectedS = Callable[[Setting], float]


def _powers(low: int, high: int, factor: int = 2) -> list[int]:
    """Return low, low * factor, ... up to `high`, which ends the list."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return [*found, high] if high > 0 else found


def work(setting: Setting) -> float:
    """Return roughly how much a setting asks of any machine, to measure cheap ones first."""
    shape = setting.shape
    return shape.tokens + shape.attended / 8192 + 4 * shape.decodes + shape.context / 512


def base(limits: Limits) -> list[Setting]:
    """Return the grid that every layout starts with, the cheapest settings first, alternating between the phases."""
    found = [s for s in [*_base_prefill(limits), *_base_decode(limits)] if limits.fault(s) is None]
    return _in_order(found)


def _in_order(settings: Iterable[Setting]) -> list[Setting]:
    by_phase = [sorted((s for s in settings if bool(s.decodes) is decode), key=work) for decode in (False, True)]
    ranked = sorted((index / max(len(each), 1), s) for each in by_phase for index, s in enumerate(each))
    return list(dict.fromkeys(s for _, s in ranked))


def _base_prefill(limits: Limits) -> Iterator[Setting]:
    longest = min(limits.max_positions, limits.max_step_tokens, limits.kv_tokens)
    lengths = _powers(SHORTEST_PROMPT, longest)
    yield from (Setting.prefill(1, new) for new in lengths)
    for batch, new in product(_powers(2, limits.max_requests), lengths[1::2]):
        yield Setting.prefill(batch, new)
    for cached, new in product(CACHED, lengths[1::3]):
        yield Setting.prefill(1, new, cached)
        yield Setting.prefill(4, new, cached)


def _base_decode(limits: Limits) -> Iterator[Setting]:
    contexts = _powers(SHORTEST_CONTEXT, min(limits.max_positions, limits.kv_tokens), 4)
    short = contexts[min(1, len(contexts) - 1)]
    yield from (Setting.decode(batch, short) for batch in _powers(1, limits.max_requests))
    yield from (Setting.decode(batch, c) for batch, c in product(_powers(1, limits.max_requests, 4), contexts))


def mixed(limits: Limits) -> list[Setting]:
    """Return a few steps that prefill and decode at once, to check what a plan derives of them."""
    chunk = min(512, limits.max_step_tokens // 2)
    found = [
        Setting(1, new, cached, decodes, context)
        for new in (chunk // 4, chunk)
        for cached in (0, 1024)
        for decodes in (4, 16)
        for context in (256, 1024)
    ]
    return sorted((s for s in found if s.new_tokens and limits.fault(s) is None), key=work)


def held_out(limits: Limits, longest: dict[str, Setting], count: int, seed: int) -> list[Setting]:
    """Return `count` settings of either phase drawn at random, log-uniform within what `longest` spans; never fitted.

    `longest`: by phase, the largest value of each number among the settings to be measured: beyond them a fit would
    be asked to extrapolate.
    """
    rng = np.random.default_rng(seed)
    found: list[Setting] = []
    for phase in ("prefill", "decode"):
        if phase in longest:
            draws = (_draw(rng, phase, longest[phase]) for _ in range(_DRAWS))
            fitting = dict.fromkeys(s for s in draws if limits.fault(s) is None)
            found += list(fitting)[:count]
    return found


def _draw(rng: np.random.Generator, phase: str, most: Setting) -> Setting:
    if phase == "decode":
        batch = _between(rng, 1, most.decodes)
        return Setting.decode(batch, _between(rng, SHORTEST_CONTEXT, most.context_tokens))
    batch, new = _between(rng, 1, most.prefills), _between(rng, SHORTEST_PROMPT, most.new_tokens)
    cached = _between(rng, CACHED[0] // 2, most.cached_tokens) if most.cached_tokens and rng.random() < 0.3 else 0
    return Setting.prefill(batch, new, cached)


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(max(low, high))))))


def spans(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return by phase the largest value of each number."""
    found: dict[str, Setting] = {}
    for setting in settings:
        so_far = found.get(setting.phase, Setting())
        found[setting.phase] = Setting(*map(max, so_far, setting))
    return found


def affordable(settings: Sequence[Setting], expected_s: ExpectedS, passes: float, budget_s: float) -> list[Setting]:
    """Return the settings that `budget_s` has room for when each runs `passes` times: the longest steps go first.

    Order is kept. Of equal cost, all stay or go.
    """
    cost_s = {setting: expected_s(setting) for setting in settings}
    total_s = passes * sum(cost_s.values())
    for setting in sorted(settings, key=lambda each: -cost_s[each]):
        if total_s <= budget_s:
            break
        total_s -= passes * cost_s.pop(setting)
    return [setting for setting in settings if setting in cost_s]


def affordable_of_both(
    settings: Sequence[Setting], expected_s: ExpectedS, passes: float, budget_s: float
) -> list[Setting]:
    """Return what there is room for when either phase may take half, and what one does not need goes to the other."""
    phases = [[s for s in settings if bool(s.decodes) is decode] for decode in (False, True)]
    needs_s = [passes * sum(map(expected_s, phase)) for phase in phases]
    shares_s = [max(budget_s / 2, budget_s - other_s) for other_s in reversed(needs_s)]
    kept = {
        setting
        for phase, share_s in zip(phases, shares_s, strict=True)
        for setting in affordable(phase, expected_s, passes, share_s)
    }
    return [setting for setting in settings if setting in kept]


@dataclass(frozen=True, slots=True)
class Known:
    """Settings of one phase that were measured, and how far a fit without each is off there (a share)."""

    settings: list[Setting]
    off: np.ndarray


def candidates(limits: Limits, longest: Setting, phase: str) -> list[Setting]:
    """Return a fine grid of one phase, half octaves apart, within what `longest` spans."""
    if phase == "decode":
        pairs = product(_half(1, longest.decodes), _half(SHORTEST_CONTEXT, longest.context_tokens))
        found = [Setting.decode(batch, context) for batch, context in pairs]
    else:
        triples = product(
            _half(1, longest.prefills),
            _half(SHORTEST_PROMPT, longest.new_tokens),
            (0, *_half(CACHED[0], longest.cached_tokens)),
        )
        found = [Setting.prefill(*triple) for triple in triples]
    return [setting for setting in found if limits.fault(setting) is None]


def _half(low: int, high: int) -> list[int]:
    steps = int(2 * log2(high / low)) if high >= low else -1
    return sorted({round(low * 2 ** (step / 2)) for step in range(steps + 1)} | ({high} if high >= low else set()))


def least_sure(known: Known, among: Sequence[Setting], expected_s: ExpectedS, count: int) -> list[Setting]:
    """Return the `count` settings whose measurement promises most per second of machine time.

    What is not known of a setting: the posterior variance of a Gaussian process there (Matern 3/2 over octaves, as the
    fit's residuals have it; Rasmussen and Williams, section 2.2), times how far off the fit is around it, squared.
    Chosen one after another, each counted as measured for the next.
    """
    chosen: list[Setting] = []
    left = [setting for setting in among if setting not in set(known.settings)]
    near = _covariance(_octaves(left), _octaves(known.settings))
    typical = float(np.median(known.off)) if len(known.off) else 1.0
    off = (near @ known.off + typical) / (near.sum(axis=1) + 1.0)
    cost = np.sqrt([max(expected_s(setting), 1e-4) for setting in left])
    while left and len(chosen) < count:
        best = int(np.argmax(off**2 * _variance(left, [*known.settings, *chosen]) / cost))
        chosen.append(left.pop(best))
        off, cost = np.delete(off, best), np.delete(cost, best)
    return chosen


def _variance(at: Sequence[Setting], measured: Sequence[Setting]) -> np.ndarray:
    between = _covariance(_octaves(measured), _octaves(measured)) + _NOISE**2 * np.eye(len(measured))
    across = _covariance(_octaves(at), _octaves(measured))
    explained = np.einsum("ij,ji->i", across, np.linalg.solve(between, across.T))
    return np.asarray(np.maximum(1.0 - explained, 1e-9))


def _octaves(settings: Sequence[Setting]) -> np.ndarray:
    """Return (settings, 3): octaves of tokens of each request, of requests, and of the cached prefix."""
    rows = [
        (
            log2(max(s.new_tokens, s.context_tokens, 1)),
            log2(max(s.requests, 1)),
            log2(1.0 + s.cached_tokens / CACHED[0]),
        )
        for s in settings
    ]
    return np.array(rows, dtype=float).reshape(-1, 3)


def _covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    distance = np.sqrt(3.0 * (((a[:, None] - b[None]) / REACH_OCTAVES) ** 2).sum(-1))
    return np.asarray((1.0 + distance) * np.exp(-distance))
