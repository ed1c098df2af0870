"""The published fits of DistServe (Zhong et al., OSDI '24): three coefficients per phase and degree, in ms.

The file lists decode as [constant, per context token, per request]; ours names each. Prefill coefficients are
shipped as the raw fit times 1.10 (times 1.40, and decode times 1.20, in the file for vLLM): kept as
published.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from planner.errors import Fault, InputError
from planner.sources.tables import pick, read_json, read_table, slug
from planner.specs.profile import Coefficients, DecodeFit, KvTokens, PrefillFit, Profile, Provenance

_SCALED = {
    "distserve": "prefill coefficients as published: the raw fit times 1.10",
    "vllm": "coefficients as published: the raw fit times 1.40 (prefill) and 1.20 (decode)",
}


def load(
    path: str | Path,
    model: str | None = None,
    gpu: str = "a100-80gb",
    engine: str = "distserve",
    kv_tokens: str | Path | None = None,
) -> Profile:
    """Return the profile of one model out of a `profiler-*.json`. `kv_tokens`: the table of KV capacities.

    Raises InputError for anything but three finite numbers per fit.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not data:
        raise InputError(Fault("expected a mapping of models to tensor-parallel degrees", str(path)))
    engine = pick(path, "engine", engine, set(_SCALED))
    model = pick(path, "model", model, set(data))
    return Profile(
        name=slug(engine, model, gpu),
        model=model,
        gpu=gpu,
        engine="DistServe (SwiftTransformer)" if engine == "distserve" else "vLLM 0.2.3, as DistServe compared with it",
        dtype="float16",
        interconnect="NVLink inside a node of 8",
        provenance=Provenance(
            method="published fit",
            source="LLMServe/DistServe, simdistserve profile data",
            url="https://github.com/LLMServe/DistServe",
            revision="82831f1",
            licence="Apache-2.0",
            citation="Zhong et al., DistServe: Disaggregating Prefill and Decoding for Goodput-optimized "
            "Large Language Model Serving, OSDI '24",
            notes=(
                _SCALED[engine],
                "decode was fitted up to a few tens of thousands of context tokens in all",
            ),
        ),
        coefficients=_coefficients(str(path), model, data[model]),
        kv_tokens=_kv_tokens(kv_tokens, model) if kv_tokens else (),
    )


def _coefficients(file: str, model: str, degrees: Any) -> tuple[Coefficients, ...]:
    if not isinstance(degrees, dict) or not degrees:
        raise InputError(Fault(f"{model}: expected a mapping of tensor-parallel degrees to fits", file))
    return tuple(sorted((_degree(file, f"{model}.{tp}", tp, fit) for tp, fit in degrees.items()), key=lambda f: f.tp))


def _degree(file: str, where: str, tp: str, fit: Any) -> Coefficients:
    if not tp.isascii() or not tp.isdigit() or not 0 < int(tp) < 10**6:
        raise InputError(Fault(f"expected a tensor-parallel degree, got {tp!r}", file, field=where))
    if not isinstance(fit, dict):
        raise InputError(Fault("expected a mapping with prefill and decoding_smallbs", file, field=where))
    constant, token, square = _three(file, where, fit, "prefill")
    large = "decoding_largebs" in fit
    return Coefficients(
        tp=int(tp),
        prefill=PrefillFit(constant_s=constant, per_token_s=token, per_attended_s=square),
        decode=_decode(file, where, fit, "decoding_smallbs"),
        decode_large=_decode(file, where, fit, "decoding_largebs") if large else None,
        large_from_batch=_threshold(file, where, fit) if large else None,
    )


def _decode(file: str, where: str, fit: dict[str, Any], key: str) -> DecodeFit:
    constant, context, request = _three(file, where, fit, key)
    return DecodeFit(constant_s=constant, per_request_s=request, per_context_token_s=context)


def _three(file: str, where: str, fit: dict[str, Any], key: str) -> tuple[float, float, float]:
    """Return three coefficients in seconds."""
    values = fit.get(key)
    if not isinstance(values, list) or len(values) != 3 or not all(map(_finite, values)):
        raise InputError(Fault(f"expected three numbers in ms, got {str(values)[:60]}", file, field=f"{where}.{key}"))
    return values[0] / 1e3, values[1] / 1e3, values[2] / 1e3


def _threshold(file: str, where: str, fit: dict[str, Any]) -> int:
    value = fit.get("decoding_large_small_bs_threshold")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            Fault(
                f"expected a batch size, got {value!r}",
                file,
                field=f"{where}.decoding_large_small_bs_threshold",
            )
        )
    return value


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kv_tokens(path: str | Path, model: str) -> tuple[KvTokens, ...]:
    rows = read_table(path, ("model", "tp", "pp", "max_num_tokens"))
    found = {
        (row.count("tp"), row.count("pp")): row.count("max_num_tokens") for row in rows if row.text("model") == model
    }
    if not found:
        raise InputError(Fault(f"no rows of {model}", str(path)))
    return tuple(KvTokens(tp=tp, pp=pp, tokens=tokens) for (tp, pp), tokens in sorted(found.items()))
