"""The draft engines for a draft with its own view of a request: another vocabulary, a window, its own text.

Towards the router it is an engine of the target's vocabulary. Items are translated on their way in, so that
everything below works on the draft's own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specray.config import PrefixCache
from specray.draft_tokens import DraftTokens, SparseProbs
from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.sequences import UnknownSequenceError
from specray.engine.draft_view.view import DraftView, Vocabulary
from specray.engine.drafting.engine import DraftEngine, Task
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler
from specray.engine.schedule import Runner, check_length, check_token_ids
from specray.engine.window import DraftWindow
from specray.engine_info import EngineInfo
from specray.errors import ProtocolError
from specray.types import DraftReply, Proposal, SamplingParams, SpeculateItem

_NUM_BEHIND = 4
"""Target's tokens before a text with which it is tokenized, since the target may have joined them."""
NO_LIMIT = 2**31 - 1
"""Tokens of a sequence that a draft with a window takes: any number."""


class DraftViewEngine(DraftEngine):
    """Implements ``interfaces.SyncDraftEngine``.

    Args:
        info: of the draft, in its own vocabulary.
        router_info: the engine as the router sees it: the target's vocabulary.
        vocabulary: translates the target's tokens; None: the draft has the same.
        window: how many of them it sees; None: all.
        sampler: draws the target's tokens from the draft's logits; None: the vocabularies are the same.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        router_info: EngineInfo,
        device: torch.device,
        vocabulary: Vocabulary | None = None,
        window: DraftWindow | None = None,
        sampler: Sampler | None = None,
        prefix_cache: PrefixCache = True,
        grammars: GrammarMasks | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        super().__init__(
            runner,
            info,
            device=device,
            prefix_cache=prefix_cache,
            grammars=grammars,
            sampler=sampler,
            adapters=adapters,
        )
        self._router_info = router_info
        self._num_item_ids = router_info.vocab_size
        self._vocabulary = vocabulary
        self._window = window
        self._views: dict[str, DraftView] = {}

    @property
    def info(self) -> EngineInfo:
        """The engine as the router sees it: with the target's vocabulary."""
        router_info = self._router_info
        return replace(
            super().info,
            vocab_size=router_info.vocab_size,
            tokenizer_fingerprint=router_info.tokenizer_fingerprint,
            max_model_len=self._info.max_model_len if self._window is None else NO_LIMIT,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        super().release(request_ids)
        for request_id in request_ids:
            self._views.pop(request_id, None)

    def _admit(self, item: SpeculateItem) -> Task | None:
        own = self._translated(item, self._updated_view(item))
        if own is None:
            return None
        try:
            return super()._admit(own)
        except UnknownSequenceError:
            # The sequence was evicted: the router sends everything again.
            del self._views[item.request_id]
            raise

    def _updated_view(self, item: SpeculateItem) -> DraftView:
        """The request's view with the item's tokens. Raises before anything changed."""
        length = item.base_len + len(item.token_ids)
        check_length(item.base_len, length, NO_LIMIT)
        check_token_ids("token_ids", item.token_ids, self._num_item_ids)
        check_token_ids("proposed_token_ids", item.proposed_token_ids, self._num_item_ids)
        view = self._views.get(item.request_id)
        num_held = 0 if view is None else len(view.token_ids)
        if item.base_len > num_held:
            raise UnknownSequenceError(f"{num_held} tokens are held, base_len is {item.base_len}")
        if view is None:
            if item.sampling is None:
                raise ProtocolError("sampling is missing; it is needed with base_len 0")
            view = DraftView(self._vocabulary, self._window, item.sampling)
            self._views[item.request_id] = view
        view.tell(item.base_len, item.token_ids, item.sampling)
        return view

    def _translated(self, item: SpeculateItem, view: DraftView) -> SpeculateItem | None:
        """The item in the draft's own tokens; None: there is nothing to do, or the draft cannot do it."""
        item = item.of_first_chain()
        asks = item.num_speculative_tokens > 0 or bool(item.fanout)
        if not asks and view.start > 0:
            # A prompt, longer than the window, of which more may come: it is read when it is all there.
            return None
        proposed = view.own_ids(item.proposed_token_ids)
        # A branch holds at least its next token.
        if not 0 < view.num_seen + len(proposed) < self._info.max_model_len:
            return None
        base_len, token_ids = view.update()
        num_proposed = len(proposed)
        is_told_sampling = base_len == 0 or item.sampling is not None
        return replace(
            item,
            base_len=base_len,
            token_ids=tuple(token_ids),
            proposed_token_ids=item.proposed_token_ids[:num_proposed],
            fanout=item.fanout[: num_proposed + 1],
            sampling=self._own_sampling(view.sampling) if is_told_sampling else None,
        )

    def _own_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def _keep_and_append(self, item: SpeculateItem, num_extra_tokens: int) -> EngineSequence:
        sequence = super()._keep_and_append(item, num_extra_tokens)
        view = self._views[item.request_id]
        view.hold()
        sequence.committed = view
        return sequence


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
        return SamplingParams(temperature=0.0, cache_salt=sampling.cache_salt, adapter=sampling.adapter)

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
