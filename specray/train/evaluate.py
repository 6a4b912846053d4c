"""Measures how well a target predicts held-out code, and how often its draft agrees with it."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from specray.errors import ConfigError
from specray.train.corpus import Corpus, CorpusConfig, load_corpus
from specray.train.sample import continue_all
from specray.train.tokenizer import EOS_TOKEN_ID, encode_files, load_tokenizer


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """Sizes of the evaluation. Prompts are the first tokens of every held-out file that is long enough."""

    window_len: int = 1024
    prompt_lens: tuple[int, ...] = (64, 256, 512)
    continuation_len: int = 128
    max_prompts_per_len: int = 128
    batch_size: int = 32
    seed: int = 0
    num_workers: int = 2


@dataclass(frozen=True, slots=True)
class TextScores:
    """Figures over all tokens of the held-out files, each file by itself, in windows of `window_len`."""

    num_files: int
    num_tokens: int
    num_bytes: int
    target_loss: float  # nats per token
    draft_loss: float
    target_bits_per_byte: float
    draft_bits_per_byte: float
    agreement: float  # share of positions at which both argmaxes are equal


@dataclass(frozen=True, slots=True)
class SampleScores:
    """Figures over the positions of the target's own continuations, each up to its end-of-text token."""

    num_positions: int
    agreement: float
    overlap: float  # mean of sum(min(target_probs, draft_probs)): acceptance of rejection at temperature 1


@dataclass(frozen=True, slots=True)
class PairEvaluation:
    held_out_text: TextScores
    greedy_samples: SampleScores
    temperature_1_samples: SampleScores


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over positions; added up over batches."""

    num_positions: float = 0.0
    target_loss: float = 0.0
    draft_loss: float = 0.0
    agreements: float = 0.0
    overlap: float = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.num_positions + other.num_positions,
            self.target_loss + other.target_loss,
            self.draft_loss + other.draft_loss,
            self.agreements + other.agreements,
            self.overlap + other.overlap,
        )


def evaluate_pair(
    target_dir: Path,
    draft_dir: Path,
    *,
    config: EvaluateConfig | None = None,
    corpus_config: CorpusConfig | None = None,
    corpus: Corpus | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PairEvaluation:
    """Measures a pair on the files that the corpus of this environment holds out.

    `on_stage` is told what is being measured. Raises ConfigError when a checkpoint is missing, the
    tokenizers differ, or no file is held out.
    """
    config = config or EvaluateConfig()
    target, draft = _load(target_dir, "target"), _load(draft_dir, "draft")
    tokenizer = load_tokenizer(target_dir)
    if tokenizer.to_str() != load_tokenizer(draft_dir).to_str():
        raise ConfigError(f"draft: the tokenizer in {draft_dir} differs from the one in {target_dir}")
    on_stage("reading held-out files")
    files = (corpus or load_corpus(corpus_config)).held_out
    if not files:
        raise ConfigError("corpus: no file of this environment is held out")
    documents = [torch.tensor(ids) for ids in encode_files(tokenizer, (file.text for file in files))]
    num_bytes = sum(len(file.text.encode()) for file in files)
    on_stage("held-out text")
    text = score_text(target, draft, documents, num_bytes=num_bytes, config=config)
    on_stage("greedy continuations")
    greedy = score_samples(target, draft, documents, temperature=0.0, config=config)
    on_stage("continuations at temperature 1")
    sampled = score_samples(target, draft, documents, temperature=1.0, config=config)
    return PairEvaluation(text, greedy, sampled)


def score_text(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    documents: Sequence[torch.Tensor],
    *,
    num_bytes: int,
    config: EvaluateConfig,
) -> TextScores:
    """Computes teacher-forced figures; every token but the first of a document is predicted once."""
    windows = [
        document[start : start + config.window_len + 1][None]
        for document in documents
        for start in range(0, len(document) - 1, config.window_len)
    ]
    sums = _sum_parallel(target, draft, ((window, 0) for window in windows), config.num_workers)
    bits_per_nat_of_bytes = 1 / (math.log(2) * num_bytes)
    return TextScores(
        num_files=len(documents),
        num_tokens=int(sums.num_positions),
        num_bytes=num_bytes,
        target_loss=sums.target_loss / sums.num_positions,
        draft_loss=sums.draft_loss / sums.num_positions,
        target_bits_per_byte=sums.target_loss * bits_per_nat_of_bytes,
        draft_bits_per_byte=sums.draft_loss * bits_per_nat_of_bytes,
        agreement=sums.agreements / sums.num_positions,
    )


def score_samples(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    documents: Sequence[torch.Tensor],
    *,
    temperature: float,
    config: EvaluateConfig,
) -> SampleScores:
    """Lets the target continue prefixes of the documents, and compares both models where it wrote."""
    prompts = list(_prompt_batches(documents, config))
    rows = continue_all(
        target,
        prompts,
        num_tokens=config.continuation_len,
        temperature=temperature,
        seed=config.seed,
        num_workers=config.num_workers,
    )
    batches = ((row, prompt.shape[1] - 1) for row, prompt in zip(rows, prompts, strict=True))
    sums = _sum_parallel(target, draft, batches, config.num_workers)
    return SampleScores(
        num_positions=int(sums.num_positions),
        agreement=sums.agreements / sums.num_positions,
        overlap=sums.overlap / sums.num_positions,
    )


def _prompt_batches(documents: Sequence[torch.Tensor], config: EvaluateConfig) -> Iterable[torch.Tensor]:
    for prompt_len in config.prompt_lens:
        long_enough = [document[:prompt_len] for document in documents if len(document) > prompt_len]
        picked = long_enough[: config.max_prompts_per_len]
        for start in range(0, len(picked), config.batch_size):
            yield torch.stack(picked[start : start + config.batch_size])


def _sum_parallel(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    batches: Iterable[tuple[torch.Tensor, int]],
    num_workers: int,
) -> _Sums:
    """Adds up batches of (ids [n, length + 1], first position to count)."""
    with ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = pool.map(lambda batch: _sums(target, draft, *batch), batches)
        return sum(parts, _Sums())


@torch.no_grad()
def _sums(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: torch.Tensor, first: int) -> _Sums:
    total = _Sums()
    for row in ids:
        inputs, labels = row[None, :-1], row[1 + first :]
        ended = (labels == EOS_TOKEN_ID).cumsum(0) - (labels == EOS_TOKEN_ID).long()
        labels = labels[ended == 0]
        target_log_probs, draft_log_probs = (
            model(input_ids=inputs, use_cache=False).logits[0, first:][: len(labels)].float().log_softmax(-1)
            for model in (target, draft)
        )
        total += _Sums(
            num_positions=float(len(labels)),
            target_loss=-float(target_log_probs.gather(1, labels[:, None]).sum()),
            draft_loss=-float(draft_log_probs.gather(1, labels[:, None]).sum()),
            agreements=float((target_log_probs.argmax(-1) == draft_log_probs.argmax(-1)).sum()),
            overlap=float(torch.minimum(target_log_probs, draft_log_probs).exp().sum()),
        )
    return total


def _load(directory: Path, name: str) -> LlamaForCausalLM:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{name}: {directory} is not a checkpoint directory (no config.json)")
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    model.train(False)
    return model
