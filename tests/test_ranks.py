"""Ranks that fail: the others end, and whoever waits is told why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from runtime.build_step import build_step
from runtime.load import load_engine
from runtime.rank_executor import RankDiedError
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from tests.tiny_models import saved

LIMIT_S = 10.0
SETTINGS = EngineSettings(dtype="float32", kv_blocks=64, tp=2, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("model"))[1]


def busy(folder):
    engine = load_engine(folder, SETTINGS)
    for _ in range(4):
        engine.add(range(10), Sampling(max_tokens=200))
    engine.step()
    return engine, [psutil.Process(pid) for pid in engine._executor.process_ids]


def run_until_it_fails(engine):
    while engine.unfinished:
        engine.step()


def end_of(processes):
    _gone, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    return not alive


def test_when_a_rank_is_killed_the_others_end_and_the_signal_is_named(folder):
    engine, processes = busy(folder)
    processes[1].send_signal(signal.SIGKILL)
    since_s = time.monotonic()
    with pytest.raises(RankDiedError, match="rank 1 was ended by signal 9"):
        run_until_it_fails(engine)
    assert end_of(processes)
    assert time.monotonic() - since_s < LIMIT_S


def test_when_a_rank_fails_its_own_traceback_is_told_and_the_others_end(folder):
    """A position beyond the model's, which the engine never asks for, fails where rotations are looked up."""
    engine, processes = busy(folder)
    step = build_step(engine.scheduler.schedule(), engine.cache, 1, (), 0)
    engine._executor.submit(replace(step, positions=step.positions + 10**6))
    with pytest.raises(RankDiedError, match=r"(?s)rank \d: IndexError.*Traceback.*rope\.py"):
        engine._executor.collect()
    assert end_of(processes)


_ABANDONED = """
import sys, time
from runtime.build_step import build_step
from runtime.load import load_engine
from runtime.settings import EngineSettings
if __name__ == "__main__":
    engine = load_engine(sys.argv[1], EngineSettings(dtype="float32", kv_blocks=64, tp=2, threads=1))
    print(*engine._executor.process_ids, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_when_the_engine_is_killed_its_ranks_end_by_themselves(folder, tmp_path):
    script = tmp_path / "abandoned.py"
    script.write_text(_ABANDONED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment) as run:
        ranks = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        assert len(ranks) == 2
        run.kill()
    assert end_of(ranks)
