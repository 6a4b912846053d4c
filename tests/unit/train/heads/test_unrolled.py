"""The unrolled forward of training, against one that drafts step by step; what is read of the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from specray.errors import ConfigError
from specray.train.heads.base import all_anchors, default_layers
from specray.train.heads.eagle import EagleHead
from specray.train.heads.peagle import ParallelEagleHead
from specray.train.heads.target import FeatureReader
from tests.unit.engine.features.checkpoints import DRAFT_IDS, LLAMA
from tests.unit.engine.features.reference import hidden_states, layer, norm
from tests.unit.train.heads.runs import vary

NUM_DEPTHS = 4
TOKENS = [5, 9, 33, 20, 7, 8, 61, 40, 2, 11]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_hidden_layers": 3}, attn_implementation="eager"))
    vary(model)
    return model.eval()


def new_head(model: Any) -> EagleHead:
    ids = torch.tensor(DRAFT_IDS)
    head = EagleHead(model, ids, feature_layers=(1, 2, 3), num_depths=NUM_DEPTHS, seed=1)
    vary(head)
    return head


def outputs(
    weights: dict[str, torch.Tensor], model: Any, token_ids: list[int], features: torch.Tensor
) -> torch.Tensor:
    """What leaves the head's layer, for each token with its feature."""
    embedded = model.get_input_embeddings().weight[torch.tensor(token_ids)]
    normed = norm(features, weights["layers.0.hidden_norm.weight"])
    entering = torch.cat((norm(embedded, weights["layers.0.input_layernorm.weight"]), normed), -1)
    return layer(weights, "layers.0.", entering, features)


def stepwise(head: EagleHead, model: Any, anchor: int, num_depths: int) -> list[torch.Tensor]:
    """Logits behind the true features of the tokens up to ``anchor``, one draft token after the other."""
    weights = {name.replace("midlayer.", "layers.0."): each for name, each in head.tensors().items()}
    states = hidden_states(model, TOKENS[: anchor + 1])
    features = F.linear(torch.cat([states[index] for index in (1, 2, 3)], -1), weights["fc.weight"])
    logits = []
    for depth in range(num_depths):
        rows = outputs(weights, model, TOKENS[1 : anchor + 2 + depth], features)
        logits.append(F.linear(norm(rows[-1], weights["norm.weight"]), weights["lm_head.weight"]))
        features = torch.cat((features, rows[-1:]))
    return logits


@torch.no_grad()
@pytest.mark.parametrize("max_masks", [2048, 7])
def test_every_mask_behind_every_anchor_is_that_of_a_forward_of_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch, max_masks: int
) -> None:
    monkeypatch.setattr("specray.train.heads.pard.MAX_MASKS", max_masks)
    head = ParallelEagleHead(
        model,
        torch.tensor(DRAFT_IDS),
        feature_layers=(1, 2, 3),
        num_depths=NUM_DEPTHS,
        mask_id=17,
        keep_rate=0.6,
        min_kept=0.2,
        seed=1,
    )
    vary(head)
    ids = torch.tensor([TOKENS, TOKENS[::-1]])
    features = FeatureReader(model, head.feature_layers).read(ids[:, :-1]).features
    kept = list(head.trained_anchors(10, torch.Generator().manual_seed(0)))
    assert [len(each) for each in kept[1:]] != [8, 7, 6], "some are dropped"
    for anchors in (kept, all_anchors(10, NUM_DEPTHS)):
        unrolled = [each.logits for each in head.unroll(features, ids, anchors)]
        for depth, own in enumerate(anchors):
            assert unrolled[depth].shape == (2, len(own), len(DRAFT_IDS))
            for place, anchor in enumerate(own.tolist()):
                expected = behind_masks(head, model, anchor, depth)
                found = unrolled[depth][0, place]
                assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def behind_masks(head: ParallelEagleHead, model: Any, anchor: int, num_masks: int) -> torch.Tensor:
    """Logits of the last row of a forward over the entries up to an anchor, and some masks."""
    weights = {name.replace("midlayer.", "layers.0."): each for name, each in head.tensors().items()}
    states = hidden_states(model, TOKENS[: anchor + 1])
    joined = torch.cat([states[index] for index in (1, 2, 3)], -1)
    joined = torch.cat((joined, weights["mask_hidden"][0].expand(num_masks, -1)))
    features = F.linear(joined, weights["fc.weight"])
    rows = outputs(weights, model, [*TOKENS[1 : anchor + 2], *[17] * num_masks], features)
    return F.linear(norm(rows[-1], weights["norm.weight"]), weights["lm_head.weight"])


@torch.no_grad()
def test_every_depth_of_every_anchor_is_what_is_drafted_step_by_step(model: Any) -> None:
    head = new_head(model)
    ids = torch.tensor([TOKENS, TOKENS[::-1]])
    features = FeatureReader(model, head.feature_layers).read(ids[:, :-1]).features
    unrolled = [each.logits for each in head.unroll(features, ids, all_anchors(10, NUM_DEPTHS))]
    assert [tuple(each.shape) for each in unrolled] == [(2, count, len(DRAFT_IDS)) for count in (9, 8, 7, 6)]
    for anchor in range(9):
        num_depths = min(NUM_DEPTHS, 9 - anchor)
        for depth, expected in enumerate(stepwise(head, model, anchor, num_depths)):
            found = unrolled[depth][0, anchor]
            assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_the_last_residual_is_read_before_the_final_norm_and_behind_it(model: Any) -> None:
    rows = FeatureReader(model, (0, 3, 4)).read(torch.tensor([TOKENS]))
    expected = hidden_states(model, TOKENS)
    for index in (0, 3, 4):
        assert torch.equal(rows.features[index][0], expected[index])
    assert not torch.equal(expected[3], expected[4])


def test_layers_that_the_target_does_not_have_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"layers are \[5\]; allowed: 0\.\.3"):
        FeatureReader(model, (5,))


def test_default_layers_are_those_that_a_checkpoint_without_ids_means() -> None:
    assert [default_layers(count) for count in (36, 7)] == [(2, 18, 33), (2, 3, 4)]
    assert [default_layers(count) for count in (6, 5, 3, 2, 1)] == [
        (1, 3, 6),
        (1, 3, 5),
        (1, 2, 3),
        (1, 2),
        (1,),
    ]
