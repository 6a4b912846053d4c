"""A draft's conversation with a router, and the processes that hold it with a draft of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.queues import Queue
from typing import Any

import torch

from specray.config import Config
from specray.engine.build import build_draft_engine, build_follower
from specray.engine.drafting.engine import DraftEngine
from specray.engine.group.parallel import GroupArgs, GroupStore, ParallelContext
from specray.types import Outcomes, Proposal, SamplingParams, SpeculateItem

DEADLINE_S = 120.0
PROMPT = tuple((7 * i) % 90 + 2 for i in range(24))
GREEDY = SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT))
COUPLED = SamplingParams(seed=1234567890123456789, num_prompt_tokens=len(PROMPT))
PROCESSED = replace(COUPLED, temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.2)
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED, "processed": PROCESSED}
NUM_DRAFTS = 4
FANOUT = (2, 1, 1, 1, 3)
Reply = tuple[Any, ...]
"""What a reply says: the draft tokens, or of each branch what it stands for and its draft tokens."""


def converse(draft: DraftEngine) -> dict[str, list[Reply]]:
    """Everything that a draft is asked: what it answered, by what was asked."""
    said = {f"serial {name}": serial(draft, name, sampling) for name, sampling in SAMPLINGS.items()}
    said |= {f"outcomes {name}": enumerated(draft, name, sampling) for name, sampling in SAMPLINGS.items()}
    said["short"] = serial(draft, "short", COUPLED, min_acceptance=0.3)
    said["many"] = side_by_side(draft)
    draft.check()
    return said


def serial(
    draft: DraftEngine, name: str, sampling: SamplingParams, *, min_acceptance: float = 0.0
) -> list[Reply]:
    """Proposals, of which more and fewer tokens are accepted: the next rolls the draft's cache back."""
    token_ids = list(PROMPT)
    replies: list[Reply] = []
    base_len = 0
    for number in range(5):
        item = SpeculateItem(
            f"serial-{name}", number, base_len, tuple(token_ids[base_len:]), NUM_DRAFTS,
            sampling=None if base_len else sampling, min_acceptance=min_acceptance,
        )  # fmt: skip
        [reply] = answers(draft, [item])
        replies.append(reply)
        base_len = len(token_ids)
        token_ids += [*reply[: number % (len(reply) + 1)], 2 + 11 * number % 90]
    draft.release([f"serial-{name}"])
    return replies


def enumerated(draft: DraftEngine, name: str, sampling: SamplingParams) -> list[Reply]:
    """Outcomes of one round after the other; each goes on with what one of them has drafted."""
    item = SpeculateItem(f"outcomes-{name}", 0, 0, PROMPT, NUM_DRAFTS, sampling=sampling)
    [proposed] = answers(draft, [item])
    token_ids, base_len = list(PROMPT), len(PROMPT)
    replies: list[Reply] = [proposed]
    for number in range(1, 4):
        item = SpeculateItem(
            f"outcomes-{name}", number, base_len, tuple(token_ids[base_len:]), NUM_DRAFTS,
            proposed_token_ids=proposed, fanout=FANOUT, max_branches=6 if number == 2 else 0,
        )  # fmt: skip
        [branches] = answers(draft, [item])
        replies.append(branches)
        num_accepted, next_token_id, drafted = branches[-number]
        base_len = len(token_ids)
        token_ids += [*proposed[:num_accepted], next_token_id]
        proposed = drafted
    draft.release([f"outcomes-{name}"])
    return replies


def side_by_side(draft: DraftEngine) -> list[Reply]:
    """As many sequences as there may be, as long as they may be: all blocks are in use, by branches too."""
    limit = draft.info.max_model_len
    prompts = [tuple((5 * i + 3 * index) % 90 + 2 for i in range(limit - 9)) for index in range(3)]
    # Begins as the first does: its K/V are copied.
    prompts.append((*prompts[0][:-3], 5, 5, 5))
    items = [
        SpeculateItem(f"many-{index}", 0, 0, prompt, NUM_DRAFTS, sampling=(GREEDY, COUPLED)[index % 2])
        for index, prompt in enumerate(prompts)
    ]
    drafted = answers(draft, items)
    items = [
        SpeculateItem(
            f"many-{index}", 1, len(prompt), (), NUM_DRAFTS, proposed_token_ids=proposed, fanout=FANOUT
        )
        for index, (prompt, proposed) in enumerate(zip(prompts, drafted, strict=True))
    ]
    items[1] = replace(items[1], proposed_token_ids=(), fanout=(), token_ids=(9,))
    return drafted + answers(draft, items)


def answers(draft: DraftEngine, items: Sequence[SpeculateItem]) -> list[Reply]:
    found: list[Reply] = []
    for reply in draft.speculate(items).replies:
        if isinstance(reply, Proposal):
            found.append(reply.draft.token_ids)
            continue
        assert isinstance(reply, Outcomes), reply
        found.append(
            tuple(
                (branch.num_accepted_tokens, branch.next_token_id, branch.draft.token_ids)
                for branch in reply.branches
            )
        )
    return found


def run_rank(rank: int, meetings: dict[int, Queue[str]], answered: Queue[Any], configs: list[Config]) -> None:
    """One group after the other, each of the size that its configuration says; rank 0 converses."""
    torch.set_num_threads(1)
    for config in configs:
        size = config.draft.tensor_parallel_size
        if rank >= size:
            continue
        args = GroupArgs(rank, size, "cpu", start_timeout_s=DEADLINE_S, silence_timeout_s=DEADLINE_S)
        if rank > 0:
            group = ParallelContext.join(args, meetings[size].get(timeout=DEADLINE_S))
            follower = build_follower(config.draft, role="draft", parallel=group)
            answered.put(("blocks", size, follower.info.num_blocks))
            follower.follow()
            follower.close()
            continue
        store = GroupStore("127.0.0.1", timeout_s=DEADLINE_S)
        for _ in range(size - 1):
            meetings[size].put(store.address)
        draft = build_draft_engine(config, parallel=ParallelContext.join(args, store))
        answered.put(("blocks", size, draft.info.num_blocks))
        answered.put(("said", size, (converse(draft), draft.info.tensor_parallel_size)))
        draft.close()
