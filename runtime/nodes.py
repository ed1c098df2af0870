"""Which instance of a deployment stands on which node, and by which way KV leaves it."""

from __future__ import annotations

from planner.errors import InputError
from planner.specs.base import suggest
from planner.specs.deployment import Deployment, InstanceSpec


def node_of(spec: InstanceSpec) -> str:
    """Return the node that an instance stands on. Raises InputError when its ranks stand on several."""
    nodes = list(dict.fromkeys(group.node for stage in spec.stages for group in stage))
    if len(nodes) > 1:
        raise InputError(
            f"{spec.name}: its ranks stand on {', '.join(nodes)}, and this runtime starts those of an instance on one "
            "node; plan without pipelines across nodes (search: {max_pp: 1})"
        )
    return nodes[0]


def instances_by_node(deployment: Deployment) -> dict[str, tuple[InstanceSpec, ...]]:
    """Return the instances of each node, in the deployment's order. Raises InputError for instances that span some."""
    nodes = dict.fromkeys(node_of(spec) for spec in deployment.instances)
    return {node: tuple(spec for spec in deployment.instances if node_of(spec) == node) for node in nodes}


def check_node(deployment: Deployment, node: str) -> None:
    """Raise InputError when nothing of the deployment stands on `node`."""
    nodes = list(instances_by_node(deployment))
    if node not in nodes:
        raise InputError(f"--node: expected one of {', '.join(nodes)}, got {node!r}{suggest(node, nodes)}")


def transport_of(deployment: Deployment, spec: InstanceSpec, wanted: str, device: str) -> str:
    """Return how KV leaves an instance: as wanted, or by what can serve all its routes; empty when it has none.

    Shared memory is within a host, and not for GPUs. Raises InputError when it is wanted for a route off its node.
    """
    if spec.phase != "prefill":
        return ""
    nodes = {each.name: node_of(each) for each in deployment.instances}
    stays = all(nodes[it.target] == nodes[spec.name] for it in deployment.routes if it.source == spec.name)
    if wanted == "shm" and not stays:
        raise InputError(f"--transport shm: KV of {spec.name} leaves {nodes[spec.name]}; leave it out, or take nixl")
    return wanted or ("shm" if stays and device == "cpu" else "distributed")
