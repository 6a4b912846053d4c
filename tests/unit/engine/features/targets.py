"""Target engines with a drafter, rounds over them, and what the drafter's logits were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.build import build_target_engine
from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target.engine import TargetEngine
from specray.types import SamplingParams, Verdict, VerifyItem

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
LONG = [(7 * index) % 90 + 3 for index in range(70)]


def make_target(target: Path, drafter: Path | str | None, **changes: Any) -> TargetEngine:
    settings = {
        "model": str(target),
        "drafter": None if drafter is None else str(drafter),
        "device": "cpu",
        "dtype": "float32",
        "profile_s": 0,
        "max_num_seqs": 4,
    }
    return build_target_engine(parse_config({"target": settings | changes}))


@dataclass
class Watched:
    """Keeps the logits that draft tokens are drawn from."""

    sampler: Any
    logits: list[torch.Tensor] = field(default_factory=list)

    def draw(self, logits: torch.Tensor, groups: Any, **options: Any) -> Any:
        self.logits.append(logits.clone())
        return self.sampler.draw(logits, groups, **options)

    def rank(self, *arguments: Any) -> Any:
        return self.sampler.rank(*arguments)


def watch(engine: TargetEngine | FeatureDraftEngine) -> Watched:
    drafting = engine._drafting
    assert drafting is not None
    watched = drafting._sampler = Watched(drafting._sampler)  # type: ignore[assignment]
    return watched  # type: ignore[return-value]


def check_drafted(
    watched: Watched,
    draft: DraftTokens,
    wanted: tuple[Sequence[torch.Tensor], Sequence[int]],
    *,
    place: int = 0,
    within: float = 1e-5,
) -> None:
    """The draft of one session of a step, and the logits of its tokens.

    Args:
        wanted: logits and tokens of a forward that is written down once more.
        place: of the session in the step.
        within: of the largest logit.
    """
    logits, tokens = wanted
    assert list(draft.token_ids) == list(tokens)
    for own, expected in zip(watched.logits, logits, strict=True):
        assert float((own[place] - expected).abs().max()) < within * float(expected.abs().max())


def check_rounds(
    target: TargetEngine,
    wanted: Callable[[list[int]], tuple[Sequence[torch.Tensor], Sequence[int]]],
    num_next: int,
    *,
    second: Sequence[int] = PROMPT[:4],
) -> None:
    """Three rounds of two sessions draft what is wanted behind their tokens."""
    watched, drafts = watch(target), [NO_DRAFT, NO_DRAFT]
    sessions = [Session("a", list(PROMPT)), Session("b", list(second))]
    for _ in range(3):
        watched.logits.clear()
        drafts = [verdict.draft for verdict in step(target, sessions, drafts, num_next)]
        for place, session in enumerate(sessions):
            check_drafted(watched, drafts[place], wanted(session.token_ids), place=place)


@dataclass
class Session:
    """One request as a router keeps it: what is committed, and what the target holds."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams = GREEDY
    held: int = 0
    round_id: int = 0
    accepted: list[int] = field(default_factory=list)

    def item(self, draft: DraftTokens = NO_DRAFT, num_next: int = 0, **wanted: Any) -> VerifyItem:
        self.round_id += 1
        return VerifyItem(
            self.request_id,
            self.round_id,
            self.held,
            tuple(self.token_ids[self.held :]),
            draft,
            sampling=self.sampling if self.held == 0 else None,
            num_next_draft_tokens=num_next,
            **wanted,
        )

    def take(self, draft: DraftTokens, verdict: Verdict) -> None:
        # Without a node they are the first of a tree's first chain, all that hybrids verify of it.
        path = draft.first_path[: verdict.num_accepted_tokens]
        if verdict.last_accepted_node is not None:
            path = draft.path(verdict.last_accepted_node)
        kept = [draft.token_ids[node] for node in path]
        assert verdict.next_token_id is not None
        self.held = len(self.token_ids)
        self.token_ids += [*kept, verdict.next_token_id]
        self.accepted.append(len(kept))


def step(
    target: TargetEngine,
    sessions: Sequence[Session],
    drafts: Sequence[DraftTokens],
    num_next: int,
    **wanted: Any,
) -> Any:
    """One verify of all; their verdicts.

    Args:
        wanted: what else is asked of the drafter.
    """
    items = [session.item(draft, num_next, **wanted) for session, draft in zip(sessions, drafts, strict=True)]
    verdicts = target.verify(items).replies
    for session, draft, verdict in zip(sessions, drafts, verdicts, strict=True):
        assert isinstance(verdict, Verdict), verdict
        session.take(draft, verdict)
    target.check_integrity()
    return verdicts


def generate(
    target: TargetEngine, session: Session, num_output: int, num_next: int, **wanted: Any
) -> list[int]:
    """Rounds whose drafts are the target's own."""
    num_prompt, draft = len(session.token_ids), NO_DRAFT
    while len(session.token_ids) < num_prompt + num_output:
        [verdict] = step(target, [session], [draft], num_next, **wanted)
        draft = verdict.draft
    return session.token_ids[num_prompt : num_prompt + num_output]
