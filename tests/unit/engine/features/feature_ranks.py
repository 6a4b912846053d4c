"""What the ranks of a target with a drafter do, each in a process of its own."""

from __future__ import annotations

from multiprocessing.queues import Queue
from typing import Any

from specray.config import Config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.build import build_follower, build_target_engine
from specray.engine.target.engine import TargetEngine
from tests.unit.engine.features.targets import Session, step
from tests.unit.engine.group.group_ranks import DEADLINE_S, join

PROMPT = tuple((7 * index) % 90 + 2 for index in range(24))
NUM_DRAFTS = 3


def converse(target: TargetEngine) -> list[Any]:
    """Rounds with the drafter's tokens, with a tree, and of a sequence whose prefix is known."""
    session, draft, said = Session("a", list(PROMPT)), NO_DRAFT, []
    for number in range(6):
        [verdict] = step(target, [session], [draft], NUM_DRAFTS)
        said.append((verdict.num_accepted_tokens, verdict.next_token_id, verdict.draft.token_ids))
        draft = verdict.draft
        if number % 3 == 1:
            draft = DraftTokens((3, *draft.token_ids), (-1, -1, 1, 2))
    other = Session("b", list(PROMPT))
    [verdict] = step(target, [other], [NO_DRAFT], NUM_DRAFTS)
    return [*said, (verdict.next_token_id, verdict.draft.token_ids)]


def run_rank(rank: int, meeting: Queue[str], answered: Queue[Any], configs: list[Config]) -> None:
    """Rank 0 drafts and converses; the other follows."""
    config = configs[rank]
    group = join(rank, meeting, silence_timeout_s=3 * DEADLINE_S)
    if rank > 0:
        follower = build_follower(config.target, role="target", parallel=group)
        follower.follow()
        follower.close()
        return
    target = build_target_engine(config, parallel=group)
    info = target.info
    answered.put((converse(target), info.tensor_parallel_size, info.drafter, info.num_blocks))
    target.close()
