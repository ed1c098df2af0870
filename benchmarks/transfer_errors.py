"""Print how far off costs are that were carried over from other degrees, GPUs and models. `make transfer-errors`.

Every line compares predictions with measurements that had no part in them, beside the data-sheet roofline of the same
instances, which knows no measurement at all. A setting counts once; errors are relative. Constants of
`planner.cost.transferred.ERRORS` are the lines without indentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from planner.cost.base import Checks, CostModel
from planner.cost.fit import PHASES, fit, fit_elsewhere, sampled_degrees, unprofiled
from planner.cost.residual import predict
from planner.cost.settings import Settings, gather
from planner.cost.transferred import Kind, Place
from planner.sources.hf_config import read_model
from planner.sources.profiles import import_profile, read_profile
from planner.specs.base import Document, load_preset
from planner.specs.cluster import find_gpu
from planner.specs.model import ModelSpec
from planner.specs.profile import Profile, Samples

MODELS, GPUS = ("llama2-70b", "bloom-176b"), ("a100", "h100")
DATA = Path(__file__).parents[1] / "tests" / "data" / "profiles"
OPERATORS = DATA.parent / "operators"
_LATENCY_S = 1e-6


@dataclass(frozen=True, slots=True)
class Table:
    """A profile, and where it was measured."""

    profile: Profile
    place: Place

    @property
    def tps(self) -> list[int]:
        """The degrees that it has."""
        return sorted(sampled_degrees(self.profile))

    def rows(self, tp: int) -> Settings:
        """Return what was measured at a degree."""
        return gather(sampled_degrees(self.profile)[tp])

    def only(self, tps: list[int]) -> Profile:
        """Return the profile as if nothing but these degrees had been measured."""
        kept = [sample for tp, rows in sampled_degrees(self.profile).items() if tp in tps for sample in rows]
        return self.profile.model_copy(update={"samples": Samples.of(kept)})

    def fitted(self, tps: list[int], tp: int) -> CostModel:
        """Return the cost model at `tp` out of the degrees `tps` alone."""
        return fit(self.only(tps), self.place.model, self.place.gpu, tp)

    def roofline(self, tp: int) -> CostModel:
        """Return what data sheets say."""
        return unprofiled(self.place.model, self.place.gpu, tp, self.place.link_bytes_per_s, _LATENCY_S)


@dataclass(frozen=True, slots=True)
class Case:
    """One transfer: the cost model that came out, beside what was measured there."""

    cost: CostModel
    table: Table
    tp: int

    def errors(self, phase: str, cost: CostModel | None = None) -> np.ndarray:
        """Return the relative error of each setting in one phase, without sign."""
        rows = self.table.rows(self.tp)
        predicted_s = predict((cost or self.cost).parameters, rows.shapes)
        return np.abs(Checks(rows.shapes, rows.decode, rows.group, rows.time_s, predicted_s).errors(phase))

    def roofline_errors(self, phase: str) -> np.ndarray:
        """Return those of the data-sheet roofline."""
        return self.errors(phase, self.table.roofline(self.tp))


@cache
def splitwise(model: str, gpu: str) -> Table:
    """Return a Splitwise table that we ship."""
    profile = read_profile(_preset("profiles", f"splitwise-{model}-{gpu}"))
    return Table(profile, _usual(read_model(_preset("models", model)), f"{gpu}-80gb"))


@cache
def dynamo() -> Table:
    """Return Llama-3.1-8B in FP8 on H200 (its checkpoint is no preset)."""
    eight = read_model(_preset("models", "deepseek-v3")).quantisation
    model = read_model(_preset("models", "llama3.1-8b")).model_copy(update={"quantisation": eight})
    return Table(import_profile("dynamo", DATA / "dynamo", model="llama3.1-8b", gpu="h200"), _usual(model, "h200"))


@cache
def vidur(gpu: str) -> Table:
    """Return Llama-2-70B put together from Vidur's kernels: no host work, but degrees 1, 2, 4 and 8."""
    place = _usual(read_model(_preset("models", "llama2-70b")), f"{gpu}-80gb")
    with TemporaryDirectory() as folder:
        layers = _renamed(OPERATORS / f"vidur_mlp_llama2-70b_{gpu}.csv", Path(folder) / "layers.csv")
        reduce = _renamed(OPERATORS / f"vidur_all_reduce_{gpu}.csv", Path(folder) / "all_reduce.csv")
        profile = import_profile("vidur", layers, model=place.model, gpu=place.gpu, all_reduce=reduce)
    return Table(profile, place)


def _renamed(excerpt: Path, to: Path) -> Path:
    """Write an excerpt of Vidur's table with the column names that the table itself has."""
    head, _, rows = excerpt.read_text().partition("\n")
    names = {
        "tp": "num_tensor_parallel_workers",
        "tokens": "num_tokens",
        "workers": "num_workers",
        "per_node": "devices_per_node",
        "bytes": "size",
        "median_ms": "time_stats.all_reduce.median",
        "spread": "spread",
    }
    columns = [names.get(name, f"time_stats.{name.removesuffix('_ms')}.median") for name in head.split(",")]
    to.write_text(",".join(columns) + "\n" + rows)
    return to


def _usual(model: ModelSpec, gpu_name: str) -> Place:
    gpu = find_gpu(gpu_name)
    assert gpu is not None
    return Place.usual(model, gpu)


def _preset(family: str, name: str) -> Document:
    document = load_preset(family, name)
    assert document is not None
    return document


def left_out(table: Table) -> Iterator[tuple[Kind, Case]]:
    """Yield each degree of a table predicted from all others."""
    for tp in table.tps:
        others = [other for other in table.tps if other != tp]
        kind: Kind = "interpolated" if min(others) < tp < max(others) else "extrapolated"
        yield kind, Case(table.fitted(others, tp), table, tp)


def one_degree(table: Table, doublings: int) -> Iterator[Case]:
    """Yield each degree predicted from one other, so many doublings away."""
    for tp, other in permutations(table.tps, 2):
        if max(tp, other) == min(tp, other) << doublings:
            yield Case(table.fitted([other], tp), table, tp)


def moved(from_: Table, to: Table) -> Iterator[Case]:
    """Yield each degree that both have, predicted for one from the other."""
    tps = [tp for tp in to.tps if tp in from_.tps]
    for tp, cost in fit_elsewhere(from_.profile, from_.place, dict.fromkeys(tps, to.place)).items():
        yield Case(cost, to, tp)


def cases() -> dict[Kind, list[Case]]:
    """Return what the stated errors rest on, by kind: Splitwise's tables alone, whole instances of one engine."""
    found: dict[Kind, list[Case]] = {
        kind: [] for kind in ("interpolated", "extrapolated", "one degree", "gpu", "model")
    }
    for gpu in GPUS:
        for kind, case in left_out(splitwise("llama2-70b", gpu)):
            found[kind].append(case)
        found["one degree"] += one_degree(splitwise("llama2-70b", gpu), 1)
        for model, other in permutations(MODELS, 2):
            found["model"] += moved(splitwise(model, gpu), splitwise(other, gpu))
    for model in MODELS:
        for gpu, other in permutations(GPUS, 2):
            found["gpu"] += moved(splitwise(model, gpu), splitwise(model, other))
    return found


def others() -> Iterator[tuple[str, list[Case]]]:
    """Yield what the stated errors do not rest on, to see how far they hold."""
    llama = [splitwise("llama2-70b", gpu) for gpu in GPUS]
    yield "  one degree, x 4", [case for table in llama for case in one_degree(table, 2) if case.tp == 8]
    yield "  one degree, x 1/4", [case for table in llama for case in one_degree(table, 2) if case.tp == 2]
    kernels = [pair for gpu in GPUS for pair in left_out(vidur(gpu))]
    for way in ("interpolated", "extrapolated"):
        yield f"  {way}, kernels", [case for kind, case in kernels if kind == way]
    yield "  gpu, kernels", [case for a, b in permutations(GPUS, 2) for case in moved(vidur(a), vidur(b))]
    pairs = [(a, b, g, h) for a, b in permutations(MODELS, 2) for g, h in permutations(GPUS, 2)]
    both = [case for a, b, g, h in pairs for case in moved(splitwise(a, g), splitwise(b, h))]
    yield "  gpu and model", both
    new, old = dynamo(), splitwise("llama2-70b", "h100")
    cost = fit_elsewhere(old.profile, old.place, {1: new.place})[1]
    yield "  other engine, 8B on H200", [Case(cost, new, 1)]
    costs = fit_elsewhere(new.profile, new.place, dict.fromkeys(old.tps, old.place))
    yield "  other engine, 70B on H100", [Case(costs[tp], old, tp) for tp in old.tps]


def pooled(each: list[Case], phase: str, roofline: bool = False) -> np.ndarray:
    """Return the errors of all settings of all cases in one phase."""
    return np.concatenate([case.roofline_errors(phase) if roofline else case.errors(phase) for case in each])


def stated(each: list[Case], phase: str) -> tuple[float, float, float, float]:
    """Return median, 95th percentile, worst and root mean square, as `TermError` holds them."""
    off = pooled(each, phase)
    return float(np.median(off)), float(np.percentile(off, 95)), float(off.max()), float(np.sqrt(np.mean(off**2)))


def _line(name: str, each: list[Case], phase: str) -> str:
    carried = "".join(f"{100 * number:6.1f}" for number in stated(each, phase))
    sheet = pooled(each, phase, roofline=True)
    known = f"{100 * np.median(sheet):8.1f}{100 * np.percentile(sheet, 95):6.1f}"
    return f"{name:26} {phase:7} {len(sheet):4} {carried}{known}"


def main() -> None:
    """Print two lines per kind of transfer."""
    print(f"{'errors in %':40}{'carried over':>24}{'data sheet':>14}")
    print(f"{'':26} {'phase':7} {'rows':>4} {'median   p95 worst   rms':>24}{'median   p95':>14}")
    for name, each in [*cases().items(), *others()]:
        for phase in PHASES:
            print(_line(name, each, phase), flush=True)


if __name__ == "__main__":
    main()
