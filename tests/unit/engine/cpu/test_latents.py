"""Kernels of latent attention against torch; a row is the same at any width."""

import pytest
import torch

from specray.engine.attention.cpu import CpuAttention
from specray.engine.attention.sdpa import PlainAttention
from specray.engine.cache.blocks import BlockCache
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.heads import KernelHeadProduct
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.step import AttentionStep, CacheShape, HeadShape, SequenceRows
from specray.engine.visibility import tree_visibility
from tests.pairwise import pairs
from tests.unit.engine.cpu.test_kernels import ALONE, MAX_LEN, angles, random

pytestmark = pytest.mark.slow


SIZES = {"many": (64, 8), "one": (16, 32), "part": (12, 8)}
"""Registers of a latent: its numbers, and those that are rotated."""


def is_compiled(size: tuple[int, int], dtype: torch.dtype, **_: object) -> bool:
    """A kernel of one size and type takes seconds to compile: one size has both types."""
    return size == SIZES["many"] or (dtype == torch.float32) == (size == SIZES["part"])


@pairs(
    is_compiled,
    size=SIZES,
    heads=((4, 1), (4, 4), (66, 2)),
    block_size=(16, 7, MAX_LEN),
    dtype=(torch.float32, torch.bfloat16),
)
def test_latent_attention_equals_torchs(
    size: tuple[int, int], heads: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    """Prompts, single rows and a tree in scattered blocks, whatever heads read latents together."""
    (latent_dim, rotated_dim), (num_heads, num_groups) = size, heads
    shape = HeadShape(num_heads, 1, latent_dim + rotated_dim, 0.2, latent_dim)
    per_sequence = -(-MAX_LEN // block_size)
    order = torch.randperm(3 * per_sequence, generator=torch.Generator().manual_seed(1)).tolist()
    blocks = [order[index::3] for index in range(3)]
    tree = tree_visibility(20, (-1, 0, 0, 2, 1))
    steps = (
        [
            SequenceRows(0, 37, 0, blocks[0]),
            SequenceRows(37, 1, 0, blocks[1]),
            SequenceRows(38, 20, 0, blocks[2]),
        ],
        [
            SequenceRows(0, 1, 37, blocks[0]),
            SequenceRows(1, 3, 1, blocks[1]),
            SequenceRows(4, 5, 20, blocks[2], tree),
        ],
    )
    table = angles(rotated_dim)
    kernel = attention_kernel(shape.head_dim, str(dtype).removeprefix("torch."), latent_dim)
    tables = table.cos(), table.sin()
    own = CpuAttention(kernel, ALONE, num_heads, num_groups, shape.head_dim, *tables, shape.scale)
    whole = (torch.cat((each, each), -1) for each in tables)
    torchs = PlainAttention(rotary_tables(*whole, torch.float32), shape)
    found, wanted = (_latents(len(order), block_size, shape, each) for each in (dtype, torch.float32))
    for seed, rows in enumerate(steps):
        qkv = random(rows[-1].first_row + rows[-1].num_rows, (num_heads + 1) * shape.head_dim, seed=seed)
        qkv = qkv.to(dtype)
        positions = torch.tensor([position for item in rows for position in item.positions])
        outputs = [
            attention.prepare(AttentionStep(tuple(rows), cache), positions).attend(0, numbers, None, None)
            for attention, cache, numbers in ((own, found, qkv.clone()), (torchs, wanted, qkv.float()))
        ]
        atol = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(outputs[0].float(), outputs[1], atol=atol, rtol=0)
        torch.testing.assert_close(found.layers[0].float(), wanted.layers[0], atol=atol, rtol=0)


def _latents(num_blocks: int, block_size: int, shape: HeadShape, dtype: torch.dtype) -> BlockCache:
    return BlockCache(
        CacheShape.of_layers([shape.of_layer]),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )


@pairs(
    num_rows=(1, 3, 4, 9),
    num_threads=(1, 2),
    sizes=((8, 12), (32, 64), (5, 32)),
    dtype=(torch.float32, torch.bfloat16),
)
def test_products_of_heads_equal_torchs(
    num_rows: int, num_threads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of each head's numbers some are multiplied, others copied; a row's bits are those of it alone."""
    in_features, size = sizes
    weight = random(6, in_features, size, dtype=dtype)
    product = KernelHeadProduct(weight, ThreadPool(num_threads))
    rows = random(num_rows, 6, in_features + 4, dtype=dtype)
    expected = torch.einsum("rhi,hio->rho", rows[..., :in_features].double(), weight.double())
    out = torch.zeros(num_rows, 7, size + 4, dtype=dtype)
    product.into(rows, out[:, :6], rest=4)
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.01}
    torch.testing.assert_close(out[:, :6, :size].double(), expected, **tolerance)
    assert torch.equal(out[:, :6, size:], rows[..., in_features:])
    assert not out[:, 6].any()
    alone = torch.cat([product(row[None]) for row in rows])
    assert torch.equal(alone.view(num_rows, 6, size), out[:, :6, :size])
