"""Copies of the engine that work on other devices while one is measured, as they will when all of them serve.

Cores of one processor share its memory, its last cache and its clock; how much slower that makes a step, only a busy
neighbour shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.errors import InputError
from planner.specs.layout import Layout
from profiler.setting import Setting
from profiler.subject import Limits, Subject

if TYPE_CHECKING:
    from profiler.cli import Options

_KV_TOKENS = 2**14
"""What a copy has room for: the largest of its steps, many times over, and little of the memory."""
_START_S = 120.0
_PREFILLS = (Setting.prefill(1, 64), Setting.prefill(1, 256), Setting.prefill(2, 128), Setting.prefill(1, 512))
_DECODES = tuple(Setting.decode(batch, context) for batch, context in ((1, 128), (4, 256), (8, 512), (16, 256)))


class Beside(NamedTuple):
    """One copy: what it runs, and on which GPUs or cores."""

    options: Options
    """Of the run, with the devices and threads of this copy."""
    layout: Layout


@contextmanager
def busy(copies: Sequence[Beside]) -> Iterator[None]:
    """Run the body while these copies work. Raises InputError when one does not come up, or ended meanwhile."""
    import torch.multiprocessing as mp

    if not copies:
        yield
        return
    context = mp.get_context("spawn")
    stop = context.Event()
    started = [(context.Event(), copy) for copy in copies]
    processes = [context.Process(target=_work, args=(copy, ready, stop), daemon=False) for ready, copy in started]
    for process in processes:
        process.start()
    try:
        for process, (ready, _) in zip(processes, started, strict=True):
            _await(process, ready)
        yield
        _check(processes)
    finally:
        stop.set()
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def _await(process: Any, ready: Any) -> None:
    deadline = time.monotonic() + _START_S
    while not ready.wait(0.1):
        _check([process])
        if time.monotonic() > deadline:
            raise InputError(
                f"a copy of the engine to run beside is not up after {_START_S:.0f} s; measure without --beside"
            )


def _check(processes: Sequence[Any]) -> None:
    """Raise InputError when a copy has ended by itself: what was measured meanwhile had no neighbour."""
    for process in processes:
        if process.exitcode is not None:
            raise InputError(
                f"a copy of the engine that ran beside has ended with {process.exitcode}; "
                "give --fresh to measure anew, or go without --beside"
            )


def _work(copy: Beside, ready: Any, stop: Any) -> None:
    """Run steps until told to stop, or until the process that measures is gone."""
    from profiler.cli import _Run
    from profiler.progress import Quiet

    if copy.options.device != "cuda":
        os.sched_setaffinity(0, copy.options.devices)  # the parent may be pinned already
    parent = os.getppid()
    run = _Run.of(copy.options, Quiet())
    with closing(
        run.open(copy.layout, copy.options.devices, 2**60, _KV_TOKENS // copy.options.block_tokens)
    ) as subject:
        ready.set()
        for setting in _turns(subject):
            if stop.is_set() or os.getppid() != parent:
                return
            subject.place(setting)
            subject.step()


def _turns(subject: Subject) -> Iterator[Setting]:
    """Yield settings without end, so that prefill and decode get equal time."""
    phases = [cycle(found) for each in (_PREFILLS, _DECODES) if (found := _possible(each, subject.limits))]
    spent_s = [0.0] * len(phases)
    while phases:
        at = spent_s.index(min(spent_s))
        before = time.perf_counter()
        yield next(phases[at])
        spent_s[at] += time.perf_counter() - before


def _possible(settings: Sequence[Setting], limits: Limits) -> list[Setting]:
    return [setting for setting in settings if limits.fault(setting) is None]
