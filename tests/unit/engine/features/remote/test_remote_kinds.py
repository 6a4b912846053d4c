"""Medusa heads, block drafters and MTP layers in another process: what they propose."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.build import build_draft_engine
from specray.engine.features.block.drafter import BlockFuser
from specray.engine.features.medusa import MedusaDrafter
from specray.engine.features.mtp.drafter import MtpDrafter
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.types import SamplingParams
from tests.unit.engine.features.block.checkpoints import SIZE, dflash, dspark
from tests.unit.engine.features.checkpoints import medusa_weights, write
from tests.unit.engine.features.mtp.checkpoints import write_target
from tests.unit.engine.features.remote.pairs import RemoteSession, make_pair, pair_config
from tests.unit.engine.features.targets import GREEDY, Session, generate, make_target, step
from tests.unit.engine.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
LONG = [(7 * index) % 90 + 3 for index in range(70)]
K = 3
COUPLED = SamplingParams(temperature=30.0, seed=11, num_prompt_tokens=len(PROMPT))
MOST = {"medusa": 3, "dflash": SIZE - 1, "dspark": SIZE, "mtp": 9}
"""Most draft tokens of each kind's chain, of nine that are asked for."""
KINDS = list(MOST)
Files = tuple[Path, Path]
"""A target, and the drafter as ``target.drafter`` names it."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    root = tmp_path_factory.mktemp("kinds")
    llama = write_checkpoint(root / "target", "llama", num_hidden_layers=3)
    medusa = write(root / "medusa", medusa_weights(has_heads=False), {}, "medusa_lm_head.safetensors")
    return {
        "medusa": (llama, medusa),
        "dflash": (llama, write(root / "dflash", *dflash().files)),
        "dspark": (llama, write(root / "dspark", *dspark().files)),
        "mtp": (write_target(root / "mtp", "MiMo").path, Path("mtp")),
    }


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features beside the target are rounded as those on the wire are: both drafters read the same."""
    for fuser in (BlockFuser, MedusaDrafter, MtpDrafter):
        fuse: Any = fuser.fuse

        def rounding(own: Any, features: Any, *, fuse: Any = fuse) -> torch.Tensor:
            rows: torch.Tensor = fuse(own, features)
            return rows.to(torch.bfloat16).float()

        monkeypatch.setattr(fuser, "fuse", rounding)


@functools.cache
def sampled_alone(target: Path, sampling: SamplingParams) -> list[int]:
    return generate(make_target(target, None), Session("alone", list(PROMPT), sampling), 24, 0)


@pytest.mark.parametrize("tree", [None, TreeBudget(8)], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_beside_the_target(
    pairs: dict[str, Files], rounded: None, kind: str, sampling: SamplingParams, tree: TreeBudget | None
) -> None:
    alone = sampled_alone(pairs[kind][0], sampling)
    beside, own = make_target(*pairs[kind]), Session("a", list(PROMPT), sampling)
    target, draft = make_pair(*pairs[kind])
    session, drafted = RemoteSession("a", list(PROMPT), sampling), NO_DRAFT
    for right in (1, 2, 0, 3, 1):
        [expected] = step(beside, [own], [drafted], K, next_tree=tree)
        verdict = session.verify(target, drafted)
        assert verdict.next_token_id == expected.next_token_id
        found = session.propose(draft, K, tree=tree)
        assert found == expected.draft and len(found) >= K and found.is_chain == (tree is None)
        # Right up to a point, and then whatever the drafter says.
        done = len(session.token_ids) - len(PROMPT)
        drafted = DraftTokens((*alone[done : done + right], *found.token_ids[right:])[:K])
    assert len(set(session.accepted)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_lost_everything_and_chunks_propose_the_same(pairs: dict[str, Files], kind: str) -> None:
    target, draft = make_pair(*pairs[kind], block_size=16)
    session = RemoteSession("chunks", list(LONG[:40]))
    session.verify(target, sample=False)
    assert session.propose(draft, 0) == NO_DRAFT
    sequence = draft._table._sequences["chunks"]
    # A block's K/V are of the target's features alone; an entry of MTP stands one token behind them.
    assert sequence.num_drafted_for == 40 - (kind in ("dflash", "dspark"))
    session.token_ids += LONG[40:]
    session.verify(target)
    found = session.propose(draft, K)
    session.lose(draft)
    assert session.propose(draft, K) == NO_DRAFT, "without features nothing is drafted"
    fresh = RemoteSession("fresh", session.token_ids[:-1])
    assert fresh.verify(target).next_token_id == session.token_ids[-1]
    assert found == fresh.propose(draft, K) and len(found) == K
    draft.check()
    fresh.verify(target, found)
    assert len(fresh.propose(draft, 9)) == MOST[kind], "no more than it can draw"


def test_of_the_target_only_what_it_lacks_is_read(
    pairs: dict[str, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, take = set[str](), SafetensorsWeights.raw

    def noted(weights: SafetensorsWeights, name: str, *arguments: Any) -> Any:
        read.add(name)
        return take(weights, name, *arguments)

    monkeypatch.setattr(SafetensorsWeights, "raw", noted)
    for kind in ("medusa", "dflash"):
        read.clear()
        build_draft_engine(pair_config(*pairs[kind]))
        assert read == {"model.embed_tokens.weight"}, "the head is tied"
    read.clear()
    build_draft_engine(pair_config(*pairs["mtp"]))
    assert not any(name.startswith("model.layers.") for name in read)
