"""The draft that is trained: a small Llama between two projections of the target's embedding.

A small language model is mostly embeddings. This one has none of its own: it reads the target's, projected to
its width, and it writes through the rows of the same matrix that belong to frequent tokens. What is stored is
the body and the two projections; with the target's checkpoint they become an ordinary one (``completion``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

from specray.train.draft.completion import COMPACT_WEIGHTS, embedding_digest


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Dimensions of a draft's body."""

    hidden_size: int = 384
    num_layers: int = 3
    intermediate_size: int = 960
    num_heads: int = 6
    num_kv_heads: int = 2
    max_position_embeddings: int = 8192
    rope_theta: float = 100_000.0


def _body_config(shape: DraftShape, *, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


class Student(nn.Module):
    """The draft in training, in the type of the target's embedding.

    Args:
        target_embedding: ``[vocab_size, target_hidden_size]``; not trained.
        draft_ids: int64 ``[draft_vocab_size]``: the target's ids that can be proposed.
    """

    def __init__(
        self, shape: DraftShape, target_embedding: torch.Tensor, draft_ids: torch.Tensor, *, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            body = LlamaModel(_body_config(shape, vocab_size=1))
        body.embed_tokens = nn.Identity()  # type: ignore[assignment]
        self.body = body
        read, write = _initial_projections(target_embedding, shape.hidden_size)
        self.embedding_projection = nn.Parameter(read)
        """``[hidden_size, target_hidden_size]``."""
        self.head_projection = nn.Parameter(write)
        """``[target_hidden_size, hidden_size]``."""
        self.register_buffer("target_embedding", target_embedding.detach(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("written_rows", target_embedding.detach()[draft_ids], persistent=False)
        self.to(target_embedding.dtype)

    target_embedding: torch.Tensor
    draft_ids: torch.Tensor
    written_rows: torch.Tensor

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the vectors that the body reads, ``[..., hidden_size]``."""
        return F.linear(F.embedding(token_ids, self.target_embedding), self.embedding_projection)

    def head(self) -> torch.Tensor:
        """Returns the last product's weights, ``[draft_vocab_size, hidden_size]``."""
        return self.written_rows @ self.head_projection

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits ``[num_rows, length, draft_vocab_size]`` of rows of token ids."""
        output = self.body(inputs_embeds=self.embedding(token_ids), use_cache=False)
        return F.linear(output.last_hidden_state, self.head())


def _initial_projections(embedding: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The principal directions of the target's embedding, scaled so that vectors and logits begin near 1."""
    sample = embedding.detach().float()
    _, _, directions = torch.linalg.svd(sample, full_matrices=False)
    kept = directions[:width]
    if len(kept) < width:
        kept = torch.cat((kept, torch.zeros(width - len(kept), kept.shape[1], device=kept.device)))
    spread = float((sample @ kept.T).std())
    return kept / spread, (kept / (spread * width**0.5)).T.contiguous()


def write_compact(student: Student, directory: Path, card: Mapping[str, Any]) -> None:
    """Writes the body, the two projections, the ids, and ``training.json`` with the card of the training."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in student.body.state_dict().items()}
    tensors["embedding_projection"] = student.embedding_projection
    tensors["head_projection"] = student.head_projection
    stored = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    stored["draft_ids"] = student.draft_ids.to("cpu", torch.int32)
    save_file(stored, directory / COMPACT_WEIGHTS)
    vocab_size, width = student.target_embedding.shape
    config = _body_config(student.shape, vocab_size=vocab_size).to_dict()
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "draft_vocab_size": len(student.draft_ids),
        "target_embedding": {
            "shape": [vocab_size, width],
            "sha256": embedding_digest(student.target_embedding),
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (directory / "training.json").write_text(json.dumps(dict(card), indent=1) + "\n", "utf-8")
