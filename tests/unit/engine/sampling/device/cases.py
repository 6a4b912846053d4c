"""Random steps of rows under all rules and processors, for samplers to be compared over."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from specray.draft_tokens import DraftTokens, SparseProbs
from specray.engine.sampling.state import RowGroup, SamplingState, chain_rows, draft_rows
from specray.engine.sampling.verify import Round
from specray.types import SamplingParams, Verification


def random_sampling(
    rng: random.Random, vocab_size: int, num_prompt: int, *, plain: bool = False
) -> SamplingParams:
    """Any rule, with or without processors."""

    def sometimes(value: object, other: object) -> object:
        return value if not plain and rng.random() < 0.4 else other

    def tokens(count: int) -> tuple[int, ...]:
        """Any but token 0, which must stay possible."""
        return tuple(rng.sample(range(1, vocab_size), min(count, vocab_size - 1)))

    return SamplingParams(
        temperature=rng.choice((0.0, 0.6, 1.0, 1.0, 1.7)),
        top_k=sometimes(rng.choice((1, 3, vocab_size, 10**6)), 0),
        top_p=sometimes(rng.choice((1e-9, 0.517, 0.8971, 0.991)), 1.0),
        min_p=sometimes(rng.choice((0.02, 0.3, 1.0)), 0.0),
        repetition_penalty=sometimes(rng.choice((0.7, 1.3)), 1.0),
        presence_penalty=sometimes(0.7, 0.0),
        frequency_penalty=sometimes(-0.4, 0.0),
        logit_bias=sometimes(tuple((token, rng.uniform(-3, 3)) for token in tokens(3)), ()),
        min_tokens=sometimes(4, 0),
        stop_token_ids=tokens(2),
        allowed_token_ids=sometimes((0, *tokens(vocab_size // 2)), ()),
        bad_words=sometimes((*((token,) for token in tokens(2)), *filter(None, (tokens(2), tokens(3)))), ()),
        seed=rng.choice((rng.getrandbits(64), rng.getrandbits(20))),
        num_prompt_tokens=num_prompt,
        verification=rng.choice((Verification.COUPLED, Verification.REJECTION)),
    )  # type: ignore[arg-type]


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Rows from flat to peaked, some with ties."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    spread = torch.tensor([rng.choice((0.0, 0.3, 2.0, 2.0, 9.0)) for _ in range(num_rows)])[:, None]
    logits = spread * torch.randn(num_rows, vocab_size, generator=generator)
    is_coarse = torch.tensor([rng.random() < 0.3 for _ in range(num_rows)])[:, None]
    return torch.where(is_coarse, logits.round(), logits)


def random_group(rng: random.Random, vocab_size: int, num_drafts: int, *, plain: bool = False) -> RowGroup:
    """The rows of a sequence with some draft tokens: a chain, or half the time a tree where it can be one."""
    num_prompt = rng.randint(1, 6)
    sampling = random_sampling(rng, vocab_size, num_prompt, plain=plain)
    # A prompt, and what a draft with a larger vocabulary proposed, may have tokens that the logits lack.
    prefix = [rng.randrange(vocab_size + 3) for _ in range(rng.randint(1, 12))]
    drafts = [rng.randrange(vocab_size) for _ in range(num_drafts)]
    state, masks = SamplingState(sampling, prefix), _random_masks(rng, vocab_size, num_drafts)
    if rng.random() < 0.5:
        return chain_rows(state, drafts, token_masks=masks)
    parents = tuple(rng.randrange(-1, node) for node in range(num_drafts))
    return draft_rows(state, DraftTokens(tuple(drafts), parents), token_masks=masks)


def _random_masks(rng: random.Random, vocab_size: int, num_drafts: int) -> np.ndarray | None:
    """Of a tenth of the groups: bits of the tokens that a grammar would allow."""
    if rng.random() > 0.1:
        return None
    width = math.ceil(vocab_size / 32)
    masks = np.random.default_rng(rng.getrandbits(32)).integers(
        -(2**31), 2**31, size=(num_drafts + 1, width), dtype=np.int32
    )
    masks[:, 0] |= 1
    return masks


def random_round(rng: random.Random, vocab_size: int, logits: torch.Tensor) -> Round:
    """A sequence's draft tokens: with distributions near the target's, far from it, without, or wrong ones.

    Args:
        logits: the sequence's rows; one more than draft tokens.
    """
    group = random_group(rng, vocab_size, len(logits) - 1)
    if not group.token_ids or not group.is_tested or rng.random() < 0.3:
        return Round(group, group.token_ids, ())
    probs = []
    for row, token in zip(logits[:-1], group.token_ids, strict=True):
        # Some exactly the target's, so that a rejection leaves nothing.
        noise = rng.choice((0.0, 0.0, 1.0)) * torch.randn(vocab_size)
        values = (row.double() / (group.sampling.temperature or 1.0) + noise).softmax(-1)
        size = rng.choice((vocab_size, max(1, vocab_size // 2)))
        support = sorted(rng.sample(range(vocab_size), size))
        if rng.random() < 0.7 and token not in support:
            support[0] = token
        weights = values[support]
        if rng.random() < 0.2:
            weights[rng.randrange(size)] = 0.0
        if float(weights.sum()) == 0.0:
            weights[0] = 1.0
        probs.append(SparseProbs(tuple(support), tuple((weights / weights.sum()).tolist())))
    return Round(group, group.token_ids, tuple(probs))


def random_rounds(seed: int, vocab_size: int, num_sequences: int) -> tuple[torch.Tensor, list[Round]]:
    """A step of sequences with different numbers of draft tokens, and its logits."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rounds, pieces = [], []
    for _ in range(num_sequences):
        logits = random_logits(rng, 1 + rng.choice((0, 1, 2, 4)), vocab_size)
        pieces.append(logits)
        rounds.append(random_round(rng, vocab_size, logits))
    return torch.cat(pieces), rounds
