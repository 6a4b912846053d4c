"""The draft engine for a draft that reads other tokens than the router tells: another vocabulary, a window.

Towards the router it is an engine of the target's vocabulary. Items are translated on their way in, so that
everything below works on the draft's own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specray.draft_tokens import NO_DRAFT
from specray.engine.cache.sequences import EngineSequence, UnknownSequenceError
from specray.engine.draft_view.view import Reading, Vocabulary
from specray.engine.drafting.engine import DraftEngine
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.sampler import Sampler
from specray.engine.schedule import Runner, check_length, check_token_ids, failure_reply
from specray.engine.window import Window
from specray.errors import ProtocolError, SpecrayError
from specray.types import (
    DraftReply,
    EngineInfo,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    UnknownSequence,
)

NO_LIMIT = 2**31 - 1
"""Tokens of a sequence that a draft with a window takes: any number."""


class ReadingDraftEngine(DraftEngine):
    """Implements ``interfaces.SyncDraftEngine``.

    Args:
        info: of the draft, in its own vocabulary.
        told: of the engine as the router sees it: the target's vocabulary.
        vocabulary: how the draft reads the target's tokens; None: it has the same.
        window: how many of them it sees; None: all.
        sampler: draws the target's tokens from the draft's logits; None: the vocabularies are the same.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        told: EngineInfo,
        device: torch.device,
        vocabulary: Vocabulary | None = None,
        window: Window | None = None,
        sampler: Sampler | None = None,
        prefix_cache: bool = True,
        grammars: GrammarMasks | None = None,
    ) -> None:
        super().__init__(
            runner,
            info,
            device=device,
            prefix_cache=prefix_cache,
            grammars=grammars,
            sampler=sampler,
        )
        self._told = told
        self._num_told_ids = told.vocab_size
        self._vocabulary = vocabulary
        self._window = window
        self._readings: dict[str, Reading] = {}

    @property
    def info(self) -> EngineInfo:
        """The engine as the router sees it: with the target's vocabulary."""
        told = self._told
        return replace(
            super().info,
            vocab_size=told.vocab_size,
            tokenizer_fingerprint=told.tokenizer_fingerprint,
            max_model_len=self._info.max_model_len if self._window is None else NO_LIMIT,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences, and forgets what they read; unknown ids are ignored."""
        super().release(request_ids)
        for request_id in request_ids:
            self._readings.pop(request_id, None)

    def _speculate_wave(self, wave: Sequence[tuple[int, SpeculateItem]]) -> dict[int, DraftReply]:
        replies: dict[int, DraftReply] = {}
        asked: list[tuple[int, SpeculateItem]] = []
        items = dict(wave)
        for index, item in wave:
            try:
                own = self._translated(item, self._told_reading(item))
            except SpecrayError as error:
                replies[index] = failure_reply(item, error)
            else:
                if own is None:
                    replies[index] = _nothing(item)
                else:
                    asked.append((index, own))
        for index, reply in super()._speculate_wave(asked).items():
            replies[index] = self._answer(items[index], reply)
        return replies

    def _told_reading(self, item: SpeculateItem) -> Reading:
        """The request's reading with what the item tells. Raises before anything changed."""
        length = item.base_len + len(item.token_ids)
        check_length(item.base_len, length, NO_LIMIT)
        check_token_ids("token_ids", item.token_ids, self._num_told_ids)
        check_token_ids("proposed_token_ids", item.proposed_token_ids, self._num_told_ids)
        reading = self._readings.get(item.request_id)
        num_held = 0 if reading is None else len(reading.token_ids)
        if item.base_len > num_held:
            raise UnknownSequenceError(f"{num_held} tokens are held, base_len is {item.base_len}")
        if reading is None:
            if item.sampling is None:
                raise ProtocolError("sampling is missing; it is needed with base_len 0")
            reading = Reading(self._vocabulary, self._window, item.sampling)
            self._readings[item.request_id] = reading
        reading.tell(item.base_len, item.token_ids, item.sampling)
        return reading

    def _translated(self, item: SpeculateItem, reading: Reading) -> SpeculateItem | None:
        """The item in the draft's own tokens; None: there is nothing to do, or the draft cannot do it."""
        item = item.of_first_chain()
        asks = item.num_speculative_tokens > 0 or bool(item.fanout)
        if not asks and reading.start > 0:
            # A prompt, longer than the window, of which more may come: it is read when it is all there.
            return None
        proposed = reading.own_ids(item.proposed_token_ids)
        # A branch holds at least its next token.
        if not 0 < reading.num_seen + len(proposed) < self._info.max_model_len:
            return None
        base_len, token_ids = reading.view()
        num_proposed = len(proposed)
        is_told_sampling = base_len == 0 or item.sampling is not None
        return replace(
            item,
            base_len=base_len,
            token_ids=tuple(token_ids),
            proposed_token_ids=item.proposed_token_ids[:num_proposed],
            fanout=item.fanout[: num_proposed + 1],
            sampling=self._own_sampling(reading.sampling) if is_told_sampling else None,
        )

    def _own_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Parameters with which the draft draws."""
        return sampling

    def _keep_and_append(self, item: SpeculateItem, num_extra_tokens: int) -> EngineSequence:
        sequence = super()._keep_and_append(item, num_extra_tokens)
        reading = self._readings[item.request_id]
        reading.hold()
        sequence.told = reading
        return sequence

    def _answer(self, item: SpeculateItem, reply: DraftReply) -> DraftReply:
        """The draft's reply in the router's terms."""
        if isinstance(reply, UnknownSequence):
            # The sequence was evicted: the router tells everything again.
            self._readings.pop(item.request_id, None)
        return replace(reply, base_len=item.base_len)


def _nothing(item: SpeculateItem) -> DraftReply:
    if item.fanout:
        return Outcomes(item.request_id, item.round_id, item.base_len, ())
    return Proposal(item.request_id, item.round_id, item.base_len, NO_DRAFT)
