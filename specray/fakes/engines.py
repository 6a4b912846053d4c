"""Fake engines without tensors: they follow the protocol exactly and get tokens from a toy model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.errors import ProtocolError
from specray.fakes.models import ToyGuesser, ToyModel, guessed, guessed_tree
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    TokenLogprobs,
    UnknownSequence,
    Verdict,
    VerifyItem,
)

Cost = Callable[[int], int]
"""Function from a step's rows to its nanoseconds."""


def fake_info(
    role: str,
    *,
    vocab_size: int = 64,
    max_model_len: int = 4096,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    tokenizer_fingerprint: str = "toy",
) -> EngineInfo:
    """Info of a fake worker."""
    return EngineInfo(
        role=role,
        model=f"toy-{role}",
        vocab_size=vocab_size,
        tokenizer_fingerprint=tokenizer_fingerprint,
        block_size=16,
        num_blocks=max_num_seqs * max_model_len // 16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        protocol_version=PROTOCOL_VERSION,
        dtype="float32",
        checkpoint=f"toy-{role}",
    )


@dataclass(slots=True)
class _ToySequence:
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)

    @property
    def noise_key(self) -> int:
        return 0 if self.sampling.is_greedy else self.sampling.seed


class _Sequences:
    """Sequences exactly as items gave them, without drafted tokens: a router that assumes more is caught."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.held: dict[str, _ToySequence] = {}

    def apply(self, item: SpeculateItem | VerifyItem) -> _ToySequence | UnknownSequence | ItemFailed:
        sequence = self.held.get(item.request_id)
        if item.base_len == 0:
            if item.sampling is None:
                return _failed(item, "base_len is 0 and sampling is absent", is_retriable=False)
            if sequence is None and len(self.held) >= self._info.max_num_seqs:
                return _failed(item, "no room for a sequence", is_retriable=True)
            sequence = self.held[item.request_id] = _ToySequence(item.sampling)
        elif sequence is None or item.base_len > len(sequence.tokens):
            return UnknownSequence(item.request_id, item.round_id, item.base_len)
        del sequence.tokens[item.base_len :]
        sequence.tokens.extend(item.token_ids)
        return sequence

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.held.pop(request_id, None)


def _failed(item: SpeculateItem | VerifyItem, message: str, *, is_retriable: bool) -> ItemFailed:
    return ItemFailed(item.request_id, item.round_id, item.base_len, message, is_retriable)


class _FakeEngine:
    """What both engines have in common."""

    def __init__(self, info: EngineInfo, cost: Cost) -> None:
        self._info = info
        self._cost = cost
        self._sequences = _Sequences(info)
        self.num_steps = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def held_request_ids(self) -> frozenset[str]:
        """Request ids of sequences that have not been released."""
        return frozenset(self._sequences.held)

    def forget(self, request_id: str | None = None) -> None:
        """Forgets one sequence, or all, like an eviction or a restart."""
        self.release([request_id] if request_id else list(self._sequences.held))

    def release(self, request_ids: Sequence[str]) -> None:
        self._sequences.release(request_ids)


class FakeTarget(_FakeEngine):
    """interfaces.SyncTargetEngine over a toy model.

    Args:
        model: toy model whose tokens are authoritative.
        info: enforced limits; a step beyond them raises ProtocolError.
        cost: nanoseconds of a step by rows, reported as ``forward_ns``.
        prefix_cache: whether whole blocks seen before are not computed again.
        ahead: what it finds when it looks ahead; None: nothing.
        drafter: guesses what follows a verdict, for those who ask; None: it has no drafter.
    """

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        info: EngineInfo | None = None,
        cost: Cost = lambda rows: 0,
        prefix_cache: bool = False,
        ahead: ToyGuesser | None = None,
        drafter: ToyGuesser | None = None,
    ) -> None:
        self.model = model or ToyModel()
        info = info or fake_info("target", vocab_size=self.model.vocab_size)
        super().__init__(info if drafter is None else replace(info, drafter="guesser"), cost)
        self._ahead = ahead
        self._drafter = drafter
        self._scripted: dict[str, list[Mapping[str, Any]]] = {}
        self._known: set[tuple[int, ...]] | None = set() if prefix_cache else None
        self.num_rows = 0
        self._accepted: dict[str, tuple[int, int]] = {}
        """Numbers by sequence: tokens before its last draft tokens, and how many of those were kept."""
        self.lookaheads: list[LookaheadBudget] = []
        """Budgets of the items that asked it to look ahead."""

    def fail_next(self, request_id: str, message: str, *, is_retriable: bool, **over: Any) -> None:
        """Answers the next item of this request with ItemFailed, without applying it."""
        failed = {"message": message, "is_retriable": is_retriable, **over}
        self._scripted.setdefault(request_id, []).append(failed)

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        cut = [self._cut(item) for item in items]
        rows = sum(
            len(item.token_ids) + len(item.draft.token_ids) - cached - self._num_confirmed(item)
            for item, cached in cut
        )
        if rows > self._info.max_num_batched_tokens or len(items) > self._info.max_num_seqs:
            raise ProtocolError(f"a step of {len(items)} items and {rows} rows is over the limits")
        budgets = [item.lookahead for item in items if item.lookahead is not None]
        self.lookaheads += budgets
        rows += sum(budget.max_window_rows for budget in budgets)
        self.num_steps += 1
        self.num_rows += rows
        answers = tuple(
            self._answer(item, cached, is_limited=asked.max_new_tokens is not None)
            for asked, (item, cached) in zip(items, cut, strict=True)
        )
        return TargetReplies(answers, self._cost(rows), rows)

    def check(self) -> None:
        self.model.next_token([0], 0)

    def _model_of(self, sampling: SamplingParams) -> ToyModel:
        """The model that writes the sequence."""
        return self.model

    def _num_confirmed(self, item: VerifyItem) -> int:
        """Tokens of the item that were computed as draft tokens of the step before."""
        base_len, num_accepted = self._accepted.get(item.request_id, (-1, 0))
        return num_accepted if item.base_len == base_len else 0

    def _cut(self, item: VerifyItem) -> tuple[VerifyItem, int]:
        """Returns the part of the item that this step computes, and the number of its cached tokens."""
        sequence = self._sequences.held.get(item.request_id)
        tokens = [*(sequence.tokens[: item.base_len] if sequence is not None else ()), *item.token_ids]
        known_len = 0
        if self._known is not None and len(item.token_ids) >= self._info.block_size:
            ends = range(self._info.block_size, len(tokens), self._info.block_size)
            known_len = max((end for end in ends if tuple(tokens[:end]) in self._known), default=0)
        cached = max(0, known_len - item.base_len)
        if item.max_new_tokens is not None:
            item = replace(item, token_ids=item.token_ids[: cached + item.max_new_tokens])
        return item, cached

    def _answer(self, item: VerifyItem, cached: int, *, is_limited: bool) -> TargetReply:
        if scripted := self._scripted.get(item.request_id):
            return ItemFailed(item.request_id, item.round_id, item.base_len, **scripted.pop(0))
        sequence = self._sequences.apply(item)
        if not isinstance(sequence, _ToySequence):
            return sequence
        if self._known is not None and len(item.token_ids) >= self._info.block_size:
            ends = range(self._info.block_size, len(sequence.tokens) + 1, self._info.block_size)
            self._known.update(tuple(sequence.tokens[:end]) for end in ends)
        scores: tuple[TokenLogprobs, ...] = ()
        if sequence.sampling.num_prompt_logprobs is not None:
            end = min(len(sequence.tokens), sequence.sampling.num_prompt_tokens)
            scored = sequence.tokens[max(1, item.base_len) : end]
            scores = tuple(TokenLogprobs(token, -float(token)) for token in scored)
        if not item.sample:
            held_len = len(sequence.tokens) if is_limited else None
            return Verdict(
                item.request_id, item.round_id, item.base_len, 0, None, (), held_len, cached, scores
            )
        draft, last_node = item.draft, None
        if draft.probs:
            # As in the engine: of a tree that was sampled, the first chain.
            draft = draft.first_chain()
        if draft.is_chain:
            drawn = self._chain_draws(sequence, draft.token_ids)
        else:
            drawn, last_node = self._tree_draws(sequence, draft)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.sampling.num_logprobs is not None:
            logprobs = tuple(TokenLogprobs(token, -float(token)) for token in drawn)
        num_accepted, next_token_id = len(drawn) - 1, drawn[-1]
        self._accepted[item.request_id] = len(sequence.tokens), num_accepted
        next_draft = NO_DRAFT
        if self._drafter is not None:
            known, most = [*sequence.tokens, *drawn], item.num_next_draft_tokens
            if item.next_tree is None or sequence.sampling.draws_by_rejection or most == 0:
                next_draft = DraftTokens(guessed(self._drafter, known, most, sequence.noise_key))
            else:
                next_draft = guessed_tree(self._drafter, known, item.next_tree, most, sequence.noise_key)
        return Verdict(
            item.request_id,
            item.round_id,
            item.base_len,
            num_accepted,
            next_token_id,
            logprobs,
            num_cached_tokens=cached,
            prompt_logprobs=scores,
            last_accepted_node=last_node,
            draft=next_draft or self._look_ahead(item, [*sequence.tokens, *drawn], sequence.noise_key),
        )

    def _look_ahead(self, item: VerifyItem, tokens: list[int], noise_key: int) -> DraftTokens:
        """Two guesses of the next token, and what may follow the first."""
        if item.lookahead is None or self._ahead is None:
            return NO_DRAFT
        first = self._ahead.ranked(tokens, noise_key, 2)
        token_ids, parents = list(first), [-1] * len(first)
        tokens, parent = tokens + token_ids[:1], 0
        while first and len(token_ids) < item.lookahead.ngram_len:
            token_ids += self._ahead.ranked(tokens, noise_key, 1)
            parents.append(parent)
            parent = len(parents) - 1
            tokens.append(token_ids[-1])
        return DraftTokens(tuple(token_ids), tuple(parents))

    def _chain_draws(self, sequence: _ToySequence, draft_token_ids: Sequence[int]) -> list[int]:
        """The target's own tokens, as long as draft tokens equal them, and the next one."""
        tokens, model = list(sequence.tokens), self._model_of(sequence.sampling)
        drawn: list[int] = []
        for draft_token in (*draft_token_ids, None):
            drawn.append(model.next_token(tokens, sequence.noise_key))
            if drawn[-1] != draft_token:
                break
            tokens.append(drawn[-1])
        return drawn

    def _tree_draws(self, sequence: _ToySequence, draft: DraftTokens) -> tuple[list[int], int | None]:
        """The target's tokens along a tree's accepted path, and its last node; None: none is accepted."""

        @cache
        def own(node: int) -> int:
            kept = (draft.token_ids[each] for each in draft.path(node))
            model = self._model_of(sequence.sampling)
            return model.next_token([*sequence.tokens, *kept], sequence.noise_key)

        last = draft.walk(own)
        drawn = [*(draft.token_ids[node] for node in draft.path(last)), own(last)]
        return drawn, None if last < 0 else last


class FakeDraft(_FakeEngine):
    """interfaces.SyncDraftEngine that guesses; answers proposals and general fan-outs.

    Args:
        guesser: guesses next tokens.
        info: info that it reports.
        cost: nanoseconds of a step by sequential draft steps times rows.
    """

    def __init__(
        self, guesser: ToyGuesser, *, info: EngineInfo | None = None, cost: Cost = lambda rows: 0
    ) -> None:
        super().__init__(info or fake_info("draft"), cost)
        self.guesser = guesser
        self.num_refused = 0
        """Items with tokens that the draft does not know."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.num_steps += 1
        steps = max((item.num_speculative_tokens + bool(item.fanout) for item in items), default=0)
        return DraftReplies(tuple(self._answer(item) for item in items), self._cost(steps))

    def check(self) -> None:
        self.guesser.ranked([0], 0, 1)

    def _answer(self, item: SpeculateItem) -> DraftReply:
        if max((*item.token_ids, *item.proposed_token_ids), default=0) >= self._info.vocab_size:
            self.num_refused += 1
            return _failed(item, "a token id is out of range", is_retriable=False)
        sequence = self._sequences.apply(item)
        if not isinstance(sequence, _ToySequence):
            return sequence
        if item.fanout:
            branches = tuple(self._branches(item, sequence))
            return Outcomes(item.request_id, item.round_id, item.base_len, branches)
        if item.tree is not None and not sequence.sampling.draws_by_rejection:
            depth, key = item.num_speculative_tokens, sequence.noise_key
            draft = guessed_tree(self.guesser, sequence.tokens, item.tree, depth, key)
        else:
            draft = self._proposed(sequence.tokens, item.num_speculative_tokens, sequence.noise_key)
        return Proposal(item.request_id, item.round_id, item.base_len, draft)

    def _proposed(self, tokens: Sequence[int], length: int, noise_key: int) -> DraftTokens:
        """The proposal after some tokens; a draft of another kind proposes something else."""
        return DraftTokens(self._chain(tokens, length, noise_key))

    def _branches(self, item: SpeculateItem, sequence: _ToySequence) -> list[Branch]:
        if len(item.fanout) != len(item.proposed_token_ids) + 1:
            raise ProtocolError(f"fanout {item.fanout} does not fit {len(item.proposed_token_ids)} tokens")
        branches: list[tuple[int, Branch]] = []
        tree, num_chain = item.proposed, len(item.proposed.first_path)
        parents = tree.parents or range(-1, len(tree) - 1)
        costs = {-1: 0}
        for node, width in enumerate(item.fanout, -1):
            path = [tree.token_ids[index] for index in tree.path(node)]
            below = [child for child, parent in enumerate(parents) if parent == node]
            costs |= {child: costs[node] + rank for rank, child in enumerate(below)}
            children = [tree.token_ids[child] for child in below]
            count = width + max(1, len(children))
            likely = self.guesser.ranked([*sequence.tokens, *path], sequence.noise_key, count)
            for rank, token in enumerate([token for token in likely if token not in children][:width]):
                prefix = [*sequence.tokens, *path, token]
                chain = self._chain(prefix, item.num_speculative_tokens, sequence.noise_key)
                last = node if node >= num_chain else None
                # Of a tree, the best children have been taken.
                cost = rank if tree.is_chain else costs[node] + len(children) + rank
                branches.append((cost, Branch(len(path), token, DraftTokens(chain), last)))
        # Those of first guesses come first, then those to which one second guess leads, and so on.
        if item.max_branches:
            branches = sorted(branches, key=lambda branch: branch[0])[: item.max_branches]
        return [branch for _, branch in branches]

    def _chain(self, prefix: Sequence[int], length: int, noise_key: int) -> tuple[int, ...]:
        return guessed(self.guesser, prefix, length, noise_key)
