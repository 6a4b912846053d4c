"""Samples continuations of a model: the draft is trained, and the pair evaluated, on them."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from specray.train.data import Tokens


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """Sampling options for the draft's training text.

    Batch `i` takes its prompt length and temperature in turn from the two lists; each row is
    `row_len` tokens, prompt and continuation together. Sampling ends after `num_batches` or, when
    given, `time_budget_s`, whichever is first.
    """

    num_batches: int = 256
    time_budget_s: float | None = None
    batch_size: int = 32
    row_len: int = 513
    prompt_lens: tuple[int, ...] = (32, 128, 256)
    temperatures: tuple[float, ...] = (1.0, 0.0, 1.0, 0.6)
    seed: int = 0
    num_workers: int = 2


class CachedDecoder:
    """A Llama model with keys and values in place: one prompt forward, then one token at a time.

    Rows have equal lengths. Query heads of a group read their key/value head without copies of it,
    which is what makes wide batches cheap.
    """

    def __init__(self, model: LlamaForCausalLM, *, num_rows: int, max_len: int) -> None:
        config = model.config
        self._model = model
        self._num_kv_heads = int(config.num_key_value_heads or config.num_attention_heads)
        self._head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        shape = (num_rows, self._num_kv_heads, max_len, self._head_dim)
        self._keys = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in model.model.layers]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._num_computed_tokens = 0

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends `ids` [n, length] (any length first, then 1); returns the last logits [n, vocab_size]."""
        start, end = self._num_computed_tokens, self._num_computed_tokens + ids.shape[1]
        assert start == 0 or ids.shape[1] == 1
        core = self._model.model
        hidden = core.embed_tokens(ids)
        positions = torch.arange(start, end, device=ids.device)[None]
        rotary = core.rotary_emb(hidden, position_ids=positions)
        for index, layer in enumerate(core.layers):
            attended = self._attend(index, layer.self_attn, layer.input_layernorm(hidden), rotary)
            hidden = hidden + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._num_computed_tokens = end
        logits: torch.Tensor = self._model.lm_head(core.norm(hidden[:, -1]))
        return logits

    def _attend(
        self, index: int, attention: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        num_rows, length, _ = hidden.shape
        start = self._num_computed_tokens
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        self._keys[index][:, :, start : start + length] = keys
        self._values[index][:, :, start : start + length] = values
        if start == 0:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(2)
        past_keys = self._keys[index].flatten(0, 1)[:, : start + 1]
        past_values = self._values[index].flatten(0, 1)[:, : start + 1]
        grouped = queries.reshape(num_rows * self._num_kv_heads, -1, self._head_dim)
        scores = torch.bmm(grouped, past_keys.transpose(1, 2)) * self._head_dim**-0.5
        mixed = torch.bmm(scores.float().softmax(-1).to(scores.dtype), past_values)
        return mixed.reshape(num_rows, 1, -1)


def sample_continuations(
    model: LlamaForCausalLM, prompts: torch.Tensor, *, num_tokens: int, temperature: float, seed: int
) -> torch.Tensor:
    """Continues each row of `prompts` [n, length]; greedy at temperature 0.

    Returns int64 [n, length + num_tokens].
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = CachedDecoder(model, num_rows=len(prompts), max_len=prompts.shape[1] + num_tokens)
    rows = [prompts]
    for _ in range(num_tokens):
        logits = decoder.forward(rows[-1]).float()
        if temperature == 0:
            rows.append(logits.argmax(-1, keepdim=True))
        else:
            rows.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
    return torch.cat(rows, 1)


def sample_training_rows(
    model: LlamaForCausalLM, tokens: Tokens, directory: Path, config: SampleConfig
) -> Tokens:
    """Rows [n, row_len] that begin with training text and go on with the model's own.

    Batches are kept as files in `directory`, so an interrupted run goes on where it stopped.
    """
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ThreadPoolExecutor(config.num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending: list[Future[None]] = []
        for index in range(config.num_batches):
            if _batch_file(directory, index).exists():
                continue
            if len(pending) >= 2 * config.num_workers:
                pending.pop(0).result()
            if config.time_budget_s is not None and time.monotonic() - started > config.time_budget_s:
                break
            pending.append(pool.submit(_sample_batch, model, tokens, directory, index, config))
        for future in pending:
            future.result()
    return np.concatenate(list(_read_batches(directory, config.num_batches)))


def continue_all(
    model: LlamaForCausalLM,
    prompts: Sequence[torch.Tensor],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
    num_workers: int,
) -> list[torch.Tensor]:
    """Continues many batches of prompts at once; returns them in their order."""
    with ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [
            pool.submit(
                sample_continuations,
                model,
                batch,
                num_tokens=num_tokens,
                temperature=temperature,
                seed=seed + index,
            )
            for index, batch in enumerate(prompts)
        ]
        return [future.result() for future in futures]


def _sample_batch(
    model: LlamaForCausalLM, tokens: Tokens, directory: Path, index: int, config: SampleConfig
) -> None:
    prompt_len = config.prompt_lens[index % len(config.prompt_lens)]
    generator = np.random.default_rng((config.seed, index))
    starts = generator.integers(len(tokens) - prompt_len, size=config.batch_size)
    prompts = np.stack([tokens[start : start + prompt_len] for start in starts]).astype(np.int64)
    rows = sample_continuations(
        model,
        torch.from_numpy(prompts),
        num_tokens=config.row_len - prompt_len,
        temperature=config.temperatures[index % len(config.temperatures)],
        seed=int(generator.integers(2**31)),
    )
    file = _batch_file(directory, index)
    partial = file.with_suffix(".partial.npy")
    np.save(partial, rows.numpy().astype(np.uint16))
    partial.replace(file)


def _batch_file(directory: Path, index: int) -> Path:
    return directory / f"{index:05d}.npy"


def _read_batches(directory: Path, num_batches: int) -> Iterator[Tokens]:
    for index in range(num_batches):
        if _batch_file(directory, index).exists():
            yield np.load(_batch_file(directory, index))
