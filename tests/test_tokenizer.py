"""Text to tokens and back: as transformers does it, as a stream, and through chat templates that are not trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from runtime.chat_template import ChatTemplate
from runtime.gguf_file import read_gguf
from runtime.gguf_tokenizer import gguf_tokenizer
from runtime.model_files import open_model, smollm2_path
from runtime.tokenizer import Tokenizer, file_tokenizer, folder_tokenizer
from tests.model_folders import TINY, TINY_JSON, random_tensors, write_folder, write_gguf
from tests.smollm2 import smollm2_files

UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
WRITABLE: dict[str, Any] = {"max_codepoint": 0x3FFFF, "exclude_categories": ["Cs"], "exclude_characters": UNKNOWN}
"""Characters that SmolLM2 can say: it lacks tokens for these bytes, and for those of planes without characters."""
QUICK = settings(max_examples=100, deadline=None)
CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  \n\n\t",
    "The year 2024, 3.14159 and 1,000,000; a1b22c333 x 10^9 ½ ٣٤",
    "naïve café — “quotes” … Ünïcödé ẞ ß ﬁ",
    "你好 世界。日本語テキスト 한국어 русский العربية עברית हिन्दी ไทย",
    "emoji 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️",
    "e\u0301 versus \u00e9, zero\u200bwidth, nbsp\u00a0here, \u2028 line \u0000 nul \x7f",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\nif __name__ == '__main__':\n\tprint(f(3))\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "no<|endoftext|>spaces<repo_name>around <file_sep> special ones",
    "<|im_start |> is not special, nor is < |im_end|>",
    "It's they'll I'VE WE'RE don't 'tis '''",
    "https://example.org/a?b=c&d=%20#frag user@example.org C:\\path\\to",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8,
    "\n\n\n   \n \n",
    json.dumps({"key": [1, 2.5e-3, None, True], "nested": {"a": "b\\n"}}, indent=2),
    "22  3   4\t5",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = smollm2_files().tokenizer
    assert found is not None
    return found


# -- as transformers -------------------------------------------------------------------------------------


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    alphabets = [range(32, 127), range(0x20, 0x250), range(0x370, 0x2000), range(0x1F300, 0x1F700), range(9, 33)]
    texts = []
    for _ in range(count):
        picked = [alphabets[index] for index in rng.integers(len(alphabets), size=rng.integers(1, 60))]
        texts.append("".join(chr(int(rng.choice(list(alphabet)))) for alphabet in picked))
    return texts


@pytest.mark.slow
def test_tokens_of_smollm2_are_those_of_transformers_with_the_split_that_the_file_names(tokenizer):
    """transformers leaves out what `tokenizer.ggml.pre` says (5.24: it splits like GPT-2), so the digits are split in
    its tokenizer as the published tokenizer.json of SmolLM2 does; all else is its own.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = smollm2_path()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    own = theirs.backend_tokenizer.pre_tokenizer
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), own]
    )
    texts = CORPUS + random_texts(400)
    for text in texts:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert tokenizer.decode(ids, skip_special=False) == theirs.decode(ids), text
    theirs.backend_tokenizer.pre_tokenizer = own
    differing = [text for text in texts if theirs.encode(text) != tokenizer.encode(text)]
    assert "22  3   4\t5" in differing and len(differing) < len(texts) / 10
    for messages in CHATS:
        assert tokenizer.chat(messages) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.slow
def test_the_split_of_qwen2_is_that_of_transformers(tmp_path):
    from transformers import Qwen2Tokenizer

    file = read_gguf(smollm2_path())
    tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    ours = gguf_tokenizer(replace(file, metadata=file.metadata | {"tokenizer.ggml.pre": "qwen2"}))
    for text in [text for text in CORPUS if "<" not in text] + random_texts(400):
        assert ours.encode(text).ids == theirs.encode(text), text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("Hello 123 4567 world", [19556, 216, 33, 34, 35, 216, 36, 37, 38, 39, 905]),
        ("22  3", [34, 34, 256, 35]),  # the digits fall apart first, so that the two spaces are one token
    ],
)
def test_tokens_of_smollm2_are_known(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special=False) == text


def test_special_tokens_have_their_places(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "ab"


@QUICK
@given(st.text(alphabet=st.characters(**WRITABLE), max_size=60))
def test_decoding_undoes_encoding(text):
    files = smollm2_files()
    assert files.tokenizer is not None
    assert files.tokenizer.decode(files.tokenizer.encode(text), skip_special=False) == text


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(InputError, match="expected Unicode text"):
        tokenizer.encode("half a pair \ud83d")


# -- streams ---------------------------------------------------------------------------------------------


@QUICK
@given(ids=st.lists(st.integers(0, 600) | st.integers(0, 49151), max_size=80), before=st.integers(0, 12))
def test_a_stream_of_any_tokens_adds_up_to_the_whole_text(ids, before):
    """Random ids are mostly no UTF-8 (0..600 holds the single bytes), as those of a model with random weights are."""
    tokenizer = smollm2_files().tokenizer
    assert tokenizer is not None
    prompt, answer = ids[:before], ids[before:]
    stream = tokenizer.stream(prompt)
    text = "".join(stream.add(token) for token in answer) + stream.finish()
    assert text == tokenizer.decode(answer) or text == tokenizer.decode(ids).removeprefix(tokenizer.decode(prompt))
    assert stream.finish() == ""


@QUICK
@given(st.text(alphabet=st.characters(min_codepoint=0x80, **WRITABLE), max_size=30))
def test_a_stream_never_gives_half_a_character(text):
    tokenizer = smollm2_files().tokenizer
    assert tokenizer is not None
    stream = tokenizer.stream()
    given_out = ""
    for token in tokenizer.encode(text):
        given_out += stream.add(token)
        assert text.startswith(given_out)
    assert given_out + stream.finish() == text


def test_a_stream_gives_each_word_as_soon_as_its_token_is_there(tokenizer):
    stream = tokenizer.stream()
    ids = tokenizer.encode("The capital of France is Paris")
    assert [stream.add(token) for token in ids] == ["The", " capital", " of", " France", " is", " Paris"]
    assert stream.finish() == ""
    cut = tokenizer.stream()
    assert [cut.add(token) for token in tokenizer.encode("👍🏽")[:1]] == [""]
    assert cut.finish() == "�"


def test_a_stream_after_a_prompt_keeps_the_space_that_a_text_of_its_own_would_lose():
    """Tokenizers in the way of SentencePiece (Llama 2, Mistral) mark spaces by a bar and drop that of a start."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    inner = Inner(models.BPE({"▁the": 0, "▁end": 1, "s": 2}, []))
    inner.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(inner, {})
    alone, behind = tokenizer.stream(), tokenizer.stream([0])
    assert [alone.add(token) for token in (1, 2, 0)] == ["end", "s", " the"]
    assert [behind.add(token) for token in (1, 2, 0)] == [" end", "s", " the"]


# -- chat ------------------------------------------------------------------------------------------------

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be <b>brief</b> & {{ kind }}"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def test_the_chat_template_of_smollm2_adds_its_system_prompt_and_leaves_text_as_it_is(tokenizer):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    question = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.chat(CHATS[0]) == system + question + "<|im_start|>assistant\n"
    assert tokenizer.chat(CHATS[0], add_generation_prompt=False) == system + question
    assert "be <b>brief</b> & {{ kind }}<|im_end|>" in tokenizer.chat(CHATS[1])


def test_a_template_has_what_templates_of_checkpoints_use():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "  {% generation %}\n{{ m.content | trim }}|{% endgeneration %}\n{% endfor %}\n"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ thinking }}",
        {"bos_token": "<s>"},
    )
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": " ü<1 "}]
    assert template.render(messages, tools=[{"n": "é<"}], thinking=True) == '<s>ü<1|[{"n": "é<"}]4True'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].content.more.still }}", "has no attribute"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_or_reaches_out_ends_in_one_line(source, message):
    with pytest.raises(InputError, match=message) as error:
        ChatTemplate(source, {}, "t.jinja").render([{"role": "user", "content": "hi"}])
    assert str(error.value).startswith("t.jinja: chat template") and "\n" not in str(error.value)


# -- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    folder = write_folder(tmp_path / "m", TINY_JSON, random_tensors(TINY))
    gguf_tokenizer(read_gguf(smollm2_path())).save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_gives_the_tokenizer_its_template_and_its_tokens(folder, tokenizer):
    plain = open_model(folder, torch.float32).tokenizer
    assert plain is not None and not plain.has_chat and plain.bos_id is None
    with pytest.raises(InputError, match="no chat template"):
        plain.chat(CHATS[0])
    settings = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": "{{ bos_token }}!",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = folder_tokenizer(folder)
    assert found is not None and (found.bos_id, found.eos_id, found.chat([])) == (1, 2, "<|im_start|>!")
    assert [found.encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]
    settings["chat_template"] = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (found := folder_tokenizer(folder)) and found.chat([]) == "d"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}?")
    assert (found := folder_tokenizer(folder)) and found.chat([]) == "<|im_end|>?"
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match=r"chat_template\.jinja: chat template, line 1: Expected an expression"):
        folder_tokenizer(folder)


def test_limits_that_a_tokenizer_file_brings_along_do_not_count(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    found = folder_tokenizer(folder)
    assert found is not None and len(found.encode("The capital of France is")) == 5


@pytest.mark.parametrize(
    "content", ["", "{}", '{"model": {"type": "BPE"', '{"version": "1.0", "model": {"type": "?"}}']
)
def test_a_tokenizer_file_that_is_none_is_named(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json: no sound tokenizer: ") as error:
        open_model(folder, torch.float32)
    assert "\n" not in str(error.value)
    assert open_model(folder, torch.float32, tokenizer=False).tokenizer is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model: expected gpt2 \(byte-level BPE\), got 'llama'"),
        ({"tokenizer.ggml.pre": "klingon"}, r"tokenizer\.ggml\.pre: expected one of default, .*, got 'klingon'"),
        ({"tokenizer.ggml.merges": ["h e", "hel lo"]}, r"tokenizer\.ggml\.merges: .*`lo` out of vocabulary"),
        ({"tokenizer.ggml.merges": ["hel"]}, "expected two tokens and a space between, got 'hel'"),
        ({"tokenizer.ggml.tokens": 7}, r"tokenizer\.ggml\.tokens: expected a list, got 7"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 999}, "expected one of the 261 tokens"),
        ({"tokenizer.chat_template": "{% for %}"}, "tiny.gguf: chat template, line 1"),
    ],
)
def test_a_tokenizer_in_a_gguf_that_cannot_be_used_says_why(tmp_path, changes, message):
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", TINY, random_tensors(TINY)))
    with pytest.raises(InputError, match=message):
        file_tokenizer(replace(file, metadata=file.metadata | changes))


def test_a_gguf_that_asks_for_bos_gets_it_in_front_of_plain_text_alone(tmp_path):
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", TINY, random_tensors(TINY)))
    tokenizer = file_tokenizer(replace(file, metadata=file.metadata | {"tokenizer.ggml.add_bos_token": True}))
    plain = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello") == [1, *plain] and len(plain) == 3
    assert tokenizer.decode([1, *plain]) == "hello"


def test_a_long_text_is_encoded_and_refused_as_a_short_one_is():
    """From some length on the library is called in another way, so that other threads may run."""
    tokenizer = smollm2_files().tokenizer
    text = "\n".join(CORPUS * 20)
    assert len(text) > 4096
    assert tokenizer.encode(text) == tokenizer._inner.encode(text).ids
    assert tokenizer.encode(text[:100]) == tokenizer._inner.encode(text[:100]).ids
    with pytest.raises(InputError, match="Unicode"):
        tokenizer.encode("\ud800" * 5000)
