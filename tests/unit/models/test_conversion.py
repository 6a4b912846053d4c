"""GGUF files as checkpoints: the same numbers, the same tokens, or one sentence that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from specray.config import TargetConfig
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.preflight import check_pair
from specray.errors import ConfigError
from specray.models import conversion, space
from specray.models.conversion import convert
from specray.models.gguf.converter import UnfitError, convert_file, main
from specray.tokenization import load_tokenizer
from specray.tokenization.files import has_chat_template
from specray.tokenization.fingerprint import read_vocabulary
from tests.unit.models.tiny_models import (
    CHAT_TEMPLATE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    Recorder,
    tensor_values,
    write_gguf,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model, made by a process of its own."""
    directory = tmp_path_factory.mktemp("models")
    path = write_gguf(directory / "my tiny.gguf", values={"tokenizer.ggml.eot_token_id": 0})
    # Next to the file, but not part of it.
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    listener = Recorder()
    convert(path, directory / "checkpoint", directory / "work", listener, "converting tiny")
    assert {what for what, _, _ in listener.works} == {"converting tiny"}
    return directory / "checkpoint"


def dequantised(seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of the file by their names in GGUF, as bfloat16."""
    result = {}
    for name, value in tensor_values(seed).items():
        if value.ndim > 1:
            packed = gguf.quantize(value, GGMLQuantizationType.Q8_0)
            value = gguf.dequantize(packed, GGMLQuantizationType.Q8_0)
        result[name] = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16)
    return result


def in_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head as transformers orders them; in GGUF the two of each rotary pair are side by side."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(weight.shape)


def test_weights_are_those_of_the_file_in_bfloat16(checkpoint: Path) -> None:
    source = dequantised()
    expected = {"model.embed_tokens.weight": source["token_embd.weight"]}
    expected["model.norm.weight"] = source["output_norm.weight"]
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        expected |= {
            f"{ours}.input_layernorm.weight": source[f"{theirs}.attn_norm.weight"],
            f"{ours}.self_attn.q_proj.weight": in_halves(source[f"{theirs}.attn_q.weight"], HEADS),
            f"{ours}.self_attn.k_proj.weight": in_halves(source[f"{theirs}.attn_k.weight"], KV_HEADS),
            f"{ours}.self_attn.v_proj.weight": source[f"{theirs}.attn_v.weight"],
            f"{ours}.self_attn.o_proj.weight": source[f"{theirs}.attn_output.weight"],
            f"{ours}.post_attention_layernorm.weight": source[f"{theirs}.ffn_norm.weight"],
            f"{ours}.mlp.gate_proj.weight": source[f"{theirs}.ffn_gate.weight"],
            f"{ours}.mlp.up_proj.weight": source[f"{theirs}.ffn_up.weight"],
            f"{ours}.mlp.down_proj.weight": source[f"{theirs}.ffn_down.weight"],
        }
    written = load_file(checkpoint / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor), name


def test_configuration_and_tokenizer_are_those_of_the_file(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == (
        "llama",
        HIDDEN,
        LAYERS,
    )
    assert (config["tie_word_embeddings"], config["vocab_size"], config["eos_token_id"]) == (
        True,
        len(TOKENS),
        1,
    )
    assert "quantization_config" not in config
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("he") == (TOKENS.index("he"),)
    assert tokenizer.eos_token_ids == (0, 1)
    assert (checkpoint / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert has_chat_template(checkpoint)


def test_the_checkpoint_is_one_that_is_served(checkpoint: Path) -> None:
    check_pair(TargetConfig(model=str(checkpoint)), None)
    # Without transformers, whose import takes seconds in each process.
    assert read_decoder_config(json.loads((checkpoint / "config.json").read_text())) is not None
    assert read_vocabulary(checkpoint) is not None


def convert_here(path: Path) -> Path:
    """Converts in this process, in which transformers is there already."""
    directory = path.parent / "alone"
    directory.mkdir()
    source = path.rename(directory / "model.gguf")
    convert_file(source, path.parent / "converted")
    return path.parent / "converted"


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    tensors = tensor_values()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(UnfitError, match=r"1 tensors are missing .*model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_here(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))


def test_a_tensor_without_a_place_is_not_passed_over(tmp_path: Path) -> None:
    tensors = tensor_values() | {"blk.0.attn_q_norm.weight": np.ones(HIDDEN, dtype=np.float32)}
    with pytest.raises(UnfitError, match=f"{HIDDEN} of its numbers have no place in the model"):
        convert_here(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))


def test_the_process_says_in_json_why_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "alone"
    directory.mkdir()
    path = write_gguf(directory / "model.gguf", architecture="clip")
    assert main([str(path), str(tmp_path / "converted")]) == 2
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert told.startswith("its architecture is not read; allowed: gemma2, ")


def ended(returncode: int | None, output: str = "", errors: str = "") -> Any:
    return lambda *_, **__: SimpleNamespace(returncode=returncode, output=output, errors=errors)


@pytest.mark.parametrize(
    ("child", "sentence"),
    [
        (ended(2, '{"error": "so it is"}\n'), "(architecture 'llama') cannot be converted: so it is"),
        (
            ended(1, "noise", "Traceback\nMemoryError\n"),
            "(architecture 'llama') cannot be converted: MemoryError",
        ),
        (ended(-9), "(architecture 'llama') cannot be converted: the converter ended without a word"),
        (ended(None), "was not converted within 3600 s"),
    ],
)
def test_a_failure_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Any, sentence: str
) -> None:
    monkeypatch.setattr(conversion, "run_child", child)
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError) as refused:
        convert(path, tmp_path / "checkpoint", tmp_path / "work", Recorder(), "converting tiny")
    assert str(refused.value) == f"{path} {sentence}"


def test_room_for_the_checkpoint_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ConfigError, match="converting tiny needs 50 MB in "):
        convert(
            write_gguf(tmp_path / "tiny.gguf"),
            tmp_path / "checkpoint",
            tmp_path / "work",
            Recorder(),
            "converting tiny",
        )
