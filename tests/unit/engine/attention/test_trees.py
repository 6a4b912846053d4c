"""Every attention path on random trees against a dense mask in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from specray.engine.attention.base import Attention
from specray.engine.attention.paged import PagedAttention, attend_gathered
from specray.engine.attention.sdpa import PlainAttention
from specray.engine.cache.blocks import BlockCache
from specray.engine.cpu.gemm import tiles
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.model.rotary import RotaryTables
from specray.engine.step import AttentionStep, CacheShape, HeadShape, SequenceRows
from tests.pairwise import pairs
from tests.unit.engine.attention.trees import MAX_LEN, TREES, Tree, angles, expected, random_rows, tree_steps

SHAPE = HeadShape(6, 2, 32)
EMULATES = pytest.mark.timeout(400)
"""To compile what stands for AMX takes a busy machine minutes."""


def torch_tables() -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat((angles(SHAPE.head_dim),) * 2, -1)
    return both.cos(), both.sin()


def sdpa() -> Attention:
    rotary = rotary_tables(*torch_tables(), torch.float32)
    return PlainAttention(rotary, SHAPE)


def gather() -> Attention:
    return PagedAttention(rotary_tables(*torch_tables(), torch.float32), SHAPE, attend_gathered)


def kernel(dtype: torch.dtype) -> Attention:
    pytest.importorskip("numba")
    from specray.engine.model.operators_cpu import KernelOperators

    return KernelOperators(dtype, 1).attention(RotaryTables((torch_tables(),), (0,)), SHAPE)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processor's own registers, or some in memory."""
    if tiles.is_usable():
        yield
        return
    # Importing it compiles what stands for the instructions: not for whoever only collects tests.
    from tests.unit.engine.cpu.amx_emulated import emulated_tiles

    with emulated_tiles(monkeypatch):
        yield


def attend(
    attention: Attention,
    tree: Tree,
    dtype: torch.dtype,
    block_size: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The nodes' attention, then that of the other sequence's only row."""
    cache = BlockCache(
        CacheShape(1, SHAPE.num_kv_heads, SHAPE.head_dim),
        num_blocks=-(-MAX_LEN // block_size) + 1,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    qkv = random_rows(tree, SHAPE, dtype).to(device)
    steps = tree_steps(tree, cache)
    for step, positions, taken in steps:
        rows = torch.cat((qkv[taken], qkv[:1])) if len(step.rows) > 1 else qkv[taken]
        prepared = attention.prepare(step, torch.tensor(positions, device=device))
        out = prepared.attend(0, rows.clone().flatten(1), None, tree.window, sinks)
    return out


def check(
    make: Callable[[], Attention], tree: Tree, dtype: torch.dtype, block_size: int, atol: float
) -> None:
    out = attend(make(), tree, dtype, block_size).double()
    qkv = random_rows(tree, SHAPE, dtype)
    # The other row sees itself alone.
    alone = qkv[0, SHAPE.num_heads + SHAPE.num_kv_heads :].repeat_interleave(3, 0).flatten()
    torch.testing.assert_close(out[:-1], expected(tree, qkv, SHAPE), atol=atol, rtol=0)
    torch.testing.assert_close(out[-1], alone.double(), atol=atol, rtol=0)


@pytest.mark.slow
@EMULATES
@pytest.mark.parametrize("tree", [TREES[-2], TREES[5]], ids=lambda tree: tree.name)
@pytest.mark.parametrize("path", ["sdpa", "gather", "float32", "bfloat16", "amx"])
def test_sinks_take_weight(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: str, tree: Tree
) -> None:
    """Of each head its own: sinks that weigh nothing, as much as a key, and more than all keys."""
    if path == "amx":
        # For this one alone: what is compiled beside emulated registers comes from no disk.
        request.getfixturevalue("amx")
    sinks = torch.tensor([-40.0, -2.0, 0.0, 1.5, 6.0, 120.0])
    if path in ("float32", "bfloat16"):
        monkeypatch.setattr(tiles, "is_usable", lambda: False)
    dtype = torch.bfloat16 if path in ("bfloat16", "amx") else torch.float32
    attention = {"sdpa": sdpa, "gather": gather}.get(path, lambda: kernel(dtype))()
    out = attend(attention, tree, dtype, 16, sinks=sinks)[:-1].double()
    reference = expected(tree, random_rows(tree, SHAPE, dtype), SHAPE, sinks)
    assert float(reference[:, -SHAPE.head_dim :].abs().max()) < 1e-30
    atol = {"bfloat16": 0.02, "amx": 0.03}.get(path, 1e-5)
    torch.testing.assert_close(out, reference, atol=atol, rtol=0)
    without = attend(attention, tree, dtype, 16)[:-1].double()
    torch.testing.assert_close(without[:, : SHAPE.head_dim], out[:, : SHAPE.head_dim], atol=atol, rtol=0)


@pairs(make=(sdpa, gather), tree={tree.name: tree for tree in TREES}, block_size=(16, 5, MAX_LEN))
def test_torch_equals_the_dense_mask(make: Callable[[], Attention], tree: Tree, block_size: int) -> None:
    check(make, tree, torch.float32, block_size, 1e-5)


@pytest.mark.slow
@pairs(
    tree={tree.name: tree for tree in TREES},
    dtype=(torch.float32, torch.bfloat16),
    block_size=(16, 5, MAX_LEN),
)
def test_kernels_equal_the_dense_mask(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, dtype: torch.dtype, block_size: int
) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)
    check(lambda: kernel(dtype), tree, dtype, block_size, 1e-5 if dtype == torch.float32 else 0.02)


def on_a_chain(attention: Attention, tree: Tree, node: int, dtype: torch.dtype) -> torch.Tensor:
    """The node's attention where its path follows the prefix, one row at a time."""
    cache = BlockCache(
        CacheShape(1, SHAPE.num_kv_heads, SHAPE.head_dim),
        num_blocks=1,
        block_size=MAX_LEN,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    qkv, indices = random_rows(tree, SHAPE, dtype), [tree.prefix_len + each for each in tree.path(node)]
    steps = [(range(tree.prefix_len), 0)] if tree.prefix_len else []
    steps += [([index], tree.prefix_len + depth) for depth, index in enumerate(indices)]
    for taken, start in steps:
        step = AttentionStep((SequenceRows(0, len(taken), start, [0]),), cache)
        prepared = attention.prepare(step, torch.arange(start, start + len(taken)))
        out = prepared.attend(0, qkv[list(taken)].clone().flatten(1), None, tree.window)
    return out[-1]


def check_bits(attention: Attention, tree: Tree, dtype: torch.dtype, nodes: Iterable[int]) -> None:
    out = attend(attention, tree, dtype, 16)
    for node in nodes:
        alone = on_a_chain(attention, tree, node, dtype)
        assert torch.equal(out[tree.num_told + node], alone), f"node {node} has other bits than on a chain"


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_has_the_bits_that_it_has_on_a_chain(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)
    check_bits(kernel(dtype), tree, dtype, range(0, len(tree.parents), 5))


@pytest.mark.slow
@EMULATES
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_a_node_has_the_bits_that_it_has_on_a_chain_with_amx(amx: None, tree: Tree) -> None:
    check_bits(kernel(torch.bfloat16), tree, torch.bfloat16, range(0, len(tree.parents), 9))


@pytest.mark.slow
@EMULATES
@pytest.mark.parametrize("block_size", [16, MAX_LEN])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_amx_equals_the_dense_mask(amx: None, tree: Tree, block_size: int) -> None:
    """Queries and weights have 8 bits each; a token too many or too few changes outputs by 0.1 and more."""
    check(lambda: kernel(torch.bfloat16), tree, torch.bfloat16, block_size, 0.03)
