"""Latent attention: what the cache holds of a token, and that queries in the latents' space give the same."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.engine.attention.latent import from_latent, keep_latents, keeps_latents, to_latent
from specray.engine.model.hf_forward import HfForward
from specray.engine.step import CacheShape, LayerShape
from tests.unit.engine.model.checkpoints import family_config
from tests.unit.engine.model.zoo import FAMILIES


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family_config(FAMILIES[name])).eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_the_cache_holds_a_latent_and_a_rotated_part_for_all_heads(name: str) -> None:
    """12 + 4 numbers of a token, not 4 heads of 12 for the key and 6 for the value."""
    forward = HfForward(model_of(name))
    assert forward.cache_shape == CacheShape.of_layers([LayerShape(1, 16, 0)] * 2)
    assert forward.cache_shape.num_numbers == 2 * 16


def test_a_projection_with_a_bias_is_expanded_as_the_library_does() -> None:
    """The latents alone do not tell what it adds."""
    model = model_of("deepseek_v3")
    layer = model.model.layers[1].self_attn
    layer.kv_b_proj = torch.nn.Linear(12, 4 * (8 + 6), bias=True).requires_grad_(False)
    forward = HfForward(model)
    assert forward.cache_shape.layers == (LayerShape(1, 16, 0), LayerShape(4, 12, 6))


def test_scores_and_values_are_those_of_expanded_keys() -> None:
    module = model_of("deepseek_v3").model.layers[0].self_attn
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 4, 12, generator=generator)
    latents, rotated = (torch.randn(1, 1, 5, size, generator=generator) for size in (12, 4))
    keys, values = module.expand_kv(latents, rotated)
    joined = torch.cat((latents, rotated), dim=-1)[0, 0]
    scores = torch.einsum("rhk,tk->rht", to_latent(module, query), joined)
    torch.testing.assert_close(scores, torch.einsum("rhk,htk->rht", query, keys[0]), atol=1e-5, rtol=0)
    attended = torch.einsum("rht,tl->rhl", scores, latents[0, 0])
    expected = torch.einsum("rht,htv->rhv", scores, values[0])
    torch.testing.assert_close(from_latent(module, attended), expected, atol=1e-4, rtol=0)
    assert not keeps_latents(module)
    keep_latents(module)
    assert keeps_latents(module)
