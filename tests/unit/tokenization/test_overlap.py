"""What is said of two vocabularies that differ."""

from __future__ import annotations

import pytest

from specray.tokenization.fingerprint import ModelVocabulary
from specray.tokenization.pair import difference

TARGET = {"<s>": 0, "a": 1, "b": 2, "c": 3}


def vocabulary(ids: dict[str, int]) -> ModelVocabulary:
    return ModelVocabulary(lambda: ids)


def test_equal_vocabularies_in_any_order() -> None:
    assert difference(vocabulary(dict(reversed(TARGET.items()))), vocabulary(TARGET)) is None


def test_equal_fingerprints_need_no_tokens() -> None:
    def read() -> dict[str, int]:
        raise AssertionError("not asked for")

    assert difference(ModelVocabulary(read, ("ab", 4)), ModelVocabulary(read, ("ab", 4))) is None


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (
            {"<s>": 0, "a": 2, "b": 1, "c": 3},
            "2 of 4 token ids mean the same string; the first that does not is 1, 'b' in the draft and "
            "'a' in the target",
        ),
        (
            {**TARGET, "<image>": 9},
            "4 of 5 token ids mean the same string; the first that does not is 9, '<image>' in the draft "
            "and unknown in the target",
        ),
        (
            {"<s>": 0, "a": 1},
            "2 of 4 token ids mean the same string; the first that does not is 2, unknown in the draft "
            "and 'b' in the target",
        ),
        (
            {"x": 0, "y": 1},
            "0 of 4 token ids mean the same string; the first that does not is 0, 'x' in the draft and "
            "'<s>' in the target",
        ),
    ],
)
def test_overlap_and_the_first_difference(draft: dict[str, int], said: str) -> None:
    assert difference(vocabulary(draft), vocabulary(TARGET)) == said
