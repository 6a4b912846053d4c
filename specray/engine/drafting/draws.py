"""Draws and ranks draft tokens by the rows of a draft's forward, with what each request's grammar allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specray.engine.drafting.chains import Chain, OutcomeBranches
from specray.engine.drafting.trees import TreeRow
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler
from specray.engine.sampling.state import RowGroup
from specray.errors import SpecrayError

_LEAST_CHANCE = 1e-9
"""Chance of acceptance in the place of none, which has no logarithm."""


class DraftDraws:
    """Gives chains, branches and trees their next tokens.

    Args:
        grammars: masks for requests with a grammar; None: their draft tokens are drawn without.
    """

    def __init__(self, sampler: Sampler, grammars: GrammarMasks | None) -> None:
        self._sampler = sampler
        self._grammars = grammars

    def draw(self, logits: Tensor, chains: Sequence[Chain]) -> None:
        """Gives each chain its next token, drawn from its row of logits."""
        is_judged = any(chain.is_judged for chain in chains)
        chances = self._acceptance() if is_judged else None
        tokens = self._sampler.draw(
            logits, [self._masked(chain) for chain in chains], is_judged=is_judged and chances is None
        )
        for index, (chain, token) in enumerate(zip(chains, tokens, strict=True)):
            if chances is not None and token is not None and token.probs is None:
                token = token._replace(logprob=math.log(max(chances[index], _LEAST_CHANCE)))
            chain.take(token)

    def rank(self, logits: Tensor, outcomes: Sequence[OutcomeBranches]) -> None:
        """Makes a branch of each likely outcome; each wants a row of logits per number of accepted tokens."""
        ranked = iter(
            self._sampler.rank(
                logits,
                [self._masked(outcome) for outcome in outcomes],
                [count for outcome in outcomes for count in outcome.counts],
                [token for outcome in outcomes for token in outcome.excluded],
            )
        )
        for outcome in outcomes:
            outcome.spread([next(ranked) for _ in range(outcome.num_rows)])

    def spread(self, logits: Tensor, nodes: Sequence[TreeRow]) -> None:
        """Gives each node's next tokens to its tree."""
        groups = [self._masked(node) for node in nodes]
        ranked = self._sampler.rank(logits, groups, [node.count for node in nodes], [None] * len(nodes))
        for node, next_tokens in zip(nodes, ranked, strict=True):
            node.tree.add(node.node, next_tokens)

    def _acceptance(self) -> Sequence[float] | None:
        """Chance that each row's token is accepted; None: the draws say it."""
        return None

    def _masked(self, row: Chain | OutcomeBranches | TreeRow) -> RowGroup:
        """The rows with what a grammar allows; without where that is lost: the target refuses."""
        group = row.group
        if group.sampling.grammar is None or self._grammars is None:
            return group
        try:
            masks = self._grammars.masks(
                row.request_id, group.sampling, row.output_ids, group.token_ids, group.parents
            )
        except SpecrayError:
            return group
        return replace(group, token_masks=masks)
