"""What a client may send. Fields that are not named here are ignored, as other servers do, unless they ask for what
would change the answer: those are refused (`refuse_unsupported`), never silently dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from runtime.api.errors import bad_request
from runtime.api.limits import ApiLimits
from runtime.sampling import MAX_LOGPROBS, Sampling

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "kv_transfer_params": (),
    "functions": ([],),
    "function_call": ("none",),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "continue_final_message": (False,),
}
"""Known fields that are not supported: the values (beside null) that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream says beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: usage so far with every chunk."""


class Asked(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    stop_token_ids: list[int] | None = None
    use_beam_search: bool | None = False
    beam_width: int | None = None
    length_penalty: float | None = None
    return_token_ids: bool | None = False
    """vLLM's: the ids of each choice's tokens, and of the prompt."""
    return_times: bool | None = False
    """Ours: when the request passed which station."""

    @property
    def usage_in_stream(self) -> bool:
        """Return True when the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        """Return True when every chunk says the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def refuse_unsupported(self) -> None:
        """Raise ApiError for a known field that asks for what cannot be done."""
        extra = self.model_extra or {}
        for name, neutral in _NEUTRAL.items():
            if extra.get(name) is not None and extra[name] not in neutral:
                raise bad_request(f"{name}: not supported by this server; leave it out", name)

    def sampling(self, max_tokens: int, logprobs: int | None, limits: ApiLimits) -> Sampling:
        """Return how the answers are chosen. Raises InputError and ApiError."""
        answers = 1 if self.n is None else self.n
        width = answers if self.beam_width is None else self.beam_width
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 is our 0: all
            seed=None if self.seed is None else self.seed % 2**63,
            n=answers,
            beam_width=width if self.use_beam_search else 0,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            stop=_stops(self.stop, limits),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
        )


def _stops(stop: str | Sequence[str] | None, limits: ApiLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.stop_strings or any(len(text) > limits.stop_chars for text in stops):
        expected = f"expected up to {limits.stop_strings} strings of up to {limits.stop_chars} characters"
        raise bad_request(f"stop: {expected}", "stop")
    return stops


class CompletionAsked(Asked):
    """The body of POST /v1/completions."""

    prompt: Any
    """str, [str], [id] or [[id]]: see `runtime.api.prompts`."""
    echo: bool | None = False
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = True

    def refuse_unsupported(self) -> None:
        """Raise ApiError for what is known and not supported."""
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise bad_request("best_of: not supported by this server other than equal to n", "best_of")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo: with logprobs not supported: those of a prompt are not computed", "echo")


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatAsked(Asked):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    add_special_tokens: bool | None = False

    def refuse_unsupported(self) -> None:
        """Raise ApiError; tools may stand there as long as the model is told to call none."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: expected logprobs to be true", "top_logprobs")
        if self.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice: calling tools is not supported by this server; use 'none'", "tool_choice")
        if self.tools and self.tool_choice != "none":
            raise bad_request("tools: not supported by this server; leave them out, or set tool_choice 'none'", "tools")


class TokenizeAsked(BaseModel):
    """The body of POST /tokenize: `prompt`, or the `messages` of a chat."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeAsked(BaseModel):
    """The body of POST /detokenize."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[int]
