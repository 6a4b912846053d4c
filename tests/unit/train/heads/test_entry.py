"""How heads begin: features of like sizes, a last norm like the target's, its embedding as scaled there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from specray.train.heads.block import BlockHead
from specray.train.heads.layer import FeatureEntry, final_norm, layer_shape
from specray.train.heads.peagle import ParallelEagleHead
from specray.train.heads.target import FeatureReader, usual_sizes

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ROWS = torch.tensor([[1, 5, 9, 13], [2, 6, 10, 14]])


@pytest.fixture(scope="module")
def gemma() -> Any:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)).eval()
    nn.init.normal_(model.get_decoder().norm.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    nn.init.normal_(model.get_decoder().norm.weight, mean=2.0)
    return model


def test_the_written_weights_are_for_features_as_they_are(llama: Any) -> None:
    torch.manual_seed(0)
    sizes = torch.rand(64) * 30 + 0.1
    entry = FeatureEntry(layer_shape(llama.config), 2, sizes)
    features = [torch.randn(3, 5, 32) * part for part in sizes.split(32)]
    plain = nn.functional.linear(torch.cat(features, -1), entry.written())
    assert torch.allclose(entry.join(features), plain, atol=1e-5)
    # What enters has numbers of size one each, and so what leaves does not grow with the features.
    assert 0.3 < float(entry.join(features).detach().std()) < 0.9


def test_sizes_are_medians_which_no_single_token_moves(llama: Any) -> None:
    reader = FeatureReader(llama, (1, 2))
    sizes = usual_sizes(reader, (1, 2), ROWS)
    both = [torch.cat(list(reader.read(ROWS).features[layer])) for layer in (1, 2)]
    expected = torch.cat([rows.abs().median(0).values for rows in both])
    assert torch.allclose(sizes, expected.clamp(min=0.01 * float(expected.median())), rtol=1e-4)


def test_a_heads_last_norm_begins_in_the_targets_proportions_whatever_way_it_keeps_its_gains(
    llama: Any, gemma: Any
) -> None:
    for model, offset in ((llama, 0.0), (gemma, 1.0)):
        gains = offset + model.get_decoder().norm.weight.detach()
        found = final_norm(model, layer_shape(model.config)).weight
        assert torch.allclose(found, gains / gains.abs().mean(), atol=1e-4)


def test_a_norm_that_takes_off_the_mean_is_not_taken_over(llama: Any) -> None:
    kept = llama.model.norm
    try:
        llama.model.norm = nn.LayerNorm(32)
        nn.init.constant_(llama.model.norm.bias, 3.0)
        assert torch.equal(final_norm(llama, layer_shape(llama.config)).weight, torch.ones(32))
    finally:
        llama.model.norm = kept


def test_a_block_reads_the_embedding_as_the_target_scales_it(gemma: Any) -> None:
    head = BlockHead(
        gemma, feature_layers=(1,), num_layers=1, num_depths=2, mask_id=95, has_confidence=False,
        anchor_share=1.0, seed=0,
    )  # fmt: skip
    entering: list[torch.Tensor] = []
    head.layers[0].input_layernorm.register_forward_pre_hook(lambda _, given: entering.append(given[0]))
    features = {1: FeatureReader(gemma, (1,)).read(ROWS).features[1]}
    head.unroll(features, ROWS, [torch.tensor([0]), torch.tensor([0])])
    ids = torch.tensor([[[token, 95, 95]] for token in ROWS[:, 1].tolist()])
    assert torch.equal(entering[0], gemma.get_input_embeddings()(ids))
    assert not torch.allclose(entering[0], nn.functional.embedding(ids, gemma.get_input_embeddings().weight))
    assert "embed" not in " ".join(name for name, _ in head.named_parameters())


def test_what_a_head_with_masks_writes_drafts_from_features_as_they_are(llama: Any) -> None:
    def new_head(sizes: torch.Tensor | None) -> ParallelEagleHead:
        return ParallelEagleHead(
            llama, torch.arange(96), feature_layers=(1, 2), num_depths=3, mask_id=95, keep_rate=1.0,
            min_kept=1.0, seed=0, sizes=sizes,
        )  # fmt: skip

    trained, plain = new_head(torch.rand(64) * 30 + 0.1), new_head(None)
    written = trained.tensors()
    written["unembedding"] = written.pop("lm_head.weight")
    own = {name for name, _ in plain.named_parameters()}
    plain.load_state_dict({name: written[name] for name in own}, strict=False)
    read = FeatureReader(llama, (1, 2)).read(ROWS).features
    features = {layer: 20 * rows[:, :-1] for layer, rows in read.items()}
    with torch.no_grad():
        drafted, expected = (
            head.unroll(features, ROWS, [torch.arange(3 - depth) for depth in range(3)])
            for head in (plain, trained)
        )
    for found, rows in zip(drafted, expected, strict=True):
        assert torch.allclose(found.logits, rows.logits, atol=1e-4)
