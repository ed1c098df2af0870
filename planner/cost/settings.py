"""Samples as arrays for the fits: one row per shape, grouped into the settings that are held out together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log2

import numpy as np

from planner.cost.base import BatchShape
from planner.specs.profile import Sample

_MAX_FOLDS = 24
_VARIES = 1.5
_OWN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """Rows of one layout. `weight` gives every setting the same total, however many rows it has."""

    shapes: np.ndarray
    """(rows, 6): prefills, tokens, attended, decodes, context, prefix."""
    time_s: np.ndarray
    group: np.ndarray
    """Which setting each row belongs to; prefill and decode never share one."""
    decode: np.ndarray
    weight: np.ndarray
    spread: np.ndarray
    """How far the repeats of the row lie from their median, as a share (the median of that); nan without repeats."""

    def __len__(self) -> int:
        return len(self.time_s)

    def where(self, mask: np.ndarray) -> Settings:
        """Return the rows that `mask` selects."""
        return Settings(*(getattr(self, name)[mask] for name in self.__slots__))

    def noise(self, decode: bool) -> float | None:
        """Return the typical spread of repeats in one phase, as a share; None without repeats."""
        spread = self.spread[(self.decode == decode) & ~np.isnan(self.spread)]
        return float(np.median(spread)) if len(spread) else None

    def folds(self) -> Iterator[np.ndarray]:
        """Yield a mask of the rows to hold out: one setting each, or of a big grid every 24th setting."""
        for phase in (False, True):
            groups = np.unique(self.group[self.decode == phase])
            for start in range(min(_MAX_FOLDS, len(groups))):
                yield np.isin(self.group, groups[start::_MAX_FOLDS])


def gather(samples: Iterable[Sample]) -> Settings:
    """Return the rows of `samples`: the median over repeats of each shape, in a fixed order.

    A decode row's context often depends on when a request happened to stop. What was asked for (prompt and output)
    names the setting where the profile says it; else contexts within a quarter of an octave count as the same:
    otherwise a setting would be predicted from its own near-repeats.
    """
    repeats: dict[tuple[tuple[int, ...], BatchShape], list[float]] = defaultdict(list)
    for sample in samples:
        repeats[_setting(sample), _shape(sample)].append(sample.time_s)
    keys = sorted(repeats)
    settings = {setting: index for index, setting in enumerate(sorted({key[0] for key in keys}))}
    group = np.array([settings[key[0]] for key in keys], dtype=int)
    return Settings(
        shapes=np.array([key[1] for key in keys], dtype=float).reshape(-1, 6),
        time_s=np.array([np.median(repeats[key]) for key in keys]),
        group=group,
        decode=np.array([key[0][0] == 1 for key in keys], dtype=bool),
        weight=1.0 / np.bincount(group)[group] if len(group) else np.zeros(0),
        spread=np.array([_spread(repeats[key]) for key in keys]),
    )


def _spread(times_s: list[float]) -> float:
    middle = np.median(times_s)
    return float(np.median(np.abs(np.array(times_s) / middle - 1.0))) if len(times_s) > 1 else np.nan


def _setting(sample: Sample) -> tuple[int, ...]:
    if sample.phase == "prefill":
        return (0, sample.batch, sample.prompt_tokens, sample.cached_tokens)
    if sample.prompt_tokens and sample.output_tokens:
        return (1, sample.batch, sample.prompt_tokens, sample.output_tokens)
    return (1, sample.batch, round(4 * log2(sample.context_tokens)), 0)


def _shape(sample: Sample) -> BatchShape:
    if sample.phase == "prefill":
        return BatchShape.prefill(sample.prompt_tokens, sample.batch, sample.cached_tokens)
    return BatchShape.decode(sample.batch, sample.batch * sample.context_tokens)


def tells_prefix(rows: Settings) -> bool:
    """Return True when prompts of different lengths stand behind cached tokens: else attention explains it all."""
    behind = rows.where(rows.shapes[:, 5] > 0)
    return _varies(behind.shapes[:, 1] / np.maximum(behind.shapes[:, 0], 1))


def identifiable(rows: Settings) -> dict[str, str | None]:
    """Return for each term of the linear law why these rows cannot tell it, or None when they can."""
    prefill, decode = rows.where(~rows.decode), rows.where(rows.decode)
    tokens, attended = prefill.shapes[:, 1], prefill.shapes[:, 2]
    batch, context = decode.shapes[:, 3], decode.shapes[:, 4]
    return {
        "prefill tokens": None if _varies(tokens) else "prompts of one size only",
        "prefill attention": _attention_fault(tokens, attended, prefill.time_s),
        "decode batch": None if _varies(batch) else "one batch size only",
        "decode KV read": _context_fault(batch, context),
    }


def _varies(values: np.ndarray) -> bool:
    return len(values) > 0 and values.max() >= _VARIES * values.min()


def _attention_fault(tokens: np.ndarray, attended: np.ndarray, time_s: np.ndarray) -> str | None:
    """The column must keep a share of its own once constant and tokens explained what they can."""
    if len(tokens) < 3:
        return f"{len(tokens)} prefill settings, at least 3 are needed"
    others = np.c_[np.ones_like(tokens), tokens] / time_s[:, None]
    column = attended / time_s
    left = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
    own = np.linalg.norm(left) / np.linalg.norm(column)
    return None if own > _OWN_SHARE else "prompt lengths vary only together with the number of tokens"


def _context_fault(batch: np.ndarray, context: np.ndarray) -> str | None:
    """Contexts must vary at two batch sizes or more; sizes within an octave count as one, for scattered
    designs.

    One factor at a time is not enough: at batch 1 the reads hide under the overhead of the step, and what a
    long context costs there says nothing of what it costs at batch 64.
    """
    each = context / np.maximum(batch, 1)
    octaves = np.floor(np.log2(np.maximum(batch, 1)))
    varied = sum(_varies(each[octaves == octave]) for octave in np.unique(octaves))
    return None if varied >= 2 else f"contexts vary at {varied} batch size{'s' if varied != 1 else ''}, 2 are needed"
