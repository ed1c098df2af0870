"""Greedy answers of transformers' `generate` for SmolLM2, which every layout and setting of the engine has to repeat.

`python -m tests.greedy_reference` makes the file anew (ten minutes on two cores).
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data" / "greedy" / "smollm2.json"
PROMPTS, LONGEST, NEW_TOKENS = 64, 600, 64
BEAM_FILE, BEAM_PROMPTS = FILE.with_name("smollm2-beams.json"), 8
_TEXT = Path(__file__).parents[1] / "LICENSE"


def prompts() -> list[list[int]]:
    """Return 64 prompts of 1 to 600 tokens: every other one is text, the others are random ids."""
    from tests.smollm2 import smollm2_files

    rng = np.random.default_rng(4)
    text = smollm2_files().tokenizer.encode(_TEXT.read_text())
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, LONGEST, *rng.integers(1, LONGEST + 1, PROMPTS - 9).tolist()]
    found = []
    for index, length in enumerate(lengths):
        start = int(rng.integers(0, len(text) - length))
        random = rng.integers(0, smollm2_files().config.vocab_size, length).tolist()
        found.append(text[start : start + length] if index % 2 else random)
    return found


@cache
def reference() -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Return the prompts and the 64 tokens that follow each."""
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored["prompts"], [tuple(ids) for ids in stored["answers"]]


def beam_reference() -> tuple[list[list[int]], list[list[tuple[int, ...]]]]:
    """Return the first prompts and the four answers of a beam search with four beams, the best first."""
    stored: dict[str, Any] = json.loads(BEAM_FILE.read_text())
    return reference()[0][:BEAM_PROMPTS], [[tuple(ids) for ids in each] for each in stored["answers"]]


def ask_for_beams() -> None:
    """Ask transformers for the answers of its beam search."""
    import torch

    from tests.smollm2 import smollm2_oracle

    model, answers = smollm2_oracle(), []
    ends = set(model.config.eos_token_id)
    for prompt in prompts()[:BEAM_PROMPTS]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=4,
            num_return_sequences=4, pad_token_id=0, eos_token_id=sorted(ends),
        )  # fmt: skip
        answers.append([_up_to_end(row[len(prompt) :].tolist(), ends) for row in out])
    rows = ",\n".join(json.dumps(answer) for answer in answers)
    BEAM_FILE.write_text(f'{{"made_with": "{_made_with()}",\n"answers": [\n{rows}\n]}}\n')


def _up_to_end(ids: list[int], ends: set[int]) -> list[int]:
    """Return `ids` without the padding behind the end of text."""
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


def _made_with() -> str:
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, sdpa"


def ask_for_greedy() -> None:
    """Ask transformers for its greedy answers."""
    import torch

    from tests.smollm2 import smollm2_oracle

    model, answers, asked = smollm2_oracle(), [], prompts()
    for index, prompt in enumerate(asked):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
        print(f"{index + 1} of {len(asked)}", file=sys.stderr)
    rows = ",\n".join(json.dumps(answer) for answer in answers)
    heads = ",\n".join(json.dumps(prompt) for prompt in asked)
    FILE.write_text(f'{{"made_with": "{_made_with()}",\n"prompts": [\n{heads}\n],\n"answers": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    ask_for_greedy()
    ask_for_beams()
