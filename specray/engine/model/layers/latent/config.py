"""Sizes of latent attention (MLA), and the names of its weights. Read without torch."""

from __future__ import annotations

from dataclasses import dataclass

QUERY_DOWN = "self_attn.q_a_proj"
QUERY_NORM = "self_attn.q_a_layernorm.weight"
QUERY_UP = "self_attn.q_b_proj"
QUERY = "self_attn.q_proj"
LATENT_DOWN = "self_attn.kv_a_proj_with_mqa"
LATENT_NORM = "self_attn.kv_a_layernorm.weight"
LATENT_UP = "self_attn.kv_b_proj"
NORM_EPS = 1e-6
"""Number under the root of both norms, as all families have it, whatever that of the other norms."""

_OPERATIONS_PER_BYTE = 1.9
"""FLOP of a head per byte: 2 x (576 + 512) for the 1,152 bytes of a token in bfloat16."""
_OPERATIONS_PER_BYTE_READ = 295.0
"""FLOP that a device does while it reads a byte; an H100's by its data sheet, 989 TFLOP/s and 3.35 TB/s."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are made of one latent for all heads (DeepSeek-V2, 2024).

    A head's key is ``[W_k latent | rotated]``, with one rotated part for all heads, and its value
    ``W_v latent``. A decoder's ``head_dim`` is the size of the rotated part, and it has one kv head.
    """

    latent_dim: int
    plain_dim: int
    """Numbers of a query head that are not rotated."""
    value_dim: int
    query_rank: int | None
    """Numbers that queries are made of; None: they are made of the hidden state."""
    latent_factor: float = 1.0
    """Factor of the normed latent."""

    @staticmethod
    def row_share(num_heads: int, *, is_on_cpu: bool) -> float:
        """Share of what reading a context takes that each further row of a sequence adds.

        A row computes about two operations for each byte of a context and each head. A CPU waits for them at
        one row, a GPU at as many as it can do while it reads a byte.
        """
        return 1.0 if is_on_cpu else min(1.0, _OPERATIONS_PER_BYTE * num_heads / _OPERATIONS_PER_BYTE_READ)

    def weight_shapes(
        self, hidden: int, num_heads: int, rotated_dim: int, *, has_bias: bool, has_output_bias: bool
    ) -> dict[str, tuple[int, ...]]:
        """A layer's weights by name; ``has_bias``: of the projections that read the hidden state."""
        shapes: dict[str, tuple[int, ...]] = {}
        num_queries = num_heads * (self.plain_dim + rotated_dim)
        if self.query_rank is None:
            shapes[f"{QUERY}.weight"] = (num_queries, hidden)
        else:
            shapes[f"{QUERY_DOWN}.weight"] = (self.query_rank, hidden)
            shapes[QUERY_NORM] = (self.query_rank,)
            shapes[f"{QUERY_UP}.weight"] = (num_queries, self.query_rank)
            if has_bias:
                shapes[f"{QUERY_DOWN}.bias"] = (self.query_rank,)
        shapes[f"{LATENT_DOWN}.weight"] = (self.latent_dim + rotated_dim, hidden)
        if has_bias:
            shapes[f"{LATENT_DOWN}.bias"] = (self.latent_dim + rotated_dim,)
        shapes[LATENT_NORM] = (self.latent_dim,)
        shapes[f"{LATENT_UP}.weight"] = (num_heads * (self.plain_dim + self.value_dim), self.latent_dim)
        shapes["self_attn.o_proj.weight"] = (hidden, num_heads * self.value_dim)
        if has_output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        return shapes
