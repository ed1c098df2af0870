"""A second host on this machine: a network namespace where that is permitted, else another loopback address."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.specs.base import dump_yaml
from planner.specs.deployment import Deployment, Devices, InstanceSpec

TOKEN = "a secret that both hosts share"


@dataclass(frozen=True, slots=True)
class Network:
    """This host, the head, and another one."""

    head: str
    """This host's address."""
    other: str
    enter: tuple[str, ...]
    """Before a command that is to run on the other host."""

    @property
    def separate(self) -> bool:
        """Return True when the other host cannot reach this one's loopback."""
        return bool(self.enter)


@contextlib.contextmanager
def two_hosts() -> Iterator[Network]:
    """Yield two hosts; the other one's network is gone at the end."""
    name = f"goodput{os.getpid()}"
    net = f"10.213.{os.getpid() % 250}"
    if not _permitted(name):
        yield Network("127.0.0.1", "127.0.0.2", ())
        return
    here, there = f"gp{os.getpid()}a", f"gp{os.getpid()}b"
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("address", "add", f"{net}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        for args in (
            ["address", "add", f"{net}.2/24", "dev", there],
            ["link", "set", there, "up"],
            ["link", "set", "lo", "up"],
        ):
            _ip("-n", name, *args)
        yield Network(f"{net}.1", f"{net}.2", ("ip", "netns", "exec", name))
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)  # the link goes with it


def _permitted(name: str) -> bool:
    if shutil.which("ip") is None:
        return False
    return subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def spread(deployment: Deployment, nodes: dict[str, str]) -> Deployment:
    """Return a deployment whose instances stand on the nodes given by name."""
    return deployment.model_copy(
        update={"instances": tuple(_on(spec, nodes[spec.name]) for spec in deployment.instances)}
    )


def _on(spec: InstanceSpec, node: str) -> InstanceSpec:
    stages = tuple(tuple(Devices(node=node, gpus=group.gpus) for group in stage) for stage in spec.stages)
    return spec.model_copy(update={"stages": stages})


def written(deployment: Deployment, folder: Path) -> Path:
    """Return the file of a deployment."""
    path = folder / "deployment.yaml"
    path.write_text(dump_yaml(deployment.model_dump(mode="json")))
    return path


def start_agent(
    network: Network, file: Path, join: str, *options: str, node: str = "n1", token: str = TOKEN
) -> subprocess.Popen[str]:
    """Start the agent of a node on the other host; what it writes goes to `agent.log` beside `file`."""
    command = [sys.executable, "-c", "from planner.cli import main; main()", "serve", str(file)]
    where = ["--node", node, "--join", join, "--advertise", network.other, "--device", "cpu"]
    with (file.parent / "agent.log").open("a") as log:
        return subprocess.Popen(
            [*network.enter, *command, *where, *options],
            env={**os.environ, "PLANNER_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
            stdout=log,
            stderr=log,
            text=True,
        )


def log_of(file: Path) -> str:
    """Return what agents have written."""
    return (file.parent / "agent.log").read_text()
