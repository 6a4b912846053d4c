"""Trains the target of the embedded pair: plain next-token prediction."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from specray.train.data import PreparedData, split_windows, tokenizer_dir, window_batch
from specray.train.loop import RunLimit, RunState, TrainingRun
from specray.train.optim import MasterOptimizer, OptimizerConfig
from specray.train.parallel import GradientWorkers
from specray.train.shapes import TARGET_SHAPE, ModelShape, new_model, save_model


@dataclass(frozen=True, slots=True)
class TargetTrainConfig:
    """Training options of the target.

    `sequence_lens` are (from this share of the run on, tokens per sequence): short ones first, because
    attention costs less there, long ones last, so that later positions work. Each divides `window_len`.
    """

    limit: RunLimit
    shape: ModelShape = TARGET_SHAPE
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    window_len: int = 1024
    windows_per_step: int = 8
    micro_batch_tokens: int = 1024
    num_workers: int = 2
    sequence_lens: tuple[tuple[float, int], ...] = ((0.0, 256), (0.4, 512), (0.85, 1024))

    def sequence_len_at(self, progress: float) -> int:
        return next(length for start, length in reversed(self.sequence_lens) if progress >= start)


def train_target(
    data: PreparedData, work_dir: Path, config: TargetTrainConfig, *, stop_after: int | None = None
) -> LlamaForCausalLM:
    """Trains (or goes on training) and writes the checkpoint `work_dir/target`; returns the model.

    `stop_after` ends this call after so many steps; the next call resumes there.
    """
    model = new_model(config.shape, seed=config.seed)
    optimizer = MasterOptimizer(model, config.optimizer)
    run = TrainingRun("target", work_dir, optimizer, config.limit)

    def step(state: RunState, progress: float) -> dict[str, float]:
        windows = window_batch(
            data.train,
            seed=config.seed,
            cursor=state.cursor,
            num_windows=config.windows_per_step,
            window_len=config.window_len,
        )
        state.cursor += config.windows_per_step
        state.num_tokens += config.windows_per_step * config.window_len
        sequences = split_windows(windows, config.sequence_len_at(progress))
        micro_batches = micro_batches_of(sequences, config.micro_batch_tokens)
        loss = workers.accumulate(micro_batches, lambda micro: next_token_loss(model, micro))
        return {"loss": loss, "grad_norm": optimizer.step(progress)}

    def export() -> dict[str, float]:
        save_model(model, tokenizer_dir(work_dir), work_dir / "target")
        return {"held_out_loss": quick_held_out_loss(model, data, sequence_len=config.window_len // 2)}

    model.train()
    with GradientWorkers(model, num_workers=config.num_workers) as workers:
        run.run(step, on_checkpoint=export, stop_after=stop_after)
    return model


def micro_batches_of(sequences: torch.Tensor, micro_batch_tokens: int) -> list[torch.Tensor]:
    """Splits rows of [n, length + 1] into groups of about `micro_batch_tokens` tokens."""
    return list(torch.split(sequences, max(micro_batch_tokens // (sequences.shape[1] - 1), 1)))


def next_token_loss(model: LlamaForCausalLM, sequences: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats of [n, length + 1] token ids."""
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


@torch.no_grad()
def quick_held_out_loss(
    model: LlamaForCausalLM, data: PreparedData, *, sequence_len: int, num_sequences: int = 24
) -> float:
    """Returns the loss on a fixed sample of held-out text, to watch the training."""
    num_available = (len(data.held_out) - 1) // sequence_len
    stride = max(num_available // num_sequences, 1)
    losses = []
    for index in range(0, min(num_available, stride * num_sequences), stride):
        start = index * sequence_len
        ids = torch.from_numpy(data.held_out[start : start + sequence_len + 1].astype("int64"))
        losses.append(float(next_token_loss(model, ids[None])))
    return sum(losses) / max(len(losses), 1)
