"""Reads the sizes that all families have in a GGUF header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specray.gguf.header import LongArray
from specray.models.gguf.keys import Keys, UnfitError

Config = dict[str, Any]
"""What config.json says."""

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model."""

    num_layers: int
    context: int
    """Tokens of the longest sequence."""
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding."""
    is_tied: bool
    """The head's weight is the embedding's."""
    token_ids: dict[str, int | None]
    """Special tokens by their names in config.json."""


def read_sizes(keys: Keys, *, num_kv_heads: int | None = None, mlp_size: int | None = None) -> Sizes:
    """Reads the sizes, and checks them with the shape of the embedding.

    Args:
        num_kv_heads: of a family that says it in its own way; None: as most do.
        mlp_size: likewise.

    Raises:
        UnfitError: one is missing or wrong.
    """
    hidden = keys.whole("embedding_length")
    heads = keys.whole("attention.head_count")
    if num_kv_heads is None:
        num_kv_heads = keys.whole("attention.head_count_kv", heads)
    if heads % num_kv_heads:
        raise keys.unfit("attention.head_count", heads, f"a multiple of {num_kv_heads}, its key-value heads")
    head_dim = keys.whole("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", head_dim)
    return Sizes(
        num_layers=keys.whole("block_count"),
        context=keys.whole("context_length"),
        hidden_size=hidden,
        mlp_size=keys.whole("feed_forward_length") if mlp_size is None else mlp_size,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(keys, hidden),
        is_tied=not keys.has_tensor(_OUTPUT),
        token_ids={name: _token_id(keys, key) for name, key in _TOKEN_IDS.items()},
    )


def sizes_of(sizes: Sizes) -> Config:
    """The sizes by the names that most families have for them in config.json."""
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.mlp_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": sizes.is_tied,
        **sizes.token_ids,
    }


def rms_norm_eps(keys: Keys, name: str = "rms_norm_eps") -> Config:
    return {name: keys.number("attention.layer_norm_rms_epsilon", above=-1e-12)}


def layer_norm_eps(keys: Keys, name: str) -> Config:
    return {name: keys.number("attention.layer_norm_epsilon", above=-1e-12)}


def _vocab_size(keys: Keys, hidden_size: int) -> int:
    embedding = keys.header.tensor(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] != hidden_size:
        shape = None if embedding is None else list(embedding.shape)
        raise UnfitError(f"the tensor {_EMBEDDING!r} has the shape {shape}; allowed: {hidden_size} by tokens")
    rows = embedding.shape[1]
    keys.expect("vocab_size", rows)
    tokens = keys.header.values.get(_TOKENS)
    if not isinstance(tokens, LongArray) or not 1 <= tokens.count <= rows:
        found = tokens.count if isinstance(tokens, LongArray) else 0
        raise UnfitError(f"{_TOKENS} lists {found} tokens; allowed: 1 to {rows}, as the embedding has")
    return rows


def _token_id(keys: Keys, key: str) -> int | None:
    """Id of a special token. Raises UnfitError for one that is no token."""
    value = keys.header.values.get(key)
    tokens = keys.header.values[_TOKENS]
    assert isinstance(tokens, LongArray)
    if value is None or (type(value) is int and 0 <= value < tokens.count):
        return value if isinstance(value, int) else None
    raise UnfitError(f"{key} is {value!r}; allowed: 0 to {tokens.count - 1}")
