"""The HTTP API over a real engine: what clients get is what the engine says, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from runtime.api.logprobs import TokenTexts, completion_logprobs
from runtime.api.stations import durations
from runtime.sampling import Sampling
from runtime.service import Times
from runtime.token_bytes import piece_bytes
from tests.engine_service import TALKATIVE, served, tiny_engine

PROMPT = "hello, world"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def engine(folder):
    """Return the oracle: an engine of its own with the same model."""
    found = tiny_engine(folder)
    yield found
    found.close()


@pytest.fixture(scope="module")
def api(folder):
    with served(tiny_engine(folder)) as found:
        yield found
        assert found.at_rest()
        found.service.check()


@pytest.fixture(scope="module")
def http(api):
    with httpx.Client(base_url=api.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(api):
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


def answers(engine, prompt, sampling: Sampling):
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return engine.generate([ids], sampling)[0]


def complete(http, **body):
    response = http.post("/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(http, path, **body):
    """Return the documents of a stream, its bytes being exactly as the format wants them."""
    response = http.post(path, json={"stream": True, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(block.startswith(b"data: {") and b"\n" not in block for block in blocks)
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_a_greedy_completion_is_what_the_engine_says(client, engine):
    expected = answers(engine, PROMPT, Sampling(max_tokens=24))[0]
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"return_token_ids": True}
    )
    assert found.object == "text_completion"
    assert found.choices[0].text == expected.text
    assert tuple(found.choices[0].token_ids) == expected.token_ids
    assert found.choices[0].finish_reason == expected.finish_reason == "length"
    prompt_tokens = len(engine.tokenizer.encode(PROMPT))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (prompt_tokens, 24)
    assert found.usage.total_tokens == prompt_tokens + 24


SETTINGS = {
    "greedy": {"temperature": 0, "max_tokens": 20},
    "two answers": {"n": 2, "seed": 7, "max_tokens": 20},
    "cut short": {"temperature": 0, "max_tokens": 40, "stop": ["("]},
    "logprobs": {"temperature": 0.8, "seed": 3, "max_tokens": 12, "logprobs": 3},
    "chosen alone": {"temperature": 0, "max_tokens": 5, "logprobs": 0},
    "stop token": {"temperature": 0, "max_tokens": 40, "stop_token_ids": [88], "min_tokens": 3, "logprobs": 1},
    "narrow": {"top_k": 3, "top_p": 0.9, "seed": 11, "max_tokens": 12, "n": 3},
    "beams": {"use_beam_search": True, "n": 2, "beam_width": 3, "max_tokens": 8, "length_penalty": 0.5},
    "several prompts": {"prompt": ["hel", "world", [9, 8, 7]], "n": 2, "seed": 5, "max_tokens": 9, "echo": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_chunks_of_a_stream_make_up_the_whole_answer(http, name):
    whole = complete(http, **SETTINGS[name])
    chunks = events(http, "/v1/completions", prompt=PROMPT, **SETTINGS[name]) if "prompt" not in SETTINGS[name] else (
        events(http, "/v1/completions", **SETTINGS[name])
    )  # fmt: skip
    for choice in whole["choices"]:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [token for piece in pieces for token in piece.get("token_ids", ())] == choice["token_ids"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        for key, values in (choice["logprobs"] or {}).items():
            told = [piece["logprobs"][key] for piece in pieces]
            assert values is None or [value for part in told for value in part] == values


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "several prompts"])
def test_what_is_asked_for_reaches_the_engine(http, engine, name):
    asked = dict(SETTINGS[name])
    beams = asked.pop("use_beam_search", False)
    stop = tuple(asked.pop("stop", ()))
    ids = tuple(asked.pop("stop_token_ids", ()))
    temperature = asked.pop("temperature", 1.0)
    expected = answers(engine, PROMPT, Sampling(temperature=temperature, stop=stop, stop_token_ids=ids, **asked))
    found = complete(http, **SETTINGS[name])["choices"]
    assert [tuple(choice["token_ids"]) for choice in found] == [answer.token_ids for answer in expected]
    assert [choice["text"] for choice in found] == [answer.text for answer in expected]
    assert [choice["finish_reason"] for choice in found] == [answer.finish_reason for answer in expected]
    if "logprobs" in asked:
        assert found[0]["logprobs"]["token_logprobs"] == pytest.approx(expected[0].logprobs)
    assert beams == ("beam_width" in asked)


def test_each_of_several_prompts_is_answered_in_its_place(http):
    asked = {"seed": 5, "max_tokens": 9, "n": 2}
    prompts = ["hel", "world", [9, 8, 7]]
    found = complete(http, prompt=prompts, **asked)
    apart = [complete(http, prompt=prompt, **asked) for prompt in prompts]
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    expected = [choice["token_ids"] for one in apart for choice in one["choices"]]
    assert [choice["token_ids"] for choice in found["choices"]] == expected
    assert found["usage"]["completion_tokens"] == sum(one["usage"]["completion_tokens"] for one in apart)
    assert found["choices"][4]["prompt_token_ids"] == [9, 8, 7]


def test_echo_puts_the_prompt_before_the_answer(http, engine):
    plain = complete(http, temperature=0)["choices"][0]["text"]
    assert complete(http, temperature=0, echo=True)["choices"][0]["text"] == PROMPT + plain
    ids = [9, 8, 7]
    shown = engine.tokenizer.decode(ids)
    assert complete(http, temperature=0, echo=True, prompt=ids)["choices"][0]["text"].startswith(shown)


def test_logprobs_of_a_completion_lie_side_by_side(http):
    found = complete(http, temperature=0, max_tokens=10, logprobs=4)["choices"][0]["logprobs"]
    assert {len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {10}
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values()), "greedy takes the likeliest"
        assert len(top) == 4


def test_logprobs_of_a_chat_say_the_bytes_of_each_token(client, engine):
    found = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=10, temperature=0, logprobs=True, top_logprobs=2
    )
    content = found.choices[0].logprobs.content
    assert len(content) == 10
    said = b"".join(bytes(entry.bytes) for entry in content)
    assert said.decode(errors="replace") == found.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 2 for entry in content)


def chat_text(engine, messages):
    return engine.tokenizer.encode(engine.tokenizer.chat(messages), add_special=False)


def test_a_chat_continues_the_text_of_the_models_template(client, engine):
    expected = answers(engine, chat_text(engine, CHAT), Sampling(max_tokens=12))[0]
    found = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12, temperature=0)
    assert found.object == "chat.completion"
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", expected.text)
    assert found.usage.prompt_tokens == len(chat_text(engine, CHAT))


def test_parts_of_text_are_one_content(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    joined = [{"role": "user", "content": "hel\nlo"}]
    said = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0).choices[0].message
        for messages in (parts, joined)
    ]
    assert said[0] == said[1]


def test_the_stream_of_a_chat_begins_with_the_role_and_ends_with_usage(client):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "n": 2, "seed": 4}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert (pieces[0].delta.role, pieces[0].delta.content) == ("assistant", "")
        assert all(piece.delta.role is None for piece in pieces[1:])
        assert "".join(piece.delta.content for piece in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason
    *others, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in others)


def test_a_chat_that_names_no_bound_may_fill_the_models_context(http, engine):
    asked = {"messages": [{"role": "user", "content": "x" * 2000}], "temperature": 0, "ignore_eos": True}
    found = http.post("/v1/chat/completions", json=asked).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] == TALKATIVE.max_positions


def test_usage_comes_with_every_chunk_where_asked_for(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, "/v1/completions", prompt=PROMPT, max_tokens=4, stream_options=options, ignore_eos=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


def test_equal_prefixes_are_found_and_told(http):
    prompt = list(range(10, 74))  # four blocks of 16; one token at least has to run, so the last is not taken
    complete(http, prompt=prompt)
    assert complete(http, prompt=prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_times_say_where_a_request_was(http):
    found = complete(http, max_tokens=5, return_times=True)["times"]
    terms = sum(found[term] for term in ("queue_s", "prefill_s", "handoff_s", "first_decode_wait_s"))
    assert terms == pytest.approx(found["ttft_s"], abs=0.01)
    assert 0 < found["ttft_s"] < found["finish_s"]
    assert (found["prefill_at"], found["retries"]) == ("engine-0", 0)
    *others, last = events(http, "/v1/completions", prompt=PROMPT, return_times=True)
    assert last["times"].keys() == found.keys()
    assert not any("times" in chunk for chunk in others)
    options = {"include_usage": True}
    *others, last = events(http, "/v1/completions", prompt=PROMPT, return_times=True, stream_options=options)
    assert last["choices"] == []
    assert last["times"].keys() == found.keys()
    assert not any("times" in chunk for chunk in others)


def test_the_terms_are_those_of_the_simulator():
    """Pulled at 5 while the prefill ended at 4, its first step at 6 brings the first token at 7."""
    times = Times(0, 1, 4, 3, 5, 6, 7, 9)
    found = durations(times)
    assert (found.queue_s, found.prefill_s, found.handoff_s, found.first_decode_wait_s) == (1, 3, 1, 1)
    assert (found.ttft_s, found.finish_s, found.decode_s, found.inference_s) == (7, 9, 2, 8)
    early = durations(replace(times, first_token_s=4))  # sent by the prefill instance: hand-off is no part of the TTFT
    assert (early.handoff_s, early.first_decode_wait_s, early.ttft_s) == (0, 0, 4)
    overlapped = durations(replace(times, pull_end_s=3.5))  # all layers were pulled before the last one was done
    assert (overlapped.handoff_s, overlapped.first_decode_wait_s) == (0, 2)
    assert durations(Times(arrival_s=1)).queue_s is None


BAD = {
    "no prompt": ({}, 400, "prompt", None),
    "empty prompt": ({"prompt": ""}, 400, "prompt", None),
    "empty list": ({"prompt": []}, 400, "prompt", None),
    "mixed prompts": ({"prompt": [1, "a"]}, 400, "prompt", None),
    "true is no token": ({"prompt": [True]}, 400, "prompt", None),
    "unknown token": ({"prompt": [100_000]}, 400, "prompt", None),
    "negative token": ({"prompt": [-1]}, 400, "prompt", None),
    "another model": ({"prompt": "a", "model": "gpt"}, 404, "model", "model_not_found"),
    "too long": ({"prompt": [7] * 2048}, 400, "prompt", "context_length_exceeded"),
    "too long with its answer": ({"prompt": "a", "max_tokens": 2048}, 400, "prompt", "context_length_exceeded"),
    "hot": ({"prompt": "a", "temperature": 1000}, 400, "temperature", None),
    "top_p": ({"prompt": "a", "top_p": 0}, 400, "top_p", None),
    "nothing asked for": ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
    "no answer": ({"prompt": "a", "n": 0}, 400, "n", None),
    "a word for a number": ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens", None),
    "logprobs": ({"prompt": "a", "logprobs": 99}, 400, "logprobs", None),
    "empty stop": ({"prompt": "a", "stop": ["a", ""]}, 400, "stop", None),
    "many stops": ({"prompt": "a", "stop": ["a"] * 100}, 400, "stop", None),
    "min over max": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens", None),
    "best of": ({"prompt": "a", "best_of": 4}, 400, "best_of", None),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix", None),
    "penalty": ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty", None),
    "bias": ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias", None),
    "echo of logprobs": ({"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo", None),
    "too much KV": ({"prompt": [7] * 600, "max_tokens": 1400, "n": 8}, 400, None, None),
    "not an object": ([1, 2], 400, None, None),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_in_openais_shape(http, name, stream):
    body, status, param, code = BAD[name]
    body = {**body, "stream": stream} if isinstance(body, dict) else body
    response = http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]


BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    "no role": ({"messages": [{"content": "a"}]}, "messages.0.role"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice"),
    "json": ({"response_format": {"type": "json_object"}}, "response_format"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "template": ({"chat_template": "{{ messages }}"}, "chat_template"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_chat_that_cannot_be_served_is_refused(http, name):
    body, param = BAD_CHATS[name]
    response = http.post("/v1/chat/completions", json={"messages": CHAT, **body})
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param


def test_fields_that_ask_for_nothing_are_ignored(http):
    neutral = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1, "user": "me"}
    expected = complete(http, temperature=0)["choices"]
    assert complete(http, temperature=0, suffix=None, unheard_of={"a": 1}, **neutral)["choices"] == expected
    chat = {"messages": CHAT, "max_tokens": 3, "tools": [{"type": "function"}], "tool_choice": "none"}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_malformed_json_is_a_bad_request(http, body):
    response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/v1/completions", 405)])
def test_wrong_paths_and_methods_are_answered_in_the_same_shape(http, method, path, status):
    response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_the_openai_client_names_the_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"


def test_what_is_served_is_listed(client, http):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "goodput-planner", 2048)
    assert client.models.retrieve("tiny") == model
    assert http.get("/v1/models/another/name").status_code == 404
    assert http.get("/health").status_code == 200
    assert http.get("/version").json().keys() == {"version"}
    status = http.get("/status").json()
    assert (status["model"], status["ready"], status["draining"]) == ("tiny", True, False)
    assert status["instances"][0]["name"] == "engine-0"


def test_text_goes_to_tokens_and_back(http, engine):
    found = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == engine.tokenizer.encode(PROMPT)
    assert found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == PROMPT
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == chat_text(engine, CHAT)
    assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400


def samples(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def test_metrics_count_what_was_served(http):
    def change(name, **labels):
        key = (name, *sorted({"model_name": "tiny", **labels}.items()))
        return after[key] - before.get(key, 0)

    before = samples(http)
    found = complete(http, max_tokens=6, n=2, ignore_eos=True)["usage"]
    after = samples(http)
    assert change("vllm:prompt_tokens_total") == found["prompt_tokens"]
    assert change("vllm:generation_tokens_total") == 12
    assert change("vllm:request_success_total", finished_reason="length") == 2
    assert change("vllm:inter_token_latency_seconds_count") == 10
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert change(f"vllm:{histogram}_seconds_count") == 1
    for term in ("queue", "prefill", "handoff", "first_decode_wait"):
        assert change("goodput_planner_ttft_term_seconds_count", term=term) == 1
    assert after["vllm:kv_cache_usage_perc", ("engine", "engine-0"), ("model_name", "tiny")] == 0
    ready = ("instance", "engine-0"), ("model_name", "tiny"), ("phase", "aggregated")
    assert after["goodput_planner_instance_ready", *ready] == 1


def test_two_servers_in_one_process_count_apart(http, folder):
    with served(tiny_engine(folder)) as other:
        complete(http)
        assert 'vllm:prompt_tokens_total{model_name="tiny"} 0.0' in httpx.get(f"{other.url}/metrics").text


def test_the_api_describes_itself(http):
    schema = http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert "$ref" not in json.dumps(body)


def test_a_request_id_of_the_clients_own_comes_back(http):
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    other = http.post("/v1/completions", json={"prompt": "a"})
    assert other.headers["x-request-id"] == other.json()["id"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_needs_no_flags(api, http):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 6, "temperature": 0})
    done = subprocess.run(["curl", "-s", f"{api.url}/v1/completions", "-d", body], capture_output=True, check=True)
    assert (
        json.loads(done.stdout)["choices"][0]["text"]
        == complete(http, max_tokens=6, temperature=0)["choices"][0]["text"]
    )
    streamed = subprocess.run(
        ["curl", "-sN", f"{api.url}/v1/completions", "-d", body.replace("{", '{"stream": true, ', 1)],
        capture_output=True,
        check=True,
    )
    assert streamed.stdout.endswith(b"data: [DONE]\n\n")


def test_many_connections_at_once_are_each_answered_rightly(api, engine):
    prompts = [[20 + index % 200, 30, 40 + index % 7] for index in range(100)]
    expected = [answer[0].token_ids for answer in engine.generate(prompts, Sampling(max_tokens=5))]

    async def ask_all():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=api.url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    async def ask(client, prompt):
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        return tuple((await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"])

    assert asyncio.run(ask_all()) == expected


@given(st.text())
@settings(max_examples=30)
def test_the_bytes_of_tokens_make_up_the_text(engine, text):
    ids = engine.tokenizer.encode(text)
    if engine.tokenizer.decode(ids, skip_special=False) == text:  # the tiny vocabulary has all bytes
        assert b"".join(engine.tokenizer.token_bytes(token) for token in ids) == text.encode()


@given(st.text("aé✓😀", min_size=1, max_size=6))
@settings(max_examples=30)
def test_a_tokens_offset_is_where_its_character_is(engine, text):
    """A token is a byte here, so each byte of a character says the place that the character has in the text."""
    ids = engine.tokenizer.encode(text)
    found = completion_logprobs(TokenTexts(engine.tokenizer), ids, [-1.0] * len(ids), [()] * len(ids), 0)
    places = [place for place, char in enumerate(text) for _ in char.encode()]
    first = [len(char.encode()) for char in text]
    begun = [place + (byte > 0) for place, size in enumerate(first) for byte in range(size)]
    assert len(places) == len(ids)
    assert found["text_offset"] == begun
    assert found["top_logprobs"] is None


def test_tokens_of_sentencepiece_stand_for_bytes_and_blanks():
    assert piece_bytes("<0xE2>", byte_level=False) == b"\xe2"
    assert piece_bytes("\u2581the", byte_level=False) == b" the"
    assert piece_bytes("\u0120the", byte_level=True) == b" the"
    assert TokenTexts(None).text(7) == "token_id:7"
