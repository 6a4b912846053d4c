"""Trains a pair from installed source code: corpus, target, samples, draft, evaluation, model card."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specray.train.card import write_card
from specray.train.corpus import CorpusConfig
from specray.train.data import prepare_data
from specray.train.distill import DistillConfig, distill_draft
from specray.train.evaluate import EvaluateConfig, PairEvaluation, evaluate_pair
from specray.train.loop import RunLimit
from specray.train.sample import SampleConfig, sample_training_rows
from specray.train.target import TargetTrainConfig, train_target


@dataclass(frozen=True, slots=True)
class PairTrainConfig:
    """All settings that decide about the pair."""

    target: TargetTrainConfig
    draft: DistillConfig
    samples: SampleConfig = field(default_factory=SampleConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def pair_config(
    *,
    target_limit: RunLimit,
    draft_limit: RunLimit,
    sample_time_budget_s: float | None = None,
    seed: int = 0,
    num_workers: int = 2,
) -> PairTrainConfig:
    """Returns the settings of the embedded pair, with those that the command line sets."""
    return PairTrainConfig(
        target=TargetTrainConfig(target_limit, seed=seed, num_workers=num_workers),
        draft=DistillConfig(draft_limit, seed=seed + 1, num_workers=num_workers),
        samples=SampleConfig(time_budget_s=sample_time_budget_s, seed=seed, num_workers=num_workers),
        evaluate=EvaluateConfig(num_workers=num_workers),
    )


def train_pair(
    work_dir: Path,
    output_dir: Path,
    config: PairTrainConfig,
    *,
    command: str,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PairEvaluation:
    """Trains in `work_dir`, then writes `target/`, `draft/` and README.md to `output_dir`.

    Every stage keeps its state in `work_dir`; calling again with the same configuration resumes.
    `command` is what the model card says to have been run.
    """
    on_stage("preparing the corpus")
    data = prepare_data(
        work_dir,
        corpus_config=config.corpus,
        vocab_size=config.target.shape.vocab_size,
        max_position_embeddings=config.target.shape.max_position_embeddings,
    )
    on_stage("training the target")
    target = train_target(data, work_dir, config.target)
    on_stage("sampling from the target")
    target.train(False)
    rows = sample_training_rows(target, data.train, work_dir / "samples", config.samples)
    on_stage("training the draft")
    distill_draft(target, data, rows, work_dir, config.draft)
    evaluation = evaluate_pair(
        work_dir / "target",
        work_dir / "draft",
        config=config.evaluate,
        corpus_config=config.corpus,
        on_stage=on_stage,
    )
    _write_json(work_dir / "evaluation.json", asdict(evaluation))
    _write_json(work_dir / "config.json", asdict(config))
    publish_pair(work_dir, output_dir)
    write_card(
        work_dir, output_dir / "README.md", config=asdict(config), evaluation=evaluation, command=command
    )
    return evaluation


def publish_pair(work_dir: Path, output_dir: Path) -> None:
    """Copies both checkpoints from the working directory, replacing what was there."""
    for name in ("target", "draft"):
        destination = output_dir / name
        shutil.rmtree(destination, ignore_errors=True)
        destination.mkdir(parents=True)
        for file in sorted((work_dir / name).iterdir()):
            shutil.copyfile(file, destination / file.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
