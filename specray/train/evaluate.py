"""Measures how well a target predicts held-out code, and how often its draft agrees with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from specray.errors import ConfigError
from specray.train.corpus import CorpusConfig, SourceFile, held_out_files
from specray.train.draft.decoding import row_decoder
from specray.train.heads.loading import loaded


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """Sizes of the evaluation. Prompts are the first tokens of every held-out file that is long enough."""

    window_len: int = 1024
    prompt_lens: tuple[int, ...] = (64, 256, 512)
    continuation_len: int = 128
    max_prompts_per_len: int = 128
    batch_size: int = 32
    num_workers: int = 2


@dataclass(frozen=True, slots=True)
class TextScores:
    """Figures over all tokens of the held-out files, each file by itself, in windows of ``window_len``."""

    num_files: int
    num_tokens: int
    num_bytes: int
    target_loss: float
    """Nats per token."""
    draft_loss: float
    target_bits_per_byte: float
    draft_bits_per_byte: float
    agreement: float
    """Share of positions at which both argmaxes are equal."""


@dataclass(frozen=True, slots=True)
class SampleScores:
    """Figures over the positions of the target's own continuations, each up to its end-of-text token."""

    num_positions: int
    agreement: float
    overlap: float
    """Mean of sum(min(target_probs, draft_probs)): acceptance of rejection sampling at temperature 1."""


@dataclass(frozen=True, slots=True)
class PairEvaluation:
    held_out_text: TextScores
    greedy_samples: SampleScores
    temperature_1_samples: SampleScores


def evaluate_pair(
    target: str,
    draft: str,
    *,
    config: EvaluateConfig | None = None,
    files: Sequence[SourceFile] | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PairEvaluation:
    """Measures a pair of checkpoints on the files that the corpus of this environment holds out.

    Args:
        files: in place of those.
        on_stage: receives what is being measured.

    Raises:
        ConfigError: a checkpoint cannot be loaded, the tokenizers differ, or no file is held out.
    """
    config = config or EvaluateConfig()
    (large, tokenizer), (small, other) = (
        loaded(path, torch.bfloat16, role=role) for path, role in ((target, "target"), (draft, "draft"))
    )
    if other.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"draft: the tokenizer in {draft} differs from the one in {target}")
    on_stage("reading held-out files")
    texts = [file.text for file in files or held_out_files(CorpusConfig())]
    if not texts:
        raise ConfigError("corpus: no file of this environment is held out")
    documents = [torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id]) for text in texts]
    pair = _Pair(large, small, len(tokenizer), tokenizer.eos_token_id, config)
    on_stage("held-out text")
    text = pair.score_text(documents, sum(len(text.encode()) for text in texts))
    on_stage("greedy continuations")
    greedy = pair.score_samples(documents, temperature=0.0)
    on_stage("continuations at temperature 1")
    return PairEvaluation(text, greedy, pair.score_samples(documents, temperature=1.0))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Models of transformers, and how they are measured."""

    target: Any
    draft: Any
    vocab_size: int
    end_id: int
    config: EvaluateConfig

    def score_text(self, documents: Sequence[torch.Tensor], num_bytes: int) -> TextScores:
        """Teacher-forced figures; every token but the first of a document is predicted once."""
        length = self.config.window_len
        windows = (
            (document[start : start + length + 1][None], 0)
            for document in documents
            for start in range(0, len(document) - 1, length)
        )
        count, target_loss, draft_loss, agreements, _ = self._sum(windows)
        bits = 1 / (math.log(2) * num_bytes)
        return TextScores(
            num_files=len(documents),
            num_tokens=int(count),
            num_bytes=num_bytes,
            target_loss=target_loss / count,
            draft_loss=draft_loss / count,
            target_bits_per_byte=target_loss * bits,
            draft_bits_per_byte=draft_loss * bits,
            agreement=agreements / count,
        )

    def score_samples(self, documents: Sequence[torch.Tensor], *, temperature: float) -> SampleScores:
        """The target continues prefixes of the documents, and both models are compared where it wrote."""
        prompts = list(self._prompts(documents))
        with self._pool() as pool:
            rows = pool.map(
                lambda seed: self._continued(prompts[seed], temperature, seed), range(len(prompts))
            )
            batches = [(row, prompt.shape[1] - 1) for row, prompt in zip(rows, prompts, strict=True)]
        count, _, _, agreements, overlap = self._sum(batches)
        return SampleScores(int(count), agreements / count, overlap / count)

    def _prompts(self, documents: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        size = self.config.batch_size
        for length in self.config.prompt_lens:
            long_enough = [document[:length] for document in documents if len(document) > length]
            picked = long_enough[: self.config.max_prompts_per_len]
            yield from (torch.stack(picked[start : start + size]) for start in range(0, len(picked), size))

    def _continued(self, prompts: torch.Tensor, temperature: float, seed: int) -> torch.Tensor:
        """Each row of ``[n, length]`` and ``continuation_len`` tokens more; greedy at temperature 0."""
        generator = torch.Generator().manual_seed(seed)
        count = self.config.continuation_len
        decoder = row_decoder(self.target, num_rows=len(prompts), max_len=prompts.shape[1] + count)
        rows = [prompts]
        for _ in range(count):
            logits = decoder.forward(rows[-1])[:, : self.vocab_size].float()
            if temperature == 0:
                rows.append(logits.argmax(-1, keepdim=True))
            else:
                rows.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        return torch.cat(rows, 1)

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.config.num_workers, initializer=torch.set_num_threads, initargs=(1,))

    def _sum(self, batches: Iterable[tuple[torch.Tensor, int]]) -> list[float]:
        """Positions, losses of target and draft, agreements and overlaps of (ids, first position) pairs."""
        with self._pool() as pool:
            parts = list(pool.map(lambda batch: self._sums(*batch), batches))
        sums: list[float] = torch.stack(parts).sum(0).tolist()
        return sums

    @torch.no_grad()
    def _sums(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        total = torch.zeros(5, dtype=torch.float64)
        for row in ids:
            labels = row[1 + first :]
            is_end = (labels == self.end_id).long()
            labels = labels[is_end.cumsum(0) == is_end]
            target, draft = (
                model(input_ids=row[None, :-1], use_cache=False)
                .logits[0, first:][: len(labels), : self.vocab_size]
                .float()
                .log_softmax(-1)
                for model in (self.target, self.draft)
            )
            losses = [-float(own.gather(1, labels[:, None]).sum()) for own in (target, draft)]
            agreements = float((target.argmax(-1) == draft.argmax(-1)).sum())
            overlap = float(torch.minimum(target, draft).exp().sum())
            total += torch.tensor([len(labels), *losses, agreements, overlap], dtype=torch.float64)
        return total
