"""The paged KV cache: whatever verbs follow each other, every sequence reads back its own tokens and no block is lost.

The state machine keeps a plain model beside it: the token ids of each sequence, and the list of prefixes that nobody
uses. Copies and writes are carried out on a simulated memory, a whole scheduling pass at a time, as a worker does.
"""

from __future__ import annotations

import copy
from collections import Counter

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
        """What a worker does with one pass: the copies in order, then the writes, then what was computed is committed."""
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
