"""The profiler on the real engine: what a step runs, what a run leaves behind, what a killed one finds again."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from planner.cli import _run  # noqa: E402
from planner.errors import InputError  # noqa: E402
from planner.sources.profiles import read_profile  # noqa: E402
from planner.specs.base import load, load_preset, preset_names, validate  # noqa: E402
from planner.specs.cluster import find_gpu  # noqa: E402
from planner.specs.model import ModelSpec  # noqa: E402
from profiler import links  # noqa: E402
from profiler.beside import _turns  # noqa: E402
from profiler.cli import parse_numbers, parse_seconds  # noqa: E402
from profiler.device import measured_gpu, rates  # noqa: E402
from profiler.engine import EngineSubject  # noqa: E402
from profiler.model import named_as_preset, same_preset, spec_of  # noqa: E402
from profiler.session import PASSES  # noqa: E402
from profiler.setting import Setting  # noqa: E402
from profiler.store import journal_path  # noqa: E402
from profiler.timer import measure, timer_for, wall_clock  # noqa: E402
from runtime.load import load_executor  # noqa: E402
from runtime.model_files import open_model  # noqa: E402
from runtime.preset_config import preset_config  # noqa: E402
from runtime.settings import EngineSettings  # noqa: E402
from runtime.transfer.base import open_outlet, open_reader  # noqa: E402
from tests.little_transformer import LittleTransformer  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
QUICK = ("--load-format", "dummy", "--device", "cpu", "--threads", "1", "--max-batch", "4", "--max-tokens", "128")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "little"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder / "config.json"


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def subject(model: Path, one_thread) -> EngineSubject:
    settings = EngineSettings(threads=1, max_batch=8, step_tokens=256, block_tokens=16, kv_blocks=120)
    files = open_model(str(model), load_format="dummy", tokenizer=False)
    executor = load_executor(files, str(model), settings, "dummy")
    opened = EngineSubject(files.config, executor, settings, most_kv_tokens=100 * 16)
    yield opened
    opened.close()


def test_a_step_of_the_engine_runs_exactly_what_the_setting_says(subject):
    for setting in (
        Setting.prefill(1, 100),
        Setting.prefill(3, 40, 64),
        Setting.decode(8, 90),
        Setting.decode(1, 1),
        Setting(2, 30, 16, 5, 77),
    ):
        assert subject.limits.fault(setting) is None
        for _ in range(3):  # a repeat starts from the same state
            subject.place(setting)
            outside_s = subject.step()  # raises when other tokens ran
            assert outside_s is not None and outside_s >= 0
    assert subject.limits.kv_blocks == 100 and subject.kv_tokens == 120 * 16


def test_no_block_that_is_read_was_left_unwritten(subject):
    kv = subject._executor._inner._worker.kv[:, :, :100].float()
    assert bool((kv.abs().amax(dim=(0, 1, 3, 4, 5)) > 0).all())


def test_a_setting_beyond_the_instance_is_named(subject):
    assert "300 tokens in a step, the instance takes 256" in subject.limits.fault(Setting.prefill(1, 300))
    assert "9 requests, the instance takes 8" in subject.limits.fault(Setting.decode(9, 10))
    assert "tokens of a request" in subject.limits.fault(Setting.decode(1, 600))
    assert "KV blocks" in subject.limits.fault(Setting.decode(8, 400))


def test_longer_work_takes_longer_in_a_transformer_of_plain_torch(one_thread):
    machine = LittleTransformer()
    short, long = (
        min(repeat.time_s for repeat in measure(machine, setting, wall_clock, 1, 3, 2))
        for setting in (Setting.prefill(1, 16), Setting.prefill(1, 1024))
    )
    assert long > 3 * short  # 64 times the tokens


def test_every_preset_that_the_runtime_computes_is_the_same_model_on_both_sides():
    for name in ("smollm2-135m", "llama3.1-8b", "qwen3-8b", "mixtral-8x7b", "opt-13b"):
        assert name in preset_names("models")
        preset = validate(ModelSpec, load_preset("models", name))
        spec = spec_of(preset_config(name), "mine", preset.dtype)
        assert same_preset(spec) == preset, name
        assert (spec.parameters, spec.kv_bytes_per_token) == (preset.parameters, preset.kv_bytes_per_token)
    other = spec_of(preset_config("smollm2-135m"), "mine", "float32")
    assert same_preset(other) is None and other.kv_bytes_per_token == 46_080


def test_copies_and_the_disk_are_timed_over_sizes(tmp_path):
    sizes = links.message_sizes(1152, 16 * 23040)
    assert sizes == sorted(set(sizes)) and 16 * 23040 in sizes
    found = [*links.copies(("cpu",), [1024, 65536], 0.05), *links.disk(tmp_path, [4096, 65536])]
    assert [each.what for each in found] == [
        "device to device",
        "device to host",
        "host to device",
        "host to disk",
        "disk to host",
    ]
    for each in found:
        assert all(low_s <= middle_s <= high_s for _, middle_s, low_s, high_s in each.rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_time_their_links_and_say_so_when_one_dies():
    sent, reduced = links.between_ranks(links.Ranks(("cpu", "cpu"), 1), [1024, 2**20])
    assert (sent.what, sent.over, reduced.what, reduced.ranks) == ("send", "gloo", "all-reduce", 2)
    assert [row[0] for row in sent.rows] == [row[0] for row in reduced.rows] == [1024, 2**20]
    with pytest.raises(InputError, match=r"rank process ended with 1; give --no-links"):
        links.between_ranks(links.Ranks(("cpu", "nowhere"), 1), [1024])


def test_the_best_rates_of_a_device_make_a_gpu_of_it(one_thread):
    found = rates("cpu", "float32", 1)
    gpu = measured_gpu("cpu", found)
    assert gpu.memory_bytes > 2**30 and gpu.fp16_flop_per_s > 1e9 and gpu.memory_bytes_per_s > 1e8
    core = measured_gpu("cpu", found, cores=(1, 4))
    assert (core.name, core.aliases) == ("cpu-core", (gpu.name,)) and find_gpu(core.name) is not None
    assert core.memory_bytes == pytest.approx(gpu.memory_bytes / 4, rel=1e-6)
    half = measured_gpu("cpu", found, cores=(2, 4))
    assert (half.name, half.memory_bytes) == (gpu.name, pytest.approx(gpu.memory_bytes / 2, rel=1e-6))


def test_a_model_goes_by_its_presets_name_whatever_the_type_of_its_weights():
    other = named_as_preset(spec_of(preset_config("smollm2-135m"), "a-file.q4", "float32"))
    assert (other.name, other.dtype) == ("smollm2-135m", "float32")
    mine = spec_of(replace(preset_config("smollm2-135m"), layers=29), "a-file.q4", "float32")
    assert named_as_preset(mine) == mine


@pytest.mark.slow
def test_kv_blocks_are_pulled_out_of_a_process_that_writes_them(one_thread):
    kind = links.Blocks(layers=3, block_tokens=16, kv_heads=2, head_dim=8, dtype="float32")
    before = os.sched_getaffinity(0)
    found = links.pulls(kind, (1, 4, 16), sorted(before)[:2])
    assert (found.what, found.over, found.ranks) == ("pull", "shared memory", 2)
    # 3 layers, keys and values, 16 tokens of 2 heads of 8 numbers of 4 bytes
    assert [row[0] for row in found.rows] == [6144 * n for n in (1, 4, 16)]
    assert os.sched_getaffinity(0) == before
    with pytest.raises(InputError, match="the other process ended; give --no-links"):
        links.pulls(kind, (1,), [min(before), 10_000])  # no such core


def test_pulled_blocks_land_where_they_were_asked_for(one_thread, tmp_path):
    kind = links.Blocks(layers=2, block_tokens=4, kv_heads=1, head_dim=2, dtype="float32")
    source = kind.source(str(tmp_path / "kv"), 5)
    outlet, target = open_outlet("shm", source, torch.device("cpu")), torch.ones(source.shape)
    outlet.kv += 1 + torch.arange(5.0).view(1, 1, 5, 1, 1, 1)
    links._pulled(open_reader(source), target, torch.tensor([4, 1]), torch.tensor([0, 3]))
    outlet.close()
    assert target[:, :, :, 0, 0, 0].tolist() == [[[5.0, 1.0, 1.0, 2.0, 1.0]] * 2] * 2  # elsewhere as it was


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_events_lie_around_the_whole_step():
    def step() -> None:
        (torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")).sum().item()
        time.sleep(0.02)

    timer_for("cuda:0", in_process=True)(step)
    assert 0.02 <= timer_for("cuda:0", in_process=True)(step).time_s < 0.5


# ---- the command


def test_a_run_ends_with_a_profile_and_a_rerun_measures_nothing_twice(model, tmp_path, capsys, one_thread):
    output = tmp_path / "out" / "profile.yaml"
    command = ["profile", "--model", str(model), "-o", str(output), *QUICK, "--time-budget", "2s", "--no-links", "-q"]
    assert _run([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    profile = read_profile(load(output))
    assert {row.phase for row in profile.samples.each} == {"prefill", "decode"}
    assert shown["settings"] >= 6 and shown["fits"][0]["model"] == "little"  # however slow the machine
    assert profile.digest == shown["digest"] and profile.measured_model.name == "little"
    assert profile.environment.model_digest and profile.environment.weights == "dummy"
    assert profile.environment.torch == torch.__version__
    before = journal_path(output).read_text()
    assert _run([*command, "--json"]) == 0
    samples = [line for line in journal_path(output).read_text().splitlines() if '"kind":"sample"' in line]
    assert samples == [line for line in before.splitlines() if '"kind":"sample"' in line]
    assert _run([*command, "--dtype", "bfloat16"]) == 1
    assert "--fresh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tp", "3"), "TP3: "),
        (("--pp", "5"), "TP1 PP5: "),
        (("--tp", "two"), "--tp: expected whole numbers from 1"),
        (("--time-budget", "soon"), "--time-budget: expected a time from 1s to 24h, such as 10m, got 'soon'"),
        (("--dtype", "float64"), "--dtype: expected float32, bfloat16, float16, got 'float64'"),
        (("--load-format", "dumy"), "did you mean 'dummy'?"),
        (("--device", "tpu"), "--device: expected auto, cpu or cuda, got 'tpu'"),
        (("--devices", "999"), "core 999 is not among"),
        (("--model", "no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_a_wrong_option_is_one_line(model, tmp_path, capsys, arguments, says):
    command = ["profile", "--model", str(model), "-o", str(tmp_path / "p.yaml"), *QUICK, "-q", *arguments]
    assert _run(command) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "p.yaml").exists()


def test_without_torch_the_command_says_what_to_install(monkeypatch, tmp_path, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr("profiler.cli.find_spec", lambda name: None if name == "torch" else real(name))
    assert _run(["profile", "--model", "smollm2", "-o", str(tmp_path / "p.yaml"), "-q"]) == 1
    assert capsys.readouterr().err == (
        "profiling runs the model and needs torch: pip install 'goodput-planner[runtime]'\n"
    )


def test_times_and_lists_on_the_command_line():
    assert [parse_seconds(text) for text in ("90", "90s", "10m", "1.5h", "2min")] == [90.0, 90.0, 600.0, 5400.0, 120.0]
    assert parse_numbers("1, 2,4", "--tp", 1) == (1, 2, 4)


def test_model_and_output_are_asked_for(capsys):
    assert _run(["profile", "--model", "smollm2"]) == 1
    assert "expected --model and -o" in capsys.readouterr().err
    assert _run(["profile"]) in (0, 1, 2)
    assert "Measure a model on this machine" in "".join(capsys.readouterr())


def test_a_copy_beside_gives_either_phase_half_of_its_time():
    machine = LittleTransformer()
    spent_s = {"prefill": 0.0, "decode": 0.0}
    turns = _turns(machine)
    while sum(spent_s.values()) < 0.3:
        setting = next(turns)
        before = time.perf_counter()
        time.sleep(0.01 if setting.phase == "prefill" else 0.002)
        spent_s[setting.phase] += time.perf_counter() - before
    assert 0.4 < spent_s["prefill"] / sum(spent_s.values()) < 0.6


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_core_is_measured_beside_a_copy(model, tmp_path):
    output = tmp_path / "p.yaml"
    command = [
        "profile",
        "--model",
        str(model),
        "-o",
        str(output),
        *QUICK,
        "--beside",
        "1",
        "--max-context",
        "100",
        "-q",
    ]
    done = subprocess.run([sys.executable, "-m", "planner", *command, "--time-budget", "8s"], check=False)
    assert done.returncode == 0
    profile = read_profile(load(output))
    assert profile.environment.busy_beside == 1 and (profile.gpu, profile.measured_gpu.name) == ("cpu-core",) * 2
    assert max(max(row.context_tokens, row.prompt_tokens + row.cached_tokens) for row in profile.samples.each) <= 100
    assert "pull" in [each.what for each in profile.transfers]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_copy_beside_ends_when_the_run_is_killed(model, tmp_path):
    output = tmp_path / "p.yaml"
    command = ["profile", "--model", str(model), "-o", str(output), *QUICK, "--beside", "1", "--no-links", "-q"]
    process = running([*command, "--time-budget", "60s"])
    try:
        _wait(lambda: '"kind":"sample"' in (journal_path(output).read_text() if journal_path(output).exists() else ""))
        copies = _children(process.pid)
        assert copies
    finally:
        process.kill()
        process.communicate()
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in copies))


def test_too_few_cores_for_the_copies_are_named(model, tmp_path, capsys):
    command = ["profile", "--model", str(model), "-o", str(tmp_path / "p.yaml"), *QUICK, "--beside", "60", "-q"]
    assert _run([*command, "--devices", "0"]) == 1
    assert "--beside 60: TP1 and its copies take 61 cores, here are 1; give --threads" in capsys.readouterr().err


def _children(pid: int) -> list[int]:
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in text.split()]


def _wait(until, most_s: float = 60.0) -> None:
    deadline = time.monotonic() + most_s
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(command: list[str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "planner", *command], env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_halfway_goes_on_and_covers_what_a_whole_one_does(model, tmp_path, how):
    output = tmp_path / "profile.yaml"
    command = ["profile", "--model", str(model), "-o", str(output), *QUICK, "--time-budget", "20s", "--no-links", "-q"]
    process = running(command)
    journal = journal_path(output)
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b'"visit":2') >= 10):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    told = process.communicate(timeout=20)[1].decode()
    assert process.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130)
    assert not output.exists() and (how is signal.SIGKILL or "measurements kept in" in told)
    kept = journal.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]

    process = running(command)
    process.communicate(timeout=120)
    assert process.returncode == 0 and journal.read_bytes().startswith(kept)
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    (plan,) = [record for record in records if record["kind"] == "plan"]
    visits: dict[tuple[int, ...], set[int]] = {}
    for record in records:
        if record["kind"] == "sample":
            visits.setdefault(tuple(record["setting"]), set()).add(record["visit"])
    for setting in plan["fit"] + plan["held_out"]:
        assert visits[tuple(setting)] >= set(range(1, PASSES + 1))
    profile = read_profile(load(output))
    apart = {
        tuple(Setting.prefill(s.batch, s.prompt_tokens, s.cached_tokens))
        for s in profile.held_out.each
        if s.phase == "prefill"
    }
    assert apart == {tuple(s) for s in plan["held_out"] if s[0]}


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_instances_are_profiled_alike(model, tmp_path):
    output = tmp_path / "profile.yaml"
    command = ["profile", "--model", str(model), "-o", str(output), *QUICK, "--tp", "1,2", "--pp", "1,2"]
    assert _run([*command, "--time-budget", "24s", "-q"]) == 0
    profile = read_profile(load(output))
    layouts = {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {(row.tp, row.pp) for row in profile.samples.each} == layouts
    assert {(each.tp, each.pp) for each in profile.accuracy} <= layouts  # all of them, where the machine is idle
    assert {each.what for each in profile.transfers} >= {"send", "all-reduce", "device to host", "host to disk"}
    assert {(each.tp, each.pp) for each in profile.kv_tokens} == layouts
    assert np.isfinite([each.median for each in profile.accuracy]).all()
