"""A problem file with everything it refers to, read and checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError
from planner.sources.hf_config import read_model
from planner.sources.profiles import read_profile
from planner.sources.workloads import read_workload
from planner.specs.base import Document, Spec, dump_json, load, load_preset, preset_names, resolve, validate
from planner.specs.engine import Engine
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.problem import Compared, Objective, ProblemSpec, Search
from planner.specs.profile import Profile
from planner.specs.slo import Slo
from planner.specs.topology import Topology, read_cluster
from planner.specs.workload import Workload


@dataclass(frozen=True, slots=True)
class Problem:
    """What `plan` takes: a `ProblemSpec` with its references followed."""

    name: str
    model: ModelSpec
    topology: Topology
    profiles: tuple[Profile, ...]
    workload: Workload
    slos: tuple[Slo, ...]
    objective: Objective
    rate_rps: float | None
    compare: tuple[Compared, ...]
    engine: Engine
    search: Search
    seed: int
    digests: dict[str, str]
    """sha256 of each input, so that a plan can be traced to what it was made from."""

    @property
    def gpus(self) -> dict[str, Gpu]:
        """GPU types of the cluster by name, in the order of its nodes."""
        return {node.gpu.name: node.gpu for node in self.topology.nodes}

    @property
    def demand_rps(self) -> float | None:
        """The load to serve with the fewest GPUs [requests/s]; None where the most goodput is wanted."""
        return self.rate_rps if self.objective == "min_gpus" else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was skipped or assumed while reading."""
        return (*self.model.notes, *self.workload.notes, *self.topology.assumptions())

    def profile_of(self, gpu: Gpu) -> Profile | None:
        """Return the profile measured on this GPU type, if any."""
        return next((profile for profile in self.profiles if gpu.is_called(profile.gpu)), None)


def read_problem(path: str | Path) -> Problem:
    """Return the problem in a file. Raises InputError with a line for every mistake."""
    return problem_of(load(path))


def problem_of(document: Document) -> Problem:
    """Return the problem in a document (`specs.base.parse` makes one from text). Raises InputError."""
    spec = validate(ProblemSpec, document)
    faults: list[Fault] = []

    def part(read: Any, *keys: str) -> Any:
        """Collect the faults of one part and go on, so that one run shows them all."""
        try:
            return read(document.at(*keys))
        except InputError as error:
            faults.extend(error.faults)

    model = part(lambda d: read_model(resolve("models", d)), "model")
    topology = part(lambda d: read_cluster(resolve("clusters", d)), "cluster")
    workload = part(lambda d: read_workload(resolve("workloads", d)), "workload")
    slos = part(_read_slos, "slo")
    if faults:
        raise InputError(faults)
    profiles = _profiles(document, model, topology)
    if model.max_positions is not None:
        workload = workload.limited_to(model.max_positions)
    rate_rps = spec.rate_rps or workload.spec.rate_rps
    objective = spec.objective or ("min_gpus" if rate_rps else "max_goodput")
    if objective == "min_gpus" and rate_rps is None:
        raise InputError(document.fault("min_gpus needs a load: give rate_rps, such as 4rps", "objective"))
    digests = {
        "problem": _digest(dump_json(document.data)),
        "model": _digest(model.model_dump_json()),
        "cluster": _digest(
            repr([(node.name, node.gpu, node.indices) for node in topology.nodes] + list(topology.links))
        ),
        "workload": workload.digest,
        **{f"profile {profile.name}": profile.digest for profile in profiles},
    }
    return Problem(
        spec.name or Path(document.file).stem,
        model,
        topology,
        profiles,
        workload,
        slos,
        objective,
        rate_rps,
        spec.compare,
        spec.engine,
        spec.search,
        spec.seed,
        digests,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_slos(document: Document) -> tuple[Slo, ...]:
    """Return the SLO of each traffic class; a single mapping is the one class there is."""
    if isinstance(document.data, dict):
        return (validate(Slo, document),)
    if not document.data:
        raise InputError(document.fault("expected at least one traffic class"))
    slos = tuple(validate(Slo, document.at(index)) for index in range(len(document.data)))
    if sum(slo.share or 0.0 for slo in slos) > 1.0 + 1e-9:
        raise InputError(document.fault("the classes' shares add up to more than 100%"))
    names = [slo.name for slo in slos]
    for index, name in enumerate(names):
        if name is None or name in names[:index]:
            raise InputError(document.fault("several classes need a different name each", index, "name"))
    return slos


def _profiles(document: Document, model: ModelSpec, topology: Topology) -> tuple[Profile, ...]:
    """Return the profiles to plan with: those named, or every shipped one that fits."""
    gpus = [node.gpu for node in topology.nodes]
    asked = document.data.get("profiles", "auto")
    if asked == "none":
        return ()
    if asked == "auto":
        shipped = [read_profile(_preset(name)) for name in preset_names("profiles")]
        return tuple(p for p in shipped if model.is_called(p.model) and any(gpu.is_called(p.gpu) for gpu in gpus))
    places = (
        [document.at("profiles", i) for i in range(len(asked))]
        if isinstance(asked, list)
        else [document.at("profiles")]
    )
    found: list[Profile] = []
    for place in places:
        profile = read_profile(resolve("profiles", place))
        if not model.is_called(profile.model):
            raise InputError(
                place.fault(f"profile {profile.name} measured {profile.model}, but the model here is {model.name}")
            )
        if not any(gpu.is_called(profile.gpu) for gpu in gpus):
            types = ", ".join(sorted({gpu.name for gpu in gpus}))
            raise InputError(
                place.fault(f"profile {profile.name} measured {profile.gpu}, which is not in this cluster ({types})")
            )
        if any(other.gpu == profile.gpu for other in found):
            raise InputError(place.fault(f"a second profile of {profile.gpu}; give one per GPU type"))
        found.append(profile)
    return tuple(found)


def _preset(name: str) -> Document:
    document = load_preset("profiles", name)
    assert document is not None  # the name came from the list of presets
    return document


def spec_schema(kind: type[Spec]) -> dict[str, Any]:
    """Return the JSON Schema of a file kind."""
    return kind.model_json_schema()
