"""Tokens of two vocabularies that mean the same, and how each side writes what the other has."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from specray.tokenization import Tokenizer
from specray.tokenization.pair import partners_problem
from specray.tokenization.partners import SAMPLE_TEXT, Partners, Writer
from tests.unit.tokenization.tiny_pair import byte_level_backend, byte_level_tokenizer, pieces_tokenizer
from tests.unit.tokenization.tiny_tokenizer import sentencepiece_tokenizer

TEXT = "harbour the quiet evening the morning é 東京 \t\n getNames(boats)"


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.vocabulary[token] for token in tokens]


def read(partners: Partners, token_ids: tuple[int, ...]) -> list[int]:
    return [own for token_id in token_ids for own in partners.read(token_id)]


@pytest.fixture(params=["byte-level reads pieces", "pieces read byte-level", "pieces with a space read"])
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    """Draft and target."""
    if request.param == "byte-level reads pieces":
        return byte_level_tokenizer(), pieces_tokenizer()
    return pieces_tokenizer(puts_space="space" in request.param), byte_level_tokenizer()


def test_tokens_of_equal_bytes_are_partners_whatever_the_vocabularies_write() -> None:
    draft, target = byte_level_tokenizer(), pieces_tokenizer()
    partners = Partners(draft, target)
    shared = partners.draft_ids
    theirs = ids(target, "▁the", "▁quiet", "harbour", "▁", "q", "<0x0A>", "<0xF0>")
    assert [shared[token_id] for token_id in theirs] == ids(
        draft, "Ġthe", "Ġquiet", "harbour", "Ġ", "q", "Ċ", "ð"
    )
    assert target.vocabulary["▁evening"] not in shared
    assert len(set(shared.values())) == len(shared)


def test_a_byte_has_the_letter_as_its_partner_and_not_its_name() -> None:
    """``<0x71>`` and ``q`` are the same text, and only one of the two may be proposed for it."""
    target = pieces_tokenizer()
    partners = Partners(byte_level_tokenizer(), target)
    letter, name = ids(target, "q", "<0x71>")
    assert letter in partners.draft_ids and name not in partners.draft_ids
    assert partners.read(name) == partners.read(letter)


def test_the_end_of_a_text_has_a_partner_by_its_role_and_its_begin_is_read() -> None:
    draft, target = byte_level_tokenizer(), pieces_tokenizer()
    partners = Partners(draft, target)
    begin, end = ids(target, "<bos>", "<eos>")
    assert partners.draft_ids[end] == draft.vocabulary["<|end|>"]
    assert partners.read(begin) == (draft.vocabulary["<s>"],)
    assert begin not in partners.draft_ids


def test_the_drafts_begin_is_what_its_tokenizer_puts_before_a_text() -> None:
    backend, target = byte_level_backend(), pieces_tokenizer()
    assert Partners(Tokenizer(backend), target).begin == ()
    backend.post_processor = TemplateProcessing("<s> $0 <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)])
    assert backend.encode("a").tokens == ["<s>", "a", "<|end|>"]
    assert Partners(Tokenizer(backend), target).begin == (0,)


def test_what_is_read_is_the_same_text(pair: tuple[Tokenizer, Tokenizer]) -> None:
    """Whole and partial characters, tabs, and words that only the target has in one token."""
    draft, target = pair
    theirs = target.encode(TEXT, add_special_tokens=False)
    own = read(Partners(draft, target), theirs)
    assert Writer(draft).bytes_of(own) == Writer(target).bytes_of(theirs) == TEXT.encode()


def test_a_token_without_a_partner_is_read_as_the_draft_would_write_it() -> None:
    draft, target = byte_level_tokenizer(), pieces_tokenizer()
    names = ids(target, "▁getNames")
    assert list(Partners(draft, target).read(names[0])) == ids(draft, "ĠgetName", "s")


def test_a_token_in_the_middle_of_a_word_is_read_without_a_space_before_it() -> None:
    draft, target = pieces_tokenizer(puts_space=True), byte_level_tokenizer()
    partners = Partners(draft, target)
    assert list(partners.read(target.vocabulary["harb"])) == ids(draft, "harb")
    assert Writer(draft).bytes_of(partners.read(target.vocabulary["Ġmorni"])) == b" morni"


def test_a_text_is_written_with_the_targets_longest_tokens() -> None:
    draft, target = byte_level_tokenizer(), pieces_tokenizer()
    drawn = draft.encode(" evening the", add_special_tokens=False)
    written = Partners(draft, target).write(drawn, target.encode("harbour", add_special_tokens=False))
    assert list(written) == ids(target, "▁evening", "▁the")


def test_a_text_goes_on_within_a_word_of_the_target() -> None:
    """Alone it would begin with another token: in the middle of a text no space is put before it."""
    draft, target = byte_level_tokenizer(), pieces_tokenizer(puts_space=True)
    drawn = draft.encode("quiet the", add_special_tokens=False)
    written = Partners(draft, target).write(drawn, ids(target, "▁"))
    assert Writer(target).bytes_of(written) == b"quiet the"


def test_a_text_ends_where_the_draft_ends_it_and_before_half_a_character() -> None:
    draft, target = byte_level_tokenizer(), pieces_tokenizer()
    partners = Partners(draft, target)
    the, end, other = ids(draft, "Ġthe", "<|end|>", "q")
    assert list(partners.write([the, end, other], [])) == ids(target, "▁the", "<eos>")
    assert list(partners.write([the, draft.vocabulary["<s>"], other], [])) == ids(target, "▁the")
    half = draft.encode("é", add_special_tokens=False)[:1]
    assert list(partners.write([the, *half], [])) == ids(target, "▁the")


def test_tokenizers_that_cannot_write_a_text_are_told_apart(pair: tuple[Tokenizer, Tokenizer]) -> None:
    draft, target = pair
    assert Partners(draft, target).can_write
    words = sentencepiece_tokenizer()
    assert not Writer(words).can_write and not Partners(words, target).can_write
    assert Writer(draft).bytes_of(draft.encode(SAMPLE_TEXT, add_special_tokens=False)).strip() == (
        SAMPLE_TEXT.strip().encode()
    )


def test_a_pair_that_cannot_work_is_told_its_overlap() -> None:
    words, target = sentencepiece_tokenizer(), byte_level_tokenizer()
    partners = Partners(words, target)
    overlap = "7 of the draft's 13 tokens are the target's as well"
    assert partners.overlap == overlap
    for mode in ("auto", "retokenize"):
        assert partners_problem(partners, mode) == (
            f"{overlap}; allowed with draft.vocabulary '{mode}': the same vocabulary, or two tokenizers that "
            "can write any text"
        )
    assert partners_problem(partners, "intersect") is None
    assert partners_problem(Partners(target, byte_level_tokenizer()), "auto") is None
