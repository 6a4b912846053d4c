"""Engines over a model that can be computed by hand, and the loops that a router would run over them.

The model's cache holds token ids, and its logits are a hash of all of them: one stale or missing slot
changes everything that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specray.draft_tokens import DraftTokens
from specray.engine.cache.state_slots import StateSlots
from specray.engine.drafting.engine import DraftEngine
from specray.engine.drafting.guesses import Guesser
from specray.engine.inputs import Moves, SequenceInput, StateCopy
from specray.engine.sampling.noise import NoiseSource
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.verify import add_draw_noise
from specray.engine.step import ForwardOutput
from specray.engine.target.engine import TargetEngine
from specray.engine.visibility import Visibility
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.types import Outcomes, Proposal, SamplingParams, SpeculateItem, Verdict, VerifyItem
from tests.unit.engine.sampling.rows import row_group

VOCAB_SIZE = 23
NUM_ROWS = 1021
CPU = torch.device("cpu")


def table(*, error: float = 0.0, seed: int = 0) -> Tensor:
    """Logits rows; ``error`` is a draft's distance from the target."""
    generator = torch.Generator().manual_seed(seed)
    exact = 2.0 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)
    return exact + error * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator)


TARGET = table()
CLOSE = table(error=0.7)


def model_logits(rows: Tensor, prefix: Sequence[int]) -> Tensor:
    """The model itself: logits ``[vocab_size]`` of the token after ``prefix``."""
    return rows[hash(tuple(prefix)) % NUM_ROWS]


class SlotRunner:
    """A runner whose K/V are token ids in the slots of blocks, each with a hash of all that it has seen."""

    def __init__(self, rows: Tensor, info: EngineInfo) -> None:
        self.slots = [-1] * (info.num_blocks * info.block_size)
        self._seen = [0] * len(self.slots)
        self.steps: list[list[SequenceInput]] = []
        self.pending_moves = Moves()
        self.states: StateSlots | None = None
        self._rows = rows
        self._info = info

    @property
    def num_rows(self) -> int:
        """Tokens computed so far."""
        return sum(len(item.token_ids) for step in self.steps for item in step)

    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        self._move()
        self.steps.append(list(inputs))
        assert inputs
        if len(inputs) > 1:
            self._check_writes(inputs)
        assert sum(len(item.token_ids) for item in inputs) <= self._info.max_num_batched_tokens
        logits = [row for item in inputs for row in self._run_sequence(item)]
        return ForwardOutput(torch.stack(logits) if logits else torch.empty(0, VOCAB_SIZE))

    def _check_writes(self, inputs: Sequence[SequenceInput]) -> None:
        """Sequences may share what they read, never what one of them writes."""
        written: dict[int, int] = {}
        for index, item in enumerate(inputs):
            for position in _kv_indices(item):
                assert written.setdefault(self._slot(item.block_ids, position), index) == index
        for index, item in enumerate(inputs):
            for position in range(max((row.prefix_len for row in item.visibility), default=item.start)):
                assert written.get(self._slot(item.block_ids, position), index) == index, (
                    "a sequence writes what others read"
                )

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        before = self.steps[-1]
        if any(len(item.token_ids) != 1 or item.num_logits != 1 or item.visibility for item in before):
            return None
        items = [before[index] for index in kept]
        return self.run(
            [
                SequenceInput([token_id], item.start + 1, item.block_ids, 1)
                for item, token_id in zip(items, token_ids, strict=True)
            ]
        )

    def copy_tokens(
        self, source: Sequence[int], destination: Sequence[int], num_tokens: int, *, first: int = 0
    ) -> None:
        self._move()
        for position in range(first, num_tokens):
            old, new = self._slot(source, position), self._slot(destination, position)
            self.slots[new], self._seen[new] = self.slots[old], self._seen[old]

    def copy_state(self, copy: StateCopy) -> None:
        raise AssertionError("this model has no states")

    def move_tokens(self, block_ids: Sequence[int], sources: Sequence[int], first: int) -> None:
        """Like the real one, at the next step or copy: the sequence may have been released by then."""
        for index, source in enumerate(sources, first):
            assert source >= index
            if source > index:
                self.pending_moves.sources.append(self._slot(block_ids, source))
                self.pending_moves.destinations.append(self._slot(block_ids, index))

    def _move(self) -> None:
        moves, self.pending_moves = self.pending_moves, Moves()
        moved = [(self.slots[slot], self._seen[slot]) for slot in moves.sources]
        for slot, (token_id, seen) in zip(moves.destinations, moved, strict=True):
            self.slots[slot], self._seen[slot] = token_id, seen

    def close(self) -> None: ...

    def _run_sequence(self, item: SequenceInput) -> list[Tensor]:
        assert 0 <= item.num_logits <= len(item.token_ids) and len(item.token_ids) >= 1
        end = item.end
        assert end <= len(item.block_ids) * self._info.block_size, "the sequence outgrew its blocks"
        slots = self._slots(item.block_ids, end)
        own = [slots[position] for position in _kv_indices(item)]
        for slot, token_id in zip(own, item.token_ids, strict=True):
            self.slots[slot] = token_id
        if not item.visibility:
            self._see_chain(slots, item.start)
            prefix = [self.slots[slot] for slot in slots]
            return [self.logits_of(prefix[: end - i]) for i in reversed(range(item.num_logits))]
        assert all(row.position < self._info.max_model_len for row in item.visibility)
        rows = [
            slots[: row.prefix_len] + [slots[index] for index in range(end) if _is_ancestor(row, index)]
            for row in item.visibility
        ]
        for row in rows:
            self._see_chain(row, len(row) - 1)
        wanted = rows[len(rows) - item.num_logits :]
        return [self.logits_of([self.slots[slot] for slot in row]) for row in wanted]

    def logits_of(self, prefix: Sequence[int]) -> Tensor:
        """The model itself."""
        return model_logits(self._rows, prefix)

    def _see_chain(self, slots: Sequence[int], num_seen: int) -> None:
        """Computes slots behind the first ``num_seen`` from all before them, which must have seen theirs."""
        seen = 0
        for index, slot in enumerate(slots):
            seen = hash((seen, self.slots[slot]))
            if index >= num_seen:
                self._seen[slot] = seen
            assert self._seen[slot] == seen, "K/V are read that were computed behind other tokens"

    def _slots(self, block_ids: Sequence[int], count: int) -> list[int]:
        """Where the first ``count`` positions are."""
        size = self._info.block_size
        return [slot for block in block_ids for slot in range(block * size, (block + 1) * size)][:count]

    def _slot(self, block_ids: Sequence[int], position: int) -> int:
        block, offset = divmod(position, self._info.block_size)
        return block_ids[block] * self._info.block_size + offset


def _is_ancestor(row: Visibility, index: int) -> bool:
    return index >= row.first_index and bool(row.ancestors >> (index - row.first_index) & 1)


def _kv_indices(item: SequenceInput) -> list[int]:
    """Where its K/V go."""
    if item.visibility:
        indices = [row.kv_index for row in item.visibility]
        assert indices == sorted(set(indices))
        return indices
    return list(range(item.start, item.start + len(item.token_ids)))


def engine_info(role: str, **changes: int) -> EngineInfo:
    info = EngineInfo(
        role=role,
        model="toy",
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint="toy",
        block_size=4,
        num_blocks=400,
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        protocol_version=PROTOCOL_VERSION,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def toy_target(**changes: int) -> tuple[TargetEngine, SlotRunner]:
    info = engine_info("target", **changes)
    runner = SlotRunner(TARGET, info)
    return TargetEngine(runner, info, device=CPU), runner


def toy_draft(
    rows: Tensor = CLOSE,
    *,
    token_ids: Sequence[int] | None = None,
    num_token_ids: int | None = None,
    guesser: Guesser | None = None,
    **changes: int,
) -> tuple[DraftEngine, SlotRunner]:
    """A draft over a table of logits; with ``token_ids``, its head knows these alone."""
    info = engine_info("draft", **changes)
    kept = None if token_ids is None else np.array(token_ids)
    runner = SlotRunner(rows if token_ids is None else rows[:, list(token_ids)], info)
    options = {"num_token_ids": num_token_ids, "token_ids": kept, "guesser": guesser}
    return DraftEngine(runner, info, device=CPU, **options), runner  # type: ignore[arg-type]


def target_only(
    logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
) -> list[int]:
    """The definition of greedy and coupled output: one token at a time, no engine, no draft, no cache."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        row = logits(token_ids)[None]
        group = row_group(sampling, token_ids, 1)
        noise = NoiseSource(row.shape[1], max_cached_bytes=0)
        token_ids.append(int(add_draw_noise(process_logits(row, [group]), [group], noise).argmax()))
    return token_ids[len(prompt) :]


@dataclass
class Session:
    """What a router knows of one request."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    target_len: int = 0
    draft_len: int = 0
    round_id: int = 0
    accepted: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)


def verify_item(session: Session, drafted: DraftTokens) -> VerifyItem:
    session.round_id += 1
    return VerifyItem(
        request_id=session.request_id,
        round_id=session.round_id,
        base_len=session.target_len,
        token_ids=tuple(session.token_ids[session.target_len :]),
        draft=drafted,
        sampling=session.sampling if session.target_len == 0 else None,
    )


def commit(session: Session, drafted: DraftTokens, verdict: Verdict) -> None:
    """Appends what is kept. Every other round the next base counts accepted draft tokens as held."""
    num_accepted = verdict.num_accepted_tokens
    assert verdict.next_token_id is not None and 0 <= num_accepted <= drafted.depth
    path = drafted.first_path[:num_accepted]
    if verdict.last_accepted_node is not None:
        assert not drafted.is_chain
        path = drafted.path(verdict.last_accepted_node)
    assert len(path) == num_accepted
    held = num_accepted if session.round_id % 2 else 0
    session.target_len = len(session.token_ids) + held
    session.token_ids += [*(drafted.token_ids[node] for node in path), verdict.next_token_id]
    session.accepted.append(num_accepted)


def speculate_item(
    session: Session, num_tokens: int, *, proposed: tuple[int, ...] = (), fanout: tuple[int, ...] = ()
) -> SpeculateItem:
    session.round_id += 1
    item = SpeculateItem(
        request_id=session.request_id,
        round_id=session.round_id,
        base_len=session.draft_len,
        token_ids=tuple(session.token_ids[session.draft_len :]),
        num_speculative_tokens=num_tokens,
        proposed_token_ids=proposed,
        fanout=fanout,
        sampling=session.sampling if session.draft_len == 0 else None,
    )
    session.draft_len = len(session.token_ids)
    return item


def propose(draft: DraftEngine, session: Session, num_tokens: int) -> DraftTokens:
    return propose_all(draft, [session], num_tokens)[0]


def propose_all(draft: DraftEngine, sessions: Sequence[Session], num_tokens: int) -> list[DraftTokens]:
    """Proposals of one step."""
    if not sessions:
        return []
    replies = draft.speculate([speculate_item(each, num_tokens) for each in sessions]).replies
    proposals = [reply for reply in replies if isinstance(reply, Proposal)]
    assert len(proposals) == len(sessions), replies
    return [proposal.draft for proposal in proposals]


def outcomes(
    draft: DraftEngine, session: Session, drafted: DraftTokens, fanout: tuple[int, ...], num_tokens: int
) -> Outcomes:
    item = speculate_item(session, num_tokens, proposed=drafted.token_ids, fanout=fanout)
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Outcomes), reply
    return reply


def verify(target: TargetEngine, session: Session, drafted: DraftTokens) -> Verdict:
    return verify_all(target, [session], [drafted])[0]


def verify_all(
    target: TargetEngine, sessions: Sequence[Session], drafted: Sequence[DraftTokens]
) -> list[Verdict]:
    """Verdicts of one step, which are committed."""
    items = [verify_item(each, tokens) for each, tokens in zip(sessions, drafted, strict=True)]
    replies = target.verify(items).replies
    verdicts = [reply for reply in replies if isinstance(reply, Verdict)]
    assert len(verdicts) == len(sessions), replies
    for session, tokens, verdict in zip(sessions, drafted, verdicts, strict=True):
        commit(session, tokens, verdict)
    return verdicts


Drafter = Callable[[Session, int], DraftTokens]


def generate_serial(
    target: TargetEngine, drafter: Drafter, session: Session, num_output: int, num_drafts: int
) -> list[int]:
    """Propose, verify, in turns."""
    num_prompt = len(session.token_ids)
    while len(session.token_ids) < num_prompt + num_output:
        verify(target, session, drafter(session, num_drafts))
    return session.token_ids[num_prompt : num_prompt + num_output]


def generate_overlapped(
    target: TargetEngine,
    draft: DraftEngine,
    session: Session,
    num_output: int,
    num_drafts: int,
    fanout: Callable[[int], tuple[int, ...]],
) -> list[int]:
    """Outcomes are drafted before the verdict is known; a miss is proposed afresh."""
    return generate_together(target, draft, [session], num_output, num_drafts, fanout)[0]


def generate_together(
    target: TargetEngine,
    draft: DraftEngine,
    sessions: Sequence[Session],
    num_output: int,
    num_drafts: int,
    fanout: Callable[[int], tuple[int, ...]],
) -> list[list[int]]:
    """Overlapped sessions, side by side in every step; those that have their output leave."""
    starts = [len(session.token_ids) for session in sessions]
    ends = {id(each): start + num_output for each, start in zip(sessions, starts, strict=True)}
    drafted = dict(zip(map(id, sessions), propose_all(draft, sessions, num_drafts), strict=True))
    going = list(sessions)
    while going:
        asked = [
            speculate_item(each, num_drafts, proposed=proposed, fanout=fanout(len(proposed)))
            for each in going
            for proposed in [drafted[id(each)].token_ids]
        ]
        answers = draft.speculate(asked).replies
        verdicts = target.verify([verify_item(each, drafted[id(each)]) for each in going]).replies
        missed = []
        for each, answer, verdict in zip(going, answers, verdicts, strict=True):
            assert isinstance(answer, Outcomes) and isinstance(verdict, Verdict), (answer, verdict)
            commit(each, drafted[id(each)], verdict)
            found = {(one.num_accepted_tokens, one.next_token_id): one.draft for one in answer.branches}
            outcome = (verdict.num_accepted_tokens, verdict.next_token_id)
            each.hits.append(outcome in found)
            if outcome in found:
                drafted[id(each)] = found[outcome]
            else:
                missed.append(each)
        drafted |= zip(map(id, missed), propose_all(draft, missed, num_drafts), strict=True)
        going = [each for each in going if len(each.token_ids) < ends[id(each)]]
    return [each.token_ids[start : start + num_output] for each, start in zip(sessions, starts, strict=True)]
