"""Gives a Llama model the cost of a mixture of experts, and leaves its function as it is.

What the model computes stays in one place: its MLP becomes the shared expert of a Qwen2-MoE layer, whose gate
of zeros halves the doubled output. The routed experts read the rows with random weights and write zeros, so a
sum with theirs has the bits of the MLP's alone, whatever is chosen. Which experts a row chooses differs from
token to token, as in a trained mixture: the router reads the residual stream, in directions taken from text.
Rows next to each other choose alike where these directions change slowly (slow feature analysis, Wiskott and
Sejnowski 2002).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig

from specray.errors import ConfigError

MAX_EXPERTS: Final = 4096
_MULTIPLE: Final = 32
"""Multiple of an expert's width: what quantised weights and kernels take."""
_MIN_DIRECTIONS: Final = 8
"""Directions that a router reads, at least."""
_WINDOW: Final = 512
"""Tokens of a text that is read at once."""
_SPREAD: Final = 2.0
"""Standard deviation of the router's logits."""


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The experts of each layer. Raises ConfigError for what cannot be."""

    num_experts: int
    num_chosen: int
    """Experts that compute a row, besides the shared one."""
    share: float
    """Numbers of the chosen experts among all that a step of one row reads."""
    neighbours: float = 0.0
    """Narrowness in 0..1: at 0 a router reads all directions of the stream, at 1 the slowest alone."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_experts <= MAX_EXPERTS:
            raise ConfigError(f"experts: {self.num_experts} is outside 2 .. {MAX_EXPERTS}")
        if not 1 <= self.num_chosen < self.num_experts:
            raise ConfigError(f"chosen: {self.num_chosen} is outside 1 .. {self.num_experts - 1}")
        if not 0.0 < self.share < 1.0:
            raise ConfigError(f"share: {self.share} is not between 0 and 1")
        if not 0.0 <= self.neighbours <= 1.0:
            raise ConfigError(f"neighbours: {self.neighbours} is outside 0 .. 1")


@dataclass(frozen=True, slots=True)
class MixtureFigures:
    """What came of a shape."""

    intermediate_size: int
    """Width of each expert."""
    share: float
    """Share as of ``MixtureShape``, with that width."""
    hit: tuple[tuple[int, float], ...]
    """Neighbouring rows, and the experts that they hit together in multiples of one row's, in text that the
    router was not made from."""


def save_mixture(
    model: LlamaForCausalLM, directory: Path, shape: MixtureShape, token_ids: torch.Tensor, *, seed: int = 0
) -> MixtureFigures:
    """Writes a Qwen2-MoE checkpoint with the model's function, without tokenizer.

    Args:
        token_ids: text from which the routers are made, ``[num_tokens]``, at least four times the model's
            hidden size.

    Raises:
        ConfigError: the model has biases, or the text is too short.
    """
    config = model.config
    if config.attention_bias or config.mlp_bias:
        raise ConfigError("source: has biases; allowed for a mixture: a model without")
    if len(token_ids) < 4 * config.hidden_size:
        needed = 4 * config.hidden_size
        raise ConfigError(f"text: has {len(token_ids)} tokens; allowed: {needed} or more for this width")
    generator = torch.Generator().manual_seed(seed)
    size = _expert_size(model, shape)
    rows = read_rows(model, token_ids)
    half = rows.shape[1] // 2
    routers = [_router(each[:half].double(), shape, generator) for each in rows]
    chosen = [
        (each[half:].double() @ router.T).topk(shape.num_chosen).indices
        for each, router in zip(rows, routers, strict=True)
    ]
    tensors = dict(_tensors(model, shape, size, routers, generator))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _config(config, shape, size, model.dtype).save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    routed = config.num_hidden_layers * shape.num_chosen * 3 * config.hidden_size * size
    hit = tuple((count, _hit(chosen, count) / shape.num_chosen) for count in (2, 4, 8))
    return MixtureFigures(size, routed / (routed + _num_dense(model)), hit)


def read_rows(model: LlamaForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """What the MLP of each layer is given of a text, ``[num_layers, num_tokens, hidden_size]``, float32."""
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]

    def note(index: int) -> Any:
        return lambda _, inputs: seen[index].append(inputs[0][0].float())

    hooks = [
        layer.mlp.register_forward_pre_hook(note(index)) for index, layer in enumerate(model.model.layers)
    ]
    try:
        with torch.no_grad():
            for window in torch.split(token_ids, _WINDOW):
                model.model(window[None])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([torch.cat(each) for each in seen])


def _num_dense(model: LlamaForCausalLM) -> int:
    """Numbers that a step of one row reads besides routed experts; an embedding counts if it is the head."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total if model.config.tie_word_embeddings else total - model.model.embed_tokens.weight.numel()


def _expert_size(model: LlamaForCausalLM, shape: MixtureShape) -> int:
    config = model.config
    per_width = config.num_hidden_layers * shape.num_chosen * 3 * config.hidden_size
    wanted = shape.share / (1 - shape.share) * _num_dense(model) / per_width
    return max(_MULTIPLE, round(wanted / _MULTIPLE) * _MULTIPLE)


def _router(rows: torch.Tensor, shape: MixtureShape, generator: torch.Generator) -> torch.Tensor:
    """A router's weight ``[num_experts, hidden_size]`` over the directions that change most slowly."""
    mean = rows.mean(0)
    apart = rows - mean
    size = rows.shape[1]
    spread = apart.T @ apart / len(rows)
    spread += 1e-4 * spread.diagonal().mean() * torch.eye(size, dtype=rows.dtype)
    root = torch.linalg.cholesky(spread)
    white = torch.linalg.solve_triangular(root, apart.T, upper=False)
    changes = white[:, 1:] - white[:, :-1]
    # Eigenvalues ascend: the slowest come first.
    _, directions = torch.linalg.eigh(changes @ changes.T / len(rows))
    kept = max(min(_MIN_DIRECTIONS, size), round((1 - shape.neighbours) * size))
    read = torch.linalg.solve_triangular(root.T, directions[:, :kept], upper=True)
    weight = torch.randn(shape.num_experts, kept, generator=generator, dtype=rows.dtype) @ read.T
    # No expert is chosen more often for what all rows have in common.
    weight -= (weight @ mean)[:, None] * mean / mean.dot(mean).clamp(min=1e-12)
    router: torch.Tensor = weight * (_SPREAD / (apart @ weight.T).std())
    return router


def _hit(chosen: list[torch.Tensor], count: int) -> float:
    """Distinct experts of ``count`` neighbours, on average over layers and places."""
    found = []
    for each in chosen:
        groups = each[: len(each) // count * count].reshape(-1, count * each.shape[1]).sort(-1).values
        found.append(1 + (groups[:, 1:] != groups[:, :-1]).sum(-1).double().mean())
    return float(torch.stack(found).mean())


def _tensors(
    model: LlamaForCausalLM,
    shape: MixtureShape,
    size: int,
    routers: list[torch.Tensor],
    generator: torch.Generator,
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, dtype = model.config.hidden_size, model.dtype
    is_tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and is_tied:
            continue
        if ".mlp." not in name:
            yield name, weight.contiguous()
    for index, layer in enumerate(model.model.layers):
        prefix, mlp = f"model.layers.{index}.mlp.", layer.mlp
        yield f"{prefix}gate.weight", routers[index].to(dtype)
        yield f"{prefix}shared_expert_gate.weight", torch.zeros(1, hidden, dtype=dtype)
        yield f"{prefix}shared_expert.gate_proj.weight", mlp.gate_proj.weight.detach()
        yield f"{prefix}shared_expert.up_proj.weight", mlp.up_proj.weight.detach()
        yield f"{prefix}shared_expert.down_proj.weight", 2 * mlp.down_proj.weight.detach()
        for expert in range(shape.num_experts):
            for name in ("gate_proj", "up_proj"):
                weight = torch.randn(size, hidden, generator=generator).mul_(0.02).to(dtype)
                yield f"{prefix}experts.{expert}.{name}.weight", weight
            yield f"{prefix}experts.{expert}.down_proj.weight", torch.zeros(hidden, size, dtype=dtype)


def _config(config: LlamaConfig, shape: MixtureShape, size: int, dtype: torch.dtype) -> Qwen2MoeConfig:
    num_heads = config.num_attention_heads
    # The library takes a head's size, and does not declare it.
    head: dict[str, Any] = {"head_dim": config.head_dim or config.hidden_size // num_heads}
    return Qwen2MoeConfig(
        architectures=["Qwen2MoeForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=config.num_key_value_heads or num_heads,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=config.rope_parameters,
        qkv_bias=False,
        decoder_sparse_step=1,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=config.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_chosen,
        norm_topk_prob=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **head,
    )
