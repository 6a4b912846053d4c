"""Runs what ``target.deterministic`` has on CUDA on CPU; started by test_products with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from specray.config import TargetConfig
from specray.engine.activation import Activation
from specray.engine.attention.latent_triton import LatentAttend
from specray.engine.attention.packed import make_batch
from specray.engine.attention.paged import AttendPaged, attend_gathered, store_rows
from specray.engine.attention.select import Backend
from specray.engine.attention.triton import TritonAttend
from specray.engine.cuda.linear import ProductGate, ProductLinear
from specray.engine.cuda.tiles import FREE
from specray.engine.model.decoder import RMSNorm
from specray.engine.model.description import ModelArgs
from specray.engine.model.layers.experts.layer import ExpertLayer
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.layers.experts.triton import TritonExperts
from specray.engine.model.linear import JoinedGate, PlainLinear
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.model.lowering import lower
from specray.engine.model.operators_fixed import FixedOperators
from specray.engine.model.quantized.operator_set import OperatorSet
from specray.engine.runner.determinism import why_not
from specray.engine.step import HeadShape, SequenceRows
from specray.engine.visibility import tree_visibility
from tests.gpu.attention_checks import check_case, check_tree
from tests.gpu.block_cases import CASES, EDGES, SOME_TREES
from tests.unit.engine.model.checkpoints import write_checkpoint

CPU = torch.device("cpu")
SIZE, COLUMNS = 40, 200
BLOCK = 16
PART = 64
SHAPES = HeadShape(6, 2, 32), HeadShape(6, 1, 24, None, 16), HeadShape(34, 1, 24, None, 16)
"""Of latents with several rows in a program, and with several programs for a row."""


def products() -> None:
    """Products and norms equal torch's; a row's bits are those of it alone, in steps of 1 to 64 rows."""
    operators = FixedOperators(torch.float32)
    weight, up, bias = torch.randn(SIZE, COLUMNS), torch.randn(SIZE, COLUMNS), torch.randn(SIZE)
    linear, gate = operators.linear(weight, bias), operators.gate(weight, up, None, None)
    norm = operators.norm(torch.rand(COLUMNS), 1e-5)
    by_head = torch.randn(3, COLUMNS // 4, SIZE)
    heads = operators.head_product(by_head)
    assert isinstance(linear, ProductLinear) and isinstance(gate, ProductGate)
    rows, summand = torch.randn(64, COLUMNS), torch.randn(64, SIZE)
    expected = rows @ weight.T + bias
    torch.testing.assert_close(linear(rows), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear.plus(rows, summand), expected + summand, atol=1e-4, rtol=1e-4)
    plain = JoinedGate(PlainLinear(torch.cat((weight, up)), None), Activation.SILU)
    torch.testing.assert_close(gate(rows), plain(rows), atol=1e-3, rtol=1e-4)
    own = RMSNorm(norm.weight, 1e-5)  # type: ignore[attr-defined]
    torch.testing.assert_close(norm(rows), own(rows), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.plus(rows, rows), own.plus(rows, rows.clone()), atol=1e-5, rtol=1e-5)
    # Of each head not all numbers are read.
    parts = rows.view(64, 4, -1)[:, :3]
    torch.testing.assert_close(
        heads(parts), torch.einsum("rhi,hio->rho", parts, by_head).flatten(1), atol=1e-4, rtol=1e-4
    )

    def product(rows: torch.Tensor) -> torch.Tensor:
        return heads(rows.view(len(rows), 4, -1)[:, :3])

    row = rows[:1]
    for num_rows in (2, 5, 8, 31, 32, 33, 64):
        for place in {0, 1, num_rows // 2, num_rows - 1}:
            step = torch.randn(num_rows, COLUMNS)
            step[place] = row
            for part in (linear, gate, norm, product):
                assert torch.equal(part(step)[place], part(row)[0]), (part, num_rows, place)


def cases() -> None:
    """Attention with parts of a fixed length equals torch's operators, as the other does."""
    attend = TritonAttend(1, fixed_part=PART)
    for case in (*CASES, *EDGES[-10:]):
        check_case(attend, case, CPU, torch.float32, 1e-5)
    for tree in SOME_TREES:
        check_tree(attend, tree, CPU)


def attention() -> None:
    """A row's bits are the same alone, among the rows of its chain, and beside other sequences."""
    cases = ((SHAPES[0], 150, None), (SHAPES[0], 150, 70), *((shape, 5, None) for shape in SHAPES))
    for heads, length, window in (*cases, (SHAPES[1], 70, None), (SHAPES[2], 66, None)):
        layer = torch.randn(64 * BLOCK, heads.num_stored, heads.head_dim)
        query = torch.randn(length, heads.num_heads, heads.head_dim)
        blocks = torch.randperm(32)[: -(-length // BLOCK)].tolist()
        last = length - 1

        attended = partial(_attended, heads, layer, window)
        alone = attended([SequenceRows(0, 1, last, blocks)], query[last:])[0]
        for count in {min(each, length) for each in (2, 5, 8, 64, length)}:
            chain = SequenceRows(0, count, length - count, blocks)
            assert torch.equal(attended([chain], query[length - count :])[-1], alone), (length, count)
        others = list(range(33, 63))
        beside = [SequenceRows(0, 3, 400, others), SequenceRows(3, 1, last, blocks)]
        numbers = torch.cat((torch.randn(3, heads.num_heads, heads.head_dim), query[last:]))
        assert torch.equal(attended(beside, numbers)[3], alone)


def _attended(
    heads: HeadShape, layer: torch.Tensor, window: int | None, rows: list[SequenceRows], query: torch.Tensor
) -> torch.Tensor:
    batch = make_batch(rows, BLOCK, CPU)
    attend: AttendPaged = TritonAttend(64, fixed_part=PART)
    if heads.latent_dim:
        # So little memory for parts that rows are computed in several goes.
        attend, layer = LatentAttend(heads.latent_dim, PART, most_part_bytes=100_000), layer[:, 0]
    return attend(query, layer, batch, block_size=BLOCK, scale=heads.scale, window=window)


def trees() -> None:
    """A node's bits are those of the same tokens as a chain, wherever its ancestors lie."""
    prefix_len, parents = 59, (-1, 0, 0, 2, 1, -1, 3, 6)
    visibility = tree_visibility(prefix_len, parents)
    for heads, window in ((SHAPES[0], None), (SHAPES[0], 20), (SHAPES[0], 3), (SHAPES[1], None)):
        prefix = torch.randn(prefix_len, heads.num_heads + heads.num_stored, heads.head_dim)
        nodes = torch.randn(len(parents), *prefix.shape[1:])
        tree = SequenceRows(0, len(parents), prefix_len, range(6), visibility)
        found = _run(heads, [prefix, nodes], tree, window)
        for node in range(len(parents)):
            path = [index for index in range(node + 1) if visibility[node].ancestors >> index & 1]
            chain = SequenceRows(0, len(path), prefix_len, range(6))
            assert torch.equal(_run(heads, [prefix, nodes[path]], chain, window)[-1], found[node])


def mixtures() -> None:
    """A mixture is not refused, and its layers give a row the same bits in any step, routing included."""
    config = TargetConfig.model_validate({"deterministic": "on"})
    backend = Backend("triton", attend_gathered, store_rows, BLOCK, fixed_part=PART)
    for family in ("mixtral", "granitemoeshared", "qwen2_moe"):
        with tempfile.TemporaryDirectory() as directory:
            path = write_checkpoint(Path(directory), family)
            loaded = load_model(ModelArgs(str(path), role="target"), dtype=torch.float32, device=CPU)
            assert isinstance(loaded.source, DecoderSource)
            operators = FixedOperators(torch.float32)
            forward = lower(
                loaded.source.config,
                loaded.source.weights,
                OperatorSet(operators, operators),
                max_model_len=64,
            )
        on_cuda = replace(loaded, device=torch.device("cuda"))
        assert why_not(config, on_cuda, forward, backend) is None
        layer = next(each for each in forward.layers if isinstance(each.gate, ExpertLayer | WithSharedMlp))
        rows = torch.randn(33, loaded.source.config.hidden_size)
        most = layer.gate(rows)
        for some in (slice(1), slice(4, 6), slice(32, 33), slice(20)):
            assert torch.equal(layer.gate(rows[some]), most[some]), (family, some)
        routed = layer.gate.experts if isinstance(layer.gate, WithSharedMlp) else layer.gate
        assert isinstance(routed, ExpertLayer) and isinstance(routed.experts, TritonExperts)
        free = replace(routed, experts=replace(routed.experts, rule=FREE))
        others = replace(forward, layers=(replace(layer, gate=free),))
        reason = "its experts run with torch's operators"
        assert why_not(config, on_cuda, others, backend) == reason


def _run(heads: HeadShape, parts: list[torch.Tensor], rows: SequenceRows, window: int | None) -> torch.Tensor:
    """Attention of some rows after a prefix whose keys and values are in the cache."""
    prefix, own = parts
    layer = torch.zeros(8 * BLOCK, heads.num_stored, heads.head_dim)
    layer[: len(prefix)] = prefix[:, heads.num_heads :]
    layer[len(prefix) : len(prefix) + len(own)] = own[:, heads.num_heads :]
    query = own[:, : heads.num_heads].contiguous()
    return _attended(heads, layer, window, [rows], query)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for part in sys.argv[1:]:
        {"products": products, "cases": cases, "attention": attention, "trees": trees, "mixtures": mixtures}[
            part
        ]()
    print("agreed")
