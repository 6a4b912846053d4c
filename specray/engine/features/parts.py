"""What a drafter takes from a loaded target: embedding, head, operators, and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from specray.config import TargetConfig
from specray.engine.features.base import TargetParts, TargetShape, TokenRows
from specray.engine.features.loader import Layout
from specray.engine.model.checkpoint.vocabulary import DRAFTER_SETTING, TrimmedHead
from specray.engine.model.checkpoint.vocabulary import read_head as read_ids
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.decoder_config import EMBEDDING, HEAD
from specray.engine.model.description import ModelArgs, ModelDescription, describe
from specray.engine.model.layers.vocabulary import rounded_scale
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.model.operators import Operators, cpu_operators, cuda_operators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import operator_set
from specray.engine.runner.runner import ModelRunner
from specray.engine.weights.quantization import Quantization
from specray.errors import ConfigError


def target_shape(args: ModelArgs) -> TargetShape:
    """Sizes of a target before it is loaded. Raises ConfigError as ``describe`` does."""
    return described_shape(describe(args))


def described_shape(described: ModelDescription) -> TargetShape:
    """Sizes of a target, by its description."""
    if described.decoder is not None:
        config = described.decoder
        return TargetShape(config.num_hidden_layers, config.hidden_size, config.vocab_size)
    assert described.library is not None, "one of both has described it"
    text = described.library.text
    return TargetShape(int(text.num_hidden_layers), int(text.hidden_size), described.vocab_size)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What a drafter draws through in the place of the target's head."""

    trimmed: TrimmedHead | None = None
    """The rows that it has; None: all."""
    format: Quantization = Quantization.NONE

    @classmethod
    def of(cls, config: TargetConfig, vocab_size: int) -> DraftHead:
        """What the configuration says. Raises ConfigError for wrong ids."""
        file, format = config.drafter_vocabulary_ids, Quantization(config.drafter_head_quantization)
        return cls(None if file is None else read_ids(file, vocab_size, DRAFTER_SETTING), format)

    @property
    def is_targets(self) -> bool:
        """Whether the head is the target's own."""
        return self.trimmed is None and self.format is Quantization.NONE

    @property
    def token_ids(self) -> NDArray[np.int64] | None:
        return None if self.trimmed is None else self.trimmed.token_ids

    def num_bytes(self, shape: TargetShape, item_bytes: int) -> int:
        """Bytes of its own weight."""
        if self.is_targets:
            return 0
        num_rows = shape.vocab_size if self.trimmed is None else len(self.trimmed.rows)
        bits = 8 * item_bytes if self.format is Quantization.NONE else self.format.bits_per_weight
        return int(num_rows * shape.hidden_size * bits / 8)


def target_parts(
    runner: ModelRunner, layout: Layout, shape: TargetShape, args: ModelArgs, own: DraftHead
) -> TargetParts:
    """What the drafter takes from the target.

    A group's ranks share embedding and head, and the leader drafts alone: it reads both once more.

    Args:
        args: of the target's checkpoint.

    Raises:
        ConfigError: a group's target is not covered by the decoder, or its weights cannot be read.
    """
    info, forward = runner.info, runner.forward
    operators = choose_operators(runner)
    embed: TokenRows
    logits: TokenRows
    if info.tensor_parallel_size > 1:
        embed, logits = read_again(args, layout, operators, info.dtype, info.device, own)
    elif isinstance(forward, DecoderForward):
        embed, logits = model_embedding(forward), forward.head.precise
    else:
        from specray.engine.model.hf_forward import HfForward

        assert isinstance(forward, HfForward), "there are two forwards"
        model = forward.model
        embed = model.get_input_embeddings()
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits = lambda rows: head(rows).float()  # noqa: E731
    if not own.is_targets and info.tensor_parallel_size == 1:
        # Whatever runs the target, an MTP layer is the decoder's.
        whole = replace(args, forward="auto")
        _, logits = read_again(whole, layout, operators, info.dtype, info.device, own)
    return TargetParts(
        shape,
        embed,
        logits,
        operators,
        info.dtype,
        info.device,
        info.max_model_len,
        runner.cache.num_blocks,
        info.block_size,
        own.token_ids,
    )


def model_embedding(forward: DecoderForward) -> TokenRows:
    embedding, scale = forward.embedding, forward.embedding_scale
    return embedding if scale == 1.0 else lambda token_ids: embedding(token_ids) / scale


def choose_operators(runner: ModelRunner) -> Operators:
    """What a drafter next to the target is made of."""
    info, forward = runner.info, runner.forward
    if info.device.type != "cpu":
        return cuda_operators(info.dtype, info.device)
    attention = getattr(forward, "attention", None)
    pool = getattr(attention, "thread_pool", None)
    return cpu_operators(info.dtype, torch.get_num_threads(), pool)


def read_again(
    args: ModelArgs,
    layout: Layout,
    operators: Operators,
    dtype: torch.dtype,
    device: torch.device,
    own: DraftHead,
) -> tuple[TokenRows, TokenRows]:
    source = load_model(args, dtype=dtype, device=device).source
    if not isinstance(source, DecoderSource):
        raise ConfigError(
            f"target.drafter is {layout.path!r} with tensor_parallel_size {args.tensor_parallel_size} and "
            "forward 'hf'; allowed: forward 'decoder', or one rank"
        )
    return read_embedding(source, dtype), read_head(source, operators, own, dtype, device)


def read_embedding(source: DecoderSource, dtype: torch.dtype) -> TokenRows:
    """Look-ups in the embedding of a target's files, as the model gives them. Reads no other tensor."""
    table = source.weights.take(EMBEDDING).clone()
    scale = rounded_scale(source.config, dtype)
    if scale != 1.0:
        table = table * scale
    return lambda token_ids: F.embedding(token_ids, table)


def read_head(
    source: DecoderSource, operators: Operators, own: DraftHead, dtype: torch.dtype, device: torch.device
) -> TokenRows:
    """The head of a target's files, or what a drafter has in its place. Reads no other tensor."""
    name = EMBEDDING if source.config.tie_word_embeddings else HEAD
    weight = source.weights.take(name)
    if own.trimmed is not None:
        weight = weight[torch.from_numpy(own.trimmed.rows).to(weight.device)]
    made = operator_set(operators, WeightFormats(head=own.format), dtype, device).head
    return made.linear(weight, None).precise
