"""What is trained behind masks, in one forward over many prefixes, against a forward for each prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specray.errors import ConfigError
from specray.train.draft.loss import LossConfig
from specray.train.draft.loss_kind import LossKind
from specray.train.draft.writing import Written
from specray.train.heads import block as block_module
from specray.train.heads import pard as pard_module
from specray.train.heads.base import DraftHead, all_anchors
from specray.train.heads.block import BlockHead
from specray.train.heads.methods import Block, Target, mask_token
from specray.train.heads.pard import PardDraft
from specray.train.heads.target import FeatureReader, TargetReadings
from specray.train.heads.trainer import HeadTrainer, StepConfig
from specray.train.loop import RunState
from specray.train.optim import MasterOptimizer, OptimizerConfig
from tests.unit.engine.features.block import checkpoints as blocks
from tests.unit.engine.features.block.reference import drafted
from tests.unit.engine.features.checkpoints import LAYERS, LLAMA
from tests.unit.train.heads.runs import vary

MASK, NUM_DEPTHS = blocks.MASK_ID, 4
TOKENS = [5, 9, 33, 20, 7, 8, 61, 40, 2, 11]
ROWS = torch.tensor([TOKENS, TOKENS[::-1]])


def llama(num_layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": num_layers}))
    vary(model)
    return model.eval()


@pytest.fixture(scope="module")
def target() -> Any:
    return llama(3, 0)


def new_pard(**changes: Any) -> PardDraft:
    options = {"num_depths": NUM_DEPTHS, "mask_id": MASK, "keep_rate": 0.6, "min_kept": 0.2, "row_len": 10}
    return PardDraft(llama(2, 1), vocab_size=len(llama(1, 0).lm_head.weight), **{**options, **changes})


def new_block(target: Any, *, has_confidence: bool = False) -> BlockHead:
    head = BlockHead(
        target,
        feature_layers=LAYERS,
        num_layers=2,
        num_depths=blocks.SIZE if has_confidence else blocks.SIZE - 1,
        mask_id=MASK,
        has_confidence=has_confidence,
        anchor_share=0.5,
        seed=1,
    )
    vary(head)
    return head


def chosen(head: DraftHead, seed: int = 0) -> list[torch.Tensor]:
    return list(head.trained_anchors(len(TOKENS), torch.Generator().manual_seed(seed)))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def behind_masks(model: Any, tokens: list[int], depth: int) -> torch.Tensor:
    """The last row of a plain forward over some tokens and masks."""
    rows: torch.Tensor = model(input_ids=torch.tensor([[*tokens, *[MASK] * depth]])).logits[0, -1]
    return rows


@torch.no_grad()
@pytest.mark.parametrize("max_masks", [2048, 5])
def test_every_mask_of_every_prefix_is_that_of_a_forward_of_its_own(
    monkeypatch: pytest.MonkeyPatch, max_masks: int
) -> None:
    monkeypatch.setattr(pard_module, "MAX_MASKS", max_masks)
    head = new_pard()
    for anchors in (chosen(head), all_anchors(10, NUM_DEPTHS)):
        found = head.unroll({}, ROWS, anchors)
        for depth, own in enumerate(anchors):
            assert found[depth].logits.shape == (2, len(own), 96)
            for row, tokens in enumerate(ROWS.tolist()):
                for place, anchor in enumerate(own.tolist()):
                    expected = behind_masks(head.module, tokens[: anchor + 2], depth)
                    assert_near(found[depth].logits[row, place], expected)


def test_masks_are_dropped_with_all_that_stand_behind_them() -> None:
    head = new_pard(keep_rate=0.5, min_kept=0.3)
    anchors = [each.tolist() for each in head.trained_anchors(41, torch.Generator().manual_seed(3))]
    assert anchors[0] == list(range(40))
    # Of 40 half, then 0.3; one or two at the end have nothing to be compared with.
    assert [len(each) for each in anchors[1:]] == [19, 12, 11]
    for depth in (1, 2, 3):
        assert set(anchors[depth]) <= set(anchors[depth - 1])
        assert anchors[depth] == sorted(anchors[depth]) and max(anchors[depth]) < 40 - depth
    assert anchors != [each.tolist() for each in head.trained_anchors(41, torch.Generator().manual_seed(4))]


def test_a_draft_that_cannot_be_trained_so_is_refused() -> None:
    windowed = llama(1, 0)
    windowed.config.sliding_window = 13
    options = {"vocab_size": 96, "num_depths": 4, "mask_id": 1, "keep_rate": 1.0, "min_kept": 1.0}
    with pytest.raises(ConfigError, match="sliding_window of 13; allowed: at least 14"):
        PardDraft(windowed, row_len=10, **options)


@torch.no_grad()
@pytest.mark.parametrize("has_confidence", [False, True])
@pytest.mark.parametrize("max_rows", [2048, 10])
def test_every_block_of_a_row_is_that_of_a_forward_of_its_own(
    target: Any, monkeypatch: pytest.MonkeyPatch, max_rows: int, has_confidence: bool
) -> None:
    monkeypatch.setattr(block_module, "MAX_ROWS", max_rows)
    head = new_block(target, has_confidence=has_confidence)
    weights = head.tensors()
    reference = blocks.Block(weights, head.config("t"), weights, first_row=0 if has_confidence else 1)
    features = FeatureReader(target, LAYERS).read(ROWS[:, :-1]).features
    for anchors in (chosen(head), all_anchors(10, head.num_depths)):
        found = head.unroll(features, ROWS, anchors)
        for row, tokens in enumerate(ROWS.tolist()):
            for place, anchor in enumerate(anchors[0].tolist()):
                expected = drafted(target, reference, tokens[: anchor + 2], head.num_depths)
                for depth in range(head.num_depths):
                    if anchor not in anchors[depth].tolist():
                        assert anchor >= 9 - depth
                        continue
                    rows = found[depth]
                    assert_near(rows.logits[row, place], expected.logits[depth])
                    if rows.confidence is not None:
                        chance = float(rows.confidence[row, place].sigmoid())
                        assert chance == pytest.approx(expected.chances[depth], abs=1e-5)


def test_a_share_of_the_anchors_is_trained(target: Any) -> None:
    anchors = chosen(new_block(target))
    assert len(anchors[0]) == 4 and anchors[0].tolist() == sorted(set(anchors[0].tolist()))
    assert [each.tolist() for each in anchors[1:]] == [
        [anchor for anchor in anchors[0].tolist() if anchor < 9 - depth] for depth in (1, 2, 3)
    ]


def trainer_of(target: Any, head: DraftHead, written: Written, config: StepConfig) -> HeadTrainer:
    """Its steps change nothing."""
    reader = FeatureReader(target, head.feature_layers)
    still = OptimizerConfig(matrix_learning_rate=0.0, learning_rate=0.0)
    return HeadTrainer(
        TargetReadings(reader, head.draft_ids, max_bytes=1 << 20),
        head,
        written,
        config,
        MasterOptimizer(head.module, still),
        torch.device("cpu"),
    )


def written_of(ids: Any, *domains: str) -> Written:
    """Rows that are all of answers but token 0."""
    rows = np.array(ids, np.uint16)
    return Written(rows, rows > 0, np.array(domains or ["text"]), np.zeros(len(rows), bool))


def expected_loss(target: Any, head: DraftHead, rows: list[Any], *, has_distance: bool) -> float:
    """The loss of one step written down once more: by depth and token, with decays of 0.8.

    Args:
        rows: of each depth, pairs of an anchor and the logits that are drafted at it, and the confidence.
    """
    logits = target(input_ids=torch.tensor([TOKENS])).logits[0]
    total = 0.0
    for depth, drafted_rows in enumerate(rows):
        losses = []
        for anchor, draft_logits, confidence in drafted_rows:
            probs, log_probs = logits[anchor + 1 + depth].softmax(-1), draft_logits.log_softmax(-1)
            divergence = float((probs * (probs.log() - log_probs)).sum())
            overlap = float(torch.minimum(probs, log_probs.exp()).sum())
            loss = divergence - 0.3 * float(log_probs[int(probs.argmax())])
            loss += (1 - overlap) * has_distance
            if confidence is not None:
                chance = torch.sigmoid(confidence)
                loss -= overlap * float(chance.log()) + (1 - overlap) * float((1 - chance).log())
            losses.append(loss)
        total += 0.8**depth * sum(losses) / len(losses)
    return total / sum(0.8**depth for depth in range(head.num_depths))


@pytest.mark.parametrize("name", ["pard", "block", "confidence"])
@pytest.mark.parametrize("progress", [0.0, 0.7])
def test_the_loss_of_a_step_is_that_of_a_forward_for_each_prefix(
    target: Any, name: str, progress: float
) -> None:
    head: Any = new_pard() if name == "pard" else new_block(target, has_confidence=name == "confidence")
    head.module.eval()
    config = StepConfig(rows_per_step=1, loss=LossConfig(LossKind.KL_TV), seed=2)
    # What a step chooses, it chooses by the seed and its place.
    seed = int(np.random.default_rng((2, 0)).integers(1 << 62))
    anchors = list(head.trained_anchors(9, torch.Generator().manual_seed(seed)))
    with torch.no_grad():
        features = FeatureReader(target, head.feature_layers).read(torch.tensor([TOKENS[:-1]])).features
        found = head.unroll(features, torch.tensor([TOKENS[:-1]]), anchors)
        rows = [
            [
                (int(anchor), each.logits[0, at], None if each.confidence is None else each.confidence[0, at])
                for at, anchor in enumerate(own)
            ]
            for own, each in zip(anchors, found, strict=True)
        ]
        expected = expected_loss(target, head, rows, has_distance=progress >= 0.6)
    trainer = trainer_of(target, head, written_of([TOKENS]), config)
    assert trainer.step(RunState(), progress)["loss"] == pytest.approx(expected, rel=1e-5)


class Tokens:
    """A tokenizer of a given size."""

    all_special_ids = (0, 1)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def test_the_mask_is_a_token_that_is_not_written_and_stays_it(target: Any, tmp_path: Any) -> None:
    written = written_of([[each for each in range(96) if each not in (0, 1, 40, 50)]])

    def made_for(num_tokens: int) -> Target:
        return Target(target, Tokens(num_tokens), None, written, tmp_path, 0)

    assert mask_token("pard", made_for(96), 96, None) == 50
    assert mask_token("pard", made_for(90), 96, None) == 50, "that of the first call"
    assert mask_token("block", made_for(90), 96, None) == 90, "a row without a token"
    assert mask_token("block", made_for(90), 96, 7) == 7
    for wrong in (-1, 96, 1):
        with pytest.raises(ConfigError, match=rf"mask_token is {wrong}; allowed: 0\.\.95 but \[0, 1\]"):
            mask_token("block", made_for(96), 96, wrong)


def test_the_acceptance_is_told_by_domain(target: Any) -> None:
    head = new_block(target)
    written = written_of([TOKENS, TOKENS[::-1], [*TOKENS[1:], 3]], "code", "chat", "code")
    trainer = trainer_of(target, head, written, StepConfig())
    figures = trainer.evaluate(written)
    assert list(trainer.domains) == ["chat", "code"]
    assert [counts[0].num_reached for counts in trainer.domains.values()] == [8, 16]
    reached = sum(counts[0].num_accepted for counts in trainer.domains.values())
    assert figures["held_out_accepted_1"] == reached / 24
    assert {"held_out_tokens_per_round_code", "held_out_tokens_per_round_chat"} < figures.keys()


def test_a_block_takes_the_default_layers_and_a_mask(target: Any, tmp_path: Any) -> None:
    made = Block(num_depths=3).make(Target(target, Tokens(96), None, written_of([range(96)]), tmp_path, 0))
    assert made.feature_layers == (1, 2, 3)
    config = made.config("t")
    assert (config["block_size"], config["dflash_config"]) == (
        4,
        {"mask_token_id": 95, "target_layer_ids": [0, 1, 2]},
    )
