"""What makes a decoder's parts where layers, head and embedding may be in formats of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specray.engine.model.decoder import Embedding
from specray.engine.model.linear import Linear
from specray.engine.model.operators import Operators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.stored_weight import StoredWeight, Weight
from specray.errors import ConfigError

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


def has_own_kernels() -> bool:
    """Whether this machine has kernels for weights in the bits that files store."""
    try:
        from specray.engine.cpu.gemm.quantized.linear import has_kernels
    except ImportError:
        return False
    return has_kernels()


def operator_set(
    operators: Operators, formats: WeightFormats, dtype: torch.dtype, device: torch.device
) -> OperatorSet:
    """Makers of each part in its format. Raises ConfigError: a format is not computed here."""
    if device.type == "cpu":
        return _cpu_set(operators, formats, dtype)
    if formats.is_plain:
        return OperatorSet(operators, operators)
    from specray.engine.model.quantized.cuda import QuantizedCudaOperators

    if formats.has_quantized_embedding:
        raise ConfigError("quantize_embedding is true; allowed on CUDA: false")
    made = {
        format: QuantizedCudaOperators(operators, dtype, device, format)
        for format in {formats.layers, formats.head} - {Quantization.NONE}
    }
    return OperatorSet(made.get(formats.layers, operators), made.get(formats.head, operators))


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
    is_stored = formats.has_own_bits and has_own_kernels()
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
    )
