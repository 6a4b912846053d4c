"""The target engine: keeps and appends tokens, then verifies draft tokens.

One step is schedule, run, postprocess. A prefill chunk is an item that is not sampled; a rejected draft token
is undone by lowering a length.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specray.config import PrefixCache
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.base import RunnerEngine
from specray.engine.cache.adapters import AdapterLoading, AdapterRanks, LoadedAdapters
from specray.engine.features.drafting import TargetDrafting
from specray.engine.features.growing import DraftRequest, draft_request
from specray.engine.features.remote.sending import FeatureSender
from specray.engine.model.layers.experts.hits import ExpertHits
from specray.engine.sampling.draws import best_tokens
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.sampling.sampler import make_sampler
from specray.engine.sampling.state import draft_rows
from specray.engine.sampling.verify import Round, Verified, accept_own
from specray.engine.schedule import (
    Runner,
    catch_up,
    failure_reply,
    split_waves,
)
from specray.engine.target.checks import check_item
from specray.engine.target.group_draws import group_draws
from specray.engine.target.items import Scheduled, Scores, split_scores, with_rows
from specray.engine.target.lookahead import Lookahead, WindowRows
from specray.engine.visibility import MAX_TREE_ROWS
from specray.engine_info import EngineInfo
from specray.errors import InvalidRequestError, OutOfBlocksError, SpecrayError
from specray.grammar import TokenMasks
from specray.prefix_keys import UNIT_TOKENS
from specray.types import TargetReplies, TargetReply, TokenLogprobs, Verdict, VerifyItem

_log = logging.getLogger(__name__)
_SHARED_TOKENS = 64
"""Minimum common prefix for prompts of one step to share prefill."""
Answer = tuple[int, TargetReply]
"""Index of an item in its batch, and the reply to it."""


class TargetEngine(RunnerEngine):
    """Implements ``interfaces.SyncTargetEngine`` over a runner.

    Args:
        runner, info, prefix_cache: see :class:`RunnerEngine`.
        device: device of the runner's logits.
        grammars: masks for requests with a grammar; None: these are refused.
        drafting: with a drafter of the target's own, over a runner that feeds it; None: there is none.
        features: sends features to a drafter elsewhere, over a runner that keeps them; None: there is none.
        expert_hits: counts of the runner's forward; None: it has no experts.
        adapters: that it has its ranks load; None: it knows none.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        device: torch.device,
        prefix_cache: PrefixCache = True,
        grammars: GrammarMasks | None = None,
        drafting: TargetDrafting | None = None,
        features: FeatureSender | None = None,
        expert_hits: ExpertHits | None = None,
        adapters: AdapterRanks | None = None,
    ) -> None:
        self.adapters = LoadedAdapters(adapters)
        super().__init__(
            runner,
            info,
            can_evict=False,
            prefix_cache=prefix_cache,
            grammars=grammars,
            adapters=self.adapters,
        )
        self._drafting = drafting
        self._features = features
        self._expert_hits = expert_hits
        self._num_shared_tokens = _SHARED_TOKENS if self._allocator.index is not None else None
        self._sampler = make_sampler(info.vocab_size, device)
        # What drafts from features needs those of the leader's own forward.
        self._group_draws = None if drafting or features else group_draws(runner, info.max_num_batched_tokens)
        self._lookaheads: dict[str, Lookahead] = {}

    @property
    def info(self) -> EngineInfo:
        return replace(
            super().info,
            adapters=tuple(each.digest for each in self.adapters.loaded),
            adapter_names=tuple(each.folder for each in self.adapters.loaded),
            max_adapters=self.adapters.most,
            max_adapter_rank=self.adapters.max_rank,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences; unknown ids are ignored."""
        super().release(request_ids)
        for request_id in request_ids:
            self._lookaheads.pop(request_id, None)
        if self._drafting is not None:
            self._drafting.forget(request_ids)

    def start_loading(self, folder: str, digest: bytes = b"") -> AdapterLoading:
        return self.adapters.start_loading(folder, digest)

    def unload_adapter(self, digest: bytes) -> None:
        self.adapters.unload(digest)

    @torch.inference_mode()
    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        """One step: one ragged forward, or several when the items exceed ``max_num_batched_tokens``."""
        started_ns = time.perf_counter_ns()
        answers: dict[int, TargetReply] = {}
        num_rows = num_waves = 0
        for wave in split_waves(items, num_shared_tokens=self._num_shared_tokens):
            num_waves += 1
            scheduled, failed = self._schedule(wave)
            num_rows += sum(entry.work.num_rows for entry in scheduled)
            answers.update(failed)
            own_token_ids = self._draw_in_group(scheduled)
            logits = self._run(scheduled) if own_token_ids is None else None
            if self._expert_hits is not None:
                self._expert_hits.send()
            if own_token_ids is None:
                answers.update(self._postprocess(scheduled, logits))
            else:
                answers.update(self._commit_own(scheduled, own_token_ids))
            if self._drafting is not None:
                answers.update(self._draft(self._drafting, scheduled, answers))
            if self._features is not None:
                answers.update(self._with_features(self._features, scheduled, answers))
        replies = tuple(answers[index] for index in range(len(items)))
        # Of several forwards, the counts are those of the last.
        is_counted = num_waves == 1 and 0 < num_rows <= self._info.max_num_batched_tokens
        experts = self._expert_hits.read() if is_counted and self._expert_hits is not None else None
        return TargetReplies(replies, time.perf_counter_ns() - started_ns, num_rows, experts)

    def _schedule(self, wave: Sequence[tuple[int, VerifyItem]]) -> tuple[list[Scheduled], list[Answer]]:
        scheduled: list[Scheduled] = []
        failed: list[Answer] = []
        self.table.begin_step()
        for index, item in wave:
            try:
                scheduled.append(self._admit(index, item))
            except SpecrayError as error:
                failed.append((index, failure_reply(item, error)))
        for place, entry in enumerate(scheduled):
            # After all that must fit: a window takes only what is left.
            if entry.item.lookahead is not None and self._states is None:
                scheduled[place] = replace(entry, window=self._window(entry))
        return scheduled, failed

    def _admit(self, index: int, item: VerifyItem) -> Scheduled:
        """Gives the sequence its tokens and its room; raises before anything changed."""
        draft = item.draft if item.draft.is_chain else self._cut_tree(item)
        if self._states is not None:
            draft = draft.first(self._states.max_open - 1)
        num_drafts = len(draft.token_ids)
        check_item(item, num_drafts, self._info)
        sequence = self.table.keep_and_append(
            item.request_id,
            item.base_len,
            item.token_ids,
            item.sampling,
            num_extra_tokens=num_drafts,
            max_new_tokens=item.max_new_tokens,
        )
        sequence.set_tail(draft.token_ids)
        scheduled = Scheduled(index, item, draft, sequence)
        sequence.recompute_last(scheduled.num_logits)
        self._back_to_state(sequence)
        if sequence.snapshots is not None:
            sequence.snapshots.mark(sequence.num_computed_tokens, scheduled.work.settled)
        return scheduled

    def _window(self, entry: Scheduled) -> WindowRows | None:
        """The rows of lookahead decoding; None where they do not fit, or would mask a whole prompt."""
        item, sequence = entry.item, entry.sequence
        assert item.lookahead is not None
        lookahead = self._lookaheads.get(item.request_id)
        if lookahead is None or lookahead.budget != item.lookahead:
            lookahead = self._lookaheads[item.request_id] = Lookahead(item.lookahead)
        if not item.sample or entry.scored or sequence.num_missing_tokens > MAX_TREE_ROWS:
            return None
        num_tokens = sequence.num_tokens
        room = self._info.max_model_len - num_tokens
        window = lookahead.rows(sequence.token_ids[:num_tokens], len(entry.draft), room=room)
        if window is None:
            return None
        try:
            sequence.block_table.reserve(num_tokens + len(entry.draft) + len(window.token_ids))
        except OutOfBlocksError:
            return None
        return window

    def _cut_tree(self, item: VerifyItem) -> DraftTokens:
        """The part of a tree that can be verified: all that fits after the sequence.

        Of one that was sampled, or where layers are recurrent, that is its first chain. It is exact, as any
        chain is: what is cut off is not verified, and a first child is drawn as if it were alone.
        """
        if item.draft.probs or self._states is not None:
            return item.draft.first_chain()
        return item.draft.first(max(0, self._info.max_model_len - item.base_len - len(item.token_ids)))

    def _draw_in_group(self, scheduled: Sequence[Scheduled]) -> list[int] | None:
        """Runs a step whose draws the ranks of a group make together; None: it has not run."""
        if self._group_draws is None or any(entry.takes_logits for entry in scheduled):
            return None
        groups = [
            draft_rows(entry.sequence.committed_state, entry.draft)
            for entry in scheduled
            if entry.item.sample
        ]
        own_token_ids = self._group_draws.run([entry.work for entry in scheduled], groups)
        if own_token_ids is not None:
            self._publish(scheduled)
        return own_token_ids

    def _commit_own(self, scheduled: Sequence[Scheduled], own_token_ids: Sequence[int]) -> Iterator[Answer]:
        """Answers a step whose rows have been drawn."""
        start = 0
        for entry in scheduled:
            if not entry.item.sample:
                yield entry.index, entry.chunk_verdict()
                continue
            own = own_token_ids[start : start + entry.num_sampled]
            start += entry.num_sampled
            verified = accept_own(own, draft_rows(entry.sequence.committed_state, entry.draft))
            yield entry.index, self._commit(entry, torch.empty(0, 0), verified, ())

    def _run(self, scheduled: Sequence[Scheduled]) -> Tensor | None:
        work = [entry.work for entry in scheduled]
        output = catch_up(self._runner, work, self._info.max_num_batched_tokens)
        self._publish(scheduled)
        return None if output is None or not len(output.logits) else output.logits

    def _publish(self, scheduled: Sequence[Scheduled]) -> None:
        for entry in scheduled:
            own = entry.sequence.snapshots
            if len(entry.item.token_ids) >= UNIT_TOKENS or (own is not None and own.marks):
                self.table.publish(entry.sequence)

    def _postprocess(self, scheduled: Sequence[Scheduled], logits: Tensor | None) -> Iterator[Answer]:
        sampled = [entry for entry in scheduled if entry.item.sample]
        if logits is not None:
            logits = self._take_windows(scheduled, logits)
        logits, scores = split_scores(scheduled, logits)
        for entry in scheduled:
            if not entry.item.sample:
                yield entry.index, entry.chunk_verdict(scores.get(entry.index, ()))
        if logits is None:
            return
        try:
            verified = self._verify(sampled, logits)
        except Exception:
            # Whichever item it was, the others must not suffer: each on its own.
            _log.exception("a batch of %d items could not be verified together", len(sampled))
            yield from self._postprocess_singly(sampled, logits, scores)
            return
        for entry, rows, result in with_rows(sampled, logits, verified):
            yield entry.index, self._commit(entry, rows, result, scores.get(entry.index, ()))

    def _postprocess_singly(
        self, sampled: Sequence[Scheduled], logits: Tensor, scores: Scores
    ) -> Iterator[Answer]:
        for entry, rows, _ in with_rows(sampled, logits, [None] * len(sampled)):
            try:
                verified = self._verify([entry], rows)[0]
                yield entry.index, self._commit(entry, rows, verified, scores.get(entry.index, ()))
            except Exception as error:
                yield entry.index, failure_reply(entry.item, error)

    def _take_windows(self, scheduled: Sequence[Scheduled], logits: Tensor) -> Tensor:
        """Hands the windows' rows of logits to lookahead decoding; returns the other rows."""
        if all(entry.window is None for entry in scheduled):
            return logits
        kept: list[Tensor] = []
        pieces = torch.split(logits, [entry.num_logits + entry.num_window_rows for entry in scheduled])
        for entry, rows in zip(scheduled, pieces, strict=True):
            kept.append(rows[: entry.num_logits])
            if (window := entry.window) is not None:
                first = entry.num_logits + entry.num_window_rows - window.num_outputs
                outputs = best_tokens(rows[:1]) if window.with_root else []
                outputs += best_tokens(rows[first:]) if window.num_outputs else []
                sequence = entry.sequence
                lookahead = self._lookaheads[entry.item.request_id]
                lookahead.take(sequence.token_ids[sequence.num_tokens - 1], outputs)
                # Its rows are never read again.
                sequence.block_table.truncate(len(sequence.token_ids))
        return torch.cat(kept)

    def _draft(
        self, drafting: TargetDrafting, scheduled: Sequence[Scheduled], answers: Mapping[int, TargetReply]
    ) -> Iterator[Answer]:
        asked: list[tuple[int, DraftRequest]] = []
        for entry in scheduled:
            request = draft_request(entry.item, entry.sequence, answers[entry.index])
            if request is not None:
                asked.append((entry.index, request))
        drafts = drafting.draft([request for _, request in asked]) if asked else []
        for (index, _), draft in zip(asked, drafts, strict=True):
            verdict = answers[index]
            assert isinstance(verdict, Verdict), "draft tokens follow verdicts alone"
            yield index, replace(verdict, draft=draft)

    def _with_features(
        self, features: FeatureSender, scheduled: Sequence[Scheduled], answers: Mapping[int, TargetReply]
    ) -> Iterator[Answer]:
        """Adds requested feature rows to verdicts."""
        asked = [
            (entry, verdict)
            for entry in scheduled
            if entry.item.num_features and isinstance(verdict := answers[entry.index], Verdict)
        ]
        found = features.rows([(entry.item, entry.sequence) for entry, _ in asked]) if asked else []
        for (entry, verdict), rows in zip(asked, found, strict=True):
            if rows is not None:
                yield entry.index, replace(verdict, features=rows)

    def _verify(self, sampled: Sequence[Scheduled], logits: Tensor) -> list[Verified]:
        rounds = [
            Round(
                draft_rows(entry.sequence.committed_state, entry.draft, token_masks=self._token_masks(entry)),
                entry.draft.token_ids,
                entry.draft.probs,
            )
            for entry in sampled
        ]
        return self._sampler.verify(logits, rounds)

    def _token_masks(self, entry: Scheduled) -> TokenMasks | None:
        sampling, sequence = entry.sequence.sampling, entry.sequence
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequestError("grammar is set; this engine serves none", field="grammar")
        output_ids = sequence.token_ids[sampling.num_prompt_tokens : sequence.num_tokens]
        draft = entry.draft
        return self._grammars.masks(
            entry.item.request_id, sampling, output_ids, draft.token_ids, draft.parents
        )

    def _commit(
        self,
        entry: Scheduled,
        logits: Tensor,
        verified: Verified,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> Verdict:
        """Keeps the accepted draft tokens, drops the others, and answers."""
        item, draft, sequence = entry.item, entry.draft, entry.sequence
        num_accepted, next_token_id, last_node = verified
        num_logprobs = sequence.sampling.num_logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if draft.is_chain and num_logprobs is not None:
            committed = (*draft.token_ids[:num_accepted], next_token_id)
            logprobs = token_logprobs(logits[: num_accepted + 1], committed, num_logprobs)
        if entry.parents is None:
            sequence.accept_tail(num_accepted)
        elif draft.is_chain:
            sequence.accept_path(range(num_accepted))
        else:
            path = () if last_node is None else draft.path(last_node)
            if num_logprobs is not None:
                committed = (*(draft.token_ids[node] for node in path), next_token_id)
                rows = logits[[0, *(1 + node for node in path)]]
                logprobs = token_logprobs(rows, committed, num_logprobs)
            start = sequence.num_tokens
            self._runner.move_tokens(sequence.block_table.block_ids, [start + node for node in path], start)
            sequence.accept_path(path)
        return Verdict(
            item.request_id,
            item.round_id,
            item.base_len,
            num_accepted,
            next_token_id,
            logprobs,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            last_accepted_node=last_node,
            draft=self._propose(entry, next_token_id),
        )

    def _propose(self, entry: Scheduled, next_token_id: int) -> DraftTokens:
        """What looking ahead has found to follow the tokens that are committed now."""
        lookahead = self._lookaheads.get(entry.item.request_id)
        if entry.item.lookahead is None or lookahead is None:
            return NO_DRAFT
        return lookahead.draft([*entry.sequence.token_ids, next_token_id])
