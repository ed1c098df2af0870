"""The profiler output of NVIDIA Dynamo: `.npz` files of TTFT over prompt length and of ITL over KV use and
context.

TTFT and ITL are in ms and end to end, so they hold the server's own overheads. A decode point gives
throughput and ITL of a full server; their product is the number of requests that really decoded at a time
(Little's law), where the one that the KV use implies also counts requests that wait for a slot.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from planner.errors import Fault, InputError
from planner.sources.tables import seconds, slug
from planner.specs.profile import KvTokens, Profile, Provenance, Sample, Samples

PREFILL = ("prefill_isl", "prefill_ttft")
DECODE = ("x_kv_usage", "y_context_length", "z_itl", "max_kv_tokens")
_WAITED = 0.1


def load(path: str | Path, model: str, gpu: str, tp: int = 1, engine: str = "vLLM", dtype: str = "unstated") -> Profile:
    """Return the profile in one `.npz` file, or in all those of a folder. The files do not name model and
    GPU.

    Raises InputError when arrays are missing, of unequal length, or not positive numbers.
    """
    arrays = _arrays(path)
    prefill, decode = _prefill(path, arrays, tp), _decode(path, arrays, tp)
    if not prefill and not decode:
        raise InputError(Fault(f"expected {', '.join(PREFILL)} or {', '.join(DECODE)}", str(path)))
    kept = [sample for sample, waited in decode if not waited]
    notes = ["TTFT and ITL end to end, server overheads included"]
    if left := len(decode) - len(kept):
        notes.append(f"left out {left} of {len(decode)} decode points: more requests held KV than decoded")
    capacity = arrays.get("max_kv_tokens")
    return Profile(
        name=slug("dynamo", model, gpu),
        model=model,
        gpu=gpu,
        engine=engine,
        dtype=dtype,
        provenance=Provenance(
            method="measured",
            source="ai-dynamo profiler results",
            url="https://github.com/ai-dynamo/dynamo",
            licence="Apache-2.0",
            notes=tuple(notes),
        ),
        samples=Samples.of([*prefill, *kept]),
        kv_tokens=(KvTokens(tp=tp, tokens=int(capacity[0])),) if capacity is not None else (),
    )


def _arrays(path: str | Path) -> dict[str, np.ndarray]:
    path = Path(path)
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InputError(Fault("no .npz file in this folder", str(path)))
    found: dict[str, np.ndarray] = {}
    for file in files:
        for key, values in _load(file).items():
            if key in found:
                raise InputError(Fault(f"{key} stands in more than one file of the folder", str(file)))
            found[key] = values
    return found


def _load(file: Path) -> dict[str, np.ndarray]:
    try:
        content = io.BytesIO(file.read_bytes())  # numpy leaves a broken file open
        with np.load(content, allow_pickle=False) as data:  # pickles run code
            return {key: np.asarray(data[key], dtype=float).ravel() for key in data.files}
    except FileNotFoundError:
        raise InputError(Fault("no such file", str(file))) from None
    except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(Fault(f"not a plain .npz file of numbers: {error}", str(file))) from None


def _columns(path: str | Path, arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> list[np.ndarray] | None:
    """Return the named arrays, of one length and positive; None when none of them is there."""
    there = [name for name in names if name in arrays]
    if not there:
        return None
    if missing := [name for name in names if name not in arrays]:
        raise InputError(Fault(f"{', '.join(missing)} missing beside {', '.join(there)}", str(path)))
    columns = [arrays[name] for name in names]
    if len({len(column) for column in columns}) != 1 or not len(columns[0]):
        raise InputError(Fault(f"{', '.join(names)}: expected one length, at least 1", str(path)))
    for name, column in zip(names, columns, strict=True):
        if not ((column > 0) & (column <= 1e9)).all():
            raise InputError(Fault(f"{name}: expected numbers above 0 and up to 1e9", str(path)))
    return columns


def _prefill(path: str | Path, arrays: dict[str, np.ndarray], tp: int) -> list[Sample]:
    columns = _columns(path, arrays, PREFILL)
    if columns is None:
        return []
    return [
        Sample("prefill", tp, 1, 1, max(1, round(length)), 0, 0, seconds(ttft / 1e3))
        for length, ttft in zip(*columns, strict=True)
    ]


def _decode(path: str | Path, arrays: dict[str, np.ndarray], tp: int) -> list[tuple[Sample, bool]]:
    """Return each point, and whether it had requests that held KV and waited."""
    capacity = _columns(path, arrays, DECODE[3:])
    columns = _columns(path, arrays, DECODE[:3])
    if columns is None:
        return []
    if capacity is None:
        raise InputError(Fault(f"{DECODE[3]} missing beside {', '.join(DECODE[:3])}", str(path)))
    usage, context, itl = columns
    holding = usage * capacity[0][0] / context
    decoding = holding
    if "z_thpt_per_gpu" in arrays:
        (throughput,) = _columns(path, arrays, ("z_thpt_per_gpu",)) or [holding]
        if len(throughput) != len(itl):
            raise InputError(Fault("z_thpt_per_gpu: expected as many numbers as z_itl", str(path)))
        decoding = throughput * tp * itl / 1e3
    return [
        (
            Sample("decode", tp, 1, max(1, round(b)), 0, 0, max(1, round(k)), seconds(t / 1e3)),
            h > b * (1 + _WAITED) + 0.5,
        )
        for b, h, k, t in zip(decoding, holding, context, itl, strict=True)
    ]
