"""A problem file with everything it refers to, read and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError
from planner.sources.hf_config import read_model
from planner.sources.profiles import read_profile
from planner.sources.workloads import read_workload
from planner.specs.base import Document, dump_json, load, load_preset, preset_names, resolve, validate
from planner.specs.cluster import find_gpu
from planner.specs.engine import Engine
from planner.specs.gpu import Gpu
from planner.specs.model import ModelSpec
from planner.specs.problem import CarryOver, Compared, Objective, ProblemSpec, Search
from planner.specs.profile import Profile
from planner.specs.slo import Slo
from planner.specs.topology import Topology, read_cluster
from planner.specs.workload import Workload

CARRY = "carry_over"
_WAY_OUT = "; to estimate from it all the same, write {carry_over: ...} in its place"


@dataclass(frozen=True, slots=True)
class Carried:
    """A profile of another GPU or model to carry over, and what it measured."""

    profile: Profile
    model: ModelSpec
    gpu: Gpu


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
    document: Document = field(repr=False, compare=False)
    """Where all this stands, for the line of what turns out wrong later."""
    carried: tuple[Carried, ...] = ()
    """Profiles of other GPUs or models, for GPU types without one of their own."""

    @property
    def gpus(self) -> dict[str, Gpu]:
        """GPU types of the cluster by name, in the order of its nodes."""
        return {node.gpu.name: node.gpu for node in self.topology.nodes}

    @property
    def demand_rps(self) -> float | None:
        """The load to serve with the fewest GPUs [requests/s]; None where the most goodput is wanted."""
        return self.rate_rps if self.objective == "min_gpus" else None

    @property
    def kv_bytes_per_request(self) -> float:
        """KV bytes of a prompt of mean length, which is what a transfer moves."""
        return self.model.kv_bytes_per_token * self.workload.mean_prompt_tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """What was skipped or assumed while reading."""
        return (*self.model.notes, *self.workload.notes, *self.topology.assumptions())

    def fault(self, message: str, *path: str | int) -> Fault:
        """Return a fault at this place of the problem file."""
        return self.document.fault(message, *path)

    def profile_of(self, gpu: Gpu) -> Profile | None:
        """Return the profile measured on this GPU type, if any."""
        return next((profile for profile in self.profiles if profile.is_of(gpu)), None)

    def carried_to(self, gpu: Gpu) -> Carried | None:
        """Return what to carry over to a GPU type without a profile: its own GPU's before another's, then as listed."""
        return min(self.carried, key=lambda one: not one.profile.is_of(gpu), default=None)


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
    faults += _twice_compared(spec, document)
    if faults:
        raise InputError(faults)
    profiles = part(lambda d: _profiles(d, model, topology))
    carried = part(lambda d: _carried(d, model, topology, profiles or ()))
    workload = part(lambda d: _limited(d, workload, model))
    rate_rps = spec.rate_rps or (workload and workload.spec.rate_rps)
    objective = spec.objective or ("min_gpus" if rate_rps else "max_goodput")
    if objective == "min_gpus" and workload is not None and rate_rps is None:
        faults.append(document.fault("min_gpus needs a load: give rate_rps, such as 4rps", "objective"))
    if faults:
        raise InputError(faults)
    digests = {
        "problem": _digest(dump_json(document.data)),
        "model": _digest(model.model_dump_json()),
        "cluster": _digest(
            repr([(node.name, node.gpu, node.indices) for node in topology.nodes] + list(topology.links))
        ),
        "workload": workload.digest,
        **{f"profile {profile.name}": profile.digest for profile in (*profiles, *(one.profile for one in carried))},
    }
    return Problem(
        spec.name or Path(document.file).stem,
        model,
        _as_measured(topology, profiles),
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
        document,
        carried,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_slos(document: Document) -> tuple[Slo, ...]:
    """Return the SLO of each traffic class; a single mapping is the one class there is."""
    if isinstance(document.data, dict):
        return (validate(Slo, document),)
    if not document.data:
        raise InputError(document.fault("expected at least one traffic class"))
    slos: list[Slo] = []
    faults: list[Fault] = []
    for index in range(len(document.data)):
        try:
            slos.append(validate(Slo, document.at(index)))
        except InputError as error:
            faults.extend(error.faults)
    if faults := faults or list(_class_mistakes(slos, document)):
        raise InputError(faults)
    return tuple(slos)


def _class_mistakes(slos: list[Slo], document: Document) -> Iterator[Fault]:
    """Yield what does not fit together in several traffic classes."""
    names = [slo.name for slo in slos]
    for index, name in enumerate(names):
        if len(slos) > 1 and name is None:
            yield document.fault("expected a name, since there are several classes", index, "name")
        elif name in names[:index]:
            yield document.fault(f"two classes are called {name!r}", index, "name")
    given = sum(slo.share or 0.0 for slo in slos)
    if given > 1.0 + 1e-9:
        yield document.fault(f"expected shares that add up to 100%, got {given:.4g} of 1")
    elif all(slo.share is not None for slo in slos) and given < 1.0 - 1e-3:
        yield document.fault(f"expected shares that add up to 100%, got {given:.4g} of 1; leave one out for the rest")
    elif given > 1.0 - 1e-9 and (bare := [i for i, slo in enumerate(slos) if slo.share is None]):
        yield document.fault("no share is left for this class: the others add up to 100%", bare[0])


def _twice_compared(spec: ProblemSpec, document: Document) -> Iterator[Fault]:
    names = [one.name for one in spec.compare]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield document.fault(f"two layouts are called {name!r}", "compare", index, "name")


def _limited(document: Document, workload: Workload, model: ModelSpec) -> Workload:
    """Return the workload without requests that are too long for the model."""
    if model.max_positions is None:
        return workload
    try:
        return workload.limited_to(model.max_positions)
    except InputError as error:
        raise InputError([document.fault(fault.message, "workload") for fault in error.faults]) from None


def _profiles(document: Document, model: ModelSpec, topology: Topology) -> tuple[Profile, ...]:
    """Return the profiles to plan with: those named, or every shipped one that fits."""
    gpus = [node.gpu for node in topology.nodes]
    asked = document.data.get("profiles", "auto")
    if asked == "none":
        return ()
    if asked == "auto":
        shipped = [read_profile(_preset(name)) for name in preset_names("profiles")]
        return tuple(p for p in shipped if model.is_called(p.model) and any(p.is_of(gpu) for gpu in gpus))
    if not asked:
        raise InputError(document.fault("expected at least one profile; none plans from data sheets alone", "profiles"))
    found: list[Profile] = []
    faults: list[Fault] = []
    for place in _listed(document):
        if _is_carried(place):
            continue
        try:
            profile = read_profile(resolve("profiles", place))
        except InputError as error:
            faults.extend(error.faults)
            continue
        faults += [place.fault(message) for message in _profile_mistakes(profile, found, model, gpus)]
        found.append(profile)
    if faults:
        raise InputError(faults)
    return tuple(found)


def _listed(document: Document) -> list[Document]:
    """Return the entries of `profiles`, one by one."""
    asked = document.data.get("profiles", "auto")
    if isinstance(asked, list):
        return [document.at("profiles", i) for i in range(len(asked))]
    return [] if asked in ("auto", "none") else [document.at("profiles")]


def _is_carried(place: Document) -> bool:
    return isinstance(place.data, dict) and CARRY in place.data


def _carried(
    document: Document, model: ModelSpec, topology: Topology, profiles: tuple[Profile, ...]
) -> tuple[Carried, ...]:
    """Return the profiles that the problem asks to carry over, to the GPU types that `profiles` leave without one."""
    gpus = [node.gpu for node in topology.nodes]
    bare = [gpu for gpu in gpus if not any(profile.is_of(gpu) for profile in profiles)]
    found: list[Carried] = []
    faults: list[Fault] = []
    for place in filter(_is_carried, _listed(document)):
        try:
            one = _one_carried(place, model, gpus)
        except InputError as error:
            faults.extend(error.faults)
            continue
        if any(one.profile.is_of(gpu) for gpu in bare) and model.is_called(one.profile.model):
            faults.append(place.fault(f"profile {one.profile.name} is of this model and GPU: name it alone", CARRY))
        if not bare:
            faults.append(place.fault("every GPU type here has a profile of its own; leave this one out"))
        found.append(one)
    if faults:
        raise InputError(faults)
    return tuple(found)


def _one_carried(place: Document, model: ModelSpec, gpus: list[Gpu]) -> Carried:
    """Return one profile to carry over, with the model and GPU that it measured."""
    spec = validate(CarryOver, place)
    profile = read_profile(resolve("profiles", place.at(CARRY)))
    if spec.model is not None:
        measured: ModelSpec | None = read_model(resolve("models", place.at("model")))
    else:
        measured = model if model.is_called(profile.model) else _model_preset(profile.model)
    gpu = find_gpu(profile.gpu, gpus)
    if measured is None:
        way_out = "give it beside carry_over, as model: FILE"
        raise InputError(place.fault(f"profile {profile.name} measured {profile.model}, which is no preset; {way_out}"))
    if not measured.is_called(profile.model):
        raise InputError(
            place.fault(f"profile {profile.name} measured {profile.model}, but model is {measured.name}", "model")
        )
    if gpu is None:
        way_out = "define it under gpus of the cluster"
        raise InputError(place.fault(f"profile {profile.name} measured {profile.gpu}, which is not known; {way_out}"))
    return Carried(profile, measured, gpu)


def _model_preset(name: str) -> ModelSpec | None:
    """Return the shipped model of this name or alias."""
    documents = (load_preset("models", preset) for preset in preset_names("models"))
    models = (read_model(document) for document in documents if document is not None)
    return next((model for model in models if model.is_called(name)), None)


def _profile_mistakes(profile: Profile, others: list[Profile], model: ModelSpec, gpus: list[Gpu]) -> Iterator[str]:
    """Yield why a profile cannot be used here."""
    if not model.is_called(profile.model):
        yield f"profile {profile.name} measured {profile.model}, but the model here is {model.name}{_WAY_OUT}"
    elif profile.measured_model is not None and (why := _other_type(profile, profile.measured_model, model)):
        yield why
    gpu = next((gpu for gpu in gpus if profile.is_of(gpu)), None)
    if gpu is None:
        types = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield f"profile {profile.name} measured {profile.gpu}, which is not in this cluster ({types}){_WAY_OUT}"
    elif any(other.is_of(gpu) for other in others):
        yield f"a second profile of {gpu.name}; give one per GPU type"


def _other_type(profile: Profile, measured: ModelSpec, model: ModelSpec) -> str | None:
    """Return what to say of a profile that was measured with another type of weights or KV cache, or None."""
    here, there = ((each.dtype, each.kv_dtype or each.dtype) for each in (model, measured))
    if here == there:
        return None
    ours, theirs = ("/".join(dict.fromkeys(each)) for each in (here, there))
    way_out = f"to plan for that, write model: {{like: {model.name}, dtype: {measured.dtype}}}"
    return f"profile {profile.name} measured {theirs}, the model here has {ours}; {way_out}"


def _as_measured(topology: Topology, profiles: tuple[Profile, ...]) -> Topology:
    """Return the cluster with the devices as profiles found them, where these carry their own figures.

    A stand-in such as `cpu-core` says little; what was measured must not run against it.
    """
    found = {
        gpu.name: profile.measured_gpu.model_copy(update={"name": gpu.name, "aliases": gpu.aliases})
        for gpu in dict.fromkeys(node.gpu for node in topology.nodes)
        for profile in profiles
        if profile.measured_gpu is not None and profile.is_of(gpu)
    }
    return topology.with_gpus(found) if found else topology


def _preset(name: str) -> Document:
    document = load_preset("profiles", name)
    assert document is not None  # the name came from the list of presets
    return document
