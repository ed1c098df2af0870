"""From the options of `planner serve` to a service on a socket; and what it says meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.specs.deployment import Deployment, InstanceSpec, RouteSpec
from runtime.api.limits import ApiLimits
from runtime.api.server import ApiServer
from runtime.launch import commands, write_scripts
from runtime.nodes import instances_by_node, transport_of
from runtime.serving import HeadOptions, ServeOptions, Serving, settings_of, source_of

_NEWS_S = 0.2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the user asked for."""

    serve: ServeOptions = field(default_factory=ServeOptions)
    host: str = "127.0.0.1"
    port: int = 8000
    limits: ApiLimits = field(default_factory=ApiLimits)
    drain_s: float = 30.0
    quiet: bool = False
    head: HeadOptions | None = None
    """Where other hosts join; None: all on this one."""


Agents = Callable[[str], Coroutine[Any, Any, None]]
"""Given the address where the head listens, keeps agents on other hosts."""


def serve(deployment: Deployment, options: ServerOptions, agents: Agents | None = None) -> None:
    """Serve a deployment until told to stop. Raises InputError, StartError."""
    nodes = instances_by_node(deployment)
    if options.head is None and len(nodes) > 1:
        raise InputError(
            f"the deployment stands on {len(nodes)} nodes ({', '.join(nodes)}): give the head --node and --listen "
            "and the others with --join, as --dry-run prints, or all of them with --ray"
        )
    logging.basicConfig(level=logging.WARNING, format="planner: %(message)s", stream=sys.stderr)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that hangs up
    asyncio.run(_serve(deployment, options, agents))


@dataclass(frozen=True, slots=True)
class Where:
    """What the user said of this host and others; all empty: everything is on this one."""

    node: str = ""
    listen: str = ""
    join: str = ""
    token: str = field(default="", repr=False)
    advertise: str = ""
    ray: str = ""


def serve_where(deployment: Deployment, options: ServerOptions, where: Where) -> None:
    """Serve as the head, as an agent, through Ray, or alone. Raises InputError for options that contradict."""
    given = [f"--{name}" for name in ("listen", "join", "ray") if getattr(where, name)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)}: expected one of them, as a host is the head or joins it")
    if where.join:
        from runtime.agent import JoinOptions, serve_node

        if not where.node:
            raise InputError("--join: say with --node which node of the deployment this host is")
        serve_node(deployment, options.serve, JoinOptions(where.node, where.join, where.token, where.advertise))
    elif where.ray:
        from runtime.ray_hosts import serve_through_ray

        serve_through_ray(deployment, options, where.ray, where.advertise)
    elif where.listen:
        serve(deployment, replace(options, head=HeadOptions(where.listen, where.token, where.node, where.advertise)))
    elif where.node:
        raise InputError("--node: expected --listen (the head) or --join (any other host) with it")
    else:
        serve(deployment, options)


async def _serve(deployment: Deployment, options: ServerOptions, agents: Agents | None) -> None:
    serving = Serving(deployment, options.serve, options.head)
    announcing: asyncio.Task[None] | None = None
    try:
        limits = replace(options.limits, context_tokens=context_tokens(deployment))
        api = ApiServer(serving.conductor, options.host, options.port, limits)
        serving.start()
        if serving.hosts is not None and not options.quiet:
            missing = ", ".join(serving.hosts.missing)
            print(f"planner: waits at {serving.listening_at} for {missing}", file=sys.stderr)
        if agents is not None:
            serving.also(agents(serving.listening_at))
        announcing = asyncio.create_task(_announce(serving, api.url, options.quiet))
        await serving.watched(_until_told(api, serving, options.drain_s))
    finally:
        if announcing is not None:
            announcing.cancel()
        await serving.stop()


async def _until_told(api: ApiServer, serving: Serving, drain_s: float) -> None:
    """Serve until a signal, then let running requests end, for so long at most."""
    drained = await api.run_until_signal(drain_s)
    serving.conductor.draining = True
    if not drained:
        print(f"planner: stopped with requests unanswered after {drain_s:g} s of draining", file=sys.stderr)


def context_tokens(deployment: Deployment) -> int:
    """Return how long prompt and answer may be together: what the largest instance that decodes has KV blocks for."""
    decoding = [spec.limits for spec in deployment.instances if spec.phase != "prefill"]
    return max(limits.kv_blocks * limits.block_tokens for limits in decoding)


async def _announce(serving: Serving, url: str, quiet: bool) -> None:
    """Say on stderr which instances are ready, and on stdout where the service is once all of them are."""
    begun_s, told = time.monotonic(), set[str]()
    total = len(serving.deployment.instances)
    while True:
        states = serving.conductor.snapshot().instances
        for state in states:
            if state.state == "ready" and state.name not in told:
                told.add(state.name)
                took_s = time.monotonic() - begun_s
                if not quiet:
                    print(f"planner: {state.name} is ready ({len(told)} of {total}, {took_s:.0f} s)", file=sys.stderr)
        if serving.conductor.ready:
            print(f"serving on {url}", flush=True)
            return
        await asyncio.sleep(_NEWS_S)


# ---- --dry-run


def plan_of(deployment: Deployment, options: ServerOptions) -> dict[str, Any]:
    """Return what would be started, as plain data."""
    return {
        "model": deployment.model,
        "source": source_of(deployment, options.serve),
        "url": f"http://{options.host}:{options.port}",
        "instances": [_instance(deployment, spec, options) for spec in deployment.instances],
        "routes": [_route(deployment, it, options) for it in deployment.routes],
    }


def _instance(deployment: Deployment, spec: InstanceSpec, options: ServerOptions) -> dict[str, Any]:
    settings = settings_of(deployment, spec, options.serve)
    kept = ("device", "dtype", "kv_blocks", "block_tokens", "max_batch", "step_tokens", "host_blocks", "transport")
    where = [f"{group.node}:{gpu}" for stage in spec.stages for group in stage for gpu in group.gpus]
    about = {"name": spec.name, "phase": spec.phase, "tp": spec.tp, "pp": spec.pp, "devices": where, "nics": spec.nics}
    return {**about, **{name: settings[name] for name in kept}}


def _route(deployment: Deployment, route: RouteSpec, options: ServerOptions) -> dict[str, str]:
    (source,) = (spec for spec in deployment.instances if spec.name == route.source)
    by = transport_of(deployment, source, options.serve.transport, options.serve.device)
    return {"from": route.source, "to": route.target, "by": by}


def render(deployment: Deployment, options: ServerOptions) -> Iterator[Any]:
    """Yield what the terminal shows of a dry run."""
    from rich.table import Table

    plan = plan_of(deployment, options)
    yield f"{plan['model']} ({deployment.dtype}) from {plan['source']}, at {plan['url']}"
    table = Table(box=None, pad_edge=False)
    for name in ("instance", "layout", "devices", "KV blocks", "batch", "tokens a step"):
        table.add_column(name, justify="left" if name in ("instance", "layout", "devices") else "right")
    for each in plan["instances"]:
        kind = options.serve.device.upper().replace("CUDA", "GPU").replace("CPU", "core")
        devices = ", ".join(each["devices"])
        layout = f"{each['phase']} TP{each['tp']}" + (f" PP{each['pp']}" if each["pp"] > 1 else "")
        blocks = f"{each['kv_blocks']} of {each['block_tokens']}"
        table.add_row(
            each["name"], layout, f"{kind} {devices}", blocks, str(each["max_batch"]), str(each["step_tokens"])
        )
    yield table
    for route in plan["routes"]:
        yield f"KV from {route['from']} to {route['to']} by {route['by']}"


def launch(deployment: Deployment, file: Path, options: ServerOptions) -> dict[str, str]:
    """Return the command to run on each node; empty when all is on one."""
    nodes = instances_by_node(deployment)
    return commands(deployment, file, options.serve, _api_options(options)) if len(nodes) > 1 else {}


def _api_options(options: ServerOptions) -> list[str]:
    """Return the head's options, as they were given; its key stays out of files, in PLANNER_API_KEY."""
    usual, limits = ServerOptions(), options.limits
    given = [("--max-requests", limits.concurrent_requests, usual.limits.concurrent_requests)]
    given += [("--max-body", limits.body_bytes, usual.limits.body_bytes)]
    changed = [word for name, value, default in given if value != default for word in (name, str(value))]
    changed += ["--drain", f"{options.drain_s:g}"] if options.drain_s != usual.drain_s else []
    changed += ["--reject"] if options.serve.reject else []
    return ["--host", options.host, "--port", str(options.port), *changed]


def write_launch(deployment: Deployment, file: Path, options: ServerOptions, folder: Path) -> list[Path]:
    """Write a script for each node; return the paths. Raises InputError when there is but one node, or no room."""
    found = launch(deployment, file, options)
    if not found:
        raise InputError("--emit-launch: the deployment stands on one node; start it with planner serve")
    return write_scripts(found, folder)


def render_launch(found: dict[str, str]) -> Iterator[str]:
    """Yield what the terminal shows of the commands."""
    if found:
        yield "\nOn all hosts, first: export PLANNER_TOKEN=... (the same 16 characters or more)"
    for node, command in found.items():
        yield f"On {node}: {command}"


# ---- top


def top(url: str, api_key: str, every_s: float, once: bool) -> None:
    """Show instances, queues, KV blocks and attainment of a running server, until interrupted."""
    from rich.console import Console
    from rich.live import Live

    from runtime.top import Status, picture

    console = Console(highlight=False, markup=False)
    status = Status(url, api_key)
    if once or not console.is_terminal:
        console.print(picture(status.read()))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            live.update(picture(status.read()), refresh=True)
            time.sleep(every_s)
