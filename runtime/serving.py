"""A deployment brought up: instances' processes, and the conductor that leads requests through them."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from planner.errors import InputError
from planner.specs.deployment import Deployment, InstanceSpec
from runtime.conductor import Conductor
from runtime.host_messages import FromAgent, ToAgent
from runtime.hosts import Hosts
from runtime.messages import FromInstance, InstanceTask, ToInstance
from runtime.model_config import ModelConfig
from runtime.model_files import LoadFormat, ModelFiles, open_model, torch_dtype
from runtime.nodes import check_node, instances_by_node, transport_of
from runtime.settings import EngineSettings
from runtime.supervisor import Supervisor
from runtime.transfer.base import check_usable, wished_address
from runtime.wire import Keys, host_and_port, own_address

_WITH_WEIGHTS = {"smollm2-135m": "smollm2"}
"""Presets whose weights come with a package."""


_RDMA_CARD = re.compile(r"(mlx\d|bnxt_re|irdma|efa|rocep|ibp)\w*")
"""Names that Linux gives RDMA cards; those of a cluster file may be others, made up."""
LOOPBACK = "127.0.0.1"
_EVERYWHERE, _ELSEWHERE = ("0.0.0.0", "::"), "192.0.2.1"
"""The second is no host's (RFC 5737): the way there is the way to most others."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a deployment is served."""

    model: str = ""
    """Where the weights are; empty: what the deployment's model is called."""
    load_format: LoadFormat = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    transport: str = ""
    """A name of `runtime.transfer.base.TRANSPORTS`; empty: shared memory on CPUs, distributed for GPUs."""
    transfer_checksums: bool = False
    reject: bool = False
    """Refuse requests whose TTFT is predicted to be too late."""
    overlap: bool = True
    """KV is pulled layer by layer while the prompt still runs; else once it has run."""
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the head lets other hosts in."""

    listen: str
    """tcp://HOST:PORT; 0.0.0.0 for all addresses, port 0 for any."""
    token: str = field(repr=False)
    node: str = ""
    """The node of the deployment that this host is; empty: none, all instances stand on others."""
    advertise: str = ""
    """This host's address for others; empty: where it listens, or the one on the way to everywhere."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What an instance has to know of where it is started."""

    conductor: str
    """Address of the conductor's socket."""
    folder: str
    """For what instances of a host share."""
    advertise: str = LOOPBACK
    """The host's address for readers of its KV."""
    server_key: str = ""
    """Of the conductor, on another host."""


class Serving:
    """`start`, `ready`, then requests to `conductor`; `stop` in the end, whatever happened."""

    def __init__(self, deployment: Deployment, options: ServeOptions, head: HeadOptions | None = None):
        self.deployment, self.options, self._head = deployment, options, head
        check_transports(deployment, options)
        self.files = open_served(deployment, options)
        self.hosts = self._hosts(head) if head else None
        self.supervisor = Supervisor(self._lost)
        self.conductor = Conductor(
            deployment,
            deployment.model,
            self.files.config,
            self.files.tokenizer,
            self.supervisor,
            reject=options.reject,
            overlap=options.overlap,
            hosts=self.hosts,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all instances; called within the event loop."""
        address = self.conductor.bind(f"ipc://{self.supervisor.folder}/conductor")
        place = Placed(address, str(self.supervisor.folder), self._advertised())
        if self._head is not None:
            self.listening_at = self.conductor.listen(self._head.listen, Keys.of(self._head.token))
        for spec in self.deployment.instances:
            if self.hosts is None or not self.hosts.knows(spec.name):
                self.supervisor.start(spec.name, task_of(self.deployment, spec, self.options, place))
        self._tasks = [asyncio.create_task(self.conductor.run()), asyncio.create_task(self.supervisor.watch())]
        if self.hosts is not None:
            self._tasks.append(asyncio.create_task(self.hosts.watch()))

    def also(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside, as long as there is serving; what it raises ends the serving."""
        self._tasks.append(asyncio.create_task(work))

    def _hosts(self, head: HeadOptions) -> Hosts:
        """Return the account of the nodes that are not this host. Raises InputError."""
        if head.node:
            check_node(self.deployment, head.node)
        Keys.of(head.token)
        nodes = {node: [it.name for it in specs] for node, specs in instances_by_node(self.deployment).items()}
        nodes.pop(head.node, None)
        digest = digest_of(self.deployment, self.options)
        return Hosts(nodes, digest, self._tell, self._lost)

    def _tell(self, identity: str, payload: bytes) -> None:
        self.conductor.tell(identity, payload)

    def _advertised(self) -> str:
        """Return this host's address for readers of its KV."""
        if self._head is None or not self._head.node:
            return LOOPBACK
        host = host_and_port(self._head.listen, "--listen")[0]
        if self._head.advertise or host not in _EVERYWHERE:
            return self._head.advertise or host
        return own_address(_ELSEWHERE)

    def _lost(self, name: str, why: str) -> None:
        self.conductor.lost(name, why)

    async def until_ready(self) -> None:
        """Return when every instance is ready. Raises StartError when one cannot be started."""
        while not self.conductor.ready:
            self.check()
            await asyncio.sleep(0.05)

    async def watched(self, work: Awaitable[None]) -> None:
        """Return when `work` is done. Raises what ends the serving before."""
        running = asyncio.ensure_future(work)
        try:
            await asyncio.wait([running, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            self.check()
            await running
        finally:
            running.cancel()

    def check(self) -> None:
        """Raise what has ended the serving, if anything has."""
        if self.supervisor.fault is not None:
            raise self.supervisor.fault
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """End all processes and tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.hosts is not None:
            self.hosts.say_goodbye()
        self.supervisor.close()
        self.conductor.close()


def task_of(
    deployment: Deployment, spec: InstanceSpec, options: ServeOptions, place: Placed
) -> Callable[[str], InstanceTask]:
    """Return what the process of an instance is told, by the identity of its start."""
    source = source_of(deployment, options)
    settings, environment = settings_of(deployment, spec, options), environment_of(spec, options)

    def task(identity: str) -> InstanceTask:
        transport, shared = str(settings["transport"]), f"{place.folder}/{identity}"
        address = wished_address(transport, shared, place.advertise) if transport else ""
        told = {**settings, "name": identity, "address": address}
        return InstanceTask(
            identity, place.conductor, source, options.load_format, told, environment, server_key=place.server_key
        )

    return task


def environment_of(spec: InstanceSpec, options: ServeOptions) -> dict[str, str]:
    """Return the variables that an instance's process is started with: its CPU threads, and the NICs of the plan."""
    if options.device == "cpu":  # OpenMP counts for each thread anew: said later, some would use every core
        return {"OMP_NUM_THREADS": "1"}
    cards = [name for name in spec.nics if _RDMA_CARD.fullmatch(name)]
    if not cards:
        return {}
    return {"NCCL_IB_HCA": "=" + ",".join(cards), "UCX_NET_DEVICES": ",".join(f"{card}:1" for card in cards)}


def check_transports(deployment: Deployment, options: ServeOptions) -> None:
    """Raise InputError when KV cannot leave an instance as it should."""
    for spec in deployment.instances:
        transport = transport_of(deployment, spec, options.transport, options.device)
        if transport:
            check_usable(transport, options.device)


def digest_of(deployment: Deployment, options: ServeOptions) -> str:
    """Return a digest of what has to be the same on all hosts."""
    said = repr(msgspec.json.schema_components((FromInstance, ToInstance, FromAgent, ToAgent)))
    same = (said, deployment.model_dump_json(), options.load_format, options.device, options.transport)
    return hashlib.sha256("\0".join(same).encode()).hexdigest()


def source_of(deployment: Deployment, options: ServeOptions) -> str:
    """Return what `open_model` opens."""
    source = options.model or deployment.model
    return _WITH_WEIGHTS.get(source, source) if options.load_format == "auto" else source


def open_served(deployment: Deployment, options: ServeOptions) -> ModelFiles:
    """Return the model to serve. Raises InputError when it is not the one that was planned for."""
    try:
        files = open_model(source_of(deployment, options), torch_dtype(deployment.dtype), options.load_format)
    except InputError as error:
        raise InputError(f"{error}; say where the weights are with --model, or give --load-format dummy") from None
    found = kv_bytes_per_token(files.config, deployment.kv_dtype)
    planned = deployment.kv_bytes_per_token  # less than all where transfers hide behind prefills
    if planned > found * 1.01:
        raise InputError(f"{files.name} has {found:.0f} bytes of KV a token, {planned:.0f} were planned for: is it it?")
    return files


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> float:
    """Return the bytes of KV that a token takes on all layers."""
    kind = torch_dtype(dtype)
    assert kind is not None
    return 2.0 * config.layers * config.kv_heads * config.head_dim * kind.itemsize


def settings_of(deployment: Deployment, spec: InstanceSpec, options: ServeOptions) -> dict[str, object]:
    """Return the engine settings of an instance: exactly what was simulated."""
    limits, decode = spec.limits, spec.phase == "decode"
    devices = tuple(gpu for stage in spec.stages for group in stage for gpu in group.gpus)
    return asdict(
        EngineSettings(
            tp=spec.tp,
            pp=spec.pp,
            device=options.device,
            device_indices=devices,
            dtype=deployment.dtype,
            threads=1 if options.device == "cpu" else 0,
            block_tokens=limits.block_tokens,
            kv_blocks=limits.kv_blocks,
            host_blocks=limits.kv_blocks // 4 if decode else 0,
            max_batch=limits.max_batch,
            step_tokens=limits.max_tokens,
            role=spec.phase,
            transport=transport_of(deployment, spec, options.transport, options.device),
            transfer_checksums=options.transfer_checksums,
            max_pulls=deployment.engine.max_pulls,
            attention=options.attention,
        )
    )
