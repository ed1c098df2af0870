"""Weights out of a GGUF file, under the names and in the order that Hugging Face checkpoints have."""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, dequantize, get_tensor_name_map
from numpy.typing import NDArray

from runtime.gguf_file import GgufFile
from runtime.model_config import ModelConfig
from runtime.part import bounds, check_shape

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_VALUES_AT_A_TIME = 2**22
_PERMUTED = re.compile(r"\.self_attn\.([qk])_proj\.")


class GgufWeights:
    """`Weights` of a GGUF file. Only the blocks that the asked part lies in are read and expanded.

    Two things differ from a checkpoint: the experts of a layer are stacked in one tensor, and in files of the llama
    architecture the rows of each head's q and k are dealt out for rotating neighbours instead of halves.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, dtype: torch.dtype):
        self._file, self._config, self._dtype = file, config, dtype

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._file, self._config, self._dtype)

    @cached_property
    def _names(self) -> TensorNameMap:
        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        return get_tensor_name_map(kinds[self._file.metadata["general.architecture"]], self._config.layers)

    def __contains__(self, name: str) -> bool:
        """Return True when there is a tensor of that name."""
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None when there is none of that name."""
        found = self._find(name)
        if found is None:
            return None
        stored, expert = found
        shape = self._file.tensors[stored].shape
        return shape if expert is None else shape[1:]

    def take(self, name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        """Return `part` of tensor `name` in the engine's type. Raises InputError that names the tensor."""
        found = self._find(name)
        if found is None:
            raise self._file.fault(f"there is no tensor {name}")
        stored, expert = found
        check_shape(self._file.path, name, shape, self.shape(name) or ())
        rows, *columns = bounds(shape, part)
        if not columns:  # a bias or a norm: one stored row, which may be permuted as the rows of its matrix are
            whole = self._expand(stored, slice(0, 1), slice(0, shape[0]))[0]
            return torch.from_numpy(whole[self._order(name, shape)[rows]]).to(self._dtype)
        order = self._order(name, shape)[rows] + (expert or 0) * shape[0]
        return self._gathered(stored, order, columns[0])

    def _gathered(self, stored: str, rows: NDArray[np.int64], columns: slice) -> torch.Tensor:
        """Return the stored `rows`, a few at a time: a whole embedding in float32 may not fit beside its copy."""
        width = columns.stop - columns.start
        result = torch.empty((len(rows), width), dtype=self._dtype)
        step = max(1, _VALUES_AT_A_TIME // max(1, width))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            result[start : start + step] = torch.from_numpy(self._expand(stored, piece, columns))
        return result

    def _find(self, name: str) -> tuple[str, int | None] | None:
        """Return the tensor in the file that holds `name`, and which expert of it; None where there is none."""
        expert = _EXPERT.search(name)
        bare, _, kind = _EXPERT.sub(".experts.", name).rpartition(".")
        stored = f"{self._names.get_name(bare)}.{kind}"
        if stored not in self._file.tensors:
            return None
        tensor, index = self._file.tensors[stored], int(expert[1]) if expert else None
        if index is not None and (len(tensor.shape) < 2 or index >= tensor.shape[0]):
            return None
        return stored, index

    def _order(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the stored row of each row of `name`."""
        order = np.arange(shape[0])
        turned = _PERMUTED.search(name)
        if not turned or self._file.metadata["general.architecture"] != "llama":
            return order
        heads = self._config.heads if turned[1] == "q" else self._config.kv_heads
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _expand(self, stored: str, rows: slice | NDArray[np.int64], columns: slice) -> NDArray[np.float32]:
        """Return [rows, columns] of a tensor as float32: whole blocks are expanded, then cut."""
        tensor = self._file.tensors[stored]
        values, size = tensor.block
        first, last = columns.start // values, -(-columns.stop // values)
        blocks = np.ascontiguousarray(self._file.rows(stored)[rows, first * size : last * size])
        if blocks.size == 0:
            return np.zeros((blocks.shape[0], columns.stop - columns.start), np.float32)
        expanded = dequantize(blocks, tensor.kind)
        return expanded[:, columns.start - first * values : columns.stop - first * values]
