"""How long a step takes: CUDA events where its kernels run in this process, the monotonic clock elsewhere."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from profiler.preemption import preemptions
from profiler.setting import Setting
from profiler.subject import Subject


class Repeat(NamedTuple):
    """One measurement of a setting."""

    time_s: float
    outside_s: float | None
    """Spent outside of the model, where the engine tells it."""
    disturbed: bool = False
    """True when another process took a processor away meanwhile."""


Timer = Callable[[Callable[[], float | None]], Repeat]


def timer_for(device: str, in_process: bool) -> Timer:
    """Return the timer for steps on `device` ("cpu", "cuda", "cuda:1"); `in_process`: no rank processes in between.

    With rank processes the device's events belong to them, and the clock serves: a step ends when its tokens are here.
    """
    return _cuda_events(device) if device.startswith("cuda") and in_process else wall_clock


def wall_clock(step: Callable[[], float | None]) -> Repeat:
    """Return the time of `step` by the monotonic clock [s]."""
    before = time.perf_counter()
    outside_s = step()
    return Repeat(time.perf_counter() - before, outside_s)


def _cuda_events(device: str) -> Timer:
    """Return a timer whose events lie around the whole step: the stream is idle before, so host work counts too."""
    import torch

    def timed(step: Callable[[], float | None]) -> Repeat:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            start.record()
            outside_s = step()
            end.record()
            end.synchronize()
        return Repeat(start.elapsed_time(end) / 1e3, outside_s)

    return timed


def measure(subject: Subject, setting: Setting, timer: Timer, warm_ups: int, repeats: int, spare: int) -> list[Repeat]:
    """Return `repeats` measurements of a setting after `warm_ups` that do not count, each from the same state.

    Up to `spare` more are made where the machine was taken away meanwhile; undisturbed ones are preferred.
    """
    found: list[Repeat] = []
    with _no_collection():
        for _ in range(warm_ups):
            subject.place(setting)
            subject.step()
        while len(found) < repeats + spare and sum(not each.disturbed for each in found) < repeats:
            subject.place(setting)
            before = preemptions(subject.process_ids)
            repeat = timer(subject.step)
            found.append(repeat._replace(disturbed=preemptions(subject.process_ids) > before))
    return sorted(found, key=lambda each: each.disturbed)[:repeats]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector of garbage out of the measurements; it would stop one step in many for milliseconds."""
    gc.collect(0)
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
