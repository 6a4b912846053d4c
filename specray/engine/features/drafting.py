"""Drafting from features: many sequences side by side; on the target, after what it has just accepted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.cache.sequence import EngineSequence
from specray.engine.drafting.draws import DraftDraws
from specray.engine.features.base import Context, FeatureDrafter, FeatureStore
from specray.engine.features.growing import DraftRequest, Growing, GrowingChain, GrowingTree, begin
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import make_sampler
from specray.errors import OutOfBlocksError

_log = logging.getLogger(__name__)

MAX_READ_TOKENS = 2048
"""Tokens of a sequence that one step of the target reads at most; nothing is drafted until all are read."""


class FeatureDrafting(DraftDraws):
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
        sampler = make_sampler(
            vocab_size,
            device,
            max_num_draft_probs,
            num_token_ids=num_token_ids,
            token_ids=drafter.token_ids,
        )
        super().__init__(sampler, grammars)
        self._drafter = drafter
        self._store = store
        self._max_model_len = max_model_len

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
        return self._drafter.rank_acceptance

    def _grow(self, growing: Sequence[Growing], logits: torch.Tensor) -> None:
        while growing:
            # Where each one's rows begin: one that is full has none after the draw.
            starts = [0, *accumulate(len(each.rows) for each in growing)][:-1]
            chains = [row for each in growing if isinstance(each, GrowingChain) for row in each.rows]
            nodes = [row for each in growing if isinstance(each, GrowingTree) for row in each.rows]
            if chains:
                self.draw(logits[: len(chains)], chains)
            if nodes:
                self.spread(logits[len(chains) :], nodes)
            going = [(each, each.advance(start)) for each, start in zip(growing, starts, strict=True)]
            growing = [each for each, continued in going if continued is not None]
            if growing:
                logits = self._drafter.advance([rows for _, rows in going if rows is not None])

    def _acceptance(self) -> Sequence[float] | None:
        # Of a drafter that judges itself: its first rows are the chains'.
        return self._drafter.acceptance()


class Failures:
    """Whom a target drafts for together after its drafter has failed, and for whom no more.

    Of those that failed together each is tried alone next; one that fails alone is left out.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        """Requests that fit the memory together; None: any number."""
        self._apart: set[str] = set()
        self._left_out: set[str] = set()

    def groups(self, requests: Sequence[DraftRequest]) -> list[list[DraftRequest]]:
        """Groups of requests that are drafted for together; some may be in none."""
        served = [each for each in requests if each.sequence.request_id not in self._left_out]
        together = [each for each in served if each.sequence.request_id not in self._apart]
        size = self._most or max(1, len(together))
        groups = [together[first : first + size] for first in range(0, len(together), size)]
        return groups + [[each] for each in served if each.sequence.request_id in self._apart]

    def add(self, group: Sequence[DraftRequest], error: Exception) -> None:
        """What drafting for a group raised."""
        names = [each.sequence.request_id for each in group]
        if len(names) == 1:
            self._left_out.update(names)
            _log.warning("nothing more is drafted on the target for request %r", names[0], exc_info=error)
            return
        self._apart.update(names)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            self._most = len(names) // 2
            _log.warning("the drafter has memory for less than %d requests at once", len(names))
        _log.warning("nothing was drafted for %d requests; each is tried alone", len(names), exc_info=error)

    def clear(self, group: Sequence[DraftRequest]) -> None:
        """Drafting for a group has not failed."""
        self._apart.difference_update(each.sequence.request_id for each in group)

    def forget(self, request_ids: Iterable[str]) -> None:
        self._apart.difference_update(request_ids)
        self._left_out.difference_update(request_ids)


class TargetDrafting(FeatureDrafting):
    """Drafts with the target's own drafter, right after a verify."""

    def __init__(self, drafter: FeatureDrafter, store: FeatureStore, **settings: Any) -> None:
        super().__init__(drafter, store, **settings)
        self._failures = Failures()

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        """What follows each request, all side by side; nothing where there is no room. Never raises."""
        drawn: dict[str, DraftTokens] = {}
        for group in self._failures.groups(requests):
            try:
                drafts = self._draft(group)
            except Exception as error:
                # Verdicts are worth more than what might follow them.
                self._failures.add(group, error)
                for request in group:
                    _give_up_room(request)
            else:
                self._failures.clear(group)
                for request, draft in zip(group, drafts, strict=True):
                    drawn[request.sequence.request_id] = draft
        return [drawn.get(request.sequence.request_id, NO_DRAFT) for request in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        self._failures.forget(request_ids)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
        begun = [self._begin(request) for request in requests]
        self.grow(each for each in begun if each is not None)
        for request, each in zip(requests, begun, strict=True):
            if each is not None:
                # Up to the last token that is told: the next one's entry may be in a block that is given up.
                request.sequence.num_drafted_for = len(request.sequence.token_ids)
                _give_up_room(request)
        return [NO_DRAFT if each is None else each.drawn for each in begun]

    def _begin(self, request: DraftRequest) -> Growing | None:
        """Gives a chain or a tree its room; None: it has none, would be empty, or must be read first."""
        sequence, most = request.sequence, self._drafter.max_draft_tokens
        length = len(sequence.token_ids)
        num_wanted = min(request.num_tokens, self._max_model_len - length - 1)
        num_wanted = num_wanted if most is None else min(num_wanted, most)
        if num_wanted < 1 or sequence.num_computed_tokens < length or self._read_on(sequence):
            return None
        try:
            sequence.block_table.reserve(length + num_wanted)
        except OutOfBlocksError:
            return None
        return begin(request, num_wanted, self._drafter.rank_acceptance)

    def _read_on(self, sequence: EngineSequence) -> bool:
        """Reads a part of a sequence of which one step cannot read all; False: what is left fits a step."""
        kept = sequence.num_drafted_for + MAX_READ_TOKENS
        if not self._drafter.keeps_state or kept >= len(sequence.token_ids):
            return False
        token_ids = sequence.token_ids[: kept + self._drafter.num_unread]
        context = Context(token_ids, sequence.block_table.block_ids, sequence.num_drafted_for)
        self._drafter.read(self._store, context)
        sequence.num_drafted_for = kept
        return True


def _give_up_room(request: DraftRequest) -> None:
    """Gives up the room of draft tokens, unless K/V are still to be moved out of it."""
    if not request.is_moved:
        request.sequence.block_table.truncate(len(request.sequence.token_ids))
