"""Drafts of known models: completed once beside the target, made again for another version."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from specray.errors import ConfigError
from specray.models import drafts
from specray.models.cache import KeptCheckpoint, ModelCache
from specray.models.catalogue import GEMMA_3_270M, SMOLLM2_135M_INSTRUCT
from specray.models.child import Ended
from specray.models.drafts import compact_draft, complete_draft
from specray.train.draft import completion
from specray.train.draft.student import DraftShape, Student, write_compact
from tests.unit.models.tiny_models import Recorder
from tests.unit.train.toys import save_model, save_toy_tokenizer, toy_llama


def kept_target(cache: ModelCache, directory: Path, *, seed: int) -> KeptCheckpoint:
    save_toy_tokenizer(directory / "tokenizer")
    with cache.work_directory("ab" * 32) as work:
        save_model(toy_llama(seed), directory / "tokenizer", work / "checkpoint")
        return cache.keep_checkpoint(work / "checkpoint", "target", "ab" * 32)


def write_draft(target: KeptCheckpoint, directory: Path, *, seed: int) -> None:
    model = LlamaForCausalLM.from_pretrained(target.directory, dtype=torch.bfloat16)
    shape = DraftShape(hidden_size=16, num_layers=1, intermediate_size=16, num_heads=2, num_kv_heads=1)
    embedding = model.get_input_embeddings().weight
    write_compact(Student(shape, embedding, torch.tensor([2, 5, 9]), seed=seed), directory, {})


def run_here(command: Sequence[str], **_: object) -> Ended:
    """What a child would run and say, without its imports."""
    assert list(command[1:4]) == ["-m", "specray.models.tied", "specray.train.draft.completion"]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as errors:
        patch.setattr(sys, "argv", list(command[3:]))
        return Ended(completion.main(), "", errors.getvalue())


@pytest.mark.slow
def test_a_draft_is_completed_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compact = ModelCache(tmp_path / "cache"), tmp_path / "compact"
    monkeypatch.setattr(drafts, "compact_draft", lambda known: compact)
    target = kept_target(cache, tmp_path, seed=0)
    write_draft(target, compact, seed=1)
    first = complete_draft(SMOLLM2_135M_INSTRUCT, target, cache, Recorder())
    tensors = load_file(first / "model.safetensors")
    assert (torch.arange(3) + tensors["d2t"]).tolist() == [2, 5, 9]
    assert first.parent == target.directory and target.problem() is None
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert complete_draft(SMOLLM2_135M_INSTRUCT, target, cache, Recorder()) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    monkeypatch.setattr(drafts, "run_child", run_here)
    write_draft(target, compact, seed=2)
    assert complete_draft(SMOLLM2_135M_INSTRUCT, target, cache, Recorder()) != first


@pytest.mark.slow
def test_a_draft_of_another_target_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, compact = ModelCache(tmp_path / "cache"), tmp_path / "compact"
    monkeypatch.setattr(drafts, "compact_draft", lambda known: compact)
    monkeypatch.setattr(drafts, "run_child", run_here)
    write_draft(kept_target(cache, tmp_path, seed=0), compact, seed=1)
    other = kept_target(cache, tmp_path, seed=5)
    with pytest.raises(ConfigError, match=r"cannot be completed: .* another embedding"):
        complete_draft(SMOLLM2_135M_INSTRUCT, other, cache, Recorder())
    assert not list(other.directory.glob("draft-*"))


def test_the_package_has_a_draft_for_the_default_model_alone() -> None:
    directory = compact_draft(SMOLLM2_135M_INSTRUCT)
    assert directory is not None and (directory / "compact.safetensors").is_file()
    assert compact_draft(GEMMA_3_270M) is None
