"""Special tokens in stop strings, and in text that shows them."""

from __future__ import annotations

import pytest

from specray.requests import TextOptions
from specray.tokenization import TextStream, Tokenizer, make_stop_matcher
from tests.unit.tokenization.tiny_tokenizer import BOS, EOS, PIECES, sentencepiece_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
A, B = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
SHOWN = TextOptions(skip_special_tokens=False)


def cut(stop: str, ids: list[int], options: TextOptions | None = None) -> tuple[str, str | None]:
    """Text of the ids and the stop reason, however the ids are split."""
    whole = TextStream(TOKENIZER, [stop], options=options)
    text = whole.push(ids) + whole.finish()
    single = TextStream(TOKENIZER, [stop], options=options)
    assert "".join(single.push([token_id]) for token_id in ids) + single.finish() == text
    return text, whole.stop_reason


@pytest.mark.parametrize("options", [None, SHOWN], ids=["hidden", "shown"])
@pytest.mark.parametrize(
    ("stop", "ids", "text"),
    [
        ("<s>", [A, BOS, B], "a"),
        ("b<s>", [A, B, BOS, B], "a"),
        ("<s></s>", [A, BOS, EOS, B], "a"),
        ("<s>b", [A, BOS, B], "a"),
    ],
)
def test_stop_string_that_contains_special_tokens(
    stop: str, ids: list[int], text: str, options: TextOptions | None
) -> None:
    assert cut(stop, ids, options) == (text, stop)
    matcher = make_stop_matcher(TOKENIZER)([stop], ())
    pushed = [matcher.push([token_id]) for token_id in ids]
    assert [entry for entry in pushed if entry] == [stop]


@pytest.mark.parametrize(("options", "text"), [(None, "ab"), (SHOWN, "a<s>b")], ids=["hidden", "shown"])
@pytest.mark.parametrize("stop", ["s", "<", "s>b"])
def test_stop_string_does_not_match_a_part_of_a_special_token(
    stop: str, options: TextOptions | None, text: str
) -> None:
    assert cut(stop, [A, BOS, B], options) == (text, None)
    assert make_stop_matcher(TOKENIZER)([stop], ()).push([A, BOS, B]) is None


def test_text_that_looks_like_a_special_token_is_not_one() -> None:
    letters = [TOKENIZER.encode(char)[0] for char in "<s>"]
    assert BOS not in letters
    assert cut("<s>", [A, *letters, B]) == ("a<s>b", None)


def test_special_token_that_is_hidden_does_not_separate_text() -> None:
    assert cut("ab", [A, BOS, B, A]) == ("", "ab")


def test_held_back_special_token_is_shown_when_nothing_came_of_it() -> None:
    stream = TextStream(TOKENIZER, ["<s></s>"], options=SHOWN)
    assert stream.push([A, BOS]) == "a"
    assert stream.push([B]) == "<s>b"
    assert stream.num_chars == len("a<s>b")


def test_stop_string_is_the_end_of_the_text_where_it_is_asked_for() -> None:
    included = TextOptions(include_stop=True)
    assert cut("b", [A, B, A], included) == ("ab", "b")
    assert cut("b<s>", [A, B, BOS], included) == ("ab<s>", "b<s>")


def test_character_that_is_cut_by_a_shown_special_token_stays_before_it() -> None:
    stream = TextStream(TOKENIZER, options=SHOWN)
    first, second = byte_ids(TOKENIZER)
    assert stream.push([first, BOS, second, A]) + stream.finish() == "\ufffd<s>\ufffda"
    hidden = TextStream(TOKENIZER)
    assert hidden.push([first, BOS, second, A]) == "éa"


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the single bytes of é."""
    by_piece = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [by_piece[bytes([byte])] for byte in "é".encode()]


def test_words_of_sentencepiece_keep_their_space_behind_a_shown_special_token() -> None:
    words = sentencepiece_tokenizer()
    john = PIECES.index("▁John")
    bos = words.special_names["<s>"]
    stream = TextStream(words, options=SHOWN)
    assert stream.push([john, bos, john]) + stream.finish() == "John<s> John"
    assert TextStream(words).push([john, bos, john]) == "John John"


@pytest.mark.parametrize("stop", ["ab", "<s>", "</s>b"])
def test_some_special_tokens_are_shown_though_others_are_hidden(stop: str) -> None:
    options = TextOptions(shown_token_ids=frozenset([BOS]))
    text = {"ab": "a<s>b", "<s>": "a", "</s>b": "a<s>"}[stop]
    assert cut(stop, [A, BOS, EOS, B], options) == (text, None if stop == "ab" else stop)
