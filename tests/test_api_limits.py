"""The HTTP API when things go wrong: clients that leave, lag or send too much, services that refuse or break down."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
import time
from contextlib import contextmanager, nullcontext

import httpx
import openai
import pytest

from planner.errors import InputError
from runtime.api.limits import ApiLimits
from runtime.api.server import ApiServer, bind
from tests.engine_service import EngineService, served, tiny_engine

LONG = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
PAUSE_S = 0.005
"""Of each step: LONG takes seconds, so that what a test does falls into its middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@contextmanager
def serving(folder, pause_s=PAUSE_S, **limits):
    """Serve; afterwards nothing may be left behind."""
    with served(tiny_engine(folder), ApiLimits(**limits), pause_s=pause_s) as found:
        yield found
        if found.service.ready:
            assert found.at_rest(), "requests or blocks are left"
            found.service.check()


def post(api, body, path="/v1/completions", **headers):
    return httpx.post(f"{api.url}{path}", json=body, headers=headers, timeout=30)


def error_of(response):
    assert set(response.json()) == {"error"}
    return response.json()["error"]


def running(api, count=1):
    """Wait until so many requests run."""
    end_s = time.monotonic() + 10
    while api.service.snapshot().instances[0].running < count:
        assert time.monotonic() < end_s
        time.sleep(0.002)


@pytest.fixture(scope="module")
def api(folder):
    with serving(folder) as found:
        yield found


@pytest.mark.parametrize("asked", [{"n": 1}, {"n": 3}, {"prompt": ["hel", "lo", "world"]}])
def test_a_stream_that_its_client_leaves_is_cancelled_and_freed(api, asked):
    before = api.service.snapshot().cancelled
    with httpx.stream("POST", f"{api.url}/v1/completions", json={**LONG, **asked, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        assert api.service.snapshot().instances[0].used_blocks > 0
    assert api.at_rest(3)
    assert api.service.snapshot().cancelled > before


@pytest.mark.parametrize("asked", [{"n": 2}, {"prompt": ["hel", "lo"]}])
def test_a_client_that_does_not_wait_for_its_whole_answer_cancels_it(api, asked):
    before = api.service.snapshot().cancelled
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{api.url}/v1/completions", json={**LONG, **asked}, timeout=httpx.Timeout(10, read=0.2))
    assert api.at_rest(3)
    assert api.service.snapshot().cancelled > before


def test_closing_a_stream_of_the_openai_client_cancels(api):
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(model="tiny", prompt="hello", max_tokens=1500, stream=True) as stream:
            next(iter(stream))
        assert api.at_rest(3)


def test_metrics_count_what_was_given_up(api):
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 0.0' not in (
        httpx.get(f"{api.url}/metrics").text
    )


def test_a_body_that_says_it_is_too_long_is_not_read(folder):
    with serving(folder, body_bytes=1000) as api:
        with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=10) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
        response = post(api, {"prompt": "x" * 2000})
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        assert post(api, SHORT).status_code == 200


def test_a_body_of_100_mb_that_does_not_say_its_length_is_not_held(api):
    def pieces():
        for _ in range(100):
            yield b"x" * 10**6

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        response = httpx.post(f"{api.url}/v1/completions", content=pieces(), timeout=30)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the server may close the connection while we still send
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 40_000  # of 100,000
    assert post(api, SHORT).status_code == 200


def test_bodies_of_all_requests_together_are_bounded(folder):
    with serving(folder, held_bytes=5000) as api:
        first = threading.Thread(target=post, args=(api, {**LONG, "max_tokens": 60, "user": "x" * 3000}))
        first.start()
        running(api)
        response = post(api, {**SHORT, "user": "x" * 3000})
        assert response.status_code == 429
        assert post(api, SHORT).status_code == 200
        first.join()
        assert post(api, {**SHORT, "user": "x" * 3000}).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(folder):
    with serving(folder, body_timeout_s=0.2) as api:
        with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=10) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"pro')
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert api.at_rest(3)


def test_a_prompt_over_the_servers_own_bound_is_refused(folder):
    with serving(folder, prompt_tokens=10) as api:
        response = post(api, {"prompt": [7] * 11})
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert post(api, {"prompt": [7] * 10}).status_code == 200


def test_a_chat_without_a_bound_takes_what_the_instances_have_room_for(folder):
    with served(tiny_engine(folder, kv_blocks=10), ApiLimits(context_tokens=160)) as api:
        messages = [{"role": "user", "content": "hello"}]
        found = post(api, {"messages": messages, "ignore_eos": True}, "/v1/chat/completions")
        assert found.json()["usage"]["total_tokens"] == 160
        response = post(api, {"prompt": [7] * 100, "max_tokens": 61})
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert httpx.get(f"{api.url}/v1/models").json()["data"][0]["max_model_len"] == 160


def test_without_the_key_nothing_is_told(folder):
    with serving(folder, api_key="secret") as api:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            response = post(api, SHORT, **headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert httpx.get(f"{api.url}/v1/models", headers=headers).status_code == 401
            assert httpx.get(f"{api.url}/status", headers=headers).status_code == 401
        assert post(api, SHORT, authorization="Bearer secret").status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert httpx.get(f"{api.url}{path}").status_code == 200
        client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="other", max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_requests_over_the_bound_are_told_to_come_again(folder):
    with serving(folder, concurrent_requests=2, retry_after_s=1.2) as api:
        asked = ("POST", f"{api.url}/v1/completions")
        body = {**LONG, "stream": True}
        with httpx.stream(*asked, json=body) as one, httpx.stream(*asked, json=body) as two:
            assert (one.status_code, two.status_code) == (200, 200)
            response = post(api, SHORT)
            assert (response.status_code, response.headers["retry-after"]) == (429, "2")
            assert error_of(response)["type"] == "rate_limit_error"
            assert httpx.get(f"{api.url}/health").status_code == 200
        assert api.at_rest(3)
        assert post(api, SHORT).status_code == 200
        seen = httpx.get(f"{api.url}/metrics").text
        assert 'vllm:admission_rejections_total{model_name="tiny",reason="concurrency"} 1.0' in seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_service_that_rejects_says_when_to_come_again(folder, stream):
    with served(tiny_engine(folder), pause_s=PAUSE_S, most_requests=1) as api:
        body = {**LONG, "stream": True}
        with httpx.stream("POST", f"{api.url}/v1/completions", json=body, timeout=30) as one:
            lines = one.iter_lines()
            next(lines)
            response = post(api, {**SHORT, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert api.at_rest(3)
        two = post(
            api, {**SHORT, "prompt": ["hel", "lo"], "stream": stream}
        )  # the first of them is taken in, and freed
        assert two.status_code == 429
        assert api.at_rest(3)
        seen = httpx.get(f"{api.url}/metrics").text
        assert 'vllm:admission_rejections_total{model_name="tiny",reason="service"} 2.0' in seen


def test_a_service_that_breaks_down_ends_streams_with_an_error_event(folder):
    with serving(folder) as api:
        with httpx.stream("POST", f"{api.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            api.service.break_down()
            *_, last = (line for line in lines if line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error == {
            "message": "the engine has stopped",
            "type": "service_unavailable_error",
            "param": None,
            "code": "service_unavailable",
        }
        assert httpx.get(f"{api.url}/health").status_code == 503
        refused = post(api, SHORT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        seen = httpx.get(f"{api.url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0' in seen


def test_the_openai_client_raises_the_error_of_a_stream(folder):
    with serving(folder) as api, openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1500, stream=True
        )
        next(stream)
        api.service.break_down()
        with pytest.raises(openai.APIError, match="has stopped"):
            list(stream)


def test_a_whole_answer_that_is_lost_has_a_status_of_its_own(folder):
    with serving(folder) as api:
        found = []
        asking = threading.Thread(target=lambda: found.append(post(api, LONG)))
        asking.start()
        running(api)
        api.service.break_down()
        asking.join()
        assert found[0].status_code == 503


@contextmanager
def slow_client(api):
    """Yield a connection with a long answer on its way, and next to no room to take it."""
    api.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a test should not have to fill 4 MB
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(api.url.rpartition(":")[2])))
        body = json.dumps({**LONG, "n": 4, "logprobs": 20, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        yield client


def patient_system(api):
    """Have the system itself close no connection."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        api.server._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return nullcontext()


def test_a_client_that_takes_nothing_is_cancelled_and_blocks_nobody(folder):
    with serving(folder, pause_s=0.0, send_timeout_s=0.5) as api, slow_client(api):
        running(api)
        assert post(api, SHORT).status_code == 200
        assert api.at_rest(10)
        assert api.service.snapshot().cancelled == 1
        end_s = time.monotonic() + 10
        while api.server._server.server_state.connections and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not api.server._server.server_state.connections, "the stuck connection is still open"


def test_a_client_that_takes_next_to_nothing_is_cancelled(folder):
    """At 40 kB/s the answer goes on; to write one more event still waits for too long, whatever the system thinks."""
    with serving(folder, pause_s=0.0, send_timeout_s=0.5) as api, patient_system(api), slow_client(api) as client:
        running(api)
        end_s = time.monotonic() + 10
        while api.service.snapshot().requests and time.monotonic() < end_s:
            client.recv(2000)
            time.sleep(0.05)
        assert api.service.snapshot().cancelled == 1


def test_draining_answers_those_inside_and_nobody_else(folder):
    with serving(folder) as api:
        found = []
        asking = threading.Thread(target=lambda: found.append(post(api, {**LONG, "max_tokens": 100})))
        asking.start()
        running(api)
        draining = asyncio.run_coroutine_threadsafe(api.server.drain(20), api.loop)
        assert httpx.get(f"{api.url}/health").status_code == 503
        refused = post(api, SHORT)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "service_unavailable")
        assert httpx.get(f"{api.url}/status").json()["draining"] is True
        assert draining.result() is True
        asking.join()
        assert found[0].json()["usage"]["completion_tokens"] == 100


def test_a_drain_that_takes_too_long_ends(folder):
    stream = {**LONG, "stream": True}
    with serving(folder) as api, httpx.stream("POST", f"{api.url}/v1/completions", json=stream) as response:
        lines = response.iter_lines()
        next(lines)
        assert asyncio.run_coroutine_threadsafe(api.server.drain(0.1), api.loop).result() is False
        api.loop.call_soon_threadsafe(api.server.stop)
        *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server has shut down"


@pytest.mark.parametrize(("signals", "drained"), [(1, True), (2, False)])
def test_sigterm_drains_and_a_second_one_hurries(folder, signals, drained):
    service = EngineService(tiny_engine(folder), pause_s=PAUSE_S)

    async def main():
        server = ApiServer(service)
        serving = asyncio.create_task(server.run_until_signal(20))
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            body = {**LONG, "max_tokens": 100 if drained else 1500}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not service.snapshot().instances[0].running:
                await asyncio.sleep(0.005)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.05)
            found = await asyncio.gather(asking, return_exceptions=True)
            return await serving, found[0]

    try:
        emptied, found = asyncio.run(main())
        assert emptied is drained
        assert not drained or found.json()["usage"]["completion_tokens"] == 100
        assert drained or (found.status_code, error_of(found)["message"]) == (503, "the server has shut down")
    finally:
        service.break_down()


def test_a_port_that_is_taken_is_said_in_one_line(api):
    with pytest.raises(InputError, match="choose another port"):
        bind("127.0.0.1", int(api.url.rpartition(":")[2]), 1.0)
    with pytest.raises(InputError, match="no address"):
        bind("no.such.host.invalid", 0, 1.0)


@pytest.mark.parametrize(
    "bad", [{"body_bytes": 0}, {"context_tokens": -1}, {"send_timeout_s": 0}, {"api_key": "schlüssel"}]
)
def test_limits_that_make_no_sense_are_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        ApiLimits(**bad)


@pytest.mark.slow
def test_a_thousand_connections_at_once_are_all_answered(folder):
    """More than the descriptors that a process may have open by default; those over the bound are told so."""
    asyncio.run(_ask_at_once(folder))


async def _ask_at_once(folder):
    with serving(folder, pause_s=0.0, concurrent_requests=900) as api:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=api.url, limits=limits, timeout=120) as client:
            asked = [client.post("/v1/completions", json={**SHORT, "max_tokens": 30}) for _ in range(1000)]
            found = await asyncio.gather(*asked)
        statuses = {response.status_code for response in found}
        assert statuses <= {200, 429}
        texts = {response.json()["choices"][0]["text"] for response in found if response.status_code == 200}
        assert len(texts) == 1
        assert sum(response.status_code == 200 for response in found) >= 900
