"""Shares one target step's token budget out between the sessions that are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Schedulable(Protocol):
    """What the batch needs to know of a session that could be verified now."""

    @property
    def is_prefilling(self) -> bool: ...

    @property
    def num_missing(self) -> int:
        """Committed tokens that the target lacks, >= 1."""
        ...

    @property
    def num_drafted(self) -> int:
        """Draft tokens in hand."""
        ...

    @property
    def last_step(self) -> int:
        """Number of the target step that it was last part of."""
        ...


class Share(NamedTuple):
    """How a session takes part: where it stands in what was offered, and its room in the step."""

    position: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one target step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    """Prompt tokens of all prefills together."""


def form_batch(offered: Sequence[Schedulable], limits: BatchLimits) -> list[Share]:
    """Chooses for one step: running sessions first, then chunks of prefills while there is room.

    Running sessions that do not fit take turns: those longest without a step go first. Prefills are served
    first come, first served, one chunk budget for all, so that running sessions keep their pace.

    Args:
        offered: sessions that could be verified now, in order of arrival.
        limits: bounds of the step.

    Returns:
        At most max_num_seqs shares; their rooms add up to at most max_num_batched_tokens.
    """
    shares: list[Share] = []
    left = limits.max_num_batched_tokens
    # Properties of a session are asked once: this is part of every step.
    prefilling: list[int] = []
    running: list[tuple[int, int]] = []
    for index, session in enumerate(offered):
        if session.is_prefilling:
            prefilling.append(index)
        else:
            running.append((index, session.num_missing + session.num_drafted))
    if len(running) > limits.max_num_seqs or sum(num_rows for _, num_rows in running) > left:
        running.sort(key=lambda entry: offered[entry[0]].last_step)
    for index, num_rows in running:
        if len(shares) == limits.max_num_seqs or left <= 0:
            break
        room = min(left, num_rows)
        shares.append(Share(index, room))
        left -= room
    chunk_left = min(limits.prefill_chunk_tokens, left)
    for index in prefilling:
        session = offered[index]
        if len(shares) == limits.max_num_seqs or chunk_left <= 0:
            break
        num_prompt = min(chunk_left, session.num_missing)
        is_last = num_prompt == session.num_missing
        room = min(left, num_prompt + session.num_drafted) if is_last else num_prompt
        shares.append(Share(index, room))
        left -= room
        chunk_left = min(chunk_left - num_prompt, left)
    return shares
