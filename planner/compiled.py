"""One decorator for everything that runs compiled: `@compiled` is numba's njit with a cache that cannot go stale.

Numba keys its cache on the decorated function's own file, so an edit in a callee elsewhere would go unnoticed, and it
writes beside the source, which fails in a read-only install. Ours lives in the user's cache folder under the digest of
all compiled sources: any edit starts a new folder. `GOODPUT_CACHE_DIR` moves it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types

_SOURCES = ("compiled.py", "cost/kernel.py", "policies/*.py", "simulator/*.py")


@cache
def cache_folder() -> Path:
    """Return the folder that holds the compiled code of exactly these sources."""
    package = Path(__file__).parent
    return folder_of(path for pattern in _SOURCES for path in sorted(package.glob(pattern)))


def folder_of(sources: Iterable[Path]) -> Path:
    """Return the folder that holds the compiled code of exactly `sources`."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sources:
        digest.update(path.read_bytes())
    root = os.environ.get("GOODPUT_CACHE_DIR") or Path.home() / ".cache" / "goodput-planner"
    return Path(root) / digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """Return `function` compiled on first call, and loaded from the cache from then on."""
    return _one_variant(compiled_in(cache_folder(), function))


def compiled_in(folder: Path, function: Callable[..., Any], *signature: Any, **options: Any) -> Any:
    """Return `function` compiled, its code kept in `folder`: at once where there is a signature, else on first call."""
    config: Any = numba.config
    njit: Any = numba.njit
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(folder)
        return njit(*signature, cache=True, **options)(function)
    finally:
        config.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Any:
    """Return `function` for use inside compiled code only: no wrapper for Python is made, nor a cache of its own.

    The outermost function's cache holds it all; with wrappers for each, compiling took twice as long. Such a function
    must not allocate, nor keep an array beyond its call: references are not counted here, because counting those of
    each array at each call took five sixths of the simulator's time.
    """
    options: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True, "_nrt": False}
    return _one_variant(numba.njit(**options)(function))


def _one_variant(dispatcher: Any) -> Any:
    """Return the dispatcher without a variant per constant argument: `f(x, 0)` and `f(x, n)` share their code."""
    resolve = dispatcher.get_call_template

    def without_literals(args: Any, kws: Any) -> Any:
        plain = {name: types.unliteral(kind) for name, kind in kws.items()}
        return resolve([types.unliteral(kind) for kind in args], plain)

    dispatcher.get_call_template = without_literals
    return dispatcher
