"""Makes a bigger Llama checkpoint that computes the same function as a small one.

Benchmarks get the cost of a big target with the acceptance of a real pair. What is added reads the
residual stream with random weights and writes zeros to it, so the added dimensions of the stream stay
zero. A root mean square over `D` dimensions of which `d` can be non-zero is `sqrt(d / D)` times the one
over those `d`: norm weights shrink by that factor and epsilon by its square.
"""

import copy
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specray.errors import ConfigError
from specray.gguf.light import check_has_safetensors
from specray.train.hybrid import HybridShape, save_hybrid
from specray.train.mixture import MixtureFigures, MixtureShape, save_mixture

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json")
_MAX_VALUES = {
    "hidden_size": 65_536,
    "num_layers": 1_024,
    "intermediate_size": 262_144,
    "num_heads": 1_024,
    "num_kv_heads": 1_024,
}


@dataclass(frozen=True, slots=True)
class InflatedShape:
    """The dimensions to reach; head dimension, vocabulary and positions stay those of the source."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, source: Path, **wanted: int | None) -> "InflatedShape":
        """The source's own dimensions, but for those that are not None. Raises ConfigError."""
        own = _dimensions(_load_config(source))
        return cls(**own | {name: value for name, value in wanted.items() if value is not None})


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Places of the old heads among the new ones.

    `query_heads[i]` is the new place of old query head `i`; `kv_heads[j]` is the old head that new
    key/value head `j` copies, or None where it is random.
    """

    query_heads: tuple[int, ...]
    kv_heads: tuple[int | None, ...]


def inflate_checkpoint(
    source: Path,
    destination: Path,
    shape: InflatedShape,
    *,
    dtype: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    mixture: MixtureShape | None = None,
    hybrid: HybridShape | None = None,
    text_files: Sequence[Path] = (),
) -> MixtureFigures | None:
    """Writes at `destination` a checkpoint of `shape` with the logits of the Llama checkpoint `source`.

    In float32 the logits agree to 1e-4. In a shorter `dtype` (default: the source's own) the scaled norm
    weights are rounded once more, which is exact only where `hidden_size` grows by a power of four.

    Args:
        device: draws random numbers and rounds weights; billions of them take minutes on a CPU.
        mixture: experts that each layer has besides, as a Qwen2-MoE checkpoint; None: none, as Llama.
        hybrid: recurrent layers before each layer, as a Granite 4 checkpoint; None: none, as Llama.
        text_files: text for the mixture's routers; empty: the source of this package.

    Returns:
        What came of the mixture; None: there is none.

    Raises:
        ConfigError: `source` is no Llama checkpoint, `shape` cannot hold it, `dtype` is unknown, a text
            cannot be read, both a mixture and a hybrid are asked for, or `destination` already has files.
    """
    if mixture is not None and hybrid is not None:
        raise ConfigError("experts and recurrent: both are given; allowed: one of them")
    check_has_safetensors(str(source), "inflating")
    config = _load_config(source)
    _check_shape(config, shape)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"destination: {destination} already exists and is not an empty directory")
    small: Any = LlamaForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    with torch.device(device):
        big = inflate_model(small.to(device), shape, dtype=DTYPES[dtype] if dtype else small.dtype, seed=seed)
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    figures = None
    if mixture is None and hybrid is None:
        big.save_pretrained(partial)
    nn.Module.to(big, "cpu")
    if hybrid is not None:
        save_hybrid(big, partial, hybrid, seed=seed)
    if mixture is not None:
        figures = save_mixture(big, partial, mixture, _token_ids(source, text_files), seed=seed)
    for file in _companion_files(source, written=partial):
        shutil.copyfile(file, partial / file.name)
    if destination.exists():
        destination.rmdir()
    partial.rename(destination)
    return figures


def _token_ids(source: Path, text_files: Sequence[Path]) -> torch.Tensor:
    files = text_files or sorted(Path(__file__).parent.glob("*.py"))
    try:
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: cannot be read as UTF-8: {error}") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True)
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def inflate_model(
    small: LlamaForCausalLM, shape: InflatedShape, *, dtype: torch.dtype, seed: int = 0
) -> LlamaForCausalLM:
    """The inflated model in memory; see `inflate_checkpoint`. Raises ConfigError for impossible shapes."""
    _check_shape(small.config, shape)
    layout = place_heads(small.config, shape)
    big = _new_model(_inflated_config(small.config, shape), dtype=dtype, seed=seed)
    with torch.no_grad():
        _fill(big, small, layout)
    return big


def place_heads(config: LlamaConfig, shape: InflatedShape) -> HeadLayout:
    """Gives each old key/value head as many new ones as its query heads need.

    New query head `j` reads new key/value head `j // (num_heads / num_kv_heads)`.
    """
    old_kv_heads = _num_kv_heads(config)
    old_group = config.num_attention_heads // old_kv_heads
    new_group = shape.num_heads // shape.num_kv_heads
    copies = math.ceil(old_group / new_group)
    kv_heads = [old for old in range(old_kv_heads) for _ in range(copies)]
    query_heads = tuple(
        (head // old_group) * copies * new_group + head % old_group
        for head in range(config.num_attention_heads)
    )
    unused = shape.num_kv_heads - len(kv_heads)
    return HeadLayout(query_heads, (*kv_heads, *[None] * unused))


def _load_config(source: Path) -> LlamaConfig:
    if not (source / "config.json").is_file():
        raise ConfigError(f"source: {source} is not a checkpoint directory (no config.json)")
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    if not isinstance(config, LlamaConfig):
        raise ConfigError(f"source: model_type {config.model_type!r} in {source}; only 'llama' is known")
    return config


def _dimensions(config: LlamaConfig) -> dict[str, int]:
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": _num_kv_heads(config),
    }


def _check_shape(config: LlamaConfig, shape: InflatedShape) -> None:
    smallest = _dimensions(config)
    for name, value in asdict(shape).items():
        if not smallest[name] <= value <= _MAX_VALUES[name]:
            allowed = f"{smallest[name]} (the source's) .. {_MAX_VALUES[name]}"
            raise ConfigError(f"{name}: {value} is outside {allowed}")
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(f"num_kv_heads: {shape.num_kv_heads} does not divide num_heads {shape.num_heads}")
    old_group = config.num_attention_heads // _num_kv_heads(config)
    copies = math.ceil(old_group * shape.num_kv_heads / shape.num_heads)
    needed = _num_kv_heads(config) * copies
    if shape.num_kv_heads < needed:
        raise ConfigError(
            f"num_kv_heads: {shape.num_kv_heads} is too few for num_heads {shape.num_heads}: the source's "
            f"{old_group} query heads per key/value head need at least {needed} of this group size"
        )


def _inflated_config(config: LlamaConfig, shape: InflatedShape) -> LlamaConfig:
    inflated = copy.deepcopy(config)
    inflated.head_dim = _head_dim(config)
    inflated.hidden_size = shape.hidden_size
    inflated.num_hidden_layers = shape.num_layers
    inflated.intermediate_size = shape.intermediate_size
    inflated.num_attention_heads = shape.num_heads
    inflated.num_key_value_heads = shape.num_kv_heads
    inflated.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    return inflated


def _num_kv_heads(config: LlamaConfig) -> int:
    return int(config.num_key_value_heads or config.num_attention_heads)


def _head_dim(config: LlamaConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _new_model(config: LlamaConfig, *, dtype: torch.dtype, seed: int) -> LlamaForCausalLM:
    """Makes a model with the library's random initialisation, without touching the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    nn.Module.to(model, dtype)
    model.train(False)
    return model


def _fill(big: LlamaForCausalLM, small: LlamaForCausalLM, layout: HeadLayout) -> None:
    head_dim = _head_dim(small.config)
    query_rows = _rows(layout.query_heads, head_dim)
    _widen_embedding(big.model.embed_tokens, small.model.embed_tokens)
    _widen_norm(big.model.norm, small.model.norm)
    if not small.config.tie_word_embeddings:
        _copy_rows(big.lm_head, small.lm_head, torch.arange(small.config.vocab_size))
    for index, layer in enumerate(big.model.layers):
        if index >= len(small.model.layers):
            _silence(layer.self_attn.o_proj)
            _silence(layer.mlp.down_proj)
            continue
        old = small.model.layers[index]
        _widen_norm(layer.input_layernorm, old.input_layernorm)
        _widen_norm(layer.post_attention_layernorm, old.post_attention_layernorm)
        _copy_rows(layer.self_attn.q_proj, old.self_attn.q_proj, query_rows)
        _copy_kv_heads(layer.self_attn.k_proj, old.self_attn.k_proj, layout, head_dim)
        _copy_kv_heads(layer.self_attn.v_proj, old.self_attn.v_proj, layout, head_dim)
        _copy_output(layer.self_attn.o_proj, old.self_attn.o_proj, query_rows)
        intermediate = torch.arange(small.config.intermediate_size)
        _copy_rows(layer.mlp.gate_proj, old.mlp.gate_proj, intermediate)
        _copy_rows(layer.mlp.up_proj, old.mlp.up_proj, intermediate)
        _copy_output(layer.mlp.down_proj, old.mlp.down_proj, intermediate)


def _rows(heads: tuple[int, ...], head_dim: int) -> torch.Tensor:
    """Returns the row numbers of `heads` in a projection, [len(heads) * head_dim]."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _widen_embedding(new: nn.Embedding, old: nn.Embedding) -> None:
    new.weight.zero_()
    new.weight[:, : old.embedding_dim] = old.weight.to(new.weight.dtype)


def _widen_norm(new: Any, old: Any) -> None:
    """Copies the old entries; the added ones keep their initial value, since they scale zeros."""
    old_size, new_size = old.weight.numel(), new.weight.numel()
    new.weight[:old_size] = (old.weight.double() * math.sqrt(old_size / new_size)).to(new.weight.dtype)


def _copy_rows(new: nn.Linear, old: nn.Linear, rows: torch.Tensor) -> None:
    """Copies old outputs to `rows`; the added inputs are zero, so their random weights may stay."""
    new.weight[rows, : old.in_features] = old.weight.to(new.weight.dtype)
    if old.bias is not None:
        new.bias[rows] = old.bias.to(new.bias.dtype)


def _copy_kv_heads(new: nn.Linear, old: nn.Linear, layout: HeadLayout, head_dim: int) -> None:
    for new_head, old_head in enumerate(layout.kv_heads):
        if old_head is None:
            continue
        to_rows = slice(new_head * head_dim, (new_head + 1) * head_dim)
        from_rows = slice(old_head * head_dim, (old_head + 1) * head_dim)
        new.weight[to_rows, : old.in_features] = old.weight[from_rows].to(new.weight.dtype)
        if old.bias is not None:
            new.bias[to_rows] = old.bias[from_rows].to(new.bias.dtype)


def _copy_output(new: nn.Linear, old: nn.Linear, columns: torch.Tensor) -> None:
    """Fills a projection into the residual stream: the old one's output from `columns`, else zero."""
    _silence(new)
    # Integer and slice indices mix badly in assignments; so a block of whole columns is copied first.
    block = torch.zeros(new.out_features, len(columns), dtype=new.weight.dtype)
    block[: old.out_features] = old.weight.to(new.weight.dtype)
    new.weight.index_copy_(1, columns, block)
    if old.bias is not None:
        new.bias[: old.out_features] = old.bias.to(new.bias.dtype)


def _silence(projection: nn.Linear) -> None:
    projection.weight.zero_()
    if projection.bias is not None:
        projection.bias.zero_()


def _companion_files(source: Path, *, written: Path) -> Iterator[Path]:
    """Yields tokenizer, chat template and generation configuration: all files without weights."""
    present = {file.name for file in written.iterdir()} - {"generation_config.json"}
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in present and not file.name.endswith(_WEIGHT_SUFFIXES):
            yield file
