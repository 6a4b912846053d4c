"""Every kind of drafter in another process proposes what it would beside the target."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.build import build_draft_engine
from specray.engine.features.block.drafter import BlockDrafter, BlockFuser
from specray.engine.features.eagle.drafter import EagleDrafter, EagleFuser
from specray.engine.features.medusa import MedusaDrafter
from specray.engine.features.mtp.drafter import MtpDrafter
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.types import SamplingParams, Verification
from tests.pairwise import pairs
from tests.unit.engine.features.block.checkpoints import SIZE, dflash, dspark
from tests.unit.engine.features.checkpoints import (
    LLAMA,
    eagle1_weights,
    masked_weights,
    medusa_files,
    official,
    write,
)
from tests.unit.engine.features.mtp.checkpoints import write_target
from tests.unit.engine.features.remote.pairs import RemoteSession, make_pair, noted_starts, pair_config
from tests.unit.engine.features.targets import GREEDY, LONG, PROMPT, Session, generate, make_target, step
from tests.unit.engine.model.checkpoints import write_checkpoint

K = 3
COUPLED = SamplingParams(temperature=30.0, seed=11, num_prompt_tokens=len(PROMPT))
REJECTION = SamplingParams(
    temperature=30.0, seed=3, verification=Verification.REJECTION, num_prompt_tokens=len(PROMPT)
)
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED, "rejection": REJECTION}
TREES = {"chain": None, "likeliest": TreeBudget(8), "shape": TreeBudget(7, (4, 1), 0.0)}
MOST = {
    "eagle3": 9,
    "peagle": 9,
    "eagle1": 9,
    "medusa": 3,
    "dflash": SIZE - 1,
    "dspark": SIZE,
    "mtp": 9,
}
"""Most draft tokens of each kind's chain, of nine that are asked for."""
KINDS = list(MOST)
DRAFTERS = {"medusa": MedusaDrafter, "dflash": BlockDrafter, "dspark": BlockDrafter, "mtp": MtpDrafter}
Files = tuple[Path, Path]
"""A target, and the drafter as ``target.drafter`` names it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, llama: Path, eagle: Path) -> dict[str, Files]:
    root = tmp_path_factory.mktemp("kinds")
    medusa = write(root / "medusa", *medusa_files(has_heads=False))
    return {
        "eagle3": (llama, eagle),
        "peagle": (llama, write(root / "peagle", *official(masked_weights(), mask_token_id=17))),
        "eagle1": (llama, write(root / "eagle1", eagle1_weights(), LLAMA)),
        "medusa": (llama, medusa),
        "dflash": (llama, write(root / "dflash", *dflash().files)),
        "dspark": (llama, write(root / "dspark", *dspark().files)),
        "mtp": (write_target(root / "mtp", "MiMo").path, Path("mtp")),
    }


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features beside the target are rounded as those on the wire are: both drafters read the same."""
    for fuser in (EagleFuser, BlockFuser, MedusaDrafter, MtpDrafter):
        fuse: Any = fuser.fuse

        def rounding(own: Any, features: Any, *, fuse: Any = fuse) -> torch.Tensor:
            rows: torch.Tensor = fuse(own, features)
            return rows.to(torch.bfloat16).float()

        monkeypatch.setattr(fuser, "fuse", rounding)


@functools.cache
def sampled_alone(target: Path, sampling: SamplingParams) -> list[int]:
    return generate(make_target(target, None), Session("alone", list(PROMPT), sampling), 24, 0)


def goes_together(kind: str, sampling: SamplingParams, tree: TreeBudget | None) -> bool:
    return tree is None or sampling is not REJECTION


@pairs(goes_together, kind=KINDS, sampling=SAMPLINGS, tree=TREES)
def test_proposals_are_those_beside_the_target(
    files: dict[str, Files], rounded: None, kind: str, sampling: SamplingParams, tree: TreeBudget | None
) -> None:
    alone = sampled_alone(files[kind][0], sampling)
    beside, own = make_target(*files[kind]), Session("a", list(PROMPT), sampling)
    target, draft = make_pair(*files[kind])
    session, drafted = RemoteSession("a", list(PROMPT), sampling), NO_DRAFT
    for right in (1, 2, 0, 3, 1):
        [expected] = step(beside, [own], [drafted], K, next_tree=tree)
        verdict = session.verify(target, drafted)
        assert verdict.next_token_id == expected.next_token_id
        found = session.propose(draft, K, tree=tree)
        assert replace(found, probs=()) == replace(expected.draft, probs=())
        assert len(found) >= K and found.is_chain == (tree is None)
        for own_probs, other in zip(found.probs, expected.draft.probs, strict=True):
            assert own_probs.token_ids == other.token_ids
            assert own_probs.probs == pytest.approx(other.probs, rel=1e-5)
        # Right up to a point, and then whatever the drafter says; what was sampled stays as it is.
        done = len(session.token_ids) - len(PROMPT)
        drafted = (
            found if found.probs else DraftTokens((*alone[done : done + right], *found.token_ids[right:])[:K])
        )
    assert sampling is REJECTION or len(set(session.accepted)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_lost_everything_and_chunks_propose_the_same(
    files: dict[str, Files], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make_pair(*files[kind], block_size=16)
    started = noted_starts(monkeypatch, DRAFTERS.get(kind, EagleDrafter))
    session = RemoteSession("chunks", list(LONG[:40]))
    session.verify(target, sample=False)
    assert session.propose(draft, 0) == NO_DRAFT
    session.token_ids += LONG[40:]
    session.verify(target)
    found = session.propose(draft, K)
    # A block's K/V are of the target's features alone; an entry of MTP stands one token behind them.
    assert started == [40 - (kind in ("dflash", "dspark"))]
    session.lose(draft)
    assert session.propose(draft, K) == NO_DRAFT, "without features nothing is drafted"
    fresh = RemoteSession("fresh", session.token_ids[:-1])
    assert fresh.verify(target).next_token_id == session.token_ids[-1]
    assert found == fresh.propose(draft, K) and len(found) == K
    draft.check()
    fresh.verify(target, found)
    assert len(fresh.propose(draft, 9)) == MOST[kind], "no more than it can draw"


def test_of_the_target_only_what_it_lacks_is_read(
    files: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, take = set[str](), SafetensorsWeights.raw

    def noted(weights: SafetensorsWeights, name: str, *arguments: Any) -> Any:
        read.add(weights._names[name])
        return take(weights, name, *arguments)

    monkeypatch.setattr(SafetensorsWeights, "raw", noted)
    for kind in ("eagle3", "medusa", "dflash"):
        read.clear()
        build_draft_engine(pair_config(*files[kind]))
        assert read == {"model.embed_tokens.weight"}, "the head is tied"
    untied = write_checkpoint(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=False)
    read.clear()
    build_draft_engine(pair_config(untied, files["eagle1"][1]))
    assert read == {"model.embed_tokens.weight", "lm_head.weight"}
    read.clear()
    build_draft_engine(pair_config(*files["mtp"]))
    assert not any(name.startswith("model.layers.") for name in read)
