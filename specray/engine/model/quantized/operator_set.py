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
from specray.errors import ConfigError

MakeEmbedding = Callable[[torch.Tensor, Linear | None], Embedding]
"""Makes look-ups from the table and, if both are tied, the head that was made of it."""


@dataclass(frozen=True, slots=True)
class OperatorSet:
    """What makes the parts of a decoder whose weights may be in several formats."""

    layers: Operators
    head: Operators
    embedding: MakeEmbedding | None = None
    """Makes the table of look-ups; None: it stays as it is."""


def operator_set(
    operators: Operators, formats: WeightFormats, dtype: torch.dtype, device: torch.device
) -> OperatorSet:
    """Makers of each part in its format. Raises ConfigError: a format is not computed here."""
    if formats.is_plain:
        return OperatorSet(operators, operators)
    if device.type == "cpu":
        return _quantized_cpu_set(operators, formats)
    from specray.engine.model.quantized.cuda import QuantizedCudaOperators

    if formats.has_quantized_embedding:
        raise ConfigError("quantize_embedding is true; allowed on CUDA: false")
    made = {
        format: QuantizedCudaOperators(operators, dtype, device, format)
        for format in {formats.layers, formats.head} - {Quantization.NONE}
    }
    return OperatorSet(made.get(formats.layers, operators), made.get(formats.head, operators))


def _quantized_cpu_set(operators: Operators, formats: WeightFormats) -> OperatorSet:
    try:
        from specray.engine.model.operators_cpu import KernelOperators
        from specray.engine.model.quantized.cpu import QuantizedKernelOperators
    except ImportError:
        raise ConfigError(
            f"{formats.setting()}; on CPU it needs numba, which cannot be imported; allowed: 'none'"
        ) from None
    assert isinstance(operators, KernelOperators), "numba is here"
    made = {
        format: QuantizedKernelOperators(operators, format)
        for format in {formats.layers, formats.head} - {Quantization.NONE}
    }
    return OperatorSet(
        made.get(formats.layers, operators),
        made.get(formats.head, operators),
        made[formats.head].embedding if formats.has_quantized_embedding else None,
    )
