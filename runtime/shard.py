"""Which part of a model one rank holds, and how its ranks add up what each has a share of.

Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019, section 3): the first matrix of a block is cut by output,
the second by input, and one sum over the ranks ends the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.specs.layout import split_layers
from runtime.model_config import ModelConfig
from runtime.shared_sum import MOST_BYTES, SharedSum


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel rank `tp_rank` of `tp`, in the pipeline stage that holds `layers`."""

    layers: range
    all_layers: int
    tp: int = 1
    tp_rank: int = 0
    group: Any = None
    """The process group of the stage's ranks; None when there is one."""
    rank: int = 0
    """Among all ranks of the instance."""
    shared: SharedSum | None = None
    """Adds up small results faster than the group does, where it can."""

    @property
    def first(self) -> bool:
        """Return True for the stage that looks up token ids."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Return True for the stage that turns hidden states into logits."""
        return self.layers.stop == self.all_layers

    def cut(self, width: int) -> slice:
        """Return this rank's part of `width` outputs or inputs, as even as can be."""
        base, extra = divmod(width, self.tp)
        start = self.tp_rank * base + min(self.tp_rank, extra)
        return slice(start, start + base + (self.tp_rank < extra))

    def heads(self, config: ModelConfig) -> slice:
        """Return this rank's query heads."""
        return self.cut(config.heads)

    def kv_heads(self, config: ModelConfig) -> slice:
        """Return this rank's KV heads. With fewer heads than ranks, neighbours hold a copy of the same one."""
        if config.kv_heads >= self.tp:
            return self.cut(config.kv_heads)
        start = self.tp_rank * config.kv_heads // self.tp
        return slice(start, start + 1)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' `partial` results, made in place."""
        if self.shared is not None and partial.nbytes <= MOST_BYTES:
            return self.shared(partial)
        if self.group is not None:
            dist.all_reduce(partial, group=self.group)
        return partial

    def gather(self, mine: torch.Tensor, width: int) -> torch.Tensor:
        """Return [rows, width] out of each rank's part of the columns, on every rank. Uneven parts are padded."""
        if self.group is None:
            return mine
        most = -(-width // self.tp)
        padded = torch.nn.functional.pad(mine, (0, most - mine.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.tp)]
        dist.all_gather(parts, padded, group=self.group)
        widths = [width // self.tp + (rank < width % self.tp) for rank in range(self.tp)]
        return torch.cat([part[:, :kept] for part, kept in zip(parts, widths, strict=True)], 1)


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise InputError when the heads cannot be dealt to `tp` ranks."""
    if not _divides(config, tp):
        legal = ", ".join(str(degree) for degree in range(1, config.heads + 1) if _divides(config, degree))
        raise InputError(
            f"tp: {tp} ranks cannot share {config.heads} heads and {config.kv_heads} KV heads evenly; use {legal}"
        )


def _divides(config: ModelConfig, tp: int) -> bool:
    return config.heads % tp == 0 and (config.kv_heads % tp == 0 or tp % config.kv_heads == 0)


def stages(config: ModelConfig, pp: int, sizes: Sequence[int] | None = None) -> tuple[range, ...]:
    """Return the layers of each pipeline stage: of the given `sizes`, or as even as can be."""
    if pp > config.layers:
        raise InputError(f"pp: {pp} stages are more than the {config.layers} layers of the model")
    sizes = tuple(sizes or split_layers(config.layers, pp))
    if len(sizes) != pp or sum(sizes) != config.layers or min(sizes) < 1:
        raise InputError(f"stage_layers: expected {pp} counts that add up to {config.layers} layers, got {sizes}")
    return tuple(range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(pp))
