"""A target and a drafter in another process, and the router's part between them, as far as features go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specray.config import Config, parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.features.base import Context
from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target.engine import TargetEngine
from specray.feature_rows import FeatureRows
from specray.types import Proposal, SpeculateItem, Verdict
from tests.unit.engine.features.targets import Session

ALL = 1 << 20
"""More rows than there are."""


def pair_config(target: Path, drafter: Path, **changes: Any) -> Config:
    """Both engines in float32 on the CPU; ``changes`` are of both."""
    engine = {"device": "cpu", "dtype": "float32", "profile_s": 0, "max_num_seqs": 4, **changes}
    return parse_config(
        {
            "target": {"model": str(target), "drafter": str(drafter), **engine},
            "draft": {"model": "remote-features", **engine},
        }
    )


def make_pair(target: Path, drafter: Path, **changes: Any) -> tuple[TargetEngine, FeatureDraftEngine]:
    config = pair_config(target, drafter, **changes)
    draft = build_draft_engine(config)
    assert isinstance(draft, FeatureDraftEngine)
    return build_target_engine(config), draft


def noted_starts(monkeypatch: pytest.MonkeyPatch, drafter: type[Any]) -> list[int]:
    """Of each sequence that a drafter begins to draft for: the tokens whose part of its state is there."""
    started, start = list[int](), drafter.start

    def noted(own: Any, store: Any, contexts: Sequence[Context]) -> Any:
        started.extend(context.num_valid for context in contexts)
        return start(own, store, contexts)

    monkeypatch.setattr(drafter, "start", noted)
    return started


@dataclass
class RemoteSession(Session):
    """One request, whose features go on to the draft."""

    told: int = 0
    """Tokens that the draft holds."""
    num_features: int = 0
    """Tokens of which the draft was given features."""
    waiting: list[FeatureRows] = field(default_factory=list)

    def verify(
        self, target: TargetEngine, draft: DraftTokens = NO_DRAFT, *, wanted: int = ALL, **options: Any
    ) -> Verdict:
        """A round; features of it wait for the draft."""
        end = self.waiting[-1].end if self.waiting else self.num_features
        item = self.item(draft, num_features=wanted, first_feature=end, **options)
        [verdict] = target.verify([item]).replies
        assert isinstance(verdict, Verdict), verdict
        if item.sample:
            self.take(draft, verdict)
        else:
            self.held = len(self.token_ids)
        if verdict.features is not None:
            self.waiting.append(verdict.features)
        target.check_integrity()
        return verdict

    def propose(
        self,
        draft: FeatureDraftEngine,
        num_tokens: int,
        *,
        tree: TreeBudget | None = None,
        loses_features: bool = False,
    ) -> DraftTokens:
        """What the draft says behind all tokens, with what waits for it."""
        rows = None
        for each in self.waiting:
            rows = each if rows is None else rows.followed_by(each)
        self.waiting.clear()
        if loses_features:
            rows = None
        elif rows is not None:
            self.num_features = rows.end
        item = SpeculateItem(
            self.request_id,
            0,
            self.told,
            tuple(self.token_ids[self.told :]),
            num_tokens,
            sampling=self.sampling if self.told == 0 else None,
            tree=tree,
            features=rows,
        )
        [reply] = draft.speculate([item]).replies
        assert isinstance(reply, Proposal), reply
        self.told = len(self.token_ids)
        draft.check_integrity()
        return reply.draft

    def lose(self, draft: FeatureDraftEngine) -> None:
        """The draft forgets it; all is asked for again."""
        draft.release([self.request_id])
        self.told = self.num_features = 0
        self.waiting.clear()
