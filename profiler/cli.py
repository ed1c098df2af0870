"""From the options of `planner profile` to a profile on disk: the whole run on one screen."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.errors import Fault, InputError
from planner.specs.base import check_output, suggest, write_text
from planner.specs.layout import Layout
from planner.specs.profile import Profile
from profiler.progress import shown

if TYPE_CHECKING:
    from planner.specs.gpu import Gpu
    from planner.specs.model import ModelSpec
    from profiler.build import Facts
    from profiler.progress import Quiet, _Lines
    from profiler.session import Clock
    from profiler.store import Journal
    from runtime.model_files import ModelFiles

LINKS_SHARE = 0.05
"""Of the time, kept for links and copies after the layouts."""
_CPU_KV_BYTES = 2 * 2**30
"""KV memory that is written and used on a CPU, where others live in the same memory."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    model: str
    output: Path
    tps: tuple[int, ...] = (1,)
    pps: tuple[int, ...] = (1,)
    devices: tuple[int, ...] = ()
    device: str = "auto"
    dtype: str = ""
    load_format: Literal["auto", "dummy"] = "auto"
    budget_s: float = 600.0
    seed: int = 0
    fresh: bool = False
    quiet: bool = False
    links: bool = True
    name: str = ""
    max_requests: int = 0
    max_tokens: int = 0
    max_context: int = 0
    """Longest request that is measured; 0: what the model can hold."""
    threads: int = 0
    beside: int = 0
    """Copies of the engine that are kept busy on further devices meanwhile."""
    block_tokens: int = 16

    @property
    def layouts(self) -> list[Layout]:
        """Every combination that was asked for, in order."""
        return [Layout(tp, pp) for tp in sorted(set(self.tps)) for pp in sorted(set(self.pps))]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run."""

    profile: Profile
    resumed: bool
    measured: int
    """Settings, over all layouts."""
    journal: Path


def run(options: Options) -> Outcome:
    """Measure, or go on measuring, and write the profile; return it. Raises InputError, with the way out.

    Interrupted, it keeps what it has: the same command goes on.
    """
    check_output(options.output)
    _needs_torch()
    with shown(options.quiet) as watch:
        watch.at("opening the model", 0.0, options.budget_s)
        return _Run.of(options, watch).measured()


def _needs_torch() -> None:
    if find_spec("torch") is None:
        raise InputError("profiling runs the model and needs torch: pip install 'goodput-planner[runtime]'")


@dataclass(slots=True)
class _Run:
    """A run with all that was found out before measuring."""

    options: Options
    watch: Quiet | _Lines
    files: ModelFiles
    device: str
    dtype: str
    model: ModelSpec
    model_is_preset: bool
    preset_gpu: Gpu | None
    indices: tuple[int, ...]
    """GPUs, or cores of the CPU, that this run may use: as many as there are, before any process is pinned."""

    @classmethod
    def of(cls, options: Options, watch: Quiet | _Lines) -> _Run:
        from profiler.device import preset_gpu
        from profiler.model import named_as_preset, same_preset, spec_of
        from runtime.model_files import open_model, torch_dtype

        wanted = torch_dtype(options.dtype)
        files = open_model(options.model, wanted, options.load_format, tokenizer=False, seed=options.seed)
        dtype = options.dtype or files.config.dtype
        spec = named_as_preset(spec_of(files.config, _name(files.name), dtype))
        preset = same_preset(spec)
        device = _device(options)
        _check_layouts(preset or spec, options.layouts)
        run = cls(
            options,
            watch,
            files,
            device,
            dtype,
            preset or spec,
            preset is not None,
            preset_gpu(device),
            _indices(options, device),
        )
        if options.beside:
            for layout in options.layouts:
                run.group(layout, options.beside)
        return run

    def group(self, layout: Layout, number: int) -> tuple[int, ...]:
        """Return the GPUs or cores of one of several copies of an instance. Raises InputError where they run out."""
        each = layout.gpus * (1 if self.device == "cuda" else self.threads(layout))
        found = self.indices[number * each : (number + 1) * each]
        if len(found) < each:
            what = "GPUs" if self.device == "cuda" else "cores"
            needed = (self.options.beside + 1) * each
            raise InputError(
                f"--beside {self.options.beside}: {layout} and its copies take {needed} {what}, here are "
                f"{len(self.indices)}; give --threads, --devices or fewer copies"
            )
        return found

    def places(self, count: int) -> tuple[str, ...]:
        """Return the devices of `count` ranks, as torch names them."""
        return tuple(f"cuda:{index}" for index in self.indices[:count]) if self.device == "cuda" else ("cpu",) * count

    def threads(self, layout: Layout) -> int:
        """Return the CPU threads of each rank."""
        return self.options.threads or max(1, len(self.indices) // layout.gpus // (self.options.beside + 1))

    def measured(self) -> Outcome:
        """Measure all layouts and links, into the journal, then write the profile out of it."""
        from profiler.build import profile_of
        from profiler.session import Clock
        from profiler.store import Journal, journal_path

        path = journal_path(self.options.output)
        with closing(Journal(path, self._identity(), self.options.fresh)) as journal:
            clock = Clock(self.options.budget_s, _spent_s(journal))
            facts = self._facts(journal)
            with self._kept_on_interrupt(journal):
                self._layouts(journal, clock, facts)
                if self.options.links and not journal.of("transfer"):
                    self.watch.at("links and copies", clock.spent_s, clock.budget_s)
                    journal.append(self._transfers())
            journal.append([{"kind": "end", "at_s": round(clock.spent_s, 3), "load": os.getloadavg()[0]}])
            profile = profile_of(journal, self._facts(journal))
            write_text(self.options.output, _yaml(profile))
            settings = {(r["tp"], r["pp"], *r["setting"]) for r in journal.of("sample")}
            return Outcome(profile, journal.resumed, len(settings), path)

    @contextmanager
    def _kept_on_interrupt(self, journal: Journal) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            import sys

            kept = len(journal.of("sample"))
            print(f"{kept} measurements kept in {journal.path}; the same command goes on from there", file=sys.stderr)
            raise

    # ---- what the run is

    def _identity(self) -> dict[str, str | int]:
        """Return what a journal must agree on to be gone on with."""
        import torch

        from profiler.environment import device_name

        options = self.options
        beside: dict[str, str | int] = {"copies beside": options.beside} if options.beside else {}
        return (
            beside
            | {
                "model": self.model.name,
                "model_digest": self.files.config.digest,
                "weights": options.load_format,
                "dtype": self.dtype,
                "device": device_name(self.places(1)[0]),
                "devices": ",".join(map(str, self.indices)),
                "torch": torch.__version__,
                "seed": options.seed,
                "threads": options.threads,
                "block_tokens": options.block_tokens,
                "max_requests": self._max_requests,
                "max_tokens": self._max_tokens,
            }
            | ({"max context": options.max_context} if options.max_context else {})
        )

    def _facts(self, journal: Journal) -> Facts:
        """Return what the profile says of itself; the device and where it ran are kept in the journal."""
        from planner.specs.gpu import Gpu
        from planner.specs.measured import Environment
        from profiler.build import Facts, gpu_of

        if not journal.of("environment"):
            journal.append([self._environment()])
        kept = journal.of("environment")[0]
        ends = journal.of("end")
        environment = Environment.model_validate(kept["environment"])
        if ends:
            update = {"measured_s": ends[-1]["at_s"], "load_after": round(ends[-1]["load"], 2)}
            environment = environment.model_copy(update=update)
        gpu = Gpu.model_validate(kept["gpu"])
        name = self.options.name or f"{self.model.name}-{gpu.name}"
        joined = "one device" if max(layout.gpus for layout in self.options.layouts) == 1 else _joined(self.device)
        facts = Facts(
            name, self.model, gpu, self.model_is_preset, self.preset_gpu is not None, self.dtype, joined, environment
        )
        return replace(facts, gpu=gpu_of(journal, gpu, self.model, facts.gpu_is_preset))

    def _environment(self) -> dict[str, Any]:
        from profiler.device import measured_gpu, rates
        from profiler.environment import environment

        most = max(layout.gpus for layout in self.options.layouts)
        place, threads = self.places(1)[0], self.threads(Layout(1))
        cores = (threads, len(self.indices)) if self.device == "cpu" else (1, 1)
        gpu = self.preset_gpu or measured_gpu(place, rates(place, self.dtype, threads), cores)
        found = environment(
            self.places(most),
            self.threads(Layout(most)),
            self.files.config.digest,
            "dummy" if self.options.load_format == "dummy" else self.files.name,
            self.options.seed,
        ).model_copy(update={"busy_beside": self.options.beside})
        return {"kind": "environment", "gpu": gpu.model_dump(mode="json"), "environment": found.model_dump(mode="json")}

    # ---- measuring

    @property
    def _max_requests(self) -> int:
        return self.options.max_requests or (256 if self.device == "cuda" else 32)

    @property
    def _max_tokens(self) -> int:
        asked = self.options.max_tokens or (16384 if self.device == "cuda" else 4096)
        return min(asked, self.files.config.max_positions - 2)

    def _layouts(self, journal: Journal, clock: Clock, facts: Facts) -> None:
        from profiler.build import gpu_of
        from profiler.session import Case, Session
        from profiler.timer import timer_for

        layouts = self.options.layouts
        of_layouts = replace(clock, budget_s=clock.budget_s * (1.0 - LINKS_SHARE * self.options.links))
        for index, layout in enumerate(layouts):
            case = Case(
                self.model,
                lambda: gpu_of(journal, facts.gpu, self.model, facts.gpu_is_preset),
                layout,
                self.options.seed,
            )
            if _is_done(journal, layout, of_layouts):
                continue
            self.watch.at(f"starting {layout}", clock.spent_s, clock.budget_s)
            with self._beside(layout), closing(self._open(layout)) as subject:
                timer = timer_for(self.places(1)[0], in_process=layout.gpus == 1)
                left = len(layouts) - index
                Session(case, subject, timer, journal, of_layouts, left, self.watch).run()

    def _beside(self, layout: Layout) -> AbstractContextManager[None]:
        """Keep the copies of the engine busy that the user asked for."""
        from profiler.beside import Beside, busy

        own = replace(self.options, beside=0, threads=self.threads(layout), device=self.device)
        groups = [self.group(layout, 1 + k) for k in range(self.options.beside)]
        return busy([Beside(replace(own, devices=group), layout) for group in groups])

    def open(self, layout: Layout, devices: tuple[int, ...], most_kv_bytes: int, kv_blocks: int = 0) -> Any:
        """Return the engine at a layout, on these GPUs or cores (none: anywhere).

        Raises InputError when it cannot be cut so, or the devices are too few.
        """
        import torch

        from profiler.engine import EngineSubject
        from runtime.load import load_executor
        from runtime.settings import EngineSettings

        if self.device == "cuda" and layout.gpus > len(self.indices):
            raise InputError(f"{layout} takes {layout.gpus} GPUs, --devices names {len(self.indices)}")
        settings = EngineSettings(
            tp=layout.tp,
            pp=layout.pp,
            device=self.device,
            device_indices=devices,
            dtype=self.dtype,
            threads=self.threads(layout),
            block_tokens=self.options.block_tokens,
            kv_blocks=kv_blocks,
            max_batch=self._max_requests,
            step_tokens=self._max_tokens,
            memory_fraction=EngineSettings().memory_fraction * self._memory_share(layout),
            seed=self.options.seed,
        )
        if self.device == "cpu":
            torch.set_num_threads(self.threads(layout))
        executor = load_executor(self.files, self.options.model, settings, self.options.load_format)
        most = most_kv_bytes // max(1, self.model.kv_bytes_per_token)
        return EngineSubject(self.files.config, executor, settings, most, self.options.max_context or 2**30)

    def _open(self, layout: Layout) -> Any:
        """Return the engine to be measured at a layout."""
        if self.device == "cuda":
            return self.open(layout, self.indices[: layout.gpus], 2**60)
        return self.open(layout, self.group(layout, 0) if self.options.beside else self.options.devices, _CPU_KV_BYTES)

    def _memory_share(self, layout: Layout) -> float:
        """Return the share of a device's memory that an instance may count on: cores have theirs together."""
        if self.device == "cuda":
            return 1.0
        return min(1.0, layout.gpus * self.threads(layout) / len(self.indices))

    def _transfers(self) -> list[dict[str, Any]]:
        """Return what bytes take between ranks, memories and the disk."""
        from profiler import links

        sizes = links.message_sizes(
            self.model.activation_bytes_per_token, self.options.block_tokens * self.model.kv_bytes_per_token
        )
        most = max(layout.gpus for layout in self.options.layouts)
        each_s = LINKS_SHARE * self.options.budget_s / (5 * len(sizes))
        found = list(links.copies(self.places(max(most, 1)), sizes, each_s))
        if self.device == "cpu":
            config = self.files.config
            kind = links.Blocks(config.layers, self.options.block_tokens, config.kv_heads, config.head_dim, self.dtype)
            found.append(links.pulls(kind, (1, 4, 16, 64), self.indices[:2]))
        if most > 1:
            found += links.between_ranks(links.Ranks(self.places(most), self.threads(Layout(most))), sizes)
        found += links.disk(self.options.output.resolve().parent, sizes)
        return [{"kind": "transfer", "transfer": each.model_dump(mode="json")} for each in found]


def _check_layouts(model: ModelSpec, layouts: Sequence[Layout]) -> None:
    """Raise InputError with one line per layout that the model cannot be cut into."""
    faults = [(layout, model.tp_fault(layout.tp) or model.pp_fault(layout.pp)) for layout in layouts]
    if found := [f"{layout}: {fault}" for layout, fault in faults if fault]:
        raise InputError([Fault(line) for line in found])


def _is_done(journal: Journal, layout: Layout, clock: Clock) -> bool:
    """Return True when a layout needs no engine any more: on target, or its share of the time gone for good."""
    from profiler.session import TIME_UP

    done = journal.of("layout done", tp=layout.tp, pp=layout.pp)
    return bool(done) and (done[-1]["why"] != TIME_UP or done[-1]["budget_s"] >= clock.budget_s)


def _spent_s(journal: Journal) -> float:
    return max((float(record.get("at_s", 0.0)) for record in journal.records), default=0.0)


def _name(name: str) -> str:
    import re

    return re.sub(r"[^a-z0-9._+-]+", "-", name.lower()).strip("-._+") or "model"


def _device(options: Options) -> str:
    """Return cpu or cuda. Raises InputError for GPUs that are not there."""
    from runtime.device import device_of, gpus

    device = device_of(options.device)
    if device == "cuda":
        if absent := [index for index in options.devices if index >= gpus()]:
            raise InputError(f"--devices: there is no GPU {absent[0]}, only 0 to {gpus() - 1}")
    elif absent := [index for index in options.devices if index not in os.sched_getaffinity(0)]:
        raise InputError(f"--devices: core {absent[0]} is not among those that this process may use")
    return device


def _indices(options: Options, device: str) -> tuple[int, ...]:
    if options.devices:
        return options.devices
    if device == "cuda":
        return tuple(range(max(layout.gpus for layout in options.layouts) * (options.beside + 1)))
    return tuple(sorted(os.sched_getaffinity(0)))


def _joined(device: str) -> str:
    return "nccl, within one host" if device == "cuda" else "gloo over loopback"


def _yaml(profile: Profile) -> str:
    from planner.sources.profiles import to_yaml

    return to_yaml(profile)


def parse_numbers(text: str, flag: str, least: int) -> tuple[int, ...]:
    """Return `1,2,4` as numbers. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise InputError(f"{flag}: expected whole numbers from {least}, such as {least},{least + 1}; got {text!r}")
    return tuple(int(part) for part in parts)


def parse_choice(text: str, flag: str, known: tuple[str, ...]) -> str:
    """Return `text` if it is one of `known`. Raises InputError."""
    if text in known:
        return text
    raise InputError(f"{flag}: expected {', '.join(filter(None, known))}, got {text!r}{suggest(text, known)}")


def parse_load_format(text: str) -> Literal["auto", "dummy"]:
    """Return where weights come from. Raises InputError."""
    return "dummy" if parse_choice(text, "--load-format", ("auto", "dummy")) == "dummy" else "auto"


def parse_seconds(text: str) -> float:
    """Return `10m`, `90s` or `1h` in seconds. Raises InputError."""
    units = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
    number = text.strip().rstrip("smhin")
    unit = text.strip()[len(number) :]
    try:
        seconds = float(number) * units[unit or "s"]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 1.0 <= seconds <= 86400.0:
        raise InputError(f"--time-budget: expected a time from 1s to 24h, such as 10m, got {text!r}")
    return seconds


# ---- what is printed


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as plain data."""
    from planner.fit_report import to_json as fit_json

    profile = outcome.profile
    environment = profile.environment.model_dump(mode="json") if profile.environment else None
    return {
        "profile": profile.name,
        "digest": profile.digest,
        "settings": outcome.measured,
        "held_out": [each.model_dump(mode="json") for each in profile.accuracy],
        "transfers": [each.model_dump(mode="json") for each in profile.transfers],
        "kv_tokens": [each.model_dump(mode="json") for each in profile.kv_tokens],
        "environment": environment,
        **fit_json(_reports(profile)),
    }


def _reports(profile: Profile) -> Sequence[Any]:
    """Return the fit report of the layouts without pipeline stages, which are those that plans start from."""
    from planner.fit_report import report_of_profile

    return [report_of_profile(profile)] if profile.tps else []


def render(outcome: Outcome) -> Iterator[Any]:
    """Yield what the terminal shows: the fit report, the held-out errors, links, and what was noticed."""
    from planner.fit_view import render as render_fit
    from profiler.view import tables

    yield from render_fit(_reports(outcome.profile))
    yield from tables(outcome.profile)
