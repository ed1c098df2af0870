"""What a replay says, as columns: one entry per request that was sent, in the order of sending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from planner.bench.load import Load
from planner.bench.replay import Replayed, Sent
from planner.specs.slo import attains, tpot_s

FloatArray = NDArray[np.float64]

TERMS = ("queue", "prefill", "handoff", "first_decode_wait")
"""Of TTFT, as the simulator has them."""
OUTSIDE = "outside"
"""What a client sees of TTFT beyond what the server itself measured: the network, HTTP, and both ends' own time."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Times from the start of the replay [s]; nan for what never happened."""

    sent: tuple[Sent, ...]
    row: NDArray[np.int64]
    due_s: FloatArray
    sent_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    ok: NDArray[np.bool_]
    output_tokens: NDArray[np.int64]
    """As the server counts them, or the pieces that came where it does not say."""
    slo_class: NDArray[np.int64]
    met: NDArray[np.bool_]
    counted: NDArray[np.bool_]
    """After the warm-up and, in a run that was interrupted, before the first request without an end."""
    terms: dict[str, FloatArray]
    """Of TTFT, by the server's own clock, and the rest; nan where it does not say."""
    warmup_s: float
    ends_s: float
    """When the last of these requests was due."""

    @property
    def ttft_s(self) -> FloatArray:
        """Time from when a request was due to its first token [s]: a client that is late hides nothing."""
        return self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> FloatArray:
        """Time per token after the first [s], of whole answers."""
        pace: FloatArray = tpot_s(self.first_token_s, self.last_token_s, self.output_tokens)
        return np.where(self.ok, pace, nan)


def measured_of(replayed: Replayed, load: Load) -> Measured:
    """Return the columns of a replay."""
    sent = tuple(replayed.sent)
    row = np.array([one.row for one in sent], np.int64)
    due_s = np.array([one.due_s for one in sent])
    first_s, last_s = (
        np.array([getattr(one.answer, name) for one in sent], float) - replayed.start_s
        for name in ("first_token_s", "last_token_s")
    )
    ok = np.array([one.answer.status == "ok" for one in sent], bool)
    tokens = np.array([_tokens(one) for one in sent], np.int64)
    of_class = load.requests.slo_class[row]
    whole = _before_the_first_cut(sent)
    ends_s = float(due_s[whole][-1]) if whole.any() else 0.0
    if not replayed.interrupted and np.isfinite(load.ends_s):
        ends_s = load.ends_s
    warmup_s = load.warmup_s(ends_s)
    met = ok.copy()
    for at, slo in enumerate(load.slos):
        mine = of_class == at
        pace_s = slo.request_tpot_s(due_s, first_s, last_s, tokens)
        met[mine] &= attains((first_s - due_s)[mine], pace_s[mine], slo)
    return Measured(
        sent=sent,
        row=row,
        due_s=due_s,
        sent_s=np.array([one.sent_s for one in sent], float),
        first_token_s=first_s,
        last_token_s=last_s,
        ok=ok,
        output_tokens=tokens,
        slo_class=of_class,
        met=met,
        counted=whole & (due_s >= warmup_s),
        terms=_terms(sent, first_s - due_s),
        warmup_s=warmup_s,
        ends_s=ends_s,
    )


def _tokens(one: Sent) -> int:
    told = one.answer.output_tokens
    return told if isinstance(told, int) else one.answer.pieces


def _before_the_first_cut(sent: Sequence[Sent]) -> NDArray[np.bool_]:
    """Return which requests were sent before any that had not ended when the run was interrupted.

    Of those sent later only the quick ones have ended, which would flatter the server.
    """
    cut = np.array([one.answer.status == "cut" for one in sent], bool)
    return np.arange(len(cut)) < (int(cut.argmax()) if cut.any() else len(cut))


def _terms(sent: Sequence[Sent], ttft_s: FloatArray) -> dict[str, FloatArray]:
    found = {name: np.array([_time(one, f"{name}_s") for one in sent], float) for name in TERMS}
    inside = np.array([_time(one, "ttft_s") for one in sent], float)
    return {**found, OUTSIDE: ttft_s - inside}


def _time(one: Sent, name: str) -> float:
    """Return one of the server's own times [s]; what did not happen took none."""
    times = one.answer.times
    if not times:
        return nan
    value = times.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
