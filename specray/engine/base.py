"""The base of the engines: sequences, the blocks that they own, a health check; and the waves of a draft."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from specray.config import PrefixCache
from specray.draft_tokens import NO_DRAFT
from specray.engine.cache.adapters import LoadedAdapters
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.sequences import SequenceTable
from specray.engine.inputs import SequenceInput
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.schedule import Runner, failure_reply, split_waves
from specray.engine_info import EngineInfo, GrammarStats
from specray.errors import EngineLostError, SpecrayError
from specray.types import DraftReplies, DraftReply, Outcomes, Proposal, SpeculateItem

Task = TypeVar("Task")


class EngineBase:
    """Sequences and their blocks; without a runner, an engine computes in its own way.

    Args:
        info: description of the engine, whose limits hold here; a block or two are reserved for ``check``.
        can_evict: whether idle sequences may be forgotten.
        grammars: masks for requests with a grammar.
        runner: copies tokens, and has the slots for states of recurrent layers; None: there is none.
        prefix_cache: whether computed prefixes are used again, or only those of prompts (``exact``). Those of
            recurrent layers are where their states have snapshots.
        num_check_tokens: tokens of the health check.
        adapters: that sequences may use; None: they go without.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        can_evict: bool,
        grammars: GrammarMasks | None = None,
        runner: Runner | None = None,
        prefix_cache: PrefixCache = False,
        num_check_tokens: int = 1,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._info = info
        self._grammars = grammars
        states = self._states = None if runner is None else runner.states
        if states is not None:
            states.clear()
        # Where a sequence goes on from another's tokens, it needs the state after them.
        is_used = bool(prefix_cache) and (states is None or states.num_snapshots > 0)
        index = PrefixIndex(info.block_size) if is_used else None
        self._allocator = BlockAllocator(info.num_blocks, info.block_size, index=index)
        self._check_slot = 0 if states is None else states.take()
        self._check_table = BlockTable(self._allocator)
        self._check_table.reserve(num_check_tokens)
        self._num_blocks = self._allocator.num_free
        self.table = SequenceTable(
            self._allocator,
            max_num_seqs=info.max_num_seqs,
            can_evict=can_evict,
            copy_tokens=None if runner is None else runner.copy_tokens,
            slots=states,
            copy_state=None if runner is None else runner.copy_state,
            prompts_only=prefix_cache == "exact",
            adapters=adapters,
        )

    @property
    def info(self) -> EngineInfo:
        snapshots = self.table.snapshots
        return replace(
            self._info,
            num_blocks_in_use=self._num_blocks - self._allocator.num_free,
            num_prefix_cache_queries=self.table.num_queried_tokens,
            num_prefix_cache_hits=self.table.num_cached_tokens,
            num_snapshots_held=0 if snapshots is None else snapshots.num_held,
            num_snapshots_evicted=0 if snapshots is None else snapshots.num_evicted,
            grammar=GrammarStats() if self._grammars is None else self._grammars.stats,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        self.table.release(request_ids)
        if self._grammars is not None:
            self._grammars.release(request_ids)

    def close(self) -> None:
        """Idempotent."""

    def check_integrity(self) -> None:
        """Raises AssertionError when a block is lost or owned twice, or lengths do not fit together."""
        self.table.check_integrity([self._check_table])


class RunnerEngine(EngineBase):
    """An engine over a runner, of the leader; followers of a tensor-parallel group run what it broadcasts."""

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        can_evict: bool,
        prefix_cache: PrefixCache,
        grammars: GrammarMasks | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        super().__init__(
            info,
            can_evict=can_evict,
            grammars=grammars,
            runner=runner,
            prefix_cache=prefix_cache,
            adapters=adapters,
        )
        self._runner = runner

    def check(self) -> None:
        """Runs a real one-token step in its own block. Raises EngineLostError for broken logits."""
        blocks, slot = self._check_table.block_ids, self._check_slot
        check_logits(self._runner.run([SequenceInput((0,), 0, blocks, 1, state_slot=slot)]).logits)

    def close(self) -> None:
        """Closes the runner, and with it the other ranks of its group; idempotent."""
        self._runner.close()

    def check_integrity(self) -> None:
        super().check_integrity()
        moves = self._runner.pending_moves
        self.table.check_moves(moves.sources, moves.destinations)

    def _back_to_state(self, sequence: EngineSequence) -> None:
        """Marks as not computed what recurrent layers have to see again."""
        if self._states is not None and sequence.state_slot is not None:
            sequence.num_computed_tokens = self._states.resume_len(
                sequence.state_slot, sequence.num_computed_tokens
            )


def check_logits(logits: torch.Tensor) -> None:
    """Raises EngineLostError where those of a one-token step are broken."""
    if logits.shape[0] != 1 or bool(logits.isnan().any()):
        raise EngineLostError("a one-token step gives logits that are not numbers")


class Speculating(EngineBase, ABC, Generic[Task]):
    """A draft engine's ``speculate``: items become tasks, which are drafted for together."""

    @torch.inference_mode()
    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        """One batch to completion: a catch-up forward, then a forward per further draft token."""
        started_ns = time.perf_counter_ns()
        replies: dict[int, DraftReply] = {}
        for wave in split_waves(items):
            tasks: dict[int, tuple[SpeculateItem, Task | None]] = {}
            self.table.begin_step()
            for index, item in wave:
                try:
                    tasks[index] = item, self._admit(item)
                except SpecrayError as error:
                    replies[index] = failure_reply(item, error)
            self._work([task for _, task in tasks.values() if task is not None])
            for index, (item, task) in tasks.items():
                replies[index] = self._reply(item, task)
        ordered = tuple(replies[index] for index in range(len(items)))
        return DraftReplies(ordered, time.perf_counter_ns() - started_ns)

    @abstractmethod
    def _admit(self, item: SpeculateItem) -> Task | None:
        """Gives the sequence its tokens and its room; raises before anything changed. None: nothing to do."""

    @abstractmethod
    def _work(self, tasks: Sequence[Task]) -> None:
        """Drafts for all tasks side by side."""

    def _reply(self, item: SpeculateItem, task: Task | None) -> DraftReply:
        """The answer to an item; without a task nothing was drafted."""
        if item.fanout:
            return Outcomes(item.request_id, item.round_id, item.base_len, ())
        return Proposal(item.request_id, item.round_id, item.base_len, NO_DRAFT)
