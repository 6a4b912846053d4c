"""Runs the Triton kernels of weights in codes on CPU; started by test_products with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys

import torch

from specray.engine.activation import Activation
from specray.engine.cuda.codes.check import check_product
from specray.engine.cuda.codes.look_up_triton import CodeEmbedding, look_up
from specray.engine.cuda.codes.packed import pack
from specray.engine.cuda.linear import ProductGate, ProductLinear
from specray.engine.cuda.tiles import FIXED
from specray.engine.model.linear import JoinedGate
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.quantized.cuda import CodeOperators
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight
from specray.engine.weights.stored_weight import StoredWeight
from specray.errors import ConfigError
from tests.gpu.products.stored_parts import COLUMNS, ROWS, every_part, nvfp4, quantized, random_blocks

CPU = torch.device("cpu")


def values() -> None:
    """Every form's values, bit for bit, with rows in another order and some twice."""
    indices = torch.tensor([[3, 39, 0, 3, 17, 38], [1, 2, 3, 4, 5, 6]])
    for name, part in every_part().items():
        packed, meant = pack(part, CPU), part.values()
        assert torch.equal(look_up(packed, indices, torch.float32), meant[indices]), name
        assert (packed.size, packed.in_features) == meant.shape, name
    for format in (Quantization.INT8, Quantization.INT4):
        meant, made = quantized(format)
        assert torch.equal(look_up(pack(made, CPU), indices, torch.float32), meant[indices]), format


def products() -> None:
    """Every form's products, against float64."""
    for part in every_part().values():
        check_product(pack(part, CPU), part, torch.float16, "it", "another")
    check_product(pack(nvfp4(), CPU), nvfp4(), torch.float32, "it", "another")


def rows() -> None:
    """A row's bits are the same at every place of steps of 1 to 64 rows, among any others."""
    row, others = torch.randn(1, COLUMNS), torch.randn(64, COLUMNS)
    parts = every_part()
    for name in ("q4_k", "q6_k", "nvfp4", "int4 of 128 with zeros", "fp8 of 128"):
        linear = ProductLinear((pack(parts[name], CPU),), None, torch.float32, FIXED)
        alone = linear(row)
        for num_rows in (2, 5, 16, 17, 33, 64):
            for place in {0, num_rows // 2, num_rows - 1}:
                step = others[:num_rows].clone()
                step[place] = row
                assert torch.equal(linear(step)[place], alone[0]), (name, num_rows, place)


def layers() -> None:
    """What a decoder is made of: linear layers of several parts, gates, look-ups, quantised and plain."""
    operators = CodeOperators(TorchOperators(torch.float32), torch.float32, CPU)
    q4, q6, other = random_blocks(BlockType.Q4_1), random_blocks(BlockType.Q6_K), nvfp4()
    rows, summand = torch.randn(3, COLUMNS), torch.randn(3, 2 * ROWS)
    mixed = StoredWeight.of([q4, q6])
    bias = torch.randn(2 * ROWS)
    linear = operators.linear(mixed, bias)
    expected = rows.double() @ mixed.values().double().T + bias.double()
    assert isinstance(linear, ProductLinear) and len(linear.parts) == 2
    for found, meant in (
        (linear(rows), expected),
        (linear.precise(rows), expected),
        (linear.plus(rows, summand), expected + summand),
    ):
        _close(found, meant)
    sizes = linear.num_weights, linear.num_bytes, linear.in_features
    assert sizes == (2 * ROWS * COLUMNS, q4.num_bytes + q6.num_bytes, COLUMNS)
    gate_weight, up_weight = StoredWeight((other,)), StoredWeight((nvfp4(1),))
    up_of_blocks = StoredWeight((q4,))
    for activation, act in (
        (Activation.SILU, torch.nn.functional.silu),
        (Activation.GELU_TANH, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        for up, kind in ((up_weight, ProductGate), (up_of_blocks, JoinedGate)):
            gate = operators.gate(gate_weight, up, None, None, activation)
            assert isinstance(gate, kind)
            both = (rows.double() @ each.values().double().T for each in (gate_weight, up))
            _close(gate(rows), act(next(both)) * next(both))
    tied = operators.linear(up_of_blocks, None)
    shared = operators.embedding(up_of_blocks, tied)
    assert isinstance(shared, CodeEmbedding) and isinstance(tied, ProductLinear)
    assert shared.table is tied.parts[0]
    assert torch.equal(shared(torch.tensor([5, 0])), q4.values()[[5, 0]])
    assert torch.equal(operators.embedding(mixed, None)(torch.tensor([41])), mixed.values()[[41]])
    quantising = CodeOperators(TorchOperators(torch.float32), torch.float32, CPU, Quantization.INT4)
    meant, made = quantized(Quantization.INT4)
    assert isinstance(made, QuantizedWeight)
    _close(quantising.linear(meant, None)(rows), rows.double() @ meant.double().T)


def wrong() -> None:
    """A device whose kernels give other values is not trusted."""
    weight = random_blocks(BlockType.Q4_1)
    packed = pack(weight, CPU)
    packed.codes[0, 3, 7] ^= 1
    try:
        check_product(packed, weight, torch.float32, "weights is 'auto'", "'dtype'")
    except ConfigError as error:
        assert str(error).startswith("weights is 'auto'; the kernel of CodeLayout(bits=4"), error
        assert str(error).endswith("gets 1 values wrong on this device; allowed: 'dtype'"), error
    else:
        raise AssertionError("a wrong value was not seen")


def _close(found: torch.Tensor, meant: torch.Tensor) -> None:
    error = (found.double() - meant).abs() / meant.abs().max()
    assert float(error.max()) < 1e-5, float(error.max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in sys.argv[1:]:
        {
            "values": values,
            "products": products,
            "rows": rows,
            "layers": layers,
            "wrong": wrong,
        }[part]()
    print("agreed")
