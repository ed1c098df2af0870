"""Several hosts: who may join, who is lost when, whose time it is; and a deployment over two of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from planner.deploy import read_deployment
from planner.errors import InputError
from planner.specs.base import load
from runtime.api.limits import ApiLimits
from runtime.cli import ServerOptions, launch
from runtime.clocks import Clock
from runtime.host_messages import (
    AGENT,
    HOST_SILENT_S,
    End,
    Forgotten,
    Gone,
    HostBeat,
    JoinHost,
    Leave,
    ToAgent,
    TurnedAway,
    Welcome,
    decode_to_agent,
)
from runtime.hosts import Hosts
from runtime.launch import write_scripts
from runtime.messages import Beat, Started, encode
from runtime.nodes import instances_by_node, transport_of
from runtime.ray_hosts import RayNodes, bundle_of, head_of
from runtime.serving import HeadOptions, ServeOptions, Serving, digest_of
from runtime.wire import Keys, bind_guarded, guard
from tests.hosts import TOKEN, Network, log_of, spread, start_agent, two_hosts, written
from tests.serving import answers_of, deployment
from tests.test_disaggregated import LITTLE, little, mixed, nothing_left, plain, told
from tests.test_faults import REQUESTS, reference, requests_of, some_tokens_more

CROSSED = spread(
    deployment([("prefill", 1, 1), ("decode", 1, 1), ("prefill", 1, 1), ("decode", 1, 1)], kv_blocks=512),
    {"prefill0": "n0", "decode1": "n1", "prefill2": "n1", "decode3": "n0"},
)
"""Each host has both phases, and KV goes both ways."""


# ---- whose time it is


@given(
    offset_s=st.floats(-1e6, 1e6),
    ways_s=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=50),
)
def test_a_time_of_another_host_is_off_by_its_fastest_way_at_most(offset_s, ways_s):
    clock = Clock()
    for at, way_s in enumerate(ways_s):
        sent_s = 100.0 + at
        said = Started("key", sent_s - offset_s) if at % 3 else Beat(sent_s - offset_s)
        here = clock.here(said, sent_s + way_s)
        assert -1e-6 <= here.at_s - sent_s <= min(ways_s[: at + 1]) + 1e-6


def test_a_clock_that_runs_away_is_followed():
    clock = Clock()
    for beat in range(4_000):
        true_s = beat * 0.5
        here = clock.here(Beat(true_s * 0.999), true_s + 1e-3)
    assert (
        abs(here.at_s - true_s) < 0.13
    )  # 240 beats are 120 s, in which it falls behind by 120 ms; by now it is 2 s off


# ---- the head's account


class Account:
    """A head's account of two hosts, what it tells their agents, and what it has lost."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ToAgent]] = []
        self.lost: list[tuple[str, str]] = []
        self.hosts = Hosts(
            {"n1": ["decode1"], "n2": ["decode2"]},
            "digest",
            lambda to, payload: self.said.append((to, decode_to_agent(payload))),
            lambda name, why: self.lost.append((name, why)),
        )

    def hear(self, message: object, node: str = "n1", session: str = "s") -> None:
        self.hosts.hear(f"{AGENT}{node}@{session}", encode(message))

    def join(self, session: str = "s", node: str = "n1", digest: str = "digest") -> ToAgent:
        self.hear(JoinHost(node, session, digest), node, session)
        return self.said[-1][1]


def test_an_instance_counts_once_its_host_has_joined():
    account = Account()
    assert not account.hosts.is_current("decode1@1")
    assert isinstance(account.join(), Welcome)
    assert account.hosts.is_current("decode1@1")
    assert not account.hosts.is_current("decode2@1")
    assert not account.hosts.is_current("nobody@1")
    assert not account.hosts.is_current("decode1@one")
    assert account.hosts.missing == ["n2"]


def test_a_newer_start_of_an_instance_ends_the_older_one():
    account = Account()
    account.join()
    assert account.hosts.is_current("decode1@1")
    assert account.hosts.is_current("decode1@3")
    assert account.lost == [("decode1", "was started again")]
    assert not account.hosts.is_current("decode1@1")
    assert account.hosts.starts("decode1") == 3


def test_an_instance_is_lost_once_whoever_says_so():
    account = Account()
    account.join()
    account.hosts.is_current("decode1@1")
    account.hear(Gone("n1", "s", "decode1@2", "never spoke"))
    assert account.lost == []
    account.hear(Gone("n1", "s", "decode1@1", "was ended by signal 9"))
    account.hear(Gone("n1", "s", "decode1@1", "was ended by signal 9"))
    account.hear(Leave("n1", "s", "its agent ends"))
    assert account.lost == [("decode1", "was ended by signal 9")]
    assert not account.hosts.is_current("decode1@1")


def test_a_new_agent_of_a_node_replaces_the_one_before_and_goes_on_counting():
    account = Account()
    account.join("s")
    account.hosts.is_current("decode1@1")
    account.hear(HostBeat("n1", "s", {"decode1": 2, "decode2": 9}))
    welcome = account.join("t")
    assert (f"{AGENT}n1@s", TurnedAway("another agent has joined for n1")) in account.said
    assert account.lost == [("decode1", "ended with its host's agent, which was started again")]
    assert isinstance(welcome, Welcome) and welcome.starts == {"decode1": 2}
    account.hear(Gone("n1", "s", "decode1@3", "late news"), session="s")
    assert account.hosts.is_current("decode1@3")


def test_an_agent_that_asks_twice_is_let_in_once():
    account = Account()
    first, again = account.join(), account.join()
    assert first == again and account.lost == []


def test_an_agent_that_the_head_does_not_know_is_told():
    account = Account()
    account.hear(HostBeat("n1", "s", {}))
    assert account.said.pop() == (f"{AGENT}n1@s", Forgotten())
    account.join("t")
    account.hear(HostBeat("n1", "s", {}))
    assert account.said.pop() == (f"{AGENT}n1@s", TurnedAway("another agent has joined for n1"))
    account.hear(Leave("n2", "s", "its agent ends"), "n2")
    assert account.lost == [] and isinstance(account.said[-1][1], Welcome)


def test_agents_of_other_deployments_and_nodes_are_turned_away():
    account = Account()
    assert isinstance(account.join(digest="another"), TurnedAway)
    assert account.join(node="n3") == TurnedAway("expected an agent for n1 or n2, got 'n3'")
    with pytest.raises(msgspec.MsgspecError):
        account.hosts.hear(f"{AGENT}n1@s", b"\xc1 no MessagePack")
    assert account.hosts.missing == ["n1", "n2"]


def test_silence_loses_an_instance_and_its_agent_is_told_to_end_it(monkeypatch):
    account = Account()
    account.join()
    account.hosts.is_current("decode1@1")
    begun_s = time.monotonic()

    def look_at(after_s: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: begun_s + after_s)

    async def one_look() -> None:
        task = asyncio.create_task(account.hosts.watch())
        await asyncio.sleep(0)
        task.cancel()

    look_at(HOST_SILENT_S - 1)
    account.hear(HostBeat("n1", "s", {}))
    asyncio.run(one_look())
    assert account.lost == []
    look_at(HOST_SILENT_S + 1)
    asyncio.run(one_look())
    (end,) = [said for _, said in account.said if isinstance(said, End)]
    assert end.identity == "decode1@1"
    assert account.lost == [("decode1", end.why)]
    assert account.hosts.missing == ["n2"]  # the agent itself has spoken
    look_at(2 * HOST_SILENT_S)
    asyncio.run(one_look())
    assert account.hosts.missing == ["n1", "n2"]


# ---- the token, the digest, the nodes


def test_a_wrong_token_gets_no_word_in():
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    address = bind_guarded(server, "tcp://127.0.0.1:0", Keys.of(TOKEN))
    try:
        for token, heard in ((TOKEN + "!", False), (TOKEN, True), ("", False)):
            client = context.socket(zmq.DEALER)
            if token:
                guard(client, Keys.of(token).public)
            client.connect(address)
            client.send(b"hello")
            assert bool(server.poll(2000 if heard else 300)) == heard, token
            while server.poll(0):
                server.recv_multipart()
            client.close(linger=0)
    finally:
        server.close(linger=0)
        context.term()


def test_a_token_that_could_be_guessed_is_refused_and_never_shown():
    with pytest.raises(InputError, match="at least 16 characters"):
        Keys.of("secret")
    keys = Keys.of(TOKEN)
    assert keys.secret not in repr(keys)
    assert TOKEN not in repr(HeadOptions("tcp://127.0.0.1:0", TOKEN))


def test_the_digest_is_of_all_that_has_to_be_the_same_on_all_hosts(tmp_path):
    mine = digest_of(CROSSED, ServeOptions())
    assert digest_of(read_deployment(load(written(CROSSED, tmp_path))), ServeOptions()) == mine
    assert digest_of(CROSSED.model_copy(update={"dtype": "bfloat16"}), ServeOptions()) != mine
    assert digest_of(CROSSED, ServeOptions(transport="nixl")) != mine
    assert digest_of(CROSSED, ServeOptions(model="where it lies on this host")) == mine


def test_kv_leaves_a_node_by_torch_distributed_and_stays_on_it_in_shared_memory():
    prefill, decode = CROSSED.instances[:2]
    alone = CROSSED.model_copy(update={"routes": tuple(it for it in CROSSED.routes if it.target == "decode3")})
    assert transport_of(CROSSED, prefill, "", "cpu") == "distributed"
    assert transport_of(alone, prefill, "", "cpu") == "shm"
    assert transport_of(alone, prefill, "", "cuda") == "distributed"
    assert transport_of(CROSSED, prefill, "nixl", "cpu") == "nixl"
    assert transport_of(CROSSED, decode, "", "cpu") == ""
    with pytest.raises(InputError, match="KV of prefill0 leaves n0"):
        transport_of(CROSSED, prefill, "shm", "cpu")


def test_each_node_has_its_instances():
    found = {node: [it.name for it in specs] for node, specs in instances_by_node(CROSSED).items()}
    assert found == {"n0": ["prefill0", "decode3"], "n1": ["decode1", "prefill2"]}


def test_an_instance_that_spans_nodes_is_refused_with_the_way_out():
    spanning = deployment([("aggregated", 1, 2)])
    (spec,) = spanning.instances
    first, second = spec.stages
    stages = (first, tuple(group.model_copy(update={"node": "n1"}) for group in second))
    wide = spanning.model_copy(update={"instances": (spec.model_copy(update={"stages": stages}),)})
    with pytest.raises(InputError, match=r"aggregated0: its ranks stand on localhost, n1, .*max_pp: 1"):
        instances_by_node(wide)


# ---- the static launch


def test_each_node_has_its_command_and_its_script(tmp_path):
    options = ServeOptions(model="/models/it is", load_format="dummy", reject=True)
    found = launch(
        CROSSED,
        Path("deployment.yaml"),
        ServerOptions(options, port=9000, limits=ApiLimits(concurrent_requests=7), drain_s=5),
    )
    shared = "planner serve deployment.yaml --device cpu --model '/models/it is' --load-format dummy"
    assert found == {
        "n0": f"{shared} --node n0 --listen tcp://0.0.0.0:5600 "
        "--host 127.0.0.1 --port 9000 --max-requests 7 --drain 5 --reject",
        "n1": f"{shared} --node n1 --join tcp://n0:5600",
    }
    paths = write_scripts(found, tmp_path / "launch")
    assert [path.name for path in paths] == ["n0.sh", "n1.sh"]
    bare = {name: value for name, value in os.environ.items() if name != "PLANNER_TOKEN"}
    refused = subprocess.run([paths[1]], env=bare, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "16 characters or more" in refused.stderr
    (tmp_path / "planner").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "planner").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        [paths[1]], env={"PATH": path, "PLANNER_TOKEN": TOKEN}, capture_output=True, text=True, check=True
    )
    assert "|--model|/models/it is|" in ran.stdout and ran.stdout.endswith("|--node|n1|--join|tcp://n0:5600|")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "stands on 2 nodes (n0, n1)"),
        (["--node", "n0"], "expected --listen (the head) or --join"),
        (["--join", "tcp://n0:5600"], "say with --node"),
        (["--join", "tcp://n0:5600", "--listen", "tcp://0.0.0.0:1"], "expected one of them"),
        (["--node", "n2", "--join", "tcp://127.0.0.1:1"], "expected one of n0, n1, got 'n2'"),
        (["--node", "n1", "--join", "n0:5600"], "expected tcp://HOST:PORT"),
        (["--node", "n0", "--listen", "tcp://127.0.0.1:0", "--token", "short"], "at least 16 characters"),
    ],
)
def test_options_for_several_hosts_that_make_no_sense_are_refused_in_one_line(options, message, tmp_path, capsys):
    from typer.testing import CliRunner

    from planner.cli import app

    file = written(CROSSED, tmp_path)
    found = CliRunner().invoke(app, ["serve", str(file), "--device", "cpu", "--load-format", "dummy", *options])
    assert isinstance(found.exception, InputError)
    assert message in str(found.exception) and "\n" not in str(found.exception)


# ---- two hosts


Work = Callable[[Serving, Network, Path, list[subprocess.Popen]], Awaitable[None]]


@contextlib.asynccontextmanager
async def head(network: Network, options: ServeOptions, token: str = TOKEN) -> AsyncIterator[Serving]:
    serving = Serving(CROSSED, options, HeadOptions(f"tcp://{network.head}:0", token, "n0"))
    serving.start()
    try:
        yield serving
    finally:
        await serving.stop()


def over_two_hosts(tmp_path: Path, work: Work) -> None:
    """Serve on this host and another one, do `work`, stop the head, and see the agents go."""
    options, file = little(tmp_path), written(CROSSED, tmp_path)

    async def run(network: Network) -> None:
        agents: list[subprocess.Popen] = []
        try:
            async with asyncio.timeout(300), head(network, options) as serving:
                agents.append(join(network, file, serving, options))
                await serving.until_ready()
                await serving.watched(work(serving, network, file, agents))
            assert await asyncio.to_thread(agents[-1].wait, 60) == 0, log_of(file)
            assert "the head has stopped" in log_of(file)
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()

    with two_hosts() as network:
        asyncio.run(run(network))


def join(
    network: Network, file: Path, serving: Serving, options: ServeOptions, token: str = TOKEN
) -> subprocess.Popen[str]:
    given = ("--model", options.model, "--load-format", "dummy")
    return start_agent(network, file, serving.listening_at, *given, token=token)


async def all_equal(serving: Serving, options_model: str, count: int = 60) -> None:
    """Send requests, and hold the answers to those of one engine on one host."""
    requests = mixed(LITTLE["vocab_size"], count)
    found = await asyncio.gather(*(answers_of(serving, *request) for request in requests))
    for mine, theirs in zip(found, plain(options_model, "dummy", LITTLE["vocab_size"], count), strict=True):
        assert told(mine) == told(theirs)
    await nothing_left(serving)


@pytest.mark.slow
def test_tokens_over_two_hosts_are_those_of_one(tmp_path):
    async def work(serving: Serving, network: Network, file: Path, agents: list) -> None:
        await all_equal(serving, serving.options.model, 120)
        snapshot = serving.conductor.snapshot()
        assert all(each.output_tokens or each.run_tokens for each in snapshot.instances), "an instance stood idle"

    over_two_hosts(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to stop"])
def test_nothing_is_lost_when_an_agent_is(number, tmp_path):
    async def work(serving: Serving, network: Network, file: Path, agents: list) -> None:
        running = asyncio.create_task(long_ones_are_equal(serving))
        await some_tokens_more(serving)
        agents[0].send_signal(number)
        code = await asyncio.to_thread(agents[0].wait, 30)
        assert code == (0 if number == signal.SIGTERM else -number)
        while serving.conductor.ready:
            await asyncio.sleep(0.05)
        agents.append(join(network, file, serving, serving.options))
        await serving.until_ready()
        await running
        snapshot = serving.conductor.snapshot()
        assert [each.starts for each in snapshot.instances] == [1, 2, 2, 1]

    over_two_hosts(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nothing_is_lost_when_an_instance_on_another_host_is(number, tmp_path):
    async def work(serving: Serving, network: Network, file: Path, agents: list) -> None:
        running = asyncio.create_task(long_ones_are_equal(serving))
        await some_tokens_more(serving)
        (state,) = [each for each in serving.conductor.snapshot().instances if each.name == "decode1"]
        psutil.Process(state.process_ids[0]).send_signal(number)
        while serving.conductor.ready:
            await asyncio.sleep(0.02)
        await serving.until_ready()
        await running

    over_two_hosts(tmp_path, work)


@pytest.mark.slow
def test_nothing_is_lost_when_the_network_is_for_a_while(tmp_path):
    async def work(serving: Serving, network: Network, file: Path, agents: list) -> None:
        if not network.separate:
            pytest.skip("network namespaces are not permitted here")
        running = asyncio.create_task(long_ones_are_equal(serving))
        await some_tokens_more(serving)
        cut(network, "down")
        while serving.conductor.ready:
            await asyncio.sleep(0.05)
        cut(network, "up")
        await serving.until_ready()
        await running

    over_two_hosts(tmp_path, work)


def cut(network: Network, state: str) -> None:
    subprocess.run([*network.enter, "ip", "link", "set", f"gp{os.getpid()}b", state], check=True)


async def long_ones_are_equal(serving: Serving) -> None:
    """Send a hundred requests that run for a while; their answers are those of one engine, and none is lost."""
    found = await asyncio.gather(*(answers_of(serving, *request) for request in requests_of(REQUESTS)))
    for mine, theirs in zip(found, reference(serving.options.model), strict=True):
        assert told(mine) == told(theirs)
    snapshot = serving.conductor.snapshot()
    assert (snapshot.lost, snapshot.finished) == (0, REQUESTS)
    assert snapshot.retries > 0, "the fault hit nobody"
    await nothing_left(serving)


@pytest.mark.slow
def test_wrong_tokens_and_wrong_deployments_are_turned_away_in_one_line(tmp_path):
    options = little(tmp_path)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir(), wrong.mkdir()
    other = CROSSED.model_copy(update={"name": "another"})

    async def run(network: Network) -> None:
        async with head(network, options) as serving:
            started = [
                join(network, written(CROSSED, right), serving, options, TOKEN * 2),
                join(network, written(other, wrong), serving, options),
            ]
            try:
                codes = [await asyncio.to_thread(each.wait, 90) for each in started]
            finally:
                for each in started:
                    each.kill()
                    each.wait()
            assert codes == [1, 1]
            assert serving.hosts is not None and serving.hosts.missing == ["n1"]
        assert "is the token the same there" in log_of(right / "deployment.yaml")
        assert "turned away: it serves another deployment" in log_of(wrong / "deployment.yaml")
        assert all(log_of(folder / "deployment.yaml").count("\n") == 1 for folder in (right, wrong))

    with two_hosts() as network:
        asyncio.run(run(network))


@pytest.mark.slow
def test_an_agent_waits_for_a_head_that_was_killed_and_serves_the_next_one(tmp_path):
    """The head here is given another run in place of being killed: what agents see is the same."""
    options, file = little(tmp_path), written(CROSSED, tmp_path)

    async def run(network: Network) -> None:
        async with head(network, options) as serving:
            agent = join(network, file, serving, options)
            try:
                await serving.until_ready()
                address = serving.listening_at
                serving.hosts.say_goodbye = lambda: None  # killed: no goodbye
                await serving.stop()
                again = Serving(CROSSED, options, HeadOptions(address, TOKEN, "n0"))
                again.start()
                try:
                    async with asyncio.timeout(120):
                        await again.until_ready()
                        await all_equal(again, options.model, 20)
                finally:
                    await again.stop()
                assert await asyncio.to_thread(agent.wait, 60) == 0, log_of(file)
            finally:
                agent.kill()
                agent.wait()

    with two_hosts() as network:
        asyncio.run(run(network))


# ---- Ray


def test_a_bundle_asks_for_the_devices_of_a_node_and_for_the_host_of_that_name():
    specs = instances_by_node(CROSSED)["n0"]
    assert bundle_of("n0", specs, "cpu", {"CPU": 4.0}) == {"CPU": 2.0}
    assert bundle_of("n0", specs, "cuda", {"CPU": 4.0}) == {"CPU": 2.0, "GPU": 2.0}
    assert bundle_of("n0", specs, "cpu", {"CPU": 4.0, "n0": 1.0}) == {"CPU": 2.0, "n0": 0.001}


def test_a_ray_that_is_not_there_is_said_at_once():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'goodput-planner[ray]'")
    with pytest.raises(InputError, match="is Ray up there"):
        RayNodes(CROSSED, ServeOptions(), "127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_places_the_agents_on_hosts_that_differ_and_starts_a_lost_one_again(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'goodput-planner[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    options = little(tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"n1": 1}})
    try:
        cluster.add_node(num_cpus=2)
        nodes = RayNodes(CROSSED, options, cluster.address)
        try:
            asyncio.run(through_ray(nodes, options))
        finally:
            nodes.close()
    finally:
        cluster.shutdown()


async def through_ray(nodes: RayNodes, options: ServeOptions) -> None:
    opened = head_of(nodes, "")
    serving = Serving(CROSSED, options, opened)
    serving.start()
    try:
        async with asyncio.timeout(300):
            serving.also(nodes.run(serving.listening_at, opened.token))
            await serving.until_ready()
            hosts = {
                each.name: psutil.Process(each.process_ids[0]).ppid() for each in serving.conductor.snapshot().instances
            }
            assert hosts["prefill0"] == hosts["decode3"] != hosts["decode1"] == hosts["prefill2"]
            running = asyncio.create_task(long_ones_are_equal(serving))
            await some_tokens_more(serving)
            psutil.Process(hosts["decode1"]).kill()
            await serving.watched(running)  # type: ignore[arg-type]
    finally:
        await serving.stop()
