"""Bad input: every mistake gives one line with its place and the way out, exit code 1, and leaves nothing behind.

A `§` in a file stands right before the place where its fault must be reported, a `¶` before one that has a line but
no column; both are taken out before the file is written. So the expected line and column are read off the text.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cli import _run
from planner.deploy import read_deployment, system_of
from planner.errors import InfeasibleError, InputError
from planner.search.kinds import find_kinds
from planner.sources.hf_config import read_model
from planner.sources.problem import problem_of, read_problem
from planner.sources.profiles import read_profile
from planner.sources.workloads import read_workload
from planner.specs.base import load, parse, write_text
from planner.specs.topology import read_cluster

# --- a sound problem, in parts; each test spoils one ---

PARTS = {
    "model": "model: opt-13b",
    "cluster": "cluster: a100-4gpu",
    "workload": "workload: sharegpt",
    "slo": "slo: {ttft_s: 200ms, tpot_s: 100ms}",
    "search": "search: {requests: 300, replay_requests: 400, seeds: 3}",
}
CLUSTER = """\
cluster:
  nodes:
    - name: n
      count: 2
      gpu: a100-80gb
      gpus: 4
      links: {kind: nvswitch}
      nics: {count: 1, bytes_per_s: 100Gb/s, kind: tcp}"""
MODEL = """\
model:
  name: tiny
  layers: 4
  hidden_size: 64
  heads: 4
  kv_heads: 4
  head_dim: 16
  intermediate_size: 256
  vocab_size: 100"""
WORKLOAD = """\
workload:
  source: fixed
  prompt_tokens: 100
  output_tokens: 10"""
PROFILE = """\
profiles:
  name: mine
  model: opt-13b
  gpu: a100-80gb
  provenance: {method: measured, source: our lab}
  samples:
    columns: [phase, tp, batch, prompt_tokens, context_tokens, time_s]
    rows:
      - [prefill, 1, 1, 128, 0, 0.03]
      - [prefill, 1, 1, 1024, 0, 0.16]
      - [decode, 1, 1, 0, 100, 0.03]
      - [decode, 1, 16, 0, 1000, 0.04]"""
CLASSES = """\
slo:
  - {name: chat, ttft_s: 1s, tpot_s: 100ms, share: 60%}
  - {name: batch, ttft_s: 9s, tpot_s: 300ms, share: 40%}"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DEPLOYMENT = """\
version: 1
name: mine
mode: disaggregated
verdict: Disaggregate
model: opt-13b
dtype: float16
kv_dtype: float16
kv_bytes_per_token: 819200.0
cluster: a100-4gpu
engine: {}
slo: [{ttft_s: 0.2, tpot_s: 0.1}]
workload: {name: sharegpt, arrivals: poisson, rate_rps: null}
instances:
- name: prefill-0
  phase: prefill
  tp: 1
  pp: 1
  gpu: a100-80gb
  stages: [[{node: node0, gpus: [0]}]]
  limits: {max_batch: 128, max_tokens: 1024, kv_blocks: 3000, block_tokens: 16, swap_bytes_per_s: 2.0e10}
  cost: law
- name: decode-0
  phase: decode
  tp: 1
  pp: 1
  gpu: a100-80gb
  stages: [[{node: node0, gpus: [1]}]]
  limits: {max_batch: 128, max_tokens: 1024, kv_blocks: 3000, block_tokens: 16, swap_bytes_per_s: 2.0e10}
  cost: law
routes:
- source: prefill-0
  target: decode-0
  weight: 1.0
  fixed_s: 0.0001
  hops: [{link: up, share: 1.0}]
links:
- {name: up, bytes_per_s: 2.0e11, nominal_bytes_per_s: 3.0e11, assumed: true}
costs:
  law:
    family: linear
    parameters: [0, 0.02, 1.0e-4, 7.0e-9, 0.02, 4.0e-5, 6.0e-7, 0.01, 2.0e-4, 6.0e-7, 95, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    stage_share: [1.0]
    handoff_s: 0.0
    handoff_s_per_token: 0.0
    unprofiled: false
    held_out_error: {}
prediction:
  claim: {goodput_rps: 3.0, low_rps: 2.9, high_rps: 3.1, gpus: 2, goodput_rps_per_gpu: 1.5, layout: any, binding: TTFT}
  alternative: null
  rate_rps: 3.0
  attainment: {all: 0.9}
  ttft: {mean_s: 0.1, p50_s: 0.1, p90_s: 0.2, p99_s: null}
  ttft_terms: {}
  tpot: {mean_s: 0.02, p50_s: 0.02, p90_s: 0.03, p99_s: 0.03}
  utilisation: {prefill: 0.4, decode: 1.0}
  program_rps: null
  program_bound_rps: null
  program_gap: null
  capacity_bound_rps: 5.0
provenance: {planner_version: 0.1.0, seeds: [0], simulated_s: 100.0, digests: {}, notes: []}
"""


def problem(**parts: str | None) -> str:
    """Return a problem file with some parts replaced, added (at the end) or left out (None)."""
    return "".join(f"{part}\n" for part in (PARTS | parts).values() if part is not None)


def spoiled(text: str, sound: str, faulty: str) -> str:
    """Return `text` with its first `sound` replaced; there must be one."""
    assert sound in text
    return text.replace(sound, faulty, 1)


def part(name: str, text: str, sound: str, faulty: str) -> str:
    """Return a problem whose part `name` is `text`, spoiled."""
    return problem(**{name: spoiled(text, sound, faulty)})


def traced(text: str | bytes, source: str = "azure", more: str = "") -> dict[str, str | bytes]:
    """Return a problem on a trace file."""
    return {"problem.yaml": problem(workload=f"workload:\n  source: {source}\n  file: t.csv{more}"), "t.csv": text}


PLAN = ("plan", "problem.yaml", "-q", "-o", "out.yaml", "--html", "out.html")
SIMULATE = (
    "simulate",
    "deployment.yaml",
    "-q",
    "-w",
    "sharegpt",
    "--rate",
    "1",
    "--duration",
    "20",
    "--records",
    "out.csv",
)
SHOW = ("topology", "show", "h100-2x8", "--svg", "out.svg")


@dataclass(frozen=True)
class Case:
    """Files, a command, and for every expected fault some words (at the markers, or else anywhere)."""

    name: str
    files: str | bytes | dict[str, str | bytes]
    words: list[str]
    command: tuple[str, ...] = PLAN
    start: str = ""
    """How the one line begins where no marker says so."""

    @property
    def texts(self) -> dict[str, str | bytes]:
        if isinstance(self.files, dict):
            return self.files
        return {"deployment.yaml" if self.command == SIMULATE else "problem.yaml": self.files}

    @property
    def contents(self) -> dict[str, bytes]:
        """What stands in each file."""
        return {
            name: text if isinstance(text, bytes) else re.sub("[§¶]", "", text).encode()
            for name, text in self.texts.items()
        }

    @property
    def lines(self) -> list[tuple[str, str]]:
        """How each expected line begins, and what it says."""
        places = [place for name, text in self.texts.items() if isinstance(text, str) for place in marked(name, text)]
        return list(zip(places or [self.start] * len(self.words), self.words, strict=True))

    def write(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def marked(name: str, text: str) -> list[str]:
    """Return `file:line:column: ` of every marker in a text."""
    places = []
    for number, line in enumerate(text.split("\n"), 1):
        for match in re.finditer("[§¶]", line):
            column = len(re.sub("[§¶]", "", line[: match.start()])) + 1
            places.append(f"{name}:{number}:{column}: " if match[0] == "§" else f"{name}:{number}: ")
    return places


def check(case: Case, folder: Path, code: int, out: str, err: str) -> None:
    """Assert that a run of the case said what it should, once, and left no file behind."""
    assert (code, out) == (1, ""), err
    left = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert left == case.contents, "an input was changed or a file left behind"
    lines = err.splitlines()
    assert len(lines) == len(case.words), err
    for start, words in case.lines:
        found = [line for line in lines if line.startswith(start) and words in line]
        assert found, f"no line {start!r} with {words!r} in:\n{err}"
        lines.remove(found[0])


LAUGHS = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9))

YAML = [
    Case(
        "an open bracket",
        problem(slo="slo: {ttft_s: 200ms, tpot_s: 100ms").replace("search:", "search§:"),
        ["not valid YAML: expected ',' or '}', but got ':', while parsing a flow mapping that begins on line 4"],
    ),
    Case("a tab for indentation", "model: opt-13b\nslo:\n§\tttft_s: 1\n", ["indent with spaces"]),
    Case("a colon too many", "model: opt-13b\ncluster: a§: b\n", ["mapping values are not allowed here"]),
    Case("a quote without an end", "model: 'opt-13b\n§", ["not valid YAML"]),
    Case("an unknown alias", problem(model="model: §*m"), ["undefined alias 'm'"]),
    Case("an empty file", "¶", ["expected a mapping, got an empty file"]),
    Case("a file of comments", "¶# nothing yet\n", ["expected a mapping, got an empty file"]),
    Case("a list for a mapping", "§- model\n- cluster\n", ["expected a mapping, got ['model', 'cluster']"]),
    Case("a sentence for a mapping", "§hello\n", ["expected a mapping, got 'hello'"]),
    Case("null for a mapping", "§~\n", ["expected a mapping, got nothing"]),
    Case("several documents", f"---\n{problem()}§---\n{problem()}", ["expected one document"]),
    Case("bytes that are not UTF-8", b"model: opt-13b\n# caf\xe9\n", ["got the byte 0xe9"], start="problem.yaml:2: "),
    Case("UTF-16", problem().encode("utf-16"), ["got UTF-16; save it as UTF-8"], start="problem.yaml:1: "),
    Case("a NUL", "model: opt§\x00-13b\n", ["the character '\\x00'"]),
    Case("a duplicate key", problem(again="§model: opt-66b"), ["duplicate key 'model'"]),
    Case(
        "a duplicate key further in",
        problem(slo="slo:\n  ttft_s: 1\n  tpot_s: 1\n  §ttft_s: 2"),
        ["slo.ttft_s: duplicate"],
    ),
    Case(
        "an object of Python",
        problem(model="model: §!!python/object/apply:os.system ['true']"),
        ["expected plain data, got the tag !!python/object/apply:os.system"],
    ),
    Case("a set", problem(model="model: §!!set {a, b}"), ["got the tag !!set"]),
    Case("a tag that its value belies", problem(seed="seed: §!!int abc"), ["expected a value of type int, got 'abc'"]),
    Case("an integer of 5000 digits", problem(seed=f"seed: §{'9' * 5000}"), ["expected a value of type int"]),
    Case(
        "aliases that multiply",
        f"x0: &x0 [1, 2]\n{LAUGHS}\n",
        ["aliases that unfold without end"],
        start="problem.yaml:",
    ),
    Case("an alias inside itself", problem(model="model: §&m {a: *m}"), ["aliases that unfold without end"]),
    Case("a thousand brackets", problem(model=f"model: {'[' * 99}§{'[' * 901}{']' * 1000}"), ["at most 100 levels"]),
    Case("brackets without an end", f"{'[' * 100}§{'[' * 99_900}", ["at most 100 levels"]),
    Case("a list as a key", problem(more="? §[a, b]\n: 2"), ["expected a plain text key"]),
    Case("an integer as a key", problem(more="§1: 2"), ["1: unknown key"]),
    Case("a key with a line break", problem(more='§"a\\nb": 2'), ["a\\nb: unknown key"]),
]

PROBLEM = [
    Case("no such file", {}, ["no such file"], start="problem.yaml: "),
    Case(
        "no such file, but a similar one",
        {"problme.yaml": problem()},
        ["did you mean 'problme.yaml'?"],
        start="problem.yaml: ",
    ),
    Case("a folder", {"problem.yaml/x": ""}, ["expected a file, got a folder"], start="problem.yaml: "),
    Case("a file of 65 MiB", b"#" * (65 * 2**20), ["expected at most 64 MiB"], start="problem.yaml: "),
    Case("no model", problem(model=None).replace("cluster", "§cluster", 1), ["model: is required"]),
    Case("an unknown key", problem(more="§modle: opt-13b"), ["unknown key; did you mean 'model'?"]),
    Case("an unknown key over a mapping", problem(more="§modle:\n  name: x"), ["unknown key; did you mean 'model'?"]),
    Case(
        "an unknown key further in",
        problem(engine="engine: {§max_bach: 3}"),
        ["engine.max_bach: unknown key; did you mean 'max_batch'?"],
    ),
    Case("an unknown preset", problem(model="model: §opt-13"), ["no preset named 'opt-13'; did you mean 'opt-13b'?"]),
    Case("an empty reference", problem(model="model: §''"), ["expected a preset name, a file or a mapping, got ''"]),
    Case("a number for a reference", problem(model="model: §13"), ["model: expected text or a mapping, got 13"]),
    Case("a reference left open", problem(cluster="cluster:§"), ["cluster: expected text or a mapping, got nothing"]),
    Case("a reference to no file", problem(cluster="cluster: §lab.yaml"), ["no such file 'lab.yaml'"]),
    Case(
        "a reference to a folder",
        {"problem.yaml": problem(model="model: §lab/"), "lab/x": ""},
        ["expected a file, got the folder 'lab'"],
    ),
    Case("a reference with a NUL", problem(model='model: §"a/b\\0"'), ["no such file"]),
    Case("a file without ./", {"problem.yaml": problem(model="model: §llm"), "llm": "x: 1"}, ["write ./llm"]),
    Case("a name with a blank", problem(name="name: §my plan"), ["name: expected a name of letters, digits"]),
    Case("a float for a seed", problem(seed="seed: §1.5"), ["seed: expected an integer, got 1.5"]),
    Case("a negative seed", problem(seed="seed: §-1"), ["seed: expected at least 0, got -1"]),
    Case("an unknown objective", problem(objective="objective: §max_godput"), ["expected 'max_goodput' or 'min_gpus'"]),
    Case("min_gpus without a rate", problem(objective="objective: §min_gpus"), ["give rate_rps, such as 4rps"]),
    Case("a rate of 0", problem(rate="rate_rps: §0"), ["rate_rps: expected more than 0, got 0"]),
    Case("a rate below 0", problem(rate="rate_rps: §-3rps"), ["rate_rps: expected more than 0, got '-3rps'"]),
    Case(
        "a rate that is no number",
        problem(rate="rate_rps: §.nan"),
        ["expected a finite quantity such as 4rps, got nan"],
    ),
    Case(
        "a rate from another world",
        problem(rate="rate_rps: §1e12"),
        ["expected at most 1e+06 requests/s, got 1000000000000.0"],
    ),
    Case("a rate of next to nothing", problem(rate="rate_rps: §1e-12"), ["expected at least 0.0001 requests/s"]),
    Case(
        "several faults in one file",
        problem(seed="seed: §x", rate="rate_rps: §0", more="§foo: 1"),
        ["expected an integer", "more than 0", "unknown key"],
    ),
    Case(
        "faults in several files",
        {
            "problem.yaml": problem(cluster="cluster: lab.yaml", model="model: sub/llm.yaml", slo="slo: §{ttft_s: 1}"),
            "lab.yaml": "nodes: §[]\n",
            "sub/llm.yaml": spoiled(MODEL, "layers: 4", "layers: §four")
            .replace("model:\n", "")
            .replace("\n  ", "\n")
            .strip(),
        },
        ["slo.tpot_s: is required", "nodes: expected at least one node", "layers: expected an integer, got 'four'"],
    ),
]

SLO = [
    Case("text for bounds", problem(slo="slo: §fast"), ["slo: expected a mapping or a list, got 'fast'"]),
    Case(
        "numbers for classes",
        problem(slo="slo: [§1, §2]"),
        ["slo[0]: expected a mapping, got 1", "slo[1]: expected a mapping"],
    ),
    Case("no class at all", problem(slo="slo: §[]"), ["expected at least one traffic class"]),
    Case("an empty mapping", problem(slo="slo: §§{}"), ["ttft_s: is required", "tpot_s: is required"]),
    Case(
        "an unknown unit",
        problem(slo="slo: {ttft_s: §200mss, tpot_s: 1}"),
        ["unknown unit 'mss' in '200mss'; expected one of ns, us"],
    ),
    Case("a size for a time", problem(slo="slo: {ttft_s: §2GiB, tpot_s: 1}"), ["unknown unit 'GiB'"]),
    Case(
        "not a number",
        problem(slo="slo: {ttft_s: §.nan, tpot_s: 1}"),
        ["expected a finite quantity such as 200ms, got nan"],
    ),
    Case("infinity", problem(slo="slo: {ttft_s: §.inf, tpot_s: 1}"), ["expected a finite quantity"]),
    Case("a number that overflows", problem(slo="slo: {ttft_s: §1e400ms, tpot_s: 1}"), ["expected a finite quantity"]),
    Case("zero", problem(slo="slo: {ttft_s: §0, tpot_s: 1}"), ["expected more than 0, got 0"]),
    Case(
        "below zero", problem(slo="slo: {ttft_s: 1, tpot_s: §-5ms}"), ["slo.tpot_s: expected more than 0, got '-5ms'"]
    ),
    Case(
        "longer than a day", problem(slo="slo: {ttft_s: §1e300, tpot_s: 1}"), ["expected at most 86400 s, got 1e+300"]
    ),
    Case("shorter than a microsecond", problem(slo="slo: {ttft_s: §1e-300, tpot_s: 1}"), ["expected at least 1e-06 s"]),
    Case(
        "true for a time",
        problem(slo="slo: {ttft_s: §true, tpot_s: 1}"),
        ["expected a quantity such as 200ms, got True"],
    ),
    Case(
        "an attainment of 0",
        problem(slo="slo: {ttft_s: 1, tpot_s: 1, attainment: §0}"),
        ["expected more than 0, got 0"],
    ),
    Case(
        "an attainment of 120 %",
        problem(slo="slo: {ttft_s: 1, tpot_s: 1, attainment: §120%}"),
        ["expected at most 1, got '120%'"],
    ),
    Case(
        "a percentage without its sign",
        problem(slo="slo: {ttft_s: 1, tpot_s: 1, attainment: §90}"),
        ["for a percentage write 90%"],
    ),
    Case(
        "shares above 100 %",
        problem(slo=spoiled(CLASSES, "40%", "50%").replace("- {name: chat", "§- {name: chat")),
        ["got 1.1 of 1"],
    ),
    Case(
        "shares that leave some over",
        problem(slo=spoiled(CLASSES, "40%", "30%").replace("- {name: chat", "§- {name: chat")),
        ["got 0.9 of 1; leave one out"],
    ),
    Case(
        "no share left",
        problem(slo=spoiled(CLASSES, "60%", "100%").replace(", share: 40%", "").replace("{name: b", "§{name: b")),
        ["no share is left"],
    ),
    Case(
        "classes without names",
        problem(slo=CLASSES.replace("{name: chat, ", "§{").replace("{name: batch, ", "§{")),
        ["expected a name"] * 2,
    ),
    Case(
        "two classes of one name", part("slo", CLASSES, "name: batch", "name: §chat"), ["two classes are called 'chat'"]
    ),
    Case(
        "a fault in each class",
        problem(slo=CLASSES.replace("1s", "§x").replace("300ms", "§-1")),
        ["got 'x'", "more than 0"],
    ),
]

CLUSTERS = [
    Case(
        "an unknown GPU",
        part("cluster", CLUSTER, "a100-80gb", "§a100-80g"),
        ["unknown GPU 'a100-80g'; did you mean 'a100-80gb'?"],
    ),
    Case("an unknown unit of speed", part("cluster", CLUSTER, "100Gb/s", "§100Gbps/x"), ["unknown unit 'Gbps/x'"]),
    Case("a size for a speed", part("cluster", CLUSTER, "100Gb/s", "§100GiB"), ["unknown unit 'GiB'"]),
    Case(
        "a speed without its unit",
        part("cluster", CLUSTER, "100Gb/s", "§100"),
        ["expected at least 1e+06 bytes/s, got 100"],
    ),
    Case("a negative speed", part("cluster", CLUSTER, "100Gb/s", "§-1"), ["expected more than 0, got -1"]),
    Case("no GPUs", part("cluster", CLUSTER, "gpus: 4", "gpus: §0"), ["expected at least 1 or a list, got 0"]),
    Case(
        "GPUs in words",
        part("cluster", CLUSTER, "gpus: 4", "gpus: §eight"),
        ["cluster.nodes[0].gpus: expected an integer or a list, got 'eight'"],
    ),
    Case("a GPU twice", part("cluster", CLUSTER, "gpus: 4", "gpus: §[0, 0, 1]"), ["0 is listed 2 times"]),
    Case(
        "indexes that are none",
        part("cluster", CLUSTER, "gpus: 4", "gpus: [0, §x, §-1]"),
        ["gpus[1]: expected an integer", "gpus[2]: expected at least 0"],
    ),
    Case(
        "a group of absent GPUs",
        part("cluster", CLUSTER, "{kind: nvswitch}", "{kind: nvlink, groups: [§[0, 9]]}"),
        ["GPU 9 is not among this node's GPUs 0 to 3"],
    ),
    Case("too many nodes", part("cluster", CLUSTER, "count: 2", "count: §1000000"), ["expected at most 100000"]),
    Case(
        "too many GPUs",
        part("cluster", CLUSTER, "count: 2", "count: 50000").replace("- name: n", "§- name: n"),
        ["at most 100,000 GPUs"],
    ),
    Case(
        "a cluster in pieces",
        part("cluster", CLUSTER, "\n      nics: {count: 1, bytes_per_s: 100Gb/s, kind: tcp}", "").replace(
            "name: n", "§name: n"
        ),
        ["no way from node 'n0' to the others: give it nics"],
    ),
    Case(
        "two nodes of one name",
        problem(cluster=CLUSTER + CLUSTER[CLUSTER.index("\n    - name") :].replace("name: n", "name: §n")),
        ["two nodes are called 'n0'"],
    ),
    Case(
        "an unknown kind of link",
        part("cluster", CLUSTER, "nvswitch", "§nvlnk"),
        ["expected 'nvswitch', 'nvlink-pairs'"],
    ),
    Case("a mapping for a list", problem(cluster="cluster: {nodes: §{a: 1}}"), ["expected a list, got {'a': 1}"]),
    Case(
        "an unknown key of a node",
        part("cluster", CLUSTER, "count: 2", "§cuont: 2"),
        ["unknown key; did you mean 'count'?"],
    ),
    Case(
        "a GPU type of one's own, half told",
        problem(cluster=CLUSTER + "\n  gpus:\n    - §§§{name: foo, memory_bytes: 80GiB}"),
        ["memory_bytes_per_s: is required", "fp16_flop_per_s: is", "host_bytes_per_s: is"],
    ),
    Case(
        "efficiencies out of range",
        problem(cluster=CLUSTER + "\n  efficiency: {nvlink: §0, tcp: §150%}"),
        ["more than 0", "at most 1"],
    ),
    Case(
        "a fault in a cluster file",
        {
            "problem.yaml": problem(cluster="cluster: sub/lab.yaml"),
            "sub/lab.yaml": "nodes:\n  - {name: n, gpu: §nope, gpus: 4}\n",
        },
        ["unknown GPU 'nope'"],
    ),
    Case(
        "a link that comes to nothing",
        problem(
            cluster=CLUSTER.replace("100Gb/s", "1MB/s")
            + "\n  network: §{oversubscription: 100000, racks: [{name: default, uplink_bytes_per_s: 1MB/s}]}"
            + "\n  efficiency: {tcp: 0.01%}"
        ),
        ["comes to 100 bytes/s (speed x efficiency / oversubscription); expected at least 100000"],
    ),
    Case(
        "a model that fits nowhere",
        problem(model="model: deepseek-v3", cluster="cluster: §a100-4gpu"),
        ["deepseek-v3 fits on no layout of a100-4gpu"],
    ),
    Case(
        "a cluster that the model fits not at all",
        problem(model="model: opt-175b", cluster="cluster: §rtx4090-8"),
        ["weights of 43.7 GB per GPU leave no room"],
    ),
]

MODELS = [
    Case(
        "a negative number of layers",
        part("model", MODEL, "layers: 4", "layers: §-4"),
        ["model.layers: expected at least 1, got -4"],
    ),
    Case(
        "layers in words",
        part("model", MODEL, "layers: 4", "layers: §four"),
        ["model.layers: expected an integer, got 'four'"],
    ),
    Case(
        "an unknown key of the model",
        part("model", MODEL, "layers: 4", "layers: 4\n  §layer: 5"),
        ["model.layer: unknown key; did you mean 'layers'?"],
    ),
    Case(
        "a config without its keys",
        {"problem.yaml": problem(model="model: ./config.json"), "config.json": '§§§§§{"model_type": "llama"}'},
        ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"],
    ),
    Case(
        "a config of wrong types",
        {
            "problem.yaml": problem(model="model: ./config.json"),
            "config.json": '{"model_type": "llama", "hidden_size": §"x",\n"num_hidden_layers": §-1,\n'
            '"num_attention_heads": 8, "vocab_size": 10, "intermediate_size": 9}',
        },
        ["hidden_size: expected a whole number", "num_hidden_layers: expected a whole number from 1 to 10^9, got -1"],
    ),
    Case(
        "a config that is not JSON",
        {
            "problem.yaml": problem(model="model: ./config.json"),
            "config.json": '{"model_type": "llama"\n§"hidden_size": 4}',
        },
        ["not valid YAML"],
    ),
]

WORKLOADS = [
    Case("an unknown workload", problem(workload="workload: §sharegtp"), ["did you mean 'sharegpt'?"]),
    Case(
        "a trace for a workload",
        problem(workload="workload: §t.csv"),
        ["for a trace give a mapping, such as {source: trace, file: t.csv}"],
    ),
    Case(
        "an unknown source",
        problem(workload="workload: {source: §azrue, file: x.csv}"),
        ["expected 'azure', 'mooncake'"],
    ),
    Case(
        "fixed without lengths",
        problem(workload="workload:\n  §§source: fixed"),
        ["prompt_tokens: is required with source: fixed", "output_tokens: is required"],
    ),
    Case("a prompt of no tokens", part("workload", WORKLOAD, "100", "§0"), ["expected at least 1, got 0"]),
    Case(
        "a prompt too long for the model",
        problem(workload=WORKLOAD.replace("100", "5000").replace("source", "§source")),
        ["no request fits in 2048 tokens; the shortest has 5010"],
    ),
    Case(
        "gamma without cv",
        problem(workload=WORKLOAD.replace("source", "§source") + "\n  arrivals: gamma"),
        ["cv: is required with arrivals: gamma"],
    ),
    Case("cv without gamma", problem(workload=WORKLOAD + "\n  cv: §3"), ["only used with arrivals: gamma"]),
    Case("a negative cv", problem(workload=WORKLOAD + "\n  arrivals: gamma\n  cv: §-3"), ["expected more than 0"]),
    Case(
        "a rate of 0 of its own",
        problem(workload=WORKLOAD + "\n  rate_rps: §0"),
        ["workload.rate_rps: expected more than 0"],
    ),
    Case(
        "a missing trace",
        problem(workload="workload:\n  source: azure\n  file: §t.csv"),
        ["workload.file: no such file 't.csv'"],
    ),
    Case(
        "a folder for a trace",
        problem(workload="workload:\n  source: azure\n  file: §."),
        ["expected a file, got the folder"],
    ),
    Case("an empty trace", traced("¶"), ["no requests: the file is empty"]),
    Case("a trace of a header", traced(TRACE), ["no requests: only a header"], start="t.csv: "),
    Case(
        "a trace without its columns",
        traced("¶¶¶a,b\n1,2\n"),
        ["no column for the arrival time", "prompt tokens", "output tokens"],
    ),
    Case(
        "bad rows",
        traced(f"{TRACE}¶2023-11-16 18:15:46,x,10\n¶2023-11-16 18:15:47,10,-1\n", more=""),
        ["expected a number for prompt tokens, got 'x'", "expected at least 0 for output tokens"],
    ),
    Case("a binary trace", traced(bytes(range(256))), ["expected UTF-8 text, got the byte 0x80"], start="t.csv:2: "),
    Case(
        "a trace of one moment",
        traced(f"{TRACE}2023-11-16 18:15:46,10,10\n"),
        ["all requests arrive at one instant"],
        start="problem.yaml:4:11: ",
    ),
    Case(
        "a slice of nothing",
        traced(
            TRACE + "".join(f"2023-11-16 18:15:{10 + i},100,10\n" for i in range(40)),
            more="\n  slice: §{start_s: 1000}",
        ),
        ["no requests in this slice; the trace runs from 0 to 39 s"],
    ),
]

PROFILES = [
    Case(
        "a profile of another model",
        part("profiles", PROFILE, "opt-13b", "opt-66b").replace("name: mine", "§name: mine"),
        ["measured opt-66b, but the model here is opt-13b"],
    ),
    Case(
        "a profile of another GPU",
        part("profiles", PROFILE, "a100-80gb", "h100-80gb").replace("name: mine", "§name: mine"),
        ["measured h100-80gb, which is not in this cluster (a100-80gb)"],
    ),
    Case(
        "two profiles of one GPU",
        problem(profiles="profiles: [distserve-opt-13b-a100, §distserve-opt-13b-a100]"),
        ["a second profile of a100-80gb; give one per GPU type"],
    ),
    Case("no profile in the list", problem(profiles="profiles: §[]"), ["expected at least one profile"]),
    Case(
        "an unknown profile",
        problem(profiles="profiles: §distserve-opt-13b"),
        ["did you mean 'distserve-opt-13b-a100'?"],
    ),
    Case("a list of nonsense", problem(profiles="profiles: [§1]"), ["expected text or a mapping, got 1"]),
    Case(
        "a negative time",
        part("profiles", PROFILE, "[prefill, 1, 1, 128, 0, 0.03]", "§[prefill, 1, 1, 128, 0, -0.03]"),
        ["time_s: expected seconds above 0"],
    ),
    Case(
        "a time of years",
        part("profiles", PROFILE, "[prefill, 1, 1, 128, 0, 0.03]", "§[prefill, 1, 1, 128, 0, 1e300]"),
        ["time_s: expected seconds above 0 and up to 86400"],
    ),
    Case(
        "a short row",
        part("profiles", PROFILE, "[prefill, 1, 1, 128, 0, 0.03]", "§[prefill, 1]"),
        ["expected a list of 6 values"],
    ),
    Case(
        "two broken rows",
        problem(
            profiles=PROFILE.replace("[prefill, 1, 1, 128", "§[prefil, 1, 1, 128").replace(
                "[decode, 1, 16", "§[decode, x, 16"
            )
        ),
        ["expected prefill or decode, got 'prefil'", "tp: expected a whole number"],
    ),
    Case(
        "an unknown column",
        part("profiles", PROFILE, "[phase, tp, batch,", "§[phase, tp, bacth,"),
        ["expected columns out of phase, tp"],
    ),
    Case(
        "an unknown method", part("profiles", PROFILE, "measured,", "§guessed,"), ["expected 'measured', 'assembled'"]
    ),
    Case(
        "rows faster than light",
        problem(profiles=re.sub(r"0\.\d+\]", "1.0e-9]", PROFILE).replace("name: mine", "§name: mine")),
        ["check its model, its GPU and its unit of time"],
    ),
    Case(
        "a degree that was not measured",
        problem(
            cluster="cluster: §a100-4gpu",
            profiles=PROFILE.replace("[prefill, 1", "[prefill, 3").replace("[decode, 1", "[decode, 3"),
        ),
        ["outside of what profile mine measured (TP3)"],
    ),
    Case(
        "a fault in a profile file",
        {
            "problem.yaml": problem(profiles="profiles: ./p.yaml"),
            "p.yaml": "\n".join(
                line[2:]
                for line in PROFILE.replace("  - [prefill, 1, 1, 128", "  - §[prefill, 1, 1, x").splitlines()[1:]
            ),
        },
        ["prompt_tokens: expected a whole number, got 'x'"],
    ),
]

SETTINGS = [
    Case(
        "an engine out of range",
        problem(
            engine="engine:\n  {block_tokens: §0, max_batch: §1e9, memory_fraction: §150%, reserved_bytes: §-1,\n"
            "   max_pulls: §0, layerwise_overlap: §1, first_token_at: §nowhere, chunk_tokens: [§0],\n"
            "   prefill_tokens: §9999999}"
        ),
        [
            "at least 1",
            "expected an integer",
            "at most 1",
            "more than 0",
            "at least 1",
            "less than 1",
            "expected 'decode' or 'prefill'",
            "at least 1",
            "at most 1048576",
        ],
    ),
    Case("no chunks", problem(engine="engine: {chunk_tokens: §[]}"), ["expected at least 1 items"]),
    Case(
        "no memory left",
        problem(cluster="cluster: §a100-4gpu", engine="engine: {reserved_bytes: 80GiB}"),
        ["leave no room for KV cache"],
    ),
    Case(
        "a search out of range",
        problem(
            search="search: {max_tp: §0, max_pp: §65, requests: §10, replay_requests: §x, seeds: §2, finalists: §0}"
        ),
        ["at least 1", "at most 64", "at least 200", "an integer", "at least 3", "at least 1"],
    ),
    Case(
        "a layout that cannot be",
        problem(compare="compare: [{name: a, prefill: §{tp: 3}, decode: {tp: 1}}]"),
        [
            "a: no prefill TP3 here: ",
        ],
    ),
    Case(
        "a layout beyond the search",
        problem(compare="compare: [{name: a, aggregated: §{tp: 1, pp: 4}}]"),
        ["search.max_tp and search.max_pp limit"],
    ),
    Case(
        "a layout that does not fit",
        problem(compare="compare: [§{name: a, prefill: {tp: 4}, decode: {tp: 4}}]"),
        ["a: takes 8 GPUs, and a100-4gpu has 4"],
    ),
    Case(
        "half a layout",
        problem(compare="compare: [§{name: a, prefill: {tp: 4}}]"),
        ["expected prefill and decode, or aggregated alone"],
    ),
    Case(
        "two layouts of one name",
        problem(compare="compare:\n- {name: a, aggregated: {tp: 1}}\n- {name: §a, aggregated: {tp: 2}}"),
        ["two layouts are called 'a'"],
    ),
    Case(
        "a layout without a list",
        problem(compare="compare: §{name: a, aggregated: {tp: 1}}"),
        ["compare: expected a list"],
    ),
]

DEPLOYMENTS = [
    Case("a broken deployment", "version: 1\nname: [§", ["not valid YAML"], SIMULATE),
    Case(
        "a deployment from the future",
        spoiled(DEPLOYMENT, "version: 1", "version: §7"),
        ["expected 1, got 7: a newer planner wrote it; update this one"],
        SIMULATE,
    ),
    Case(
        "a deployment before the first",
        spoiled(DEPLOYMENT, "version: 1", "version: §0"),
        ["version: expected at least 1, got 0"],
        SIMULATE,
    ),
    Case("no version", spoiled(DEPLOYMENT, "version: 1\nname", "§name"), ["version: is required"], SIMULATE),
    Case(
        "a route from nobody",
        spoiled(DEPLOYMENT, "source: prefill-0", "source: §prefill-O").replace(
            "- name: prefill-0", "- name: §prefill-0"
        ),
        ["no route leads from 'prefill-0'", "no instance called 'prefill-O'; did you mean 'prefill-0'?"],
        SIMULATE,
    ),
    Case(
        "a route the wrong way",
        spoiled(DEPLOYMENT, "target: decode-0", "target: §prefill-0"),
        ["expected a decode instance, got 'prefill-0' (prefill)"],
        SIMULATE,
    ),
    Case(
        "no routes",
        re.sub(r"routes:.*links:\n", "routes: []\nlinks:\n", DEPLOYMENT, flags=re.S).replace(
            "- name: prefill-0", "- name: §prefill-0"
        ),
        ["no route leads from 'prefill-0' to a decode instance"],
        SIMULATE,
    ),
    Case(
        "an unknown link",
        spoiled(DEPLOYMENT, "{link: up,", "{link: §down,"),
        ["routes[0].hops[0].link: no link called 'down'"],
        SIMULATE,
    ),
    Case(
        "unknown costs",
        spoiled(DEPLOYMENT, "cost: law", "cost: §lore"),
        ["instances[0].cost: no costs called 'lore'; there are law"],
        SIMULATE,
    ),
    Case(
        "too few parameters",
        spoiled(DEPLOYMENT, "parameters: [0, 0.02,", "parameters: §[0.02,"),
        ["expected at least 20 items"],
        SIMULATE,
    ),
    Case(
        "an iteration that takes no time",
        re.sub(r"parameters: .*", f"parameters: §{[0.0] * 20}", DEPLOYMENT),
        ["expected times above 0"],
        SIMULATE,
    ),
    Case(
        "an unknown law",
        spoiled(DEPLOYMENT, "parameters: [0,", "parameters: §[7,"),
        ["expected the number of a family first, 0 (linear), 1 (roofline), 2 (hybrid), 3 (table), got 7"],
        SIMULATE,
    ),
    Case(
        "stages that are missing",
        spoiled(DEPLOYMENT, "pp: 1", "pp: 2")
        .replace("stages: [", "stages: §[", 1)
        .replace("cost: law", "cost: §law", 1),
        ["expected 2 stages (pp), got 1", "expected costs of 2 stages"],
        SIMULATE,
    ),
    Case(
        "ranks that are missing",
        spoiled(DEPLOYMENT, "tp: 1", "tp: 2").replace("stages: [[", "stages: [§[", 1),
        ["expected 2 GPUs (tp), got 1"],
        SIMULATE,
    ),
    Case(
        "a GPU that is taken",
        spoiled(DEPLOYMENT, "gpus: [1]", "gpus: §[0]"),
        ["GPU node0:0 is already taken by prefill-0 stage 0"],
        SIMULATE,
    ),
    Case(
        "the wrong mode",
        DEPLOYMENT.replace("mode: disaggregated", "mode: aggregated").replace("phase: ", "phase: §"),
        ["expected phases of mode aggregated, got prefill", "got decode"],
        SIMULATE,
    ),
    Case(
        "two instances of one name",
        spoiled(DEPLOYMENT, "name: decode-0", "name: §prefill-0")
        .replace("target: ", "target: §")
        .replace("source: ", "source: §"),
        ["a second one called 'prefill-0'", "expected a prefill instance", "no instance called 'decode-0'"],
        SIMULATE,
    ),
    Case(
        "a link that stands still",
        spoiled(DEPLOYMENT, "bytes_per_s: 2.0e11", "bytes_per_s: §0"),
        ["expected at least 100000 bytes/s"],
        SIMULATE,
    ),
    Case(
        "no KV blocks",
        spoiled(DEPLOYMENT, "kv_blocks: 3000", "kv_blocks: §0"),
        ["expected at least 1, got 0"],
        SIMULATE,
    ),
]

FLAGS = [
    Case(
        "no command of that name",
        {},
        ["No such command 'paln'. Did you mean 'plan'? (try 'planner --help')"],
        ("paln",),
    ),
    Case(
        "no option of that name",
        {},
        ["No such option: --outptu (Possible options: --output) (try 'planner plan --help')"],
        ("plan", "p", "--outptu", "x"),
    ),
    Case("no problem", {}, ["Missing argument 'PROBLEM'. (try 'planner plan --help')"], ("plan",)),
    Case("a problem too many", {}, ["unexpected extra argument"], ("plan", "a", "b")),
    Case("an option without its value", {}, ["Option '-o' requires an argument. (try"], ("plan", "p", "-o")),
    Case("an unknown mode", {}, ["'--mode': 'agregated' is not one of 'auto'"], ("plan", "p", "--mode", "agregated")),
    Case("a seed below 0", {}, ["Invalid value for '--seed'"], ("plan", "p", "--seed", "-1")),
    Case("a seed in words", {}, ["Invalid value for '--seed'"], ("plan", "p", "--seed", "x")),
    Case(
        "an output that is a folder",
        {"problem.yaml": problem(), "lab/x": ""},
        ["expected a file, got a folder"],
        ("plan", "problem.yaml", "-o", "lab"),
        "lab: ",
    ),
    Case(
        "an output below a file",
        problem(),
        ["is not a folder"],
        ("plan", "problem.yaml", "-o", "problem.yaml/out.yaml"),
        "problem.yaml/out.yaml: cannot be written",
    ),
    Case(
        "an output over the input",
        problem(),
        ["would overwrite the input"],
        ("plan", "problem.yaml", "-o", "./problem.yaml"),
        "problem.yaml: ",
    ),
    Case(
        "two outputs into one file",
        problem(),
        ["would overwrite the input"],
        ("plan", "problem.yaml", "-o", "out", "--html", "out"),
        "out: ",
    ),
    Case(
        "records over the deployment",
        DEPLOYMENT,
        ["would overwrite the input"],
        ("simulate", "deployment.yaml", "-q", "-w", "sharegpt", "--records", "deployment.yaml"),
        "deployment.yaml: ",
    ),
    Case(
        "an unknown kind of file",
        {},
        ["no schema called 'nonsense'; there are deployment, problem"],
        ("schema", "nonsense"),
    ),
    Case(
        "an unknown cluster",
        {},
        ["no preset named 'h100-2x9'; did you mean 'h100-2x8'?"],
        ("topology", "show", "h100-2x9"),
        "CLUSTER: ",
    ),
    Case(
        "a cluster file that is not there",
        {},
        ["no such file 'lab.yaml'"],
        ("topology", "show", "./lab.yaml"),
        "CLUSTER: ",
    ),
    Case(
        "a fault in a cluster file to show",
        {"lab.yaml": "nodes: §7\n"},
        ["nodes: expected a list, got 7"],
        ("topology", "show", "./lab.yaml"),
    ),
    Case("from without to", {}, ["--from and --to go together"], (*SHOW, "--from", "node0:0")),
    Case(
        "from no such GPU",
        {},
        ["no GPU 9 on node 'node0'; it has 0, 1"],
        (*SHOW[:3], "--from", "node0:9", "--to", "node1:0"),
    ),
    Case(
        "from no such node",
        {},
        ["no node 'nod' in cluster h100-2x8; did you mean"],
        (*SHOW[:3], "--from", "nod:0", "--to", "node1:0"),
    ),
    Case(
        "to nowhere",
        {},
        ["expected a GPU as node:index, such as node0:0, got ''"],
        (*SHOW[:3], "--from", "node0:0", "--to", ""),
    ),
    Case(
        "an unknown workload to simulate",
        {"deployment.yaml": DEPLOYMENT},
        ["did you mean 'sharegpt'?"],
        ("simulate", "deployment.yaml", "-q", "-w", "sharegtp"),
        "--workload: ",
    ),
    Case(
        "no rate",
        {"deployment.yaml": DEPLOYMENT},
        ["no rate of its own; give --rate"],
        ("simulate", "deployment.yaml", "-q", "-w", "sharegpt"),
    ),
    *(
        Case(f"{option} {value}", {"deployment.yaml": DEPLOYMENT}, [words], (*SIMULATE, option, value))
        for option, value, words in (
            ("--rate", "0", "above 0"),
            ("--rate", "-1", "above 0"),
            ("--rate", "nan", "above 0"),
            ("--rate", "inf", "above 0"),
            ("--rate", "1e9", "give a shorter --duration"),
            ("--rate", "1e-9", "expected 1e-4 to 1e6 requests/s"),
            ("--rate", "x", "'--rate'"),
            ("--duration", "0", "above 0"),
            ("--duration", "nan", "above 0"),
            ("--duration", "1e300", "give a shorter --duration"),
            ("--duration", "0.001", "give a longer --duration"),
            ("--seed", "-1", "'--seed'"),
        )
    ),
]

CASES = [*YAML, *PROBLEM, *SLO, *CLUSTERS, *MODELS, *WORKLOADS, *PROFILES, *SETTINGS, *DEPLOYMENTS, *FLAGS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_gives_one_line_with_its_place_and_leaves_nothing(case: Case, tmp_path, monkeypatch, capsys):
    case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = _run(list(case.command))
    printed = capsys.readouterr()
    check(case, tmp_path, code, printed.out, printed.err)


def test_there_are_enough_faults_and_none_twice():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 60


BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    "name", ["an open bracket", "a GPU that is taken", "no option of that name", "several documents"]
)
def test_a_real_process_says_the_same_as_a_call(name, tmp_path):
    case = BY_NAME[name]
    case.write(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "planner", *case.command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    check(case, tmp_path, ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_without_permission_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("problem.yaml").write_text(problem())
    Path("problem.yaml").chmod(0)
    assert _run(["plan", "problem.yaml"]) == 1
    assert capsys.readouterr().err == "problem.yaml: cannot be read: Permission denied\n"
    Path("problem.yaml").chmod(0o600)
    Path("locked").mkdir(0o500)
    assert _run(["plan", "problem.yaml", "-o", "locked/out.yaml"]) == 1
    assert "locked/out.yaml: cannot be written: no permission in" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_without_end_is_not_read_to_its_end(capsys):
    assert _run(["plan", "/dev/zero"]) == 1
    assert capsys.readouterr().err == "/dev/zero: expected at most 64 MiB\n"


def test_a_problem_for_a_deployment_is_told_key_by_key(tmp_path, monkeypatch, capsys):
    Case("", problem(), [], SIMULATE).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert _run(list(SIMULATE)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "deployment.yaml:1:1: version: is required" in lines
    assert any(line.startswith("deployment.yaml:5:1: search: unknown key") for line in lines)
    assert len(set(lines)) == len(lines) and all(line.startswith("deployment.yaml:") for line in lines)


def test_the_templates_are_sound(tmp_path):
    system_of(read_deployment(parse(DEPLOYMENT, "deployment.yaml")))
    for parts in ({"cluster": CLUSTER}, {"workload": WORKLOAD}, {"profiles": PROFILE}, {"slo": CLASSES}, {}):
        find_kinds(problem_of(parse(problem(**parts), "problem.yaml")))
    find_kinds(problem_of(parse(problem(model=MODEL), "problem.yaml")))


def test_an_unsorted_trace_is_sorted_and_noted(tmp_path):
    seconds = [10, 12, 11, 14, 13, *range(15, 55)]
    rows = "".join(f"2023-11-16 18:15:{second},100,10\n" for second in seconds)
    Case("", traced(TRACE + rows), []).write(tmp_path)
    found = read_problem(tmp_path / "problem.yaml")
    assert any("rows were sorted by time: 2 stood below a later one" in note for note in found.notes)
    assert found.workload.base.arrival_s.tolist() == sorted(second - 10.0 for second in seconds)


def test_a_write_that_fails_midway_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "deployment.yaml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        write_text(path, "new" * 1000)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["deployment.yaml"]
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a character: \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["deployment.yaml"]


def test_a_link_keeps_pointing_and_its_file_is_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("a/real.yaml")
    write_text(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink() and (tmp_path / "a" / "real.yaml").read_text() == "new"


# --- whatever stands in a file, it is read, or it is refused; nothing else happens ---

INLINE = (
    problem(cluster=CLUSTER, workload=WORKLOAD, slo=CLASSES, profiles=PROFILE)
    + "engine: {block_tokens: 16, max_batch: 64, prefill_tokens: 2048, chunk_tokens: [512], memory_fraction: 90%}\n"
    + "compare: [{name: mine, prefill: {tp: 1}, decode: {tp: 1}}, {name: other, aggregated: {tp: 1, pp: 2}}]\n"
    + "objective: min_gpus\nrate_rps: 2rps\nseed: 3\n"
)
TINY = problem(model=MODEL, cluster=CLUSTER, workload=WORKLOAD)


def _alone(text: str) -> str:
    """Return what stands below the one key of a part."""
    return "\n".join(line[2:] for line in text.splitlines()[1:]) + "\n"


def _plan_cheaply(path: Path) -> None:
    found = read_problem(path)
    assert isinstance(found.notes, tuple)
    if len(found.topology.gpus) <= 64:  # larger ones are only slower
        find_kinds(found)


def _model(path: Path) -> None:
    model = read_model(load(path))
    assert model.weight_bytes > 0 and model.kv_bytes_per_token >= 0


READERS = {
    "problem": (INLINE, _plan_cheaply),
    "problem of a model of one's own": (TINY, _plan_cheaply),
    "deployment": (DEPLOYMENT, lambda path: system_of(read_deployment(load(path)))),
    "profile": (_alone(PROFILE), lambda path: read_profile(load(path))),
    "cluster": (_alone(CLUSTER), lambda path: read_cluster(load(path))),
    "model": (_alone(MODEL), _model),
    "workload": (_alone(WORKLOAD) + "rate_rps: 3\n", lambda path: read_workload(load(path)).generate(1.0, 10.0, 0)),
}

# fmt: off
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"),
    "", " ", "x", "0", "1", "-1", "1e400", "200ms", "80GiB", "400Gb/s", "90%", "nan", "\x85", "\u2028", "é" * 50,
    "a/b.yaml", "../", "opt-13b", "auto", "none", "prefill", "aggregated",
    [], {}, [[]], [None], [1, 2, 3], ["x"], {"x": 1}, {"": None}, [{}],
]
PIECES = [b"\n", b": ", b"- ", b"{", b"[", b"&a ", b"*a", b"!!", b"'", b"#", b"\t", b"\xff", b"---\n"]
# fmt: on


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path into plain data, the outermost first."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(below for key, value in inner for below in _paths(value, (*path, key)))]


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def _mutate(draw: Any, data: Any) -> Any:
    """Return the data with one thing changed somewhere."""
    paths = [path for path in _paths(data) if path]
    if not paths:
        return copy.deepcopy(draw(st.sampled_from(ODD)))  # the next mutation must not change ODD itself
    path = draw(st.sampled_from(paths))
    holder, key = _at(data, path[:-1]), path[-1]
    kind = draw(st.sampled_from(["replace", "replace", "scale", "drop", "rename", "wrap", "move", "repeat"]))
    if kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[draw(st.sampled_from([f"{key}s", str(key)[1:], "name", "", "~", *PARTS]))] = holder.pop(key)
    elif kind == "wrap":
        holder[key] = draw(st.sampled_from([[holder[key]], {"x": holder[key]}, str(holder[key])]))
    elif kind == "scale" and isinstance(holder[key], int | float):
        holder[key] *= draw(st.sampled_from([-1, 2, 0.1, 1000, 10**9, 1e-9]))
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "move":
        holder[key] = copy.deepcopy(_at(data, draw(st.sampled_from(paths))))
    else:
        holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return data


@st.composite
def mutated(draw: Any, text: str) -> bytes:
    """Return a file with some things changed in what it means, and sometimes in how it is written."""
    data = yaml.safe_load(text)
    for _ in range(draw(st.integers(0, 3))):
        data = _mutate(draw, data)
    flow = draw(st.sampled_from([None, True]))
    content = yaml.safe_dump(data, allow_unicode=True, sort_keys=False, default_flow_style=flow).encode()
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        at, upto = draw(st.integers(0, len(content))), draw(st.integers(0, 8))
        piece = draw(st.one_of(st.binary(max_size=4), st.sampled_from(PIECES)))
        content = content[:at] + piece + content[at + upto :]
    return content


def read_or_refused(kind: str, content: bytes, path: Path) -> None:
    """Read a file of that kind; assert that whatever is wrong with it can be told in a line each."""
    path.write_bytes(content)
    try:
        READERS[kind][1](path)
    except InfeasibleError as error:
        assert str(error) and error.way_out
    except InputError as error:
        assert error.faults
        for fault in error.faults:
            assert fault.message and fault.file and "\n" not in str(fault) and str(fault).isprintable()


def _fuzz(kind: str, examples: int) -> Any:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutated(READERS[kind][0]))
    def run(path: Path, content: bytes) -> None:
        read_or_refused(kind, content, path)

    return run


@pytest.mark.parametrize("kind", READERS)
def test_a_mutated_file_is_read_or_refused(kind, tmp_path):
    _fuzz(kind, 60)(tmp_path / "file.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_thousands_of_mutated_files_are_read_or_refused(kind, tmp_path):
    _fuzz(kind, 3000)(tmp_path / "file.yaml")
