"""Weights of light checkpoints are the file's, for each family, in whole and in parts, or refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from specray.config import EngineConfig
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.description import ModelArgs, describe
from specray.engine.model.loader import DecoderSource, LoadedModel, load_model
from specray.engine.model.lowering import lower
from specray.engine.model.operators import cpu_operators
from specray.engine.model.quantized import operator_set
from specray.engine.model.quantized.formats import PLAIN, WeightFormats
from specray.engine.model.quantized.operator_set import has_own_kernels
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.engine.weights.quantization import Quantization
from specray.errors import ConfigError
from specray.train.heads.loading import loaded as trainable
from tests.unit.engine.model.checkpoint import light
from tests.unit.engine.model.checkpoint.light import (
    FAMILIES,
    Choose,
    random_blocks,
    warnings_of,
    write_light,
    write_random,
)
from tests.unit.engine.model.test_lowering import rank
from tests.unit.models.gguf_files.families import MODELS, PROMPT

pytestmark = pytest.mark.skipif(
    not has_own_kernels(torch.device("cpu"), torch.float32), reason="no kernels for a file's own bits here"
)
CPU = torch.device("cpu")
QUERY, VALUE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
DOWN, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
OUT = "model.layers.0.linear_attn.out_proj.weight"
ATOL = 1e-3
"""Largest difference of a logit from that of transformers, both in float32; a logit's deviation is 4."""


def of_one(kind: Type) -> Choose:
    return lambda name: kind


def mixed(name: str) -> Type:
    """As files for few bits have it: values and the second MLP matrix finer than the others."""
    if name.endswith("ffn_down_shexp.weight"):
        # Its inputs are no whole blocks.
        return Type.F16
    if name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "token_embd.weight")):
        return Type.Q8_0
    return Type.Q5_0 if name.endswith("attn_q.weight") else Type.Q5_1


def loaded(
    path: Path, dtype: torch.dtype = torch.float32, formats: WeightFormats | None = None
) -> LoadedModel:
    args = ModelArgs(str(path), role="target", formats=formats or WeightFormats())
    return load_model(args, dtype=dtype, device=CPU)


def source(path: Path, dtype: torch.dtype = torch.float32) -> DecoderSource:
    found = loaded(path, dtype).source
    assert isinstance(found, DecoderSource)
    return found


def built(path: Path, **settings: Any) -> ModelRunner:
    values = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "num_threads": 1}
    return build_runner(EngineConfig(model=str(path), **(values | settings)), role="target")


def served_logits(path: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    runner = built(path, **settings)
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(len(tokens))
    return runner.run([SequenceInput(tokens, 0, table.block_ids, len(tokens))]).logits


@torch.inference_mode()
def library_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("weights", ["auto", "dtype"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_computes_what_the_files_numbers_mean(name: str, weights: str, tmp_path: Path) -> None:
    model = write_light(tmp_path / "light", name, mixed)
    tokens = list(PROMPT)
    expected, found = (
        library_logits(model, tokens),
        served_logits(tmp_path / "light", tokens, weights=weights),
    )
    assert float((found - expected).abs().max()) < ATOL
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_heads_that_lie_in_another_order_stay_in_their_bits_where_no_block_is_cut(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The outputs of recurrent layers, by heads of 32; heads of 16 are dequantised, and a line says so."""
    tiny = MODELS["qwen35"]
    sizes = {"linear_value_head_dim": 32}
    wide = replace(tiny, config={**tiny.config, **sizes}, header={**tiny.header, "ssm.inner_size": 128})
    monkeypatch.setitem(light._ALL, "wide", wide)
    model = write_light(tmp_path / "wide", "wide", of_one(kind))
    own = source(tmp_path / "wide").weights.stored(OUT)
    assert own is not None and torch.equal(own.values(), model.state_dict()[OUT])
    tokens = list(PROMPT)
    found = served_logits(tmp_path / "wide", tokens)
    assert float((found - library_logits(model, tokens)).abs().max()) < ATOL
    write_light(tmp_path / "narrow", "qwen35", of_one(kind))
    assert source(tmp_path / "narrow").weights.stored(OUT) is None
    assert "lie in another order in the file" in caplog.text


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0])
def test_every_weight_is_the_library_s(kind: Type, tmp_path: Path) -> None:
    """Llama's queries and keys lie in another order in the file."""
    model = write_light(tmp_path / "light", "llama", of_one(kind))
    weights = source(tmp_path / "light").weights
    for name, expected in model.state_dict().items():
        assert torch.equal(weights.take(name), expected), name
        stored = weights.stored(name)
        assert (stored is None) == (expected.ndim == 1 or kind in (Type.F32, Type.BF16))
        if stored is not None:
            assert torch.equal(stored.values(), expected), name


@pytest.mark.parametrize("name", [QUERY, DOWN])
def test_parts_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    weights = source(tmp_path / "light").weights
    whole = weights.take(name)
    rows, columns = WeightPart(0, 16, 48), WeightPart(1, 32, 64)
    for part, expected in ((rows, whole[16:48]), (columns, whole[:, 32:64])):
        stored = weights.stored(name, part)
        assert stored is not None and torch.equal(stored.values(), expected)
        assert torch.equal(weights.take(name, part), expected)


def test_columns_within_a_block_are_numbers_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    weights = source(tmp_path / "light").weights
    part = WeightPart(1, 0, 48)
    with caplog.at_level(logging.WARNING):
        assert weights.stored(DOWN, part) is None and weights.stored(DOWN, part) is None
    assert torch.equal(weights.take(DOWN, part), weights.take(DOWN)[:, :48])
    (record,) = warnings_of(caplog)
    assert f"{DOWN} and maybe others are dequantised to dtype: a rank's 48 input" in record.message


KINDS = {
    "attn_q": Type.Q4_K,
    "attn_k": Type.Q5_K,
    "attn_v": Type.Q6_K,
    "attn_output": Type.IQ4_XS,
    "ffn_gate": Type.Q4_K,
    "ffn_up": Type.Q5_K,
    "ffn_down": Type.Q6_K,
    "token_embd": Type.Q6_K,
    "output": Type.IQ4_NL,
}


def test_super_blocks_are_the_gguf_library_s(tmp_path: Path) -> None:
    numbers = write_random(tmp_path / "light", KINDS)
    weights = source(tmp_path / "light").weights
    for name, stored in (
        (QUERY, "blk.0.attn_q.weight"),
        (VALUE, "blk.1.attn_v.weight"),
        (DOWN, "blk.1.ffn_down.weight"),
        (EMBEDDING, "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
    ):
        found = weights.stored(name)
        assert found is not None
        np.testing.assert_array_equal(found.values().numpy(), numbers[stored])
        assert torch.equal(weights.take(name), found.values())


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    write_random(tmp_path / "light", KINDS)
    own = loaded(tmp_path / "light", torch.bfloat16)
    plain = loaded(tmp_path / "light", torch.bfloat16, WeightFormats(has_own_bits=False))
    assert own.stored_formats == ("iq4_nl", "iq4_xs", "q4_k", "q5_k", "q6_k")
    assert plain.stored_formats == ()
    anew = loaded(tmp_path / "light", torch.bfloat16, WeightFormats(layers=Quantization.INT8))
    assert anew.stored_formats == ("iq4_nl", "q6_k")  # The head and the embedding.
    reader = gguf.GGUFReader(tmp_path / "light" / "model.gguf")
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    vectors = sum(int(tensor.n_elements) for tensor in reader.tensors if len(tensor.shape) == 1)
    assert own.num_weight_bytes == sum(int(tensor.n_bytes) for tensor in matrices) + 2 * vectors
    assert plain.num_weight_bytes == 2 * (sum(int(tensor.n_elements) for tensor in matrices) + vectors)


def test_vectors_keep_digits_that_bfloat16_has_not(tmp_path: Path) -> None:
    """Gemma's norms are stored with their one, and taken as they are."""
    write_light(tmp_path / "light", "gemma3", of_one(Type.Q8_0))
    found = source(tmp_path / "light", torch.bfloat16)
    assert not found.config.has_shifted_norms
    norm = found.weights.take("model.norm.weight")
    (stored,) = [
        torch.from_numpy(tensor.data.copy())
        for tensor in gguf.GGUFReader(tmp_path / "light" / "model.gguf").tensors
        if tensor.name == "output_norm.weight"
    ]
    assert norm.dtype == torch.float32 and torch.equal(norm, stored)


def test_halves_that_bfloat16_rounds_are_told_once_where_no_kernel_holds_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.F16))
    with caplog.at_level(logging.WARNING):
        source(tmp_path / "light", torch.bfloat16).weights.take(DOWN)
    assert warnings_of(caplog) == []  # The maker's numbers are bfloat16's.
    for name in ("blk.1.ffn_down.weight", "blk.1.ffn_up.weight"):
        change_first_bytes(tmp_path / "light", name, np.float16(1.0009765625).tobytes())
    weights = source(tmp_path / "light", torch.bfloat16).weights
    with caplog.at_level(logging.WARNING):
        weights.take(DOWN)
        weights.take("model.layers.1.mlp.up_proj.weight")
    (record,) = warnings_of(caplog)
    assert (
        f"{DOWN} and maybe others are float16 and are rounded to dtype, which is bfloat16" in record.message
    )
    assert source(tmp_path / "light").weights.take(DOWN)[0, 0] == 1.0009765625
    # In their own bits nothing is rounded, in either type.
    for dtype in (torch.bfloat16, torch.float32):
        own = source(tmp_path / "light", dtype).weights.stored(DOWN)
        assert own is not None and own.values()[0, 0] == 1.0009765625


def change_first_bytes(directory: Path, name: str, content: bytes) -> None:
    """Writes the first bytes of a tensor anew."""
    file = directory / "model.gguf"
    (tensor,) = [one for one in gguf.GGUFReader(file).tensors if one.name == name]
    written, start = bytearray(file.read_bytes()), int(tensor.data_offset)
    written[start : start + len(content)] = content
    file.write_bytes(written)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Type.Q2_K,
            r"'blk.0.attn_q.weight' is of type 10; allowed: f32, f16, bf16, q4_0, .*specray models conv",
        ),
        (Type.Q4_K, r"'blk.0.attn_q.weight' of type 'q4_k' has rows of 64; allowed: multiples of 256"),
    ],
)
def test_types_that_are_not_read_are_refused(kind: Type, message: str, tmp_path: Path) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    file = tmp_path / "light" / "model.gguf"
    content = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    # The number of dimensions, two of them, and the type follow a name.
    at = content.index(name) + len(name) + 4 + 16
    file.write_bytes(content[:at] + int(kind).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ConfigError, match=message):
        source(tmp_path / "light")


def test_a_scale_that_is_not_finite_is_refused_by_the_weight_s_name(tmp_path: Path) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    change_first_bytes(tmp_path / "light", "blk.1.attn_v.weight", np.float16(np.inf).tobytes())
    weights = source(tmp_path / "light").weights
    for read in (weights.stored, weights.take):
        with pytest.raises(ConfigError, match=f"{VALUE}' holds NaN or infinite"):
            read(VALUE)


def test_a_missing_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    file = tmp_path / "light" / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"))
    with pytest.raises(ConfigError, match=r"lacks weights: model.layers.1.mlp.up_proj.weight"):
        source(tmp_path / "light")


def test_forward_hf_and_training_need_safetensors(tmp_path: Path) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    with pytest.raises(ConfigError, match="which forward hf does not read; allowed: what `specray models"):
        describe(ModelArgs(str(tmp_path / "light"), role="target", forward="hf"))
    with pytest.raises(ConfigError, match="which training does not read"):
        trainable(str(tmp_path / "light"), torch.float32, role="target")


def test_quantised_anew_is_what_the_file_s_numbers_give(tmp_path: Path) -> None:
    """int8's groups hold those of Q8_0 exactly."""
    pytest.importorskip("numba")
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    tokens = list(PROMPT)
    anew = served_logits(tmp_path / "light", tokens, quantization="int8", lm_head_quantization="int8")
    plain = served_logits(tmp_path / "light", tokens, weights="dtype")
    assert float((anew - plain).abs().max()) < ATOL


def lowered(found: DecoderSource, number: int = 0, world_size: int = 1, **options: Any) -> Any:
    operators = operator_set.operator_set(cpu_operators(torch.float32, 1), PLAIN, torch.float32, CPU)
    parallel = None if world_size == 1 else rank(number, world_size)
    return lower(found.config, found.weights, operators, parallel, max_model_len=16, **options)


@pytest.mark.parametrize("name", ["llama", "phi3-longrope", "gemma3", "qwen3moe"])
def test_ranks_share_each_layer_of_a_file(name: str, tmp_path: Path) -> None:
    """Input features of half of the heads are whole blocks, those of half of an MLP of 96 are none."""
    write_light(tmp_path / "light", name, mixed)
    found = source(tmp_path / "light")
    whole = lowered(found)
    first, second = (lowered(found, number, 2) for number in range(2))
    hidden, width = found.config.hidden_size, found.config.num_attention_heads * found.config.head_dim
    rows, inner = torch.linspace(-1, 1, 2 * hidden).view(2, -1), torch.linspace(-1, 1, 2 * width).view(2, -1)
    for layer in range(found.config.num_hidden_layers):
        output, one, two = (forward.layers[layer].output for forward in (whole, first, second))
        if name == "gemma3":
            output, one, two = (each.linear for each in (output, one, two))
        parts = [
            half.local(piece.contiguous()) for half, piece in zip((one, two), inner.chunk(2, 1), strict=True)
        ]
        torch.testing.assert_close(sum(parts), output(inner), rtol=1e-4, atol=1e-4)
        qkv, *halves = (forward.layers[layer].qkv(rows) for forward in (whole, first, second))
        counts = (width, *(2 * [found.config.num_key_value_heads * found.config.head_dim]))
        shares = [half.split([count // 2 for count in counts], 1) for half in halves]
        both = [torch.cat(pair, 1) for pair in zip(*shares, strict=True)]
        torch.testing.assert_close(torch.cat(both, 1), qkv, rtol=1e-4, atol=1e-4)
    logits = [forward.head.local.precise(rows) for forward in (first, second)]
    torch.testing.assert_close(torch.cat(logits, 1), whole.head.precise(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_trimmed_head_has_some_rows_of_the_file_s(name: str, tmp_path: Path) -> None:
    """Gemma's head is its embedding."""
    write_light(tmp_path / "light", name, mixed)
    found = source(tmp_path / "light")
    rows = torch.linspace(-1, 1, 2 * found.config.hidden_size).view(2, -1)
    ids = torch.tensor([7, 2, 40, 3])
    whole, trimmed = lowered(found), lowered(found, head_rows=ids)
    assert torch.equal(trimmed.head.precise(rows), whole.head.precise(rows)[:, ids])


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_forwards_of_own_bits_are_captured(name: str, tmp_path: Path) -> None:
    write_light(tmp_path / "light", name, mixed)
    runner = built(tmp_path / "light", dtype="bfloat16")
    assert runner.cpu_graphs is not None
    assert runner.info.number_format == "bfloat16 with weights in q5_0, q5_1, q8_0"


def test_what_is_loaded_and_how_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    with caplog.at_level(logging.INFO, "specray.engine.model.loader"):
        loaded(tmp_path / "light")
    with caplog.at_level(logging.INFO, "specray.engine.model.loader"):
        loaded(tmp_path / "light", formats=WeightFormats(has_own_bits=False))
    (record,) = caplog.records
    assert record.message.endswith("0 MiB of weights stay in q8_0")


def test_without_kernels_numbers_are_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_light(tmp_path / "light", "llama", of_one(Type.Q8_0))
    monkeypatch.setattr("specray.engine.model.loader.has_own_kernels", lambda *_: False)
    with caplog.at_level(logging.INFO, "specray.engine.model.loader"):
        found = loaded(tmp_path / "light").source
    assert isinstance(found, DecoderSource) and found.weights.stored(QUERY) is None
    (record,) = caplog.records
    assert record.message.endswith("are dequantised to float32: no kernels for them here")


def test_random_blocks_cover_their_types() -> None:
    draw = np.random.default_rng(1)
    for kind in set(KINDS.values()):
        values = gguf.quants.dequantize(random_blocks(kind, (2, 256), draw), kind)
        assert np.isfinite(values).all() and values.std() > 0
