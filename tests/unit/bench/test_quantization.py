"""Tests of the benchmark of quantised weights: its sums, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from specray.bench.quantization import engine_config, measure_quality, quality_table, read_text
from specray.config import DraftConfig, EngineConfig, TargetConfig
from specray.engine.inputs import SequenceInput
from specray.engine.step import ForwardOutput
from specray.errors import ConfigError

CERTAIN = 50.0


class Runner:
    """Knows that each token is followed by the next number, or for tokens from ``wrong`` on, by zero."""

    def __init__(self, name: str, wrong: int = 100) -> None:
        self.info = SimpleNamespace(number_format=name, max_model_len=8, block_size=4)
        self.wrong = wrong
        self.steps: list[SequenceInput] = []

    def run(self, inputs: list[SequenceInput]) -> ForwardOutput:
        (step,) = inputs
        self.steps.append(step)
        logits = torch.zeros(len(step.token_ids), 20)
        for row, token in enumerate(step.token_ids):
            logits[row, token + 1 if token < self.wrong else 0] = CERTAIN
        return ForwardOutput(logits)


def test_loss_agreement_and_divergence_of_a_text() -> None:
    """Windows of four: three, three and two tokens to predict."""
    first, second = Runner("float32"), Runner("float32 int4 layers", wrong=6)
    runners: Any = [first, second]
    told: list[tuple[int, int]] = []
    one, other = measure_quality(
        runners,
        [*range(10), 0],
        window_len=4,
        progress=lambda done, total: told.append((done, total)),
    )
    assert (one.number_format, one.num_tokens, one.agreement, one.divergence) == ("float32", 8, 1.0, 0.0)
    # Only the last token, 0 after 9, surprises the first; the second expects 0 after 6, 8 and 9.
    assert one.loss == pytest.approx(CERTAIN / 8, abs=1e-5)
    assert other.loss == pytest.approx(2 * CERTAIN / 8, abs=1e-5)
    assert other.divergence == pytest.approx(3 * CERTAIN / 8, abs=1e-5)
    assert (other.number_format, other.agreement) == ("float32 int4 layers", 5 / 8)
    assert [list(step.token_ids) for step in second.steps] == [[0, 1, 2], [4, 5, 6], [8, 9]]
    assert [(step.start, step.num_logits, list(step.block_ids)) for step in second.steps] == [
        (0, 3, [0]),
        (0, 3, [0]),
        (0, 2, [0]),
    ]
    assert told == [(3, 8), (6, 8), (8, 8)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(quality_table([one, other], title="a model"))
    assert "float32 int4 layers" in capture.get() and "0.6250" in capture.get()


def test_windows_and_texts_that_are_too_short_or_long() -> None:
    runners: Any = [Runner("float32")]
    with pytest.raises(ConfigError, match=r"^window_len is 9; allowed: 2\.\.8$"):
        measure_quality(runners, [1, 2, 3], window_len=9)
    with pytest.raises(ConfigError, match=r"^the text has 1 tokens; allowed: 2 and more$"):
        measure_quality(runners, [1], window_len=4)


@pytest.mark.parametrize("kind", [TargetConfig, DraftConfig])
def test_formats_of_layers_and_head(kind: type[EngineConfig]) -> None:
    engine = kind(dtype="float32")
    both = engine_config(engine, "int4:int8")
    assert (both.quantization, both.lm_head_quantization, both.dtype) == ("int4", "int8", "float32")
    assert type(both) is kind
    assert engine_config(engine, "int8").lm_head_quantization == "none"
    own, plain = engine_config(engine, "none@bfloat16"), engine_config(engine, "dtype@float32")
    assert (own.weights, own.dtype) == ("auto", "bfloat16")
    assert (plain.weights, plain.dtype, plain.quantization) == ("dtype", "float32", "none")
    for wrong in ("int3", "int8:q", "", "int8@float16", "dtype:q"):
        with pytest.raises(
            ConfigError,
            match="allowed: dtype, LAYERS or LAYERS:LM_HEAD, each one of none, int8, int4, and",
        ):
            engine_config(engine, wrong)


def test_text_of_a_file_or_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("words", "utf-8")
    assert read_text(path) == "words"
    assert "statement" in read_text(None)
    with pytest.raises(ConfigError, match=r"^--text is '.*missing', which cannot be read"):
        read_text(tmp_path / "missing")
