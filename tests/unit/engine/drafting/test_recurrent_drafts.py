"""A draft with recurrent layers says what it would say alone, whatever of its proposals is taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.config import Config
from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.preflight import check_models
from specray.engine.target.engine import TargetEngine
from specray.errors import ConfigError
from specray.types import Proposal, SamplingParams
from tests.unit.engine.harness import (
    Session,
    generate_together,
    outcomes,
    propose,
    propose_all,
    speculate_item,
    verify,
    verify_all,
)
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, write_checkpoint, write_family
from tests.unit.engine.model.test_recurrent_targets import (
    GREEDY,
    LONG,
    SEEDED,
    SHORT,
    Expected,
    new_session,
    settings,
)
from tests.unit.engine.model.zoo import FAMILIES

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
K = 4
# The delta rule, Mamba 2, convolutions alone, and decays for each of a key's numbers.
KINDS = ("qwen3_5", "bamba", "lfm2", "kimi_linear")
Engines = tuple[TargetEngine, DraftEngine]


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


@pytest.fixture(scope="module")
def make_engines(checkpoint: Path) -> Callable[..., Engines]:
    """A target, and itself as its draft."""

    def make(**changes: Any) -> Engines:
        changes = {"draft": {"model": str(checkpoint), **changes.pop("draft", {})}, **changes}
        config = Config.model_validate(settings(checkpoint, **changes))
        draft = build_draft_engine(config)
        assert isinstance(draft, DraftEngine)
        return build_target_engine(config), draft

    return make


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Expected:
    return Expected(checkpoint)


def changed(draft: DraftTokens, num_right: int) -> DraftTokens:
    tokens = draft.token_ids
    return DraftTokens(
        tuple((token + (index >= num_right)) % VOCAB_SIZE for index, token in enumerate(tokens))
    )


def test_all_that_it_proposes_is_accepted_whatever_was_refused_before(
    make_engines: Callable[..., Engines], expected: Expected
) -> None:
    """Two sequences, whose proposals are changed behind another number of tokens in each round."""
    target, draft = make_engines()
    sessions = [new_session("a", LONG, GREEDY), new_session("b", SHORT, GREEDY)]
    outputs = [expected.of(session.token_ids, GREEDY) for session in sessions]
    starts = [len(session.token_ids) for session in sessions]
    for round_id in range(6):
        proposals = propose_all(draft, sessions, K)
        for session, start, output, proposal in zip(sessions, starts, outputs, proposals, strict=True):
            at = len(session.token_ids) - start
            assert list(proposal.token_ids[: len(output) - at]) == output[at : at + K]
        right = [(3 * round_id + index) % (K + 1) for index in range(2)]
        verify_all(target, sessions, [changed(*each) for each in zip(proposals, right, strict=True)])
        draft.check_integrity()
    assert {count for session in sessions for count in session.accepted} == set(range(K + 1))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_that_is_the_target_is_always_right(
    sampling: SamplingParams, make_engines: Callable[..., Engines], expected: Expected
) -> None:
    target, draft = make_engines()
    session = new_session("a", LONG, sampling)
    while len(session.token_ids) < len(LONG) + NUM_TOKENS:
        verify(target, session, propose(draft, session, K))
    assert session.token_ids[len(LONG) :][:NUM_TOKENS] == expected.of(LONG, sampling)[:NUM_TOKENS]
    assert set(session.accepted) == {K}


@pytest.mark.parametrize("fanout", [lambda count: (2,) * (count + 1), lambda count: (0,) * count + (1,)])
def test_it_drafts_ahead_the_likeliest_outcome_alone(
    fanout: Callable[[int], tuple[int, ...]], make_engines: Callable[..., Engines], expected: Expected
) -> None:
    target, draft = make_engines()
    sessions = [new_session("a", LONG, GREEDY), new_session("b", SHORT, GREEDY)]
    found = generate_together(target, draft, sessions, 16, 3, fanout)
    assert found == [expected.of(prompt, GREEDY)[:16] for prompt in (LONG, SHORT)]
    assert [set(session.accepted) for session in sessions] == [{3}, {3}]
    assert all(all(session.hits) for session in sessions)


def test_what_was_drafted_ahead_is_taken_back(
    make_engines: Callable[..., Engines], expected: Expected
) -> None:
    """The verdict is another than the draft went on from, after each number of tokens."""
    target, draft = make_engines()
    session, output = new_session("a", SHORT, GREEDY), expected.of(SHORT, GREEDY)
    for num_right in (2, 0, K, 1, 3):
        at = len(session.token_ids) - len(SHORT)
        proposal = propose(draft, session, K)
        assert list(proposal.token_ids) == output[at : at + K]
        verified = changed(proposal, num_right)
        reply = outcomes(draft, session, verified, (1,) * (K + 1), K)
        assert [branch.num_accepted_tokens for branch in reply.branches] == [K]
        verify(target, session, verified)
        draft.check_integrity()
    assert session.accepted == [2, 0, K, 1, 3]


def test_no_token_is_computed_again(
    make_engines: Callable[..., Engines], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make_engines()
    session, rows, run = new_session("a", SHORT, GREEDY), [], draft._runner.run

    def counted(inputs: Any) -> Any:
        rows.append(sum(len(item.token_ids) for item in inputs))
        return run(inputs)

    monkeypatch.setattr(draft._runner, "run", counted)
    for num_right in (2, 0, K, 1):
        verify(target, session, changed(propose(draft, session, K), num_right))
    propose(draft, session, K)
    # Behind a proposal of which all stayed, its last token and the one after it.
    assert rows == [5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1]


def test_sequences_that_it_forgets_begin_anew(
    make_engines: Callable[..., Engines], expected: Expected
) -> None:
    target, draft = make_engines()
    session = new_session("a", LONG, SEEDED)
    for round_id in range(6):
        if round_id % 2:
            draft.release(["a"])
            session.draft_len = 0
        verify(target, session, changed(propose(draft, session, K), round_id % 3))
    output = session.token_ids[len(LONG) :]
    assert output == expected.of(LONG, SEEDED)[: len(output)]
    # Some proposals are changed where the target would draw what they are changed to.
    assert all(count >= index % 3 for index, count in enumerate(session.accepted))


def test_long_proposals_end_where_records_do(
    make_engines: Callable[..., Engines], expected: Expected
) -> None:
    target, draft = make_engines()
    session = new_session("a", SHORT, GREEDY)
    proposal = propose(draft, session, 32)
    assert len(proposal) == 32
    # Behind so many tokens under verification there is room for none.
    assert outcomes(draft, session, proposal, (0,) * 32 + (1,), 4).branches[0].draft.token_ids == ()
    verify(target, session, changed(DraftTokens(proposal.token_ids[:6]), 3))
    start = len(session.token_ids) - len(SHORT)
    assert list(propose(draft, session, K).token_ids) == expected.of(SHORT, GREEDY)[start : start + K]


def test_of_a_tree_a_chain_is_drafted(make_engines: Callable[..., Engines], expected: Expected) -> None:
    _, draft = make_engines()
    item = replace(speculate_item(new_session("a", SHORT, GREEDY), K), tree=TreeBudget(12))
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, Proposal) and reply.draft.is_chain
    assert list(reply.draft.token_ids) == expected.of(SHORT, GREEDY)[:K]


def test_prompts_in_chunks_and_known_ones_leave_states(make_engines: Callable[..., Engines]) -> None:
    """A second request goes on from a snapshot of the first one's, behind whole units of tokens."""
    target, draft = make_engines(
        target={"max_model_len": 128}, draft={"max_model_len": 128, "max_num_batched_tokens": 48}
    )
    prompt = [(7 * index * index + index) % 90 + 2 for index in range(110)]
    proposals = []
    for name in "ab":
        session = new_session(name, prompt, GREEDY)
        for end in (70, 100):
            head = Session(name, prompt[:end], session.sampling, draft_len=session.draft_len)
            draft.speculate([speculate_item(head, 0)])
            session.draft_len = end
        proposals.append(propose(draft, session, K))
        verify(target, session, proposals[-1])
        assert session.accepted == [K]
        draft.release([name])
        draft.check_integrity()
    assert proposals[0] == proposals[1]
    assert draft.info.num_prefix_cache_hits == 64 and draft.info.num_snapshots_held >= 1


def test_trees_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    values = settings(tmp_path, draft={"model": str(checkpoint)})
    check_models(Config.model_validate(values))
    trees = Config.model_validate({**values, "speculation": {"tree": "auto"}})
    refusal = (
        f"speculation.tree is 'auto' and draft.model {str(checkpoint)!r} has recurrent layers, which draft "
        "chains alone; allowed: 'off'"
    )
    for check in (check_models, build_draft_engine):
        with pytest.raises(ConfigError) as caught:
            check(trees)
        assert str(caught.value) == refusal
