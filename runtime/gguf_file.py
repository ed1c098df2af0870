"""The header of a GGUF file: its metadata, and where each tensor's blocks lie.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian. Written here although the package
`gguf` has a reader: that one makes a NumPy view of every token and merge (2.8 s for SmolLM2 against 0.1 s, once per
rank), believes the counts it reads, and answers a cut file with an IndexError. What blocks hold is left to `gguf`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from planner.errors import Fault, InputError
from planner.specs.base import short

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = {_STRING: 8} | {kind: struct.calcsize(code) for kind, code in _SCALARS.items()}
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file. `shape` is in PyTorch's order, the reverse of the file's: rows before columns."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    """Bytes from the beginning of the file."""

    @property
    def block(self) -> tuple[int, int]:
        """Return the values of a block, and the bytes that hold them."""
        return GGML_QUANT_SIZES[self.kind]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of its last dimension."""
        values, size = self.block
        return self.shape[-1] // values * size

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole of it."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file whose header has been read and found sound: every tensor lies inside the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def fault(self, message: str) -> InputError:
        """Return the error that says `message` of this file."""
        return InputError(Fault(message, str(self.path)))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the metadata under `key`, of type `kind`, or `default`. Raises InputError for another type."""
        value = self.metadata.get(key, default)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.fault(f"{key}: expected {_name(kind)}, got {short(value)}")
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the metadata under `key`. Raises InputError when there is none, or one of another type."""
        if key not in self.metadata:
            raise self.fault(f"the metadata lack {key}")
        return self.get(key, kind)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of tensor `name` as [rows, row_bytes], mapped and not read."""
        tensor = self.tensors[name]
        shape = (math.prod(tensor.shape[:-1]), tensor.row_bytes)
        return np.memmap(self.path, np.uint8, "r", tensor.start, shape)


def read_gguf(path: str | Path) -> GgufFile:
    """Return the header of a GGUF file. Raises InputError, of one line, for whatever is not a whole GGUF file."""
    path = Path(path)
    try:
        content: Any = np.memmap(path, np.uint8, "r") if path.stat().st_size else b""
    except FileNotFoundError:
        raise InputError(Fault("no such file", str(path))) from None
    except (OSError, ValueError) as error:
        raise InputError(Fault(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path))) from None
    return _Reader(path, memoryview(content)).file()


class _Reader:
    """Reads forward, and refuses to read past the end or to believe a count that the rest of the file cannot hold."""

    def __init__(self, path: Path, content: memoryview):
        self._path, self._content, self._at = path, content, 0

    def file(self) -> GgufFile:
        self._head()
        tensors = self._count("tensors", least_bytes=32)
        pairs = self._count("metadata", least_bytes=13)
        metadata = dict(self._pairs(pairs))
        infos = dict(self._infos(tensors))
        if len(infos) < tensors:
            raise self._fault(f"corrupt: {tensors} tensors share {len(infos)} names")
        start = self._aligned(metadata.get("general.alignment", 32))
        return GgufFile(self._path, metadata, {name: self._placed(name, start, *info) for name, info in infos.items()})

    def _head(self) -> None:
        if bytes(self._content[:4]) != b"GGUF":
            raise self._fault(f"expected a GGUF file, which begins with GGUF, got {bytes(self._content[:4])!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            why = "big-endian" if version & 0xFFFF == 0 and version else f"version {version}"
            raise self._fault(f"expected a little-endian GGUF of version 2 or 3, got {why}")

    def _pairs(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            key = self._text()
            yield key, self._value(self._scalar("I"), key)

    def _infos(self, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
        for _ in range(count):
            name = self._text()
            dimensions = self._scalar("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._fault(f"tensor {name!r}: expected 1 to {_MOST_DIMENSIONS} dimensions, got {dimensions}")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
            yield name, (shape, self._scalar("I"), self._scalar("Q"))

    def _placed(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        """Return the tensor, once its type is known, its rows are whole blocks and its bytes are in the file."""
        if kind not in _KINDS or not can_dequantise(GGMLQuantizationType(kind)):
            label = GGMLQuantizationType(kind).name if kind in _KINDS else f"number {kind}"
            raise self._fault(f"tensor {name!r}: no way to expand the type {label}; convert the file to another type")
        tensor = GgufTensor(shape, GGMLQuantizationType(kind), start + offset)
        if min(shape) < 1 or shape[-1] % tensor.block[0]:
            raise self._fault(f"tensor {name!r}: {shape} is no whole number of {tensor.kind.name} blocks")
        end = tensor.start + tensor.bytes
        if end > len(self._content):
            raise self._fault(f"cut short: tensor {name!r} ends at byte {end}, the file at {len(self._content)}")
        return tensor

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(self._code(kind, key))

    def _array(self, key: str) -> list[Any]:
        kind = self._scalar("I")
        code = "" if kind == _STRING else self._code(kind, key)
        count = self._count(f"items of {key}", _LEAST_BYTES[kind])
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(code))))

    def _code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._fault(f"{key}: expected a metadata type from 0 to 12 (no list of lists), got {kind}")
        return _SCALARS[kind]

    def _count(self, what: str, least_bytes: int) -> int:
        count, rest = self._scalar("Q"), len(self._content) - self._at
        if count * least_bytes > rest:
            raise self._fault(f"cut short or corrupt: {count} {what} announced, {rest} bytes left")
        return count

    def _text(self) -> str:
        place = self._at
        try:
            return str(self._bytes(self._count("bytes of text", 1)), "utf-8")
        except UnicodeDecodeError:
            raise self._fault(f"corrupt: the text at byte {place} is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize(code)))[0]

    def _bytes(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._content):
            raise self._fault(f"cut short: byte {end} is wanted, the file ends at {len(self._content)}")
        self._at, start = end, self._at
        return self._content[start:end]

    def _aligned(self, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment: expected a power of two, got {short(alignment)}")
        return -(-self._at // alignment) * alignment

    def _fault(self, message: str) -> InputError:
        return InputError(Fault(message, str(self._path)))


_KINDS = {kind.value for kind in GGMLQuantizationType}


@cache
def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Return True when `gguf` expands blocks of this type; of those it does not, some are retired, some integers."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


_NAMES: dict[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}


def _name(kind: type | tuple[type, ...]) -> str:
    return _NAMES[kind[-1] if isinstance(kind, tuple) else kind]
