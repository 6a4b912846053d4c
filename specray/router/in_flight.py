"""A target step on its way."""

from __future__ import annotations

from dataclasses import dataclass

from specray.router.live_session import LiveSession
from specray.router.transport.links import (
    TargetLink,
)


@dataclass(slots=True, eq=False)
class VerifyInFlight:
    """One target step that was sent and is not answered yet."""

    link: TargetLink
    sessions: tuple[LiveSession, ...]
    pending: set[tuple[str, int]]
    """(request_id, round_id) of items without reply."""
    num_rows: int
    num_context_tokens: int
    """Tokens that all its sequences together hold when it is done."""
    num_branches: int
    """Rows of trees besides their longest paths."""
    has_prompt: bool
    """Some of them are filled in."""
    sent_s: float
    num_running: int
    """Sessions, also those that wait for their draft."""
    is_overlapped: bool = False
    """The draft works at the same time."""
    has_draft_prefill: bool = False
    """The draft prefills meanwhile, as it must with every prompt."""
