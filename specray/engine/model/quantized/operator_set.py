"""What makes a decoder's parts where layers, head and embedding may be in formats of their own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specray.engine.cuda.tiles import FREE, TileRule
from specray.engine.model.decoder import Embedding
from specray.engine.model.linear import Linear
from specray.engine.model.operators import Operators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.stored_weight import StoredWeight, Weight
from specray.errors import ConfigError

_log = logging.getLogger(__name__)

MakeEmbedding = Callable[[Weight, Linear | None], Embedding]
"""Makes look-ups from the table and, if both are tied, the head that was made of it."""


@dataclass(frozen=True, slots=True)
class OperatorSet:
    """What makes the parts of a decoder whose weights may be in several formats."""

    layers: Operators
    head: Operators
    embedding: MakeEmbedding | None = None
    """Makes the table of look-ups; None: it stays as it is."""
    stored_embedding: Callable[[StoredWeight, Linear | None], Embedding] | None = None
    """Makes a table that a file stores; None: it comes in the model's data type."""
    dtype: torch.dtype = torch.float32
    """The model's data type."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the parts are."""


def has_own_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has kernels for weights in the bits that files store."""
    if device.type != "cpu":
        reason = _without_kernels(device, dtype)
        if reason is not None:
            _log.info("no kernels for weights in their own bits: %s", reason)
        return reason is None
    try:
        from specray.engine.cpu.gemm.quantized.linear import has_kernels
    except ImportError:
        return False
    return has_kernels()


@functools.cache
def _without_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products with weights in codes do not work on a device; None: they do."""
    try:
        from specray.engine.cuda.codes.check import check_device

        check_device(device, dtype)
    # Whatever a compiler or a driver raises: weights can be numbers.
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no reason is given'}"
    return None


def operator_set(
    operators: Operators,
    formats: WeightFormats,
    dtype: torch.dtype,
    device: torch.device,
    rule: TileRule = FREE,
) -> OperatorSet:
    """Makers of each part in its format.

    Args:
        rule: of products with weights in codes, on CUDA.

    Raises:
        ConfigError: a format is not computed here.
    """
    if device.type == "cpu":
        return _cpu_set(operators, formats, dtype)
    reason = _without_kernels(device, dtype)
    if reason is not None:
        if formats.is_plain:
            return OperatorSet(operators, operators, dtype=dtype, device=device)
        raise ConfigError(
            f"{formats.setting()}; its kernels do not work on {device.type}: {reason}; allowed: 'none'"
        )
    from specray.engine.model.quantized.cuda import CodeOperators

    made = {
        format: CodeOperators(operators, dtype, device, format, rule)
        for format in {formats.layers, formats.head, Quantization.NONE}
    }
    head, stored = made[formats.head], made[Quantization.NONE]
    return OperatorSet(
        made[formats.layers],
        head,
        head.embedding if formats.has_quantized_embedding else None,
        stored.embedding if formats.has_own_bits else None,
        dtype,
        device,
    )


def _cpu_set(operators: Operators, formats: WeightFormats, dtype: torch.dtype) -> OperatorSet:
    try:
        from specray.engine.model.operators_cpu import KernelOperators
        from specray.engine.model.quantized.cpu import QuantizedKernelOperators, StoredKernelOperators
    except ImportError:
        if formats.is_plain:
            return OperatorSet(operators, operators)
        raise ConfigError(
            f"{formats.setting()}; on CPU it needs numba, which cannot be imported; allowed: 'none'"
        ) from None
    if not isinstance(operators, KernelOperators):
        # Of torch alone, for steps that are captured as on CUDA.
        assert formats.is_plain, "numba is here"
        return OperatorSet(operators, operators)
    made: dict[Quantization, KernelOperators] = {
        format: QuantizedKernelOperators(operators, format)
        for format in {formats.layers, formats.head} - {Quantization.NONE}
    }
    head = made.get(formats.head)
    is_stored = formats.has_own_bits and has_own_kernels(torch.device("cpu"), dtype)
    stored = StoredKernelOperators(operators) if is_stored else None
    plain = operators if stored is None else stored
    return OperatorSet(
        made.get(formats.layers, plain),
        plain if head is None else head,
        head.embedding
        if formats.has_quantized_embedding and isinstance(head, QuantizedKernelOperators)
        else None,
        None if stored is None else stored.embedding,
        dtype,
        torch.device("cpu"),
    )
