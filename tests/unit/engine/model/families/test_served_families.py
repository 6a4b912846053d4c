"""Five families of unlike attention through the Router, with a real draft: the output is ``generate``'s.

With every overlap, chains and trees, drafts and targets that are lost, prompts in chunks and from the cache,
and too little room for all requests at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import Config, parse_config
from specray.engine.build import build_draft_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.runner.assembly import build_runner
from specray.engine.target.engine import TargetEngine
from specray.fakes import LocalVerifier, VirtualClock
from specray.interfaces import Verifier
from specray.types import SamplingParams
from tests.unit.engine import served
from tests.unit.engine.harness import target_only
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
    write_family,
    write_tokenizer,
)
from tests.unit.engine.model.zoo import FAMILIES, Family
from tests.unit.engine.runners import info_of
from tests.unit.engine.served import COUPLED, NUM_OUTPUT, Connect, Served, TimedDraft, TimedTarget
from tests.unit.router.harness import router_config

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
NOISE = 0.03
"""Of a draft's weights, which are the target's but for it, by their deviation: not all tokens are right."""


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
        info = info_of(
            self.runner,
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


def serve(
    service: Service, *, is_greedy: bool = True, engine: TargetEngine | None = None, **options: Any
) -> Served:
    """Serves all requests together, and compares each with the library's."""
    target, draft = TimedTarget(engine or service.make_target()), TimedDraft(service.draft)
    found = served.serve(target, draft, PROMPTS, service.expected, is_greedy=is_greedy, **options)
    target.release(list(PROMPTS))
    return found


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate"])
def test_chains(service: Service, overlap: str, is_greedy: bool) -> None:
    found = serve(service, is_greedy=is_greedy, overlap=overlap)
    assert found.drafted > 20
    if not is_greedy:
        assert found.accepted >= 8
    elif not service.is_recurrent:
        # Two models with nothing in common agree by chance alone.
        assert 5 <= found.accepted < found.drafted


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_trees(service: Service, overlap: str, is_greedy: bool) -> None:
    """Of which a target with recurrent layers verifies the first chain."""
    found = serve(service, is_greedy=is_greedy, overlap=overlap, tree="8")
    assert found.drafted > 20
    # Behind a hit comes a chain.
    num_trees = sum(item.tree is not None for item in found.draft.items)
    assert num_trees > (3 if overlap == "serial" else 0)


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_a_draft_that_is_lost_and_returns(service: Service, is_greedy: bool) -> None:
    found = serve(service, is_greedy=is_greedy, overlap="enumerate", dies_after=6)
    assert found.drafted > 20


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
    """The second time nothing of them is computed but their ends; states are kept at multiples of 64."""
    engine, config = service.make_target(), router_config(prefill_chunk_tokens=16)
    first, second = (serve(service, engine=engine, config=config, overlap="ahead") for _ in range(2))
    if service.is_recurrent:
        assert engine.info.num_prefix_cache_hits == 0
        assert second.target.num_rows == first.target.num_rows
    else:
        assert engine.info.num_prefix_cache_hits >= 32
        assert second.target.num_rows <= first.target.num_rows - 32


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "seeded"])
def test_more_requests_than_there_is_room_for(service: Service, is_greedy: bool) -> None:
    """Seven blocks, of which the long one takes five in the end: one gives its own back and begins again."""
    engine = service.make_target(num_blocks=7)
    found = serve(service, is_greedy=is_greedy, engine=engine, overlap="enumerate")
    assert found.preempted >= 1
