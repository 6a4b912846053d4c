"""A draft that proposes text, for pairs whose vocabularies have little in common."""

from __future__ import annotations

from dataclasses import replace

from specray.draft_tokens import DraftTokens, SparseProbs
from specray.engine.cache.sequence import EngineSequence
from specray.engine.draft_view.engine import DraftViewEngine
from specray.engine.draft_view.view import DraftView
from specray.engine.drafting.engine import Task
from specray.types import DraftReply, Proposal, SamplingParams, SpeculateItem

_NUM_BEHIND = 4
"""Target's tokens before a text with which it is tokenized, since the target may have joined them."""


class RetokenizingDraftEngine(DraftViewEngine):
    """A draft that goes on in its own tokens, whose text the target's tokenizer splits anew.

    Nothing says how likely the draft would have come to such tokens. So they are its likeliest, chosen
    without randomness, and accepted where the target draws the same; under rejection each was certain.
    Outcomes and trees would need the target's tokens one by one: there are none.
    """

    def _translated(self, item: SpeculateItem, view: DraftView) -> SpeculateItem | None:
        if item.fanout:
            return None
        own = super()._translated(item, view)
        return None if own is None else replace(own, tree=None)

    def _own_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return SamplingParams(temperature=0.0, cache_salt=sampling.cache_salt)

    def _keep_and_append(self, item: SpeculateItem, num_extra_tokens: int) -> EngineSequence:
        sequence = super()._keep_and_append(item, num_extra_tokens)
        sequence.committed = None
        return sequence

    def _reply(self, item: SpeculateItem, task: Task | None) -> DraftReply:
        reply = super()._reply(item, task)
        if not isinstance(reply, Proposal) or not reply.draft:
            return reply
        assert self._vocabulary is not None, "the same vocabulary needs no other tokens"
        view = self._views[item.request_id]
        written = self._vocabulary.write(reply.draft.token_ids, view.token_ids[-_NUM_BEHIND:])
        token_ids = written[: item.num_speculative_tokens]
        by_rejection = view.sampling.draws_by_rejection
        probs = tuple(SparseProbs((token_id,), (1.0,)) for token_id in token_ids) if by_rejection else ()
        return replace(reply, draft=DraftTokens(token_ids, probs=probs))
