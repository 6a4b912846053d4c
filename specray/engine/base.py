"""The base of both engines: sequences, the blocks that they own, and a health check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.sequences import EngineSequence, SequenceTable
from specray.engine.inputs import SequenceInput
from specray.engine.sampling.grammars import GrammarMasks
from specray.engine.schedule import Runner
from specray.errors import EngineLostError
from specray.types import EngineInfo, GrammarStats


class EngineBase:
    """Everything of an engine over a runner but its steps.

    Args:
        runner: runner of the leader; followers of a tensor-parallel group run what it broadcasts.
        info: description of the engine, whose limits hold here; one block is kept for ``check``.
        can_evict: whether idle sequences may be forgotten.
        prefix_cache: whether computed prefixes are used again; those of recurrent layers never are.
        grammars: masks for requests with a grammar.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        can_evict: bool,
        prefix_cache: bool,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self._runner = runner
        self._info = info
        self._grammars = grammars
        states = self._states = runner.states
        if states is not None:
            states.clear()
        # Where a sequence goes on from another's tokens, it would need the state behind them.
        index = PrefixIndex(info.block_size) if prefix_cache and states is None else None
        on_free = None if states is None else states.drop
        self._allocator = BlockAllocator(info.num_blocks, info.block_size, index=index, on_free=on_free)
        self._check_table = BlockTable(self._allocator)
        self._check_table.reserve(1)
        self._table = SequenceTable(
            self._allocator,
            max_num_seqs=info.max_num_seqs,
            can_evict=can_evict,
            copy_tokens=runner.copy_tokens,
        )

    @property
    def info(self) -> EngineInfo:
        # The block of the health check is not in use.
        in_use = self._info.num_blocks - 1 - self._allocator.num_free
        return replace(
            self._info,
            num_blocks_in_use=in_use,
            num_prefix_cache_queries=self._table.num_queried_tokens,
            num_prefix_cache_hits=self._table.num_cached_tokens,
            grammar=GrammarStats() if self._grammars is None else self._grammars.stats,
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; all but the one kept for ``check`` when idle."""
        return self._allocator.num_free

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences; unknown ids are ignored."""
        self._table.release(request_ids)
        if self._grammars is not None:
            self._grammars.release(request_ids)

    def check(self) -> None:
        """Runs a real one-token step in the block kept for it. Raises EngineLostError for broken logits."""
        logits = self._runner.run([SequenceInput((0,), 0, self._check_table.block_ids, 1)]).logits
        if logits.shape[0] != 1 or bool(logits.isnan().any()):
            raise EngineLostError("a one-token step gives logits that are not numbers")

    def _back_to_state(self, sequence: EngineSequence) -> None:
        """Marks as not computed what recurrent layers have to see again."""
        if self._states is not None:
            sequence.num_computed_tokens = self._states.resume_len(
                sequence.block_table.block_ids, sequence.num_computed_tokens
            )

    def close(self) -> None:
        """Closes the runner, and with it the other ranks of its group; idempotent."""
        self._runner.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block is lost or owned twice, or K/V would go to a wrong place."""
        self._table.check_integrity([self._check_table])
        moves = self._runner.pending_moves
        self._table.check_moves(moves.sources, moves.destinations)
