"""The profiler: which settings it asks for, what it keeps on disk, how it goes on, and what its profile says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.fit_report import report_of_profile
from planner.sources.profiles import read_profile, to_yaml
from planner.specs.base import load, load_preset, parse, preset_names
from planner.specs.layout import Layout
from planner.specs.measured import Environment, Transfer
from profiler import grid
from profiler.accuracy import PHASES, outliers, spread
from profiler.build import Facts, profile_of
from profiler.expect import Expected
from profiler.progress import Quiet
from profiler.session import HELD_OUT, PASSES, TIME_UP, Case, Session
from profiler.setting import Setting, setting_of
from profiler.store import Journal, journal_path
from profiler.subject import Limits
from profiler.timer import measure
from tests.lawful import GPU, MODEL, Lawful, law_s

LIMITS = Limits(kv_blocks=2048, block_tokens=16, max_positions=8192, max_requests=64, max_step_tokens=4096)
LINK = Transfer(what="send", over="gloo", ranks=2, rows=((512, 1e-5, 9e-6, 2e-5), (8192, 2e-5, 1e-5, 3e-5)))
IDENTITY = {"model": "lawful", "dtype": "float32", "seed": 0}


OPEN: list[Journal] = []
MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path):
    """Give the tests a folder in memory where there is one: a journal waits for its disk hundreds of times."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_journal_stays_open():
    yield
    while OPEN:
        OPEN.pop().close()


def a_journal(folder: Path, fresh: bool = False, **changed: str | int) -> Journal:
    OPEN.append(Journal(folder / "profile.yaml.journal", IDENTITY | changed, fresh))
    return OPEN[-1]


def a_session(journal: Journal, machine: Lawful, layout: Layout = Layout(1), left: int = 1) -> Session:  # noqa: B008
    case = Case(MODEL, lambda: GPU, layout, seed=0)
    return Session(case, machine, machine.timer, journal, machine, left, Quiet())


def facts(**changed) -> Facts:
    values = {
        "name": "mine",
        "model": MODEL,
        "gpu": GPU,
        "model_is_preset": False,
        "gpu_is_preset": False,
        "dtype": "bfloat16",
        "interconnect": "one device",
        "environment": Environment(date="2026-01-01T00:00:00+00:00", engine="goodput-planner"),
    }
    return Facts(**(values | changed))


# ---- settings and the grid


limits = st.builds(
    Limits,
    kv_blocks=st.integers(4, 5000),
    block_tokens=st.sampled_from([1, 16, 32]),
    max_positions=st.integers(40, 40_000),
    max_requests=st.integers(1, 300),
    max_step_tokens=st.integers(16, 20_000),
)


@given(limits, st.integers(0, 99))
@example_settings(deadline=None, max_examples=40)
def test_every_setting_that_is_asked_for_fits_the_instance_and_stands_once(found, seed):
    base = grid.base(found)
    apart = grid.held_out(found, grid.spans(base), 12, seed)
    assert len(set(base)) == len(base) and len(set(apart)) == len(apart)
    for setting in [*base, *apart, *grid.mixed(found)]:
        assert found.fault(setting) is None, setting
    assert apart == grid.held_out(found, grid.spans(base), 12, seed)


def test_the_grid_varies_batch_length_and_prefix_cheap_settings_first():
    base = grid.base(LIMITS)
    prefills, decodes = ([s for s in base if bool(s.decodes) is d] for d in (False, True))
    assert {s.cached_tokens for s in prefills} >= {0, 512, 2048}
    assert {s.prefills for s in prefills} >= {1, 2, 4, 8} and max(s.new_tokens for s in prefills) == 4096
    assert {s.decodes for s in decodes} >= {1, 4, 16, 64} and max(s.context_tokens for s in decodes) == 8192
    assert [grid.work(s) for s in prefills] == sorted(grid.work(s) for s in prefills)
    half = base[: len(base) // 2]
    assert {s.phase for s in half} == {"prefill", "decode"}  # an interrupted run knows both


def test_settings_kept_apart_lie_inside_what_is_fitted():
    base = grid.base(LIMITS)
    spans = grid.spans(base)
    for setting in grid.held_out(LIMITS, spans, 12, 3):
        assert all(value <= most for value, most in zip(setting, spans[setting.phase], strict=True))


def test_the_longest_steps_are_left_out_when_time_is_short_and_both_phases_keep_half():
    base = grid.base(LIMITS)
    whole_s = 3 * sum(map(law_s, base))
    kept = grid.affordable(base, law_s, 3, whole_s / 4)
    assert kept and 3 * sum(map(law_s, kept)) <= whole_s / 4
    assert max(map(law_s, kept)) <= min(law_s(s) for s in base if s not in kept)
    both = grid.affordable_of_both(base, law_s, 3, whole_s / 4)
    each_s = [3 * sum(law_s(s) for s in both if s.phase == phase) for phase in PHASES]
    assert max(each_s) <= whole_s / 8 or min(each_s) < whole_s / 8
    assert {s.phase for s in both} == set(PHASES)


def test_what_was_never_measured_near_is_measured_next_and_where_the_fit_is_off():
    line = [Setting.decode(batch, 256) for batch in (1, 2, 4, 8, 16, 32, 64)]
    among = [Setting.decode(8, context) for context in (256, 384, 4096)]
    known = grid.Known(line, np.full(len(line), 0.02))
    assert grid.least_sure(known, among, lambda _: 0.01, 1) == [Setting.decode(8, 4096)]
    off = grid.Known(line, np.array([0.5, 0.5, 0.02, 0.02, 0.02, 0.02, 0.02]))
    ends = [Setting.decode(1, 512), Setting.decode(64, 512)]
    assert grid.least_sure(off, ends, lambda _: 0.01, 1) == ends[:1]
    assert grid.least_sure(known, ends, lambda s: 1.0 if s == ends[0] else 0.01, 1) == ends[1:]  # dearer, no surer


def test_a_few_measurements_say_what_the_others_will_take():
    seen = [s for s in grid.base(LIMITS) if s.step_tokens <= 1024 and s.longest <= 2100]
    expected = Expected({s: law_s(s) for s in seen})
    for setting in grid.base(LIMITS):
        assert expected(setting) == pytest.approx(law_s(setting), rel=0.6), setting


# ---- the journal


def test_a_journal_gives_back_what_was_kept_and_drops_a_last_line_cut_short(tmp_path):
    journal = a_journal(tmp_path)
    journal.append([{"kind": "sample", "tp": 1, "pp": 1, "value": number} for number in range(3)])
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"sample","tp":1,"pp')
    again = a_journal(tmp_path)
    assert again.resumed and [record["value"] for record in again.of("sample", tp=1)] == [0, 1, 2]
    again.append([{"kind": "sample", "value": 3}])
    again.close()
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run"] + ["sample"] * 4


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "other"}, "was measured with model lawful, now it is other"),
        ({"dtype": "bfloat16"}, "was measured with dtype float32, now it is bfloat16"),
        ({"threads": 2}, "was measured with threads None, now it is 2"),
    ],
)
def test_a_journal_of_another_run_is_refused_with_the_way_out(tmp_path, changed, says):
    a_journal(tmp_path).close()
    with pytest.raises(InputError, match=f"{says}.*--fresh"):
        a_journal(tmp_path, **changed)
    fresh = a_journal(tmp_path, fresh=True, **changed)
    assert not fresh.resumed
    fresh.close()
    a_journal(tmp_path, **changed).close()


@pytest.mark.parametrize("line", ["{", "[1]", '{"no": "kind"}', "prefill, 1"])
def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path, line):
    journal = a_journal(tmp_path)
    journal.append([{"kind": "sample"}])
    journal.close()
    journal.path.write_text(journal.path.read_text() + line + "\n")
    with pytest.raises(InputError, match=r"journal:3: expected a line of a profiling journal; give --fresh"):
        a_journal(tmp_path)


def test_a_profile_is_no_journal(tmp_path):
    journal_path(tmp_path / "profile.yaml").write_text('{"kind": "sample"}\n')
    with pytest.raises(InputError, match="expected a profiling journal of format 1"):
        a_journal(tmp_path)


def test_two_runs_cannot_write_into_one_journal(tmp_path):
    a_journal(tmp_path)
    with pytest.raises(InputError, match="another run is measuring into it"):
        a_journal(tmp_path)


# ---- measuring


def test_warm_ups_do_not_count_and_interrupted_repeats_are_made_again():
    machine = Lawful()
    found = measure(machine, Setting.decode(4, 100), machine.timer, warm_ups=2, repeats=3, spare=2)
    assert len(found) == 3 and machine.steps == 5  # nobody interrupts: none of the spare ones is needed


def test_a_lawful_machine_gives_its_law_back_on_settings_that_were_never_fitted(tmp_path):
    journal, machine = a_journal(tmp_path), Lawful(budget_s=60.0)
    assert "on target" in a_session(journal, machine).run()
    assert machine.spent_s < 60.0
    journal.append([{"kind": "transfer", "transfer": LINK.model_dump(mode="json")}])
    profile = profile_of(journal, facts())
    assert profile.samples and profile.held_out
    fitted = {sample[:7] for sample in profile.samples.each}
    apart = {sample[:7] for sample in profile.held_out.each}
    assert not fitted & apart and len(apart) >= 2 * (HELD_OUT - 2)
    for found in profile.accuracy:
        assert found.median <= 0.04 and found.p95 <= 0.15 and found.settings >= HELD_OUT - 2
    (cost,) = [degree.cost for degree in report_of_profile(profile).degrees]
    for setting in (Setting.prefill(3, 700), Setting.prefill(1, 900, 3000), Setting.decode(24, 900)):
        assert cost.iteration_s(setting.shape) == pytest.approx(law_s(setting), rel=0.1), setting

    # and the profile says all of itself: it comes back from its file, with the model and the device
    assert profile.mixed and profile.overheads
    path = tmp_path / "profile.yaml"
    path.write_text(to_yaml(profile))
    again = read_profile(load(path))
    assert again == profile and again.digest == profile.digest and to_yaml(again) == path.read_text()
    report = report_of_profile(again)
    assert report.model == MODEL and report.gpu.name == GPU.name
    assert again.transfers == (LINK,)


def test_where_the_first_fit_misses_more_settings_are_measured_until_it_does_not(tmp_path):
    """A stair in the batch (a tile of the kernel) that the grid of powers of two cannot see."""

    def stairs_s(setting: Setting) -> float:
        return law_s(setting) * (1.0 + 0.6 * (setting.decodes > 23))

    journal, machine = a_journal(tmp_path), Lawful(budget_s=60.0, law=stairs_s, noise=0.001)
    session = a_session(journal, machine)
    session.run()
    planned = {setting_of(each) for each in journal.of("plan")[0]["fit"]}
    added = set(session.times("fit")) - planned
    assert added and {setting.phase for setting in added} <= set(PHASES)
    assert not added & set(session.times("held out"))


def test_when_the_time_is_up_what_was_measured_is_a_profile(tmp_path):
    journal, machine = a_journal(tmp_path), Lawful(budget_s=2.0, noise=0.2)
    assert a_session(journal, machine).run() == TIME_UP
    assert machine.spent_s < 3.0  # no step starts that would go far beyond
    profile = profile_of(journal, facts())
    assert {sample.phase for sample in profile.samples.each} == set(PHASES)
    assert profile.kv_tokens[0].tokens == machine.kv_tokens
    assert any("left out for time" in note for note in profile.environment.notes)


def test_with_more_time_a_finished_run_goes_on_and_what_was_kept_apart_stays_apart(tmp_path):
    journal = a_journal(tmp_path)
    short = Lawful(budget_s=2.0, noise=0.2)
    a_session(journal, short).run()
    first = profile_of(journal, facts())
    longer = Lawful(budget_s=40.0, spent_s=short.spent_s)
    assert a_session(journal, longer).run() != TIME_UP
    plans = journal.of("plan")
    assert len(plans) == 2 and len(plans[1]["fit"]) > len(plans[0]["fit"])
    assert plans[1]["held_out"][: len(plans[0]["held_out"])] == plans[0]["held_out"]
    profile = profile_of(journal, facts())
    fitted, apart = ({s[:7] for s in part.each} for part in (profile.samples, profile.held_out))
    assert not fitted & apart and {s[:7] for s in first.held_out.each} <= apart


@pytest.mark.parametrize("after", [7, pytest.param(150, marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_with_exactly_what_is_missing(tmp_path, after):
    journal, machine = a_journal(tmp_path), Lawful(interrupt_after=after)
    with pytest.raises(KeyboardInterrupt):
        a_session(journal, machine).run()
    before = list(journal.records)
    journal.close()

    again, rest = a_journal(tmp_path), Lawful(spent_s=machine.spent_s)
    assert again.records == before
    session = a_session(again, rest)
    session.run()
    assert again.records[: len(before)] == before and len(again.of("plan")) == 1
    plan = again.of("plan")[0]
    visits = {}
    for record in again.of("sample"):
        visits.setdefault(tuple(record["setting"]), set()).add(record["visit"])
    for setting in plan["fit"] + plan["held_out"]:
        assert visits[tuple(setting)] >= set(range(1, PASSES + 1))

    whole = Journal(tmp_path / "whole.journal", IDENTITY)
    a_session(whole, Lawful()).run()
    assert {tuple(s) for s in whole.of("plan")[0]["held_out"]} == {tuple(s) for s in plan["held_out"]}
    whole.close()


@pytest.mark.slow
def test_several_layouts_share_the_time_and_pipelines_are_fitted_too(tmp_path):
    journal, machine = a_journal(tmp_path), Lawful(budget_s=30.0)
    for index, layout in enumerate((Layout(1), Layout(1, 2))):
        a_session(journal, machine, layout, 2 - index).run()
    profile = profile_of(journal, facts())
    assert {(found.tp, found.pp) for found in profile.accuracy} == {(1, 1), (1, 2)}
    assert max(found.median for found in profile.accuracy) <= 0.04
    assert machine.spent_s < 30.0


def test_outliers_are_reported_and_do_not_move_a_median():
    times = {Setting.decode(1, 64): [1.0, 1.01, 0.99, 1.0, 3.0], Setting.decode(2, 64): [1.0, 1.3, 0.7, 1.2]}
    assert outliers(times) == {Setting.decode(1, 64): 1}
    assert spread([1.0, 1.01, 0.99, 1.0, 3.0]) == pytest.approx(0.01)


# ---- the profile as a file


def test_a_profile_without_the_newer_fields_keeps_its_digest():
    # worked out before there were such fields
    profile = read_profile(load_preset("profiles", "distserve-opt-13b-a100"))
    assert profile.digest.startswith("d39ee84a13fba1a2")
    for name in preset_names("profiles"):
        assert read_profile(load_preset("profiles", name)).measured_gpu is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[8192, 1.0, 1.0, 1.0], [512, 1.0, 1.0, 1.0]]", "rising order"),
        ("[[512, -1.0, 1.0, 1.0]]", "expected more than 0"),
        ("[]", "at least 1"),
    ],
)
def test_a_wrong_table_of_transfers_is_a_line(text, says):
    document = parse(
        "name: a\nmodel: b\ngpu: c\nprovenance: {method: measured, source: d}\n"
        "samples: {columns: [phase, tp, batch, context_tokens, time_s], rows: [[decode, 1, 1, 9, 0.1]]}\n"
        f"transfers: [{{what: send, over: gloo, rows: {text}}}]\n",
        "a.yaml",
    )
    with pytest.raises(InputError, match=rf"a.yaml:6:\d+: transfers.*{says}"):
        read_profile(document)
