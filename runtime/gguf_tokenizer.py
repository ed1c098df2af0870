"""The tokenizer inside a GGUF file: byte-level BPE (Radford et al., 2019), as the library `tokenizers` computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from runtime.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How text falls into the words within which pairs are merged, as the file's `tokenizer.ggml.pre` names it."""

    words: Callable[[], list[Any]]
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    """True: a word that is a token needs no merges."""
    add_bos: bool = False
    """Whether text begins with the bos token where the file is silent."""


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _each_digit() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _by_pattern(digits: str) -> Callable[[], list[Any]]:
    def words() -> list[Any]:
        pattern = Regex(_WORDS.format(digits=digits))
        return [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]

    return words


_LLAMA3 = _Split(_by_pattern("{1,3}"), whole_words=True, add_bos=True)
_QWEN = _Split(_by_pattern(""), normalizer=normalizers.NFC)
_SPLITS = {
    "default": _Split(_gpt2),
    "gpt-2": _Split(_gpt2),
    "smollm": _Split(_each_digit),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
}


def gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Return the tokenizer of a GGUF file. Raises InputError for one that is not byte-level BPE of a known split."""
    kind = file.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise file.fault(f"tokenizer.ggml.model: expected gpt2 (byte-level BPE), got {kind!r}")
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITS:
        raise file.fault(f"tokenizer.ggml.pre: expected one of {', '.join(_SPLITS)}, got {name!r}")
    split = _SPLITS[name]
    tokens = _texts(file, "tokenizer.ggml.tokens")
    inner = tokenizers.Tokenizer(_merging(file, tokens, split))
    inner.pre_tokenizer = pre_tokenizers.Sequence(split.words())
    inner.decoder = decoders.ByteLevel()
    if split.normalizer:
        inner.normalizer = split.normalizer()
    _add_special(file, inner, tokens)
    if file.get("tokenizer.ggml.add_bos_token", bool, split.add_bos):
        bos = file.require("tokenizer.ggml.bos_token_id", int)
        if not 0 <= bos < len(tokens):
            raise file.fault(f"tokenizer.ggml.bos_token_id: expected one of the {len(tokens)} tokens, got {bos}")
        special = [(tokens[bos], bos)]
        inner.post_processor = processors.TemplateProcessing(single=[tokens[bos], "$A"], special_tokens=special)
    return inner


def _texts(file: GgufFile, key: str) -> list[str]:
    values: list[str] = file.require(key, list)
    if not values or not isinstance(values[0], str):
        raise file.fault(f"{key}: expected a list of texts")
    return values


def _merging(file: GgufFile, tokens: list[str], split: _Split) -> BPE:
    lines = _texts(file, "tokenizer.ggml.merges")
    if odd := next((line for line in lines if line.count(" ") != 1), None):
        raise file.fault(f"tokenizer.ggml.merges: expected two tokens and a space between, got {odd[:60]!r}")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return BPE(vocabulary, merges, ignore_merges=split.whole_words)
    except Exception as error:  # the library has no class of its own for a merge of what is no token
        raise file.fault(f"tokenizer.ggml.merges: {' '.join(str(error).split())}") from None


def _add_special(file: GgufFile, inner: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Mark the tokens that no merge makes: control tokens, and words that the model's makers added."""
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            inner.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            inner.add_tokens([AddedToken(token, normalized=False, special=False)])
