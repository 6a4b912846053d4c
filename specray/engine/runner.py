"""The device side of an engine: one ragged forward per call, over one block cache.

Draft and target are the same runner; what is proposed or verified is decided above it. The runner owns the
weights and the K/V tensors, never who runs or which block belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.config import EMBEDDED, EngineConfig
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.engine.attention import AttentionStep, SequenceRows, sequence_slots
from specray.engine.block_backends import DEFAULT_BLOCK_SIZE, Backend, Model, choose_backend
from specray.engine.cache import BlockCache, bytes_per_token
from specray.engine.device import (
    available_memory,
    choose_device,
    num_threads_for,
    num_threads_for_logits,
    use_cores,
)
from specray.engine.forward import CacheShape, Forward, Step
from specray.engine.generic import GenericForward
from specray.engine.graphs import WIDTHS, Bucket, CudaCapture, GraphedForward
from specray.engine.inputs import CopyInput, SequenceInput
from specray.engine.loader import LoadedModel, ModelArgs, load_model
from specray.engine.lowering import can_lower, head_shape, lower
from specray.engine.operators import BlockOperators, Operators, cpu_operators, cuda_operators
from specray.engine.parallel import ParallelContext
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.taped import TapedForward

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_POPULATED_SHARE = 4
"""One part in so many of the memory at hand, for other engines on this machine do the same."""
_MAX_PREPARED_WIDTH = 8
"""Of a sequence alone: forwards captured before the first request. Others are when they first come."""
_MAX_PREPARED_BRANCHES = 16


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner says of its model and its limits."""

    model_name: str
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence."""
    tokenizer_fingerprint: str
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    tensor_parallel_size: int
    forward: str
    """``lowered`` or ``generic``."""
    attention: str = ""
    """How it attends from tensors that describe the step; empty: it does not."""


class ModelRunner:
    """One rank's model and cache. In a tensor-parallel group every rank has one and calls the same ``run``.

    The leader's ``run`` hands the step to the other ranks, which sit in ``follow``.
    """

    def __init__(
        self,
        forward: Forward,
        cache: BlockCache,
        info: RunnerInfo,
        *,
        parallel: ParallelContext | None = None,
        graphs: GraphedForward | None = None,
    ) -> None:
        self.info = info
        self.cache = cache
        self.forward = forward
        self.graphs = graphs
        self._parallel = parallel
        self._taped = None if parallel is not None else _taped(forward, info.device)
        self._forward: Forward = self._taped or forward

    @property
    def is_taped(self) -> bool:
        """Between its tokens and its logits, a step is kernels alone, which have threads of their own."""
        return self._taped is not None

    @torch.inference_mode()
    def run(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        """One forward over the new tokens of all ``inputs``; every sequence appears at most once.

        Returns:
            Logits ``[sum(num_logits), vocab_size]``, float32, in the order of ``inputs``.

        Raises:
            EngineLostError: a rank of the group is gone.
        """
        if self._parallel is not None:
            self._parallel.send_step(inputs)
        if self.graphs is not None and (bucket := self.graphs.bucket_for(inputs)) is not None:
            return self._run_captured(self.graphs, bucket, inputs)
        return self._forward(self._plan(inputs))

    @torch.inference_mode()
    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor | None:
        """The step after the last one, in which each sequence had one row: with a further token of each.

        Args:
            kept: which of that step's inputs go on, in order.
            token_ids: of each, the token that follows; its sequence has a block for it.

        Returns:
            Logits ``[len(kept), vocab_size]``, float32, there until the next step; None where ``run`` has to
            be told everything.
        """
        return None if self._taped is None else self._taped.advance(kept, token_ids)

    def follow(self) -> None:
        """Ranks other than the leader: runs what the leader runs until it closes.

        Raises:
            EngineLostError: the leader was silent for longer than the group's deadline.
        """
        assert self._parallel is not None and self._parallel.rank > 0, "only a follower follows"
        with torch.inference_mode():
            while (received := self._parallel.receive_step()) is not None:
                if isinstance(received, CopyInput):
                    self._copy(received)
                else:
                    self._forward(self._plan(received))

    @torch.inference_mode()
    def copy_tokens(
        self,
        source_block_ids: Sequence[int],
        destination_block_ids: Sequence[int],
        num_tokens: int,
        *,
        first: int = 0,
    ) -> None:
        """Copies the K/V of the tokens ``first .. num_tokens - 1`` from one list of blocks to another.

        What two sequences with one prefix need where a block holds a whole sequence.

        Raises:
            EngineLostError: a rank of the group is gone.
        """
        copy = CopyInput(source_block_ids, destination_block_ids, first, num_tokens)
        if self._parallel is not None:
            self._parallel.send_copy(copy)
        self._copy(copy)

    def _copy(self, copy: CopyInput) -> None:
        source, destination = (
            sequence_slots(ids, copy.first, copy.num_tokens, self.info.block_size, self.info.device)
            for ids in (copy.source_block_ids, copy.destination_block_ids)
        )
        self.cache.copy(source, destination)

    def close(self) -> None:
        """Lets the followers go and leaves the group; idempotent."""
        if self._parallel is not None:
            self._parallel.close()

    def _plan(self, inputs: Sequence[SequenceInput]) -> Step:
        if len(inputs) == 1 and not inputs[0].branches:
            return self._plan_single(inputs[0])
        device = self.info.device
        rows = _sequence_rows(inputs)
        positions: list[int] = []
        for item in rows:
            positions.extend([row.position for row in item.branches] or range(item.start, item.end))
        wanted = _logit_rows(inputs, rows)
        return Step(
            token_ids=torch.tensor([token for item in inputs for token in item.token_ids], device=device),
            positions=torch.tensor(positions, device=device),
            attention=AttentionStep(tuple(rows), self.cache),
            logit_rows=None
            if len(wanted) == len(positions)
            else torch.tensor(wanted, dtype=torch.int64, device=device),
        )

    def _plan_single(self, item: SequenceInput) -> Step:
        count = len(item.token_ids)
        assert count >= 1 and 0 <= item.num_logits <= count, item
        return Step(
            token_ids=torch.tensor(item.token_ids, device=self.info.device),
            positions=slice(item.start, item.start + count),
            attention=AttentionStep((SequenceRows(0, count, item.start, item.block_ids),), self.cache),
            logit_rows=None if item.num_logits == count else slice(count - item.num_logits, count),
        )

    def _run_captured(
        self, graphs: GraphedForward, bucket: Bucket, inputs: Sequence[SequenceInput]
    ) -> torch.Tensor:
        rows = _sequence_rows(inputs)
        logits = graphs.run(bucket, rows, [token for item in inputs for token in item.token_ids])
        wanted = _logit_rows(inputs, rows)
        # A copy, since the next step overwrites them.
        if wanted and wanted[-1] - wanted[0] == len(wanted) - 1:
            return logits[wanted[0] : wanted[-1] + 1].clone()
        return logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]


def _taped(forward: Forward, device: torch.device) -> TapedForward | None:
    if device.type != "cpu":
        return None
    try:
        from specray.engine.taped import taped
    except ImportError:  # Without numba there are no kernels.
        return None
    return taped(forward)


def _sequence_rows(inputs: Sequence[SequenceInput]) -> list[SequenceRows]:
    rows: list[SequenceRows] = []
    first = 0
    for item in inputs:
        count = len(item.token_ids)
        assert count >= 1 and 0 <= item.num_logits <= count, item
        start = item.start
        if item.branches:
            assert len(item.branches) == count, item
            start = min(row.position for row in item.branches)
        rows.append(SequenceRows(first, count, start, item.block_ids, item.branches))
        first += count
    return rows


def _logit_rows(inputs: Sequence[SequenceInput], rows: Sequence[SequenceRows]) -> list[int]:
    """The rows whose logits are wanted: the last ones of each sequence."""
    wanted: list[int] = []
    for item, own in zip(inputs, rows, strict=True):
        end = own.first_row + own.num_rows
        wanted.extend(range(end - item.num_logits, end))
    return wanted


def build_runner(config: EngineConfig, *, role: str, parallel: ParallelContext | None = None) -> ModelRunner:
    """Loads the model and prepares everything that a first step needs.

    Args:
        role: ``draft`` or ``target``: which of the embedded pair ``embedded`` means.
        parallel: this process's place in a tensor-parallel group; every rank calls this with the same config.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    use_cores(config.cores)
    device = choose_device(config)
    loaded = load_model(
        ModelArgs(
            path=model_path(config, role),
            dtype=_DTYPES[config.dtype],
            device=device,
            max_model_len=config.max_model_len,
            tensor_parallel_size=1 if parallel is None else parallel.world_size,
            role=role,
        )
    )
    num_weight_bytes = sum(weight.nbytes for weight in loaded.model.parameters())
    torch.set_num_threads(config.num_threads or num_threads_for(num_weight_bytes))
    backend = _block_backend(config, loaded, parallel)
    forward = _build_forward(config, loaded, parallel, backend)
    shape = forward.cache_shape
    block_size = _block_size(config, loaded, backend)
    num_blocks = _num_blocks(config, loaded, shape, block_size)
    cache = BlockCache(
        num_layers=shape.num_layers,
        # The last one is for rows of captured forwards that belong to nobody.
        num_blocks=num_blocks + (backend is not None),
        block_size=block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=loaded.dtype,
        device=device,
    )
    cache.populate(available_memory() // _POPULATED_SHARE)
    info = RunnerInfo(
        model_name=loaded.name,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=loaded.dtype,
        device=device,
        tensor_parallel_size=1 if parallel is None else parallel.world_size,
        forward=forward.name,
        attention="" if backend is None else backend.name,
    )
    if parallel is not None:
        parallel.start(_group_choices(info))
    graphs = None
    if config.cuda_graphs and device.type == "cuda" and backend is not None and parallel is None:
        capture = CudaCapture(device)
        graphs = GraphedForward(forward, cache, max_model_len=loaded.max_model_len, capture=capture)
        graphs.prepare(_prepared_buckets(role))
    return _with_threads_left(ModelRunner(forward, cache, info, parallel=parallel, graphs=graphs))


def _with_threads_left(runner: ModelRunner) -> ModelRunner:
    """Takes from torch the threads that its operators do not need beside those of the kernels."""
    if runner.is_taped:
        torch.set_num_threads(num_threads_for_logits(runner.info.vocab_size, torch.get_num_threads()))
    return runner


def _group_choices(info: RunnerInfo) -> dict[str, object]:
    """What a rank chooses by what works for it, though all ranks must have the same.

    A way to attend that fails its check on one rank only is left out there, and with it its block size.
    """
    return {
        "forward": info.forward,
        "attention": info.attention,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "dtype": str(info.dtype),
    }


def _prepared_buckets(role: str) -> list[Bucket]:
    buckets = [Bucket(1, width, has_branches=False) for width in WIDTHS if width <= _MAX_PREPARED_WIDTH]
    if role == "draft":
        buckets += [
            Bucket(1, width, has_branches=True) for width in WIDTHS if width <= _MAX_PREPARED_BRANCHES
        ]
    return buckets


def model_path(config: EngineConfig, role: str) -> str:
    """The path or hub id that ``config.model`` means for a draft or a target."""
    if config.model != EMBEDDED:
        return config.model
    return str(demo_draft_path() if role == "draft" else demo_target_path())


def _build_forward(
    config: EngineConfig, loaded: LoadedModel, parallel: ParallelContext | None, backend: Backend | None
) -> Forward:
    if _is_lowered(config, loaded):
        return lower(loaded, _operators(loaded, backend), parallel)
    if config.forward == "lowered":
        raise ConfigError(
            f"forward is 'lowered', which does not cover this {loaded.config.model_type!r} model; "
            "allowed: 'auto' or 'generic'"
        )
    return GenericForward(loaded.model)


def _is_lowered(config: EngineConfig, loaded: LoadedModel) -> bool:
    return config.forward != "generic" and can_lower(loaded)


def _block_backend(
    config: EngineConfig, loaded: LoadedModel, parallel: ParallelContext | None
) -> Backend | None:
    """How to attend from tensors that describe the step; None: sequence by sequence."""
    if not _is_lowered(config, loaded):
        if config.attention != "auto":
            raise ConfigError(f"attention is {config.attention!r}; a generic forward allows 'auto' only")
        return None
    if loaded.device.type == "cpu" and config.attention == "auto":
        return None
    model = Model(head_shape(loaded.config, parallel), loaded.dtype, loaded.device)
    return choose_backend(config.attention, model, config.block_size)


def _block_size(config: EngineConfig, loaded: LoadedModel, backend: Backend | None) -> int:
    if backend is not None:
        return backend.block_size
    return config.block_size or (DEFAULT_BLOCK_SIZE if loaded.device.type == "cuda" else loaded.max_model_len)


def _operators(loaded: LoadedModel, backend: Backend | None) -> Operators:
    if loaded.device.type == "cpu":
        operators = cpu_operators(loaded.dtype, torch.get_num_threads())
    else:
        operators = cuda_operators(loaded.dtype, loaded.device)
    if backend is None:
        return operators
    return BlockOperators(operators, loaded.dtype, backend.attend, backend.store)


def _num_blocks(config: EngineConfig, loaded: LoadedModel, shape: CacheShape, block_size: int) -> int:
    per_block = block_size * bytes_per_token(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=loaded.dtype,
    )
    per_sequence = -(-loaded.max_model_len // block_size)
    affordable = int(config.cache_memory_gib * 2**30) // per_block
    if affordable < per_sequence:
        needed = per_sequence * per_block / 2**30
        raise ConfigError(
            f"cache_memory_gib is {config.cache_memory_gib}; one sequence of max_model_len "
            f"{loaded.max_model_len} needs {needed:.3f} GiB"
        )
    return min(affordable, config.max_num_seqs * per_sequence)
