"""What compiled code of the runtime shares: the decorator, threads, number types, e^x.

Kernels are compiled for explicit types when they are first asked for, and kept in the user's cache folder under the
digest of all their sources (`planner.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from planner.compiled import compiled_in, folder_of

# Threads of OpenMP, as torch's: numba's own pool sleeps between calls, and waking it took as long as the work.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # type: ignore[attr-defined]

NUMBERS = {torch.float32: types.float32, torch.bfloat16: types.uint16}
"""How compiled code sees them: numba has no bfloat16, which is the upper half of a float32."""

LOOSE = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, which vectors need; infinities and NaN keep their meaning."""

INSIDE: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "_nrt": False,  # counting references to arrays would cost more than the arithmetic
    "fastmath": LOOSE,
}
"""Options of functions that are called by compiled ones alone."""

_SOURCES = ("compiled.py", "attention/paged_numba.py", "attention/tiles.py", "layers/fused.py")
_F32 = np.float32
_SHARE = 1 << 16
"""Numbers that are worth waking one more thread for."""


@cache
def _folder() -> Path:
    runtime = Path(__file__).parent
    return folder_of([Path(compiled_in.__code__.co_filename), *(runtime / source for source in _SOURCES)])


def compiled(function: Callable[..., Any], signature: Any) -> Any:
    """Return `function` compiled for `signature`, or loaded from the cache; its `prange` is shared by threads.

    The signature matters: left to itself numba compiles anew, in the midst of serving, for each layout of strides.
    """
    threads = torch.get_num_threads()
    kernel = compiled_in(_folder(), function, signature, parallel=True, fastmath=LOOSE, error_model="numpy")
    torch.set_num_threads(threads)  # where both share one OpenMP, numba has set it to all cores
    return kernel


def use_threads(values: int) -> int:
    """Return how many threads the next kernel has: as torch, unless `values` numbers are not worth waking so many."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, 1 + values // _SHARE)  # type: ignore[attr-defined]
    numba.set_num_threads(threads)  # of the calling thread: asked anew each time
    return threads


def numbers(tensor: Tensor) -> Any:
    """Return a float32 or bfloat16 tensor as the array, over the same memory, that compiled code takes."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


# ---- for use in compiled code


def to_float(number: Any) -> Any:
    """Return a number of the KV cache as a float32."""


def store(array: Any, head: Any, at: Any, value: Any) -> Any:
    """Put a float32 into array[head, at], of the KV cache's type."""


@overload(to_float, inline="always", strict=False)
def _to_float(number: Any) -> Any:
    if number is types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


@overload(store, inline="always", strict=False)
def _store(array: Any, head: Any, at: Any, value: Any) -> Any:
    if array.dtype is not types.uint16:

        def put(array: Any, head: Any, at: Any, value: Any) -> None:
            array[head, at] = value
    else:

        def put(array: Any, head: Any, at: Any, value: Any) -> None:
            bits = np.float32(value).view(np.uint32)
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to the nearest, ties to even
            number = np.uint32(value == value)  # noqa: PLR0124 - 0 for NaN, which would become something else
            array[head, at] = np.uint16((bits + half * number) >> np.uint32(16))

    return put


@numba.njit(**INSIDE)
def exp(x: Any) -> Any:
    """Return e^x for x <= 0, to 2 units in the last place; below -87 the smallest normal number.

    Cephes' expf: 2^n times a polynomial on half an octave. The library's takes one number at a time, and ten times as
    long.
    """
    x = max(x, _F32(-87.0))
    n = np.int32(x * _F32(1.44269504) - _F32(0.5))
    r = x - _F32(n) * _F32(0.693359375) + _F32(n) * _F32(2.12194440e-4)
    p = _F32(1.9875691500e-4)
    p = p * r + _F32(1.3981999507e-3)
    p = p * r + _F32(8.3334519073e-3)
    p = p * r + _F32(4.1665795894e-2)
    p = p * r + _F32(1.6666665459e-1)
    p = p * r + _F32(5.0000001201e-1)
    return (p * r * r + r + _F32(1)) * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)
