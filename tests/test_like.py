"""`like`: a preset or a file with some of it changed, and the line of every mistake in the file where it stands."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from planner.sources.hf_config import read_model
from planner.sources.workloads import read_workload
from planner.specs.base import load, parse, resolve
from planner.specs.topology import read_cluster


def test_a_preset_can_be_changed_in_place():
    model = read_model(resolve("models", parse("{like: smollm2-135m, dtype: float32}", "problem.yaml")))
    plain = read_model(resolve("models", parse("m: smollm2-135m", "problem.yaml").at("m")))
    assert model.name == plain.name and model.layers == plain.layers
    assert (plain.kv_bytes_per_token, model.kv_bytes_per_token) == (23_040, 46_080)  # 2 bytes, and 4


def test_a_file_may_be_like_another_and_its_data_is_found_beside_the_other(tmp_path):
    (tmp_path / "mine.yaml").write_text("like: azure-conversation\nprompt_scale: 0.5\n")
    (tmp_path / "yours.yaml").write_text("like: mine.yaml\noutput_scale: 0.25\n")
    workload = read_workload(load(tmp_path / "yours.yaml"))
    whole = read_workload(resolve("workloads", parse("w: azure-conversation", "x.yaml").at("w")))
    assert workload.mean_prompt_tokens == pytest.approx(whole.mean_prompt_tokens / 2, rel=0.001)
    assert workload.mean_output_tokens == pytest.approx(whole.mean_output_tokens / 4, rel=0.01)


def test_a_file_named_in_the_change_is_found_beside_the_change(tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,1\n1,30,1\n2,20,1\n")
    (tmp_path / "mine.yaml").write_text("like: azure-conversation\nsource: trace\nfile: trace.csv\n")
    assert read_workload(load(tmp_path / "mine.yaml")).mean_prompt_tokens == 20


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("like: localhost-cpu\nnodes:\n  - {name: here, gpu: cpu-core, gpus: eight}\n", 3, "eight"),
        ("name: mine\nlike: localhost-cpu\nnoodles: 1\n", 3, "unknown key"),
        ("\nlike: localhost-gpu\n", 2, "did you mean 'localhost-cpu'?"),
        ("like: {nodes: []}\n", 1, "expected a preset name, a file"),
        ("like: localhost-cpu\nnodes: []\n", 2, "expected at least one node"),
    ],
)
def test_a_mistake_is_shown_where_it_stands(tmp_path, text, line, says):
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_cluster(load(tmp_path / "cluster.yaml"))
    fault = error.value.faults[0]
    assert (fault.file, fault.line) == (str(tmp_path / "cluster.yaml"), line) and says in str(fault)


def test_a_mistake_in_what_is_like_is_shown_there(tmp_path):
    (tmp_path / "base.yaml").write_text("name: base\nnodes:\n  - {name: n, gpu: cpu-core, gpus: none}\n")
    (tmp_path / "mine.yaml").write_text("like: base.yaml\nname: mine\n")
    with pytest.raises(InputError) as error:
        read_cluster(load(tmp_path / "mine.yaml"))
    assert (error.value.faults[0].file, error.value.faults[0].line) == (str(tmp_path / "base.yaml"), 3)


def test_files_that_are_like_each_other_end_in_one_line(tmp_path):
    (tmp_path / "a.yaml").write_text("like: b.yaml\n")
    (tmp_path / "b.yaml").write_text("like: a.yaml\n")
    with pytest.raises(InputError, match="each like the next"):
        read_cluster(load(tmp_path / "a.yaml"))
