"""What benchmark clients saw of a real server, request by request: `vllm bench serve` and SGLang's `bench_serving`.

Both save, with the right flags, the lengths of every request, its time to first token and the gaps between its tokens.
vLLM also saves when each request was sent; SGLang does not, but where the client sent as fast as its limit of
concurrent requests let it, the order tells: the next request leaves when one comes back.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import Fault, InputError
from planner.specs.base import read_text, short

_MOST_REQUESTS = 1_000_000
_NO_GAP = 0.2
"""A first gap below this share of the usual one separates the role from the text of one token."""
_SEVERAL = 1.05


@dataclass(frozen=True, slots=True, eq=False)
class BenchRun:
    """One run of a client against one server. Arrays are (requests,), in the order in which they were sent."""

    file: str
    engine: str
    model: str
    tp: int | None
    pp: int | None
    dtype: str | None
    kv_tokens: int | None
    start_s: np.ndarray
    ttft_s: np.ndarray
    prompt_tokens: np.ndarray
    cached_tokens: np.ndarray | None
    """Of each prompt, found in the server's prefix cache; None where the file does not say."""
    output_tokens: np.ndarray
    gaps_s: tuple[np.ndarray, ...]
    """Between the tokens of each request, output_tokens - 1 of them; fewer where tokens came several at a time."""
    notes: tuple[str, ...]


def read_runs(path: str | Path, kind: str = "auto") -> list[BenchRun]:
    """Return the runs in a file: one JSON document, or one per line where a client appended.

    `kind`: vllm, sglang or auto. Raises InputError with the line and the flag that would have saved what is missing.
    """
    file = str(path)
    found = []
    for line, data in _documents(read_text(path), file):
        reader = READERS.get(kind) or READERS[_kind_of(data, file, line)]
        found.append(reader(_Record(data, file, line)))
    if not found:
        raise InputError(Fault("expected the JSON of a benchmark client, got nothing", file))
    return found


def _documents(text: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each JSON document with the line that it begins on."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        line = text.count("\n", 0, at) + 1
        try:
            data, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise InputError(Fault(f"not valid JSON: {error.msg}", file, error.lineno, error.colno)) from None
        except RecursionError:
            raise InputError(Fault("not valid JSON: nested too deeply", file, line)) from None
        if not isinstance(data, dict):
            raise InputError(Fault("expected a JSON object, the result of a benchmark client", file, line))
        yield line, data


def _kind_of(data: dict[str, Any], file: str, line: int) -> str:
    """Return which client wrote a document, by keys that only one of them writes."""
    if {"endpoint_type", "tokenizer_id"} & data.keys():
        return "vllm"
    if {"server_info", "random_range_ratio", "sharegpt_output_len", "accept_length"} & data.keys():
        return "sglang"
    raise InputError(
        Fault("neither vllm bench serve nor sglang.bench_serving writes such a file; say which with --from", file, line)
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """One document, with where it stands."""

    data: dict[str, Any]
    file: str
    line: int

    def fault(self, message: str) -> InputError:
        return InputError(Fault(message, self.file, self.line))

    def whole(self, *names: str) -> int | None:
        """Return the first whole number from 1 under one of `names`; metadata holds them as text."""
        for name in names:
            value = self.data.get(name)
            if isinstance(value, str) and value.isascii() and value.isdigit():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10**9:
                return value
        return None

    def text(self, *names: str) -> str | None:
        return next((value for name in names if isinstance(value := self.data.get(name), str) and value), None)

    def numbers(self, name: str, count: int | None, flag: str) -> np.ndarray:
        """Return a list of numbers, not below 0, one per request."""
        values = self.data.get(name)
        if not isinstance(values, list):
            raise self.fault(f"{name} of each request is missing: run the client again with {flag}")
        if count is not None and len(values) != count:
            raise self.fault(f"{name}: expected {count} numbers, one per request, got {len(values)}")
        if len(values) > _MOST_REQUESTS:
            raise self.fault(f"expected at most {_MOST_REQUESTS} requests, got {len(values)}")
        return self._sound(name, values)

    def _sound(self, name: str, values: list[Any]) -> np.ndarray:
        for at, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
                raise self.fault(f"{name}[{at}]: expected a number from 0, got {_short(value)}")
        return np.array(values, dtype=float)

    def gaps(self, count: int, flag: str) -> tuple[np.ndarray, ...]:
        """Return the gaps between the tokens of each request."""
        values = self.data.get("itls")
        if not isinstance(values, list) or not all(isinstance(each, list) for each in values):
            raise self.fault(f"itls, the gaps between tokens, are missing: run the client again with {flag}")
        if len(values) != count:
            raise self.fault(f"itls: expected {count} lists, one per request, got {len(values)}")
        return tuple(self._sound(f"itls[{at}]", each) for at, each in enumerate(values))


def _short(value: Any) -> str:
    return short(value, 40)


# ---- vLLM


def _vllm(record: _Record) -> BenchRun:
    """Return a run of `vllm bench serve` (vllm/benchmarks/serve.py), saved with its per-request lists."""
    flag = "--save-result --save-detailed"
    count = len(record.numbers("input_lens", None, flag))
    lengths = [record.numbers(name, count, flag) for name in ("input_lens", "output_lens", "ttfts")]
    gaps = record.gaps(count, flag)
    failed = _failed(record, count, lengths[2])
    if isinstance(record.data.get("start_times"), list):
        start_s = record.numbers("start_times", count, flag)
        how: tuple[str, ...] = ()
    else:  # before July 2025
        start_s, how = _replayed(record, lengths[2], gaps, failed)
    return _run(record, "vLLM", start_s, lengths, gaps, failed, (*how, _UNSEEN_CACHE), None)


_UNSEEN_CACHE = (
    "hits in the server's prefix cache cannot be seen in such a file: every token of a prompt counts as computed"
)


# ---- SGLang


def _sglang(record: _Record) -> BenchRun:
    """Return a run of `sglang.bench_serving` (python/sglang/benchmark/serving.py), saved with its details."""
    flag = "--output-details"
    accepted = record.data.get("accept_length")
    if isinstance(accepted, int | float) and accepted > _SEVERAL:
        raise record.fault(f"speculative decoding ({accepted:.3g} tokens a step): its steps cannot be told from tokens")
    count = len(record.numbers("input_lens", None, flag))
    lengths = [record.numbers(name, count, flag) for name in ("input_lens", "output_lens", "ttfts")]
    gaps = record.gaps(count, flag)
    failed = _failed(record, count, lengths[2])
    cached = record.numbers("cached_tokens", count, flag) if "cached_tokens" in record.data else None
    start_s, how = _replayed(record, lengths[2], gaps, failed)
    notes = how if cached is not None else (*how, _UNSEEN_CACHE + " (--cache-report saves them)")
    return _run(record, "SGLang", start_s, lengths, gaps, failed, notes, cached)


READERS: dict[str, Callable[[_Record], BenchRun]] = {"vllm": _vllm, "sglang": _sglang}
"""Each returns one run. To add a client: a reader, a line here, and a key of its own in `_kind_of`."""


# ---- what they share


def _failed(record: _Record, count: int, ttft_s: np.ndarray) -> np.ndarray:
    """Return a mask of the requests that brought nothing back."""
    errors = record.data.get("errors")
    told = np.array([bool(error) for error in errors]) if isinstance(errors, list) and len(errors) == count else False
    failed = np.asarray((ttft_s <= 0) | told)
    if failed.all():
        raise record.fault("every request of this run failed")
    return failed


def _replayed(
    record: _Record, ttft_s: np.ndarray, gaps_s: tuple[np.ndarray, ...], failed: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return when each request was sent [s], from the order in which a client with a limit sends.

    Such a client keeps `max_concurrency` requests under way, in order: a request leaves when one comes back. With
    requests sent at a rate only a limit of one tells: then they follow each other. Raises InputError otherwise.
    """
    limit = record.whole("max_concurrency")
    rate = record.data.get("request_rate")
    at_once = rate == "inf" or (isinstance(rate, int | float) and rate == inf)
    if limit != 1 and not at_once:
        raise record.fault(
            f"the file does not say when requests were sent, and at a rate of {_short(rate)} requests/s nothing tells: "
            "run the client again with --request-rate inf, and --max-concurrency N for the batch that is meant"
        )
    if failed.any() and limit is not None:
        raise record.fault(
            "the file does not say when requests were sent, and failed ones took unknown time: run the client again"
        )
    took_s = ttft_s + np.array([each.sum() for each in gaps_s])
    if limit is None:
        return np.zeros(len(took_s)), ("sent: all at once, as the client was told",)
    back_s = [0.0] * limit
    start_s = np.zeros(len(took_s))
    for at, time_s in enumerate(took_s):
        start_s[at] = heapq.heappop(back_s)
        heapq.heappush(back_s, start_s[at] + time_s)
    return start_s, (f"sent: worked out from the order and the limit of {limit} concurrent requests",)


def _run(
    record: _Record,
    engine: str,
    start_s: np.ndarray,
    lengths: list[np.ndarray],
    gaps: tuple[np.ndarray, ...],
    failed: np.ndarray,
    notes: tuple[str, ...],
    cached: np.ndarray | None,
) -> BenchRun:
    server = _Record({**_server(record.data), **record.data}, record.file, record.line)
    if (copies := server.whole("dp_size")) and copies > 1:
        raise record.fault(f"{copies} replicas answered (dp_size): their batches cannot be told apart; profile one")
    kept = np.flatnonzero(~failed)
    lost = (f"{int(failed.sum())} failed requests left out, and what they took of the server's time unknown",)
    prompt, output, ttft_s = (values[kept] for values in lengths)
    return BenchRun(
        file=record.file,
        engine=" ".join(part for part in (engine, server.text("version", "engine_version")) if part),
        model=server.text("model_id", "model_path", "served_model_name") or "",
        tp=server.whole("tp_size", "tensor_parallel_size", "tp"),
        pp=server.whole("pp_size", "pipeline_parallel_size", "pp"),
        dtype=server.text("dtype"),
        kv_tokens=server.whole("max_total_num_tokens"),
        start_s=start_s[kept],
        ttft_s=ttft_s,
        prompt_tokens=prompt.astype(int),
        cached_tokens=None if cached is None else cached[kept].astype(int),
        output_tokens=output.astype(int),
        gaps_s=tuple(_token_gaps(gaps[at], int(lengths[1][at])) for at in kept),
        notes=notes + (lost if failed.any() else ()),
    )


def _server(data: dict[str, Any]) -> dict[str, Any]:
    """Return what the server says of itself, with the first of its internal states, as SGLang nests it."""
    info = data.get("server_info")
    if not isinstance(info, dict):
        return {}
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    return {**inner, **info}


def _token_gaps(gaps: np.ndarray, tokens: int) -> np.ndarray:
    """Return the gaps between tokens. A chat stream begins with the role alone, in the same step as the first token."""
    one_more = len(gaps) == tokens and len(gaps) > 1
    return gaps[1:] if one_more and gaps[0] < _NO_GAP * float(np.median(gaps[1:])) else gaps
