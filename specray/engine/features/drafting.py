"""Drafting from features: many sequences side by side; on the target, behind what it has just accepted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.chains import Chain, OutcomeBranches
from specray.engine.features.base import FeatureDrafter, FeatureStore
from specray.engine.features.growing import (
    DraftRequest,
    Growing,
    GrowingChain,
    GrowingTree,
    begin,
    masked_output,
)
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import make_sampler
from specray.engine.sampling.state import RowGroup
from specray.engine.trees import TreeRow
from specray.errors import OutOfBlocksError, SpecrayError

_log = logging.getLogger(__name__)

_LEAST_CHANCE = 1e-9
"""Chance of acceptance in the place of none, which has no logarithm."""


class FeatureDrafting:
    """Drafts with a drafter that reads features, in the vocabulary and with the noise of the target's draws.

    Args:
        drafter: loaded; on the target, on the leader.
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

    def grow(self, growing: Iterable[Growing]) -> None:
        """Continues chains and trees until each has its tokens; every token before them has its features."""
        # The chains first: their rows are drawn from together, as are those of trees.
        started = sorted(growing, key=lambda each: isinstance(each, GrowingTree))
        if started:
            self._grow(started, self._drafter.start(self._store, [each.context for each in started]))

    @property
    def max_draft_tokens(self) -> int | None:
        """Most draft tokens of a path; None: any number."""
        return self._drafter.max_draft_tokens

    @property
    def rank_acceptance(self) -> tuple[tuple[float, ...], ...]:
        """See ``base.FeatureDrafter``."""
        return self._drafter.rank_acceptance

    def _grow(self, growing: Sequence[Growing], logits: torch.Tensor) -> None:
        """Continues all until each has its tokens; the rows of logits are theirs, one after the other."""
        while growing:
            # Where each one's rows begin: one that is full has none after the draw.
            starts = [0, *accumulate(len(each.rows) for each in growing)][:-1]
            chains = [row for each in growing if isinstance(each, GrowingChain) for row in each.rows]
            nodes = [row for each in growing if isinstance(each, GrowingTree) for row in each.rows]
            if chains:
                self.draw(logits[: len(chains)], chains)
            if nodes:
                self._spread(logits[len(chains) :], nodes)
            going = [(each, each.advance(start)) for each, start in zip(growing, starts, strict=True)]
            growing = [each for each, continued in going if continued is not None]
            if growing:
                logits = self._drafter.advance([rows for _, rows in going if rows is not None])

    def draw(self, logits: torch.Tensor, chains: Sequence[Chain]) -> None:
        """Gives each chain its next token, drawn from its row of logits."""
        groups = [self._masked(chain) for chain in chains]
        is_judged = any(chain.is_judged for chain in chains)
        # A drafter that judges itself: its first rows are the chains'.
        chances = self._drafter.acceptance() if is_judged else None
        tokens = self._sampler.draw(logits, groups, is_judged=is_judged and chances is None)
        for index, (chain, token) in enumerate(zip(chains, tokens, strict=True)):
            if chances is not None and token is not None and token.probs is None:
                token = token._replace(logprob=math.log(max(chances[index], _LEAST_CHANCE)))
            chain.take(token)

    def rank(self, logits: torch.Tensor, outcomes: Sequence[OutcomeBranches]) -> None:
        """Makes a branch of each likely outcome, by a row of logits for each number of accepted tokens."""
        ranked = self._sampler.rank(
            logits,
            [
                self._with_masks(outcome.group, outcome.sequence.request_id, outcome.output_ids)
                for outcome in outcomes
            ],
            [count for outcome in outcomes for count in outcome.counts],
            [token for outcome in outcomes for token in outcome.excluded],
        )
        rows = iter(ranked)
        for outcome in outcomes:
            outcome.spread([next(rows) for _ in range(outcome.num_rows)])

    def _spread(self, logits: torch.Tensor, nodes: Sequence[TreeRow]) -> None:
        """Gives each node's next tokens to its tree."""
        groups = [self._masked(node) for node in nodes]
        ranked = self._sampler.rank(logits, groups, [node.count for node in nodes], [None] * len(nodes))
        for node, next_tokens in zip(nodes, ranked, strict=True):
            node.tree.add(node.node, next_tokens)

    def _masked(self, row: Chain | TreeRow) -> RowGroup:
        """The row with what its request's grammar allows."""
        group, output_ids = masked_output(row)
        return self._with_masks(group, row.request_id, output_ids)

    def _with_masks(self, group: RowGroup, request_id: str, output_ids: list[int]) -> RowGroup:
        """The rows with what a grammar allows; without where that is lost: the target refuses."""
        if group.sampling.grammar is None or self._grammars is None:
            return group
        try:
            masks = self._grammars.masks(request_id, group.sampling, output_ids, group.token_ids)
        except SpecrayError:
            return group
        return replace(group, token_masks=masks)


class TargetDrafting(FeatureDrafting):
    """Drafts with the target's own drafter, right after a verify."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        """What follows each request, all side by side; nothing where there is no room. Never raises."""
        try:
            return self._draft(requests)
        except Exception:
            # Verdicts are worth more than what might follow them.
            _log.exception("nothing was drafted for %d requests", len(requests))
            for request in requests:
                request.sequence.num_drafted_for = 0
            return [NO_DRAFT] * len(requests)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        begun = [self._begin(request) for request in requests]
        self.grow(each for each in begun if each is not None)
        for request, each in zip(requests, begun, strict=True):
            if each is not None:
                sequence = request.sequence
                # Up to the last token that is told: the next one's entry may be in a block that is given up.
                sequence.num_drafted_for = len(sequence.token_ids)
                if not request.is_moved:
                    sequence.block_table.truncate(len(sequence.token_ids))
        return [NO_DRAFT if each is None else each.drawn for each in begun]

    def _begin(self, request: DraftRequest) -> Growing | None:
        """Gives a chain or a tree its room; None: it has none, or would be empty."""
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
        return begin(request, num_wanted, self._drafter.rank_acceptance)
