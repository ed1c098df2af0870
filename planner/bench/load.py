"""What is sent, and when: a workload cut to so many requests, or to a time, with its SLO and its warm-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.search.goodput import WARMUP, classify
from planner.sources.workloads import read_workload
from planner.specs.base import Document, preset_names, read_text, resolve, validate
from planner.specs.deployment import Deployment
from planner.specs.slo import Slo
from planner.specs.workload import Clients, Requests, Workload

BLOCK_TOKENS = 512
"""Prompt tokens per id of `Requests.prefix_blocks`."""
_MOST_REQUESTS = 1_000_000
_MOST_CLIENTS = 10_000
_DRAWN = 100_000
"""Requests kept ready for a closed loop that runs for a time: how many it will send shows only then."""
_UNLIKE = 0.05
"""Share by which mean lengths may differ from those of the plan before it is said."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks for; None where the deployment or the workload decides."""

    workload: str | None = None
    slo: str | None = None
    rate_rps: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup_s: float | None = None
    concurrency: int | None = None
    think_s: float | None = None
    max_prompt: int | None = None
    max_output: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Requests in the order in which they are sent."""

    name: str
    requests: Requests
    """Their arrivals count from the start of the replay; inf in a closed loop, where they are not known ahead."""
    slos: tuple[Slo, ...]
    rate_rps: float | None
    """Arrivals per second; None in a closed loop."""
    clients: Clients | None
    ends_s: float
    """When the last request is sent, or until when the clients go on; inf for clients with a number of requests."""
    given_warmup_s: float | None
    seed: int
    as_planned: bool = False
    """True for the deployment's own workload and SLO, nothing cut: what its file states is of such requests."""
    notes: tuple[str, ...] = ()

    def warmup_s(self, last_sent_s: float) -> float:
        """Return the time before which a request is not counted, for a run whose last one was sent then [s].

        15 % of the run unless it was given, as in the simulations that a plan rests on.
        """
        return WARMUP * last_sent_s if self.given_warmup_s is None else self.given_warmup_s

    def taken(self, count: int) -> Requests:
        """Return the first so many requests."""
        return self.requests.take(np.arange(count))


def load_of(question: Question, deployment: Deployment | None) -> Load:
    """Return the load that the user and the deployment describe together. Raises InputError."""
    slos = slos_of(question.slo, deployment)
    workload = _workload(question, deployment)
    clients = _clients(question, workload)
    if clients is not None and question.rate_rps is not None:
        raise InputError("--rate and a closed loop exclude each other: clients send as fast as they are answered")
    if question.requests is not None and question.duration_s is not None:
        raise InputError("--requests and --duration exclude each other; give the one or the other")
    duration_s = question.duration_s if question.requests is not None else (question.duration_s or 300.0)
    if clients is None:
        rate_rps = _rate_rps(question, workload, deployment)
        requests = _arrivals(workload, rate_rps, duration_s, question.requests, question.seed)
        ends_s = float(requests.arrival_s[-1])
    else:
        rate_rps, ends_s = None, np.inf if duration_s is None else duration_s
        requests = workload.draw(question.requests or _DRAWN, question.seed)
        clients = replace(clients, until_s=ends_s, seed=question.seed)
    warmup_s = question.warmup_s
    if warmup_s is not None and not 0 <= warmup_s < ends_s:
        raise InputError(f"--warmup: expected less than the {ends_s:.4g} s of the run, got {warmup_s:g} s")
    drawn = requests
    requests = classify(_clipped(requests, question), slos, question.seed)
    notes = (*workload.notes, *_notes(workload, requests, question, deployment))
    return Load(
        workload.name,
        requests,
        slos,
        rate_rps,
        clients,
        ends_s,
        warmup_s,
        question.seed,
        _as_planned(workload, drawn, requests, slos, deployment),
        notes,
    )


def _as_planned(
    workload: Workload, drawn: Requests, sent: Requests, slos: tuple[Slo, ...], deployment: Deployment | None
) -> bool:
    if deployment is None or slos != deployment.slo:
        return False
    planned = deployment.workload.get("name"), deployment.workload.get("arrivals")
    whole = all((getattr(drawn, key) == getattr(sent, key)).all() for key in ("prompt_tokens", "output_tokens"))
    return planned == (workload.name, workload.spec.process) and bool(whole)


def slos_of(text: str | None, deployment: Deployment | None) -> tuple[Slo, ...]:
    """Return the SLO that `ttft=2s,tpot=200ms,attainment=90%` means, or the deployment's. Raises InputError."""
    if text is None:
        if deployment is None:
            raise InputError("expected --slo, such as --slo ttft=2s,tpot=200ms,attainment=90%, or --deployment")
        return deployment.slo
    names = {"ttft": "ttft_s", "tpot": "tpot_s", "attainment": "attainment"}
    parts: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in names or not equals or names[key] in parts:
            raise InputError(f"--slo: expected ttft=2s,tpot=200ms[,attainment=90%], got {text!r}")
        parts[names[key]] = value
    return (validate(Slo, Document(parts, "--slo")),)


def seconds(text: str, option: str) -> float:
    """Return `90s`, `5m`, `1.5h` or a bare number in seconds. Raises InputError that names the option."""
    number = text.strip().rstrip("shmin")
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}
    try:
        value = float(number) * units[text.strip()[len(number) :].strip()]
    except (ValueError, KeyError):
        value = np.nan
    if not 0 <= value <= 7 * 86400:
        raise InputError(f"{option}: expected a time such as 90s, 5m or 1h, got {text!r}")
    return float(value)


def _workload(question: Question, deployment: Deployment | None) -> Workload:
    if question.workload is not None:
        return read_workload(_document(question.workload))
    name = deployment.workload.get("name") if deployment is not None else None
    if not isinstance(name, str):
        raise InputError("expected --workload: a preset's name, a workload (YAML) or a trace (.csv, .jsonl)")
    if name not in preset_names("workloads"):
        raise InputError(f"the deployment was planned for workload {name!r}, which is no preset; give --workload FILE")
    return read_workload(resolve("workloads", Document(name, "--workload")))


def _document(text: str) -> Document:
    """Return what --workload means; a bare trace needs no YAML."""
    if not text.endswith((".csv", ".jsonl")):
        return resolve("workloads", Document(text, "--workload"))
    source = "mooncake" if '"hash_ids"' in read_text(text)[:100_000] else "trace"
    return Document({"source": source, "file": text}, "--workload")


def _clients(question: Question, workload: Workload) -> Clients | None:
    """Return who sends in a closed loop, or None for arrivals of their own."""
    clients = workload.clients
    if question.concurrency is not None:
        if not 1 <= question.concurrency <= _MOST_CLIENTS:
            raise InputError(f"--concurrency: expected 1 to {_MOST_CLIENTS:,} clients, got {question.concurrency}")
        clients = replace(clients or Clients(1), count=question.concurrency)
    if question.think_s is not None:
        if clients is None:
            raise InputError("--think is the pause of clients in a closed loop; give --concurrency as well")
        clients = replace(clients, think_s=question.think_s)
    return clients


def _rate_rps(question: Question, workload: Workload, deployment: Deployment | None) -> float:
    rate_rps = question.rate_rps
    if rate_rps is None:
        rate_rps = deployment.prediction.rate_rps if deployment is not None else workload.design_rate_rps
    if rate_rps is None:
        raise InputError(f"workload {workload.name} has no rate of its own; give --rate, or --concurrency")
    if not (isfinite(rate_rps) and 1e-4 <= rate_rps <= 1e5):
        raise InputError(f"--rate: expected 1e-4 to 1e5 requests/s, got {rate_rps:g}")
    return float(rate_rps)


def _arrivals(workload: Workload, rate_rps: float, duration_s: float | None, count: int | None, seed: int) -> Requests:
    """Return the requests of a time, or the first so many."""
    if count is None:
        assert duration_s is not None
        if rate_rps * duration_s > _MOST_REQUESTS:
            raise InputError(
                f"{rate_rps * duration_s:.3g} requests are more than {_MOST_REQUESTS:,}; shorten --duration"
            )
        requests = workload.generate(rate_rps, duration_s, seed, prefix_blocks=True)
        if not len(requests):
            raise InputError(f"no request arrives in {duration_s:g} s at {rate_rps:g} requests/s; lengthen --duration")
        return requests
    if not 1 <= count <= _MOST_REQUESTS:
        raise InputError(f"--requests: expected 1 to {_MOST_REQUESTS:,}, got {count}")
    horizon_s = 1.25 * (count + 10) / rate_rps
    while len(requests := workload.generate(rate_rps, horizon_s, seed, prefix_blocks=True)) < count:
        horizon_s *= 1.5
    return requests.take(np.arange(count))


def _clipped(requests: Requests, question: Question) -> Requests:
    """Return the requests with prompts and outputs of at most so many tokens."""
    for option, most in (("--max-prompt", question.max_prompt), ("--max-output", question.max_output)):
        if most is not None and most < 1:
            raise InputError(f"{option}: expected at least 1 token, got {most}")
    prompt = requests.prompt_tokens
    if question.max_prompt is not None:
        prompt = np.minimum(prompt, question.max_prompt)
    output = requests.output_tokens
    if question.max_output is not None:
        output = np.minimum(output, question.max_output)
    blocks = requests.prefix_blocks
    if blocks is not None:
        needed = (-(-prompt // BLOCK_TOKENS)).tolist()
        blocks = tuple(ids[:most] for ids, most in zip(blocks, needed, strict=True))
    return replace(requests, prompt_tokens=prompt, output_tokens=output, prefix_blocks=blocks)


def _notes(workload: Workload, requests: Requests, question: Question, deployment: Deployment | None) -> list[str]:
    """Return what a reader of the comparison should know about the load."""
    notes = []
    for what, most, tokens in (
        ("prompts", question.max_prompt, requests.prompt_tokens),
        ("outputs", question.max_output, requests.output_tokens),
    ):
        if most is not None and (clipped := int((tokens == most).sum())):
            notes.append(f"{what} were cut to {most} tokens: {clipped} of {len(requests)} have that many")
    if deployment is None:
        return notes
    for what, most in (("prompt", question.max_prompt), ("output", question.max_output)):
        tokens = getattr(workload.table, f"{what}_tokens")
        planned, mean = deployment.workload.get(f"mean_{what}_tokens"), float(np.minimum(tokens, most or np.inf).mean())
        if isinstance(planned, int | float) and abs(mean / planned - 1) > _UNLIKE:
            notes.append(f"planned for {planned:.4g} {what} tokens per request on average; these have {mean:.4g}")
    return notes
