"""Drafting on the target: right after a verify, chains that go on from what it has just accepted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.cache.sequences import EngineSequence
from specray.engine.chains import Chain
from specray.engine.features.base import Context, FeatureDrafter, FeatureStore
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import make_sampler
from specray.engine.sampling.state import RowGroup
from specray.errors import OutOfBlocksError, SpecrayError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose verdict is known, and how many draft tokens are wanted behind it."""

    sequence: EngineSequence
    """All of its tokens are accepted."""
    next_token_id: int
    """Token that the target has drawn behind them."""
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Growing:
    sequence: EngineSequence
    context: Context
    chain: Chain


class TargetDrafting:
    """Drafts with the target's own drafter, in the vocabulary and with the noise of the target's draws.

    Args:
        drafter: loaded on the leader.
        store: features of what the target has computed.
        vocab_size, device: of the target.
        max_model_len: most tokens of a sequence.
        num_token_ids: token ids up to the tokenizer's last one; None: all may be proposed.
        max_num_draft_probs: support of the sparse draft distribution under rejection verification.
        grammars: masks for requests with a grammar; None: their draft tokens are drawn without.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        store: FeatureStore,
        *,
        vocab_size: int,
        device: torch.device,
        max_model_len: int,
        num_token_ids: int | None = None,
        max_num_draft_probs: int = 64,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self._drafter = drafter
        self._store = store
        self._max_model_len = max_model_len
        self._grammars = grammars
        self._sampler = make_sampler(
            vocab_size,
            device,
            max_num_draft_probs,
            num_token_ids=num_token_ids,
            token_ids=drafter.token_ids,
        )

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        """A chain for each request, all side by side; none where there is no room. Never raises."""
        try:
            return self._draft(requests)
        except Exception:
            # Verdicts are worth more than what might follow them.
            _log.exception("nothing was drafted for %d requests", len(requests))
            for request in requests:
                request.sequence.num_drafted_for = 0
            return [NO_DRAFT] * len(requests)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        growing = [self._begin(request) for request in requests]
        started = [each for each in growing if each is not None]
        before, logits = started, None
        if started:
            logits = self._drafter.start(self._store, [each.context for each in started])
        while before and logits is not None:
            self._draw(logits, [each.chain for each in before])
            kept = [index for index, each in enumerate(before) if not each.chain.is_full]
            tokens = [before[index].chain.token_ids[-1] for index in kept]
            logits = self._drafter.advance(kept, tokens) if kept else None
            before = [before[index] for index in kept]
        for each in started:
            # Up to the last token that is told: the next one's entry may be in a block that is given up.
            each.sequence.num_drafted_for = len(each.sequence.token_ids)
            each.sequence.block_table.truncate(len(each.sequence.token_ids))
        return [
            NO_DRAFT
            if each is None
            else DraftTokens(each.chain.draft_token_ids, probs=each.chain.draft_probs)
            for each in growing
        ]

    def _begin(self, request: DraftRequest) -> _Growing | None:
        """Gives a chain its room; None: it has none, or would be empty."""
        sequence, most = request.sequence, self._drafter.max_draft_tokens
        length = len(sequence.token_ids)
        num_wanted = min(request.num_tokens, self._max_model_len - length - 1)
        num_wanted = num_wanted if most is None else min(num_wanted, most)
        if num_wanted < 1 or sequence.num_computed_tokens < length:
            return None
        try:
            sequence.block_table.reserve(length + num_wanted)
        except OutOfBlocksError:
            return None
        token_ids = [*sequence.token_ids, request.next_token_id]
        state = sequence.told_state.fork()
        state.advance((request.next_token_id,))
        context = Context(token_ids.copy(), sequence.block_table.block_ids, sequence.num_drafted_for)
        return _Growing(sequence, context, Chain(state, token_ids, num_wanted, sequence=sequence))

    def _draw(self, logits: torch.Tensor, chains: Sequence[Chain]) -> None:
        tokens = self._sampler.draw(logits, [self._masked(chain) for chain in chains])
        for chain, token in zip(chains, tokens, strict=True):
            chain.take(token)

    def _masked(self, chain: Chain) -> RowGroup:
        """The row with what its request's grammar allows; without where that is lost: the target refuses."""
        group = chain.group
        if group.sampling.grammar is None or self._grammars is None:
            return group
        try:
            # The drawn token is not told yet.
            output_ids = chain.token_ids[group.sampling.num_prompt_tokens :]
            masks = self._grammars.masks(chain.request_id, group.sampling, output_ids, ())
        except SpecrayError:
            return group
        return replace(group, token_masks=masks)
