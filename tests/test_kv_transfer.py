"""KV arrives as it was, over every transport, from another process; and every way of not arriving is told."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from runtime.sampling import Sampling
from runtime.serving import ServeOptions, Serving
from runtime.transfer import distributed, pull
from runtime.transfer.base import (
    TICKETS,
    TRANSPORTS,
    Reader,
    Source,
    TransferError,
    open_outlet,
    open_reader,
    reason_against,
)
from runtime.transfer.pull import Pull, Pulled, Puller
from tests.kv_peer import CPU, Model, Peer, peer, shares
from tests.serving import answers_of, deployment, served

EXAMPLES = {"shm": 12, "distributed": 5, "nixl": 1}
SMALL = Model(layers=3, heads=2, head_dim=4, blocks=9, block_tokens=4, dtype="float32", seed=1)
WHOLE = slice(0, SMALL.heads)


def usable(transport: str) -> str:
    against = reason_against(transport, CPU)
    if against:
        pytest.skip(against)
    return transport


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    return usable(request.param)


@pytest.fixture(scope="module")
def other() -> Iterator[Peer]:
    with peer() as made:
        yield made


@contextmanager
def pulling(
    model: Model, layers: tuple[int, int] | None = None, heads: slice | None = None, most: int = 2, **options
) -> Iterator[tuple[Puller, torch.Tensor, list[Pulled]]]:
    """Give a puller, KV to pull into, and what was told."""
    told: list[Pulled] = []
    layers, heads = layers or (0, model.layers), heads or slice(0, model.heads)
    shape = (layers[1] - layers[0], 2, model.blocks, model.block_tokens, heads.stop - heads.start, model.head_dim)
    puller = Puller(range(*layers), heads, told.append, most, **options)
    try:
        yield puller, torch.zeros(shape, dtype=getattr(torch, model.dtype)), told
    finally:
        puller.close()


def order(sources: list[Source], key: str = "a", ticket: int = 7, blocks: int = SMALL.blocks, **options) -> Pull:
    """Return a pull of all blocks, each into its own place."""
    return Pull(key, ticket, tuple(sources), np.arange(blocks), np.arange(blocks), **options)


def until(true: Callable[[], object], limit_s: float = 20.0) -> None:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < limit_s, "it did not come true"
        time.sleep(0.005)


# ---- what arrives


@st.composite
def cases(draw) -> tuple[Model, tuple[int, int], tuple[int, int], list[int], list[int], bool]:
    """A model, the layouts (tp, pp) of both sides, blocks there and blocks here, and whether to compare checksums."""
    theirs, ours = draw(
        st.sampled_from(
            [
                ((1, 1), (3, 1)),
                ((3, 1), (1, 1)),
                ((2, 1), (4, 1)),
                ((4, 1), (2, 1)),
                ((1, 2), (1, 1)),
                ((1, 1), (1, 2)),
                ((2, 3), (3, 2)),
            ]
        )
    )
    blocks = draw(st.integers(1, 12))
    model = Model(
        layers=draw(st.integers(3, 5)),
        heads=12,
        head_dim=draw(st.sampled_from([1, 8])),
        blocks=blocks,
        block_tokens=draw(st.sampled_from([1, 16])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 99)),
    )
    count = draw(st.integers(1, blocks))
    there, here = draw(st.permutations(range(blocks))), draw(st.permutations(range(blocks)))
    return model, theirs, ours, there[:count], here[:count], draw(st.booleans())


def test_kv_arrives_as_it_was_whatever_the_layouts(transport, other, tmp_path):
    starts = iter(range(1, 1000))

    @settings(max_examples=EXAMPLES[transport], deadline=None, derandomize=True, database=None)
    @given(cases())
    def check(case) -> None:
        model, (tp, pp), (our_tp, our_pp), there, here, checksums = case
        sources = other.open(model, transport, str(tmp_path), tp, pp, start=next(starts))
        other.ran(7, model.layers)
        for layers in shares(model.layers, our_pp):
            for heads in shares(model.heads, our_tp):
                with pulling(model, layers, slice(*heads), checksums=checksums) as (puller, kv, told):
                    puller.start(Pull("a", 7, tuple(sources), np.array(there), np.array(here)), kv)
                    until(lambda told=told: told)
                wanted = model.kv()[slice(*layers), :, :, :, slice(*heads)]
                assert told[0].error == ""
                assert torch.equal(kv[:, :, here], wanted[:, :, there])
                assert told[0].size == wanted[:, :, there].nbytes
                untouched = sorted(set(range(model.blocks)) - set(here))
                assert not kv[:, :, untouched].any()

    check()


def test_more_blocks_than_fit_into_one_message_arrive(other, tmp_path):
    model = replace(SMALL, layers=1, blocks=600, block_tokens=1)
    (source,) = other.open(model, "distributed", str(tmp_path))
    blocks = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    reader = open_reader(source)
    assert torch.equal(reader.read(0, blocks, WHOLE), model.kv()[0][:, blocks])
    reader.close()


def test_a_pull_waits_for_each_layer_to_run(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    with pulling(SMALL) as (puller, kv, told):
        puller.start(order(sources), kv)
        time.sleep(0.05)
        assert not kv.any() and not told
        other.ran(7, 1)
        until(kv[0].any)
        time.sleep(0.02)
        assert not kv[1:].any() and not told
        other.ran(7, 3)
        until(lambda: told)
    assert torch.equal(kv, SMALL.kv())


def test_several_pulls_read_the_same_rank_at_a_time(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    other.ran(7, 3)
    with pulling(SMALL, most=4) as (puller, kv, told):
        for number in range(20):
            puller.start(order(sources, key=str(number)), kv)
        until(lambda: len(told) == 20)
    assert {it.key for it in told} == {str(number) for number in range(20)} and not any(it.error for it in told)


# ---- what does not arrive


def test_a_hand_off_that_is_past_is_not_read(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    other.ran(7 + TICKETS, 1)
    with pulling(SMALL) as (puller, kv, told):
        puller.start(order(sources), kv)
        until(lambda: told)
    assert "hand-off 7 is past" in told[0].error and not kv.any()


def test_a_layer_that_does_not_come_is_not_waited_for_for_ever(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    other.ran(7, 1)
    with pulling(SMALL) as (puller, kv, told):
        puller.start(order(sources, timeout_s=0.1), kv)
        until(lambda: told)
    assert told[0].error == "prefill0, rank 0: layer 1 of hand-off 7 did not come in 0.1 s"
    assert told[0].size == SMALL.kv()[0].nbytes


def test_a_prefill_rank_that_is_killed_in_the_middle_ends_the_pull(transport, tmp_path):
    with peer() as victim, pulling(SMALL) as (puller, kv, told):
        sources = victim.open(SMALL, transport, str(tmp_path))
        victim.ran(7, 1)
        puller.start(order(sources, timeout_s=1.0), kv)
        until(kv[0].any)
        victim.signal(signal.SIGKILL)
        until(lambda: told, limit_s=10)
        time.sleep(0.05)
        assert len(told) == 1 and told[0].error.startswith("prefill0, rank 0")


def test_a_stopped_prefill_rank_is_given_up_in_time_and_read_again_later(tmp_path):
    with peer() as sleeper:
        (source,) = sleeper.open(SMALL, "distributed", str(tmp_path))
        sleeper.ran(7, 3)
        reader = open_reader(source, timeout_s=0.3)
        sleeper.signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(TransferError, match="no answer in"):
            reader.ran(7)
        assert time.monotonic() - begun < 3
        sleeper.signal(signal.SIGCONT)
        until(lambda: ran_or_none(reader) == 3)
        assert torch.equal(reader.read(2, torch.arange(9), WHOLE), SMALL.kv()[2])
        reader.close()


def ran_or_none(reader: Reader) -> int | None:
    try:
        return reader.ran(7)
    except TransferError:
        return None


def test_closed_kv_is_not_read_any_more(transport, other, tmp_path):
    (source,) = other.open(SMALL, transport, str(tmp_path))
    other.ran(7, 3)
    reader = open_reader(source, timeout_s=2)
    assert reader.ran(7) == 3
    other.close_outlets()
    with pytest.raises(TransferError):
        reader.ran(7)
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.ran(7)


def test_a_rank_that_was_started_again_is_read_at_its_new_address(transport, tmp_path):
    with pulling(SMALL) as (puller, kv, told):
        for start, seed in ((1, 5), (2, 6)):
            with peer() as once:
                model = replace(SMALL, seed=seed)
                sources = once.open(model, transport, str(tmp_path), start=start)
                once.ran(7, 3)
                puller.start(order(sources, key=str(start)), kv)
                until(lambda start=start: len(told) == start)
                assert told[-1].error == "" and torch.equal(kv, model.kv())
        assert [source.start for source in puller._readers] == [2]


def test_a_cancelled_pull_ends_and_is_told_once(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    with pulling(SMALL, most=1) as (puller, kv, told):
        puller.start(order(sources), kv)
        puller.start(order(sources, key="queued"), kv)
        time.sleep(0.02)
        puller.cancel("queued")
        puller.cancel("unknown")
        puller.cancel("a")
        until(lambda: len(told) == 2)
        other.ran(7, 3)
        puller.start(order(sources, key="after"), kv)
        until(lambda: len(told) == 3)
    assert [(it.key, it.error) for it in told] == [("a", "cancelled"), ("queued", "cancelled"), ("after", "")]


def test_closing_ends_and_tells_all_pulls(transport, other, tmp_path):
    sources = other.open(SMALL, transport, str(tmp_path))
    with pulling(SMALL, most=2) as (puller, kv, told):
        for number in range(5):
            puller.start(order(sources, key=str(number)), kv)
        time.sleep(0.02)
        puller.close()
        assert sorted((it.key, it.error) for it in told) == [(str(number), "cancelled") for number in range(5)]


class Damaging:
    """A reader that brings one bit wrongly."""

    def __init__(self, reader: Reader):
        self.ran, self.checksum, self.close = reader.ran, reader.checksum, reader.close
        self._reader = reader

    def read(self, layer: int, blocks: torch.Tensor, heads: slice) -> torch.Tensor:
        found = self._reader.read(layer, blocks, heads).contiguous()
        if layer == 1:
            found.view(torch.uint8).view(-1)[3] ^= 1
        return found


def test_checksums_find_a_bit_that_arrived_wrongly(transport, other, tmp_path, monkeypatch):
    sources = other.open(SMALL, transport, str(tmp_path))
    other.ran(7, 3)
    monkeypatch.setattr(pull, "open_reader", lambda source: Damaging(open_reader(source)))
    with pulling(SMALL) as (puller, kv, told), pulling(SMALL, checksums=True) as (checking, _, told_checked):
        puller.start(order(sources), kv)
        checking.start(order(sources), kv)
        until(lambda: told and told_checked)
    assert told[0].error == ""
    assert told_checked[0].error.startswith("prefill0, rank 0: layer 1 arrived damaged")


def test_kv_that_no_rank_holds_is_told(other, tmp_path):
    sources = other.open(SMALL, "shm", str(tmp_path), tp=2)
    with pulling(SMALL) as (puller, kv, told):
        puller.start(order(sources[:1]), kv)
        until(lambda: told)
    assert told[0].error == "no prefill rank holds KV head 1 of layer 0"


# ---- who may read what


@pytest.mark.parametrize("lie", [{"layers": (0, 99)}, {"heads": (0, 999)}, {"blocks": 99}], ids=str)
# lies by far: what lies next to the KV may be open to readers, too
@pytest.mark.parametrize("asked", TRANSPORTS[1:])  # who maps a file of shared memory has all of it, and nothing else
def test_a_reader_cannot_read_outside_of_the_kv(asked, other, tmp_path, lie):
    transport = usable(asked)
    (source,) = other.open(SMALL, transport, str(tmp_path))
    other.ran(7, 3)
    liar, honest = open_reader(replace(source, **lie), timeout_s=2), open_reader(source, timeout_s=2)
    layer, heads = (98, WHOLE) if "layers" in lie else (2, slice(0, lie.get("heads", (0, 2))[1]))
    with pytest.raises(TransferError):
        liar.read(layer, torch.tensor([lie.get("blocks", 9) - 1]), heads)
    assert torch.equal(honest.read(2, torch.arange(9), WHOLE), SMALL.kv()[2])
    liar.close()
    honest.close()


@pytest.mark.parametrize("blocks", [[9], [-1], []], ids=str)
def test_a_block_that_is_not_there_is_refused(transport, other, tmp_path, blocks):
    (source,) = other.open(SMALL, transport, str(tmp_path))
    reader = open_reader(source)
    with pytest.raises(TransferError, match="no such layer, blocks or heads"):
        reader.read(0, torch.tensor(blocks, dtype=torch.int64), WHOLE)
    reader.close()


def test_a_reader_that_does_not_take_its_answer_holds_up_nobody_and_fills_no_memory(tmp_path):
    big = Model(layers=1, heads=8, head_dim=64, blocks=256, block_tokens=16, dtype="float32", seed=0)  # 16 MiB
    layer, all_blocks = big.kv()[0], torch.arange(250)
    with peer() as slow:
        (source,) = slow.open(big, "distributed", str(tmp_path))
        before = slow.memory()
        lazy = [open_reader(source, timeout_s=0.5) for _ in range(2)]
        for reader in lazy:
            group = reader._connect()
            for _ in range(8):
                group.send([distributed._request(distributed._READ, 0, all_blocks, slice(0, 8))], 0, 0)
        brisk = open_reader(source)
        assert torch.equal(brisk.read(0, torch.arange(9), slice(0, 8)), layer[:, :9])
        time.sleep(0.2)
        # a copy of the blocks, and one of the heads, for each of three readers; 16 answers would be 16 of them
        assert slow.memory() - before < 7 * layer.nbytes
        brisk.close()
        slow.signal(signal.SIGKILL)


def test_nixl_takes_no_core_while_nobody_reads(tmp_path):
    usable("nixl")
    with peer() as idle:
        idle.open(SMALL, "nixl", str(tmp_path))
        before_s, begun = idle.cpu_s(), time.monotonic()
        time.sleep(0.5)
        assert idle.cpu_s() - before_s < 0.1 * (time.monotonic() - begun), "its thread spins"


def test_kv_is_offered_on_the_loopback_alone(transport, tmp_path):
    with peer() as offering:
        offering.open(SMALL, transport, str(tmp_path))
        found = psutil.Process(offering.process.pid).net_connections()
        listening = {it.laddr.ip for it in found if it.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"} and bool(listening) == (transport != "shm")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("localhost", "expected tcp://HOST:PORT, got 'localhost'"),
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:x", "expected tcp://HOST:PORT"),
        ("tcp://0.0.0.0:0", "none that others can reach"),
        ("tcp://192.0.2.1:0", "cannot be served there"),
    ],
)
def test_an_address_that_cannot_be_served_at_is_bad_input(address, said):
    wish = Source("distributed", address, (0, 1), (0, 1), 1, 1, 1, "float32")
    with pytest.raises(InputError, match=said):
        open_outlet("distributed", wish, CPU)


def test_nobody_there_is_told_at_once():
    begun = time.monotonic()
    nowhere = Source("distributed", "tcp://127.0.0.1:9", (0, 1), (0, 1), 1, 1, 1, "float32", "prefill0")
    with pytest.raises(TransferError, match=r"prefill0, rank 0 at .*refused; has the prefill instance ended\?"):
        open_reader(nowhere)
    assert time.monotonic() - begun < 2


def test_an_unknown_transport_is_bad_input():
    with pytest.raises(InputError, match="expected one of shm, distributed, nixl, got 'pigeon'"):
        reason_against("pigeon", CPU)


def test_a_transport_that_cannot_serve_is_refused_before_anything_starts():
    layout = deployment([("prefill", 1, 1), ("decode", 1, 1)])
    with pytest.raises(InputError, match="transport shm: the KV of a GPU is not in host memory; use another of"):
        Serving(layout, ServeOptions(device="cuda", transport="shm"))
    with pytest.raises(InputError, match="got 'pigeon'"):
        Serving(layout, ServeOptions(transport="pigeon"))


def test_threads_end_with_their_readers(other, tmp_path):
    (source,) = other.open(SMALL, "distributed", str(tmp_path))
    process = psutil.Process(other.process.pid)
    open_reader(source).close()
    until(lambda: not any(thread.name.startswith("kv-reader") for thread in threading.enumerate()))
    before, files = process.num_threads(), process.num_fds()
    for _ in range(10):
        reader = open_reader(source)
        reader.ran(7)
        reader.close()
    until(lambda: process.num_threads() <= before and process.num_fds() <= files)


# ---- the whole of it


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [[("prefill", 1, 1), ("decode", 1, 1)], [("prefill", 3, 1), ("decode", 1, 2)]])
def test_tokens_are_the_same_over_every_transport(kinds):
    prompts = [[(7 * index + step) % 4000 + 10 for step in range(5 + 40 * index)] for index in range(4)]
    found: dict[str, list[tuple[int, ...]]] = {}

    async def work(serving: Serving) -> None:
        sampling = Sampling(max_tokens=12)
        mine = found[serving.options.transport] = []
        for prompt in prompts:
            mine.append(tuple((await answers_of(serving, prompt, sampling))[0].token_ids))

    for transport in TRANSPORTS:
        if reason_against(transport, CPU) is None:
            served(deployment(kinds), work, ServeOptions(transport=transport, transfer_checksums=True))
    assert set(found) >= {"shm", "distributed"} and len(found["shm"]) == len(prompts)
    assert all(tokens == found["shm"] for tokens in found.values())
