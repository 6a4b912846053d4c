"""The head of the draft engine: keep, append, propose; or continue the likely outcomes of a round.

Everything in a batch is a *line*: a sequence that grows by one draft token per step, all lines in one ragged
forward. A proposal is one line. Outcomes begin with one forward over the tokens under verification, whose
logits rank the next tokens; each (number accepted, next token) is then a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specray.engine.cache import BlockAllocator, BlockTable
from specray.engine.prefix import PrefixIndex
from specray.engine.sampling.draft import DraftSampler, DraftToken
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import RowGroup
from specray.engine.schedule import (
    CatchUp,
    Runner,
    catch_up,
    check_length,
    check_token_ids,
    failure_reply,
    split_waves,
)
from specray.engine.sequences import EngineSequence, SequenceTable, common_prefix_len
from specray.engine.target import run_check_step
from specray.errors import InvalidRequestError, OutOfBlocksError, SpecrayError
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    EngineInfo,
    Outcomes,
    Proposal,
    SparseProbs,
    SpeculateItem,
)

_MAX_RECOMPUTED = 32
"""A scratch sequence that lacks more tokens of its prefix gets their K/V by copying."""


@dataclass(slots=True, eq=False)
class _Line:
    """A sequence to continue by ``num_wanted`` draft tokens."""

    sequence: EngineSequence
    num_wanted: int
    drawn: list[DraftToken] = field(default_factory=list)

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.drawn)

    @property
    def draft_probs(self) -> tuple[SparseProbs, ...]:
        return tuple(token.probs for token in self.drawn if token.probs is not None)


@dataclass(slots=True, eq=False)
class _Branching:
    """An item that asks for outcomes, between its two phases.

    Rows are wanted for ``first..last`` accepted tokens; none when no branch fits the model's length.
    """

    item: SpeculateItem
    sequence: EngineSequence
    first: int
    last: int
    branches: list[tuple[int, int, _Line]] = field(default_factory=list)
    """(number accepted, next token, its continuation), the likeliest next token of each number first."""

    @property
    def num_rows(self) -> int:
        return self.last - self.first + 1

    @property
    def counts(self) -> list[int]:
        """Branches wanted for each row."""
        return list(self.item.fanout[self.first : self.last + 1])

    @property
    def excluded(self) -> list[int | None]:
        """For each row the draft token whose rejection the row stands for; none after full acceptance."""
        padded = (*self.item.proposed_token_ids, None)
        return list(padded[self.first : self.last + 1])

    @property
    def group(self) -> RowGroup:
        return RowGroup(self.sequence.sampling, self.sequence.token_ids, self.num_rows)


_Task = _Line | _Branching


class DraftHead:
    """Implements ``interfaces.DraftEngine`` over a runner.

    Args:
        info: what the engine says of itself; its limits hold here. One block is kept for ``check``.
        device: where the runner's logits are.
        max_num_draft_probs: support of the sparse draft distribution under rejection verification.
        prefix_cache: whether computed prefixes are used again.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        device: torch.device,
        max_num_draft_probs: int = 64,
        prefix_cache: bool = True,
    ) -> None:
        self._runner = runner
        self._info = info
        index = PrefixIndex(info.block_size) if prefix_cache else None
        self._allocator = BlockAllocator(info.num_blocks, info.block_size, index=index)
        self._check_table = BlockTable(self._allocator)
        self._check_table.reserve(1)
        self._table = SequenceTable(
            self._allocator,
            max_num_seqs=info.max_num_seqs,
            can_evict=True,
            copy_tokens=runner.copy_tokens,
        )
        noise = NoiseSource(info.vocab_size, device)
        self._sampler = DraftSampler(noise, max_num_draft_probs=max_num_draft_probs)

    @property
    def info(self) -> EngineInfo:
        # The block of the health check is not in use.
        in_use = self._info.num_blocks - 1 - self._allocator.num_free
        return replace(
            self._info,
            num_blocks_in_use=in_use,
            num_prefix_cache_queries=self._table.num_queried_tokens,
            num_prefix_cache_hits=self._table.num_cached_tokens,
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; all but the one kept for ``check`` when idle."""
        return self._allocator.num_free

    @torch.inference_mode()
    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        """One batch to completion: a catch-up forward, then a forward per further draft token."""
        started_ns = time.perf_counter_ns()
        replies: dict[int, DraftReply] = {}
        for wave in split_waves(items):
            replies.update(self._speculate_wave(wave))
        ordered = tuple(replies[index] for index in range(len(items)))
        return DraftReplies(ordered, time.perf_counter_ns() - started_ns)

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences; unknown ids are ignored."""
        self._table.release(request_ids)

    def check(self) -> None:
        """Runs a real one-token step in the block kept for it. Raises EngineLostError for broken logits."""
        run_check_step(self._runner, self._check_table)

    def close(self) -> None:
        """Lets the runner go, and with it the other ranks of its group; idempotent."""
        self._runner.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block is lost or owned twice."""
        self._table.check_integrity([self._check_table])

    def _speculate_wave(self, wave: Sequence[tuple[int, SpeculateItem]]) -> dict[int, DraftReply]:
        replies: dict[int, DraftReply] = {}
        tasks: dict[int, tuple[SpeculateItem, _Task]] = {}
        self._table.begin_step()
        for index, item in wave:
            try:
                tasks[index] = (item, self._admit(item))
            except SpecrayError as error:
                replies[index] = failure_reply(item, error)
        self._work([task for _, task in tasks.values()])
        for index, (item, task) in tasks.items():
            replies[index] = _reply(item, task)
        return replies

    def _work(self, tasks: Sequence[_Task]) -> None:
        """Fills the tasks: one forward for proposals and rankings, then all lines together."""
        lines = [task for task in tasks if isinstance(task, _Line)]
        branchings = [task for task in tasks if isinstance(task, _Branching)]
        work = [CatchUp(line.sequence, min(1, line.num_wanted)) for line in lines]
        work += [CatchUp(branching.sequence, branching.num_rows) for branching in branchings]
        logits = self._catch_up(work)
        growing = [line for line in lines if line.num_wanted > 0]
        if logits is None:
            return
        if growing:
            self._draw(logits[: len(growing)], growing)
        growing += self._branch(logits[len(growing) :], [task for task in branchings if task.num_rows > 0])
        self._grow(growing)

    # ---- schedule

    def _admit(self, item: SpeculateItem) -> _Task:
        """Gives the sequence its tokens and its room; raises before anything changed."""
        limit, length = self._info.max_model_len, item.base_len + len(item.token_ids)
        check_length(item.base_len, length, limit)
        check_token_ids("token_ids", item.token_ids, self._info.vocab_size)
        check_token_ids("proposed_token_ids", item.proposed_token_ids, self._info.vocab_size)
        if item.num_speculative_tokens < 0:
            raise InvalidRequestError(
                f"num_speculative_tokens is {item.num_speculative_tokens}; allowed: 0 or more",
                field="num_speculative_tokens",
            )
        return self._admit_branching(item, length) if item.fanout else self._admit_line(item, length)

    def _admit_line(self, item: SpeculateItem, length: int) -> _Line:
        num_wanted = min(item.num_speculative_tokens, self._info.max_model_len - length)
        sequence = self._keep_and_append(item, num_wanted)
        sequence.set_tail(())
        sequence.recompute_last(min(1, num_wanted))
        return _Line(sequence, num_wanted)

    def _admit_branching(self, item: SpeculateItem, length: int) -> _Branching:
        num_proposed = len(item.proposed_token_ids)
        if len(item.fanout) > num_proposed + 1 or min(item.fanout) < 0:
            raise InvalidRequestError(
                f"fanout is {item.fanout} for {num_proposed} proposed tokens; allowed: at most "
                f"{num_proposed + 1} numbers, 0 or more",
                field="fanout",
            )
        # A branch holds at least its next token.
        fitting = [
            accepted
            for accepted, count in enumerate(item.fanout)
            if count > 0 and length + accepted + 1 <= self._info.max_model_len
        ]
        first, last = (fitting[0], fitting[-1]) if fitting else (0, -1)
        proposed = item.proposed_token_ids[: max(last, 0)]
        num_extra = min(len(proposed) + 1 + item.num_speculative_tokens, self._info.max_model_len - length)
        sequence = self._keep_and_append(item, num_extra)
        sequence.set_tail(proposed)
        branching = _Branching(item, sequence, first, last)
        sequence.recompute_last(branching.num_rows)
        return branching

    def _keep_and_append(self, item: SpeculateItem, num_extra_tokens: int) -> EngineSequence:
        return self._table.keep_and_append(
            item.request_id,
            item.base_len,
            item.token_ids,
            item.sampling,
            num_extra_tokens=num_extra_tokens,
        )

    # ---- run

    def _catch_up(self, work: Sequence[CatchUp]) -> Tensor | None:
        return catch_up(self._runner, work, self._info.max_num_batched_tokens)

    def _grow(self, lines: Sequence[_Line]) -> None:
        """Continues all lines together until each has its tokens."""
        while lines := [line for line in lines if len(line.drawn) < line.num_wanted]:
            logits = self._catch_up([CatchUp(line.sequence, 1) for line in lines])
            assert logits is not None, "every line wants a logits row"
            self._draw(logits, lines)

    def _draw(self, logits: Tensor, lines: Sequence[_Line]) -> None:
        groups = [RowGroup(line.sequence.sampling, line.sequence.token_ids, 1) for line in lines]
        for line, token in zip(lines, self._sampler.draw(logits, groups), strict=True):
            line.drawn.append(token)
            line.sequence.token_ids.append(token.token_id)

    # ---- outcomes

    def _branch(self, logits: Tensor, branchings: Sequence[_Branching]) -> list[_Line]:
        """Ranks the next tokens of every outcome and makes a line for each."""
        if not branchings:
            return []
        ranked = self._sampler.rank(
            logits,
            [branching.group for branching in branchings],
            [count for branching in branchings for count in branching.counts],
            [token for branching in branchings for token in branching.excluded],
        )
        rows = iter(ranked)
        for branching in branchings:
            self._add_branches(branching, [next(rows) for _ in range(branching.num_rows)])
        return [line for branching in branchings for _, _, line in branching.branches]

    def _add_branches(self, branching: _Branching, ranked: Sequence[Sequence[int]]) -> None:
        """The likeliest outcome of most acceptance continues in the sequence's own blocks, so that the round
        after a hit finds it computed. The others get scratch sequences, before the sequence changes.
        """
        outcomes = [
            (branching.first + row, token_id)
            for row, token_ids in enumerate(ranked)
            for token_id in token_ids
        ]
        own = (branching.last, ranked[-1][0]) if ranked[-1] else None
        spare = iter(list(branching.sequence.scratch))
        for accepted, token_id in outcomes:
            if (accepted, token_id) != own:
                scratch = next(spare, None) or self._table.add_scratch(branching.sequence)
                self._add_branch(branching, accepted, token_id, scratch)
        if own is not None:
            self._add_branch(branching, *own, branching.sequence)
        branching.branches.sort(key=lambda branch: outcomes.index(branch[:2]))

    def _add_branch(
        self, branching: _Branching, accepted: int, token_id: int, holder: EngineSequence
    ) -> None:
        """Continues ``accepted`` proposed tokens and ``token_id`` in ``holder``; nothing without room."""
        sequence, wanted = branching.sequence, branching.item.num_speculative_tokens
        prefix_len = sequence.num_tokens + accepted
        num_wanted = min(wanted, self._info.max_model_len - prefix_len - 1)
        if holder is not sequence:
            try:
                holder.block_table.reserve(prefix_len + 1 + num_wanted)
            except OutOfBlocksError:
                return
            self._copy_prefix(sequence, holder, prefix_len)
            holder.sampling = sequence.sampling
        tail = [*sequence.token_ids[sequence.num_tokens : prefix_len], token_id]
        if holder is sequence:
            holder.set_tail(tail)
        else:
            holder.replace_tail(0, [*sequence.token_ids[: sequence.num_tokens], *tail])
            holder.truncate(prefix_len + 1)
        holder.recompute_last(1)
        branching.branches.append((accepted, token_id, _Line(holder, num_wanted)))

    def _copy_prefix(self, sequence: EngineSequence, scratch: EngineSequence, prefix_len: int) -> None:
        """Makes the scratch sequence's prefix that of ``sequence`` where recomputing it would cost more."""
        prefix = sequence.token_ids[:prefix_len]
        num_equal = min(common_prefix_len(scratch.token_ids, prefix), scratch.num_computed_tokens)
        if prefix_len - num_equal > _MAX_RECOMPUTED:
            self._runner.copy_tokens(
                sequence.block_table.block_ids, scratch.block_table.block_ids, prefix_len
            )
            scratch.token_ids = prefix
            scratch.num_tokens = scratch.num_computed_tokens = prefix_len


def _reply(item: SpeculateItem, task: _Task) -> DraftReply:
    if isinstance(task, _Line):
        return Proposal(item.request_id, item.round_id, item.base_len, task.draft_token_ids, task.draft_probs)
    branches = tuple(
        Branch(accepted, token_id, line.draft_token_ids, line.draft_probs)
        for accepted, token_id, line in task.branches
    )
    return Outcomes(item.request_id, item.round_id, item.base_len, branches)
