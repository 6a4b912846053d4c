"""The draft engine that runs a drafter of features: what the target has computed comes with the items.

A sequence holds the tokens that it received, and features of the first of them: features of a token depend on
it and those before, as K/V do, so ``num_computed_tokens`` counts them. The last told token is drawn and has
none yet. Its entry needs those of the token before::

    told tokens      t0   t1   t2   t3   t4
    features         f0   f1   f2   f3
    entries          -    e1   e2   e3   e4   -> draft tokens

Entries are computed from the target's features alone, whatever was drafted in between. Where some are missing
nothing is drafted: the answer is empty, and the next item may bring them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specray.engine.base import Speculating, check_logits
from specray.engine.cache.sequence import EngineSequence
from specray.engine.drafting.chains import OutcomeBranches
from specray.engine.features.base import Context, FeatureDrafter, FeatureStore
from specray.engine.features.chained.drafter import ChainedDrafter
from specray.engine.features.drafting import FeatureDrafting
from specray.engine.features.growing import DraftRequest, Growing, begin
from specray.engine.features.remote.outcomes import draft_outcomes
from specray.engine.features.remote.wire import read_rows
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.schedule import check_speculation, wanted_rows
from specray.engine_info import EngineInfo
from specray.types import DraftReply, Outcomes, Proposal, SpeculateItem

_CHECK_TOKENS = 2
"""Tokens of the health check: one for an entry, and the one before it."""


@dataclass(frozen=True, slots=True)
class _Task:
    """An item whose sequence has its tokens, its features and its room."""

    sequence: EngineSequence
    growing: Growing | None = None
    """The proposal's chain or tree."""
    outcome: OutcomeBranches | None = None
    """Outcome branches. Both None: nothing to draft, or features are missing."""


class FeatureDraftEngine(Speculating[_Task]):
    """Implements ``interfaces.SyncDraftEngine`` over a drafter.

    Args:
        drafter: loaded in this process.
        store: takes the features of its tokens.
        drafting: draws with the drafter, from the store.
        info: description of the engine, whose limits hold here; a block or two are kept for ``check``.
        grammars: of the requests; None: their draft tokens are drawn without.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        store: FeatureStore,
        drafting: FeatureDrafting,
        info: EngineInfo,
        *,
        grammars: GrammarMasks | None = None,
    ) -> None:
        super().__init__(info, can_evict=True, grammars=grammars, num_check_tokens=_CHECK_TOKENS)
        self._drafter = drafter
        self._chained = drafter if isinstance(drafter, ChainedDrafter) and not drafter.has_masks else None
        """The drafter, where it goes on from its own output."""
        self._store = store
        self._drafting = drafting

    @torch.inference_mode()
    def check(self) -> None:
        """Drafts a token in the room kept for it. Raises EngineLostError for broken logits."""
        context = Context((0,) * _CHECK_TOKENS, self._check_table.block_ids, 0)
        self._store.rows[self._check_table.block_ids[0] * self._info.block_size] = 0.0
        check_logits(self._drafter.start(self._store, [context]))

    def _admit(self, item: SpeculateItem) -> _Task:
        check_speculation(item, self._info, num_item_ids=self._info.vocab_size)
        item = item.of_first_chain()
        limit = self._info.max_model_len
        first, last = wanted_rows(item, limit) if item.fanout else (0, -1)
        proposed = item.proposed_token_ids[: max(last, 0)]
        rows = None
        if item.features is not None:
            rows = read_rows(item.features, self._info.feature_size, like=self._store.rows)
        length = item.base_len + len(item.token_ids)
        num_wanted = min(len(proposed) + bool(item.fanout) + item.num_speculative_tokens, limit - length)
        sequence = self.table.keep_and_append(
            item.request_id, item.base_len, item.token_ids, item.sampling, num_extra_tokens=num_wanted
        )
        sequence.set_tail(())
        if rows is not None:
            assert item.features is not None
            self._take(sequence, item.features.first, rows)
        if num_wanted < 1 or length < _CHECK_TOKENS or sequence.num_computed_tokens < length - 1:
            return _Task(sequence)
        if item.fanout:
            if last < 0 or self._chained is None:
                return _Task(sequence)
            sequence.set_tail(proposed)
            return _Task(sequence, outcome=OutcomeBranches(item, sequence, first, last, limit))
        num_wanted = min(num_wanted, self._drafter.max_draft_tokens or num_wanted)
        request = DraftRequest(sequence, None, num_wanted, item.min_acceptance, item.tree)
        return _Task(sequence, growing=begin(request, num_wanted, self._drafting.rank_acceptance))

    def _take(self, sequence: EngineSequence, first: int, rows: torch.Tensor) -> None:
        start, end = sequence.num_computed_tokens, min(first + len(rows), sequence.num_tokens)
        if first > start or start >= end:
            return
        self._store.write_tokens(sequence.block_table.block_ids, start, rows[start - first : end - first])
        sequence.num_computed_tokens = end

    def _work(self, tasks: Sequence[_Task]) -> None:
        for task in tasks:
            if task.growing is None and task.outcome is None:
                self._read(task.sequence)
        self._drafting.grow(task.growing for task in tasks if task.growing is not None)
        outcomes = [task.outcome for task in tasks if task.outcome is not None]
        if outcomes:
            assert self._chained is not None, "others have no outcomes"
            draft_outcomes(self._chained, self._store, self._drafting, outcomes)
        for task in tasks:
            sequence = task.sequence
            sequence.set_tail(())
            if task.growing is not None or task.outcome is not None:
                sequence.num_drafted_for = sequence.num_tokens - self._drafter.num_unread
            sequence.block_table.truncate(sequence.num_tokens)

    def _reply(self, item: SpeculateItem, task: _Task | None) -> DraftReply:
        if task is not None and task.outcome is not None:
            branches = tuple(each.reply for each in task.outcome.branches)
            return Outcomes(item.request_id, item.round_id, item.base_len, branches)
        if task is not None and task.growing is not None:
            return Proposal(item.request_id, item.round_id, item.base_len, task.growing.drawn)
        return super()._reply(item, task)

    def _read(self, sequence: EngineSequence) -> None:
        """Catches up with a sequence for which nothing is drafted now, as far as its features go."""
        end = min(sequence.num_tokens, sequence.num_computed_tokens + 1)
        kept = end - self._drafter.num_unread
        if sequence.num_computed_tokens and kept > sequence.num_drafted_for:
            context = Context(
                sequence.token_ids[:end], sequence.block_table.block_ids, sequence.num_drafted_for
            )
            self._drafter.read(self._store, context)
            sequence.num_drafted_for = kept
