"""The tokenizer wrapper, incremental detokenisation and stop strings."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import BOS, EOS, tiny_backend, tiny_tokenizer, write_tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordLevel

from specray.errors import ConfigError, InvalidRequestError
from specray.tokenization import (
    ChatMessage,
    TextStream,
    Tokenizer,
    make_stop_matcher,
    vocabulary_fingerprint,
)

TOKENIZER = tiny_tokenizer()
VOCAB_SIZE = 2 + 256 + 6


def stream_all(ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> tuple[str, TextStream]:
    """The whole text of a stream fed in pieces that end at the cuts."""
    stream = TextStream(TOKENIZER, stop)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds))
    return text + stream.finish(), stream


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    table = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(2, 258)}
    return [table[bytes([byte])] for byte in data]


def test_encode_merges_and_decode_gives_the_text_back() -> None:
    text = "def hello(): # é 🎉\n"
    ids = TOKENIZER.encode(text)
    assert ids[0] == 259  # "def" is one token: the second merge.
    assert len(ids) < len(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.vocab_size == VOCAB_SIZE


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    matcher = make_stop_matcher(TOKENIZER)(["lo w", "zzz", "d"])
    results = [matcher.push([token_id]) for token_id in TOKENIZER.encode("hello world")]
    assert results == [None, None, "lo w", None, None, None, "d"]


def test_stop_matcher_names_the_first_of_several_in_one_push() -> None:
    matcher = make_stop_matcher(TOKENIZER)(["a", "b"])
    assert matcher.push(byte_ids(b"xbxa")) == "b"
    assert matcher.push(byte_ids(b"xa")) == "a"


def test_stop_string_within_the_first_min_tokens_is_text() -> None:
    stream = TextStream(TOKENIZER, ["ab"], min_tokens=2)
    assert stream.push(byte_ids(b"abxab")) == "abx"
    assert stream.stop_reason == "ab"
    assert TextStream(TOKENIZER, ["ab"], min_tokens=1).push(byte_ids(b"abx")) == ""


def word_tokenizer() -> Tokenizer:
    """Not byte-level: pieces with a leading mark for a space, as SentencePiece has them."""
    backend = Backend(WordLevel({"▁a": 0, "▁b": 1, "c": 2, "<0xC3>": 3, "<0xA9>": 4, "[UNK]": 5}, "[UNK]"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 4), max_size=20))
def test_deltas_are_the_decoded_text_for_a_vocabulary_that_is_not_byte_level(ids: list[int]) -> None:
    tokenizer = word_tokenizer()
    stream = TextStream(tokenizer)
    text = "".join(stream.push([token_id]) for token_id in ids)
    # A byte that completes nothing makes its neighbours replacement characters as well: see ByteFallback.
    if "\ufffd" not in tokenizer.decode(ids):
        assert text + stream.finish() == tokenizer.decode(ids)


def test_window_decoder_keeps_the_space_between_words_and_waits_for_the_second_byte() -> None:
    stream = TextStream(word_tokenizer())
    assert [stream.push([token_id]) for token_id in [0, 1, 2, 3, 4, 0]] == ["a", " b", "c", "", "é", " a"]


def test_token_text_names_the_bytes_of_an_incomplete_character() -> None:
    first, second = byte_ids("é".encode())
    assert TOKENIZER.token_text(first) == "bytes:\\xc3"
    assert TOKENIZER.token_bytes(second) == b"\xa9"
    assert TOKENIZER.token_text(EOS) == "</s>"
    assert TOKENIZER.token_text(VOCAB_SIZE + 1) == ""


def test_chat_is_rendered_by_the_template_and_encoded_without_another_bos() -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hello")]
    assert TOKENIZER.render_chat(messages) == "[system]be brief[user]hello[assistant]"
    assert TOKENIZER.decode(TOKENIZER.encode_chat(messages)) == "[system]be brief[user]hello[assistant]"


def test_chat_that_the_template_refuses_is_the_users_error() -> None:
    with pytest.raises(InvalidRequestError, match="the user begins") as caught:
        TOKENIZER.encode_chat([ChatMessage("assistant", "hi")])
    assert caught.value.field == "messages"


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tiny_tokenizer(chat_template=None).encode_chat([ChatMessage("user", "hi")])


def test_load_reads_eos_from_all_three_files(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8, "model_type": "llama"}))
    assert Tokenizer.load(tmp_path).eos_token_ids == (EOS, 7, 8, 9)


def test_load_through_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    # A flag that may change the post-processor sends loading through transformers.
    write_tiny_tokenizer(tmp_path, add_eos_token=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("def hello")[:2] == TOKENIZER.encode("def hello")[:2]
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert loaded.has_chat_template
    assert loaded.eos_token_ids == (EOS,)


def test_load_of_a_verbatim_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    import subprocess

    code = (
        "import sys; from specray.tokenization import Tokenizer; "
        f"t = Tokenizer.load({str(tmp_path)!r}); assert t.encode('def') == (259,); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_load_of_a_damaged_file_is_a_config_error(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match=r"tokenizer"):
        Tokenizer.load(tmp_path)


def test_fingerprint_changes_with_one_token() -> None:
    vocabulary = tiny_backend().get_vocab(with_added_tokens=True)
    assert vocabulary_fingerprint(vocabulary) == TOKENIZER.fingerprint
    swapped = {**vocabulary, "a": vocabulary["b"], "b": vocabulary["a"]}
    assert vocabulary_fingerprint(swapped) != TOKENIZER.fingerprint
