"""The device side of an engine: one ragged forward per call, over one block cache.

Draft and target are the same runner; what is proposed or verified is decided above it. The runner owns the
weights and the K/V tensors, never who runs or which block belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.attention.sdpa import sequence_slots
from specray.engine.cache.blocks import BlockCache
from specray.engine.cache.state_slots import MAX_OPEN_ROWS, StateSlots
from specray.engine.device import use_device
from specray.engine.group.parallel import NO_MOVES, ParallelContext
from specray.engine.inputs import AdapterInput, CopyInput, Moves, SequenceInput, StateCopy
from specray.engine.runner.cuda_graphs import Bucket, GraphedForward
from specray.engine.runner.rows import logit_rows_of, sequence_rows, single_rows, token_ids_of
from specray.engine.sampling.device.select import choose_kernels
from specray.engine.sampling.device.shards import SHARD_MULTIPLE, ShardDrawer, ShardDraws, best_of_ranks
from specray.engine.step import AttentionStep, Forward, ForwardOutput, Step

if TYPE_CHECKING:
    from specray.engine.model.layers.vocabulary import GatheredHead
    from specray.engine.runner.adapters import RunnerAdapters
    from specray.engine.runner.cpu_graphs import CpuGraphForward


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner says of its model and its limits."""

    model_name: str
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence."""
    tokenizer_fingerprint: str
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    tensor_parallel_size: int
    forward: str
    """Name of the forward: ``decoder`` or ``hf``."""
    number_format: str = ""
    """Formats of weights and computation: ``EngineConfig.number_format``, and those of a file's own bits."""
    num_token_ids: int | None = None
    """Token ids up to the tokenizer's last one; None: not known."""
    token_ids: NDArray[np.int64] | None = None
    """Token ids of the logits, ascending; None: all of the vocabulary."""
    mask_token_id: int | None = None
    """PARD mask token id; None: the model has none."""
    attention: str = ""
    """Name of the paged attention backend; empty: attention runs sequence by sequence."""
    is_deterministic: bool = False
    """Whether a row's logits have the same bits alone and in any batch."""
    context_row_share: float = 0.0
    """Share of a context's cost that each further row adds, as in ``EngineInfo``."""
    isa: str = ""
    """Instruction set of the matrix products; empty: they are not ours."""
    checkpoint: str = ""
    """Digest of the model's content and of the formats in which it is computed, in hexadecimal."""
    num_state_slots: int = 1
    """Sequences whose states recurrent layers keep."""
    max_open: int = MAX_OPEN_ROWS
    """Tokens that a sequence of a model with such layers may lose again, at most."""
    num_snapshots: int = 0
    """Room for states of recurrent layers that are kept for other sequences."""


class ModelRunner:
    """One rank's model and cache. In a tensor-parallel group every rank has one and calls the same ``run``.

    The leader's ``run`` hands the step to the other ranks, which sit in ``follow``.

    Args:
        head: of a forward whose logits are this rank's alone; None: they are whole.
        adapters: that sequences may have; None: they have none.
        records: whether a CPU's steps are recorded and run again.
    """

    def __init__(
        self,
        forward: Forward,
        cache: BlockCache,
        info: RunnerInfo,
        *,
        parallel: ParallelContext | None = None,
        graphs: GraphedForward | None = None,
        head: GatheredHead | None = None,
        records: bool = True,
        adapters: RunnerAdapters | None = None,
    ) -> None:
        self.info = info
        self.cache = cache
        self.forward = forward
        self.graphs = graphs
        self.adapters = adapters
        self._parallel = parallel
        self._head = head
        self._drawer = None if parallel is None or head is None else shard_drawer(parallel, head, info.device)
        self.pending_moves = Moves()
        """K/V that is moved before whatever comes next."""
        self.cpu_graphs = cpu_graphs_of(forward, info.device) if records and parallel is None else None
        """Runs steps that are kernels alone between tokens and logits, with threads of their own."""
        self._can_advance = True
        self._forward: Forward = self.cpu_graphs or forward

    @property
    def states(self) -> StateSlots | None:
        return self.cache.states

    @property
    def is_group(self) -> bool:
        return self._parallel is not None

    @torch.inference_mode()
    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        """One forward over the new tokens of all ``inputs``; every sequence appears at most once.

        Returns:
            Logits ``[sum(num_logits), vocab_size]`` in the order of ``inputs``, which the next step may
            overwrite, and features of all rows.

        Raises:
            EngineLostError: a rank of the group is gone.
        """
        moves = self._take_moves()
        if self._parallel is not None:
            self._parallel.send_step(inputs, moves)
        return self._joined(self._moved_and_run(inputs, moves))

    @property
    def can_draw(self) -> bool:
        """True if ranks share the logits and can draw from them without joining them."""
        return self._drawer is not None

    @torch.inference_mode()
    def run_draws(self, inputs: Sequence[SequenceInput], draws: ShardDraws) -> list[int]:
        """Runs a forward as :meth:`run` does, and draws from its logits instead of giving them.

        Args:
            draws: of the rows whose logits are wanted, at least one.

        Returns:
            A token id of each row.
        """
        assert self._parallel is not None, "only ranks share logits"
        moves, encoded = self._take_moves(), draws.encode()
        self._parallel.send_draws(inputs, encoded, moves)
        return best_of_ranks(self._exchanged(self._moved_and_run(inputs, moves), encoded))

    def _exchanged(self, output: ForwardOutput, draws: Sequence[int]) -> torch.Tensor:
        assert self._parallel is not None and self._drawer is not None, "only ranks share logits"
        return self._parallel.exchange(self._drawer.best(output.logits, draws))

    def _joined(self, output: ForwardOutput) -> ForwardOutput:
        if self._head is None:
            return output
        if not len(output.logits):
            # No rank has anything to join, but all rows are equally wide.
            return output._replace(logits=output.logits.new_empty(0, self._head.num_logits))
        return output._replace(logits=self._head.whole(output.logits))

    def _moved_and_run(self, inputs: Sequence[SequenceInput], moves: Moves) -> ForwardOutput:
        try:
            self._move(moves)
            return self._run(inputs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"a step of {sum(len(item.token_ids) for item in inputs)} rows found no memory; lower "
                f"max_num_batched_tokens or cache_memory_gib: {error}"
            ) from error

    def _run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        self._can_advance = all(item.adapter_slot < 0 for item in inputs)
        if not self._can_advance:
            assert self.adapters is not None, "slots are those of adapters"
            return self._run_adapted(self.adapters, inputs)
        if self.graphs is not None and (bucket := self.graphs.bucket_for(inputs)) is not None:
            return self._run_captured(self.graphs, bucket, inputs)
        return self._forward(self._plan(inputs))

    def _run_adapted(self, adapters: RunnerAdapters, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        slots = [item.adapter_slot for item in inputs for _ in item.token_ids]
        if adapters.graphs is not None and (bucket := adapters.graphs.bucket_for(inputs)) is not None:
            adapters.pool.rows.begin(slots, None)
            return self._run_captured(adapters.graphs, bucket, inputs)
        step = self._plan(inputs)
        adapters.pool.rows.begin(slots, step.logit_rows)
        return adapters.forward(step)

    @torch.inference_mode()
    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        """The step after the last one, in which each sequence had one row: with a further token of each.

        Args:
            kept: which of that step's inputs go on, in order.
            token_ids: of each, the token that follows; its sequence has a block for it.

        Returns:
            Logits ``[len(kept), vocab_size]`` and features, there until the next step; None where ``run`` has
            to be told everything.
        """
        if self.cpu_graphs is None or self.pending_moves or not self._can_advance:
            return None
        return self.cpu_graphs.advance(kept, token_ids)

    def follow(self) -> None:
        """Ranks other than the leader: runs what the leader runs until it closes.

        Raises:
            EngineLostError: the leader was silent for longer than the group's deadline.
        """
        assert self._parallel is not None and self._parallel.rank > 0, "only a follower follows"
        # Not of the thread that has loaded the model, perhaps.
        use_device(self.info.device)
        with torch.inference_mode():
            while (received := self._parallel.receive_step()) is not None:
                work, moves, draws = received
                self._move(moves)
                if isinstance(work, CopyInput):
                    self._copy(work)
                    continue
                if isinstance(work, StateCopy):
                    self._copy_state(work)
                    continue
                if isinstance(work, AdapterInput):
                    assert self.adapters is not None, "all ranks have the same configuration"
                    self.adapters.follow(work)
                    continue
                # The leader captures and replays the same forwards, so that their collectives meet.
                output = self._run(work)
                if draws is None:
                    self._joined(output)
                else:
                    self._exchanged(output, draws)

    @torch.inference_mode()
    def copy_tokens(
        self,
        source_block_ids: Sequence[int],
        destination_block_ids: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
    ) -> None:
        """Copies the K/V of the tokens ``first .. num_tokens - 1`` from one list of blocks to another.

        What two sequences with one prefix need where a block holds a whole sequence.

        Raises:
            EngineLostError: a rank of the group is gone.
        """
        copy = CopyInput(source_block_ids, destination_block_ids, first, num_tokens)
        moves = self._take_moves()
        if self._parallel is not None:
            self._parallel.send_copy(copy, moves)
        self._move(moves)
        self._copy(copy)

    @torch.inference_mode()
    def copy_state(self, copy: StateCopy) -> None:
        """Copies what recurrent layers have seen to or from a snapshot, on all ranks.

        Raises:
            EngineLostError: a rank of the group is gone.
        """
        if self._parallel is not None:
            self._parallel.send_state_copy(copy)
        self._copy_state(copy)

    def _copy_state(self, copy: StateCopy) -> None:
        states = self.cache.states
        assert states is not None, "states are copied where there are some"
        states.copy(copy)

    def move_tokens(self, block_ids: Sequence[int], sources: Sequence[int], first: int) -> None:
        """Moves the K/V at some KV indices of a sequence to those from ``first`` on, before the next step or
        copy, with which it is sent to the other ranks.

        Args:
            block_ids: of the sequence.
            sources: KV indices, ascending, each at least as high as where it goes.
        """
        size = self.info.block_size
        for index, source in enumerate(sources, first):
            if source != index:
                self.pending_moves.sources.append(block_ids[source // size] * size + source % size)
                self.pending_moves.destinations.append(block_ids[index // size] * size + index % size)

    @torch.inference_mode()
    def settle_moves(self) -> None:
        """Moves at once what waits for the next step; only where there are no other ranks."""
        assert self._parallel is None, "other ranks receive moves with a step"
        self._move(self._take_moves())

    def _take_moves(self) -> Moves:
        moves = self.pending_moves
        if not moves:
            return NO_MOVES
        self.pending_moves = Moves()
        return moves

    def _move(self, moves: Moves) -> None:
        if moves:
            slots = torch.tensor((moves.sources, moves.destinations), device=self.info.device)
            self.cache.copy(*slots.unbind())

    def _copy(self, copy: CopyInput) -> None:
        source, destination = (
            sequence_slots(ids, copy.first, copy.num_tokens, self.info.block_size, self.info.device)
            for ids in (copy.source_block_ids, copy.destination_block_ids)
        )
        self.cache.copy(source, destination)

    def close(self) -> None:
        """Lets the followers go and leaves the group; idempotent."""
        if self._parallel is not None:
            self._parallel.close()

    def _plan(self, inputs: Sequence[SequenceInput]) -> Step:
        if len(inputs) == 1 and not inputs[0].visibility:
            return self._plan_single(inputs[0])
        device = self.info.device
        rows = sequence_rows(inputs)
        positions: list[int] = []
        for item in rows:
            positions.extend(item.positions)
        wanted = logit_rows_of(inputs, rows)
        return Step(
            token_ids=torch.tensor(token_ids_of(inputs), device=device),
            positions=torch.tensor(positions, device=device),
            attention=AttentionStep(tuple(rows), self.cache),
            logit_rows=None
            if len(wanted) == len(positions)
            else torch.tensor(wanted, dtype=torch.int64, device=device),
        )

    def _plan_single(self, item: SequenceInput) -> Step:
        count = len(item.token_ids)
        assert count >= 1 and 0 <= item.num_logits <= count, item
        return Step(
            token_ids=torch.tensor(item.token_ids, device=self.info.device),
            positions=slice(item.start, item.start + count),
            attention=AttentionStep((single_rows(item),), self.cache),
            logit_rows=None if item.num_logits == count else slice(count - item.num_logits, count),
        )

    def _run_captured(
        self, graphs: GraphedForward, bucket: Bucket, inputs: Sequence[SequenceInput]
    ) -> ForwardOutput:
        rows = sequence_rows(inputs)
        logits, features = graphs.run(bucket, rows, token_ids_of(inputs))
        wanted = logit_rows_of(inputs, rows)
        if features is not None:
            # Copies, since the next step overwrites them.
            features = {layer: each.clone() for layer, each in features.items()}
        if wanted and wanted[-1] - wanted[0] == len(wanted) - 1:
            return ForwardOutput(logits[wanted[0] : wanted[-1] + 1], features)
        index = torch.tensor(wanted, dtype=torch.int64, device=logits.device)
        return ForwardOutput(logits[index], features)


def cpu_graphs_of(forward: Forward, device: torch.device) -> CpuGraphForward | None:
    """The forward with its shapes recorded; None: it is not made of kernels of the CPU alone."""
    if device.type != "cpu":
        return None
    try:
        from specray.engine.runner.cpu_graphs import with_cpu_graphs
    except ImportError:  # Without numba there are no kernels.
        return None
    return with_cpu_graphs(forward)


def shard_drawer(parallel: ParallelContext, head: GatheredHead, device: torch.device) -> ShardDrawer | None:
    """Draws from this rank's logits; None: they are joined, or the ranks' runs of tokens do not allow it."""
    run_len = -(-head.num_logits // parallel.world_size)
    if not parallel.draws_apart or run_len % SHARD_MULTIPLE:
        return None
    if (parallel.world_size - 1) * run_len >= head.num_logits:
        return None
    return ShardDrawer(choose_kernels(device), parallel.first_row(head.num_logits))
