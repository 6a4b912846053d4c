"""Pieces of a text that go before prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.bench.methods.prompts import contexts
from specray.errors import ConfigError
from tests.unit.tokenization.tiny_tokenizer import tiny_tokenizer


def test_pieces_follow_each_other_and_have_as_many_tokens_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("hello def abcde")
    tokenizer = tiny_tokenizer()
    assert contexts(file, tokenizer, num_tokens=3, count=2) == ["hello def", " ab"]
    with pytest.raises(ConfigError) as caught:
        contexts(file, tokenizer, num_tokens=3, count=4)
    assert str(caught.value) == (
        f"--context {file} has 8 tokens; allowed: at least 12, --context-tokens for each of 4 prompts"
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        contexts(tmp_path / "other", tokenizer, num_tokens=3, count=4)
