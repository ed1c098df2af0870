"""What counts as served well: bounds on a request's TTFT and TPOT, and the share of requests that meet
both."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from planner.specs.base import Spec
from planner.specs.units import Name, Seconds, Share

Bound = Annotated[Seconds, Field(ge=1e-6, le=86400)]
TpotDefinition = Literal["decode", "inclusive"]

_ROUNDING = 1e-9
"""A value at its bound meets it, although (last - first) / (n - 1) rounds to either side of it."""


class Slo(Spec):
    """Service level objective of one traffic class, judged per request and jointly (both bounds, same
    request)."""

    ttft_s: Bound
    tpot_s: Bound
    attainment: Share = 0.9
    name: Name | None = None
    share: Share | None = None
    """This class's share of the requests; classes without one share alike what is left."""
    tpot_definition: TpotDefinition = "decode"
    """`decode`: time after the first token per further token. `inclusive`: end to end per output token."""

    def request_tpot_s(
        self,
        arrival_s: ArrayLike,
        first_token_s: ArrayLike,
        last_token_s: ArrayLike,
        output_tokens: ArrayLike,
    ) -> Any:
        """Return the TPOT of each request [s] by this SLO's own definition; nan for requests of one token."""
        start_s = arrival_s if self.tpot_definition == "inclusive" else first_token_s
        return _pace_s(start_s, last_token_s, output_tokens, inclusive=self.tpot_definition == "inclusive")


def tpot_s(first_token_s: ArrayLike, last_token_s: ArrayLike, output_tokens: ArrayLike) -> Any:
    """Return (last - first) / (output_tokens - 1) [s], a float for scalars, else an array.

    It is nan (undefined, which counts as met) for one token: neither 0 nor a division by zero.
    """
    return _pace_s(first_token_s, last_token_s, output_tokens, inclusive=False)


def inclusive_tpot_s(arrival_s: ArrayLike, last_token_s: ArrayLike, output_tokens: ArrayLike) -> Any:
    """Return the end-to-end time per output token [s], prefill and queue included; nan for one token.

    Some serving reports call this TPOT. For one token it would be the TTFT again, which has its own bound.
    """
    return _pace_s(arrival_s, last_token_s, output_tokens, inclusive=True)


def _pace_s(start_s: ArrayLike, last_s: ArrayLike, output_tokens: ArrayLike, *, inclusive: bool) -> Any:
    took_s = np.asarray(last_s, dtype=float) - np.asarray(start_s, dtype=float)
    tokens = np.asarray(output_tokens, dtype=float)
    pace_s = np.where(tokens > 1, took_s / np.maximum(tokens if inclusive else tokens - 1, 1.0), np.nan)
    return float(pace_s) if pace_s.ndim == 0 else pace_s


def attains(ttft_s: ArrayLike, tpot_s: ArrayLike, slo: Slo) -> NDArray[np.bool_]:
    """Return for each request whether it meets both of its bounds.

    An undefined (nan) TPOT counts as met; an undefined TTFT (no token ever came) does not. `tpot_s` is each
    request's own mean gap, never pooled over requests.
    """
    ttft, tpot = np.asarray(ttft_s, dtype=float), np.asarray(tpot_s, dtype=float)
    slack = 1 + _ROUNDING
    met: NDArray[np.bool_] = (ttft <= slo.ttft_s * slack) & (np.isnan(tpot) | (tpot <= slo.tpot_s * slack))
    return met
