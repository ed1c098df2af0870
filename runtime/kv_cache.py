"""Who holds which KV blocks: PagedAttention's bookkeeping (Kwon et al., SOSP '23, section 4), without a tensor.

The scheduler asks and decides; this carries out and names the copies that the worker owes before the next step:

    cached = cache.start(7, cache.prompt_chain(prompt))    blocks of a known prefix, shared
    copies = cache.grow(7, tokens)                         slots for the tokens that this step computes
    ... make the copies in order, run the step, write KV to cache.slots(7, first, last) ...
    cache.commit(7, token_ids)                             the KV is there: full blocks may be shared from now on

Nothing here decides whom to admit, preempt or chunk: `planner.policies` does, for the simulator as for the runtime.
The `needed_*` and `given_back` questions answer in blocks what those functions ask; `available` counts idle blocks too.
Every verb either succeeds or raises with nothing changed: OutOfBlocksError where memory is short, InvariantError where
the caller is wrong.

One deviation from the paper: a block that nobody uses any more keeps its tokens until the room is needed, so that the
next request with that prefix finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, InvariantError
from planner.policies.decode import blocks_for
from runtime.block_hash import hash_chain, root_hash
from runtime.block_pool import BlockPool
from runtime.block_table import BlockTable
from runtime.copies import Copy, Direction
from runtime.out_of_blocks import short_on_device, short_on_host


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest known beginning of a prompt: blocks that hold its first `tokens` tokens, `idle` of them unused."""

    blocks: tuple[int, ...]
    tokens: int
    idle: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by state; the first three make up the device's."""

    free: int
    used: int
    cached: int
    """Used by nobody, kept for their prefix, taken when no free block is left."""
    swapped: int
    """Host blocks in use."""
    host_free: int


class KVCache:
    """Blocks of one instance: `device_blocks` where steps run, `host_blocks` to swap to, `block_tokens` in each."""

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        block_tokens: int,
        *,
        prefix_caching: bool = True,
        salt: bytes = b"",
    ):
        if device_blocks < 1:
            raise InputError(
                f"expected room for at least one KV block of {block_tokens} tokens, got {device_blocks}; "
                "lower block_tokens or reserved_bytes, or raise memory_fraction"
            )
        if host_blocks < 0 or block_tokens < 1:
            raise InputError(f"expected host_blocks >= 0 and block_tokens >= 1, got {host_blocks} and {block_tokens}")
        self.device = BlockPool(device_blocks)
        self.host = BlockPool(host_blocks)
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._root = root_hash(block_tokens, salt)
        self._tables: dict[int, BlockTable] = {}

    # ---- questions, which change nothing

    def counts(self) -> Counts:
        """Return how many blocks are in which state."""
        device, host = self.device, self.host
        return Counts(device.free, device.used, device.idle, host.used, host.free)

    def waste_tokens(self) -> int:
        """Return the token slots of used device blocks that no token has: the ends of last blocks."""
        last = {table.blocks[-1]: table for table in self._tables.values() if table.blocks and not table.on_host}
        return sum(-table.tokens % self.block_tokens for table in last.values())

    def tokens(self, sequence: int) -> int:
        """Return the tokens of `sequence` that have a slot."""
        return self._table(sequence).tokens

    def blocks(self, sequence: int) -> tuple[int, ...]:
        """Return the block table: numbers of device blocks, or of host blocks while swapped out."""
        return tuple(self._table(sequence).blocks)

    def is_swapped(self, sequence: int) -> bool:
        """Return True while the KV of `sequence` lies on the host."""
        return self._table(sequence).on_host

    def slots(self, sequence: int, first: int, last: int) -> NDArray[np.int64]:
        """Return the device slots of tokens first..last-1: block * block_tokens + place in the block."""
        table = self._on_device(sequence)
        if not 0 <= first <= last <= table.tokens:
            raise InvariantError(f"sequence {sequence} has slots 0..{table.tokens}, asked for {first}..{last}")
        places = np.arange(first, last, dtype=np.int64)
        blocks = np.asarray(table.blocks, np.int64)
        return blocks[places // self.block_tokens] * self.block_tokens + places % self.block_tokens

    def prompt_chain(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """Return the hashes of the blocks that a prompt may take from the cache, to be kept while it waits.

        Its last token is left out: one token at least has to be computed, or there are no logits to sample from.
        """
        return hash_chain(token_ids[:-1], self.block_tokens, self._root)

    def prefix(self, chain: Sequence[bytes]) -> Prefix:
        """Return the longest known beginning of a chain."""
        blocks = []
        for digest in chain:
            block = self.device.find(digest)
            if block is None:
                break
            blocks.append(block)
        return Prefix(tuple(blocks), len(blocks) * self.block_tokens, sum(map(self.device.is_idle, blocks)))

    def needed_to_start(self, chain: Sequence[bytes], tokens: int) -> int:
        """Return the available blocks that a new sequence of `tokens` would take; shared ones in use cost nothing."""
        prefix = self.prefix(chain)
        return max(blocks_for(tokens, self.block_tokens) - len(prefix.blocks), 0) + prefix.idle

    def needed_to_grow(self, sequence: int, tokens: int) -> int:
        """Return the blocks that `tokens` more tokens would take, a copy of a shared last block included."""
        table = self._on_device(sequence)
        fresh = blocks_for(table.tokens + tokens, self.block_tokens) - len(table.blocks)
        return fresh + self._splits(table)

    def needed_to_swap_in(self, sequences: Iterable[int]) -> int:
        """Return the available device blocks that it would take to bring these sequences back."""
        found = self._found_on_device([self._on_host(sequence) for sequence in sequences])
        revived = {block for block in found.values() if block is not None and self.device.is_idle(block)}
        return len(_missing(found)) + len(revived)

    def given_back(self, sequences: Iterable[int]) -> int:
        """Return the device blocks that would be available again were all these freed or swapped out."""
        tables = [self._on_device(sequence) for sequence in dict.fromkeys(sequences)]
        held = Counter(block for table in tables for block in table.blocks)
        return sum(self.device.references(block) == count for block, count in held.items())

    # ---- verbs

    def start(self, sequence: int, chain: Sequence[bytes] = ()) -> int:
        """Begin a sequence; return how many of its first tokens the cache holds already: they need no step."""
        if sequence in self._tables:
            raise InvariantError(f"sequence {sequence} is started twice")
        prefix = self.prefix(chain)
        for block in prefix.blocks:
            self.device.share(block)
        known = list(chain[: len(prefix.blocks)])
        self._tables[sequence] = BlockTable(list(prefix.blocks), prefix.tokens, prefix.tokens, known)
        return prefix.tokens

    def grow(self, sequence: int, tokens: int) -> tuple[Copy, ...]:
        """Give the next `tokens` tokens slots to be written by the coming step; return the copies due before it.

        The step writes only blocks that the sequence holds alone: a partial last block that it shares with a fork is
        copied first (copy-on-write, section 4.4 of the paper). Whoever grows last keeps the original.
        """
        table = self._on_device(sequence)
        if tokens < 1:
            raise InvariantError(f"sequence {sequence} grows by {tokens} tokens")
        needed = self.needed_to_grow(sequence, tokens)
        if needed > self.device.available:
            why = f"sequence {sequence} of {table.tokens} tokens grows by {tokens}"
            raise short_on_device(self.device, self.block_tokens, needed, why)
        fresh = self.device.take(needed)
        copies = (self._split(table, fresh.pop()),) if self._splits(table) else ()
        table.blocks += fresh
        table.tokens += tokens
        return copies

    def commit(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Say that the KV of the next tokens in flight has been computed, and which tokens they are.

        Only now are blocks that have become full published: before, another request could read what is not there yet.
        """
        table = self._on_device(sequence)
        if len(token_ids) > table.in_flight:
            raise InvariantError(
                f"sequence {sequence} commits {len(token_ids)} tokens, {table.in_flight} are in flight"
            )
        table.committed += len(token_ids)
        if not self.prefix_caching:
            return
        table.tail_ids.extend(token_ids)
        parent = table.chain[-1] if table.chain else self._root
        filled = hash_chain(table.tail_ids, self.block_tokens, parent)
        del table.tail_ids[: len(filled) * self.block_tokens]
        for digest in filled:
            self.device.publish(table.blocks[len(table.chain)], digest)
            table.chain.append(digest)

    def cancel(self, sequence: int) -> int:
        """Take back the slots in flight, of a step that will not run; return the blocks available again."""
        table = self._on_device(sequence)
        table.tokens = table.committed
        kept = blocks_for(table.tokens, self.block_tokens)
        surplus = table.blocks[kept:]
        del table.blocks[kept:]
        return self._release(self.device, surplus)

    def fork(self, parent: int, child: int) -> None:
        """Begin `child` with all tokens of `parent`; they share every block until one of them writes."""
        if child in self._tables:
            raise InvariantError(f"sequence {child} is started twice")
        table = self._settled(parent)
        for block in table.blocks:
            self.device.share(block)
        self._tables[child] = table.copy()

    def free(self, sequence: int) -> int:
        """End a sequence, wherever it lies; return how many blocks are available again there."""
        table = self._table(sequence)
        del self._tables[sequence]
        return self._release(self.host if table.on_host else self.device, table.blocks)

    def swap_out(self, sequences: Iterable[int]) -> tuple[Copy, ...]:
        """Move sequences to the host; return the copies to make before the next step.

        Forks go together: what they share is copied once and stays shared (section 4.5 of the paper).
        """
        sequences = tuple(dict.fromkeys(sequences))
        tables = [self._settled(sequence) for sequence in sequences]
        distinct = tuple(dict.fromkeys(block for table in tables for block in table.blocks))
        if len(distinct) > self.host.available:
            raise short_on_host(self.host, self.block_tokens, len(distinct), f"{_names(sequences)} to be swapped out")
        moves = dict(zip(distinct, self.host.take(len(distinct)), strict=True))
        self._move(tables, moves, self.device, self.host)
        return tuple(Copy(source, target, Direction.OUT) for source, target in moves.items())

    def swap_in(self, sequences: Iterable[int]) -> tuple[Copy, ...]:
        """Move sequences back to the device; return the copies to make before the next step.

        A full block that the device still holds, idle or in another table, is shared instead of copied.
        """
        sequences = tuple(dict.fromkeys(sequences))
        tables = [self._on_host(sequence) for sequence in sequences]
        needed = self.needed_to_swap_in(sequences)
        if needed > self.device.available:
            raise short_on_device(self.device, self.block_tokens, needed, f"{_names(sequences)} to be swapped in")
        found = self._found_on_device(tables)
        kept = {source: target for source, target in found.items() if target is not None}
        for block in kept.values():
            self.device.share(block)  # before anything is taken, which may evict
        missing = _missing(found)
        fresh = dict(zip(missing, self.device.take(len(missing)), strict=True))
        self._move(tables, kept | fresh, self.host, self.device)
        for table in tables:
            self._publish_again(table)
        return tuple(Copy(source, target, Direction.IN) for source, target in fresh.items())

    def evict(self, blocks: int) -> int:
        """Forget up to `blocks` prefixes that nobody uses, those idle the longest first; return how many."""
        return self.device.evict(blocks)

    def check(self) -> None:
        """Raise InvariantError unless tables, references and pools agree. Cheap enough to run whenever idle."""
        for pool, on_host in ((self.device, False), (self.host, True)):
            tables = [table for table in self._tables.values() if table.on_host is on_host]
            pool.check(Counter(block for table in tables for block in table.blocks))
        for sequence, table in self._tables.items():
            if len(table.blocks) != blocks_for(table.tokens, self.block_tokens):
                raise InvariantError(f"sequence {sequence}: {len(table.blocks)} blocks for {table.tokens} tokens")

    # ---- parts

    def _table(self, sequence: int) -> BlockTable:
        if sequence not in self._tables:
            raise InvariantError(f"sequence {sequence} was never started, or is freed already")
        return self._tables[sequence]

    def _on_device(self, sequence: int) -> BlockTable:
        table = self._table(sequence)
        if table.on_host:
            raise InvariantError(f"sequence {sequence} is swapped out")
        return table

    def _on_host(self, sequence: int) -> BlockTable:
        table = self._table(sequence)
        if not table.on_host:
            raise InvariantError(f"sequence {sequence} is not swapped out")
        return table

    def _settled(self, sequence: int) -> BlockTable:
        """Return the table of a sequence whose KV is all there: nothing else can be shared or copied away."""
        table = self._on_device(sequence)
        if table.in_flight:
            raise InvariantError(f"sequence {sequence} has {table.in_flight} tokens in flight: commit or cancel first")
        return table

    def _splits(self, table: BlockTable) -> bool:
        """Return True when the next token would fall into a block that others hold, too."""
        partial = table.tokens % self.block_tokens > 0
        return partial and self.device.references(table.blocks[-1]) > 1

    def _split(self, table: BlockTable, target: int) -> Copy:
        source, table.blocks[-1] = table.blocks[-1], target
        self.device.release(source)
        return Copy(source, target)

    def _release(self, pool: BlockPool, blocks: list[int]) -> int:
        """Release blocks, the last first: evicted in that order, what is left of a prefix can still be found."""
        return sum(pool.release(block) for block in reversed(blocks))

    def _found_on_device(self, tables: list[BlockTable]) -> dict[int, int | None]:
        """Return for each distinct host block the device block that holds the same tokens, or None."""
        found: dict[int, int | None] = {}
        for table in tables:
            for block, digest in zip_longest(table.blocks, table.chain):
                found[block] = None if digest is None else self.device.find(digest)
        return found

    def _move(self, tables: list[BlockTable], moves: dict[int, int], source: BlockPool, target: BlockPool) -> None:
        """Point tables to the other memory, where each block of `moves` has one reference that is not a table's."""
        for table in tables:
            for block in table.blocks:
                target.share(moves[block])
            self._release(source, table.blocks)
            table.blocks = [moves[block] for block in table.blocks]
            table.on_host = target is self.host
        self._release(target, list(moves.values()))

    def _publish_again(self, table: BlockTable) -> None:
        for block, digest in zip(table.blocks, table.chain, strict=False):
            if not self.device.is_published(block):
                self.device.publish(block, digest)


def _missing(found: dict[int, int | None]) -> list[int]:
    """Return the host blocks that no device block can stand for."""
    return [source for source, target in found.items() if target is None]


def _names(sequences: tuple[int, ...]) -> str:
    return f"sequence {sequences[0]} has" if len(sequences) == 1 else f"sequences {_listed(sequences)} have"


def _listed(sequences: tuple[int, ...]) -> str:
    return ", ".join(map(str, sequences[:5])) + f" and {len(sequences) - 5} more" * (len(sequences) > 5)
