"""A draft with recurrent layers: one chain behind a sequence's state, and what of it can be taken back.

Such layers have one state of a sequence, from which branches cannot go on side by side. So of all outcomes of
a round the likeliest is drafted, in which all is accepted. Until a verdict the state stays where it is, and
the tokens of the chain are in records beside it: whatever is accepted, the next round goes on behind it.
"""

from __future__ import annotations

from dataclasses import replace

from specray.engine.cache.state_slots import STATE_UNIT, StateSlots
from specray.engine.schedule import CatchUp
from specray.types import SpeculateItem


def one_chain(item: SpeculateItem, max_open: int) -> SpeculateItem:
    """The part of an item that is drafted.

    Args:
        max_open: tokens that a sequence may lose again: the last committed one and those that are drafted
            behind it, but for the last, which is not computed.
    """
    if not item.fanout:
        return replace(item, num_speculative_tokens=min(item.num_speculative_tokens, max_open))
    item = item.of_first_chain()
    num_proposed = len(item.proposed_token_ids)
    room = max_open - 1 - num_proposed
    is_wanted = room >= 0 and sum(item.fanout[num_proposed:]) > 0
    return replace(
        item,
        fanout=(0,) * num_proposed + (int(is_wanted),),
        num_speculative_tokens=max(0, min(item.num_speculative_tokens, room)),
    )


def with_records(item: CatchUp, states: StateSlots) -> CatchUp:
    """The same work, with the tokens that may be lost again left out of the state.

    Those behind the prompt are computed one by one, as plain decoding does: a draft that is the target has
    its bits. Parts of a prompt end where cuts change none.
    """
    sequence = item.sequence
    assert sequence.state_slot is not None, "every sequence has a slot"
    told, start = sequence.num_tokens, sequence.num_computed_tokens
    num_left = 0
    if item.num_logits == 0:
        num_left = min(item.num_rows, len(sequence.token_ids) % STATE_UNIT)
    settled = min(told - 1, max(start, sequence.sampling.num_prompt_tokens - 1))
    if item.end - settled > states.max_open:
        settled = told - 1
    base = states.bases[sequence.state_slot] if start else 0
    settled = max(base, settled)
    if sequence.snapshots is not None:
        sequence.snapshots.mark(start, min(settled, item.end - num_left))
    return replace(item, num_open=max(0, item.end - num_left - settled), num_left=num_left)
