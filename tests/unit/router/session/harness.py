"""A session without a router, answered by hand: every edge of its state machine by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specray.draft_tokens import DraftTokens, SparseProbs
from specray.router.session.session import Session
from specray.router.session.values import Commit
from specray.types import Branch, Outcomes, Proposal, Verdict
from tests.unit.router.harness import request

PROMPT = (1, 2, 3, 4)
ROOM = 1000


def new_session(matcher: Any = None, **options: Any) -> Session:
    return Session(request("a", PROMPT, **options), matcher, vocab_size=64)


def verdict(session: Session, num_accepted: int, next_token_id: int | None, **options: Any) -> Commit | None:
    """Answers the Verify in flight."""
    item = session.target.in_flight
    assert item is not None
    reply = Verdict("a", item.round_id, item.base_len, num_accepted, next_token_id, **options)
    return session.on_verdict(reply)


def decoding(**options: Any) -> Session:
    """A session that has its first output token, 9, and an idle target that holds the prompt."""
    session = new_session(**options)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    return session


def propose(session: Session, tokens: Sequence[int], probs: tuple[SparseProbs, ...] = ()) -> bool:
    item = session.proposal_item(len(tokens))
    return session.on_proposal(
        Proposal("a", item.round_id, item.base_len, DraftTokens(tuple(tokens), probs=probs))
    )


def ahead(session: Session, branches: Sequence[Branch], *, fanout: tuple[int, ...] = (1, 1, 1)) -> Outcomes:
    """Sends 10, 11 to the target, asks for outcomes; returns the draft's answer, not yet delivered."""
    propose(session, (10, 11))
    session.verify_item(ROOM)
    item = session.outcomes_item(3, fanout)
    assert (item.proposed_token_ids, item.fanout) == ((10, 11), fanout)
    return Outcomes("a", item.round_id, item.base_len, tuple(branches))


BRANCHES = (Branch(1, 40, DraftTokens((41, 42))), Branch(2, 50, DraftTokens((51, 52, 53))))
