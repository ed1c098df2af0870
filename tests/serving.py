"""Deployments of a few small instances on this machine, and requests sent to their conductor without HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from planner.cost.kernel import LINEAR, SIZE
from planner.specs.deployment import (
    Claim,
    CostSpec,
    Deployment,
    Devices,
    InstanceSpec,
    LimitsSpec,
    Prediction,
    Provenance,
    RouteSpec,
    SpreadSpec,
)
from planner.specs.engine import Engine
from planner.specs.slo import Slo
from runtime.answer import Answer, Delta, whole
from runtime.sampling import Sampling
from runtime.serving import ServeOptions, Serving

Kind = tuple[str, int, int]
"""Phase, tp, pp."""


def deployment(
    kinds: Sequence[Kind], *, kv_blocks: int = 256, max_tokens: int = 512, max_batch: int = 64, **engine: object
) -> Deployment:
    """Return a deployment of SmolLM2 in fp32, whose instances share the cores of this machine."""
    instances = tuple(_instance(index, kind, kv_blocks, max_tokens, max_batch) for index, kind in enumerate(kinds))
    names = {phase: [it.name for it in instances if it.phase == phase] for phase in ("prefill", "decode")}
    routes = [
        RouteSpec(source=p, target=d, weight=1.0 / len(names["decode"]), fixed_s=0.0, hops=())
        for p in names["prefill"]
        for d in names["decode"]
    ]
    none = SpreadSpec(mean_s=None, p50_s=None, p90_s=None, p99_s=None)
    claim = Claim(
        goodput_rps=1.0, low_rps=1.0, high_rps=1.0, gpus=2, goodput_rps_per_gpu=0.5, layout="", binding="TTFT"
    )
    return Deployment(
        version=1,
        name="test",
        mode="disaggregated" if names["prefill"] else "aggregated",
        verdict="",
        model="smollm2-135m",
        dtype="float32",
        kv_dtype="float32",
        kv_bytes_per_token=0,
        cluster="localhost-cpu",
        engine=Engine(**engine),  # type: ignore[arg-type]
        slo=(Slo(ttft_s=5.0, tpot_s=0.5),),
        workload={},
        instances=instances,
        routes=tuple(routes),
        links=(),
        costs={"core": _cost(), "core2": _cost(2)},
        prediction=Prediction(
            claim=claim,
            alternative=None,
            rate_rps=1.0,
            attainment={},
            ttft=none,
            ttft_terms={},
            tpot=none,
            utilisation={},
            program_rps=None,
            program_bound_rps=None,
            program_gap=None,
            capacity_bound_rps=1.0,
        ),
        provenance=Provenance(planner_version="", seeds=(0,), simulated_s=1.0, digests={}, notes=()),
    )


def _instance(index: int, kind: Kind, kv_blocks: int, max_tokens: int, max_batch: int) -> InstanceSpec:
    phase, tp, pp = kind
    cores = sorted(os.sched_getaffinity(0))
    devices = [cores[(index + rank) % len(cores)] for rank in range(tp * pp)]
    stages = tuple(
        (Devices(node="localhost", gpus=tuple(devices[stage * tp : (stage + 1) * tp])),) for stage in range(pp)
    )
    return InstanceSpec(
        name=f"{phase}{index}",
        phase=phase,  # type: ignore[arg-type]
        tp=tp,
        pp=pp,
        gpu="cpu-core",
        stages=stages,
        limits=LimitsSpec(
            max_batch=max_batch, max_tokens=max_tokens, kv_blocks=kv_blocks, block_tokens=16, swap_bytes_per_s=1e9
        ),
        cost="core" if pp == 1 else "core2",
    )


def _cost(stages: int = 1) -> CostSpec:
    """Return a law of about what a core does: 2.5 ms a prompt token, 30 ms a step and 2 ms a sequence."""
    parameters = [float(LINEAR), 0.01, 2.5e-3, 0.0, 0.03, 2e-3, 1e-6, 0.03, 2e-3, 1e-6, 1e9]
    return CostSpec(
        family="linear",
        parameters=tuple(parameters + [0.0] * (SIZE - len(parameters))),
        stage_share=(1.0 / stages,) * stages,
        handoff_s=0.0,
        handoff_s_per_token=0.0,
        unprofiled=False,
        held_out_error={},
    )


def served(
    which: Deployment,
    work: Callable[[Serving], Awaitable[None]],
    options: ServeOptions | None = None,
    limit_s: float = 300.0,
) -> None:
    """Bring a deployment up, do `work` on it, and take it down."""

    async def run() -> None:
        serving = Serving(which, options or ServeOptions())
        serving.start()
        try:
            async with asyncio.timeout(limit_s):
                await serving.until_ready()
                await serving.watched(work(serving))  # type: ignore[arg-type]
        finally:
            await serving.stop()

    asyncio.run(run())


@contextmanager
def running_server(deployment_file: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start `planner serve` as a user does; yield its address and process; stop it with SIGTERM."""
    command = [
        sys.executable,
        "-m",
        "planner",
        "serve",
        str(deployment_file),
        "--port",
        "0",
        "--device",
        "cpu",
        "--quiet",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving on (http://\S+)\n", line)
        assert found, f"expected the address, got {line!r}"
        yield found[1], psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


async def answers_of(serving: Serving, prompt: Sequence[int], sampling: Sampling) -> tuple[Answer, ...]:
    """Return the answers to a prompt."""
    stream = serving.conductor.submit(prompt, sampling)
    told: dict[int, list[Delta]] = {}
    async for delta in stream:
        told.setdefault(delta.index, []).append(delta)
    return tuple(whole(deltas) for _, deltas in sorted(told.items()))
