"""Drafting on the target: what follows a verdict is what a fresh start would draft, whatever came before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.features.base import Context
from specray.engine.features.build import plan_drafter
from specray.engine.features.eagle.drafter import EagleDrafter
from specray.types import Grammar, GrammarKind, SamplingParams, Verdict, VerifyItem
from tests.unit.engine.features import reference
from tests.unit.engine.features.block import reference as block_reference
from tests.unit.engine.features.block.checkpoints import LAYOUTS, dflash
from tests.unit.engine.features.checkpoints import eagle3_weights, medusa_files, official, write
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import (
    GREEDY,
    LONG,
    PROMPT,
    Session,
    Watched,
    check_drafted,
    generate,
    make_target,
    step,
    watch,
)
from tests.unit.engine.model.checkpoints import reference_model

WEIGHTS = eagle3_weights()
K = 3
PAGED = {"attention": "gather", "block_size": 16}


@dataclass(frozen=True)
class Kind:
    """A drafter, and what the reference drafts with it."""

    path: Path
    wanted: Callable[[list[int]], tuple[list[torch.Tensor], list[int]]]
    """Logits and draft tokens behind these tokens, the last of which was drawn."""

    def check(self, watched: Watched, session: Session, verdict: Verdict) -> None:
        """The draft, and the logits of its tokens: every entry behind them counts."""
        check_drafted(watched, verdict.draft, self.wanted(session.token_ids))
        watched.logits.clear()

    def fresh(self, session: Session) -> tuple[int, ...]:
        return tuple(self.wanted(session.token_ids)[1])


@pytest.fixture(scope="module", params=["eagle", "block"])
def kind(request: Any, llama: Path, eagle: Path, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    model = reference_model(llama)
    if request.param == "eagle":
        return Kind(eagle, lambda known: reference.eagle3(model, WEIGHTS, Flags(), known[:-1], known[-1], K))
    block = LAYOUTS["windows"]
    path = write(tmp_path_factory.mktemp("block"), *block.files)
    return Kind(path, lambda known: block_reference.drafted(model, block, known, K)[:2])


def fresh(llama: Path, token_ids: list[int]) -> tuple[int, ...]:
    """What the reference drafts behind all of these tokens, the last of which was drawn."""
    model = reference_model(llama)
    return tuple(reference.eagle3(model, WEIGHTS, Flags(), token_ids[:-1], token_ids[-1], K)[1])


@pytest.mark.parametrize("changes", [{}, PAGED], ids=["whole", "paged"])
def test_drafts_behind_partly_accepted_rounds_are_those_of_a_fresh_start(
    llama: Path, kind: Kind, changes: Any
) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 30, 0)
    target, session, draft = make_target(llama, kind.path, **changes), Session("a", list(PROMPT)), NO_DRAFT
    watched = watch(target)
    for right in (1, 2, 0, 3, 1, 0, 2):
        [verdict] = step(target, [session], [draft], K)
        kind.check(watched, session, verdict)
        # Right up to a point, and then whatever the drafter says.
        done = len(session.token_ids) - len(PROMPT)
        tokens = (*alone[done : done + right], *verdict.draft.token_ids[right:])
        draft = DraftTokens(tokens[:K])
    assert session.token_ids[len(PROMPT) :] == alone[: len(session.token_ids) - len(PROMPT)]
    assert {0, 1, 2, 3} == set(session.accepted)


def test_a_verified_tree_leaves_the_features_of_its_path(llama: Path, kind: Kind) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 8, 0)
    target, session = make_target(llama, kind.path), Session("a", list(PROMPT))
    step(target, [session], [NO_DRAFT], 0)
    right = alone[1:3]
    watched = watch(target)
    tree = DraftTokens((90, 91, right[0], 92, right[1]), (-1, 0, -1, 2, 2))
    [verdict] = step(target, [session], [tree], K)
    assert verdict.num_accepted_tokens == 2 and verdict.last_accepted_node == 4
    assert session.token_ids[len(PROMPT) :] == alone[:4]
    kind.check(watched, session, verdict)


@pytest.mark.parametrize("changes", [{}, PAGED], ids=["whole", "paged"])
def test_chunks_and_cached_prefixes_draft_the_same(llama: Path, kind: Kind, changes: Any) -> None:
    target = make_target(llama, kind.path, max_num_batched_tokens=24, **changes)
    watched = watch(target)
    item = VerifyItem("a", 1, 0, tuple(LONG[:30]), sample=False, sampling=GREEDY)
    [chunk] = target.verify([item]).replies
    assert isinstance(chunk, Verdict) and not chunk.draft.token_ids
    session = Session("a", list(LONG), held=30, round_id=1)
    [verdict] = step(target, [session], [NO_DRAFT], K)
    kind.check(watched, session, verdict)
    wanted = verdict.draft.token_ids
    again = Session("b", list(LONG))
    [verdict] = step(target, [again], [NO_DRAFT], K)
    assert verdict.num_cached_tokens >= 32, "the prefix is computed once"
    kind.check(watched, again, verdict)
    [first, second] = step(target, [session, again], [DraftTokens(wanted), NO_DRAFT], K)
    assert first.draft.token_ids == kind.fresh(session)
    assert second.draft.token_ids == kind.fresh(again)


def test_a_sequence_that_goes_back_drafts_from_what_it_is_then(llama: Path, kind: Kind) -> None:
    target, session = make_target(llama, kind.path), Session("a", list(PROMPT))
    step(target, [session], [NO_DRAFT], K)
    watched = watch(target)
    session.token_ids, session.held = [*PROMPT[:4], 60, 61, 62], 4
    [verdict] = step(target, [session], [NO_DRAFT], K)
    kind.check(watched, session, verdict)


def test_many_sessions_are_drafted_for_side_by_side(llama: Path, kind: Kind) -> None:
    target = make_target(llama, kind.path)
    sessions = [Session(str(size), PROMPT[:size]) for size in (1, 4, 9)]
    drafts = [NO_DRAFT] * 3
    for _ in range(3):
        verdicts = step(target, sessions, drafts, K)
        drafts = [verdict.draft for verdict in verdicts]
        assert [draft.token_ids for draft in drafts] == [kind.fresh(each) for each in sessions]


def test_only_those_who_ask_are_drafted_for(llama: Path, eagle: Path) -> None:
    target = make_target(llama, eagle)
    sessions = [Session("a", list(PROMPT)), Session("b", PROMPT[:5])]
    items = [sessions[0].item(num_next=2), sessions[1].item()]
    first, second = target.verify(items).replies
    assert isinstance(first, Verdict) and isinstance(second, Verdict)
    assert len(first.draft) == 2 and len(second.draft) == 0
    plain = make_target(llama, None)
    [verdict] = plain.verify([Session("a", list(PROMPT)).item(num_next=2)]).replies
    assert isinstance(verdict, Verdict) and len(verdict.draft) == 0


def test_nothing_is_drafted_beyond_the_models_length(llama: Path, eagle: Path) -> None:
    target = make_target(llama, eagle, max_model_len=16)
    session = Session("a", list(range(5, 18)))
    # 13 tokens, one drawn: two more may be verified with it.
    [verdict] = step(target, [session], [NO_DRAFT], 8)
    assert len(verdict.draft) == 2


def test_a_drafter_that_fails_costs_no_verdict(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, session = make_target(llama, eagle), Session("a", list(PROMPT))
    start = EagleDrafter.start
    monkeypatch.setattr(EagleDrafter, "start", lambda *args: 1 / 0)
    [verdict] = step(target, [session], [NO_DRAFT], K)
    assert verdict.draft == NO_DRAFT
    monkeypatch.setattr(EagleDrafter, "start", start)
    other = Session("b", list(PROMPT))
    first, second = step(target, [session, other], [NO_DRAFT] * 2, K)
    assert first.draft == NO_DRAFT
    assert second.draft.token_ids == fresh(llama, other.token_ids)


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[Sequence[Context]], Exception | None]) -> Any:
    """Lets starts fail by their sequences; the first tokens of those, and how many rows were read at once."""
    started, num_rows = list[list[int]](), list[int]()
    start, run = EagleDrafter.start, EagleDrafter.run_entries

    def starting(drafter: EagleDrafter, store: Any, contexts: Sequence[Context]) -> Any:
        started.append([context.token_ids[0] for context in contexts])
        found = error(contexts)
        if found is not None:
            raise found
        return start(drafter, store, contexts)

    def counted(drafter: EagleDrafter, store: Any, entries: Any) -> Any:
        num_rows.append(sum(each.end - each.first for each in entries))
        return run(drafter, store, entries)

    monkeypatch.setattr(EagleDrafter, "start", starting)
    monkeypatch.setattr(EagleDrafter, "run_entries", counted)
    return started, num_rows


def test_a_request_whose_drafts_fail_is_left_out_alone_until_it_ends(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target(llama, eagle)
    sessions = [Session(str(first), [first, *PROMPT]) for first in (20, 21, 22)]
    step(target, sessions, [NO_DRAFT] * 3, K)
    started, num_rows = failing(
        monkeypatch, lambda contexts: ValueError() if 21 in [each.token_ids[0] for each in contexts] else None
    )
    verdicts = step(target, sessions, [NO_DRAFT] * 3, K)
    assert [verdict.draft for verdict in verdicts] == [NO_DRAFT] * 3
    for _ in range(2):
        verdicts = step(target, sessions, [NO_DRAFT] * 3, K)
        assert [len(verdict.draft) for verdict in verdicts] == [3, 0, 3]
        assert verdicts[0].draft.token_ids == fresh(llama, sessions[0].token_ids)
        assert verdicts[2].draft.token_ids == fresh(llama, sessions[2].token_ids)
    assert started == [[20, 21, 22], [20], [21], [22], [20, 22]]
    # What was read before the failure is not read again: three new tokens of each, then two of both.
    assert num_rows == [3, 3, 4]
    named = [record.getMessage() for record in caplog.records if "'21'" in record.getMessage()]
    assert named == ["nothing more is drafted on the target for request '21'"]
    target.release(["21"])
    step(target, [Session("21", [23, *PROMPT])], [NO_DRAFT], K)
    assert started[-1] == [23]


def test_memory_that_ran_out_for_many_is_asked_for_fewer(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(llama, eagle)
    started, _ = failing(
        monkeypatch, lambda contexts: torch.OutOfMemoryError() if len(contexts) > 2 else None
    )
    sessions = [Session(str(first), [first, *PROMPT]) for first in (20, 21, 22, 23)]
    assert [len(each.draft) for each in step(target, sessions, [NO_DRAFT] * 4, K)] == [0] * 4
    for _ in range(2):
        verdicts = step(target, sessions, [NO_DRAFT] * 4, K)
        wanted = [fresh(llama, session.token_ids) for session in sessions]
        assert [verdict.draft.token_ids for verdict in verdicts] == wanted
    assert started == [[20, 21, 22, 23], [20], [21], [22], [23], [20, 21], [22, 23]]


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_a_long_prompt_is_read_over_several_steps(
    llama: Path, eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nobody waits for more than a part of it, and what is drafted is that of a prompt read at once."""
    drafter = eagle
    if kind == "medusa":
        drafter = write(tmp_path, *medusa_files())
    if kind == "block":
        drafter = write(tmp_path, *dflash().files)
    whole, bounded = make_target(llama, drafter), make_target(llama, drafter)
    session = Session("long", list(LONG))
    # 70 tokens: 32 in each of two steps, and the rest with the third's.
    for number in range(3):
        short = Session(str(number), list(PROMPT))
        monkeypatch.setattr("specray.engine.features.drafting.MAX_READ_TOKENS", 32)
        verdicts = step(bounded, [session, short], [NO_DRAFT] * 2, K)
        monkeypatch.undo()
        [expected] = step(whole, [Session(str(number), session.token_ids[:-1])], [NO_DRAFT], K)
        is_read = number == 2 or kind == "medusa"
        assert verdicts[0].draft == (expected.draft if is_read else NO_DRAFT)
        assert len(expected.draft) == len(verdicts[1].draft) == K


def test_the_mask_of_a_long_prompts_last_rows_has_its_memory(llama: Path, eagle: Path) -> None:
    settings = {"model": str(llama), "drafter": str(eagle), "dtype": "float32", "max_model_len": 64}
    plan = plan_drafter(parse_config({"target": settings}).target)
    assert plan is not None
    # 64 rows of two query heads for each key head see 64 tokens: a float32 and a boolean each.
    assert plan.drafter_memory.step_bytes == 64 * 2 * 64 * 5


def test_grammars_are_asked_for_the_place_of_each_draft_token(llama: Path, eagle: Path) -> None:
    target, asked = make_target(llama, eagle), list[list[int]]()

    class Grammars:
        def masks(
            self, request_id: str, sampling: Any, output_ids: Any, draft: Any, parents: Any = None
        ) -> None:
            asked.append([*output_ids, *draft])

    drafting = target._drafting
    assert drafting is not None
    drafting._grammars = Grammars()  # type: ignore[assignment]
    target._grammars = Grammars()  # type: ignore[assignment]
    sampling = SamplingParams(
        temperature=0.0, grammar=Grammar(GrammarKind.REGEX, ".*"), num_prompt_tokens=len(PROMPT)
    )
    [verdict] = step(target, [Session("a", list(PROMPT), sampling)], [NO_DRAFT], K)
    first, (second, third, _) = verdict.next_token_id, verdict.draft.token_ids
    # The target's own row, then a row for each draft token.
    assert asked == [[], [first], [first, second], [first, second, third]]


def test_long_prompts_are_read_in_whole_passes_beside_many_sessions(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = make_target(llama, write(tmp_path, *official(WEIGHTS)), max_num_seqs=8)
    monkeypatch.setattr("specray.engine.features.chained.drafter.MAX_ROWS", 16)
    passes = list[int]()
    run = EagleDrafter.run_entries

    def counted(drafter: EagleDrafter, store: Any, entries: Any) -> Any:
        passes.append(sum(each.end - each.first for each in entries))
        return run(drafter, store, entries)

    monkeypatch.setattr(EagleDrafter, "run_entries", counted)
    sessions = [Session(str(index), PROMPT[: 2 + index]) for index in range(7)]
    sessions.append(Session("long", list(LONG)))
    verdicts = step(target, sessions, [NO_DRAFT] * 8, 1)
    assert verdicts[-1].draft.token_ids == fresh(llama, sessions[-1].token_ids)[:1]
    # 70 entries of the long one: all but the last two in passes of up to 16; two rows a session at the end.
    assert max(passes) <= 16 and len(passes) <= 5 + 7 + 1


def test_no_block_is_left_when_idle(llama: Path, eagle: Path) -> None:
    target = make_target(llama, eagle, **PAGED, prefix_cache=False)
    session, draft = Session("a", list(PROMPT)), NO_DRAFT
    for _ in range(6):
        [verdict] = step(target, [session], [draft], 8)
        draft = verdict.draft
        assert target.info.num_blocks_in_use == -(-len(session.token_ids[:-1]) // 16)
    target.release(["a"])
    assert target.info.num_blocks_in_use == 0
