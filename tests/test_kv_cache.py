"""The paged KV cache: whatever verbs follow each other, every sequence reads back its own tokens and no block is lost.

The state machine keeps a plain model beside it: the token ids of each sequence, and the list of prefixes that nobody
uses. Copies and writes are carried out on a simulated memory, a whole scheduling pass at a time, as a worker does.
"""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from planner.errors import InputError, InvariantError
from runtime.block_hash import hash_chain, root_hash
from runtime.block_pool import BlockPool
from runtime.copies import Copy, Direction, batches
from runtime.kv_cache import Counts, KVCache
from runtime.out_of_blocks import OutOfBlocksError

ROOT = Path(__file__).parent.parent
Ids = st.builds(
    lambda zeros, rest: [0] * zeros + rest, st.integers(0, 6), st.lists(st.integers(0, 1), min_size=1, max_size=3)
)
"""Few kinds of texts, so that prefixes often agree."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Machine(RuleBasedStateMachine):
    """Verbs in any order, several of them between two steps."""

    @initialize(device=st.integers(3, 20), host=st.integers(0, 16), block_tokens=st.integers(1, 4))
    def begin(self, device: int, host: int, block_tokens: int) -> None:
        self.sizes = (device, host, block_tokens)
        self.size = block_tokens
        self.kv = KVCache(*self.sizes)
        self.log: list[tuple[str, tuple, object]] = []
        self.ids: dict[int, list[int]] = {}  # what is committed
        self.flight: dict[int, list[int]] = {}  # what has a slot and is not
        self.swapped: set[int] = set()
        self.idle: list[tuple[int, ...]] = []  # prefixes that nobody uses, oldest first
        self.memory = {"device": {}, "host": {}}  # block -> token id by slot
        self.copies: list[Copy] = []  # due before the next step
        self.next = 0

    # ---- the plain model

    def do(self, verb: str, *args: object) -> object:
        """Call a verb and note it; where it refuses, nothing may have changed."""
        before = copy.deepcopy(self.kv)
        try:
            result = getattr(self.kv, verb)(*args)
        except OutOfBlocksError as error:
            assert vars(self.kv.device) == vars(before.device) and vars(self.kv.host) == vars(before.host)
            assert self.kv._tables == before._tables
            assert error.asked > error.available
            result = None
        self.log.append((verb, args, result))
        return result

    def running(self) -> list[int]:
        return [s for s in self.ids if s not in self.swapped]

    def settle(self, sequences: list[int]) -> None:
        """Let a step pass where one of these has tokens in flight: until then it may not be shared or moved."""
        for sequence in sequences:
            if self.flight[sequence]:
                with pytest.raises(InvariantError, match="in flight"):
                    self.kv.fork(sequence, self.next)
                with pytest.raises(InvariantError, match="in flight"):
                    self.kv.swap_out([sequence])
                self.step()

    def prefixes(self, sequence: int) -> list[tuple[int, ...]]:
        ids = self.ids[sequence]
        return [tuple(ids[:end]) for end in range(self.size, len(ids) + 1, self.size)]

    def in_use(self) -> set[tuple[int, ...]]:
        return {prefix for s in self.running() for prefix in self.prefixes(s)}

    def revive(self) -> None:
        """Prefixes that somebody uses are not idle."""
        in_use = self.in_use()
        self.idle = [prefix for prefix in self.idle if prefix not in in_use]

    def leave(self, sequence: int, prefixes: list[tuple[int, ...]]) -> None:
        """Sequence `sequence` has left the device: what nobody else uses becomes idle, the longest first."""
        in_use = self.in_use()
        self.idle += [prefix for prefix in reversed(prefixes) if prefix not in in_use]

    def held(self) -> set[int]:
        return {block for s in self.running() for block in self.kv.blocks(s)}

    def taken(self, count: int, held: set[int]) -> None:
        """`count` blocks were taken when `held` were in use: the oldest idle ones went where no free one was left."""
        free = self.sizes[0] - len(held) - len(self.idle)
        del self.idle[: max(0, count - free)]

    def known(self, ids: list[int]) -> int:
        """Return the tokens of the longest prefix of `ids` in full blocks that somebody uses or that is idle."""
        known = self.in_use() | set(self.idle)
        end = 0
        while end + self.size <= len(ids) and tuple(ids[: end + self.size]) in known:
            end += self.size
        return end

    def blocks_to_grow(self, sequence: int, tokens: int) -> int:
        now = len(self.ids[sequence]) + len(self.flight[sequence])
        blocks = self.kv.blocks(sequence)
        others = [self.kv.blocks(s) for s in self.running() if s != sequence]
        shared = now % self.size > 0 and any(blocks[-1] in other for other in others)
        return ceil_div(now + tokens, self.size) - ceil_div(now, self.size) + shared

    # ---- verbs

    @rule(prompt=Ids, at_once=st.booleans())
    def start(self, prompt: list[int], at_once: bool) -> None:
        chain = self.kv.prompt_chain(prompt)
        in_use = sum(
            tuple(prompt[: k * self.size]) in self.in_use() for k in range(1, self.known(prompt[:-1]) // self.size + 1)
        )
        assert self.kv.needed_to_start(chain, len(prompt)) == ceil_div(len(prompt), self.size) - in_use
        sequence, self.next = self.next, self.next + 1
        cached = self.do("start", sequence, chain)
        assert cached == self.known(prompt[:-1])
        self.ids[sequence], self.flight[sequence] = prompt[:cached], []
        self.revive()
        if not self.grow_by(sequence, prompt[cached:]):
            self.end(sequence)  # it waits for blocks without holding any
        elif at_once:
            self.step()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), ids=Ids, at_once=st.booleans())
    def grow(self, data: st.DataObject, ids: list[int], at_once: bool) -> None:
        self.grow_by(data.draw(st.sampled_from(self.running())), ids)
        if at_once:
            self.step()

    def grow_by(self, sequence: int, ids: list[int]) -> bool:
        needed, held = self.blocks_to_grow(sequence, len(ids)), self.held()
        assert self.kv.needed_to_grow(sequence, len(ids)) == needed
        copies = self.do("grow", sequence, len(ids))
        assert (copies is None) == (needed > self.sizes[0] - len(held))
        if copies is not None:
            self.taken(needed, held)
            self.copies += copies
            self.flight[sequence] += ids
        return copies is not None

    @precondition(lambda self: any(self.flight.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s, ids in self.flight.items() if ids]))
        self.do("cancel", sequence)
        self.flight[sequence] = []

    @precondition(lambda self: self.running())
    @rule(data=st.data(), writes=st.lists(Ids, min_size=1, max_size=3))
    def fork(self, data: st.DataObject, writes: list[list[int]]) -> None:
        """Fork children which diverge at once; the parent keeps what the last of them leaves to it."""
        parent = data.draw(st.sampled_from(self.running()))
        self.settle([parent])
        children = range(self.next, self.next + len(writes))
        self.next = children.stop
        for child in children:
            self.do("fork", parent, child)
            self.ids[child], self.flight[child] = list(self.ids[parent]), []
        for child, ids in zip(children, writes, strict=True):
            self.grow_by(child, ids)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fork_alone(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.running()))
        self.settle([parent])
        self.do("fork", parent, self.next)
        self.ids[self.next], self.flight[self.next] = list(self.ids[parent]), []
        self.next += 1

    @precondition(lambda self: len(self.ids) > 2)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.ids))))

    def end(self, sequence: int) -> None:
        swapped, prefixes = sequence in self.swapped, self.prefixes(sequence)
        expected = None if swapped else self.kv.given_back([sequence])
        given_back = self.do("free", sequence)
        assert swapped or given_back == expected
        del self.ids[sequence], self.flight[sequence]
        self.swapped.discard(sequence)
        if not swapped:
            self.leave(sequence, prefixes)
        with pytest.raises(InvariantError, match="freed already"):
            self.kv.free(sequence)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.lists(st.sampled_from(self.running()), min_size=1, max_size=3, unique=True))
        self.settle(group)
        before, expected = self.kv.device.available, self.kv.given_back(group)
        copies = self.do("swap_out", group)
        if copies is None:
            return
        self.copies += copies
        assert self.kv.device.available - before == expected
        for sequence in group:
            self.swapped.add(sequence)
            self.leave(sequence, self.prefixes(sequence))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.lists(st.sampled_from(sorted(self.swapped)), min_size=1, max_size=3, unique=True))
        known = self.in_use() | set(self.idle)
        prefix_of = {}
        for s in group:
            ends = range(self.size, len(self.ids[s]) + self.size, self.size)
            prefix_of |= {block: tuple(self.ids[s][:end]) for block, end in zip(self.kv.blocks(s), ends, strict=True)}
        full = {block: prefix for block, prefix in prefix_of.items() if len(prefix) % self.size == 0}
        missing = [block for block in prefix_of if full.get(block) not in known]
        revived = set(full.values()) & set(self.idle)
        held = self.held()
        assert self.kv.needed_to_swap_in(group) == len(missing) + len(revived)
        copies = self.do("swap_in", group)
        assert (copies is None) == (len(missing) + len(revived) > self.sizes[0] - len(held))
        if copies is None:
            return
        assert [copy.source for copy in copies] == missing
        self.copies += copies
        self.idle = [prefix for prefix in self.idle if prefix not in revived]
        free = self.sizes[0] - len(held) - len(self.idle) - len(revived)
        del self.idle[: max(0, len(missing) - free)]
        self.swapped -= set(group)
        self.revive()

    @precondition(lambda self: self.idle)
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        assert self.do("evict", count) == min(count, len(self.idle))
        del self.idle[:count]

    @precondition(lambda self: self.idle or self.in_use())
    @rule(ids=Ids)
    def look_up(self, ids: list[int]) -> None:
        prefix = self.kv.prefix(self.kv.prompt_chain([*ids, 0]))
        assert prefix.tokens == self.known(ids)
        assert prefix.idle == sum(
            tuple(ids[:end]) in self.idle for end in range(self.size, prefix.tokens + 1, self.size)
        )

    @precondition(lambda self: self.copies or any(self.flight.values()))
    @rule()
    def step(self) -> None:
        """What a worker does with one pass: copies in order, then writes; then what was computed is committed."""
        for run in batches(self.copies):
            self.carry_out(run)
        self.copies = []
        for sequence, ids in self.flight.items():
            self.write(sequence, ids)
        for sequence, ids in self.flight.items():
            if ids:
                self.do("commit", sequence, list(ids))
                self.ids[sequence] += ids
                self.flight[sequence] = []
                self.revive()
        self.read_back()

    def carry_out(self, run: tuple[Copy, ...]) -> None:
        """Read all sources of a run first, then write all targets, as one gather and one scatter do."""
        source, target = {
            Direction.WITHIN: ("device", "device"),
            Direction.OUT: ("device", "host"),
            Direction.IN: ("host", "device"),
        }[run[0].direction]
        blocks = [dict(self.memory[source].get(copy.source, {})) for copy in run]
        for copy_, block in zip(run, blocks, strict=True):
            self.memory[target][copy_.target] = block

    def write(self, sequence: int, ids: list[int]) -> None:
        begin = len(self.ids[sequence])
        shared = Counter(block for s in self.running() for block in self.kv.blocks(s))
        for slot, token in (
            zip(self.kv.slots(sequence, begin, begin + len(ids)).tolist(), ids, strict=True) if ids else ()
        ):
            block, place = divmod(slot, self.size)
            assert shared[block] == 1, "a write to a shared block"
            assert not self.kv.device.is_published(block), "a write to a block that others may find"
            self.memory["device"].setdefault(block, {})[place] = token

    def read_back(self) -> None:
        """Every sequence, and every prefix that can be found, holds its tokens."""
        for sequence, ids in self.ids.items():
            place = "host" if sequence in self.swapped else "device"
            assert self.read(place, self.kv.blocks(sequence), len(ids)) == ids
        for prefix in self.in_use() | set(self.idle):
            found = self.kv.prefix(self.kv.prompt_chain([*prefix, 0]))
            assert self.read("device", found.blocks, found.tokens) == list(prefix[: found.tokens])

    def read(self, place: str, blocks: tuple[int, ...], tokens: int) -> list[int]:
        return [self.memory[place][blocks[t // self.size]][t % self.size] for t in range(tokens)]

    # ---- what always holds

    @invariant()
    def counts_agree(self) -> None:
        self.kv.check()
        counts, held = self.kv.counts(), self.held()
        on_host = {block for s in self.swapped for block in self.kv.blocks(s)}
        device, host, _ = self.sizes
        assert counts == Counts(
            device - len(held) - len(self.idle), len(held), len(self.idle), len(on_host), host - len(on_host)
        )

    @invariant()
    def waste_is_under_one_block_per_sequence(self) -> None:
        last = {}
        for s in self.running():
            tokens = len(self.ids[s]) + len(self.flight[s])
            assert self.kv.tokens(s) == tokens
            unused = len(self.kv.blocks(s)) * self.size - tokens
            assert 0 <= unused < self.size
            last |= {self.kv.blocks(s)[-1]: unused} if tokens else {}
        assert self.kv.waste_tokens() == sum(last.values())

    @invariant()
    def nothing_in_flight_is_shared(self) -> None:
        for s in self.running():
            begin, end = len(self.ids[s]), self.kv.tokens(s)
            for block in self.kv.blocks(s)[begin // self.size :] if end > begin else ():
                assert self.kv.device.references(block) == 1

    def teardown(self) -> None:
        """Finish the pass, end everybody: nothing is left. The same verbs on a new cache give the same answers."""
        if not hasattr(self, "kv"):
            return
        self.step()
        for sequence in sorted(self.ids):
            self.do("free", sequence)
        self.do("evict", self.sizes[0])
        assert self.kv.counts() == Counts(self.sizes[0], 0, 0, 0, self.sizes[1])
        self.kv.check()
        again = KVCache(*self.sizes)
        for verb, args, result in self.log:
            try:
                assert getattr(again, verb)(*args) == result
            except OutOfBlocksError:
                assert result is None


def test_sequences_read_back_their_tokens_after_any_interleaving():
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None),
    )


@pytest.mark.slow
def test_sequences_read_back_their_tokens_after_many_long_interleavings():
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=1500, stateful_step_count=80, deadline=None, derandomize=True, database=None),
    )


# ---- copies


def one_by_one(copies: list[Copy]) -> tuple[dict, dict]:
    """Return device and host after the copies, where block b of the device held ("device", b) before."""
    device, host = {b: ("device", b) for b in range(4)}, {b: ("host", b) for b in range(4)}
    for one in copies:
        source = host if one.direction is Direction.IN else device
        target = host if one.direction is Direction.OUT else device
        target[one.target] = source[one.source]
    return device, host


def run_by_run(copies: list[Copy]) -> tuple[dict, dict]:
    """The same, where each run reads all its sources before it writes, in an order that must not matter."""
    device, host = {b: ("device", b) for b in range(4)}, {b: ("host", b) for b in range(4)}
    for run in batches(copies):
        source = host if run[0].direction is Direction.IN else device
        target = host if run[0].direction is Direction.OUT else device
        read = [(one.target, source[one.source]) for one in run]
        for block, content in reversed(read):
            target[block] = content
    return device, host


@given(st.lists(st.builds(Copy, st.integers(0, 3), st.integers(0, 3), st.sampled_from(Direction)), max_size=8))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_copies_made_run_by_run_leave_what_copies_made_one_by_one_leave(copies):
    assert [one for run in batches(copies) for one in run] == copies
    assert run_by_run(copies) == one_by_one(copies)


def test_independent_copies_make_one_run():
    copies = [Copy(0, 4), Copy(1, 5), Copy(0, 6)]
    assert list(batches(copies)) == [tuple(copies)]


# ---- worked examples


def cache_with(prompt: list[int], **sizes: int) -> KVCache:
    """Return a cache of 8 blocks of 4 tokens, 4 on the host, in which sequence 0 has computed `prompt`."""
    cache = KVCache(**{"device_blocks": 8, "host_blocks": 4, "block_tokens": 4} | sizes)
    write(cache, 0, prompt)
    return cache


def write(cache: KVCache, sequence: int, ids: list[int]) -> int:
    """Start a sequence, compute what is not cached, commit it; return the cached tokens."""
    cached = cache.start(sequence, cache.prompt_chain(ids))
    cache.grow(sequence, len(ids) - cached)
    cache.commit(sequence, ids[cached:])
    return cached


def test_the_papers_example_two_samples_of_one_prompt_copy_the_shared_block_once():
    """SOSP '23, figure 8: seven prompt tokens in two blocks of four; both samples write their next token."""
    cache = cache_with([1, 2, 3, 4, 5, 6, 7])
    cache.fork(0, 1)
    assert cache.blocks(0) == cache.blocks(1) == (0, 1)
    assert cache.grow(0, 1) == (Copy(1, 2),)  # the first to write copies the half-filled block...
    assert cache.grow(1, 1) == ()  # ...and leaves the original to the other
    assert (cache.blocks(0), cache.blocks(1)) == ((0, 2), (0, 1))


def test_a_full_last_block_is_shared_without_a_copy():
    cache = cache_with([1, 2, 3, 4])
    cache.fork(0, 1)
    assert cache.grow(0, 1) == cache.grow(1, 1) == ()
    assert (cache.blocks(0), cache.blocks(1)) == ((0, 1), (0, 2))


def test_blocks_come_on_demand_and_slots_follow_the_table():
    cache = cache_with([9] * 5)
    assert cache.counts() == Counts(free=6, used=2, cached=0, swapped=0, host_free=4)
    assert cache.waste_tokens() == 3  # two blocks of four for five tokens
    assert cache.slots(0, 3, 5).tolist() == [3, 4]
    write(cache, 1, [8])  # takes block 2
    cache.grow(0, 4)  # fills block 1 and takes block 3
    assert cache.slots(0, 6, 9).tolist() == [6, 7, 12]


def test_a_prefix_is_found_again_but_never_the_whole_prompt():
    """Eight tokens fill two blocks; the second is not taken from the cache, since one token must be computed."""
    prompt = list(range(8))
    cache = cache_with(prompt)
    assert write(cache, 1, prompt) == 4
    assert write(cache, 2, [*prompt, 8]) == 8
    assert write(cache, 3, [7, *prompt[1:]]) == 0  # the second block agrees, what comes before it does not


def test_a_block_in_flight_is_not_found():
    cache = KVCache(8, 0, 4)
    chain = cache.prompt_chain([1, 2, 3, 4, 5])
    cache.start(0, chain)
    cache.grow(0, 5)
    assert cache.prefix(chain).blocks == ()
    cache.commit(0, [1, 2, 3, 4, 5])
    assert cache.prefix(chain).blocks == (0,)


def test_the_prefix_unused_for_longest_goes_first_and_its_end_before_its_beginning():
    cache = KVCache(4, 0, 1)
    for sequence, ids in enumerate(([1, 2], [3, 4])):
        write(cache, sequence, ids)
    cache.free(1)
    cache.free(0)
    cache.evict(1)
    assert [cache.prefix(cache.prompt_chain([*ids, 0])).tokens for ids in ([1, 2], [3, 4])] == [2, 1]
    assert cache.start(2, cache.prompt_chain([3, 0])) == 1  # in use again: no longer next in line
    cache.evict(2)
    assert cache.counts() == Counts(free=3, used=1, cached=0, swapped=0, host_free=0)


def test_without_prefix_caching_nothing_is_kept():
    cache = KVCache(8, 0, 4, prefix_caching=False)
    write(cache, 0, [1] * 9)
    assert cache.free(0) == 3
    assert cache.counts() == Counts(free=8, used=0, cached=0, swapped=0, host_free=0)


def test_forks_swapped_together_share_their_blocks_on_the_host_too():
    """Two samples of six tokens share both blocks: two copies out, not four. The full block is still on the device
    when they come back, so only the partial one is copied in."""
    cache = cache_with([1, 2, 3, 4, 5, 6])
    cache.fork(0, 1)
    assert cache.given_back([0]) == 0  # alone it would free nothing
    assert cache.given_back([0, 1]) == 2
    assert cache.swap_out([0, 1]) == (Copy(0, 0, Direction.OUT), Copy(1, 1, Direction.OUT))
    assert cache.counts() == Counts(free=7, used=0, cached=1, swapped=2, host_free=2)
    assert cache.needed_to_swap_in([0, 1]) == 2  # one to copy, one idle
    assert [(one.source, one.direction) for one in cache.swap_in([0, 1])] == [(1, Direction.IN)]
    assert cache.blocks(0) == cache.blocks(1)
    assert cache.counts() == Counts(free=6, used=2, cached=0, swapped=0, host_free=4)


def test_recomputing_after_preemption_finds_what_is_still_cached():
    cache = cache_with(list(range(10)))
    cache.free(0)
    assert cache.start(0, cache.prompt_chain([*range(10), 10])) == 8


def test_hashes_are_the_same_on_every_machine_and_differ_by_what_a_block_depends_on():
    """Golden: blake2b, 128 bits, of the parent's hash and the ids as little-endian 64-bit numbers."""
    root = root_hash(2, b"model")
    first, second = hash_chain([1, 2, 3, 4, 5], 2, root)
    expected = hashlib.blake2b(root + b"\1" + bytes(7) + b"\2" + bytes(7), digest_size=16).digest()
    assert (first, len(second)) == (expected, 16)
    assert hash_chain([3, 4], 2, first) == (second,)
    assert len({root, root_hash(4, b"model"), root_hash(2, b"other"), root_hash(2)}) == 4


# ---- what goes wrong


def test_running_short_says_what_was_asked_what_is_free_and_what_to_lower():
    cache = cache_with([1] * 20)
    with pytest.raises(OutOfBlocksError) as short:
        cache.grow(0, 20)
    assert str(short.value) == (
        "KV cache: sequence 0 of 20 tokens grows by 20, which takes 5 blocks of 4 tokens; 3 of 8 are free and 0 more "
        "can be evicted; lower max_batch, n or the beam width, or raise memory_fraction"
    )
    assert (short.value.asked, short.value.available, short.value.exit_code) == (5, 3, 1)


def test_what_can_never_fit_says_so():
    with pytest.raises(OutOfBlocksError, match=r"9 blocks.*never fit: lower the longest prompt and max_tokens"):
        cache_with([1] * 33)


def test_short_swap_space_says_what_to_change():
    cache = cache_with([1] * 20)
    with pytest.raises(OutOfBlocksError) as short:
        cache.swap_out([0])
    assert str(short.value) == (
        "swap space: sequence 0 has to be swapped out, which takes 5 blocks of 4 tokens; 4 of 4 are free; "
        "lower max_batch, raise host_blocks, or recompute instead"
    )


def test_no_room_for_a_single_block_says_which_setting_to_change():
    with pytest.raises(InputError, match="lower block_tokens or reserved_bytes, or raise memory_fraction"):
        KVCache(0, 0, 16)
    with pytest.raises(InputError, match="block_tokens >= 1"):
        KVCache(1, 0, 0)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda cache: cache.start(0), "started twice"),
        (lambda cache: cache.fork(0, 0), "started twice"),
        (lambda cache: cache.free(1), "never started, or is freed already"),
        (lambda cache: cache.grow(0, 0), "grows by 0"),
        (lambda cache: cache.commit(0, [1]), "commits 1 tokens, 0 are in flight"),
        (lambda cache: cache.swap_in([0]), "is not swapped out"),
        (lambda cache: cache.slots(0, 0, 7), "has slots 0..6, asked for 0..7"),
        (lambda cache: (cache.swap_out([0]), cache.grow(0, 1)), "is swapped out"),
        (lambda cache: (cache.grow(0, 1), cache.fork(0, 1)), "1 tokens in flight: commit or cancel first"),
    ],
)
def test_the_callers_mistakes_are_named_and_change_nothing(mistake, message):
    cache = cache_with([1, 2, 3, 4, 5, 6])
    with pytest.raises(InvariantError, match=message):
        mistake(cache)
    cache.check()


def test_a_pool_frees_nothing_twice_and_shares_nothing_free():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    assert pool.release(block)
    for wrong in (pool.release, pool.share):
        with pytest.raises(InvariantError, match=f"block {block} is"):
            wrong(block)
    with pytest.raises(InvariantError, match="asked for 3 blocks where 2 can be had"):
        pool.take(3)


def test_the_check_finds_a_leak_and_a_block_in_two_states():
    cache = cache_with([1, 2, 3, 4, 5])
    cache.device.take(1)
    with pytest.raises(InvariantError, match=r"leaked or freed too soon: \[2\]"):
        cache.check()
    cache = cache_with([1, 2, 3, 4, 5])
    cache.device._free.append(0)
    with pytest.raises(InvariantError, match="do not make up the pool of 8"):
        cache.check()


def test_the_bookkeeping_needs_no_torch():
    code = "import sys, runtime.kv_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
