"""What cannot be loaded is said in one line, with what to change."""

from __future__ import annotations

import pytest

from planner.errors import InputError
from runtime.load import load_engine
from runtime.memory import OutOfMemoryError
from runtime.settings import EngineSettings
from tests.tiny_models import saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("model"))[1]


def test_a_layout_that_cannot_be_is_refused_in_one_line_with_those_that_can(folder):
    with pytest.raises(InputError, match=r"^tp: 3 ranks cannot share 8 heads and 4 KV heads evenly; use 1, 2, 4, 8$"):
        load_engine(folder, EngineSettings(tp=3))
    with pytest.raises(InputError, match=r"^pp: 5 stages are more than the 4 layers of the model$"):
        load_engine(folder, EngineSettings(pp=5))
    with pytest.raises(InputError, match=r"^stage_layers: expected 2 counts that add up to 4 layers, got \(1, 2\)$"):
        load_engine(folder, EngineSettings(pp=2, stage_layers=(1, 2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_blocks": 10**9},
            r"no room for 1000000000 KV blocks: 7629.39 GiB asked, .* GiB free; lower kv_blocks",
        ),
        (
            {"kv_blocks": 4, "host_blocks": 10**9},
            r"no room for 1000000000 host blocks: .* lower kv_blocks",
        ),
    ],
)
def test_memory_that_is_not_there_is_named_with_what_was_asked_and_which_setting_to_lower(folder, settings, message):
    """A block holds 16 tokens of 4 layers, 2 sides, 4 KV heads, 8 numbers of 2 bytes: 8 KiB."""
    with pytest.raises(OutOfMemoryError, match=message) as raised:
        load_engine(folder, EngineSettings(dtype="bfloat16", **settings))
    assert "\n" not in str(raised.value)


def test_weights_beyond_the_memory_are_refused_before_any_is_read():
    with pytest.raises(OutOfMemoryError, match=r"no room for the weights of 96 layers in float32: .* GiB asked"):
        load_engine("opt-175b", EngineSettings(dtype="float32"), "dummy")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "tp: expected a whole number of at least 1, got 0"),
        ({"dtype": "fp8"}, "dtype: expected float32, bfloat16 or float16, got 'fp8'"),
        ({"device": "tpu"}, "device: expected cpu or cuda, got 'tpu'"),
        ({"preemption": "swap"}, "preemption: swap needs host_blocks of at least 1"),
        ({"memory_fraction": 1.5}, "memory_fraction: expected more than 0 and up to 1, got 1.5"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(InputError) as raised:
        EngineSettings(**settings)
    assert str(raised.value) == message
