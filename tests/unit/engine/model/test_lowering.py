"""The decoder is built from a configuration and its weights: each taken once, by each rank in its part."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.group.parallel import ParallelContext
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.decoder_config import DecoderConfig, RopeFormula
from specray.engine.model.description import ModelArgs
from specray.engine.model.layers.vocabulary import GatheredHead, ShardedEmbedding, TableEmbedding
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.model.lowering import lower
from specray.engine.model.operators_torch import TorchOperators
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import InMemoryWeights, changing_tensors, write_checkpoint

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=7,
    hidden_size=8,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    rms_norm_eps=1e-6,
    max_position_embeddings=16,
    tie_word_embeddings=False,
    has_qkv_bias=True,
    has_output_bias=True,
    has_mlp_bias=True,
    has_head_norm=True,
    windows=(None, 3),
    rope=RopeFormula(10_000.0),
)


@dataclass
class Recorder:
    """Weights of ones, and which were taken."""

    config: DecoderConfig
    taken: Counter[str] = field(default_factory=Counter)
    parts: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        self.taken[name] += 1
        if part is not None:
            self.parts[name] = (part.dim, part.start, part.stop)
        ones = {name: torch.ones(shape) for name, shape in self.config.weight_shapes().items()}
        return InMemoryWeights(ones).take(name, part)

    def stored(self, name: str, part: WeightPart | None = None) -> None:
        """All are plain."""


def rank(number: int, world_size: int) -> ParallelContext:
    context: Any = object.__new__(ParallelContext)
    context.rank, context.world_size = number, world_size
    built: ParallelContext = context
    return built


def build(config: DecoderConfig, weights: Any, parallel: ParallelContext | None = None) -> Any:
    return lower(config, weights, TorchOperators(torch.float32), parallel, max_model_len=16)


def test_every_weight_is_taken_once() -> None:
    recorder = Recorder(CONFIG)
    forward = build(CONFIG, recorder)
    assert recorder.taken == dict.fromkeys(CONFIG.weight_shapes(), 1)
    assert recorder.parts == {}
    assert [layer.window for layer in forward.layers] == [None, 3]


def test_what_stays_as_it_is_is_a_copy() -> None:
    """The files may be replaced while the model serves."""
    tensors = {name: torch.ones(shape) for name, shape in CONFIG.weight_shapes().items()}
    forward = build(CONFIG, InMemoryWeights(tensors))
    for tensor in tensors.values():
        tensor.zero_()
    layer = forward.layers[0]
    norms = (layer.input_norm, layer.head_norm, layer.post_attention_norm, forward.final_norm)
    kept = [forward.embedding.table, *(norm.weight for norm in norms)]
    gate = layer.gate.linear
    kept += [layer.qkv.bias, layer.output.bias, layer.down.bias, gate.bias]
    kept += [layer.qkv.weight, layer.output.weight, layer.down.weight, gate.weight]
    assert [float(tensor.min()) for tensor in kept] == [1.0] * 13


def test_ranks_take_rows_columns_and_runs_of_an_uneven_vocabulary() -> None:
    recorder = Recorder(CONFIG)
    forward = build(CONFIG, recorder, rank(1, 2))
    assert recorder.taken == dict.fromkeys(CONFIG.weight_shapes(), 1)
    layer = {
        name.removeprefix("model.layers.1."): part
        for name, part in recorder.parts.items()
        if ".layers.1." in name
    }
    assert layer == {
        "self_attn.q_proj.weight": (0, 4, 8),
        "self_attn.q_proj.bias": (0, 4, 8),
        "self_attn.k_proj.weight": (0, 2, 4),
        "self_attn.k_proj.bias": (0, 2, 4),
        "self_attn.v_proj.weight": (0, 2, 4),
        "self_attn.v_proj.bias": (0, 2, 4),
        "self_attn.o_proj.weight": (1, 4, 8),
        "mlp.gate_proj.weight": (0, 3, 6),
        "mlp.gate_proj.bias": (0, 3, 6),
        "mlp.up_proj.weight": (0, 3, 6),
        "mlp.up_proj.bias": (0, 3, 6),
        "mlp.down_proj.weight": (1, 3, 6),
    }
    assert recorder.parts["lm_head.weight"] == recorder.parts["model.embed_tokens.weight"] == (0, 4, 7)
    assert isinstance(forward.embedding, ShardedEmbedding) and forward.embedding.first_token_id == 4
    assert isinstance(forward.head, GatheredHead)
    assert forward.layers[0].head_norm.weight.shape == (3, 2)
    # As torch.chunk deals them.
    runs = [recorder_part(number, 4) for number in range(4)]
    assert [stop - start for _, start, stop in runs] == [len(run) for run in torch.arange(7).chunk(4)]


@pytest.mark.parametrize("parallel", [None, rank(0, 2), rank(1, 2)])
def test_joined_weights_are_those_apart(parallel: ParallelContext | None) -> None:
    numbers = torch.Generator().manual_seed(1)
    apart = {name: torch.randn(shape, generator=numbers) for name, shape in CONFIG.weight_shapes().items()}
    joined = {name: tensor for name, tensor in apart.items() if not re.search(r"[qkv]_proj|gate_|up_", name)}
    for layer in range(CONFIG.num_hidden_layers):
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{layer}."
            queries = [apart[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            halves = [apart[f"{prefix}mlp.{name}_proj.{kind}"] for name in ("gate", "up")]
            joined[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(queries)
            joined[f"{prefix}mlp.gate_up_proj.{kind}"] = torch.cat(halves)
    config = replace(CONFIG, has_joined_queries=True, has_joined_gates=True)
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == config.weight_shapes()
    rows = torch.randn(3, CONFIG.hidden_size, generator=numbers)
    layers = [
        build(kind, InMemoryWeights(weights), parallel).layers[1]
        for kind, weights in ((CONFIG, apart), (config, joined))
    ]
    assert torch.equal(layers[0].qkv(rows), layers[1].qkv(rows))
    assert torch.equal(layers[0].gate(rows), layers[1].gate(rows))


def recorder_part(number: int, world_size: int) -> tuple[int, int, int]:
    config = DecoderConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__slots__}
        | {"num_key_value_heads": 4, "intermediate_size": 8}
    )
    recorder = Recorder(config)
    build(config, recorder, rank(number, world_size))
    return recorder.parts["lm_head.weight"]


def load(path: Path) -> DecoderSource:
    source = load_model(ModelArgs(str(path)), dtype=torch.float32, device=CPU).source
    assert isinstance(source, DecoderSource)
    return source


def test_names_of_a_model_without_its_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    expected = build(load(path).config, load(path).weights)
    with changing_tensors(path) as tensors:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
    forward = build(load(path).config, load(path).weights)
    assert isinstance(forward.embedding, TableEmbedding)
    assert torch.equal(forward.embedding.table, expected.embedding.table)


def test_tied_head_that_lies_alone_in_the_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    table = load(path).weights.take("model.embed_tokens.weight")
    with changing_tensors(path) as tensors:
        del tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table
    source = load(path)
    assert source.config.tie_word_embeddings
    assert torch.equal(source.weights.take("model.embed_tokens.weight"), table)


@pytest.mark.parametrize("is_same", [True, False])
def test_tied_head_beside_the_embedding(tmp_path: Path, is_same: bool) -> None:
    """What the files say counts, not the configuration."""
    path = write_checkpoint(tmp_path, "llama")
    table = load(path).weights.take("model.embed_tokens.weight")
    head = table.clone() if is_same else table + 1.0
    with changing_tensors(path) as tensors:
        tensors["lm_head.weight"] = head
    source = load(path)
    assert source.config.tie_word_embeddings is is_same
    assert torch.equal(source.weights.take("lm_head.weight"), head)


def test_tied_model_without_either(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    with changing_tensors(path) as tensors:
        del tensors["model.embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"lacks weights: lm_head\.weight, model\.embed_tokens\.weight$"):
        load(path)


def test_weights_of_another_shape_are_named_with_both(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    with changing_tensors(path) as tensors:
        tensors["model.norm.weight"] = torch.ones(31)
    with pytest.raises(
        ConfigError,
        match=r"cannot be loaded: weights are of another shape: model\.norm\.weight is \[31\], "
        r"its configuration says \[32\]$",
    ):
        load(path)
