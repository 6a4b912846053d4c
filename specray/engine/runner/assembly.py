"""Builds a runner from its configuration: device, weights, forward, block size, cache and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from specray.checkpoint_digest import checkpoint_digest
from specray.config import DraftConfig, EngineConfig, TargetConfig
from specray.engine.attention.select import DEFAULT_BLOCK_SIZE, Backend, Model
from specray.engine.cache.blocks import BlockCache
from specray.engine.cache.state_slots import DRAFT_OPEN_ROWS, MAX_OPEN_ROWS
from specray.engine.cuda.tiles import FIXED, FREE
from specray.engine.device import (
    available_memory,
    choose_device,
    give_back_memory,
    num_threads_for,
    num_threads_for_logits,
    use_cores,
    use_device,
)
from specray.engine.group.parallel import ParallelContext
from specray.engine.model.adapters.pool import AdapterPool
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.description import ModelArgs, model_path
from specray.engine.model.layers.vocabulary import GatheredHead
from specray.engine.model.loader import DecoderSource, LoadedModel, load_model
from specray.engine.model.lowering import head_shape, lower
from specray.engine.model.operators import Operators, PagedOperators, cpu_operators, cuda_operators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import OperatorSet, operator_set
from specray.engine.runner import determinism
from specray.engine.runner.adapters import AdapterPlan, RunnerAdapters, plan_adapters
from specray.engine.runner.cache_sizes import cache_bytes_for, choose_sizes
from specray.engine.runner.cuda_graphs import SEQUENCES, WIDTHS, Bucket, CudaCapture, GraphedForward
from specray.engine.runner.gpu_claim import claim_gpu, name_of, warn_of_turns
from specray.engine.runner.memory import NO_DRAFTER, DrafterMemory, naming
from specray.engine.runner.runner import ModelRunner, RunnerInfo
from specray.engine.step import CacheShape, Forward
from specray.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_POPULATED_SHARE = 4
"""Divisor of the available memory: the share populated at most, since other engines do the same."""
_MOST_POPULATED_BYTES = 1 << 30
"""Bytes populated at most: a virtual machine takes two seconds to find them."""
_CAPTURE_LIMIT_S = 30.0
"""Seconds in which forwards are captured before the first request."""
_MAX_PREPARED_WIDTH = 8
"""Rows of one sequence, at most, whose forwards are captured then; those of draft tokens and one more."""
_MAX_PREPARED_BRANCHES = 16
"""Branch rows of one sequence, at most, whose forwards are captured then by a draft."""


def build_runner(
    config: EngineConfig,
    *,
    role: str,
    parallel: ParallelContext | None = None,
    feature_layers: tuple[int, ...] = (),
    drafter_memory: DrafterMemory = NO_DRAFTER,
    num_state_slots: int | None = None,
) -> ModelRunner:
    """Loads the model and prepares everything that a first step needs.

    Args:
        role: ``draft`` or ``target``: which of the embedded pair ``embedded`` means.
        parallel: this process's place in a tensor-parallel group; every rank calls this with the same config.
        feature_layers: layers whose input every forward gives besides its logits.
        drafter_memory: memory that is to be left for a drafter.
        num_state_slots: sequences whose states recurrent layers keep; None: ``max_num_seqs``.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    use_cores(config.cores)
    device = choose_device(config, None if parallel is None else parallel.gpu_index)
    use_device(device)
    if device.type == "cuda":
        claim_gpu(config, role, name_of(device))
        warn_of_turns(config, role)
    tensor_parallel_size = 1 if parallel is None else parallel.world_size
    args = model_args(config, role, tensor_parallel_size)
    loaded = load_model(args, dtype=DTYPES[config.dtype], device=device)
    torch.set_num_threads(config.num_threads or num_threads_for(loaded.num_weight_bytes))
    backend = _attention_backend(config, loaded, parallel)
    with naming(lambda: _too_large(loaded)):
        forward = _build_forward(config, loaded, parallel, backend, feature_layers)
    planned = plan_adapters(config)
    with naming(lambda: f"{role}.adapters is too large; lower max_loaded or max_rank, or load fewer"):
        pool = None if planned is None else adapter_pool(planned, config, loaded, forward, parallel)
    block_size = _block_size(config, loaded, backend)
    provisional = replace(
        _info(config, loaded, forward, block_size, 0, tensor_parallel_size, backend),
        num_state_slots=num_state_slots or config.max_num_seqs,
        max_open=DRAFT_OPEN_ROWS if role == "draft" else MAX_OPEN_ROWS,
    )
    left = determinism.with_parts(drafter_memory, config, loaded, parallel, backend)
    if pool is not None:
        left = left._replace(weight_bytes=left.weight_bytes + pool.num_late_bytes)
    wanted_bytes = cache_bytes_for(config, provisional, forward, parallel, left)
    sizes = choose_sizes(config, provisional, forward.cache_shape, wanted_bytes, drafter_memory)
    info = replace(provisional, num_blocks=sizes.num_blocks, num_snapshots=sizes.num_snapshots)
    with naming(lambda: f"cache_memory_gib is {config.cache_memory_gib}; lower it"):
        # The last block is for rows of captured forwards that belong to nobody.
        cache = _cache(info, forward.cache_shape, has_spare=backend is not None)
    if parallel is not None:
        parallel.sums_in_order = determinism.is_fixed(config, device)
        parallel.start(group_choices(info))
    graphs = None
    graphed = _grapher(config, loaded, cache, is_paged=backend is not None)
    if graphed is not None and isinstance(forward, DecoderForward) and forward.can_be_captured:
        graphs = graphed(forward)
        buckets = prepared_buckets(role, config.max_num_seqs)
        graphs.prepare(buckets, _until(time.monotonic() + _CAPTURE_LIMIT_S, parallel))
    adapters = None
    if pool is not None and planned is not None:
        own = graphed(pool.forward) if graphed and graphs is not None and pool.can_be_captured else None
        adapters = RunnerAdapters(
            pool,
            planned.find,
            parallel,
            model=loaded.directory if role == "target" else None,
            device=device,
            graphs=own,
        )
    runner = ModelRunner(
        forward,
        cache,
        info,
        parallel=parallel,
        graphs=graphs,
        head=_shared_head(forward),
        adapters=adapters,
    )
    give_back_memory()
    return _with_threads_left(runner)


def _grapher(
    config: EngineConfig, loaded: LoadedModel, cache: BlockCache, *, is_paged: bool
) -> Callable[[Forward], GraphedForward] | None:
    """Makes captured forwards, all in one memory; None: nothing is captured here."""
    if not config.cuda_graphs or loaded.device.type != "cuda" or not is_paged:
        return None
    capture = CudaCapture(loaded.device)
    return lambda forward: GraphedForward(forward, cache, max_model_len=loaded.max_model_len, capture=capture)


def adapter_pool(
    planned: AdapterPlan,
    config: EngineConfig,
    loaded: LoadedModel,
    forward: Forward,
    parallel: ParallelContext | None,
) -> AdapterPool:
    """Room for an engine's adapters. Raises ConfigError where it cannot have any."""
    if not isinstance(forward, DecoderForward) or not isinstance(loaded.source, DecoderSource):
        raise ConfigError(
            f"adapters is set and model {loaded.name!r} runs with forward 'hf'; allowed: a model that the "
            "decoder covers"
        )
    return AdapterPool(
        forward,
        loaded.source.config,
        parallel,
        num_slots=planned.num_slots,
        max_rank=planned.max_rank,
        dtype=loaded.dtype,
        device=loaded.device,
        is_fixed=determinism.is_fixed(config, loaded.device),
    )


def _shared_head(forward: Forward) -> GatheredHead | None:
    """The head of a forward whose logits are this rank's alone."""
    if isinstance(forward, DecoderForward) and isinstance(forward.head, GatheredHead):
        return forward.head
    return None


def _info(
    config: EngineConfig,
    loaded: LoadedModel,
    forward: Forward,
    block_size: int,
    num_blocks: int,
    tensor_parallel_size: int,
    backend: Backend | None,
) -> RunnerInfo:
    number_format, isa = _number_format(config, loaded), determinism.instruction_set(loaded)
    reason = determinism.why_not(config, loaded, forward, backend)
    determinism.check(config, loaded, reason)
    is_on = determinism.is_wanted(config)
    return RunnerInfo(
        model_name=loaded.name,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=loaded.dtype,
        device=loaded.device,
        tensor_parallel_size=tensor_parallel_size,
        forward=forward.name,
        number_format=number_format,
        num_token_ids=loaded.num_token_ids,
        token_ids=loaded.token_ids,
        mask_token_id=loaded.mask_token_id,
        attention="" if backend is None else backend.name,
        is_deterministic=reason is None,
        context_row_share=_context_row_share(loaded, tensor_parallel_size),
        isa=isa,
        checkpoint=checkpoint_digest(
            loaded.name,
            loaded.directory,
            adapter=config.adapter if isinstance(config, TargetConfig) else None,
            # Another instruction set has other bits, which matters to whoever asked for the same.
            settings=(number_format, forward.name, *([isa] if is_on else [])),
        ),
    )


def _context_row_share(loaded: LoadedModel, num_ranks: int) -> float:
    if not isinstance(loaded.source, DecoderSource) or loaded.source.config.latent is None:
        return 0.0
    num_heads = loaded.source.config.num_attention_heads // num_ranks
    return loaded.source.config.latent.row_share(num_heads, is_on_cpu=loaded.device.type == "cpu")


def _number_format(config: EngineConfig, loaded: LoadedModel) -> str:
    if not loaded.stored_formats:
        return config.number_format
    return f"{config.number_format} with weights in {', '.join(loaded.stored_formats)}"


def model_args(config: EngineConfig, role: str, tensor_parallel_size: int) -> ModelArgs:
    """What is loaded of a draft or a target."""
    return ModelArgs(
        path=model_path(config, role),
        max_model_len=config.max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        role=role,
        forward=config.forward,
        formats=WeightFormats.of(config),
        vocabulary_ids=config.vocabulary_ids if isinstance(config, DraftConfig) else None,
        adapter=config.adapter if isinstance(config, TargetConfig) else None,
    )


def _with_threads_left(runner: ModelRunner) -> ModelRunner:
    """Takes from torch the threads that its operators do not need besides those of the kernels."""
    if runner.cpu_graphs is not None:
        info = runner.info
        num_logits = info.vocab_size if info.token_ids is None else len(info.token_ids)
        torch.set_num_threads(num_threads_for_logits(num_logits, torch.get_num_threads()))
    return runner


def group_choices(info: RunnerInfo) -> dict[str, object]:
    """What a rank chooses by what works for it, though all ranks must have the same.

    A way to attend that fails its check on one rank only is left out there, and with it its block size.
    """
    return {
        "forward": info.forward,
        "attention": info.attention,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "num_snapshots": info.num_snapshots,
        "dtype": info.number_format,
        "checkpoint": info.checkpoint,
    }


def prepared_buckets(role: str, max_num_seqs: int) -> list[Bucket]:
    """Forwards to capture ahead of need, the likeliest first: of one sequence, then of more and more."""
    widths = [width for width in WIDTHS if width <= _MAX_PREPARED_WIDTH]
    buckets = [Bucket(1, width, has_masks=False) for width in widths]
    if role == "draft":
        buckets += [Bucket(1, width, has_masks=True) for width in WIDTHS if width <= _MAX_PREPARED_BRANCHES]
    several = [count for fewer, count in pairwise(SEQUENCES) if fewer < max_num_seqs]
    return buckets + [Bucket(count, width, has_masks=False) for count in several for width in widths]


def _until(ends_at: float, parallel: ParallelContext | None) -> Callable[[], bool]:
    """Whether there is time left; a group goes on while all its ranks have some."""
    if parallel is None:
        return lambda: time.monotonic() < ends_at
    return lambda: bool(parallel.least(time.monotonic() < ends_at))


def _too_large(loaded: LoadedModel) -> str:
    return (
        f"the weights of model {loaded.name!r} take {loaded.num_weight_bytes / 2**30:.1f} GiB in all; take a "
        "smaller model or a larger tensor_parallel_size, or end what else uses the device"
    )


def _build_forward(
    config: EngineConfig,
    loaded: LoadedModel,
    parallel: ParallelContext | None,
    backend: Backend | None,
    feature_layers: tuple[int, ...],
) -> Forward:
    source = loaded.source
    if isinstance(source, DecoderSource):
        lowered = lower(
            source.config,
            source.weights,
            _operators(config, loaded, backend),
            parallel,
            max_model_len=loaded.max_model_len,
            feature_layers=feature_layers,
            head_rows=None if source.head is None else torch.from_numpy(source.head.rows),
        )
        if loaded.device.type == "cuda":
            # Weights were joined from pieces, whose memory the block cache and other engines can have.
            torch.cuda.empty_cache()
        return lowered
    if config.forward == "decoder":
        raise ConfigError(
            f"forward is 'decoder', which does not cover this {loaded.model_type!r} model; "
            "allowed: 'auto' or 'hf'"
        )
    from specray.engine.model.hf_forward import HfForward

    return HfForward(source, feature_layers)


def _attention_backend(
    config: EngineConfig, loaded: LoadedModel, parallel: ParallelContext | None
) -> Backend | None:
    """How to attend from tensors that describe the step; None: sequence by sequence."""
    if not isinstance(loaded.source, DecoderSource):
        if config.attention != "auto":
            raise ConfigError(f"attention is {config.attention!r}; forward hf allows 'auto' only")
        return None
    if loaded.device.type == "cpu" and config.attention == "auto":
        return None
    shape = head_shape(loaded.source.config, parallel)
    model = Model(
        shape,
        loaded.dtype,
        loaded.device,
        loaded.max_model_len,
        has_sinks=loaded.source.config.has_sinks,
    )
    return determinism.chosen_backend(config, model)


def _block_size(config: EngineConfig, loaded: LoadedModel, backend: Backend | None) -> int:
    if backend is not None:
        return backend.block_size
    return config.block_size or (DEFAULT_BLOCK_SIZE if loaded.device.type == "cuda" else loaded.max_model_len)


def _operators(config: EngineConfig, loaded: LoadedModel, backend: Backend | None) -> OperatorSet:
    operators: Operators
    is_fixed = determinism.is_fixed(config, loaded.device)
    if loaded.device.type == "cpu":
        operators = cpu_operators(loaded.dtype, torch.get_num_threads())
    else:
        operators = cuda_operators(loaded.dtype, loaded.device, is_fixed=is_fixed)
    rule = FIXED if is_fixed else FREE
    made = operator_set(operators, WeightFormats.of(config), loaded.dtype, loaded.device, rule)
    if backend is None:
        return made
    return replace(made, layers=PagedOperators(made.layers, loaded.dtype, backend.attend, backend.store))


def _cache(info: RunnerInfo, shape: CacheShape, *, has_spare: bool) -> BlockCache:
    cache = BlockCache(
        shape,
        num_blocks=info.num_blocks + has_spare,
        block_size=info.block_size,
        dtype=info.dtype,
        device=info.device,
        num_state_slots=info.num_state_slots,
        max_open=info.max_open,
        num_snapshots=info.num_snapshots,
    )
    cache.take_large_pages(min(available_memory() // _POPULATED_SHARE, _MOST_POPULATED_BYTES))
    return cache
