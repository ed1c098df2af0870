"""Tokens from logits: greedy or drawn, with temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.errors import InvariantError
from runtime.draws import keys
from runtime.step import Choices, StepOutput

_HEAD = 1024
"""So many of the likeliest tokens are ranked before all of them are. Sorting a vocabulary takes ten times as long."""
_BLOCK = 128
_CPU_VALUES, _GPU_VALUES = 1 << 16, 1 << 25
"""So many 64-bit numbers are made at a time. Row after row takes half as long on CPU as all rows at once."""


class LogitsError(InvariantError):
    """No token can be chosen: logits that are no numbers, or none left that may be chosen."""


def choose(logits: Tensor, choices: Choices, number: int) -> StepOutput:
    """Return the token of each row of `logits` [L, vocab], of any floating type and on any device.

    Greedy rows (temperature 0) take the likeliest token, the lowest id on a tie. The others divide by the temperature,
    keep the top_k likeliest, then the fewest of those whose mass reaches top_p, and draw one of them with the number
    that (seed, draw) stands for. Ties at either edge keep the lowest ids. Logits of -inf are never chosen.

    Log-probabilities are those of the model, before temperature, cuts and bans; banned tokens are not listed among the
    likeliest unless nothing else is left, then with -inf. With `choices.logprobs` 0 none are computed, and the chosen
    token's is NaN.

    Raises LogitsError for a row with NaN or +inf, or with nothing but -inf.
    """
    allowed = _without(logits, choices.banned)
    best, ids = _first_largest(allowed)
    _check(best, number)
    drawn = np.flatnonzero(choices.temperature > 0)
    if len(drawn):
        ids[torch.from_numpy(drawn).to(ids.device)] = _draw(_rows(allowed, best, choices, drawn))
    if not choices.logprobs:
        return StepOutput(number, ids.cpu().numpy(), np.full(len(ids), np.nan, np.float32))
    return _with_logprobs(logits, allowed, ids, choices.logprobs, number)


def _without(logits: Tensor, banned: tuple[tuple[int, tuple[int, ...]], ...]) -> Tensor:
    """Return logits with -inf for banned tokens; a copy, since log-probabilities want the model's own."""
    if not banned:
        return logits
    rows = [row for row, ids in banned for _ in ids]
    columns = [token for _, ids in banned for token in ids]
    allowed = logits.clone()
    allowed[rows, columns] = -torch.inf
    return allowed


def _first_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row and where it is first, or NaN if the row has any.

    Searching for the place within one block alone takes a tenth of the time on CPU. Not argmax: it is four times slower
    than max in bfloat16 there.
    """
    if logits.shape[-1] % _BLOCK:
        best, ids = logits.max(dim=-1)
        return best, ids
    blocks = logits.unflatten(-1, (-1, _BLOCK))
    best, block = blocks.amax(dim=-1).max(dim=-1)
    place = blocks[torch.arange(len(logits), device=logits.device), block].max(dim=-1).indices
    return best, block * _BLOCK + place


def _check(best: Tensor, number: int) -> None:
    """Raise LogitsError unless each row's largest is finite: NaN, +inf and a row without choice all show in it."""
    values = best.float().cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return
    row, value = int(bad[0]), float(values[bad[0]])
    why = "every token has -inf or is banned"
    if value != -np.inf:
        why = f"the model's logits hold {value}: its weights may be damaged, or overflow in this type (try float32)"
    raise LogitsError(f"step {number}, row {row} of {len(values)}: cannot choose a token; {why}")


# ---- drawing


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that a token is drawn for: `logits` [R, vocab], all else [R, 1]."""

    logits: Tensor
    best: Tensor
    """The largest logit: taken off before dividing by the temperature, which could overflow."""
    temperature: Tensor
    top_p: Tensor
    bound: Tensor
    """top_k, or the vocabulary where there is no bound."""
    key: Tensor
    """The draw's random bits."""

    def of(self, which: Tensor | slice) -> _Rows:
        if not isinstance(which, slice) and which.all():
            return self
        columns = (self.logits, self.best, self.temperature, self.top_p, self.bound, self.key)
        return _Rows(*(column[which] for column in columns))

    def weights(self, logits: Tensor) -> Tensor:
        """Return what the probabilities of these logits are proportional to; the likeliest has 1."""
        return torch.exp((logits - self.best) / self.temperature)


def _rows(allowed: Tensor, best: Tensor, choices: Choices, rows: NDArray[np.intp]) -> _Rows:
    def column(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(allowed.device)[:, None]

    vocab, top_k = allowed.shape[-1], choices.top_k[rows]
    at = column(rows)[:, 0]
    return _Rows(
        logits=allowed[at].float(),
        best=best[at, None].float(),
        temperature=column(choices.temperature[rows]),
        top_p=column(choices.top_p[rows].astype(np.float64)),
        bound=column(np.where(top_k > 0, np.minimum(top_k, vocab), vocab)),
        key=column(keys(choices.seed[rows], choices.draw[rows])),
    )


def _draw(rows: _Rows) -> Tensor:
    """Return the drawn token of each row [R]. Ranking is the expensive part: only as far as a row needs it."""
    ids = torch.empty(len(rows.logits), dtype=torch.int64, device=rows.logits.device)
    cut = ((rows.bound < rows.logits.shape[-1]) | (rows.top_p < 1))[:, 0]
    if not cut.all():
        ids[~cut] = _draw_from_all(rows.of(~cut))
    if cut.any():
        ids[cut] = _draw_cut(rows.of(cut))
    return ids


def _draw_from_all(rows: _Rows) -> Tensor:
    """Return tokens [R] drawn from the whole vocabulary, so many rows at a time as stay in the cache of a CPU core."""
    every = torch.arange(rows.logits.shape[-1], device=rows.logits.device)
    parts = (rows.of(part) for part in _parts(rows.logits))
    return torch.cat([_race(part.weights(part.logits), part.key, every) for part in parts])


def _draw_cut(rows: _Rows) -> Tensor:
    ids, sure = _draw_from_likeliest(rows, _HEAD)
    if not sure.all():
        ids[~sure], _ = _draw_from_likeliest(rows.of(~sure), rows.logits.shape[-1])
    return ids


def _draw_from_likeliest(rows: _Rows, most: int) -> tuple[Tensor, Tensor]:
    """Return tokens [R] drawn after ranking `most` tokens, and where that was enough to know both cuts [R]."""
    vocab, furthest = rows.logits.shape[-1], int(rows.bound.max())
    size = min(most, furthest)
    logits, ids = _likeliest(rows.logits, size)
    weights = rows.weights(logits)
    weights[torch.arange(size, device=ids.device) >= rows.bound] = 0.0
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    total = reached[:, -1:]
    if size < furthest == vocab:
        whole = rows.weights(rows.logits).sum(dim=-1, keepdim=True, dtype=torch.float64)
        total = torch.where(rows.bound == vocab, whole, total)
    goal = rows.top_p * total
    sure = (rows.bound <= size) | ((rows.bound == vocab) & (reached[:, -1:] >= goal))
    weights[reached - weights >= goal] = 0.0  # those before it have reached top_p already
    place = _race(weights, rows.key, ids)
    return ids.gather(-1, place[:, None])[:, 0], sure[:, 0]


def _race(weights: Tensor, key: Tensor, ids: Tensor) -> Tensor:
    """Return the place [R] of the token drawn with a chance proportional to its weight [R, K].

    Each token gets an exponential waiting time with its weight as rate; the first to arrive is drawn (Gumbel's trick).
    A time hangs on the token's id and the key alone. So rounding, which differs between layouts and batches, changes a
    token only if two arrive at the same time but for rounding; inverting the cumulative distribution, it would move
    every token behind (docs/decisions/0021 has how often).
    """
    return (weights / _waiting_times(key, ids)).max(dim=-1).indices


def _waiting_times(key: Tensor, ids: Tensor) -> Tensor:
    """Return exponential times of rate 1 for tokens `ids` [K] or [R, K]: SplitMix64's number `id`, seeded with the key.

    SplitMix64: Steele, Lea, Flood, OOPSLA '14. Shifts are masked since torch has no unsigned ones.
    """
    bits = key + (ids + 1) * -0x61C8864680B583EB
    bits.bitwise_xor_((bits >> 30).bitwise_and_((1 << 34) - 1)).mul_(-0x40A7B892E31B1A47)
    bits.bitwise_xor_((bits >> 27).bitwise_and_((1 << 37) - 1)).mul_(-0x6B2FB644ECCEEE15)
    bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))
    fraction = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)  # neither 0 nor 1
    return fraction.log_().neg_().float()


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits`: on CPU so few that 64-bit numbers for them stay in a core's cache."""
    count, vocab = logits.shape
    together = max(1, (_GPU_VALUES if logits.is_cuda else _CPU_VALUES) // vocab)
    for start in range(0, count, together):
        yield slice(start, start + together)


# ---- the likeliest tokens


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of `logits` [R, vocab], and their ids, the lowest first where they tie."""
    ids = torch.cat([_ranks(logits[part]).topk(count, dim=-1).values for part in _parts(logits)])
    ids = logits.shape[-1] - 1 - (ids & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids


def _ranks(logits: Tensor) -> Tensor:
    """Return integers that order as (logit, -id) does, so that no two tie: topk promises nothing about ties."""
    bits = (logits.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 ties with 0.0
    magnitude = (bits >> 31).bitwise_and_(0x7FFFFFFF)  # below zero, more bits mean less
    ids = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return bits.bitwise_xor_(magnitude).bitwise_left_shift_(32).bitwise_or_(ids)


def _with_logprobs(logits: Tensor, allowed: Tensor, ids: Tensor, count: int, number: int) -> StepOutput:
    """Return the output with log-probabilities of the chosen and of the `count` likeliest tokens."""
    logits, allowed = logits.float(), allowed.float()
    peak = logits.amax(dim=-1, keepdim=True)
    others = (logits - peak).exp().sum(dim=-1, keepdim=True).log()
    top, top_ids = _likeliest(allowed, min(count, allowed.shape[-1]))
    chosen = allowed.gather(-1, ids[:, None])
    return StepOutput(
        number,
        ids.cpu().numpy(),
        ((chosen - peak) - others)[:, 0].cpu().numpy(),
        top_ids.cpu().numpy(),
        ((top - peak) - others).cpu().numpy(),
    )
