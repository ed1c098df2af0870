"""The two shapes that answers come in: completions and chats, each whole or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from runtime.answer import Answer, Delta, TopLogprobs
from runtime.api.logprobs import TokenTexts, chat_logprobs, completion_logprobs


class Shape(Protocol):
    """How the choices of one request are written. `choice` is the index of a choice in it."""

    whole: str
    """The name of the object that holds whole answers."""
    chunk: str

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Return what a stream says of a choice before its first token, or None."""
        ...

    def piece(self, choice: int, delta: Delta) -> dict[str, Any]:
        """Return what a stream says of `delta`."""
        ...

    def answer(self, choice: int, answer: Answer) -> dict[str, Any]:
        """Return a whole choice."""
        ...


class CompletionShape:
    """Choices of /v1/completions. `echoes` are the prompts' texts by choice, where they are to be repeated."""

    whole = chunk = "text_completion"

    def __init__(self, texts: TokenTexts, *, logprobs: bool, echoes: Sequence[str] = ()):
        self._texts, self._logprobs, self._echoes = texts, logprobs, echoes
        self._offsets: dict[int, int] = {}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self._choice(choice, self._echoes[choice], None, None) if self._echoes else None

    def piece(self, choice: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs_of(choice, delta.token_ids, delta.logprobs, delta.top_logprobs)
        return self._choice(choice, delta.text, logprobs, delta.finish_reason)

    def answer(self, choice: int, answer: Answer) -> dict[str, Any]:
        text = (self._echoes[choice] if self._echoes else "") + answer.text
        logprobs = self._logprobs_of(choice, answer.token_ids, answer.logprobs, answer.top_logprobs)
        return self._choice(choice, text, logprobs, answer.finish_reason)

    def _choice(self, choice: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_of(
        self, choice: int, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
    ) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offset = self._offsets.get(choice, 0)
        found = completion_logprobs(self._texts, ids, logprobs, top or [()] * len(ids), offset)
        self._offsets[choice] = offset + sum(map(self._texts.chars, ids))
        return found


class ChatShape:
    """Choices of /v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, logprobs: bool):
        self._texts, self._logprobs = texts, logprobs

    def opening(self, choice: int) -> dict[str, Any]:
        return self._piece(choice, {"role": "assistant", "content": ""}, None, None)

    def piece(self, choice: int, delta: Delta) -> dict[str, Any]:
        return self._piece(choice, {"content": delta.text}, self._logprobs_of(delta), delta.finish_reason)

    def _piece(self, choice: int, said: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": choice, "delta": said, "logprobs": logprobs, "finish_reason": reason}

    def answer(self, choice: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        reason, logprobs = answer.finish_reason, self._logprobs_of(answer)
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs_of(self, said: Answer | Delta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        top = said.top_logprobs or [()] * len(said.token_ids)
        return chat_logprobs(self._texts, said.token_ids, said.logprobs, top)
