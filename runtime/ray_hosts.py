"""All nodes of a deployment through Ray: it finds the hosts and keeps an agent on each; what they do is ours.

One placement group has a bundle for each node, on hosts that differ. In each bundle an actor runs the same agent that
`planner serve --join` does, and the head is where the command runs. Ray starts an agent again that is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from dataclasses import replace
from typing import Any

from planner.errors import InputError, PlannerError
from planner.specs.deployment import Deployment, InstanceSpec
from runtime.nodes import instances_by_node
from runtime.serving import HeadOptions, ServeOptions

_ROOM_S, _FAREWELL_S, _REACHED_S = 60.0, 10.0, 5.0
_PIN = 0.001
"""Of a resource that bears a node's name: enough to be put there."""


class AgentLostError(PlannerError):
    """An agent that Ray keeps has ended for good."""

    exit_code = 1


class NodeAgent:
    """The actor of one bundle."""

    def __init__(self, deployment: str, options: ServeOptions, node: str, head: str, token: str):
        from runtime.agent import Agent, JoinOptions

        logging.basicConfig(level=logging.WARNING, format="planner: %(message)s")
        found = Deployment.model_validate_json(deployment)
        self._agent = Agent(found, options, JoinOptions(node, head, token))

    async def run(self) -> None:
        """Serve the node until the head says goodbye."""
        await self._agent.run()


class RayNodes:
    """Bundles of a Ray cluster, one for each node. Made outside an event loop; `close` gives them back."""

    def __init__(self, deployment: Deployment, options: ServeOptions, address: str):
        """Reserve. Raises InputError when Ray is not installed, not there, or has no room."""
        self._ray = _ray()
        self._deployment, self._options = deployment, options
        self._nodes = instances_by_node(deployment)
        self._actors: list[Any] = []  # an actor ends when nobody refers to it
        self._runs: list[Any] = []
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        _check_reachable(address)
        where: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
        try:
            self._ray.init(**where, logging_level=logging.WARNING, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"--ray {address}: {str(error).splitlines()[0]}") from None
        self.address = self._ray.util.get_node_ip_address()
        """This host's, as Ray's hosts reach it."""
        try:
            self._group = self._reserve()
        except BaseException:
            self._ray.shutdown()
            raise

    def _reserve(self) -> Any:
        from ray.util.placement_group import placement_group

        there = self._ray.cluster_resources()
        self._bundles = [bundle_of(node, specs, self._options.device, there) for node, specs in self._nodes.items()]
        group = placement_group(self._bundles, strategy="STRICT_SPREAD")
        if not group.wait(_ROOM_S):
            hosts = len([each for each in self._ray.nodes() if each["Alive"]])
            wanted = "; ".join(f"{node}: {_shown(each)}" for node, each in zip(self._nodes, self._bundles, strict=True))
            raise InputError(
                f"--ray: no room on {hosts} host(s) for {len(self._bundles)} nodes, each on a host of its own, within "
                f"{_ROOM_S:.0f} s ({wanted}); the cluster has {_shown(there)} in all"
            )
        return group

    async def run(self, head: str, token: str) -> None:
        """Keep an agent on each node. Returns when all have been told goodbye; raises AgentLostError."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

        text, actor = self._deployment.model_dump_json(), self._ray.remote(NodeAgent)
        for index, (node, bundle) in enumerate(zip(self._nodes, self._bundles, strict=True)):
            placed = actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=InGroup(self._group, placement_group_bundle_index=index),
                max_restarts=-1,
                max_task_retries=-1,
                # the plan names GPUs by their index on the host: Ray must not renumber them
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            ).remote(text, self._options, node, head, token)
            self._actors.append(placed)
            self._runs.append(placed.run.remote())
        try:
            await asyncio.gather(*(asyncio.wrap_future(each.future()) for each in self._runs))
        except self._ray.exceptions.RayError as error:
            raise AgentLostError(f"an agent has ended: {getattr(error, 'cause', None) or error}") from None

    def close(self) -> None:
        """End the agents and give the bundles back."""
        from ray.util.placement_group import remove_placement_group

        if self._runs:  # the head has said goodbye
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_FAREWELL_S)
        remove_placement_group(self._group)
        self._ray.shutdown()


def bundle_of(node: str, specs: tuple[InstanceSpec, ...], device: str, there: dict[str, float]) -> dict[str, float]:
    """Return what a node's bundle asks of a host: its devices, and the host that has a resource of the node's name."""
    devices = sum(len(group.gpus) for spec in specs for stage in spec.stages for group in stage)
    asked = {"CPU": float(len(specs)), "GPU": float(devices)} if device == "cuda" else {"CPU": float(devices)}
    return {**asked, node: _PIN} if node in there else asked


def _shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources)


def _check_reachable(address: str) -> None:
    """Raise InputError when nothing listens at HOST:PORT: Ray itself would try for ever."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return  # auto, local, or what only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray {address}: {getattr(error, 'strerror', None) or error}; is Ray up there?") from None


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'goodput-planner[ray]'") from None
    return ray


def head_of(nodes: RayNodes, advertise: str) -> HeadOptions:
    """Return how the head lets in the agents: at this host's address, by a token that is drawn for this run."""
    host = advertise or nodes.address
    return HeadOptions(f"tcp://{f'[{host}]' if ':' in host else host}:0", secrets.token_urlsafe(24))


def serve_through_ray(deployment: Deployment, options: Any, address: str, advertise: str) -> None:
    """Serve a deployment on a Ray cluster until told to stop. Raises InputError, AgentLostError."""
    from runtime.cli import serve

    nodes = RayNodes(deployment, options.serve, address)
    try:
        head = head_of(nodes, advertise)
        serve(deployment, replace(options, head=head), lambda listening_at: nodes.run(listening_at, head.token))
    finally:
        nodes.close()
