"""Decoders of quantised weights on CPU: the weights of each rank, look-ups, and outputs that speculation
does not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")
from specray.config import Config, parse_config
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.cpu.gemm.quantized import check as check_module
from specray.engine.cpu.gemm.quantized.check import check_kernels
from specray.engine.cpu.gemm.quantized.embedding import QuantizedEmbedding
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear, has_kernels
from specray.engine.cpu.gemm.quantized.panels import pack
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.group.parallel import ParallelContext
from specray.engine.inputs import SequenceInput
from specray.engine.model.layers.vocabulary import ShardedEmbedding
from specray.engine.model.lowering import lower
from specray.engine.model.operators_cpu import KernelOperators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import operator_set
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from specray.errors import ConfigError
from specray.types import SamplingParams
from tests.unit.engine.harness import Session, generate_serial
from tests.unit.engine.model.checkpoints import InMemoryWeights, write_checkpoint
from tests.unit.engine.model.quantized.test_formats import CONFIG
from tests.unit.engine.model.test_lowering import rank
from tests.unit.engine.runners import cpu_runner, eager
from tests.unit.engine.trees.drafters import engine_drafter

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no AVX2 here")

CPU = torch.device("cpu")
FORMATS = (Quantization.INT8, Quantization.INT4)
SHAPES = replace(CONFIG, vocab_size=70, intermediate_size=128, num_hidden_layers=1)


def decoder(formats: WeightFormats, parallel: ParallelContext | None = None, *, is_tied: bool = False) -> Any:
    numbers = torch.Generator().manual_seed(0)
    config = replace(SHAPES, tie_word_embeddings=is_tied)
    tensors = {name: torch.randn(shape, generator=numbers) for name, shape in config.weight_shapes().items()}
    operators = operator_set(KernelOperators(torch.float32, 1), formats, torch.float32, CPU)
    return lower(config, InMemoryWeights(tensors), operators, parallel, max_model_len=16), tensors


def matrix(linear: Any) -> torch.Tensor:
    """The weight that a layer multiplies with."""
    found: torch.Tensor = linear(torch.eye(linear.in_features)).T
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_hold_parts_of_the_whole_models_weights(format: Quantization) -> None:
    formats = WeightFormats(format, format, has_quantized_embedding=True)
    whole, tensors = decoder(formats)
    ranks = [decoder(formats, rank(number, 2))[0] for number in range(2)]
    down = quantize(tensors["model.layers.0.mlp.down_proj.weight"], format).dequantized()
    assert torch.equal(matrix(whole.layers[0].down), down)
    assert torch.equal(torch.cat([matrix(one.layers[0].down.local) for one in ranks], 1), down)
    output = matrix(whole.layers[0].output)
    assert torch.equal(torch.cat([matrix(one.layers[0].output.local) for one in ranks], 1), output)
    queries = torch.cat([matrix(one.layers[0].qkv)[:32] for one in ranks])
    assert torch.equal(queries, matrix(whole.layers[0].qkv)[:64])
    assert torch.equal(torch.cat([matrix(one.head.local) for one in ranks]), matrix(whole.head))
    for number, one in enumerate(ranks):
        assert isinstance(one.embedding, ShardedEmbedding)
        assert (one.embedding.first_token_id, one.embedding.num_local_tokens) == (35 * number, 35)
        ids = torch.tensor([34, 0])
        assert torch.equal(one.embedding.local(ids), whole.embedding(ids + 35 * number))
    assert isinstance(whole.layers[0].gate, QuantizedGate)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_look_ups_give_the_dequantised_rows(format: Quantization, dtype: torch.dtype) -> None:
    weight = quantize(torch.randn(70, 96, generator=torch.Generator().manual_seed(2)), format)
    embedding = QuantizedEmbedding(pack(weight, ThreadPool(1)), dtype)
    ids = torch.tensor([0, 31, 32, 69, 5, 5])
    expected = weight.dequantized()[ids].to(dtype)
    assert torch.equal(embedding(ids), expected)
    out = torch.empty(6, 96, dtype=dtype)
    embedding.into(ids, out)
    assert torch.equal(out, expected)
    assert embedding.num_bytes == 3 * 3 * 32 * (34 if format is Quantization.INT8 else 20)


def test_a_tied_embedding_shares_the_heads_weights_only_when_asked() -> None:
    tied, _ = decoder(WeightFormats(Quantization.INT4, Quantization.INT8, True), is_tied=True)
    assert tied.embedding.panels is tied.head.panels[0]
    apart, tensors = decoder(WeightFormats(Quantization.INT4, Quantization.INT8), is_tied=True)
    assert torch.equal(apart.embedding.table, tensors["model.embed_tokens.weight"])
    assert isinstance(apart.head, QuantizedLinear)
    plain, _ = decoder(WeightFormats(Quantization.INT4), is_tied=True)
    assert not isinstance(plain.head, QuantizedLinear)


def test_bytes_are_those_that_were_announced() -> None:
    """Whole panels: 32 output features, which every layer has here, and of 70 tokens the next 96."""
    formats = WeightFormats(Quantization.INT4, Quantization.INT8, True)
    whole, _ = decoder(formats, is_tied=True)
    config = replace(SHAPES, tie_word_embeddings=True, vocab_size=96)
    norms = 3 * 64 * 4
    assert sum(linear.num_bytes for linear in whole.linears()) == formats.num_bytes(config, 4) - norms


def settings(path: Path, **values: object) -> dict[str, object]:
    return {
        "model": str(path),
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "profile_s": 0,
        "max_num_seqs": 2,
        "cache_memory_gib": 0.01,
        **values,
    }


def pair(tmp_path: Path, quantization: str) -> Config:
    target, draft = (
        write_checkpoint(tmp_path / name, "llama", seed=seed, intermediate_size=64, hidden_size=64)
        for name, seed in (("target", 0), ("draft", 1))
    )
    formats = {"quantization": quantization, "lm_head_quantization": "int8", "quantize_embedding": True}
    return parse_config({"target": settings(target, **formats), "draft": settings(draft, **formats)})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_speculation_changes_no_token(tmp_path: Path, quantization: str) -> None:
    """Greedy and seeded, in float32, with a draft of other weights and with the target's own."""
    config = pair(tmp_path, quantization)
    same = config.model_copy(update={"draft": config.draft.model_copy(update={"model": config.target.model})})
    target = build_target_engine(config)
    drafts = [build_draft_engine(one) for one in (config, same)]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    outputs: dict[float, list[int]] = {}
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=7, num_prompt_tokens=len(prompt))
        for number, (draft, num_drafts) in enumerate(
            [(drafts[0], 0), (drafts[0], 1), (drafts[0], 4), (drafts[1], 3), (drafts[1], 7)]
        ):
            session = Session(f"{temperature}-{number}", list(prompt), sampling)
            output = generate_serial(target, engine_drafter(draft), session, 40, num_drafts)
            assert outputs.setdefault(temperature, output) == output, (temperature, number)
            if draft is drafts[1]:
                assert set(session.accepted) == {num_drafts}
            target.release([session.request_id])
            draft.release([session.request_id])
    assert outputs[0.0] != outputs[1.0] and len(set(outputs[1.0])) > 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_give_what_the_forward_gives(tmp_path: Path, dtype: str) -> None:
    path = write_checkpoint(tmp_path, "llama", intermediate_size=64, hidden_size=64)
    formats = {"quantization": "int4", "lm_head_quantization": "int8", "quantize_embedding": True}
    runner = cpu_runner(path, dtype=dtype, max_num_seqs=2, cache_memory_gib=0.01, **formats)
    assert runner.cpu_graphs is not None
    graphs, others = (
        [each.run([SequenceInput([5 + start, 9], start, [0], 2)]).logits for start in range(0, 12, 2)]
        for each in (runner, eager(runner))
    )
    assert torch.equal(torch.cat(graphs), torch.cat(others))


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(Quantization.INT8, torch.float32)
    wrong = torch.tensor(1.1, dtype=torch.float64)
    monkeypatch.setattr(
        QuantizedLinear,
        "precise",
        lambda self, rows: self.plain.run(rows, torch.float32) * wrong,
    )
    check_kernels.cache_clear()
    with pytest.raises(
        ConfigError, match=r"^quantization is 'int8', whose kernel is wrong by 0\.\d+ on this"
    ):
        check_kernels(Quantization.INT8, torch.float32)
    monkeypatch.setattr(check_module, "has_kernels", lambda: False)
    with pytest.raises(ConfigError, match="this processor lacks AVX2, FMA or F16C"):
        check_kernels(Quantization.INT8, torch.float32)
