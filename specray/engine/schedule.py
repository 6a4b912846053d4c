"""Checks the items of a call, forms batches of them, and computes the tokens that sequences lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from specray.draft_tokens import MAX_DRAFT_NODES
from specray.engine.cache.adapters import AdapterMissingError
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.sequences import UnknownSequenceError
from specray.engine.cache.state_slots import STATE_UNIT, StateSlots
from specray.engine.inputs import Moves, SequenceInput, StateCopy
from specray.engine.step import ForwardOutput
from specray.engine.visibility import MAX_TREE_ROWS, Visibility, branch_visibility, tree_visibility
from specray.engine_info import EngineInfo
from specray.errors import InvalidRequestError, OutOfBlocksError, OverloadedError, ProtocolError, SpecrayError
from specray.types import ADAPTER, ItemFailed, SpeculateItem, UnknownSequence, VerifyItem


class Runner(Protocol):
    """The part of ``runner.ModelRunner`` that an engine uses."""

    @property
    def states(self) -> StateSlots | None:
        """Slots of what recurrent layers have seen of sequences; None: the model has no such layers."""
        ...

    @property
    def pending_moves(self) -> Moves:
        """K/V that is moved before the next step or copy."""
        ...

    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        """One ragged forward.

        Returns:
            Logits ``[sum of num_logits, vocab_size]`` in the order of ``inputs``, there until the next step.
        """
        ...

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        """The step after the last one, in which each sequence had one row: with a further token of some.

        Returns:
            The output of ``len(kept)`` rows, there until the next step; None where it takes a ``run``.
        """
        ...

    def copy_tokens(
        self,
        source_block_ids: Sequence[int],
        destination_block_ids: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
    ) -> None:
        """Copies the K/V of the tokens ``first .. num_tokens - 1`` from one list of blocks to another."""
        ...

    def copy_state(self, copy: StateCopy) -> None:
        """Copies what recurrent layers have seen to or from a snapshot, before the next step."""
        ...

    def move_tokens(self, block_ids: Sequence[int], sources: Sequence[int], first: int) -> None:
        """Moves the K/V at some KV indices of a sequence to those from ``first`` on, before the next step."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Work: all missing tokens of a sequence, with logits of the last ``num_logits`` rows."""

    sequence: EngineSequence
    num_logits: int
    parents: Sequence[int] | None = None
    """Parents of the uncommitted tokens if they are a tree (as in ``DraftTokens``): they count as computed
    only when some of them are committed. None: a chain."""
    extra_token_ids: Sequence[int] = ()
    """Rows after the sequence's tokens that never count as computed; nodes of the tree, if it is one."""
    extra_visibility: Sequence[Visibility] = ()
    """Visibility of the extra rows, where they are not in ``parents``. Empty: they follow each other."""
    num_open: int = 0
    """Last tokens that the sequence may lose again: of these rows, and maybe of steps before."""
    num_left: int = 0
    """Last tokens that are left for a later step."""

    @property
    def end(self) -> int:
        """Tokens that are computed then, with the extra ones."""
        return len(self.sequence.token_ids) + len(self.extra_token_ids) - self.num_left

    @property
    def settled(self) -> int:
        """Tokens computed then that the sequence cannot lose."""
        return self.end - self.num_open

    @property
    def num_rows(self) -> int:
        return self.end - self.sequence.num_computed_tokens

    @property
    def token_ids(self) -> list[int]:
        token_ids = self.sequence.token_ids
        return [*token_ids, *self.extra_token_ids] if self.extra_token_ids else token_ids

    def visibility(self) -> Sequence[Visibility]:
        """Visibility of each missing token; empty: they are a chain."""
        if self.parents is None and not self.extra_visibility:
            return ()
        start, told = self.sequence.num_computed_tokens, self.sequence.num_tokens
        end = len(self.sequence.token_ids) if self.parents is None else told
        chain = [branch_visibility(position, position, 1) for position in range(start, end)]
        behind = self.extra_visibility if self.parents is None else tree_visibility(told, self.parents)
        return [*chain, *behind]


@dataclass(frozen=True, slots=True)
class BranchStep:
    """Work: one token, with logits, of each of some branches of a sequence."""

    sequence: EngineSequence
    token_ids: Sequence[int]
    visibility: Sequence[Visibility]
    """Visibility of each token, KV indices ascending."""


Item = TypeVar("Item", SpeculateItem, VerifyItem)


def split_waves(
    items: Sequence[Item], *, num_shared_tokens: int | None = None
) -> Iterator[list[tuple[int, Item]]]:
    """Splits a batch so that no wave has two items of one request; yields (index, item) pairs.

    Items of one request keep their order. Nearly always there is one wave.

    Args:
        num_shared_tokens: common prefix length from which on one of the sequences is in the first wave, and
            the others are in the second, where they find that prefix computed.
    """
    rest = list(enumerate(items))
    begun: set[tuple[str, bytes, tuple[int, ...]]] | None = None if num_shared_tokens is None else set()
    while rest:
        wave: list[tuple[int, Item]] = []
        later: list[tuple[int, Item]] = []
        taken: set[str] = set()
        for index, item in rest:
            waits = item.request_id in taken
            taken.add(item.request_id)
            if begun is not None and item.base_len == 0 and len(item.token_ids) > (num_shared_tokens or 0):
                sampling = item.sampling
                salt, adapter = ("", b"") if sampling is None else (sampling.cache_salt, sampling.adapter)
                beginning = salt, adapter, item.token_ids[:num_shared_tokens]
                waits = waits or beginning in begun
                begun.add(beginning)
            (later if waits else wave).append((index, item))
        yield wave
        rest, begun = later, None


def failure_reply(item: SpeculateItem | VerifyItem, error: Exception) -> UnknownSequence | ItemFailed:
    """What an item that raised ``error`` is answered."""
    if isinstance(error, UnknownSequenceError):
        return UnknownSequence(item.request_id, item.round_id, item.base_len)
    lacks_adapter = isinstance(error, AdapterMissingError)
    is_retriable = lacks_adapter or isinstance(error, OutOfBlocksError | OverloadedError)
    message = str(error) if isinstance(error, SpecrayError) else f"{type(error).__name__}: {error}"
    is_invalid = isinstance(error, InvalidRequestError)
    field = (error.field if isinstance(error, InvalidRequestError) else None) or (
        ADAPTER if lacks_adapter else ""
    )
    return ItemFailed(
        item.request_id,
        item.round_id,
        item.base_len,
        message,
        is_retriable,
        is_invalid=is_invalid,
        field=field,
    )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ProtocolError for a token id outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise ProtocolError(f"{field} holds {wrong}; allowed: 0..{vocab_size - 1}")


def check_length(base_len: int, length: int, max_model_len: int) -> None:
    """Raises ProtocolError when a sequence would be empty or longer than the model allows."""
    if base_len < 0:
        raise ProtocolError(f"base_len is {base_len}; allowed: 0 or more")
    if not 1 <= length <= max_model_len:
        raise ProtocolError(f"the sequence would have {length} tokens; allowed: 1..{max_model_len}")


def check_speculation(item: SpeculateItem, info: EngineInfo, *, num_item_ids: int) -> None:
    """Raises ProtocolError for what no draft can do.

    Args:
        num_item_ids: token ids of what is proposed.
    """
    check_length(item.base_len, item.base_len + len(item.token_ids), info.max_model_len)
    check_token_ids("token_ids", item.token_ids, info.vocab_size)
    check_token_ids("proposed_token_ids", item.proposed_token_ids, num_item_ids)
    if not 0.0 <= item.min_acceptance < 1.0:
        raise ProtocolError(f"min_acceptance is {item.min_acceptance}; allowed: 0 or more, below 1")
    if item.num_speculative_tokens < 0:
        raise ProtocolError(f"num_speculative_tokens is {item.num_speculative_tokens}; allowed: 0 or more")


def wanted_rows(item: SpeculateItem, max_model_len: int) -> tuple[int, int]:
    """First and last number of accepted tokens that an item wants branches for; ``(0, -1)``: none fits.

    Of a tree, they are those of its first chain, from the root on.

    Raises:
        ProtocolError: the fan-out is none for its proposed tokens.
    """
    num_proposed, length = len(item.proposed_token_ids), item.base_len + len(item.token_ids)
    is_short = item.proposed_parents is not None and len(item.fanout) <= num_proposed
    if is_short or len(item.fanout) > num_proposed + 1 or min(item.fanout) < 0:
        raise ProtocolError(
            f"fanout is {item.fanout} for {num_proposed} proposed tokens; allowed: at most "
            f"{num_proposed + 1} numbers, 0 or more, and as many of a tree"
        )
    if num_proposed > MAX_DRAFT_NODES:
        raise ProtocolError(
            f"proposed_token_ids has {num_proposed} entries; allowed: at most {MAX_DRAFT_NODES}"
        )
    if item.num_speculative_tokens > MAX_TREE_ROWS:
        raise ProtocolError(
            f"num_speculative_tokens is {item.num_speculative_tokens}; allowed with fanout: at most "
            f"{MAX_TREE_ROWS}"
        )
    # A branch holds at least its next token.
    fitting = [
        accepted
        for accepted, count in enumerate(item.of_first_chain().fanout)
        if count > 0 and length + accepted + 1 <= max_model_len
    ]
    if not fitting:
        return 0, -1
    return (fitting[0] if item.proposed_parents is None else 0), fitting[-1]


def catch_up(
    runner: Runner, work: Sequence[CatchUp | BranchStep], max_num_batched_tokens: int
) -> ForwardOutput | None:
    """Brings every sequence's computed length up to its tokens, in one forward where the budget allows.

    Returns:
        Logits ``[sum of num_logits, vocab_size]`` in the order of ``work``, with a row for each branch's
        token, there until the next step, and features of all rows that were computed; None when nothing was.
    """
    # Sequences are cut in order, so the pieces of the logits come in the order of ``work`` too.
    pieces: list[ForwardOutput] = []
    for inputs in _plan_steps(work, max_num_batched_tokens):
        if not inputs:
            continue
        if pieces:
            # The next step overwrites them.
            pieces[-1] = pieces[-1]._replace(logits=pieces[-1].logits.clone())
        pieces.append(runner.run(inputs))
    for item in work:
        if isinstance(item, CatchUp):
            sequence = item.sequence
            sequence.num_computed_tokens = (
                len(sequence.token_ids) - item.num_left if item.parents is None else sequence.num_tokens
            )
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    logits = torch.cat([piece.logits for piece in pieces])
    parts = [piece.features for piece in pieces if piece.features is not None]
    if not parts:
        return ForwardOutput(logits)
    return ForwardOutput(logits, {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]})


def _plan_steps(work: Iterable[CatchUp | BranchStep], budget: int) -> Iterator[list[SequenceInput]]:
    """Cuts the missing tokens into steps of at most ``budget`` tokens."""
    inputs: list[SequenceInput] = []
    left = budget
    for item in work:
        sequence = item.sequence
        if isinstance(item, BranchStep):
            first = 0
            while first < len(item.token_ids):
                if left == 0:
                    yield inputs
                    inputs, left = [], budget
                last = min(len(item.token_ids), first + left)
                block_ids, rows = sequence.block_table.block_ids, item.visibility[first:last]
                inputs.append(
                    SequenceInput(
                        item.token_ids[first:last],
                        0,
                        block_ids,
                        last - first,
                        rows,
                        adapter_slot=sequence.adapter_slot,
                    )
                )
                left -= last - first
                first = last
            continue
        token_ids = item.token_ids
        start, end = sequence.num_computed_tokens, item.end
        assert end - start >= item.num_logits, (start, end, item.num_logits)
        visibility, first = item.visibility(), start
        settled = item.settled
        marks = [] if sequence.snapshots is None else sequence.snapshots.marks
        while start < end:
            if left == 0:
                yield inputs
                inputs, left = [], budget
            stop = min(end, start + left)
            if sequence.state_slot is not None and stop < end:
                stop = _stop(start, stop, settled)
                if stop == start:
                    if left < budget:
                        left = 0
                        continue
                    # More than a step may hold, or a unit: they must not be parted.
                    stop = end if start >= settled else min(settled, start + left)
            # Of the wanted rows [end - num_logits, end), those below stop that no earlier piece gave.
            num_logits = max(0, stop - max(start, end - item.num_logits))
            inputs.append(
                SequenceInput(
                    token_ids[start:stop],
                    start,
                    sequence.block_table.block_ids,
                    num_logits,
                    visibility[start - first : stop - first],
                    sequence.state_slot or 0,
                    max(0, stop - settled),
                    [(each.num_tokens, each.index) for each in marks if start < each.num_tokens <= stop],
                    sequence.adapter_slot,
                )
            )
            left = max(0, left - (stop - start))
            start = stop
    yield inputs


def _stop(start: int, stop: int, settled: int) -> int:
    """Where a step that would end behind ``stop`` tokens ends for recurrent layers.

    Open rows stay in one step, and others end at a multiple of ``STATE_UNIT``, where cuts keep every bit.
    Returns ``start`` where nothing is left.
    """
    stop = min(stop, settled)
    return max(start, stop // STATE_UNIT * STATE_UNIT) if stop < settled else stop
