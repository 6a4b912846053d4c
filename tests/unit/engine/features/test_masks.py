"""Drafters with masks (P-EAGLE): all draft tokens of one forward, against one written down once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT
from specray.engine.features.eagle.drafter import EagleDrafter
from tests.unit.engine.features import reference
from tests.unit.engine.features.checkpoints import masked_weights, official, speculators, write
from tests.unit.engine.features.targets import PROMPT, Session, check_rounds, make_target
from tests.unit.engine.model.checkpoints import reference_model

MASK_ID, K = 17, 4
WEIGHTS = masked_weights(num_layers=2)
KEYS = {
    "official": {"mask_token_id": MASK_ID},
    "speculators": {"speculators_model_type": "peagle", "ptd_token_id": MASK_ID},
    "block": {"dflash_config": {"mask_token_id": MASK_ID}, "pard_token": 3},
}


@pytest.fixture(scope="module")
def peagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("peagle"), *official(WEIGHTS, **KEYS["official"]))


@pytest.mark.parametrize("layout", KEYS)
def test_every_round_drafts_what_the_reference_does_in_one_forward(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    written = (speculators if layout == "speculators" else official)(WEIGHTS, **KEYS[layout])
    target = make_target(llama, write(tmp_path, *written))
    forwards, run = [], EagleDrafter._forward

    def counted(*arguments: Any) -> Any:
        forwards.append(len(arguments[1]))
        return run(*arguments)

    monkeypatch.setattr(EagleDrafter, "_forward", counted)
    model = reference_model(llama)
    check_rounds(target, lambda known: reference.peagle(model, WEIGHTS, MASK_ID, known[:-1], known[-1], K), K)
    assert len(forwards) == 3


def test_sessions_that_want_less_have_fewer_masks(llama: Path, peagle: Path) -> None:
    target, model = make_target(llama, peagle), reference_model(llama)
    sessions = [Session("a", list(PROMPT)), Session("b", PROMPT[:4]), Session("c", PROMPT[:6])]
    replies = target.verify(
        [session.item(num_next=count) for session, count in zip(sessions, (1, 4, 2), strict=True)]
    ).replies
    for session, verdict, count in zip(sessions, replies, (1, 4, 2), strict=True):
        session.take(NO_DRAFT, verdict)  # type: ignore[arg-type]
        known = session.token_ids
        wanted = reference.peagle(model, WEIGHTS, MASK_ID, known[:-1], known[-1], count)[1]
        assert list(verdict.draft.token_ids) == wanted  # type: ignore[union-attr]
