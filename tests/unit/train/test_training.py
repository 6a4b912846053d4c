"""Tests of training on a toy corpus: resumable, seeded, and the draft learns the target's distribution."""

import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specray.errors import ConfigError
from specray.train.corpus import Corpus, CorpusConfig, SourceFile
from specray.train.data import PreparedData, tokenizer_dir
from specray.train.distill import DistillConfig, distill_draft, distillation_loss
from specray.train.evaluate import EvaluateConfig, evaluate_pair
from specray.train.loop import RunLimit
from specray.train.optim import OptimizerConfig
from specray.train.parallel import GradientWorkers
from specray.train.pipeline import PairTrainConfig, train_pair
from specray.train.sample import SampleConfig, sample_continuations, sample_training_rows
from specray.train.shapes import ModelShape, new_model, save_model, to_dtype
from specray.train.target import TargetTrainConfig, next_token_loss, train_target
from specray.train.tokenizer import encode_files, load_tokenizer, save_tokenizer, train_tokenizer

pytestmark = pytest.mark.slow

SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=300,
    max_position_embeddings=64,
)
TEXTS = [f"def function_{i}(value):\n    return value + {i % 7}\n" * 3 for i in range(40)]
TARGET = TargetTrainConfig(
    limit=RunLimit(num_steps=6),
    shape=SHAPE,
    window_len=32,
    windows_per_step=4,
    micro_batch_tokens=32,
    sequence_lens=((0.0, 16), (0.5, 32)),
)
DRAFT = DistillConfig(
    limit=RunLimit(num_steps=6),
    shape=replace(SHAPE, hidden_size=16, num_layers=1),
    window_len=32,
    windows_per_step=2,
    sampled_rows_per_step=2,
    micro_batch_tokens=64,
    sequence_lens=((0.0, 32),),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    documents = [np.array(ids, np.uint16) for ids in encode_files(tokenizer, TEXTS)]
    return PreparedData(train=np.concatenate(documents[:36]), held_out=np.concatenate(documents[36:]))


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    save_tokenizer(train_tokenizer(TEXTS, vocab_size=300), tokenizer_dir(tmp_path), model_max_length=64)
    return tmp_path


def sharp_target(seed: int = 0) -> LlamaForCausalLM:
    """Makes a random model whose distributions are far from uniform."""
    model = new_model(SHAPE, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(15)
    return model


def weights(model: LlamaForCausalLM) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_resumed_run_equals_an_uninterrupted_one(data: PreparedData, work_dir: Path) -> None:
    (work_dir / "other").mkdir()
    (work_dir / "other" / "tokenizer").symlink_to(work_dir / "tokenizer")
    whole = weights(train_target(data, work_dir, TARGET))
    train_target(data, work_dir / "other", TARGET, stop_after=4)
    resumed = weights(train_target(data, work_dir / "other", TARGET))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    first_log, second_log = (
        (directory / "target.log.jsonl").read_text().splitlines()[-1]
        for directory in (work_dir, work_dir / "other")
    )
    assert '"step": 6' in first_log
    assert '"step": 6' in second_log


def test_the_seed_decides(data: PreparedData, work_dir: Path) -> None:
    first = weights(train_target(data, work_dir, replace(TARGET, limit=RunLimit(num_steps=1))))
    other_dir = work_dir / "other"
    save_tokenizer(load_tokenizer(tokenizer_dir(work_dir)), tokenizer_dir(other_dir), model_max_length=64)
    other = weights(train_target(data, other_dir, replace(TARGET, seed=1, limit=RunLimit(num_steps=1))))
    assert not torch.equal(first[0], other[0])


def test_training_lowers_the_loss_and_exports_a_loadable_checkpoint(
    data: PreparedData, work_dir: Path
) -> None:
    held_out = torch.from_numpy(data.held_out[:65].astype(np.int64))[None]
    with torch.no_grad():
        before = float(next_token_loss(new_model(SHAPE, seed=0), held_out))
    train_target(data, work_dir, replace(TARGET, limit=RunLimit(num_steps=40)))
    exported = LlamaForCausalLM.from_pretrained(work_dir / "target", dtype="auto")
    assert exported.dtype == torch.bfloat16
    with torch.no_grad():
        assert float(next_token_loss(exported, held_out)) < before - 1.5
    assert AutoTokenizer.from_pretrained(work_dir / "target")("def")["input_ids"][0] == 0


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    model = to_dtype(new_model(SHAPE, seed=0), torch.float32)
    rows = torch.randint(300, (5, 17), generator=torch.Generator().manual_seed(0))
    next_token_loss(model, rows).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with GradientWorkers(model, num_workers=2) as workers:
        loss = workers.accumulate(list(torch.split(rows, 2)), lambda micro: next_token_loss(model, micro))
    assert loss == pytest.approx(float(next_token_loss(model, rows).detach()), abs=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


def test_distillation_lowers_the_divergence_from_the_target(data: PreparedData, work_dir: Path) -> None:
    target = sharp_target()
    config = replace(DRAFT, limit=RunLimit(num_steps=60), shape=SHAPE)
    rows = sample_training_rows(
        target,
        data.train,
        work_dir / "samples",
        SampleConfig(num_batches=2, batch_size=4, row_len=33, prompt_lens=(8,), num_workers=1),
    )
    probe = torch.from_numpy(data.held_out[:64].astype(np.int64))[None]
    with torch.no_grad():
        before = float(distillation_loss(target, new_model(SHAPE, seed=config.seed), probe))
        draft = distill_draft(target, data, rows, work_dir, config)
        after = float(distillation_loss(target, draft, probe))
    assert after < 0.6 * before


def test_distillation_resumes_where_it_stopped(data: PreparedData, work_dir: Path) -> None:
    (work_dir / "other").mkdir()
    (work_dir / "other" / "tokenizer").symlink_to(work_dir / "tokenizer")
    target = sharp_target()
    rows = np.random.default_rng(0).integers(2, 300, (5, 33)).astype(np.uint16)
    whole = weights(distill_draft(target, data, rows, work_dir, DRAFT))
    distill_draft(target, data, rows, work_dir / "other", DRAFT, stop_after=3)
    resumed = weights(distill_draft(target, data, rows, work_dir / "other", DRAFT))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_the_divergence_of_a_model_from_itself_is_zero() -> None:
    target = sharp_target()
    ids = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(0))
    assert float(distillation_loss(target, target, ids).detach()) == pytest.approx(0.0, abs=1e-6)


def test_greedy_sampling_equals_generate() -> None:
    model = to_dtype(sharp_target(), torch.float32)
    prompts = torch.randint(300, (3, 7), generator=torch.Generator().manual_seed(0))
    sampled = sample_continuations(model, prompts, num_tokens=20, temperature=0.0, seed=0)
    expected = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(sampled, expected)


def test_an_interrupted_sampling_run_goes_on_with_the_missing_batches(
    data: PreparedData, tmp_path: Path
) -> None:
    config = SampleConfig(num_batches=3, batch_size=2, row_len=13, prompt_lens=(4, 6), num_workers=2)
    target = sharp_target()
    whole = sample_training_rows(target, data.train, tmp_path / "a", config)
    sample_training_rows(target, data.train, tmp_path / "b", replace(config, num_batches=1))
    resumed = sample_training_rows(target, data.train, tmp_path / "b", config)
    assert whole.shape == (6, 13)
    assert np.array_equal(whole, resumed)


def test_a_draft_that_is_the_target_agrees_everywhere(work_dir: Path) -> None:
    for name in ("target", "draft"):
        save_model(sharp_target(), tokenizer_dir(work_dir), work_dir / name)
    files = tuple(SourceFile("toy", f"{i}.py", text) for i, text in enumerate(TEXTS[:4]))
    config = EvaluateConfig(window_len=32, prompt_lens=(4, 8), continuation_len=6, batch_size=3)
    scores = evaluate_pair(
        work_dir / "target",
        work_dir / "draft",
        config=config,
        corpus=Corpus(train=(), held_out=files, sources=()),
    )
    tokenizer = load_tokenizer(tokenizer_dir(work_dir))
    num_tokens = sum(len(ids) - 1 for ids in encode_files(tokenizer, TEXTS[:4]))
    assert scores.held_out_text.num_tokens == num_tokens
    assert scores.held_out_text.num_bytes == sum(len(text) for text in TEXTS[:4])
    assert scores.held_out_text.agreement == 1.0
    assert scores.held_out_text.target_loss == scores.held_out_text.draft_loss
    assert scores.greedy_samples.agreement == 1.0
    assert scores.temperature_1_samples.overlap == pytest.approx(1.0, abs=1e-5)
    assert scores.greedy_samples.num_positions <= 2 * 4 * 6


def test_the_pipeline_writes_a_pair_and_a_card_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdlib = tmp_path / "stdlib"
    stdlib.mkdir()
    for index, text in enumerate(TEXTS):
        (stdlib / f"module_{index}.py").write_text(f"# {index}\n{text}{text}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(stdlib))
    monkeypatch.setattr(sys, "path", [])
    config = PairTrainConfig(
        target=TARGET,
        draft=DRAFT,
        samples=SampleConfig(num_batches=2, batch_size=2, row_len=33, prompt_lens=(8,)),
        corpus=CorpusConfig(min_file_bytes=10, holdout_modulus=5),
        evaluate=EvaluateConfig(window_len=32, prompt_lens=(4,), continuation_len=4),
    )
    evaluation = train_pair(tmp_path / "work", tmp_path / "pair", config, command="specray models train")
    card = (tmp_path / "pair" / "README.md").read_text()
    assert f"| loss, nats per token | {evaluation.held_out_text.target_loss:.3f} |" in card
    assert "| target | 6 | 768 |" in card
    assert "half on 4 rows of 33 tokens" in card
    assert "| python-stdlib | 3.11 | PSF-2.0 | 40 |" in card.replace(sysconfig.get_python_version(), "3.11")
    for name in ("target", "draft"):
        files = {file.name for file in (tmp_path / "pair" / name).iterdir()}
        assert files == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }


def test_a_pair_with_two_tokenizers_is_refused(work_dir: Path) -> None:
    save_model(sharp_target(), tokenizer_dir(work_dir), work_dir / "target")
    save_tokenizer(train_tokenizer(TEXTS[:1], vocab_size=270), work_dir / "other", model_max_length=64)
    save_model(sharp_target(), work_dir / "other", work_dir / "draft")
    with pytest.raises(ConfigError, match="draft: the tokenizer"):
        evaluate_pair(work_dir / "target", work_dir / "draft", corpus=Corpus((), (), ()))


@pytest.mark.parametrize("limit", [(None, None), (1, 1.0), (0, None), (None, -1.0)])
def test_a_run_has_exactly_one_positive_limit(limit: tuple[int | None, float | None]) -> None:
    with pytest.raises(ConfigError):
        RunLimit(*limit)


def test_the_schedule_warms_up_and_falls_to_its_final_share() -> None:
    config = OptimizerConfig(warmup_fraction=0.1, final_fraction=0.02)
    assert config.scale_at(0.05) == pytest.approx(0.5)
    assert config.scale_at(0.1) == 1.0
    assert config.scale_at(0.55) == pytest.approx(0.51)
    assert config.scale_at(1.0) == pytest.approx(0.02)
