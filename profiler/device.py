"""The device as a `Gpu`: a preset where one is of this kind, else its memory and the best rates that it showed here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner.cost import physics
from planner.specs.base import load_preset, preset_names, validate
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Sample
from profiler.environment import device_name

_BEST_OF = 7
_MATRIX = 1536
_COPY_BYTES = 256 * 2**20
_ABOVE = 1.05
"""A peak is put this much above the fastest row that was seen: a fit must not run against it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The best that a device showed in a second or two of plain products and copies."""

    flop_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float


def preset_gpu(device: str) -> Gpu | None:
    """Return the shipped GPU type that this device is of; None for a processor or a type that is not shipped."""
    if not device.startswith("cuda"):
        return None
    name = re.sub(r"^NVIDIA\s+", "", device_name(device))
    gpus = [validate(Gpu, found) for each in preset_names("gpus") if (found := load_preset("gpus", each)) is not None]
    exact = next((gpu for gpu in gpus if gpu.is_called(name) or gpu.is_called(name.replace(" ", "-"))), None)
    return exact or next((gpu for gpu in gpus if _names_it(gpu, name)), None)


def _names_it(gpu: Gpu, name: str) -> bool:
    """True when the words of the preset's name are all in the driver's, memory size included where it has one."""
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+gb", gpu.name.lower())
    return all(word in name.lower().replace(" ", "").replace("-", "") for word in words)


def rates(device: str, dtype: str, threads: int) -> Rates:
    """Return the best rates seen in a few matrix products, reads and copies to the host; takes a second or two."""
    import torch

    kind, place = getattr(torch, dtype), torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            a = torch.randn(_MATRIX, _MATRIX, device=place).to(kind)
            flop_per_s = 2 * _MATRIX**3 / _best_s(lambda: a @ a, place)
            values = torch.ones(_COPY_BYTES // 4, device=place)
            bytes_per_s = _COPY_BYTES / _best_s(values.sum, place)
            host = torch.empty(values.shape, pin_memory=place.type == "cuda")
            host_bytes_per_s = _COPY_BYTES / _best_s(lambda: host.copy_(values), place)
    finally:
        torch.set_num_threads(before)
    return Rates(flop_per_s, bytes_per_s, host_bytes_per_s)


def _best_s(run: Callable[[], object], place: object) -> float:
    """Return the shortest of a few runs [s]: others on the machine can only make one longer."""
    import torch

    best = float("inf")
    for _ in range(_BEST_OF):
        before = time.perf_counter()
        run()
        if getattr(place, "type", "") == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - before)
    return best


CORE = "cpu-core"
"""What a device is called that is one core of a processor: as in the cluster `localhost-cpu`."""


def measured_gpu(device: str, found: Rates, cores: tuple[int, int] = (1, 1)) -> Gpu:
    """Return the device as a `Gpu`, with the rates that it showed in place of a data sheet's.

    cores: of a processor, how many the device has, and how many there are: its memory is that share of all.
    """
    name, share = _clean(device_name(device)), min(1.0, cores[0] / cores[1])
    core = cores[0] == 1 < cores[1] and not device.startswith("cuda")
    return Gpu(
        name=CORE if core else name,
        aliases=(name,) if core else (),
        memory_bytes=round(memory_bytes(device) * share),
        memory_bytes_per_s=found.bytes_per_s,
        fp16_flop_per_s=max(found.flop_per_s, 1e9),
        host_bytes_per_s=found.host_bytes_per_s,
        source="the best rates that the profiler saw on this device, raised where a step was faster",
    )


def memory_bytes(device: str) -> int:
    """Return the bytes of memory that the device has in all."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raised(gpu: Gpu, model: ModelSpec, rows: Iterable[Sample]) -> Gpu:
    """Return `gpu` with peaks that no row beats: a step that was faster shows what the device can do.

    A model that fits a processor's cache reads its weights faster than memory could.
    """
    flops, read = 1.0, 1.0
    for row in rows:
        if row.phase == "prefill":
            shape = (row.batch, row.prompt_tokens, row.cached_tokens)
            flops = max(flops, physics.prefill_floor_s(model, gpu, row.tp, shape) / row.time_s * _ABOVE)
        else:
            floor_s = physics.decode_floor_s(model, gpu, row.tp, row.batch, row.context_tokens)
            read = max(read, floor_s / row.time_s * _ABOVE)
    raises = {
        "fp16_flop_per_s": gpu.fp16_flop_per_s * flops,
        "memory_bytes_per_s": gpu.memory_bytes_per_s * read,
    }
    return gpu.model_copy(update=raises)


def _clean(name: str) -> str:
    """Return a device's name as the files want names."""
    return re.sub(r"[^a-z0-9._+]+", "-", name.lower()).strip("-.") or "device"
