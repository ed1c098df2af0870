"""Text to token ids and back, whole or as a stream, by the library `tokenizers`; and a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from planner.errors import Fault, InputError
from planner.specs.base import read_text
from runtime.chat_template import ChatTemplate
from runtime.gguf_file import GgufFile
from runtime.gguf_tokenizer import gguf_tokenizer
from runtime.json_file import read_json
from runtime.token_bytes import piece_bytes

_CONTEXT_TOKENS = 8
_LONG_CHARS = 2048
"""From here on a text is encoded as a batch of one: only then does the library let other threads run meanwhile."""
_UNFINISHED = "�"
_ROLES = ("bos", "eos", "pad", "unk")


class Tokenizer:
    """The tokenizer of one model. `special_tokens` holds the texts of those of bos, eos, pad and unk that it has."""

    def __init__(
        self, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str], template: ChatTemplate | None = None
    ):
        inner.no_truncation()  # a tokenizer.json may bring the limits of some training run along
        inner.no_padding()
        self._inner, self._template = inner, template
        self.special_tokens = dict(special_tokens)
        self._added_ids: frozenset[int] | None = None

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens; a model's embedding may have more rows, but no id is above it."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """Return the token that begins a text, or None."""
        return self._id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Return the token that ends a text, or None. ModelConfig.eos_ids holds all that end an answer."""
        return self._id("eos_token")

    def _id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        found: int | None = self._inner.token_to_id(token) if token is not None else None
        return found

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return token ids. `add_special` puts bos in front where the model wants it; a chat's text has it already.

        Special tokens that stand in the text are read as such. Raises InputError for text that is not Unicode.
        """
        try:
            if len(text) < _LONG_CHARS:
                return list(self._inner.encode(text, add_special_tokens=add_special).ids)
            return list(self._inner.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except (UnicodeEncodeError, TypeError):
            raise InputError(f"expected Unicode text, got {text[:40]!r}") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; nothing for an id that is no token."""
        piece = self._inner.id_to_token(token_id)
        if piece is None:
            return b""
        byte_level = isinstance(self._inner.decoder, ByteLevel) and token_id not in self._added()
        return piece_bytes(piece, byte_level=byte_level)

    def _added(self) -> frozenset[int]:
        if self._added_ids is None:
            self._added_ids = frozenset(self._inner.get_added_tokens_decoder())
        return self._added_ids

    def stream(self, after: Sequence[int] = (), *, skip_special: bool = True) -> TextStream:
        """Return a decoder for tokens that come one by one, `after` those of a prompt."""
        return TextStream(self._inner, after, skip_special)

    @property
    def has_chat(self) -> bool:
        """Return True when the model came with a chat template."""
        return self._template is not None

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a conversation; encode it with add_special=False. See ChatTemplate.render."""
        if self._template is None:
            raise InputError("this model has no chat template; send a plain prompt")
        return self._template.render(messages, **variables)


class TextStream:
    """Text of a growing answer, given out as soon as it can no longer change: never half of a character."""

    def __init__(self, inner: tokenizers.Tokenizer, after: Sequence[int], skip_special: bool):
        self._inner, self._skip = inner, skip_special
        before = list(after[-_CONTEXT_TOKENS:])
        if self._decode(before).endswith(_UNFINISHED):
            before = []  # the prompt ends within a character: nothing can be told apart from there
        self._ids, self._given = before, len(self._decode(before))
        self._stream = DecodeStream(ids=before, skip_special_tokens=skip_special)

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often nothing."""
        self._ids.append(token_id)
        text: str = self._stream.step(self._inner, token_id) or ""
        self._given += len(text)
        return text

    def finish(self) -> str:
        """Return what is left when no token follows: the beginning of a character becomes U+FFFD."""
        rest = self._decode(self._ids)[self._given :]
        self._given += len(rest)
        return rest

    def _decode(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=self._skip))


def folder_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face directory, or None when it has no tokenizer.json. Raises InputError."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(Fault(f"no sound tokenizer: {' '.join(str(error).split())[:200]}", str(path))) from None
    beside = folder / "tokenizer_config.json"
    settings = read_json(beside) if beside.is_file() else {}
    special = {key: text for key in _role_keys() if (text := _text(settings.get(key))) is not None}
    return Tokenizer(inner, special, _folder_template(folder, settings, special))


def file_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer inside a GGUF file. Raises InputError."""
    inner = gguf_tokenizer(file)
    keys = zip(_role_keys(), ("bos", "eos", "padding", "unknown"), strict=True)
    ids = {role: file.get(f"tokenizer.ggml.{key}_token_id", int) for role, key in keys}
    special = {role: text for role, index in ids.items() if index is not None and (text := inner.id_to_token(index))}
    source = file.get("tokenizer.chat_template", str)
    return Tokenizer(inner, special, ChatTemplate(source, special, str(file.path)) if source else None)


def _role_keys() -> list[str]:
    return [f"{role}_token" for role in _ROLES]


def _text(value: Any) -> str | None:
    """Return a token's text, which stands alone or under `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """Return the chat template: of its own file, else of the settings, where it may be one of several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(read_text(path), special, str(path))
    given = settings.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return ChatTemplate(given, special, str(folder / "tokenizer_config.json")) if isinstance(given, str) else None
