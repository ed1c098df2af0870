"""Weights out of a Hugging Face directory: one safetensors file, or shards under an index."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from planner.errors import Fault, InputError
from runtime.json_file import read_json
from runtime.part import bounds, check_shape

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = ("BF16", "F16", "F32", "F64")


class SafetensorsWeights:
    """`Weights` of a directory. Files are mapped when first asked, and only the asked part of a tensor is read."""

    def __init__(self, folder: str | Path, dtype: torch.dtype):
        self._folder, self._dtype = Path(folder), dtype
        self._open: dict[str, Any] = {}

    def __reduce__(self) -> tuple[object, ...]:  # a rank that gets a pickle opens the files itself
        return type(self), (self._folder, self._dtype)

    @cached_property
    def files(self) -> dict[str, str]:
        """Return the file of each tensor. Raises InputError when there is none, or an index names what is not there."""
        if (self._folder / _INDEX).is_file():
            return self._indexed()
        if (self._folder / _SINGLE).is_file():
            return dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        raise InputError(Fault(self._way_out(), str(self._folder)))

    def _way_out(self) -> str:
        torch_files = sorted(path.name for path in self._folder.glob("*.bin"))
        why = f"; {torch_files[0]} is a pickle: convert it to safetensors" if torch_files else ""
        return f"expected {_SINGLE} or {_INDEX}{why}"

    def _indexed(self) -> dict[str, str]:
        path = self._folder / _INDEX
        table = read_json(path).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise InputError(Fault("expected a weight_map of tensor names and file names", str(path)))
        outside = [file for file in table.values() if Path(file).name != file]
        missing = [file for file in dict.fromkeys(table.values()) if not (self._folder / file).is_file()]
        if outside or missing:
            what = f"the shard {(outside + missing)[0]!r} is not in the folder"
            more = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
            raise InputError(Fault(what + more, str(path)))
        return table

    def __contains__(self, name: str) -> bool:
        """Return True when there is a tensor of that name."""
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None when there is none of that name."""
        return tuple(self._slice(name).get_shape()) if name in self.files else None

    def take(self, name: str, shape: tuple[int, ...], *part: slice) -> torch.Tensor:
        """Return `part` of tensor `name` in the engine's type. Raises InputError that names the tensor."""
        tensor = self._slice(name)
        path = self._folder / self.files[name]
        check_shape(path, name, shape, tuple(tensor.get_shape()))
        values: torch.Tensor = tensor[bounds(shape, part)]
        return values.to(self._dtype).contiguous()

    def _slice(self, name: str) -> Any:
        if name not in self.files:
            raise InputError(Fault(f"there is no tensor {name}", str(self._folder)))
        try:
            found = self._file(self.files[name]).get_slice(name)
        except SafetensorError:
            message = f"tensor {name} is not in {self.files[name]}, where the index has it"
            raise InputError(Fault(message, str(self._folder / _INDEX))) from None
        if found.get_dtype() not in _TYPES:
            message = f"tensor {name}: expected one of {', '.join(_TYPES)}, got {found.get_dtype()}"
            raise InputError(
                Fault(f"{message}; quantised weights are not supported", str(self._folder / self.files[name]))
            )
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(Fault(f"no sound safetensors file: {_one_line(error)}", str(path))) from None
        return self._open[name]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
