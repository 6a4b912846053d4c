"""Drafting in another process: what a drafter proposes from features is what it would beside the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.features.eagle import EagleFuser
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.remote.pairs import RemoteSession, make_pair
from tests.unit.engine.features.targets import Session, generate, make_target, step
from tests.unit.engine.model.checkpoints import write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
LONG = [(7 * index) % 90 + 3 for index in range(70)]
K = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("eagle"), *official(eagle3_weights()))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features beside the target are rounded as those on the wire are: then both must agree in all bits."""
    fuse = EagleFuser.fuse

    def rounding(fuser: EagleFuser, features: Any) -> torch.Tensor:
        return fuse(fuser, features).to(torch.bfloat16).float()

    monkeypatch.setattr(EagleFuser, "fuse", rounding)


def test_proposals_are_those_beside_the_target(llama: Path, eagle: Path, rounded: None) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 30, 0)
    beside, own = make_target(llama, eagle), Session("a", list(PROMPT))
    target, draft = make_pair(llama, eagle)
    session, drafted = RemoteSession("a", list(PROMPT)), NO_DRAFT
    for right in (1, 2, 0, 3, 1, 0, 2):
        [expected] = step(beside, [own], [drafted], K)
        verdict = session.verify(target, drafted)
        assert verdict.next_token_id == expected.next_token_id
        found = session.propose(draft, K)
        assert found == expected.draft and len(found) == K
        # Right up to a point, and then whatever the drafter says.
        done = len(session.token_ids) - len(PROMPT)
        drafted = DraftTokens((*alone[done : done + right], *found.token_ids[right:])[:K])
    assert {0, 1, 2, 3} == set(session.accepted)
