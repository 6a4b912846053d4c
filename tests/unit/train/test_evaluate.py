"""The evaluation of a pair: a draft that is its target agrees everywhere; tokenizers must be equal."""

from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.train.corpus import SourceFile
from specray.train.evaluate import EvaluateConfig, evaluate_pair
from tests.unit.train.toys import save_model, save_toy_tokenizer, toy_llama

TEXTS = [f"def function_{i}(value):\n    return value + {i % 7}\n" for i in range(4)]


def write_pair(directory: Path) -> tuple[str, str]:
    save_toy_tokenizer(directory / "tokenizer")
    for name in ("target", "draft"):
        save_model(toy_llama(0, vocab_size=259), directory / "tokenizer", directory / name)
    return str(directory / "target"), str(directory / "draft")


def test_a_draft_that_is_the_target_agrees_everywhere(tmp_path: Path) -> None:
    config = EvaluateConfig(window_len=32, prompt_lens=(4, 8), continuation_len=6, batch_size=3)
    files = [SourceFile("toy", f"{i}.py", text) for i, text in enumerate(TEXTS)]
    scores = evaluate_pair(*write_pair(tmp_path), config=config, files=files)
    # A token for each byte, and the end; the first one is not predicted.
    assert scores.held_out_text.num_tokens == sum(map(len, TEXTS))
    assert scores.held_out_text.num_bytes == sum(map(len, TEXTS))
    assert scores.held_out_text.agreement == 1.0
    assert scores.held_out_text.target_loss == scores.held_out_text.draft_loss
    assert scores.greedy_samples.agreement == 1.0
    assert scores.temperature_1_samples.overlap == pytest.approx(1.0, abs=1e-5)
    assert scores.greedy_samples.num_positions <= 2 * 4 * 6


def test_a_pair_with_two_tokenizers_is_refused(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    tokenizer = Path(draft) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a":', '"a+":'))
    with pytest.raises(ConfigError, match=r"draft: the tokenizer in .* differs"):
        evaluate_pair(target, draft)
    with pytest.raises(ConfigError, match=r"target .*nowhere' cannot be loaded"):
        evaluate_pair(str(tmp_path / "nowhere"), draft)
