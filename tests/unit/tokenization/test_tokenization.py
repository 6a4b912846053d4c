"""Tokenizer, incremental detokenisation and stop strings."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel

from specray.errors import InvalidRequestError
from specray.tokenization import ChatMessage, TextStream, Tokenizer, make_stop_matcher
from specray.tokenization.decoders import WindowDecoder
from tests.unit.tokenization.tiny_tokenizer import (
    BOS,
    EOS,
    PIECES,
    sentencepiece_tokenizer,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
VOCAB_SIZE = 2 + 256 + 6


def stream_all(ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> tuple[str, TextStream]:
    """Whole text of a stream, fed in pieces that end at the cuts."""
    stream = TextStream(TOKENIZER, stop)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds))
    return text + stream.finish(), stream


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    table = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(2, 258)}
    return [table[bytes([byte])] for byte in data]


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = "hello hello world é🎉 " * 20_000
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: found.append(TOKENIZER.encode(text, add_special_tokens=False)))
    num_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10
    assert found == [tuple(TOKENIZER._backend.encode(text, add_special_tokens=False).ids)]


def test_encode_merges_and_decode_gives_the_text_back() -> None:
    text = "def hello(): # é 🎉\n"
    ids = TOKENIZER.encode(text)
    assert ids[0] == 259  # "def" is one token: the second merge.
    assert len(ids) < len(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.vocab_size == VOCAB_SIZE


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=40), cuts=st.lists(st.integers(0, 100), max_size=6)
)
def test_deltas_concatenated_are_the_decoded_text_for_any_tokens_and_chunking(
    ids: list[int], cuts: list[int]
) -> None:
    assert stream_all(ids, cuts)[0] == TOKENIZER.decode(ids)


def test_no_part_of_a_character_is_shown_before_its_last_byte() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.push([token_id]) for token_id in byte_ids("a🎉b".encode())] == [
        "a", "", "", "", "🎉", "b",
    ]  # fmt: skip
    assert stream.finish() == ""


def test_replacement_character_comes_only_at_the_end_of_a_cut_character() -> None:
    stream = TextStream(TOKENIZER)
    assert [stream.push([token_id]) for token_id in byte_ids("é🎉".encode())[:4]] == ["", "é", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.num_chars == 1


def test_special_tokens_are_no_text() -> None:
    assert stream_all([BOS, *byte_ids(b"hi"), EOS], [])[0] == "hi"


def test_stop_string_is_cut_and_nothing_of_it_is_ever_shown() -> None:
    stream = TextStream(TOKENIZER, ["</end>"])
    shown = [stream.push([token_id]) for token_id in byte_ids(b"ab</en</end>cd")]
    assert shown == ["a", "b", "", "", "", "", "</en", "", "", "", "", "", "", ""]
    assert stream.stop_reason == "</end>"
    assert stream.finish() == ""


def test_beginning_of_a_stop_string_is_shown_when_the_output_ends_with_it() -> None:
    stream = TextStream(TOKENIZER, ["xyz"])
    assert stream.push(byte_ids(b"axy")) == "a"
    assert stream.finish() == "xy"
    assert stream.stop_reason is None


@pytest.mark.parametrize(
    ("stop", "text", "reason", "shown"),
    [
        (("b", "abc"), b"abc", "b", "a"),  # complete first counts, though the other begins earlier
        (("b", "ab"), b"xab", "ab", "x"),  # complete at once: the longest
        (("aab",), b"aaab", "aab", "a"),  # overlaps with itself
        (("é",), "xéy".encode(), "é", "x"),  # a character over two tokens
        (("\n\n",), b"a\nb\n\nc", "\n\n", "a\nb"),
    ],
)
def test_which_stop_string_counts(stop: tuple[str, ...], text: bytes, reason: str, shown: str) -> None:
    told, stream = stream_all(byte_ids(text), [1, 2, 3], stop)
    assert (told, stream.stop_reason) == (shown, reason)


def test_one_token_may_hold_the_stop_string_and_what_follows() -> None:
    (hello,) = TOKENIZER.encode("hello")
    stream = TextStream(TOKENIZER, ["el"])
    assert stream.push([hello]) == "h"
    assert stream.stop_reason == "el"


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=20),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_stop_strings_cut_like_a_search_of_the_whole_text(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    ends = [(text.find(one) + len(one), text.find(one), one) for one in stop if one in text]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    told, stream = stream_all(byte_ids(text.encode()), cuts, tuple(stop))
    assert (told, stream.stop_reason) == expected


def test_stop_matcher_names_the_string_at_the_token_that_completes_it() -> None:
    matcher = make_stop_matcher(TOKENIZER)(["lo w", "zzz", "d"], ())
    results = [matcher.push([token_id]) for token_id in TOKENIZER.encode("hello world")]
    assert results == [None, None, "lo w", None, None, None, "d"]


def test_stop_matcher_names_the_first_of_several_in_one_push() -> None:
    matcher = make_stop_matcher(TOKENIZER)(["a", "b"], ())
    assert matcher.push(byte_ids(b"xbxa")) == "b"
    assert matcher.push(byte_ids(b"xa")) == "a"


def test_stop_string_within_the_first_min_tokens_is_text() -> None:
    stream = TextStream(TOKENIZER, ["ab"], min_tokens=2)
    assert stream.push(byte_ids(b"abxab")) == "abx"
    assert stream.stop_reason == "ab"
    assert TextStream(TOKENIZER, ["ab"], min_tokens=1).push(byte_ids(b"abx")) == ""


# Vocabularies that are not byte-level

WORDS = sentencepiece_tokenizer()
MY, NAME, IS, JOHN, BARE_JOHN, DOT, SPACE, C3, A9, NEWLINE, Z, BEGIN, ASSISTANT = range(len(PIECES) + 2)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, ASSISTANT), max_size=12),
    ids=st.lists(st.integers(0, ASSISTANT), max_size=20),
)
def test_deltas_are_the_text_of_prompt_and_output_without_the_prompts(
    prompt: list[int], ids: list[int]
) -> None:
    stream = TextStream(WORDS, prompt_token_ids=prompt)
    text = "".join(stream.push([token_id]) for token_id in ids)
    before, both = WORDS.decode(prompt), WORDS.decode([*prompt, *ids])
    # A byte that completes nothing makes its neighbours replacement characters as well: see ByteFallback.
    if "\ufffd" not in before + both:
        assert before + text + stream.finish() == both


def test_window_decoder_keeps_the_space_between_words_and_waits_for_the_second_byte() -> None:
    stream = TextStream(WORDS)
    shown = [stream.push([token_id]) for token_id in [MY, NAME, DOT, C3, A9, MY]]
    assert shown == ["My", " name", ".", "", "é", " My"]


@pytest.mark.parametrize(
    ("token_id", "text", "most"),
    [
        (C3, "\ufffd" * 200, 32),
        (ASSISTANT, "", 0),
        (2000, "", 0),
        (NAME, " name" * 200, 2),
    ],
)
def test_tokens_that_complete_no_text_do_not_pile_up_in_the_window(
    token_id: int, text: str, most: int
) -> None:
    """Every push decodes the window: a growing window would take time quadratic in the output's length."""

    class Watched:
        longest = 0
        is_special, token_bytes = WORDS.is_special, WORDS.token_bytes

        def decode(self, token_ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return WORDS.decode(token_ids)

    watched = Watched()
    decoder = WindowDecoder(watched, [MY])
    watched.longest = 0
    shown = "".join(decoder.push(token_id) for _ in range(200)) + decoder.finish()
    assert shown == text
    assert watched.longest <= max(most, 1)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([], "John."),  # the first word of all
        ([BEGIN], "John."),
        ([BEGIN, MY, NAME, IS], " John."),
        ([BEGIN, MY, NEWLINE], " John."),
        ([BEGIN, MY, ASSISTANT], " John."),
        ([MY, *[ASSISTANT] * 40], " John."),  # special tokens are nothing to the decoder, however many
        ([MY, *[2000] * 40], " John."),  # nor are ids beyond the vocabulary
        ([SPACE], " John."),
        ([MY, SPACE, SPACE, SPACE, SPACE, SPACE, SPACE], " John."),
        ([MY, C3, A9], " John."),
    ],
)
def test_space_before_the_first_word_of_an_output_is_that_after_its_prompt(
    prompt: list[int], shown: str
) -> None:
    assert WORDS.decode([*prompt, JOHN, DOT]) == WORDS.decode(prompt) + shown
    stream = TextStream(WORDS, prompt_token_ids=prompt)
    assert stream.push([JOHN, DOT]) + stream.finish() == shown
    assert stream.num_chars == len(shown), "the prompt's are not counted"


def test_bytes_after_a_prompt_whose_tail_begins_within_a_character() -> None:
    # Six bytes, of which the last five are looked at.
    stream = TextStream(WORDS, prompt_token_ids=[MY, C3, A9, C3, A9, C3, A9])
    assert [stream.push([token_id]) for token_id in (C3, A9, DOT)] == ["", "é", "."]


def test_character_that_the_prompt_begins_is_shown_when_the_output_ends_it() -> None:
    stream = TextStream(WORDS, prompt_token_ids=[MY, C3])
    assert stream.push([A9, JOHN]) == "é John"


def test_stop_string_may_begin_with_the_space_after_the_prompt() -> None:
    matcher = make_stop_matcher(WORDS)([" John"], (MY, NAME, IS))
    assert [matcher.push([token_id]) for token_id in (JOHN, DOT)] == [" John", None]
    assert make_stop_matcher(WORDS)([" John"], ()).push([JOHN]) is None
    stream = TextStream(WORDS, [" John"], prompt_token_ids=(MY, NAME, IS))
    assert (stream.push([JOHN, DOT]), stream.stop_reason) == ("", " John")


@pytest.mark.slow
def test_chat_answer_begins_as_its_own_tokenizer_decodes_it_after_the_template() -> None:
    template = "{{ messages[0]['content'] }}<|assistant|>"
    tokenizer = sentencepiece_tokenizer(chat_template=template)
    prompt = tokenizer.encode_chat([ChatMessage("user", "My name")])
    assert prompt == (MY, NAME, ASSISTANT)
    assert TextStream(tokenizer, prompt_token_ids=prompt).push([JOHN, DOT]) == " John."
    assert TextStream(tokenizer, prompt_token_ids=prompt).push([BARE_JOHN]) == "John"


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=8),
    ids=st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=12),
)
def test_prompt_changes_nothing_for_a_byte_level_vocabulary(prompt: list[int], ids: list[int]) -> None:
    stream = TextStream(TOKENIZER, prompt_token_ids=prompt)
    assert stream.push(ids) + stream.finish() == TOKENIZER.decode(ids)


def test_token_text_of_sentencepiece_tells_words_with_and_without_a_space_apart() -> None:
    assert [WORDS.token_text(token_id) for token_id in (JOHN, BARE_JOHN, SPACE)] == [" John", "John", " "]
    assert WORDS.token_text(BEGIN) == "<s>"
    assert WORDS.token_text(len(PIECES) + 2) == ""


def test_byte_pieces_of_sentencepiece_are_their_byte() -> None:
    pieces = [WORDS.token_bytes(token_id) for token_id in (C3, A9, NEWLINE, Z)]
    assert pieces == [b"\xc3", b"\xa9", b"\n", b"Z"]
    assert WORDS.token_text(C3) == "bytes:\\xc3"


@pytest.mark.parametrize(
    ("decoder", "texts"),
    [
        (decoders.Metaspace(), [" a", "a", "<0x41>"]),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]), [" a", "a", "<0x41>"]),
        (decoders.Sequence([decoders.Sequence([decoders.ByteFallback()])]), ["▁a", "a", "A"]),
        (decoders.WordPiece(), ["▁a", "a", "<0x41>"]),
        (None, ["▁a", "a", "<0x41>"]),
    ],
    ids=["metaspace", "no bytes", "bytes alone, nested", "word pieces", "none"],
)
def test_pieces_are_read_as_the_decoder_reads_them(decoder: Any, texts: list[str]) -> None:
    backend = Backend(WordLevel({"▁a": 0, "a": 1, "<0x41>": 2, "[UNK]": 3}, "[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    assert [Tokenizer(backend).token_text(token_id) for token_id in range(3)] == texts


def test_token_text_names_the_bytes_of_an_incomplete_character() -> None:
    first, second = byte_ids("é".encode())
    assert TOKENIZER.token_text(first) == "bytes:\\xc3"
    assert TOKENIZER.token_bytes(second) == b"\xa9"
    assert TOKENIZER.token_text(EOS) == "</s>"
    assert TOKENIZER.token_text(VOCAB_SIZE + 1) == ""


def test_chat_is_rendered_by_the_template_and_encoded_without_another_bos() -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hello")]
    assert TOKENIZER.rendered(messages).text == "[system]be brief[user]hello[assistant]"
    assert TOKENIZER.decode(TOKENIZER.encode_chat(messages)) == "[system]be brief[user]hello[assistant]"


def test_chat_that_the_template_refuses_is_the_users_error() -> None:
    with pytest.raises(InvalidRequestError, match="the user begins") as caught:
        TOKENIZER.encode_chat([ChatMessage("assistant", "hi")])
    assert caught.value.field == "messages"


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tiny_tokenizer(chat_template=None).encode_chat([ChatMessage("user", "hi")])
