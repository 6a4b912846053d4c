"""A draft that borrows its target's embedding: its loss, its compact form, and what completes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specray.errors import ConfigError
from specray.train.draft import training
from specray.train.draft.completion import complete_draft
from specray.train.draft.loss import LossConfig, LossWeights, draft_loss
from specray.train.draft.loss_kind import LossKind
from specray.train.draft.student import DraftShape, Student, write_compact
from specray.train.draft.text import TextConfig
from specray.train.draft.training import DraftTrainConfig, train_draft
from specray.train.loop import RunLimit
from tests.unit.models.tiny_models import finish
from tests.unit.train.toys import save_model, save_toy_tokenizer, toy_llama

SHAPE = DraftShape(hidden_size=16, num_layers=1, intermediate_size=16, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    save_toy_tokenizer(tokenizer)
    save_model(toy_llama(0), tokenizer, directory)
    return directory


def test_the_loss_is_the_divergence_and_the_acceptance_that_it_says() -> None:
    target_logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.1, 0.1, 0.7]]).log()
    draft_ids = torch.tensor([0, 1, 2])
    draft_probs = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    weights = torch.tensor([1.0, 0.5])
    parts = LossWeights(argmax=0.3, distance=2.0)
    found = draft_loss(target_logits, draft_probs.log(), draft_ids, weights, parts)
    overlaps = [0.5 + 0.25 + 0.125, 0.1 + 0.1 + 0.1]
    assert found.overlap == pytest.approx(overlaps[0] + 0.5 * overlaps[1])
    # The second row's best token is none that the draft knows.
    assert found.agreement == pytest.approx(1.0)
    assert found.weight == pytest.approx(1.5)
    divergences = [0.125 * np.log(0.125 / 0.25), 0.1 * np.log(0.1 / 0.2) * 2 + 0.1 * np.log(0.1 / 0.6)]
    rows = [
        divergences[0] + 0.3 * -np.log(0.5) + 2 * (1 - overlaps[0]),
        divergences[1] + 2 * (1 - overlaps[1]),
    ]
    assert found.loss == pytest.approx(rows[0] + 0.5 * rows[1], rel=1e-5)
    assert found.row_overlaps.tolist() == pytest.approx(overlaps)
    # The mean acceptance is (0.875 + 0.5 * 0.3) / 1.5.
    share = np.exp(-3 * 1.025 / 1.5)
    rows = [share * divergences[row] + (1 - share) * (1 - overlaps[row]) for row in (0, 1)]
    adaptive = LossWeights(is_adaptive=True)
    found = draft_loss(target_logits, draft_probs.log(), draft_ids, weights, adaptive)
    assert found.loss == pytest.approx(rows[0] + 0.5 * rows[1], rel=1e-5)


def test_the_kind_of_a_loss_says_when_the_distance_counts() -> None:
    weights = [
        (loss.argmax, loss.distance, loss.is_adaptive)
        for kind in ("kl", "kl+tv", "lk")
        for loss in (LossConfig(LossKind(kind)).at(0.59), LossConfig(LossKind(kind)).at(0.6))
    ]
    assert weights == [
        (0.3, 0.0, False),
        (0.3, 0.0, False),
        (0.3, 0.0, False),
        (0.3, 1.0, False),
        (0.3, 0.0, True),
        (0.3, 0.0, True),
    ]


def test_a_completed_draft_computes_what_the_student_did(target: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    ids = torch.tensor([2, 3, 50, 299])
    student = Student(SHAPE, model.get_input_embeddings().weight, ids, seed=0)
    write_compact(student, tmp_path / "compact", {"note": 1})
    complete = complete_draft(tmp_path / "compact", target, tmp_path / "complete")
    tensors = load_file(complete / "model.safetensors")
    assert (torch.arange(4) + tensors["d2t"]).tolist() == ids.tolist()
    config = json.loads((complete / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (4, 300)
    assert (complete / "tokenizer.json").is_file()
    with torch.no_grad():
        rows = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(tensors["model.embed_tokens.weight"][rows], student.embedding(rows))
        assert torch.equal(tensors["lm_head.weight"], student.head())


def test_a_draft_is_completed_with_the_embedding_of_a_gguf_file(target: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    table = model.get_input_embeddings().weight
    student = Student(SHAPE, table, torch.tensor([2, 3, 50, 299]), seed=0)
    write_compact(student, tmp_path / "compact", {})
    light = Path(shutil.copytree(target, tmp_path / "light"))
    (light / "model.safetensors").unlink()
    writer = gguf.GGUFWriter(light / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", table.detach().float().numpy())
    finish(writer, light / "model.gguf")
    found, expected = (
        load_file(
            complete_draft(tmp_path / "compact", one, tmp_path / f"{one.name}-draft") / "model.safetensors"
        )
        for one in (light, target)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_draft_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    student = Student(SHAPE, model.get_input_embeddings().weight, torch.tensor([1, 2]), seed=0)
    write_compact(student, tmp_path / "compact", {})
    save_toy_tokenizer(tmp_path / "tokenizer")
    save_model(toy_llama(9), tmp_path / "tokenizer", tmp_path / "other")
    with pytest.raises(ConfigError, match="another embedding"):
        complete_draft(tmp_path / "compact", tmp_path / "other", tmp_path / "complete")


def test_a_target_of_another_type_than_llama_is_read_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as a Llama, it would lack its biases."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "target")
    save_toy_tokenizer(tmp_path / "target")

    def found(model: Any, *_: Any) -> Any:
        raise ConfigError(f"{type(model).__name__} in {model.dtype}")

    monkeypatch.setattr(training, "written_text", found)
    with pytest.raises(ConfigError, match=r"^Qwen2ForCausalLM in torch\.bfloat16$"):
        train_draft(str(tmp_path / "target"), tmp_path, DraftTrainConfig(RunLimit(num_steps=1)))


@pytest.mark.slow
def test_training_goes_on_where_it_was_and_learns(target: Path, tmp_path: Path) -> None:
    def config(steps: int) -> DraftTrainConfig:
        return DraftTrainConfig(
            limit=RunLimit(num_steps=steps),
            text=TextConfig(num_rows=40, rows_per_batch=20, row_len=128, mix="task=1,text=1"),
            rows_per_step=3,
            rows_per_forward=3,
            shape=SHAPE,
            max_draft_vocabulary=128,
        )

    (tmp_path / "passages.json").write_text(json.dumps(["some text to go on with. " * 40]))
    train_draft(str(target), tmp_path, config(2))
    directory = train_draft(str(target), tmp_path, config(14))
    rows = [json.loads(line) for line in (tmp_path / "draft.log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 14]
    assert rows[1]["held_out_loss"] < rows[0]["held_out_loss"]
    card = json.loads((directory / "training.json").read_text())
    assert card["num_rows_written"] == 40
    assert card["held_out_overlap"] == pytest.approx(rows[1]["held_out_overlap"], abs=1e-4)
