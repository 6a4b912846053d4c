"""Drafting on the target: what follows a verdict is what a fresh start would draft, whatever came before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.features.eagle import EagleDrafter
from specray.types import Grammar, GrammarKind, SamplingParams, Verdict, VerifyItem
from tests.unit.engine.features import reference
from tests.unit.engine.features.checkpoints import eagle3_weights, medusa_weights, official, write
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import (
    GREEDY,
    Session,
    Watched,
    generate,
    make_target,
    step,
    watch,
)
from tests.unit.engine.model.checkpoints import reference_model, write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
LONG = [(7 * index) % 90 + 3 for index in range(70)]
WEIGHTS = eagle3_weights()
K = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("eagle"), *official(WEIGHTS))


def fresh(llama: Path, token_ids: list[int]) -> tuple[int, ...]:
    """What the reference drafts behind all of these tokens, the last of which was drawn."""
    model = reference_model(llama)
    return tuple(reference.eagle3(model, WEIGHTS, Flags(), token_ids[:-1], token_ids[-1], K)[1])


def check_fresh(llama: Path, watched: Watched, session: Session, verdict: Verdict) -> None:
    """The draft, and the logits of its tokens: every entry behind them counts."""
    model, token_ids = reference_model(llama), session.token_ids
    logits, tokens = reference.eagle3(model, WEIGHTS, Flags(), token_ids[:-1], token_ids[-1], K)
    found = [rows[0] for rows in watched.logits]
    watched.logits.clear()
    assert verdict.draft.token_ids == tuple(tokens)
    for own, expected in zip(found, logits, strict=True):
        assert float((own - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_drafts_behind_partly_accepted_rounds_are_those_of_a_fresh_start(llama: Path, eagle: Path) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 30, 0)
    target, session, draft = make_target(llama, eagle), Session("a", list(PROMPT)), NO_DRAFT
    watched = watch(target)
    for right in (1, 2, 0, 3, 1, 0, 2):
        [verdict] = step(target, [session], [draft], K)
        check_fresh(llama, watched, session, verdict)
        # Right up to a point, and then whatever the drafter says.
        done = len(session.token_ids) - len(PROMPT)
        tokens = (*alone[done : done + right], *verdict.draft.token_ids[right:])
        draft = DraftTokens(tokens[:K])
    assert session.token_ids[len(PROMPT) :] == alone[: len(session.token_ids) - len(PROMPT)]
    assert {0, 1, 2, 3} == set(session.accepted)


def test_a_verified_tree_leaves_the_features_of_its_path(llama: Path, eagle: Path) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 8, 0)
    target, session = make_target(llama, eagle), Session("a", list(PROMPT))
    step(target, [session], [NO_DRAFT], 0)
    right = alone[1:3]
    watched = watch(target)
    tree = DraftTokens((90, 91, right[0], 92, right[1]), (-1, 0, -1, 2, 2))
    [verdict] = step(target, [session], [tree], K)
    assert verdict.num_accepted_tokens == 2 and verdict.last_accepted_node == 4
    assert session.token_ids[len(PROMPT) :] == alone[:4]
    check_fresh(llama, watched, session, verdict)


@pytest.mark.parametrize("changes", [{}, {"attention": "gather", "block_size": 16}], ids=["whole", "paged"])
def test_chunks_and_cached_prefixes_draft_the_same(llama: Path, eagle: Path, changes: Any) -> None:
    target = make_target(llama, eagle, max_num_batched_tokens=24, **changes)
    watched = watch(target)
    item = VerifyItem("a", 1, 0, tuple(LONG[:30]), sample=False, sampling=GREEDY)
    [chunk] = target.verify([item]).replies
    assert isinstance(chunk, Verdict) and not chunk.draft.token_ids
    session = Session("a", list(LONG), held=30, round_id=1)
    [verdict] = step(target, [session], [NO_DRAFT], K)
    check_fresh(llama, watched, session, verdict)
    wanted = verdict.draft.token_ids
    again = Session("b", list(LONG))
    [verdict] = step(target, [again], [NO_DRAFT], K)
    assert verdict.num_cached_tokens >= 32, "the prefix is computed once"
    check_fresh(llama, watched, again, verdict)
    [first, second] = step(target, [session, again], [DraftTokens(wanted), NO_DRAFT], K)
    assert first.draft.token_ids == fresh(llama, session.token_ids)
    assert second.draft.token_ids == fresh(llama, again.token_ids)


def test_a_sequence_that_goes_back_drafts_from_what_it_is_then(llama: Path, eagle: Path) -> None:
    target, session = make_target(llama, eagle), Session("a", list(PROMPT))
    step(target, [session], [NO_DRAFT], K)
    watched = watch(target)
    session.token_ids, session.held = [*PROMPT[:4], 60, 61, 62], 4
    [verdict] = step(target, [session], [NO_DRAFT], K)
    check_fresh(llama, watched, session, verdict)


def test_many_sessions_are_drafted_for_side_by_side(llama: Path, eagle: Path) -> None:
    target = make_target(llama, eagle)
    sessions = [Session(str(size), PROMPT[:size]) for size in (1, 4, 9)]
    drafts = [NO_DRAFT] * 3
    for _ in range(3):
        verdicts = step(target, sessions, drafts, K)
        drafts = [verdict.draft for verdict in verdicts]
        assert [draft.token_ids for draft in drafts] == [fresh(llama, each.token_ids) for each in sessions]


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
    [verdict] = step(target, [session], [NO_DRAFT], K)
    assert verdict.draft.token_ids == fresh(llama, session.token_ids)


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
    monkeypatch.setattr("specray.engine.features.chained.drafter._MAX_ROWS", 16)
    passes = list[int]()
    run = EagleDrafter._run_entries

    def counted(drafter: EagleDrafter, store: Any, entries: Any) -> Any:
        passes.append(sum(each.end - each.first for each in entries))
        return run(drafter, store, entries)

    monkeypatch.setattr(EagleDrafter, "_run_entries", counted)
    sessions = [Session(str(index), PROMPT[: 2 + index]) for index in range(7)]
    sessions.append(Session("long", list(LONG)))
    verdicts = step(target, sessions, [NO_DRAFT] * 8, 1)
    assert verdicts[-1].draft.token_ids == fresh(llama, sessions[-1].token_ids)[:1]
    # 70 entries of the long one: all but the last two in passes of up to 16; two rows a session at the end.
    assert max(passes) <= 16 and len(passes) <= 5 + 7 + 1


def test_no_block_is_left_when_idle(llama: Path, eagle: Path) -> None:
    target = make_target(llama, eagle, attention="gather", block_size=16, prefix_cache=False)
    session, draft = Session("a", list(PROMPT)), NO_DRAFT
    for _ in range(6):
        [verdict] = step(target, [session], [draft], 8)
        draft = verdict.draft
        assert target.info.num_blocks_in_use == -(-len(session.token_ids[:-1]) // 16)
    target.release(["a"])
    assert target.info.num_blocks_in_use == 0


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=30.0, seed=11),
    "coupled, with penalties": SamplingParams(
        temperature=60.0, seed=5, presence_penalty=1.5, num_prompt_tokens=len(PROMPT), top_k=40
    ),
}


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_output_is_the_targets_alone(
    llama: Path, eagle: Path, tmp_path: Path, kind: str, name: str
) -> None:
    drafter = (
        eagle if kind == "eagle" else write(tmp_path, medusa_weights(), {}, "medusa_lm_head.safetensors")
    )
    sampling = SAMPLINGS[name]
    alone = generate(make_target(llama, None), Session("a", list(PROMPT), sampling), 24, 0)
    session = Session("a", list(PROMPT), sampling)
    assert generate(make_target(llama, drafter), session, 24, K) == alone
    if not sampling.is_greedy:
        assert sum(session.accepted) >= 3, "noise that is shared makes both draw alike"
