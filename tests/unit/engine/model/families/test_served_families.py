"""Five families of unlike attention through the Router, with a real draft: the output is ``generate``'s.

With every overlap, chains and trees, drafts and targets that are lost, prompts in chunks and from the cache,
and too little room for all requests at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import Config, parse_config
from specray.engine.build import build_draft_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.runner.assembly import build_runner
from specray.engine.target.engine import TargetEngine
from specray.engine_info import EngineInfo
from specray.fakes import LocalDrafter, LocalVerifier, VirtualClock
from specray.interfaces import Drafter, Verifier
from specray.requests import GenerateRequest
from specray.types import DraftReplies, SamplingParams, SpeculateItem, TargetReplies, VerifyItem
from tests.unit.engine.harness import engine_info, target_only
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
    write_family,
    write_tokenizer,
)
from tests.unit.engine.model.zoo import FAMILIES, Family
from tests.unit.router.harness import request, router_config, run, serving

pytestmark = pytest.mark.slow

NAMES = ("gpt_oss", "deepseek_v3", "gemma2", "gemma4", "qwen3_5")
QUICK = ("gpt_oss", "qwen3_5")
"""On the decoder, and with recurrent layers."""
RECURRENT = "qwen3_5"
PROMPTS = {
    "short": [5, 7, 9, 11, 13],
    "long": [(11 * i * i + 3 * i) % 90 + 2 for i in range(45)],
    "single": [17],
}
"""The long one is longer than every window, and than three blocks."""
NUM_OUTPUT = 24
K = 3
COUPLED: dict[str, Any] = {"temperature": 30.0, "seed": 11}
"""Hot enough that the shared noise decides, so that draft and target often say the same."""
NOISE = 0.03
"""Of a draft's weights, which are the target's but for it, by their deviation: not all tokens are right."""
Connect = Callable[[], Coroutine[Any, Any, Verifier]]
TARGET_STEP_NS, DRAFT_STEP_NS = 20_000_000, 4_000_000


@dataclass
class TimedTarget:
    """A target with steps of 20 ms."""

    engine: TargetEngine
    num_rows: int = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        replies = self.engine.verify(items)
        self.num_rows += replies.num_rows or 0
        return replace(replies, forward_ns=TARGET_STEP_NS)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


@dataclass
class TimedDraft:
    """A draft with steps of 4 ms."""

    engine: DraftEngine
    num_trees: int = 0

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.num_trees += sum(item.tree is not None for item in items)
        return replace(self.engine.speculate(items), forward_ns=DRAFT_STEP_NS)

    def release(self, request_ids: Sequence[str]) -> None:
        self.engine.release(request_ids)

    def check(self) -> None:
        self.engine.check()


def settings(target: Path, draft: Path) -> Config:
    """Both engines in float32 on one thread."""
    engine = {
        "device": "cpu",
        "dtype": "float32",
        "profile_s": 0,
        "max_model_len": 96,
        "max_num_seqs": 4,
        "num_threads": 1,
        "block_size": 16,
    }
    models = {"target": target, "draft": draft}
    return parse_config({name: {"model": str(path), **engine} for name, path in models.items()})


def untied(name: str) -> Family:
    """A family whose head is its own: a tied one of Gemma's says each token again, whatever is before it."""
    family = FAMILIES[name]
    return replace(family, values={**family.values, "tie_word_embeddings": False})


class Service:
    """The engines of one family, and what the library says of every prompt."""

    def __init__(self, name: str, directory: Path) -> None:
        self.is_recurrent = name == RECURRENT
        self.target_path = write_family(directory / "target", untied(name))
        self.model = reference_model(self.target_path)
        self.draft_path = self._write_draft(directory / "draft")
        config = settings(self.target_path, self.draft_path)
        self.runner = build_runner(config.target, role="target")
        draft = build_draft_engine(config)
        assert isinstance(draft, DraftEngine)
        self.draft = draft
        self.expected = {
            (key, is_greedy): tuple(self._expected(prompt, is_greedy))
            for key, prompt in PROMPTS.items()
            for is_greedy in (True, False)
        }

    def make_target(self, *, num_blocks: int | None = None) -> TargetEngine:
        """An engine that holds nothing yet.

        Args:
            num_blocks: of its cache; None: as many as fit.
        """
        info = engine_info(
            "target",
            vocab_size=self.runner.info.vocab_size,
            block_size=self.runner.info.block_size,
            num_blocks=num_blocks or self.runner.info.num_blocks,
            max_model_len=self.runner.info.max_model_len,
            max_num_seqs=4,
        )
        info = replace(info, tokenizer_fingerprint=self.draft.info.tokenizer_fingerprint)
        return TargetEngine(self.runner, info, device=torch.device("cpu"))

    def _write_draft(self, directory: Path) -> Path:
        """The target with some noise; another model where it has recurrent layers, as no draft may."""
        if self.is_recurrent:
            return write_checkpoint(directory, "qwen3")
        noisy = reference_model(self.target_path)
        generator = torch.Generator().manual_seed(1)
        for weight in noisy.parameters():
            if weight.ndim > 1:
                weight.data += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
        noisy.save_pretrained(directory)
        write_tokenizer(directory, noisy.config.vocab_size)
        return directory

    def _expected(self, prompt: list[int], is_greedy: bool) -> list[int]:
        if is_greedy:
            return reference_greedy(self.model, prompt, NUM_OUTPUT)
        sampling = SamplingParams(**COUPLED, num_prompt_tokens=len(prompt))

        def logits(prefix: Sequence[int]) -> torch.Tensor:
            return reference_logits(self.model, list(prefix))[-1]

        return target_only(logits, prompt, sampling, NUM_OUTPUT)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.zoo) for name in NAMES],
)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Service:
    return Service(request.param, tmp_path_factory.mktemp(request.param))


def requests(is_greedy: bool) -> list[GenerateRequest]:
    sampling: dict[str, Any] = {} if is_greedy else COUPLED
    return [request(name, prompt, NUM_OUTPUT, **sampling) for name, prompt in PROMPTS.items()]


@dataclass(frozen=True)
class Served:
    """What was counted while all requests were served."""

    target: TimedTarget
    draft: TimedDraft
    accepted: float
    drafted: float
    preempted: float


def serve(
    service: Service,
    *,
    is_greedy: bool = True,
    engine: TargetEngine | None = None,
    verifier: Callable[[TimedTarget, VirtualClock], Connect] | None = None,
    dies_after: int | None = None,
    **options: Any,
) -> Served:
    """Serves all requests together, and compares each with the library's."""
    clock = VirtualClock()
    target, draft = TimedTarget(engine or service.make_target()), TimedDraft(service.draft)

    def lease(number: int) -> Drafter:
        # The next one has lost what the one before was told.
        draft.engine.release(list(PROMPTS))
        return LocalDrafter(draft, clock, dies_after=dies_after if number == 0 else None)

    async def main() -> Served:
        connection = LocalVerifier(target, clock) if verifier is None else verifier(target, clock)
        options.setdefault("num_speculative_tokens", K)
        async with serving(clock, verifier=connection, make_drafter=lease, **options) as pair:
            given = requests(is_greedy)
            outputs = await asyncio.gather(*map(pair.router.complete, given))
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == service.expected[each.request_id, is_greedy], each.request_id
            return Served(
                target,
                draft,
                pair.counted("specray_spec_decode_num_accepted_tokens_total"),
                pair.counted("specray_spec_decode_num_draft_tokens_total"),
                pair.counted("specray_preemptions_total"),
            )

    served = run(clock, main())
    target.engine.check_integrity()
    draft.engine.check_integrity()
    target.engine.release(list(PROMPTS))
    draft.engine.release(list(PROMPTS))
    return served


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate"])
def test_chains(service: Service, overlap: str, is_greedy: bool) -> None:
    served = serve(service, is_greedy=is_greedy, overlap=overlap)
    assert served.drafted > 20
    if not is_greedy:
        assert served.accepted >= 8
    elif not service.is_recurrent:
        # Two models with nothing in common agree by chance alone.
        assert 5 <= served.accepted < served.drafted


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_trees(service: Service, overlap: str, is_greedy: bool) -> None:
    """Of which a target with recurrent layers verifies the first chain."""
    served = serve(service, is_greedy=is_greedy, overlap=overlap, tree="8")
    assert served.drafted > 20
    # Behind a hit comes a chain.
    assert served.draft.num_trees > (3 if overlap == "serial" else 0)


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_a_draft_that_is_lost_and_returns(service: Service, is_greedy: bool) -> None:
    served = serve(service, is_greedy=is_greedy, overlap="enumerate", dies_after=6)
    assert served.drafted > 20


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_a_target_that_is_lost_starts_from_the_tokens(service: Service, is_greedy: bool) -> None:
    """Its process is forked anew: the first connection ends in the middle, and nothing is kept."""
    connections: list[LocalVerifier] = []

    def verifier(target: TimedTarget, clock: VirtualClock) -> Connect:
        async def lose(connection: LocalVerifier) -> None:
            await clock.sleep(0.1)
            await connection.close()
            target.engine.release(list(PROMPTS))

        async def connect() -> Verifier:
            connections.append(LocalVerifier(target, clock))
            if len(connections) == 1:
                asyncio.get_running_loop().create_task(lose(connections[0]))
            return connections[-1]

        return connect

    serve(service, is_greedy=is_greedy, overlap="ahead", verifier=verifier)
    assert len(connections) == 2


def test_prompts_in_chunks_and_from_the_cache(service: Service) -> None:
    """The second time nothing of them is computed but their ends; recurrent layers have no such cache."""
    engine, config = service.make_target(), router_config(prefill_chunk_tokens=16)
    first, second = (serve(service, engine=engine, config=config, overlap="ahead") for _ in range(2))
    if service.is_recurrent:
        assert engine.info.num_prefix_cache_queries == 0
    else:
        assert engine.info.num_prefix_cache_hits >= 32
        assert second.target.num_rows <= first.target.num_rows - 32


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_more_requests_than_there_is_room_for(service: Service, is_greedy: bool) -> None:
    """Seven blocks, of which the long one takes five in the end: one gives its own back and begins again."""
    engine = service.make_target(num_blocks=7)
    served = serve(service, is_greedy=is_greedy, engine=engine, overlap="enumerate")
    assert served.preempted >= 1
