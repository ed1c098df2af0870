"""The shape of one operator's cost: overhead plus a soft maximum of what may bind, in tiles and waves.

Each law here turns points (one row per measurement) and a few free parameters into seconds. It is positive and never
falls when a size grows (tokens, batch, context, bytes), whatever the parameters: a fit cannot break either promise.
Parameters are free numbers: logarithms of times and efficiencies, so that a small step is a small relative one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.cost.chip import Chip

Array = np.ndarray


class Physics(Protocol):
    """A family of cost laws for one kind of operator."""

    @property
    def name(self) -> str:
        """What to call it in a report."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What the columns of `points` hold."""

    @property
    def dense(self) -> int | None:
        """The column along which an operator is measured densely, so that residuals may be interpolated."""

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return typical parameters, (p,), and how strongly each is pulled to its own, (p,)."""

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each row of `points`, (n,)."""


def soft_max(x: Array, y: Array, sharpness: float) -> Array:
    """Return (x^q + y^q)^(1/q) of two positive arrays: near the larger one, smooth where both matter."""
    big, small = np.maximum(x, y), np.minimum(x, y)
    return np.asarray(big * (1.0 + (small / big) ** sharpness) ** (1.0 / sharpness))


def _sharpness(free: float) -> float:
    """Return an exponent of 1 (sum) or more; at most 50, by where it is as good as a maximum."""
    return float(min(50.0, 1.0 + np.exp(min(free, 4.0))))


def _waves(blocks: Array, slots: int, whole: float = 1.0) -> Array:
    """Return how often the slots are filled, (n,): at least once, and mostly (by `whole`) in whole waves."""
    filled = np.maximum(blocks / slots, 1.0)
    return np.asarray(whole * np.ceil(filled - 1e-9) + (1.0 - whole) * filled)


@dataclass(frozen=True, slots=True)
class Gemm:
    """Matrix product of (tokens x inputs) by (inputs x outputs) weights.

        overhead + softmax_q(waves x tile, bytes / bandwidth)

    A product too small to fill the SMs is also cut along `inputs` (split-K), and then pays to add up the parts. The
    library is taken to choose the cheapest of its tile widths and of 1, 2, 4, 8 or 16 parts.
    """

    chip: Chip
    bytes_per_element: float = 2.0
    name: str = "matrix product"
    columns: tuple[str, ...] = ("tokens", "outputs", "inputs")
    dense: int | None = 0

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return overhead, efficiencies of memory and compute, sharpness, wholeness of waves, cost of adding up.

        A pull of 0.05 weighs a factor of e like one row that is 5 % off.
        """
        return np.array([np.log(2e-6), np.log(0.8), np.log(0.75), np.log(2.0), 1.0, np.log(2.0)]), np.array(
            [0.02, 0.05, 0.05, 0.05, 0.05, 0.05]
        )

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each (tokens, outputs, inputs)."""
        overhead_s, stream, compute, adding = np.exp(parameters[[0, 1, 2, 5]])
        whole = 1.0 / (1.0 + np.exp(-parameters[4]))
        tokens, outputs, inputs = points.T
        moved = inputs * outputs + tokens * (inputs + outputs)
        memory_s = self.bytes_per_element * moved / (self.chip.bytes_per_s * stream)
        partial_s = 4.0 * tokens * outputs * adding / self.chip.bytes_per_s  # sums are kept at 4 bytes
        compute_s = np.full(len(points), np.inf)
        for columns in self.chip.tile_columns:
            for parts in _PARTS:
                one_s = self._filled_s(points, columns, parts, whole) / compute
                compute_s = np.minimum(compute_s, one_s + (parts * partial_s if parts > 1 else 0.0))
        return overhead_s + soft_max(compute_s, memory_s, _sharpness(parameters[3]))

    def _filled_s(self, points: Array, columns: int, parts: int, whole: float) -> Array:
        """Return the time [s] at the peak when tiles of one width, cut in `parts` along the inputs, run in waves."""
        tokens, outputs, inputs = points.T
        rows = self._rows(tokens)
        blocks = np.ceil(tokens / rows) * np.ceil(outputs / columns) * parts
        work = 2.0 * rows * columns * inputs * _WIDTH_EFFICIENCY.get(columns, 1.0) / parts
        if self.chip.sms is None:
            return np.asarray(blocks * work / self.chip.flop_per_s)
        return _waves(blocks, self.chip.sms, whole) * work / (self.chip.flop_per_s / self.chip.sms)

    def _rows(self, tokens: Array) -> Array:
        """Return the height of the tiles, (n,): the first that covers all tokens, else the largest."""
        heights = np.array(self.chip.tile_rows, dtype=float)
        return heights[np.minimum(np.searchsorted(heights, tokens), len(heights) - 1)]


_PARTS = (1, 2, 4, 8, 16)
_WIDTH_EFFICIENCY = {128: 1.05, 64: 1.25}
"""What the work of a narrower tile costs beside that of one 256 wide: it loads more per product."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """An operator that only moves data: norm, activation, addition, point-to-point or collective transfer.

    softmax_q(latency, amount / rate)
    """

    name: str = "data movement"
    columns: tuple[str, ...] = ("bytes",)
    dense: int | None = 0

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return latency, time per unit and sharpness, as the smallest and the largest rows suggest."""
        amount = points[:, 0]
        return np.array(
            [np.log(time_s[amount.argmin()]), np.log(time_s[amount.argmax()] / amount.max()), np.log(1.0)]
        ), np.array([0.02, 0.02, 0.05])

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each amount."""
        latency_s, per_unit_s = np.exp(parameters[:2])
        amount = points[:, 0]
        return soft_max(np.full(len(amount), latency_s), per_unit_s * amount, _sharpness(parameters[2]))


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer whose library switches protocol: one that starts fast, one that streams fast (NCCL: LL, Simple).

    min(latency + bytes / slow, latency + switch + bytes / fast)
    """

    name: str = "transfer with two protocols"
    columns: tuple[str, ...] = ("bytes",)
    dense: int | None = 0

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return latency, the second protocol's extra, time per byte of the second, and the first's share more."""
        amount = points[:, 0]
        latency_s, largest_s = time_s[amount.argmin()], time_s[amount.argmax()]
        return np.log([latency_s, latency_s, largest_s / amount.max(), 1.0]), np.array([0.02, 0.05, 0.02, 0.05])

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each size [bytes]."""
        latency_s, switch_s, fast, slower = np.exp(parameters)
        amount = points[:, 0]
        return latency_s + np.minimum(fast * (1.0 + slower) * amount, switch_s + fast * amount)


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer as a plan needs it, two numbers: fixed + bytes / bandwidth."""

    name: str = "link"
    columns: tuple[str, ...] = ("bytes",)
    dense: int | None = None

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return the fixed time and the time per byte, as the smallest and the largest rows suggest."""
        amount = points[:, 0]
        first = [time_s[amount.argmin()], time_s[amount.argmax()] / amount.max()]
        return np.log(first), np.full(2, 0.01)

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each size [bytes]."""
        fixed_s, per_byte_s = np.exp(parameters)
        return np.asarray(fixed_s + per_byte_s * points[:, 0])


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of `batch` requests, each `new` tokens over `cached` ones of its own.

        overhead + softmax_q(KV bytes / bandwidth, waves x (fixed + per_token x tokens attended))

    One block of threads per request, KV head and tile of queries; it walks along the KV tokens. `split`: a batch too
    small to fill the slots has its KV tokens dealt over several blocks (FlashInfer, FlashDecoding), so that half the
    blocks take half the time; else a single block takes all of its walk.
    """

    chip: Chip
    blocks_per_sm: int = 2
    split: bool = True
    query_rows: int = 64
    bytes_per_element: float = 2.0
    columns: tuple[str, ...] = ("batch", "new", "cached", "heads", "kv_heads", "head_dim")
    dense: int | None = None

    @property
    def name(self) -> str:
        """What to call it in a report."""
        split = ", split along KV" if self.split else ""
        return f"attention, {self.query_rows} queries per block, {self.blocks_per_sm} blocks per SM{split}"

    def start(self, points: Array, time_s: Array) -> tuple[Array, Array]:
        """Return overhead, memory efficiency, a block's fixed time, its time per KV token, and sharpness."""
        return np.array([np.log(5e-6), np.log(0.8), np.log(5e-6), np.log(2e-8), np.log(2.0)]), np.full(5, 0.02)

    def time_s(self, parameters: Array, points: Array) -> Array:
        """Return the time [s] of each (batch, new, cached, heads, kv_heads, head_dim)."""
        overhead_s, stream, fixed_s, per_token_s = np.exp(parameters[:4])
        batch, new, cached, heads, kv_heads, head_dim = points.T
        memory_s = self._bytes(points) / (self.chip.bytes_per_s * stream)
        tiles = np.ceil(new * heads / kv_heads / self.query_rows)
        blocks = batch * kv_heads * tiles
        attended = cached + (new + 1.0) / 2.0  # causal: the average over the queries
        walk_s = per_token_s * attended * head_dim / 128.0
        slots = self.chip.sms * self.blocks_per_sm if self.chip.sms else None
        share = np.minimum(1.0, blocks / slots) if self.split and slots else 1.0
        busy_s = _waves(blocks, slots) * (fixed_s + share * walk_s) if slots else blocks * (fixed_s + walk_s)
        return overhead_s + soft_max(memory_s, busy_s, _sharpness(parameters[4]))

    def _bytes(self, points: Array) -> Array:
        """Return the bytes [B] moved: keys and values once, queries and outputs once."""
        batch, new, cached, heads, kv_heads, head_dim = points.T
        return np.asarray(self.bytes_per_element * 2.0 * batch * head_dim * ((new + cached) * kv_heads + new * heads))


def attention_families(chip: Chip) -> tuple[Attention, ...]:
    """Return the ways in which kernels are known to deal the work over SMs; measurements tell which it is."""
    return tuple(
        Attention(chip, per_sm, split, rows) for rows in (64, 128) for split in (True, False) for per_sm in (1, 2)
    )
