"""Checks the kernels of weights in codes on a device, before a model is built with them.

Importing it needs triton.
"""

from __future__ import annotations

import torch

from specray.engine.cuda.codes.look_up_triton import look_up
from specray.engine.cuda.codes.packed import Packable, PackedWeight, pack
from specray.engine.cuda.linear import ProductLinear
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight, quantize
from specray.errors import ConfigError

_NUM_COLUMNS = 40
"""Output features that are compared, at most."""
_WIDTHS = (1, 6, 17, 33)
"""Rows of the products that are compared, one for each tile."""
_TOLERANCE = 1e-4
"""Largest error of a sum in float32, as a share of that of its terms' sizes."""


@torch.inference_mode()
def check_product(
    packed: PackedWeight, part: Packable, dtype: torch.dtype, setting: str, allowed: str
) -> None:
    """Compares a weight's values bit for bit, and its products with those in float64.

    Args:
        part: what was packed.
        setting, allowed: the setting that asks for the product, and what is allowed instead, for messages.

    Raises:
        ConfigError: a value differs, or a product is wrong.
    """
    device = packed.codes.device
    picked = torch.arange(min(_NUM_COLUMNS, packed.size), device=device)
    values = look_up(packed, picked, torch.float32)
    meant = _values(part, len(picked)).to(device)
    if not torch.equal(values, meant):
        raise _wrong(packed, setting, allowed, f"{int((values != meant).sum())} values")
    generator = torch.Generator().manual_seed(0)
    linear = ProductLinear((packed,), None, dtype)
    for num_rows in _WIDTHS:
        rows = torch.randn(num_rows, packed.in_features, generator=generator).to(device, dtype)
        found = linear.precise(rows)[:, : len(picked)].double()
        expected = rows.double() @ values.double().T
        sizes = rows.double().abs() @ values.double().abs().T
        error = float(((found - expected).abs() / sizes.clamp_min(1e-30)).max())
        if not error < _TOLERANCE:
            raise _wrong(packed, setting, allowed, f"sums by {error:.3g} of their terms")


def _values(part: Packable, count: int) -> torch.Tensor:
    if isinstance(part, QuantizedWeight):
        return part.dequantized()[:count]
    return part.select(slice(0, count)).values()


def _wrong(packed: PackedWeight, setting: str, allowed: str, what: str) -> ConfigError:
    return ConfigError(
        f"{setting}; the kernel of {packed.layout} gets {what} wrong on this device; allowed: {allowed}"
    )


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises whatever a compiler or a driver raises, and ConfigError, where products do not work at all."""
    weight = torch.randn(_NUM_COLUMNS, 128, generator=torch.Generator().manual_seed(0))
    part = quantize(weight, Quantization.INT4)
    check_product(pack(part, device), part, dtype, "weights is 'auto'", "'dtype'")
