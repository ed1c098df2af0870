"""The HTTP API with a real model: chats that make sense, cut where the client says."""

from __future__ import annotations

import openai
import pytest

from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.settings import EngineSettings
from tests.engine_service import served

pytestmark = pytest.mark.slow
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
SETTINGS = EngineSettings(kv_blocks=256, threads=1, dtype="float32")


@pytest.fixture(scope="module")
def client():
    with (
        served(load_engine("smollm2", SETTINGS), model="smollm2") as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found
        assert api.at_rest()


@pytest.fixture(scope="module")
def engine():
    found = load_engine("smollm2", SETTINGS)
    yield found
    found.close()


def test_a_chat_is_answered_to_the_end_of_its_turn(client, engine):
    asked = {"model": "smollm2", "messages": CHAT, "temperature": 0, "max_tokens": 40}
    found = client.chat.completions.create(**asked)
    ids = engine.tokenizer.encode(engine.tokenizer.chat(CHAT), add_special=False)
    (expected,) = engine.generate([ids], Sampling(max_tokens=40))[0]
    assert found.choices[0].message.content == expected.text
    assert "Paris" in expected.text
    assert found.choices[0].finish_reason == expected.finish_reason == "stop"
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in streamed) == expected.text


def test_logprobs_of_a_chat_spell_what_was_said(client):
    found = client.chat.completions.create(
        model="smollm2", messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    ).choices[0]
    content = found.logprobs.content
    assert "".join(entry.token for entry in content).removesuffix("<|im_end|>") == found.message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)


def test_a_stop_string_across_tokens_cuts_stream_and_whole_alike(client):
    asked = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 30, "stop": [" 10"]}
    whole = client.completions.create(**asked).choices[0]
    assert (whole.text, whole.finish_reason) == (" 7, 8, 9,", "stop")
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole.text


def test_a_seed_repeats_an_answer_and_another_one_does_not(client):
    def say(seed):
        asked = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 12, "seed": seed, "n": 2}
        return [choice.text for choice in client.completions.create(**asked).choices]

    assert say(1) == say(1) != say(2)
    assert len(set(say(1))) == 2
