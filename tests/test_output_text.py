"""The text of an answer, token by token, against what one would say who sees all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from planner.errors import InputError, InvariantError
from runtime.output_text import OutputText
from runtime.sampling import Sampling

EOS = 0


@dataclass
class Pieces:
    """A decoder with a fixed text for each token."""

    texts: list[str]

    def add(self, token_id: int) -> str:
        return self.texts[token_id]

    def finish(self) -> str:
        return ""


def run(output: OutputText, token_ids: list[int]) -> tuple[list[str], int]:
    """Return the pieces that were sent, and how many tokens it took."""
    pieces = []
    for token_id in token_ids:
        pieces.append(output.add(token_id))
        if output.finish_reason:
            break
    return pieces, len(pieces)


def whole(texts: list[str], sampling: Sampling) -> tuple[str, str | None, int]:
    """Return (text, finish reason, tokens) by looking at every place where a stop string could be complete.

    `texts` are those of the tokens; None stands for an end of text.
    """
    text = ""
    for count, new in enumerate(texts, 1):
        if new is None:
            return text, "stop", count
        before, text = len(text), text + new
        for end in range(before + 1, len(text) + 1) if count >= sampling.min_tokens else ():
            found = [stop for stop in sampling.stop if text[:end].endswith(stop)]
            if found:
                return text[: end - max(map(len, found))], "stop", count
        if count == sampling.max_tokens:
            return text, "length", count
    return text, None, len(texts)


TEXTS = st.lists(st.text("ab", max_size=4), min_size=1, max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(TEXTS, STOPS, st.integers(0, 6), st.integers(0, 8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_text_is_what_one_would_say_who_sees_it_whole(texts, stops, minimum, more, ends):
    sampling = Sampling(max_tokens=max(1, minimum + more), min_tokens=minimum, stop=tuple(stops))
    ids = [*range(1, len(texts) + 1), *([EOS] if ends and len(texts) >= minimum else [])]
    output = OutputText(sampling, (EOS,), Pieces(["", *texts]))
    _, used = run(output, ids)
    text, reason, count = whole([*texts, None] if EOS in ids else texts, sampling)
    assert (output.finish_reason, used) == (reason, count)
    if reason:
        assert output.text == text


@given(TEXTS, STOPS, st.sampled_from([0, 3]))
@settings(max_examples=80, deadline=None)
def test_what_was_sent_stands_and_no_more_is_held_back_than_a_stop_string_needs(texts, stops, minimum):
    sampling = Sampling(max_tokens=99, min_tokens=minimum, stop=tuple(stops))
    output = OutputText(sampling, (EOS,), Pieces(["", *texts]))
    sent, seen = "", ""
    for token_id in range(1, len(texts) + 1):
        sent += output.add(token_id)
        seen += texts[token_id - 1]
        if output.finish_reason:
            break
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    sent += "" if output.finish_reason else output.add(EOS)
    assert output.text == sent
    assert minimum or not any(stop in sent for stop in stops)


@given(st.text("ab", min_size=1, max_size=20), STOPS, st.data())
@settings(max_examples=80, deadline=None)
def test_the_text_does_not_depend_on_where_tokens_begin_and_end(text, stops, data):
    answers = set()
    for _ in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
        texts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        output = OutputText(Sampling(max_tokens=99, stop=tuple(stops)), (EOS,), Pieces(["", *texts]))
        run(output, [*range(1, len(texts) + 1), EOS])
        answers.add((output.text, output.finish_reason, output.stopped_by))
    assert len(answers) == 1


# ---- with a real tokenizer, of single bytes


@dataclass
class Bytes:
    """A decoder of single bytes around the library's own stream."""

    inner: tokenizers.Tokenizer
    ids: list[int] = field(default_factory=list)
    stream: DecodeStream = field(default_factory=DecodeStream)
    given: int = 0

    def add(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.stream.step(self.inner, token_id) or ""
        self.given += len(text)
        return text

    def finish(self) -> str:
        return self.inner.decode(self.ids)[self.given :]


def byte_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


@given(st.text(st.sampled_from("aé€🙂\u0301x"), min_size=1, max_size=15), STOPS.map(lambda s: [*s, "é€", "🙂x"]))
@settings(max_examples=50, deadline=None)
def test_characters_of_several_tokens_come_whole_and_stop_strings_are_found_in_them(text, stops):
    inner = byte_tokenizer()
    output = OutputText(Sampling(max_tokens=999, stop=tuple(stops)), (), Bytes(inner))
    pieces, _ = run(output, inner.encode(text).ids)
    found = whole(list(text), Sampling(max_tokens=999, stop=tuple(stops)))
    assert not any("\ufffd" in piece for piece in pieces)
    if found[1]:
        assert (output.text, output.finish_reason) == (found[0], "stop")
    else:
        assert text.startswith(output.text)


@pytest.mark.parametrize(("used", "expected"), [(3, "ab\ufffd"), (4, "ab\ufffd"), (5, "ab\ufffd"), (6, "ab🙂")])
def test_half_a_character_at_the_end_is_told_once_and_never_before(used, expected):
    inner = byte_tokenizer()
    output = OutputText(Sampling(max_tokens=used), (), Bytes(inner))
    pieces, _ = run(output, inner.encode("ab🙂").ids)
    assert "".join(pieces) == output.text == expected
    assert not any("\ufffd" in piece for piece in pieces[:-1])


# ---- worked by hand


def answer(texts: list[str], **settings) -> tuple[list[str], OutputText]:
    output = OutputText(Sampling(**{"max_tokens": 99, **settings}), (EOS,), Pieces(["", *texts]))
    pieces, _ = run(output, list(range(1, len(texts) + 1)))
    return pieces, output


def test_a_stop_string_over_three_tokens_is_held_back_and_cut_off():
    pieces, output = answer(["Hi", "\nUs", "er", ": what"], stop=("\nUser:",))
    assert pieces == ["Hi", "", "", ""]
    assert (output.text, output.finish_reason, output.stopped_by) == ("Hi", "stop", "\nUser:")


def test_what_looked_like_a_stop_string_is_sent_once_it_cannot_be_one():
    assert answer(["a", "\nUs", "ing", "\n"], stop=("\nUser:",))[0] == ["a", "", "\nUsing", ""]


def test_what_is_held_back_is_sent_when_the_answer_ends():
    assert answer(["a", "\nUs"], stop=("\nUser:",), max_tokens=2)[0] == ["a", "\nUs"]


def test_a_stop_string_in_the_last_token_counts_as_a_stop():
    _, output = answer(["a", "b"], stop=("b",), max_tokens=2)
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_an_end_of_text_adds_no_text_and_counts_as_a_token():
    output = OutputText(Sampling(max_tokens=2), (EOS,), Pieces(["<eos>", "a"]))
    assert (output.add(1), output.add(EOS)) == ("a", "")
    assert (output.finish_reason, output.stopped_by, output.tokens) == ("stop", EOS, 2)


def test_an_ignored_end_of_text_is_a_token_like_any_other_but_a_stop_token_is_none():
    output = OutputText(
        Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(2,)), (EOS,), Pieces(["<eos>", "a", "b"])
    )
    assert [output.add(token_id) for token_id in (EOS, 1, 2)] == ["<eos>", "a", ""]
    assert (output.finish_reason, output.stopped_by) == ("stop", 2)


def test_ends_of_text_are_banned_until_min_tokens_are_out():
    output = OutputText(Sampling(max_tokens=9, min_tokens=2, stop_token_ids=(7, 3)), (EOS,), Pieces(["", "a"]))
    banned = [output.banned]
    for token_id in (1, 1):
        output.add(token_id)
        banned.append(output.banned)
    assert banned == [(0, 3, 7), (0, 3, 7), ()]


def test_an_end_of_text_that_came_before_min_tokens_all_the_same_is_a_token_like_any_other():
    output = OutputText(Sampling(max_tokens=9, min_tokens=1), (EOS,), Pieces(["<eos>"]))
    assert (output.add(EOS), output.finish_reason) == ("<eos>", None)
    assert (output.add(EOS), output.finish_reason) == ("", "stop")


def test_half_a_character_before_an_end_of_text_is_told():
    inner = byte_tokenizer()
    ids = inner.encode("ab🙂").ids[:4]
    output = OutputText(Sampling(max_tokens=99), (999,), Bytes(inner))
    assert run(output, [*ids, 999])[0] == ["a", "b", "", "", "\ufffd"]


def test_a_stop_string_before_min_tokens_is_not_held_back_for_itself():
    assert answer(["ab", "c"], stop=("ab", "zzzzz"), min_tokens=9)[0] == ["ab", "c"]


def test_a_stop_string_counts_if_a_token_from_min_tokens_on_completes_it():
    assert answer(["x", "st", "op", "y"], stop=("stop",), min_tokens=3)[1].text == "x"
    assert answer(["x", "st", "op", "y", "stop"], stop=("stop",), min_tokens=4)[1].text == "xstopy"


def test_a_token_after_the_end_is_a_mistake_of_ours():
    _, output = answer(["a"], max_tokens=1)
    with pytest.raises(InvariantError, match="token 1 came after an answer's end"):
        output.add(1)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop: expected strings that are not empty"):
        Sampling(stop=("a", ""))
