"""Log-probabilities as OpenAI writes them: one object for completions, another for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.answer import TopLogprobs
from runtime.tokenizer import Tokenizer

_LOWEST = -9999.0
"""JSON knows no minus infinity; OpenAI writes this."""


class TokenTexts:
    """How a single token is written."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of a token; nothing without a tokenizer, or for an id that is none of its tokens."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer else b""

    def chars(self, token_id: int) -> int:
        """Return how many characters begin in a token: bytes of UTF-8 that continue none."""
        return sum(byte & 0xC0 != 0x80 for byte in self.raw(token_id))

    def text(self, token_id: int) -> str:
        r"""Return the text of a token, `bytes:\xe2\x80` for one that ends within a character, else `token_id:7`."""
        raw = self.raw(token_id)
        try:
            return raw.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[TopLogprobs],
    offset: int,
) -> dict[str, Any]:
    """Return the object of a completion's choice; `offset` is where its first token begins in the text."""
    tokens = [texts.text(token) for token in token_ids]
    offsets = []
    for token in token_ids:
        offsets.append(offset)
        offset += texts.chars(token)
    rows = [
        {texts.text(other): _shown(value) for other, value in reversed(((token, chosen), *row))}  # the likelier wins
        for token, chosen, row in zip(token_ids, logprobs, top, strict=True)
    ]
    return {
        "text_offset": offsets,
        "token_logprobs": [_shown(value) for value in logprobs],
        "tokens": tokens,
        "top_logprobs": rows if any(top) else None,
    }


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Return the object of a chat's choice."""
    content = [
        {**_entry(texts, token, value), "top_logprobs": [_entry(texts, *other) for other in row]}
        for token, value, row in zip(token_ids, logprobs, top, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token_id), "logprob": _shown(logprob), "bytes": list(texts.raw(token_id))}


def _shown(logprob: float) -> float:
    return max(logprob, _LOWEST)
