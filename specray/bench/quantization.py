"""Measures what quantised weights cost: the loss of a text, and how often the most likely token is the same.

Every format reads the same windows of the text with the forward that serves it.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.table import Table

from specray.bench.core.report import number, table_of
from specray.config import DraftConfig, Dtype, EngineConfig, parse_config
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError

FORMATS = ("none", "int8", "int4")
DEQUANTISED = "dtype"
"""Format of what a file stores quantised, and is held in the model's data type."""


@dataclass(frozen=True, slots=True)
class FormatQuality:
    number_format: str
    num_tokens: int
    """Tokens that were predicted."""
    loss: float
    """Mean of -log p(token), in nats."""
    agreement: float
    """Share of positions at which the most likely token is that of the first format."""
    divergence: float
    """Mean of KL(first format, this one), in nats."""


def engine_config(engine: EngineConfig, format: str) -> EngineConfig:
    """The engine with weights in a format.

    Args:
        format: ``LAYERS`` or ``LAYERS:LM_HEAD``, such as ``int4:int8``; ``none`` leaves what a file stores
            in its own bits, ``dtype`` dequantises it. ``@float32`` or ``@bfloat16`` at the end is the dtype.

    Raises:
        ConfigError: there is no such format.
    """
    named, _, dtype = format.partition("@")
    layers, _, head = named.partition(":")
    own, head = {"weights": "dtype"} if layers == DEQUANTISED else {}, head or "none"
    layers = "none" if own else layers
    if layers not in FORMATS or head not in FORMATS or dtype not in ("", *get_args(Dtype)):
        raise ConfigError(
            f"--quantization is {format!r}; allowed: {DEQUANTISED}, LAYERS or LAYERS:LM_HEAD, each one of "
            f"{', '.join(FORMATS)}, and @{' or @'.join(get_args(Dtype))} after it"
        )
    values = engine.model_dump() | {"quantization": layers, "lm_head_quantization": head} | own
    if dtype:
        values["dtype"] = dtype
    if isinstance(engine, DraftConfig):
        return parse_config({"draft": values}).draft
    return parse_config({"target": values}).target


def read_text(path: Path | None) -> str:
    """The text of a file; None: one in English that every Python has, the reference of its language.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return "\n".join(pydoc_data.topics.topics.values())
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text is {str(path)!r}, which cannot be read: {error}") from None


def measure_quality(
    runners: Sequence[ModelRunner],
    token_ids: Sequence[int],
    *,
    window_len: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> list[FormatQuality]:
    """Reads the text in windows with each runner; the first one is what the others are compared with.

    Args:
        token_ids: the text; each window's first token is given, the others are predicted.
        progress: called after each window with how many of how many tokens are done.

    Raises:
        ConfigError: a window is longer than a sequence may be, or the text has less than two tokens.
    """
    longest = min(runner.info.max_model_len for runner in runners)
    if not 2 <= window_len <= longest:
        raise ConfigError(f"window_len is {window_len}; allowed: 2..{longest}")
    windows = [token_ids[first : first + window_len] for first in range(0, len(token_ids), window_len)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError(f"the text has {len(token_ids)} tokens; allowed: 2 and more")
    sums = torch.zeros(len(runners), 3, dtype=torch.float64)
    num_tokens = 0
    for window in windows:
        num_tokens += len(window) - 1
        wanted = torch.tensor(window[1:])[:, None]
        first: torch.Tensor | None = None
        for index, runner in enumerate(runners):
            log_probs = _log_probs(runner, window)
            first = log_probs if first is None else first
            sums[index, 0] -= log_probs.gather(1, wanted).sum(dtype=torch.float64)
            sums[index, 1] += (log_probs.argmax(1) == first.argmax(1)).sum()
            sums[index, 2] += (first.exp() * (first - log_probs)).sum(dtype=torch.float64)
        if progress is not None:
            progress(num_tokens, len(token_ids) - len(windows))
    means = sums / num_tokens
    return [
        FormatQuality(runner.info.number_format, num_tokens, *(float(mean) for mean in row))
        for runner, row in zip(runners, means, strict=True)
    ]


def _log_probs(runner: ModelRunner, window: Sequence[int]) -> torch.Tensor:
    num_blocks = -(-len(window) // runner.info.block_size)
    step = SequenceInput(window[:-1], 0, range(num_blocks), len(window) - 1)
    return runner.run([step]).logits.cpu().log_softmax(-1)


def build_runners(
    engine: EngineConfig, formats: Sequence[str], role: str, *, num_sequences: int = 1
) -> list[ModelRunner]:
    """The engine's model in each format, with room for some sequences.

    Raises as :func:`engine_config` and ``build_runner``.
    """
    small = engine.model_copy(update={"max_num_seqs": num_sequences})
    return [build_runner(engine_config(small, format), role=role) for format in dict.fromkeys(formats)]


def quality_table(qualities: Sequence[FormatQuality], *, title: str) -> Table:
    columns: dict[str, Callable[[FormatQuality], object]] = {
        "format": lambda one: one.number_format,
        "tokens": lambda one: one.num_tokens,
        "loss": lambda one: number(one.loss, 4),
        "more loss": lambda one: f"{one.loss - qualities[0].loss:+.4f}",
        "agreement": lambda one: number(one.agreement, 4),
        "divergence": lambda one: number(one.divergence, 5),
    }
    return table_of(title, columns, qualities, caption="agreement and divergence: with the first format")
