"""Trains the draft of the embedded pair on the target's own distribution.

The loss is the Kullback-Leibler divergence from the target's next-token distribution, over real text and
over text that the target wrote (on-policy for the target: what the draft meets when it speculates), plus
a share of cross-entropy on the target's argmax, which is what greedy verification compares with.
Kim & Rush 2016 (arXiv:1606.07947); Zhou et al. 2023, DistillSpec (arXiv:2310.08461).
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from specray.train.data import PreparedData, Tokens, split_windows, tokenizer_dir, window_batch
from specray.train.loop import RunLimit, RunState, TrainingRun
from specray.train.optim import MasterOptimizer, OptimizerConfig
from specray.train.parallel import GradientWorkers
from specray.train.shapes import DRAFT_SHAPE, ModelShape, new_model, save_model
from specray.train.target import micro_batches_of


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """Training options of the draft; a step has this many windows of real text and rows of sampled text."""

    limit: RunLimit
    shape: ModelShape = DRAFT_SHAPE
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            matrix_learning_rate=8e-3, learning_rate=5e-3, weight_decay=0.02
        )
    )
    seed: int = 1
    window_len: int = 1024
    windows_per_step: int = 2
    sampled_rows_per_step: int = 4
    argmax_weight: float = 0.3
    micro_batch_tokens: int = 1024
    num_workers: int = 2
    sequence_lens: tuple[tuple[float, int], ...] = ((0.0, 256), (0.3, 512), (0.8, 1024))

    def sequence_len_at(self, progress: float) -> int:
        return next(length for start, length in reversed(self.sequence_lens) if progress >= start)


def distill_draft(
    target: LlamaForCausalLM,
    data: PreparedData,
    sampled_rows: Tokens,
    work_dir: Path,
    config: DistillConfig,
    *,
    stop_after: int | None = None,
) -> LlamaForCausalLM:
    """Trains (or goes on training) and writes the checkpoint `work_dir/draft`; returns the model.

    `sampled_rows` is [n, length + 1]: see `sample.sample_training_rows`.
    """
    target.train(False)
    draft = new_model(config.shape, seed=config.seed)
    project_embeddings(target, draft)
    optimizer = MasterOptimizer(draft, config.optimizer)
    run = TrainingRun("draft", work_dir, optimizer, config.limit)

    def loss_fn(micro: torch.Tensor) -> torch.Tensor:
        return distillation_loss(target, draft, micro[:, :-1], argmax_weight=config.argmax_weight)

    def step(state: RunState, progress: float) -> dict[str, float]:
        real = split_windows(_real_windows(data, config, state), config.sequence_len_at(progress))
        sampled = _sampled_rows(sampled_rows, config, state)
        micro_batches = micro_batches_of(real, config.micro_batch_tokens)
        micro_batches += micro_batches_of(sampled, config.micro_batch_tokens)
        state.cursor += config.windows_per_step
        state.num_tokens += sum(micro.shape[0] * (micro.shape[1] - 1) for micro in micro_batches)
        loss = workers.accumulate(micro_batches, loss_fn)
        return {"loss": loss, "grad_norm": optimizer.step(progress)}

    def export() -> dict[str, float]:
        save_model(draft, tokenizer_dir(work_dir), work_dir / "draft")
        return quick_agreement(target, draft, data, sequence_len=config.window_len // 2)

    with GradientWorkers(draft, num_workers=config.num_workers) as workers:
        run.run(step, on_checkpoint=export, stop_after=stop_after)
    return draft


@torch.no_grad()
def project_embeddings(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Gives the draft's embeddings the target's principal directions, at the draft's initial scale.

    Half of a small draft's parameters are embeddings, and rare tokens teach them little.
    """
    small = draft.model.embed_tokens.weight
    left, singular_values, _ = torch.linalg.svd(target.model.embed_tokens.weight.float(), full_matrices=False)
    rank = min(small.shape[1], len(singular_values))
    principal = left[:, :rank] * singular_values[:rank]
    small[:, :rank] = (principal * (small.float().std() / principal.std())).to(small.dtype)


def distillation_loss(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: torch.Tensor, *, argmax_weight: float = 0.0
) -> torch.Tensor:
    """Mean over positions of KL(target || draft) + argmax_weight * -log draft(argmax of target), in nats."""
    with torch.no_grad():
        target_logits = target(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
        target_log_probs = target_logits.log_softmax(-1)
    draft_log_probs = draft(input_ids=ids, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
    loss = F.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)
    if argmax_weight:
        loss = loss + argmax_weight * F.nll_loss(draft_log_probs, target_logits.argmax(-1))
    return loss


@torch.no_grad()
def quick_agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    data: PreparedData,
    *,
    sequence_len: int,
    num_sequences: int = 24,
) -> dict[str, float]:
    """Returns KL and greedy agreement on a fixed sample of held-out text, to watch the training."""
    num_available = len(data.held_out) // sequence_len
    stride = max(num_available // num_sequences, 1)
    divergences, agreements = [], []
    for index in range(0, min(num_available, stride * num_sequences), stride):
        ids = torch.from_numpy(data.held_out[index * sequence_len :][:sequence_len].astype("int64"))[None]
        target_log_probs, draft_log_probs = (
            model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            for model in (target, draft)
        )
        divergences.append(
            float(F.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True))
        )
        agreements.append(float((target_log_probs.argmax(-1) == draft_log_probs.argmax(-1)).float().mean()))
    num_sequences = max(len(agreements), 1)
    return {
        "held_out_kl": sum(divergences) / num_sequences,
        "held_out_agreement": sum(agreements) / num_sequences,
    }


def _real_windows(data: PreparedData, config: DistillConfig, state: RunState) -> torch.Tensor:
    return window_batch(
        data.train,
        seed=config.seed,
        cursor=state.cursor,
        num_windows=config.windows_per_step,
        window_len=config.window_len,
    )


def _sampled_rows(rows: Tokens, config: DistillConfig, state: RunState) -> torch.Tensor:
    """Returns the step's rows of an endless seeded shuffle, int64 [n, length + 1]."""
    first = state.step * config.sampled_rows_per_step
    picked = []
    for index in range(first, first + config.sampled_rows_per_step):
        order = np.random.default_rng((config.seed, index // len(rows))).permutation(len(rows))
        picked.append(rows[order[index % len(rows)]])
    return torch.from_numpy(np.stack(picked).astype(np.int64))
