"""The ids that a trimmed vocabulary keeps are the text's most frequent ones, as few as reach the share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specray.errors import ConfigError
from specray.tokenization import Tokenizer
from specray.tokenization import counts as counts_module
from specray.tokenization.counts import frequent_ids


@pytest.fixture
def tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({word: index for index, word in enumerate("abcdefgh")}, unk_token="h"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<image>", special=True)])
    return Tokenizer(backend, eos_token_ids=(8,))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("share", "expected", "covered"),
    [
        (0.0, [8], 0.0),
        (0.5, [2, 8], 0.5),
        (0.51, [0, 2, 8], 0.7),
        # a and b are equally frequent.
        (0.75, [0, 1, 2, 8], 0.9),
        (1.0, [0, 1, 2, 5, 8], 1.0),
    ],
)
def test_fewest_ids_that_reach_the_share(
    share: float, expected: list[int], covered: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """And special tokens, of which the model has no row for the last."""
    files = [written(tmp_path / "one", "c b c a\nc"), written(tmp_path / "two", "c c\na f b\n")]
    found = frequent_ids(files, tokenizer, share=share, vocab_size=9)
    assert found == (expected, pytest.approx(covered), 10)


def test_long_files_are_counted_in_pieces(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts_module, "PIECE_CHARS", 4)
    file = written(tmp_path / "one", "a b\na b\nc\n" * 50 + "d")
    assert frequent_ids([file], tokenizer, share=1.0, vocab_size=10) == ([0, 1, 2, 3, 8, 9], 1.0, 251)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", None])
def test_files_without_text(content: bytes | None, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"text( cannot be read|: no text)"):
        frequent_ids([file], tokenizer, share=0.9, vocab_size=10)


def test_command_writes_a_file_that_a_draft_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from specray.cli.app import run
    from specray.config import DraftConfig
    from specray.engine.preflight import check_model

    text = written(tmp_path / "text.py", "def f(x):\n    return x + 1\n" * 20)
    output = tmp_path / "ids.json"
    assert run(["models", "vocabulary", str(text), "--share", "0.9", "--output", str(output)]) == 0
    ids = json.loads(output.read_text())
    assert ids == sorted(set(ids)) and 4 < len(ids) < 40
    assert f"wrote {output}: {len(ids)} of 4096 token ids, 9" in capsys.readouterr().out
    check_model(DraftConfig(vocabulary_ids=str(output)), "draft")
