"""Checks of what a target is asked to verify."""

from __future__ import annotations

from specray.engine.schedule import check_length, check_token_ids
from specray.engine_info import EngineInfo
from specray.errors import ProtocolError
from specray.types import VerifyItem


def check_item(item: VerifyItem, num_drafts: int, info: EngineInfo) -> None:
    """Raises SpecrayError if an item cannot be verified.

    Args:
        num_drafts: draft tokens of it that are to be verified.
    """
    length = item.base_len + len(item.token_ids) + num_drafts
    check_length(item.base_len, length - num_drafts, info.max_model_len)
    check_length(item.base_len, length, info.max_model_len)
    check_token_ids("token_ids", item.token_ids, info.vocab_size)
    check_token_ids("draft.token_ids", item.draft.token_ids, info.vocab_size)
    if num_drafts and not item.sample:
        raise ProtocolError("a prefill chunk has draft tokens; allowed: none")
    if item.max_new_tokens is not None and (item.sample or item.max_new_tokens < 1):
        raise ProtocolError(
            f"max_new_tokens is {item.max_new_tokens}; allowed: at least 1, for a prefill chunk"
        )
    if not 0.0 <= item.next_min_acceptance < 1.0:
        raise ProtocolError(f"next_min_acceptance is {item.next_min_acceptance}; allowed: 0 or more, below 1")
    for row in item.draft.probs:
        check_token_ids("draft.probs", row.token_ids, info.vocab_size)
        if not row.is_distribution(info.vocab_size):
            raise ProtocolError(
                "draft.probs is no distribution; allowed: distinct token ids, a finite probability for each"
            )
