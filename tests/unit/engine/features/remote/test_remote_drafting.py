"""Drafting in another process: what becomes of features that come late, in parts or not at all."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.features.eagle.drafter import EagleDrafter
from specray.engine.features.remote.sending import FeatureSender
from specray.engine.features.remote.wire import write_rows
from specray.errors import EngineLostError
from specray.feature_rows import ITEM_BYTES, FeatureRows
from specray.types import ItemFailed, Proposal, SpeculateItem, VerifyItem
from tests.unit.engine.features.checkpoints import HIDDEN
from tests.unit.engine.features.remote.pairs import RemoteSession, make_pair, noted_starts
from tests.unit.engine.features.targets import GREEDY, LONG, PROMPT

K = 3


@pytest.fixture(scope="module")
def pair(llama: Path, eagle: Path) -> Any:
    return make_pair(llama, eagle, attention="gather", block_size=16)


def test_a_draft_that_lost_everything_proposes_the_same(pair: Any) -> None:
    target, draft = pair
    session, drafted = RemoteSession("lost", list(PROMPT)), NO_DRAFT
    for _ in range(3):
        session.verify(target, drafted)
        drafted = session.propose(draft, K)
    # A replica that knows nothing: the target is asked for all features again, in a round that is due anyway.
    session.verify(target, drafted)
    session.lose(draft)
    assert session.propose(draft, K) == NO_DRAFT, "without features nothing is drafted"
    session.verify(target, NO_DRAFT)
    assert session.waiting[0].first == 0 and session.waiting[0].end == len(session.token_ids) - 1
    found = session.propose(draft, K)
    fresh = RemoteSession("fresh", list(session.token_ids), held=0)
    fresh.token_ids.pop()
    verdict = fresh.verify(target)
    assert verdict.next_token_id == session.token_ids[-1]
    assert found == fresh.propose(draft, K) and len(found) == K
    for engine in (target, draft):
        engine.release(["lost", "fresh"])


def test_features_that_were_lost_hold_back_proposals_until_they_come(pair: Any) -> None:
    target, draft = pair
    session = RemoteSession("gap", list(PROMPT))
    session.verify(target)
    assert session.propose(draft, K, loses_features=True) == NO_DRAFT
    session.verify(target, wanted=4)
    assert [rows.num_rows for rows in session.waiting] == [4]
    assert session.propose(draft, K) == NO_DRAFT, "those of four tokens are not all"
    session.verify(target)
    held = draft._store.read_tokens(draft.table.sequences["gap"].block_table.block_ids, 0, 4).clone()
    sent = session.waiting[0]
    assert sent.first == 4
    # Some rows once more, as after an answer that was late: those that are there stay as they are.
    before = FeatureRows(3, 1, b"\x00" * 2 * HIDDEN)
    session.waiting = [before, sent]
    found = session.propose(draft, K)
    sequence = draft.table.sequences["gap"]
    stored = draft._store.read_tokens(sequence.block_table.block_ids, 0, sent.end)
    assert torch.equal(stored[:4], held) and write_rows(stored[4:]).tobytes() == sent.data
    # Rows behind a gap are of no use, and change nothing.
    session.verify(target)
    told = tuple(session.token_ids[session.told :])
    gap = FeatureRows(session.num_features + 1, 1, b"\x80\x3f" * HIDDEN)
    item = SpeculateItem("gap", 0, session.told, told, K, features=gap)
    [reply] = draft.speculate([item]).replies
    assert reply == Proposal("gap", 0, session.told)
    assert len(session.propose(draft, K)) == len(found) == K
    forget(pair, "gap")


def test_chunks_are_read_as_they_come(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a long prompt are computed with its chunks, not with the first question."""
    monkeypatch.setattr("specray.engine.features.chained.drafter.MAX_ROWS", 16)
    started = noted_starts(monkeypatch, EagleDrafter)
    target, draft = pair
    session = RemoteSession("chunks", list(LONG[:40]))
    session.verify(target, sample=False)
    assert session.propose(draft, 0) == NO_DRAFT
    session.token_ids += LONG[40:]
    session.verify(target)
    found = session.propose(draft, K)
    assert draft.info.num_blocks_in_use == -(-(len(LONG) + 1) // 16)
    assert found == whole(pair, session, "whole")
    session.verify(target, found)
    assert len(session.propose(draft, K)) == K
    # The chunk's part is there; of a prompt that came at once nothing is; then all but the new tokens.
    assert started == [40, 0, len(LONG) + 1]
    forget(pair, "chunks")
    assert draft.info.num_blocks_in_use == 0


def forget(pair: Any, request_id: str) -> None:
    for engine in pair:
        engine.release([request_id])


def whole(pair: Any, session: RemoteSession, name: str) -> DraftTokens:
    """What is proposed for the same tokens, told and given at once; the prompt is in the prefix cache."""
    target, draft = pair
    other = RemoteSession(name, session.token_ids[:-1])
    verdict = other.verify(target)
    assert verdict.num_cached_tokens >= 32 and session.token_ids == other.token_ids
    found = other.propose(draft, K)
    forget(pair, name)
    return found


def test_a_step_sends_no_more_than_its_bytes_and_rounds_go_first(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = functools.partial(FeatureSender, max_bytes=20 * ITEM_BYTES * HIDDEN)
    monkeypatch.setattr("specray.engine.features.build.FeatureSender", sender)
    target, _ = make_pair(llama, eagle)
    long, short = RemoteSession("long", list(LONG)), RemoteSession("short", list(PROMPT))
    short.verify(target)
    items = [
        replace(long.item(num_features=1000), sample=False),
        short.item(DraftTokens((3, 4)), num_features=1000, first_feature=len(PROMPT)),
    ]
    chunk, verdict = target.verify(items).replies
    # One row of the round, whose drafts are wrong, and what is left.
    assert (verdict.features.first, verdict.features.num_rows) == (
        len(PROMPT),
        verdict.num_accepted_tokens + 1,
    )
    assert chunk.features.first == 0 and chunk.features.num_rows == 20 - verdict.features.num_rows
    assert len(chunk.features.data) == 2 * HIDDEN * chunk.features.num_rows
    [again] = target.verify([VerifyItem("long", 9, 70, (5,), num_features=1000, first_feature=71)]).replies
    assert again.features is None, "nothing is there of a token that is drawn"


def test_an_error_in_sending_costs_no_verdict(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = pair
    monkeypatch.setattr("specray.engine.features.remote.sending.write_rows", lambda rows: 1 / 0)
    verdict = RemoteSession("error", list(PROMPT)).verify(target)
    assert verdict.next_token_id is not None and verdict.features is None
    target.release(["error"])


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"fanout": (1, 1)},
            "fanout is (1, 1) for 0 proposed tokens; allowed: at most 1 numbers, 0 or more, "
            "and as many of a tree",
        ),
        ({"features": FeatureRows(0, 1, b"1234")}, f"features.data has 4 bytes a row; allowed: {2 * HIDDEN}"),
        ({"min_acceptance": 1.0}, "min_acceptance is 1.0; allowed: 0 or more, below 1"),
    ],
    ids=["fanout", "size", "bound"],
)
def test_items_that_it_cannot_serve_are_refused_by_name(pair: Any, changes: Any, says: str) -> None:
    _, draft = pair
    item = replace(SpeculateItem("a", 0, 0, (5, 6), K, sampling=GREEDY), **changes)
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, ItemFailed) and reply.message == says and not reply.is_retriable
    assert draft.info.num_blocks_in_use == 0


def test_the_health_check_runs_the_drafter(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, draft = pair
    draft.check()
    monkeypatch.setattr(EagleDrafter, "start", lambda *args: torch.full((1, 3), torch.nan))
    with pytest.raises(EngineLostError, match="not numbers"):
        draft.check()
