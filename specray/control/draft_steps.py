"""What a step of the draft says of its speed."""

from __future__ import annotations

from collections.abc import Sequence

from specray.control.controller import Policy
from specray.types import DraftReply, Proposal, SpeculateItem

_LONG_ITEM = 64
"""Items that bring more tokens than this are prefills: their times say nothing about a draft step."""


def learn_step(
    policy: Policy, answered: Sequence[tuple[SpeculateItem, DraftReply]], forward_s: float, transport_s: float
) -> None:
    """Measures a step of one kind; mixed ones, prefills and pieces of them say nothing about either.

    Args:
        answered: what was asked, and proposals or outcomes.
        transport_s: from the first question to the answers, less ``forward_s``.
    """
    items = [item for item, _ in answered]
    kinds = {bool(item.fanout) for item in items}
    if len(kinds) != 1 or any(item.is_prefill_chunk or len(item.token_ids) > _LONG_ITEM for item in items):
        return
    num_steps = [num_draft_steps(*answer) for answer in answered]
    if not items[0].fanout:
        num_read = sum(len(item.token_ids) for item in items)
        policy.measured.observe_proposals(num_steps, forward_s, transport_s, num_read=num_read)
        return
    num_branches = sum(item.max_branches or sum(item.fanout) for item in items)
    policy.measured.observe_outcomes(max(num_steps), num_branches, forward_s)


def num_draft_steps(item: SpeculateItem, reply: DraftReply) -> int:
    """Of the draft for this answer: the token before which it ended its proposal was drafted too."""
    asked = item.num_speculative_tokens
    return min(asked, len(reply.draft.token_ids) + 1) if isinstance(reply, Proposal) else asked
