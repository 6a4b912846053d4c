"""What only a GPU can show: kernels that compile, graphs that are captured, and the numbers of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.attention.paged import AttendPaged
from specray.engine.attention.select import Model, choose_backend
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.cuda_graphs import Bucket
from specray.engine.runner.runner import ModelRunner
from specray.engine.step import HeadShape
from specray.engine.visibility import branch_visibility
from tests.gpu.attention_checks import check_case, check_store, check_tree
from tests.gpu.block_cases import CASES, EDGES, Case
from tests.unit.engine.attention.trees import TREES, Tree
from tests.unit.engine.model.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda", 0)
CONTEXT = [(7 * index) % 90 + 2 for index in range(40)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "qwen3", "mistral-windowed")
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}


def make_runner(path: Path, device: str, **settings: object) -> ModelRunner:
    values = {"model": str(path), "device": device, "dtype": "float32", "max_num_seqs": 16, "num_threads": 1}
    return build_runner(EngineConfig.model_validate({**values, **settings}), role="target")


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """Prompts, then rows of several widths side by side, then branches."""
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    tables = [BlockTable(allocator) for _ in range(3)]
    for table in tables:
        table.reserve(len(CONTEXT) + 16)
    start = len(CONTEXT)
    inputs = [SequenceInput(CONTEXT, 0, table.block_ids, 2) for table in tables]
    logits = [
        runner.run(inputs).logits.clone(),
        runner.run([SequenceInput([9], start, tables[0].block_ids, 1)]).logits.clone(),
    ]
    rows = ([5, 6, 7], [8], [9, 10])
    inputs = [
        SequenceInput(own, start, table.block_ids, len(own)) for own, table in zip(rows, tables, strict=True)
    ]
    logits.append(runner.run(inputs).logits.clone())
    branches = (
        branch_visibility(30, start, 1),
        branch_visibility(30, start, 2),
        branch_visibility(36, start + 2, 1),
    )
    logits.append(runner.run([SequenceInput([41, 42, 43], 0, tables[2].block_ids, 3, branches)]).logits)
    return [piece.cpu() for piece in logits]


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("attention", ["triton", "gather"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-windowed"])
def test_float32_logits_are_those_of_a_cpu(
    checkpoints: dict[str, Path], name: str, attention: str, has_graphs: bool
) -> None:
    expected = steps(make_runner(checkpoints[name], "cpu"))
    runner = make_runner(checkpoints[name], "cuda", attention=attention, cuda_graphs=has_graphs)
    for logits, others in zip(steps(runner), expected, strict=True):
        torch.testing.assert_close(logits, others, atol=2e-4, rtol=0)
    assert (runner.graphs is not None) == has_graphs
    if runner.graphs is not None:
        assert {Bucket(1, 1, False), Bucket(4, 3, False), Bucket(1, 3, True)} <= set(runner.graphs.buckets)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_kernel_agrees_on_this_device(dtype: torch.dtype, head_dim: int) -> None:
    model = Model(HeadShape(8, 2, head_dim), dtype, torch.device("cuda", 0))
    for block_size in (16, 256):
        assert choose_backend("triton", model, block_size).block_size == block_size


@pytest.fixture(scope="module", params=[0, 2, 1000], ids=lambda count: f"{count} programs a processor")
def triton_attend(request: pytest.FixtureRequest) -> AttendPaged:
    from specray.engine.attention import triton

    # So few places are split as in long sequences.
    triton.MIN_SPLIT_PLACES = 32
    return triton.TritonAttend(torch.cuda.get_device_properties(CUDA).multi_processor_count, request.param)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("case", [*CASES, *EDGES], ids=lambda case: case.name)
def test_triton_kernel_equals_gathered_blocks(
    triton_attend: AttendPaged, case: Case, dtype: torch.dtype, atol: float
) -> None:
    check_case(triton_attend, case, CUDA, dtype, atol)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_triton_kernel_equals_the_dense_mask_of_a_tree(triton_attend: AttendPaged, tree: Tree) -> None:
    check_tree(triton_attend, tree, CUDA)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_store_kernel_norms_and_rotates(case: Case) -> None:
    check_store(case, CUDA)


@pytest.mark.parametrize("shape", [HeadShape(8, 2, 64), HeadShape(5, 5, 32), HeadShape(32, 8, 128)])
def test_varlen_agrees_on_this_device(shape: HeadShape) -> None:
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        pytest.skip(f"varlen_attn of torch {torch.__version__} takes no block tables")
    model = Model(shape, torch.bfloat16, torch.device("cuda", 0))
    assert choose_backend("varlen", model, None).name == "varlen"


def test_bfloat16_captured_and_not_are_close(checkpoints: dict[str, Path]) -> None:
    pieces = [
        steps(make_runner(checkpoints["llama"], "cuda", dtype="bfloat16", cuda_graphs=has_graphs))
        for has_graphs in (True, False)
    ]
    for captured, plain in zip(*pieces, strict=True):
        assert (captured - plain).square().mean().sqrt() < 0.05 * plain.std()
