"""What all sources of weights check alike: a tensor's shape, and the part of it that is asked for."""

from __future__ import annotations

from pathlib import Path

from planner.errors import Fault, InputError


def check_shape(file: str | Path, name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Raise InputError that names the tensor and the file when its shape is not that which the model's config means."""
    if tuple(found) != tuple(expected):
        message = f"tensor {name}: the model's config means {list(expected)}, the file holds {list(found)}"
        raise InputError(Fault(message, str(file)))


def bounds(shape: tuple[int, ...], part: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return one slice per dimension with its start and stop filled in; a part without an end is the whole."""
    assert len(part) <= len(shape) and all(piece.step in (None, 1) for piece in part)
    full = part + (slice(None),) * (len(shape) - len(part))
    return tuple(slice(*piece.indices(size)[:2]) for piece, size in zip(full, shape, strict=True))
