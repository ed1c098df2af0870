"""The static launch of a deployment over several hosts: one command for each node, as torchrun's is."""

from __future__ import annotations

import shlex
from pathlib import Path

from planner.specs.base import write_text
from planner.specs.deployment import Deployment
from runtime.nodes import instances_by_node
from runtime.serving import ServeOptions

PORT = 5600
"""Where the head listens, unless it is told otherwise."""
_SCRIPT = """#!/bin/sh
# Node {node} of the deployment; run it on that host. The head may be started before or after the others.
set -eu
: "${{PLANNER_TOKEN:?set it to a secret of 16 characters or more, the same on all hosts}}"
exec {command}
"""


def commands(deployment: Deployment, file: Path, options: ServeOptions, api: list[str]) -> dict[str, str]:
    """Return the command of each node, the head first and with `api` too: nodes are taken to be names of hosts."""
    head, *others = instances_by_node(deployment)
    shared = ["planner", "serve", str(file), *_shared_options(options)]
    return {
        head: shlex.join([*shared, "--node", head, "--listen", f"tcp://0.0.0.0:{PORT}", *api]),
        **{node: shlex.join([*shared, "--node", node, "--join", f"tcp://{head}:{PORT}"]) for node in others},
    }


def _shared_options(options: ServeOptions) -> list[str]:
    """Return what all hosts have to be given alike, where it is not the default."""
    default = ServeOptions()
    given = [("--device", options.device, ""), ("--model", options.model, default.model)]
    given += [("--load-format", options.load_format, default.load_format)]
    given += [("--transport", options.transport, default.transport)]
    checks = ["--checksums"] if options.transfer_checksums else []
    return checks + [word for name, value, usual in given if value != usual for word in (name, value)]


def write_scripts(found: dict[str, str], folder: Path) -> list[Path]:
    """Write NODE.sh for each node into a folder, made if need be; return the paths. Raises InputError."""
    paths = []
    for node, command in found.items():
        path = folder / f"{node.replace('/', '_')}.sh"
        write_text(path, _SCRIPT.format(node=node, command=command))
        path.chmod(0o755)
        paths.append(path)
    return paths
