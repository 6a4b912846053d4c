"""Drafters of every kind for the loops of the harness: right, wrong, random, lost after a while."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.drafting.engine import DraftEngine
from tests.unit.engine.harness import Drafter, Session, propose


def random_drafter(vocab_size: int) -> Drafter:
    source = random.Random(0)
    return lambda session, count: DraftTokens(tuple(source.randrange(vocab_size) for _ in range(count)))


def adversarial_drafter(output: Sequence[int], num_prompt: int, vocab_size: int) -> Drafter:
    """Knows what the target will say, and never says it."""

    def wrong(session: Session, count: int) -> DraftTokens:
        start = len(session.token_ids) - num_prompt
        return DraftTokens(tuple((token_id + 1) % vocab_size for token_id in output[start : start + count]))

    return wrong


def tree_drafter(output: Sequence[int], num_prompt: int, vocab_size: int) -> Drafter:
    """Random trees; each node is what the target will say at its depth, or is wrong."""
    source = random.Random(0)

    def tree(session: Session, count: int) -> DraftTokens:
        start = len(session.token_ids) - num_prompt
        parents = tuple(source.randrange(-1, index) for index in range(count))
        right = [output[start + depth] for depth in DraftTokens((0,) * count, parents).depths]
        tokens = tuple((token_id + (source.random() < 0.3)) % vocab_size for token_id in right)
        return DraftTokens(tokens, parents)

    return tree


def empty_drafter(session: Session, count: int) -> DraftTokens:
    return NO_DRAFT


def engine_drafter(draft: DraftEngine) -> Drafter:
    return lambda session, count: propose(draft, session, count)


def dying_drafter(draft: DraftEngine, *, rounds: int) -> Drafter:
    """A draft that is lost after a few rounds; the session goes on without it."""

    def drafter(session: Session, count: int) -> DraftTokens:
        return propose(draft, session, count) if len(session.accepted) < rounds else NO_DRAFT

    return drafter
