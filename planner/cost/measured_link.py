"""What a measured table of transfers says of a link: a fixed time and a bandwidth, with their held-out error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost.base import TermError
from planner.cost.operator_physics import Link
from planner.cost.operators import fit_operator
from planner.cost.transfer import TransferCost


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link as it was timed: fixed_s + bytes / bytes_per_s. The rate is effective, for a topology's link."""

    fixed_s: float
    bytes_per_s: float
    error: TermError

    def transfer_cost(self) -> TransferCost:
        """Return what a transfer costs beside its bytes; posting one message is inside its fixed time."""
        return TransferCost(fixed_s=self.fixed_s, per_piece_s=0.0)


def measured_link(sizes: np.ndarray, time_s: np.ndarray, spread: np.ndarray | None = None) -> MeasuredLink:
    """Return the link that predicts these transfers best in relative error.

    sizes: (n,) [bytes]; time_s: (n,); spread: (n,), standard deviation over repeats, relative. Raises InputError.
    """
    law = fit_operator(np.asarray(sizes, dtype=float)[:, None], time_s, Link(), spread)
    fixed_s, per_byte_s = np.exp(law.parameters)
    return MeasuredLink(float(fixed_s), float(1.0 / per_byte_s), law.error)
