"""How one instance is cut up: tensor-parallel ranks times pipeline stages."""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["prefill", "decode", "aggregated"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "aggregated")


class Layout(NamedTuple):
    """Tensor-parallel degree and pipeline stages of one instance. Orders by (tp, pp)."""

    tp: int
    pp: int = 1

    @property
    def gpus(self) -> int:
        """GPUs that one instance takes."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP{self.tp}" + (f" PP{self.pp}" if self.pp > 1 else "")


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage, as even as can be, the fuller stages first.

    The fullest stage bounds both the step time and the KV capacity of the whole pipeline, which is why layers / pp
    is the wrong number (61 layers over 8 stages: 8, not 7.625).
    """
    base, extra = divmod(layers, pp)
    return (base + 1,) * extra + (base,) * (pp - extra)
