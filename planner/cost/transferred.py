"""What was measured at some degrees, on one GPU and of one model, said of another degree, GPU or model.

Nothing is carried over but the multipliers on what physics says (`cost.roofline`); the physics is that of the new
place, so peaks, bandwidths, layers and kernels enter by themselves, and host time stays the seconds that it is. Two
mechanisms are not in `physics.typical` and have a law here:

- **Ranks.** Of a term that the ranks share out, some seconds are not shared: t = a / tp + b. Of a host term, some
  seconds come once per rank: t = a + b tp. Over what physics says (shared out, constant) both are m = a + b tp, a line
  over the ranks (`roofline.lines`), inside the measured degrees and beyond them. What single degrees are off that line
  by is left to the residuals, which know of degrees.
- **Exchange.** Unshared seconds per token are all-reduces, which follow the link and the hidden size, not the peak:
  of the multiplier on prefill tokens, the part that grows as (tp - 1) is theirs, and it is scaled as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, log2
from typing import Literal

import numpy as np

from planner.cost import physics, roofline
from planner.cost.base import TermError
from planner.specs.cluster import nvlink_bytes_per_s
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec

_EXCHANGING = "prefill tokens"


@dataclass(frozen=True, slots=True)
class Place:
    """A model on a GPU, and the line rate [bytes/s] between its ranks, one way."""

    model: ModelSpec
    gpu: Gpu
    link_bytes_per_s: float

    @classmethod
    def usual(cls, model: ModelSpec, gpu: Gpu) -> Place:
        """Return the place where ranks talk over the GPU's own NVLink; over PCIe where none is on record."""
        return cls(model, gpu, nvlink_bytes_per_s(gpu) or gpu.host_bytes_per_s)

    def exchange(self, tp: int) -> float:
        """Return the time of the all-reduces of a token over that of its matrices, both typical."""
        _, per_token_s = physics.collectives_s(self.model, tp, self.link_bytes_per_s, 0.0)
        return per_token_s / float(physics.typical(self.model, self.gpu, tp)[4])


def lines(degrees: Mapping[int, roofline.Degree], parts: roofline.Parts, here: Place) -> roofline.Lines:
    """Return the multipliers of `degrees` as lines over the ranks.

    One degree alone does not tell what is exchanged: then it is what typical all-reduces take, as far as that leaves
    the matrices at their peak or below, and all else is level.
    """
    found = roofline.lines(degrees, parts)
    if len(degrees) > 1 or _EXCHANGING not in parts:
        return found
    (tp,), at = degrees, parts.index(_EXCHANGING)
    measured = float(np.exp(found.level[at]))
    least = min(measured, roofline.PARTS[_EXCHANGING].low)
    typical = here.exchange(tp) / (tp - 1) if tp > 1 else here.exchange(2)
    per_rank = min(typical, (measured - least) / (tp - 1) if tp > 1 else inf)
    rise = found.rise.copy()
    rise[at] = per_rank * tp / measured
    return replace(found, rise=rise)


def elsewhere(here_lines: roofline.Lines, tp: int, here: Place, there: Place) -> np.ndarray:
    """Return the multipliers (logarithms) at `tp` for another GPU or model: the same but for what ranks exchange."""
    theta = here_lines.at(tp)
    if tp > 1 and _EXCHANGING in here_lines.parts:
        at = here_lines.parts.index(_EXCHANGING)
        measured, shared = np.exp(theta[at]), min(np.exp(here_lines.at(1)[at]), np.exp(theta[at]))
        exchange = (measured - shared) * there.exchange(tp) / here.exchange(tp)
        theta[at] = np.log(max(shared + exchange, roofline.PARTS[_EXCHANGING].low))
    return theta


def neighbours(degrees: Sequence[int], tp: int) -> tuple[int, int]:
    """Return the last of `degrees` (ascending) below `tp` and the first above it; `tp` lies between two of them."""
    return max(degree for degree in degrees if degree < tp), min(degree for degree in degrees if degree > tp)


def octaves(degrees: Sequence[int], tp: int) -> float:
    """Return how far `tp` is from the nearest of `degrees`, in doublings."""
    return min(abs(log2(tp / degree)) for degree in degrees)


# ---- how far off, and how it is said

Kind = Literal["interpolated", "extrapolated", "one degree", "gpu", "model"]

ERRORS: dict[tuple[Kind, str], TermError] = {
    ("interpolated", "prefill"): TermError(0.040, 0.154, 0.188, 0, 0.078),
    ("interpolated", "decode"): TermError(0.044, 0.086, 0.109, 0, 0.058),
    ("extrapolated", "prefill"): TermError(0.101, 0.272, 0.439, 0, 0.156),
    ("extrapolated", "decode"): TermError(0.049, 0.099, 0.143, 0, 0.058),
    ("one degree", "prefill"): TermError(0.147, 0.355, 0.438, 0, 0.202),
    ("one degree", "decode"): TermError(0.198, 0.265, 0.313, 0, 0.192),
    ("gpu", "prefill"): TermError(0.132, 0.388, 0.559, 0, 0.211),
    ("gpu", "decode"): TermError(0.163, 0.362, 0.454, 0, 0.205),
    ("model", "prefill"): TermError(0.079, 0.395, 0.465, 0, 0.201),
    ("model", "decode"): TermError(0.097, 0.219, 0.233, 0, 0.135),
}
"""How far off each kind of transfer is where it can be checked, one doubling away: Splitwise's tables, two models on
two GPUs with one engine (`make transfer-errors` prints these numbers). `settings` is 0: none is of the profile at hand.
"""


@dataclass(frozen=True, slots=True)
class Way:
    """From the degrees that were measured to one that was not."""

    tp: int
    degrees: tuple[int, ...]

    @classmethod
    def to(cls, tp: int, degrees: Sequence[int]) -> Way:
        """Return the way from `degrees`, ascending."""
        return cls(tp, tuple(degrees))

    @property
    def inside(self) -> bool:
        """True between two measured degrees."""
        return self.degrees[0] < self.tp < self.degrees[-1]

    @property
    def kind(self) -> Kind:
        """What it is called in `ERRORS`."""
        if len(self.degrees) == 1:
            return "one degree"
        return "interpolated" if self.inside else "extrapolated"

    @property
    def checked(self) -> tuple[int, ...]:
        """The measured degrees that, left out, are reached in the same way: the inner ones, or the end on this side."""
        if len(self.degrees) < 3:
            return ()
        if self.inside:
            return self.degrees[1:-1]
        return self.degrees[:1] if self.tp < self.degrees[0] else self.degrees[-1:]

    @property
    def reach(self) -> float:
        """How many times further than where the error was seen; an error of slope grows with the distance."""
        each = [octaves([other for other in self.degrees if other != degree], degree) for degree in self.checked]
        return max(1.0, octaves(self.degrees, self.tp) / min(each, default=1.0))

    def error(self, checked: TermError | None, phase: str) -> TermError:
        """Return the error at the end: that of the degrees left out (`checked`), else the usual one, widened."""
        return widened(checked or ERRORS[self.kind, phase], self.reach)

    @property
    def how(self) -> str:
        """How the degree lies to the measured ones."""
        if self.inside:
            low, high = neighbours(self.degrees, self.tp)
            return f"interpolated between TP{low} and TP{high}"
        beyond = self.tp > self.degrees[-1]
        return f"extrapolated beyond TP{self.degrees[-1]}" if beyond else f"extrapolated below TP{self.degrees[0]}"

    @property
    def note(self) -> str:
        """What a plan says of it."""
        left_out = " and ".join(f"TP{degree}" for degree in self.checked)
        seen = f"that of {left_out} predicted from the others" if left_out else "that seen on other profiles"
        times = f", times {self.reach:.1f} for the distance" if self.reach > 1 else ""
        return f"{self.how}; the error is {seen}{times}"


@dataclass(frozen=True, slots=True)
class Move:
    """From the place of a profile to another one, and to the degree wanted there."""

    here: Place
    there: Place
    way: Way

    @property
    def kinds(self) -> list[Kind]:
        """What changes."""
        changes: list[tuple[Kind, bool]] = [
            ("gpu", self.here.gpu != self.there.gpu),
            ("model", self.here.model != self.there.model),
        ]
        return [kind for kind, changed in changes if changed]

    def error(self, phase: str) -> TermError:
        """Return the usual errors of all steps together, as if they were independent."""
        errors = [ERRORS[kind, phase] for kind in self.kinds]
        if self.way.tp not in self.way.degrees:
            errors.append(self.way.error(None, phase))
        return together(errors)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says of it."""
        what = f"carried over from {self.here.model.name} on {self.here.gpu.name}, the same engine assumed"
        said = f"{what}; the error is that seen on other profiles: profile this GPU before you rely on the plan"
        return (said,) if self.way.tp in self.way.degrees else (said, self.way.how)


def widened(error: TermError, factor: float) -> TermError:
    """Return the error, so many times as large."""
    return replace(
        error,
        median=factor * error.median,
        p95=factor * error.p95,
        worst=factor * error.worst,
        rms=factor * error.rms,
    )


def together(errors: Sequence[TermError]) -> TermError:
    """Return the error of independent steps: squares add."""
    numbers = [hypot(*(getattr(error, name) for error in errors)) for name in ("median", "p95", "worst", "rms")]
    median, p95, worst, rms = numbers
    return TermError(median, p95, worst, settings=0, rms=rms)
