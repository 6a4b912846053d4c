"""The theorem over a Router whose draft reads features: the output is the target's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.engine.target import TargetEngine
from specray.errors import ConfigError
from specray.fakes import LocalDrafter, LocalVerifier, VirtualClock
from specray.interfaces import Drafter
from specray.requests import GenerateRequest
from specray.types import (
    DraftReplies,
    EngineInfo,
    SamplingParams,
    SpeculateItem,
    TargetReplies,
    Verdict,
    VerifyItem,
)
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.remote.pairs import make_pair
from tests.unit.engine.features.targets import Session, generate, make_target
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.router.harness import request, router_config, run, serving

pytestmark = pytest.mark.slow

PROMPTS = {"short": [5, 6, 7], "long": [(7 * index) % 90 + 3 for index in range(40)], "single": [11]}
NUM_OUTPUT = 24
K = 3
COUPLED = {"temperature": 30.0, "seed": 11}


@dataclass
class TimedTarget:
    """The target with steps of 20 ms, and verdicts that may lose their features."""

    engine: TargetEngine
    lost: Sequence[int] = ()
    """Numbers of the steps whose features are lost."""
    asked: list[VerifyItem] = field(default_factory=list)
    num_steps: int = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        self.num_steps += 1
        self.asked += items
        replies = replace(self.engine.verify(items), forward_ns=20_000_000)
        if self.num_steps not in self.lost:
            return replies
        kept = tuple(
            replace(reply, features=None) if isinstance(reply, Verdict) else reply
            for reply in replies.replies
        )
        return replace(replies, replies=kept)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


@dataclass
class TimedDraft:
    """The draft with steps of 4 ms."""

    engine: FeatureDraftEngine
    items: list[SpeculateItem] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.items += items
        return replace(self.engine.speculate(items), forward_ns=4_000_000)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("eagle"), *official(eagle3_weights()))


@pytest.fixture(scope="module")
def engines(llama: Path, eagle: Path) -> tuple[TargetEngine, FeatureDraftEngine]:
    return make_pair(llama, eagle)


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[tuple[str, bool], tuple[int, ...]]:
    return written_alone(llama)


def written_alone(path: Path) -> dict[tuple[str, bool], tuple[int, ...]]:
    """What a target writes by itself: of each prompt, greedy and coupled."""
    target, outputs = make_target(path, None), {}
    for name, prompt in PROMPTS.items():
        for is_greedy in (True, False):
            sampling = SamplingParams(temperature=0.0) if is_greedy else SamplingParams(**COUPLED)
            sampling = replace(sampling, num_prompt_tokens=len(prompt))
            session = Session(f"{name} {is_greedy}", list(prompt), sampling)
            outputs[name, is_greedy] = tuple(generate(target, session, NUM_OUTPUT, 0))
            target.release([session.request_id])
    return outputs


def requests(is_greedy: bool) -> list[GenerateRequest]:
    sampling: dict[str, Any] = {} if is_greedy else COUPLED
    return [request(name, prompt, NUM_OUTPUT, **sampling) for name, prompt in PROMPTS.items()]


def serve(
    engines: tuple[TargetEngine, FeatureDraftEngine],
    alone: dict[tuple[str, bool], tuple[int, ...]],
    *,
    is_greedy: bool = False,
    lost: Sequence[int] = (),
    dies_after: int | None = None,
    together: bool = False,
    **options: Any,
) -> tuple[TimedTarget, TimedDraft, float]:
    """Serves all requests, one after the other or together; returns the number of accepted tokens, too."""
    clock = VirtualClock()
    target, draft = TimedTarget(engines[0], lost), TimedDraft(engines[1])

    def lease(number: int) -> Drafter:
        # The next one has lost what the one before was told.
        draft.engine.release(list(PROMPTS))
        return LocalDrafter(draft, clock, dies_after=dies_after if number == 0 else None)

    async def main() -> float:
        verifier = LocalVerifier(target, clock)
        async with serving(
            clock, verifier=verifier, make_drafter=lease, num_speculative_tokens=K, **options
        ) as pair:
            given = requests(is_greedy)
            outputs = (
                await asyncio.gather(*map(pair.router.complete, given))
                if together
                else [await pair.router.complete(each) for each in given]
            )
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == alone[each.request_id, is_greedy], each.request_id
            return pair.counted("specray_spec_decode_num_accepted_tokens_total")

    accepted = run(clock, main())
    target.engine.check_integrity()
    draft.engine.check_integrity()
    draft.engine.release(list(PROMPTS))
    assert target.info.num_blocks_in_use == draft.info.num_blocks_in_use == 0
    return target, draft, accepted


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "coupled"])
def test_output_is_the_targets_alone(engines: Any, alone: Any, is_greedy: bool) -> None:
    _, draft, accepted = serve(engines, alone, is_greedy=is_greedy)
    asked = [item for item in draft.items if item.num_speculative_tokens]
    assert len(asked) >= 20 and all(item.features is not None for item in asked)
    # Each brings the features of the last round's tokens alone: those that were accepted, and the one before.
    assert max(item.features.num_rows for item in asked if item.base_len > 40) <= K + 1
    if not is_greedy:
        assert accepted >= 8


@pytest.mark.parametrize("overlap", ["ahead", "enumerate", "auto"])
def test_output_is_the_targets_alone_with_overlap(engines: Any, alone: Any, overlap: str) -> None:
    _, draft, accepted = serve(engines, alone, overlap=overlap, together=True, dies_after=30)
    asked = [item for item in draft.items if item.fanout]
    assert len(asked) >= 20 and accepted >= 8


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
    monkeypatch.setattr("specray.router.draft_model.feature_room.MAX_FEATURE_BYTES", 8 * 2 * 32)
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


def test_a_draft_of_features_that_nobody_gives_is_refused(engines: Any, llama: Path) -> None:
    clock = VirtualClock()
    plain = TimedTarget(make_target(llama, None))

    async def main() -> None:
        drafter = LocalDrafter(TimedDraft(engines[1]), clock)
        async with serving(clock, verifier=LocalVerifier(plain, clock), make_drafter=lambda _: drafter):
            pass

    with pytest.raises(
        ConfigError, match=r"reads features of eagle\d, 32 numbers each, target .* gives none"
    ):
        run(clock, main())
