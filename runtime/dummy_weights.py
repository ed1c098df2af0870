"""Random weights of a configuration, for profiling a layout before the real ones are at hand."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from planner.errors import InputError
from runtime.model_config import ModelConfig
from runtime.part import bounds, check_shape
from runtime.tensor_shapes import tensor_shapes

_PERIOD = 4_194_301
"""Values drawn: a prime, so that the rows of a matrix begin at different ones and no two are alike."""
_NORMS = ("norm.weight", "layernorm.weight", "layer_norm.weight")


class DummyWeights:
    """`Weights` cut out of one block of normal values that repeats without end.

    Value i of a tensor is number (i + a hash of its name) of the block, so a part is the same whoever takes it, and
    taking it is a copy. A matrix is scaled by 1 / sqrt(inputs), which keeps the size of what it is multiplied with:
    activations neither vanish nor overflow, in any type and depth. Norms are ones.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int = 0):
        self._config, self._dtype, self._seed = config, dtype, seed
        self._shapes = dict(tensor_shapes(config))
        self._blocks: dict[int, torch.Tensor] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._config, self._dtype, self._seed)

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        return np.random.default_rng(self._seed).standard_normal(_PERIOD, dtype=np.float32)

    def _block(self, width: int) -> torch.Tensor:
        """Return the values, scaled for rows of `width`, and after them the first `width` again."""
        if width not in self._blocks:
            repeated = np.resize(self._values / math.sqrt(width), _PERIOD + width)
            self._blocks[width] = torch.from_numpy(repeated).to(self._dtype)
        return self._blocks[width]

    def __contains__(self, name: str) -> bool:
        """Return True when the configuration means a tensor of that name."""
        return name in self._shapes

    def take(self, name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        """Return `part` of tensor `name` in the engine's type. Raises InputError that names the tensor."""
        if name not in self._shapes:
            raise InputError(f"the model's config means no tensor {name}")
        check_shape("dummy weights", name, shape, self._shapes[name])
        pieces = bounds(shape, part)
        sizes = [piece.stop - piece.start for piece in pieces]
        if name.endswith(_NORMS):
            return torch.ones(sizes, dtype=self._dtype)
        result = torch.empty(sizes, dtype=self._dtype)
        if result.numel():
            self._fill(result.view(-1, sizes[-1]), name, shape[-1], pieces)
        return result

    def _fill(self, result: torch.Tensor, name: str, width: int, pieces: tuple[slice, ...]) -> None:
        """Fill [rows, columns] with as few strided copies as the end of the block allows."""
        rows, columns = result.shape
        block = self._block(width)
        start = self._offset(name) + (pieces[0].start * width if len(pieces) > 1 else 0) + pieces[-1].start
        done = 0
        while done < rows:
            at = (start + done * width) % _PERIOD
            count = min(rows - done, 1 + (len(block) - columns - at) // width)
            result[done : done + count] = block.as_strided((count, columns), (width, 1), at)
            done += count

    def _offset(self, name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % _PERIOD
