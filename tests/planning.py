"""Small problems for tests of the whole planner, planned once each."""

from __future__ import annotations

from functools import cache

import yaml

from planner import Plan, parse, plan, problem_of
from planner.sources.problem import Problem

QUICK = {"requests": 300, "replay_requests": 1000, "seeds": 3}
"""Search settings that plan a few GPUs in about a second; the intervals are wide."""

PAIR = {
    "name": "pair",
    "nodes": [{"name": "n", "gpu": "h100-80gb", "gpus": 2, "links": {"kind": "nvswitch", "bytes_per_s": "450GB/s"}}],
}
BOX = {"name": "box", "nodes": [{"name": "n", "gpu": "h100-80gb", "gpus": 8, "links": {"kind": "nvswitch"}}]}


def far(gpu: str, bytes_per_s: str) -> dict:
    """Return two nodes of one GPU each with a slow network between them."""
    nics = {"count": 1, "bytes_per_s": bytes_per_s, "kind": "tcp"}
    return {"name": "far", "nodes": [{"name": "n", "count": 2, "gpu": gpu, "gpus": 1, "nics": nics}]}


def fixed(prompt_tokens: int, output_tokens: int) -> dict:
    """Return a workload of equal requests."""
    return {"source": "fixed", "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}


def slo(ttft_s: str, tpot_s: str, **more: object) -> dict:
    """Return an SLO."""
    return {"ttft_s": ttft_s, "tpot_s": tpot_s, **more}


def text(**parts: object) -> str:
    """Return a problem file; max_goodput unless there is a rate."""
    objective = {} if "rate_rps" in parts else {"objective": "max_goodput"}
    return yaml.safe_dump({"search": QUICK, **objective, **parts}, sort_keys=False)


def problem(**parts: object) -> Problem:
    """Return the problem that consists of these parts of a problem file."""
    return problem_of(parse(text(**parts), "problem.yaml"))


@cache
def planned(file_text: str) -> Plan:
    """Return the plan of a problem file; the same text is planned once."""
    return plan(problem_of(parse(file_text, "problem.yaml")))


def solved(**parts: object) -> Plan:
    """Return the plan of a problem in parts."""
    return planned(text(**parts))


# One problem per kind of cluster. Each plans in a second or two.
_TRAY = {
    "name": "tray", "count": 2, "gpu": "gb200", "gpus": 4, "nvlink_domain": "rack0", "links": {"kind": "nvswitch"},
    "nics": {"count": 4, "bytes_per_s": "400Gb/s", "kind": "infiniband"},
}  # fmt: skip


def _node(name: str, gpu: str, gpus: object, cards: int, speed: str) -> dict:
    nics = {"count": cards, "bytes_per_s": speed, "kind": "infiniband"}
    return {"name": name, "gpu": gpu, "gpus": gpus, "links": {"kind": "nvswitch"}, "nics": nics}


UNEVEN = [
    _node("n0", "h100-80gb", 8, 8, "400Gb/s"),
    _node("n1", "h100-80gb", 8, 4, "200Gb/s"),
    _node("n2", "h100-80gb", [0, 1, 2, 3, 4, 6, 7], 8, "400Gb/s"),
]
MIXED = [_node("h", "h100-80gb", 4, 4, "400Gb/s"), _node("a", "a100-80gb", 8, 4, "200Gb/s")]

PROBLEMS = {
    "published fit on one node": {
        "model": "opt-13b", "cluster": "a100-4gpu", "workload": "sharegpt", "slo": slo("250ms", "100ms")
    },
    "NVLink pairs, unprofiled": {
        "model": "llama3.1-8b", "cluster": "a40-pairs", "workload": fixed(1000, 100), "slo": slo("2s", "80ms")
    },
    "an NVLink domain over nodes": {
        "model": "llama3.1-70b", "cluster": {"name": "trays", "nodes": [_TRAY]}, "workload": fixed(4000, 100),
        "slo": slo("1s", "25ms"),
    },
    "PCIe only": {"model": "qwen3-8b", "cluster": "rtx4090-8", "workload": fixed(2000, 200), "slo": slo("3s", "60ms")},
    "two GPU types": {
        "model": "llama2-70b", "cluster": {"name": "mixed", "nodes": MIXED}, "workload": "sharegpt",
        "slo": slo("2s", "80ms"),
    },
    "case 21: nodes that look alike": {
        "model": "qwen3-32b", "cluster": {"name": "uneven", "nodes": UNEVEN}, "workload": fixed(4000, 200),
        "slo": slo("2s", "40ms"), "search": {**QUICK, "max_pp": 1},
    },
    "a slow network": {
        "model": "llama3.1-8b", "cluster": far("h100-80gb", "25Gb/s"), "workload": fixed(2000, 100),
        "slo": slo("2s", "20ms"),
    },
    "a load to serve": {
        "model": "llama3.1-8b", "cluster": "h100-2x8", "workload": fixed(4000, 100), "slo": slo("1s", "15ms"),
        "rate_rps": "20rps",
    },
    "two classes": {
        "model": "opt-13b", "cluster": "a100-4gpu", "workload": "sharegpt",
        "slo": [slo("250ms", "100ms", name="chat", share="30%"), slo("5s", "200ms", name="batch", attainment="99%")],
    },
    "first token from prefill, inclusive TPOT": {
        "model": "opt-13b", "cluster": "a100-4gpu", "workload": "sharegpt",
        "slo": slo("1s", "60ms", tpot_definition="inclusive"), "engine": {"first_token_at": "prefill"},
    },
}  # fmt: skip
