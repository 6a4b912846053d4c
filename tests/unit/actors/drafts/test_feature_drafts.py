"""A drafter beside the target and in the draft's process, over gRPC, with the servers that actors hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specray.actors import workers
from specray.actors.drafts.group import DraftGroup
from specray.actors.node import listen_address
from specray.config import Config, parse_config
from specray.interfaces import Drafter
from specray.requests import SpeculationParams
from specray.router import Router
from specray.rpc.connection import GrpcDrafter, GrpcVerifier
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model, write_checkpoint
from tests.unit.router.harness import request

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
NUM_TOKENS = 20
TIMEOUT_S = 20.0
SOURCES = {"features": "features", "remote-features": "model"}
"""What draft tokens are counted as, by ``draft.model``."""


class Drafts:
    """Implements ``interfaces.DrafterSource`` over the draft that runs now."""

    def __init__(self, group: DraftGroup) -> None:
        self.group = group

    async def lease(self) -> Drafter:
        return await GrpcDrafter.connect(self.group.address, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("eagle"), *official(eagle3_weights()))


@pytest.fixture(autouse=True)
def _no_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """This thread is not a worker's."""
    monkeypatch.setattr(workers, "let_callers_go_first", lambda config: None)


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[Router, Drafts | None]]:
    leader = workers.LeaderWorker(config, None, address=listen_address(config, "target"))
    drafts = None
    try:
        if config.draft.has_model:
            drafts = Drafts(DraftGroup(config))
            await drafts.group.start()

        async def connect_target() -> GrpcVerifier:
            assert leader.address is not None
            return await GrpcVerifier.connect(leader.address, timeout_s=TIMEOUT_S)

        router = Router(
            connect_target,
            drafts,
            router=config.router,
            speculation=config.speculation,
            model="toy",
            draft=config.draft.kind_in_use,
        )
        await router.start()
        yield router, drafts
        await router.stop(drain=False)
    finally:
        if drafts is not None:
            await drafts.group.stop(drain_s=0)
        leader.stop()


async def drafted(router: Router, name: str, **sampling: Any) -> tuple[tuple[int, ...], int]:
    """An output that is the same with speculation off, and its number of draft tokens."""
    plain = request(
        f"{name}-plain", PROMPT, NUM_TOKENS, speculation=SpeculationParams(enabled=False), **sampling
    )
    alone = await router.complete(plain)
    output = await router.complete(request(name, PROMPT, NUM_TOKENS, **sampling))
    assert output.token_ids == alone.token_ids and len(output.token_ids) == NUM_TOKENS
    assert output.stats is not None
    return output.token_ids, output.stats.num_draft_tokens


@pytest.mark.parametrize("model", SOURCES)
async def test_outputs_are_the_targets_and_rounds_carry_its_draft_tokens(
    target: Path, drafter: Path, model: str
) -> None:
    engine = {"device": "cpu", "dtype": "float32", "profile_s": 0, "max_num_seqs": 4, "num_threads": 1}
    config = parse_config(
        {
            "target": {"model": str(target), "drafter": str(drafter), "max_model_len": 128, **engine},
            "draft": {"model": model, **(engine if model == "remote-features" else {})},
            "speculation": {"num_speculative_tokens": 3, "fallback": "none", "overlap": "serial"},
        }
    )
    async with serving(config) as (router, drafts):
        output, count = await drafted(router, "greedy")
        assert list(output) == reference_greedy(reference_model(target), PROMPT, NUM_TOKENS)
        assert count >= NUM_TOKENS / 2
        assert (await drafted(router, "sampled", temperature=2.0, seed=7))[1] > 0
        by_source = "specray_spec_decode_num_draft_tokens_by_source_total"
        assert router.metrics.value(by_source, [("source", SOURCES[model])]) >= count
        if drafts is None:
            return
        # Another draft in its place, which has nothing: it gets the features of what is asked then.
        await drafts.group.stop(drain_s=0)
        assert (await drafted(router, "lost"))[0] == output
        drafts.group = DraftGroup(config)
        await drafts.group.start()
        counts = [(await drafted(router, f"again-{each}"))[1] for each in range(20)]
        assert max(counts) >= NUM_TOKENS / 2
