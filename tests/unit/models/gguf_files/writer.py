"""Builds the models of ``families``, and writes them as llama.cpp's converter does, in float32.

``python -m tests.unit.models.gguf_files.writer DIRECTORY`` writes all of them and what llama.cpp is asked,
for ``record_llama_cpp.mjs``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.unit.models.gguf_files.families import HIDDEN, LIGHT_MODELS, MODELS, PROMPT, TinyModel
from tests.unit.models.gguf_files.texts import TEXTS, VOCABULARIES
from tests.unit.models.tiny_models import MERGES, TOKENS, finish

_SHIFTED_NORMS = ("gemma2", "gemma3", "qwen35", "qwen35moe")
"""Architectures whose norms are stored plus one."""


def original(tiny: TinyModel) -> Any:
    """The model in float32, whose weights bfloat16 holds exactly."""
    import transformers

    library: Any = transformers
    values = {key: value for key, value in tiny.config.items() if key != "model_type"}
    config = library.AutoConfig.for_model(tiny.config["model_type"], **json.loads(json.dumps(values)))
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        # Gemma scales its embedding, which is also its head: so large it would be all of the output.
        is_embedding = "gemma" in tiny.architecture and name.endswith("embed_tokens.weight")
        deviation = 0.1 if is_gain else 0.02 if is_embedding else 0.3
        value = draw.normal(0, deviation, tuple(parameter.shape))
        if is_gain and tiny.architecture not in _SHIFTED_NORMS:
            value += 1
        parameter.data = torch.from_numpy(value).to(torch.bfloat16).float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(draw.normal(0, 0.3, tuple(buffer.shape))))
    return model


def write_file(
    path: Path,
    tiny: TinyModel,
    model: Any,
    *,
    header: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the file.

    Args:
        header: keys in place of the model's, without the architecture before them; None as a value: no key.
        tokenizer: keys after ``tokenizer.`` likewise.
    """
    return _write(path, tiny, file_tensors(tiny, model), header, tokenizer)


def _write(
    path: Path,
    tiny: TinyModel,
    tensors: Mapping[str, np.ndarray],
    header: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
) -> Path:
    writer = gguf.GGUFWriter(path, tiny.architecture)
    keys = {f"{tiny.architecture}.{key}": value for key, value in {**tiny.header, **(header or {})}.items()}
    keys |= {f"tokenizer.{key}": value for key, value in {**_tokenizer(), **(tokenizer or {})}.items()}
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    return finish(writer, path)


def write_header(path: Path, tiny: TinyModel, *, header: Mapping[str, Any] | None = None) -> Path:
    """Writes a file with the embedding alone; ``header`` as of :func:`write_file`."""
    rows = np.zeros((tiny.config["vocab_size"], HIDDEN), dtype=np.float32)
    factors = {name: np.array(values, dtype=np.float32) for name, values in tiny.factors.items()}
    return _write(path, tiny, {"token_embd.weight": rows, **factors}, header, None)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key of the type that its value has in Python; None: no key."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tokenizer() -> dict[str, Any]:
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": TOKENS,
        "ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "ggml.merges": MERGES,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
    }


def file_tensors(tiny: TinyModel, model: Any) -> dict[str, np.ndarray]:
    """The tensors by their names in GGUF."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == tiny.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, value in _state(tiny, model):
        base, _, part = name.rpartition(".")
        if (whole := _WHOLE_NAMES.get(name.partition(".layers.")[2].partition(".")[2])) is not None:
            tensors[f"blk.{name.split('.')[2]}.{whole}"] = value.numpy()
            continue
        if part in ("A_log", "dt_bias"):
            base, part = (name, "") if part == "A_log" else (f"{base}.dt_proj", "bias")
        found = names.get_name(base)
        assert found is not None, name
        tensors[f"{found}.{part}".rstrip(".")] = _stored(tiny, found, part, value.numpy())
    for name, factors in tiny.factors.items():
        tensors[name] = np.array(factors, dtype=np.float32)
    return tensors


def _state(tiny: TinyModel, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, those of gate and up of experts apart; a tied head is the embedding."""
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if tiny.architecture == "gpt-oss" and ".experts." in name:
            yield from _of_gpt_oss(name, value)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            layer = name.removesuffix("gate_up_proj")
            yield f"{layer}gate_proj.weight", gate
            yield f"{layer}up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", value
        else:
            yield name, value


def _of_gpt_oss(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts whose weights are transposed, with the outputs of gate and up in turn, and their biases."""
    part = "bias" if name.endswith("_bias") else "weight"
    layer = name.removesuffix("_bias").rpartition(".")[0]
    if "gate_up" in name:
        for each, numbers in (("gate", value[..., ::2]), ("up", value[..., 1::2])):
            yield f"{layer}.{each}_proj.{part}", numbers.transpose(-1, -2) if part == "weight" else numbers
    else:
        yield f"{layer}.down_proj.{part}", value.transpose(-1, -2) if part == "weight" else value


_WHOLE_NAMES = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
}


def _stored(tiny: TinyModel, name: str, part: str, value: np.ndarray) -> np.ndarray:
    if tiny.architecture.startswith("qwen35") and name.endswith(OF_VALUE_HEADS):
        return tiled(tiny, name, -np.exp(value) if name.endswith("ssm_a") else value)
    if tiny.architecture in _SHIFTED_NORMS and name.endswith("norm") and not name.endswith("ssm_norm"):
        return value + 1
    if tiny.architecture == "llama" and name.endswith(("attn_q", "attn_k")):
        heads = tiny.config["num_attention_heads" if name.endswith("q") else "num_key_value_heads"]
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if tiny.architecture == "gpt2" and part == "weight" and name.endswith(_TRANSPOSED):
        return value.T
    return value.squeeze() if name.endswith("shortconv.conv") else value


_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
OF_VALUE_HEADS = (
    "attn_gate",
    "ssm_a",
    "ssm_alpha",
    "ssm_beta",
    "ssm_dt",
    "ssm_out",
    "ssm_conv1d",
    "attn_qkv",
)


def tiled(tiny: TinyModel, name: str, value: np.ndarray) -> np.ndarray:
    """A weight whose value heads are in groups, one for each key head, as llama.cpp orders them: in turn."""
    keys, values = tiny.config["linear_num_key_heads"], tiny.config["linear_num_value_heads"]
    num_before = 0
    if name.endswith(("ssm_conv1d", "attn_qkv")):
        num_before = 2 * keys * tiny.config["linear_key_head_dim"]
    axis = 1 if name.endswith("ssm_out") else 0
    value = value.squeeze() if name.endswith("ssm_conv1d") else value
    size = (value.shape[axis] - num_before) // values
    order = np.arange(values * size).reshape(keys, values // keys, size).swapaxes(0, 1).reshape(-1)
    return np.take(value, np.concatenate((np.arange(num_before), num_before + order)), axis=axis)


def main(directory: Path) -> None:
    """Writes the files, and ``asked.json`` with a prompt or texts for each."""
    asked: dict[str, Any] = {}
    for name, tiny in (MODELS | LIGHT_MODELS).items():
        write_file(directory / f"{name}.gguf", tiny, original(tiny))
        asked[name] = {"prompt": PROMPT[: tiny.prompt_len], "num_tokens": tiny.num_tokens}
    for name, vocabulary in VOCABULARIES.items():
        tiny = vocabulary.model()
        write_file(directory / f"{name}.gguf", tiny, original(tiny), tokenizer=vocabulary.keys())
        asked[name] = {"texts": TEXTS}
    (directory / "asked.json").write_text(json.dumps(asked), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
