"""Published coefficients: signs, regimes that do not meet, copies, and what physics says of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from planner.cost import physics
from planner.lint.base import Finding, Law, Table
from planner.specs.profile import DecodeFit, PrefillFit

_JUMP = 0.05
_CONTEXTS = (128, 512, 1024, 2048)
"""Tokens per request that both regimes of a published fit were made for (prompt and output below 2048)."""
_PROMPTS = (128, 512, 2048)
_BATCHES = (1, 16, 64)
_SAME = 1e-6
_SLOWER = 0.02


def negative(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield coefficients below 0: more work would take less time."""
    for law in table.laws:
        below = [f"{phase} {name} {value:g}" for phase, name, value in _terms(law) if value < 0]
        if below:
            what = f"{law.name}: below 0: {', '.join(below)}"
            yield Finding(
                "flag", "coefficients", (law.line,), what, "a fit takes it as 0; publish the rows, not the fit"
            )


def _terms(law: Law) -> Iterator[tuple[str, str, float]]:
    parts = (("prefill", law.fit.prefill), ("decode", law.fit.decode), ("decode_large", law.fit.decode_large))
    for phase, part in parts:
        for name, value in part.model_dump().items() if part else ():
            yield phase, name, float(value)


def regimes(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield fits whose two decode regimes do not meet where one takes over from the other."""
    for law in table.laws:
        if law.fit.decode_large is None or law.fit.large_from_batch is None:
            continue
        batch = law.fit.large_from_batch
        change = {
            c: _decode_s(law.fit.decode_large, batch, c) / _decode_s(law.fit.decode, batch, c) - 1 for c in _CONTEXTS
        }
        if min(map(abs, change.values())) > _JUMP or abs(change[512]) > _JUMP:
            told = ", ".join(f"{value:+.0%} at {context}" for context, value in change.items())
            what = f"{law.name}: the decode regimes do not meet at batch {batch}: {told} tokens of context"
            yield Finding("flag", "regimes", (law.line,), what, "a step in cost at one batch size misleads a search")


def _decode_s(fit: DecodeFit, batch: int, context: int) -> float:
    return fit.constant_s + fit.per_request_s * batch + fit.per_context_token_s * batch * context


def _prefill_s(fit: PrefillFit, tokens: int) -> float:
    return fit.constant_s + fit.per_token_s * tokens + fit.per_attended_s * tokens**2


def unphysical(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield laws that promise less than physics allows (or less than nothing), and single terms that do."""
    for law in table.laws:
        if fast := list(_too_fast(law)):
            what = f"{law.name}: gives times below what the data sheet allows: {', '.join(fast)}"
            yield Finding("reject", "coefficients", (law.line,), what, "check its unit, its model and its GPU")
        elif small := list(_too_small(law)):
            what = f"{law.name}: terms below what physics gives each: {', '.join(small)}"
            yield Finding(
                "flag",
                "coefficients",
                (law.line,),
                what,
                "in sums it may hold; do not use it beyond the batches it was fitted to",
            )


def _too_fast(law: Law) -> Iterator[str]:
    tp = law.fit.tp
    for tokens in _PROMPTS:
        floor_s = physics.prefill_floor_s(law.model, law.gpu, tp, (1, tokens, 0)) if law.model and law.gpu else 0.0
        if (time_s := _prefill_s(law.fit.prefill, tokens)) < physics.IMPOSSIBLE * floor_s or time_s <= 0:
            yield f"prefill of {tokens} tokens {1e3 * time_s:.3g} ms of at least {1e3 * floor_s:.3g}"
            break
    for batch in _BATCHES:
        for context in _CONTEXTS:
            floor_s = physics.decode_floor_s(law.model, law.gpu, tp, batch, context) if law.model and law.gpu else 0.0
            if (time_s := _decode_s(law.fit.decode, batch, context)) < physics.IMPOSSIBLE * floor_s or time_s <= 0:
                yield f"decode of {batch} x {context} tokens {1e3 * time_s:.3g} ms of at least {1e3 * floor_s:.3g}"
                return


def _too_small(law: Law) -> Iterator[str]:
    """Yield positive terms that alone beat the FLOP rate or the memory bandwidth."""
    if law.model is None or law.gpu is None:
        return
    tp, model, gpu = law.fit.tp, law.model, law.gpu
    flops = tp * physics.peak_flop_per_s(model, gpu)
    least_token_s = (model.matrix_flops_per_token - model.head_flops_per_token) / flops
    read_s = physics.kv_read_s(model, gpu, tp, efficiency=1.0)
    if 0 < law.fit.prefill.per_token_s < physics.IMPOSSIBLE * least_token_s:
        yield f"prefill per token {1e6 * law.fit.prefill.per_token_s:.3g} us of at least {1e6 * least_token_s:.3g}"
    for name, fit in (("decode", law.fit.decode), ("decode_large", law.fit.decode_large)):
        if fit and 0 < fit.per_context_token_s < physics.IMPOSSIBLE * read_s:
            yield f"{name} per context token {1e9 * fit.per_context_token_s:.3g} ns of at least {1e9 * read_s:.3g}"


def scaled(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield fits whose coefficients are all another's times one factor, in a phase."""
    for first, second in combinations(table.laws, 2):
        for phase in ("prefill", "decode", "decode_large"):
            if (factor := _factor(_vector(first, phase), _vector(second, phase))) is not None:
                what = f"{second.name}: its {phase} coefficients are those of {first.name} x {factor:.6g}, exactly"
                yield Finding("reject", "copies", (second.line,), what, "a copy, not a measurement; measure this one")


def _vector(law: Law, phase: str) -> np.ndarray:
    return np.array([value for name, _, value in _terms(law) if name == phase])


def _factor(a: np.ndarray, b: np.ndarray) -> float | None:
    there = (a != 0) & (b != 0) if len(a) == len(b) else np.zeros(0, dtype=bool)
    if there.sum() < 3:
        return None
    ratio = b[there] / a[there]
    middle = float(np.median(ratio))
    return middle if np.all(np.abs(ratio / middle - 1) < _SAME) else None


def ranks(table: Table, use: np.ndarray) -> Iterator[Finding]:
    """Yield terms that grow with the tensor-parallel degree, which divides the work."""
    for group in sorted({law.group for law in table.laws}):
        laws = sorted((law for law in table.laws if law.group == group), key=lambda law: law.fit.tp)
        for a, b in pairwise(laws):
            more = [
                f"{phase} {name}"
                for (phase, name, x), (_, _, y) in zip(_terms(a), _terms(b), strict=False)
                if name != "constant_s" and 0 < x < (1 - _SLOWER) * y
            ]
            if more:
                what = f"{b.name}: costs more than TP{a.fit.tp} in {', '.join(more)}"
                yield Finding("flag", "more ranks", (b.line,), what, "terms may trade; look at whole times")
