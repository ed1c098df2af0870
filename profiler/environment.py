"""Where a profile is measured: device, driver, versions, load, clocks. What cannot be told is left empty."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner.specs.measured import Environment

_THROTTLING = {
    "clocks_throttle_reasons.hw_slowdown": "the hardware slowed itself down",
    "clocks_throttle_reasons.sw_thermal_slowdown": "slowed down by heat",
    "clocks_throttle_reasons.sw_power_cap": "at its power cap",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "slowed down by a power brake",
}


def environment(devices: Sequence[str], threads: int, digest: str, weights: str, seed: int) -> Environment:
    """Return what can be told of this machine before measuring; `devices` as torch names them."""
    import torch

    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device_name(devices[0]),
        devices=len(devices),
        driver=(smi(devices[:1], ("driver_version",)) or [("",)])[0][0],
        host=f"{cpu_name()}, {platform.system()} {platform.release()}",
        cores=len(os.sched_getaffinity(0)),
        threads_per_rank=threads,
        python=platform.python_version(),
        torch=torch.__version__,
        engine=f"goodput-planner {_version()}",
        git_commit=_git_commit(),
        model_digest=digest,
        weights=weights,
        seed=seed,
        load_before=round(os.getloadavg()[0], 2),
        notes=tuple(clocks(devices)),
    )


def device_name(device: str) -> str:
    """Return what the device is called: by its driver, or by the processor."""
    import torch

    if not device.startswith("cuda"):
        return cpu_name()
    return str(torch.cuda.get_device_name(torch.device(device)))


def cpu_name() -> str:
    """Return the processor's name as the kernel has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def clocks(devices: Sequence[str]) -> list[str]:
    """Return one line per GPU with its clock and temperature now, and one per reason that it is slowed down for."""
    names = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", *_THROTTLING)
    lines = []
    for index, clock, most, heat, power, *reasons in smi(devices, names):
        lines.append(f"GPU {index}: {clock} of {most} MHz, {heat} C, {power} W")
        active = [why for why, on in zip(_THROTTLING.values(), reasons, strict=True) if on == "Active"]
        lines += [f"GPU {index}: {why}" for why in active]
    return lines


def smi(devices: Sequence[str], fields: Sequence[str]) -> list[tuple[str, ...]]:
    """Return what nvidia-smi says of each GPU, one tuple per device; nothing without GPUs or without the tool."""
    indices = [device.partition(":")[2] or "0" for device in devices if device.startswith("cuda")]
    if not indices:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", ",".join(indices)]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [tuple(cell.strip() for cell in line.split(",")) for line in done.stdout.splitlines()]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("goodput-planner")
    except PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    """Return the commit that this code is at, with a mark where it was changed since; empty outside of a checkout."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():
        return ""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit[:12] + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
