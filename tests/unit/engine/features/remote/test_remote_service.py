"""A Router whose draft reads features: what goes to it, and what is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target.engine import TargetEngine
from specray.errors import ConfigError
from specray.fakes import LocalDrafter, LocalVerifier, VirtualClock
from tests.unit.engine.features.remote.pairs import make_pair
from tests.unit.engine.features.remote.served import serve, written_alone
from tests.unit.engine.features.targets import make_target
from tests.unit.engine.served import K, Outputs, TimedDraft, TimedTarget
from tests.unit.router.harness import in_virtual_time, router_config, serving


@pytest.fixture(scope="module")
def engines(llama: Path, eagle: Path) -> tuple[TargetEngine, FeatureDraftEngine]:
    return make_pair(llama, eagle)


@pytest.fixture(scope="module")
def alone(llama: Path) -> Outputs:
    return written_alone(llama)


def test_a_question_brings_the_features_of_the_last_rounds_tokens_alone(engines: Any, alone: Any) -> None:
    """Those that were accepted, and the one before."""
    _, draft, accepted = serve(engines, alone)
    asked = [item for item in draft.items if item.num_speculative_tokens]
    assert len(asked) >= 20 and accepted >= 8 and all(item.features is not None for item in asked)
    assert max(item.features.num_rows for item in asked if item.base_len > 40) <= K + 1


def test_a_draft_that_is_lost_in_the_middle_comes_back_from_the_prompts_features(
    engines: Any, alone: Any
) -> None:
    target, draft, accepted = serve(engines, alone, dies_after=8)
    again = [item for item in draft.items if item.base_len == 0 and len(item.token_ids) > 3 + 1]
    assert accepted >= 8
    # All of them with the first question, or with a chunk before it.
    started = [item for item in again if item.request_id == "short"]
    assert started and all(item.sampling is not None for item in started)
    brought = [item.features for item in draft.items if item.request_id == "short" and item.features]
    assert [rows.first for rows in brought].count(0) == 2
    # The target has kept them: it computes nothing for it.
    assert [item.base_len for item in target.asked if item.request_id == "short"].count(0) == 1


@pytest.mark.parametrize(
    "lost", [range(1, 4), range(5, 100, 3), range(1, 1000)], ids=["first", "some", "all"]
)
def test_lost_features_cost_proposals_alone(engines: Any, alone: Any, lost: Any) -> None:
    _, draft, accepted = serve(engines, alone, lost=lost)
    asked = [item for item in draft.items if item.num_speculative_tokens]
    assert bool(asked) == (lost[-1] < 999) == (accepted > 0)


def test_sessions_share_the_room_of_a_message(
    engines: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden size of 32: eight rows fit, and a prompt of 40 tokens takes five messages."""
    monkeypatch.setattr("specray.feature_rows.MAX_FEATURE_BYTES", 8 * 2 * 32)
    monkeypatch.setattr("specray.router.draft_model.budgets.MAX_FEATURE_BYTES", 8 * 2 * 32)
    _, draft, _ = serve(engines, alone, together=True)
    brought = [item.features for item in draft.items if item.features is not None]
    assert max(rows.num_rows for rows in brought) == 8
    long = [item for item in draft.items if item.request_id == "long"]
    asked = next(item for item in long if item.num_speculative_tokens)
    chunks = [item.features for item in long[: long.index(asked)] if item.features is not None]
    # One after the other, without a gap; the question brings the last of them.
    assert len(chunks) >= 5
    assert [rows.first for rows in chunks] == [0, *(rows.end for rows in chunks[:-1])]
    assert asked.features is not None and asked.features.first == chunks[-1].end
    assert asked.features.end == asked.base_len + len(asked.token_ids) - 1


def test_prompts_in_chunks_bring_their_features_as_they_are_computed(engines: Any, alone: Any) -> None:
    target, draft, _ = serve(engines, alone, together=True, config=router_config(prefill_chunk_tokens=16))
    long = [item for item in draft.items if item.request_id == "long"]
    asked = next(item for item in long if item.num_speculative_tokens)
    chunks = [item.features for item in long[: long.index(asked)] if item.features is not None]
    assert chunks and chunks[0].first == 0 and chunks[0].end <= 32
    # A round or two without it, behind the prompt.
    assert asked.base_len <= 43
    assert not any(item.draft.token_ids for item in target.asked if not item.sample)


def test_a_prefix_from_the_cache_has_its_features(engines: Any, alone: Any) -> None:
    """The second request computes nothing of its prompt; its draft gets all features all the same."""
    serve(engines, alone)
    target, draft, accepted = serve(engines, alone)
    assert accepted >= 8
    first = next(item for item in draft.items if item.request_id == "long" and item.features is not None)
    assert first.features is not None and first.features.first == 0
    assert target.info.num_prefix_cache_hits > 0


@in_virtual_time
async def start(clock: VirtualClock, target: TimedTarget, draft: TimedDraft) -> None:
    drafter = LocalDrafter(draft, clock)
    async with serving(clock, verifier=LocalVerifier(target, clock), make_drafter=lambda _: drafter):
        pass


def test_a_draft_of_features_that_nobody_gives_is_refused(engines: Any, llama: Path) -> None:
    plain = TimedTarget(make_target(llama, None))
    with pytest.raises(
        ConfigError, match=r"reads features of eagle\d, 32 numbers each, target .* gives none"
    ):
        start(plain, TimedDraft(engines[1]))
