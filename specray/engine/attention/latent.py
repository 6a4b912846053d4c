"""Latent attention (MLA): the cache holds each token's latent, from which a layer makes keys and values.

A head's key is ``[latent @ W_k, rotated]`` and its value ``latent @ W_v``, with one latent and one rotated
part for all heads. Since ``q . (latent @ W_k) = (q @ W_k^T) . latent``, queries are taken to the latent's
space, attend there with one kv head, whose values are the latents themselves, and what comes out is taken
back::

    stored for a token:   [ latent | rotated ]        kv_lora_rank + qk_rope_head_dim numbers

The library's layers make keys and values in their method ``expand_kv``; it is replaced here by one that
leaves latents and rotated parts as they are, so that they reach the attention function.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_latents(model: torch.nn.Module) -> None:
    """Has every layer of latent attention hand its latents to the attention function."""
    for module in model.modules():
        if _can_keep(module):
            module.expand_kv = _unexpanded  # type: ignore[assignment]


def keeps_latents(module: torch.nn.Module) -> bool:
    """Whether a layer hands latents, and rotated parts as its values, to the attention function."""
    return getattr(module, "expand_kv", None) is _unexpanded


def to_latent(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries ``[num_rows, num_heads, nope + rope]`` as those of the latents' space.

    Returns:
        ``[num_rows, num_heads, kv_lora_rank + rope]``.
    """
    plain, rotated = query.tensor_split((module.qk_nope_head_dim,), dim=-1)
    of_keys, _ = _weights(module)
    return torch.cat((torch.einsum("rhn,hnl->rhl", plain, of_keys), rotated), dim=-1)


def from_latent(module: Any, attended: torch.Tensor) -> torch.Tensor:
    """Values ``[num_rows, num_heads, v_head_dim]`` of attended latents, ``[num_rows, num_heads, rank]``."""
    _, of_values = _weights(module)
    return torch.einsum("rhl,hvl->rhv", attended, of_values)


def _unexpanded(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent, rotated


def _can_keep(module: Any) -> bool:
    names = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not all(hasattr(module, name) for name in names):
        return False
    expansion = module.kv_b_proj
    # One of another kind, or shared over ranks in its own way, expands what it is given.
    return (
        type(expansion) is torch.nn.Linear
        and expansion.bias is None
        and type(expansion.weight.data) is torch.Tensor
    )


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = module.qk_nope_head_dim, module.v_head_dim
    by_head = module.kv_b_proj.weight.view(-1, sum(sizes), module.kv_lora_rank)
    of_keys, of_values = by_head.split(sizes, dim=1)
    return of_keys, of_values
