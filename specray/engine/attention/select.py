"""Chooses the paged attention of a device; kernels are tried before they are trusted.

``varlen``: torch's own, FlashAttention with block tables (``torch.nn.attention.varlen``): 16-bit numbers on
CUDA, blocks of a multiple of 256 tokens, chains only, no attention sinks. ``triton``: our kernel, any number
format and block size. ``gather``: torch's plain operators, anywhere. Each kernel first computes small steps
against ``gather``: one that does not compile on this device, or gives other numbers, is not used. Of those
that are left, each step goes to the one that is fastest for its shape (``measured``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.attention.measured import AttendKernel, CudaTimer, InputMaker, measure
from specray.engine.attention.packed import make_batch
from specray.engine.attention.paged import AttendPaged, StoreRows, attend_gathered, store_rows
from specray.engine.step import HeadShape, PagedBatch, SequenceRows
from specray.engine.visibility import branch_visibility, tree_visibility
from specray.errors import ConfigError

_log = logging.getLogger(__name__)

VARLEN_BLOCK_SIZE = 256
"""Tokens per block; FlashAttention 2 in torch takes multiples of this only."""
DEFAULT_BLOCK_SIZE = 16
_CHECKED_WINDOWS = (None, 7)
_PROGRAMS_PER_PROCESSOR = (1, 4)
"""Programs of the Triton kernel for each multiprocessor that are timed besides its default."""
_FIXED_PLACES, _MAX_FIXED_PARTS = 512, 32
"""KV indices of a part that is the same in every step, at least, and most parts of the longest sequence."""
_LATENT_PLACES = 128
"""The least of latents, whose parts are the same always: few programs share a short sequence."""
_MEASURED_MODEL_LEN = 4096
"""Tokens of the longest sequence for which kernels are timed, where the model's own is unknown."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend that works here."""

    name: str
    attend: AttendPaged
    store: StoreRows
    block_size: int
    rivals: tuple[AttendKernel, ...] = ()
    """Other ways to attend over the same cache, which give the same and may be faster."""
    fixed_part: int = 0
    """KV indices of a part, where they are the same in every step; 0: they are not."""

    def part_bytes(self, shape: HeadShape, max_model_len: int, num_rows: int) -> int:
        """Bytes of what a step of so many rows keeps of parts, where they are the same in every step."""
        if not self.fixed_part or max_model_len <= self.fixed_part or shape.latent_dim:
            # Parts of latents have a bound of their own, and a largest step that is tried has them.
            return 0
        num_parts = -(-max_model_len // self.fixed_part)
        return 4 * num_parts * num_rows * shape.num_heads * (shape.head_dim + 1)


@dataclass(frozen=True, slots=True)
class Model:
    """The parts of a model that decide which backends can serve it."""

    shape: HeadShape
    dtype: torch.dtype
    device: torch.device
    max_model_len: int = _MEASURED_MODEL_LEN
    """Most tokens of a sequence."""
    has_sinks: bool = False
    """Some layers have attention sinks."""


class VarlenAttend:
    """Implements ``paged.AttendPaged`` with torch's FlashAttention; steps with masks go another way.

    Args:
        others: attends where rows have masks.

    Raises:
        ImportError: this torch has none, or one without block tables.
    """

    def __init__(self, others: AttendPaged) -> None:
        from torch.nn.attention.varlen import varlen_attn

        parameters = inspect.signature(varlen_attn).parameters
        if "block_table" not in parameters:
            raise ImportError(f"varlen_attn of torch {torch.__version__} takes no block tables")
        self._takes_splits = "num_splits" in parameters
        self._varlen_attn = varlen_attn
        self._others = others

    def __call__(
        self,
        query: torch.Tensor,
        layer: torch.Tensor,
        batch: PagedBatch,
        *,
        block_size: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "models with sinks attend in another way"
        if batch.has_masks:
            return self._others(query, layer, batch, block_size=block_size, scale=scale, window=window)
        num_kv_heads = layer.shape[1] // 2
        blocks = layer.view(-1, block_size, *layer.shape[1:])
        left = -1 if window is None else window - 1
        # A single row sees all that is there. Asked without a bound to the right, the kernel takes the query
        # heads that share a kv head together.
        right = -1 if left < 0 and batch.max_rows == 1 else 0
        options: dict[str, Any] = {}
        if self._takes_splits and (batch.max_rows > 1 or query.shape[1] == num_kv_heads):
            # Several splits are joined at the wrong places, unless single rows share kv heads (pytorch issue
            # 194167).
            options["num_splits"] = 1
        output = self._varlen_attn(
            query,
            blocks[:, :, :num_kv_heads],
            blocks[:, :, num_kv_heads:],
            batch.first_rows,
            # With block tables only its shape counts; lengths are those of seqused_k.
            batch.first_rows,
            batch.max_rows,
            batch.block_tables.shape[1] * block_size,
            scale=scale,
            window_size=(left, right),
            enable_gqa=query.shape[1] != num_kv_heads,
            seqused_k=batch.lengths,
            block_table=batch.block_tables,
            **options,
        )
        assert isinstance(output, torch.Tensor), "nothing else was asked for"
        return output.flatten(1)


def choose_backend(setting: str, model: Model, block_size: int | None) -> Backend:
    """The first way that works here, or the one asked for; of ``auto``, the fastest for each shape of step.

    Args:
        setting: ``auto``, ``varlen``, ``triton`` or ``gather``.
        block_size: tokens per block; None: whatever suits the way.

    Raises:
        ConfigError: the way that was asked for does not work here; the message says why.
    """
    for name in (setting,) if setting != "auto" else ("varlen", "triton", "gather"):
        try:
            backend = make_backend(name, model, block_size)
            if name != "gather":
                check_backend(backend, model)
                for rival in backend.rivals:
                    check_backend(replace(backend, attend=rival.attend), model)
        # Whatever a compiler or a driver raises: there is another way.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if setting != "auto":
                raise ConfigError(f"attention is {setting!r}, which does not work here: {reason}") from error
            _log.info("attention %r is not used: %s", name, reason)
        else:
            return _fastest(backend, model) if setting == "auto" else backend
    raise AssertionError("gathering works everywhere")


def fixed_backend(model: Model, block_size: int | None) -> Backend:
    """The Triton kernel with the same parts and tiles in every step: a row's bits depend on its path alone.

    Raises:
        ConfigError: it does not work here; the message says why.
    """
    part = fixed_part(model.max_model_len)
    try:
        backend = make_backend("triton", model, block_size)
        if not model.shape.latent_dim:
            from specray.engine.attention.triton import TritonAttend

            attend = TritonAttend(1, fixed_part=part)
            backend = replace(backend, attend=attend, rivals=(), fixed_part=part)
        check_backend(backend, model)
    # Whatever a compiler or a driver raises.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"target.deterministic is 'on', whose attention does not work here: {reason}; allowed here: 'off'"
        ) from error
    return backend


def fixed_part(max_model_len: int) -> int:
    """KV indices of a part where it is the same in every step: of a model's longest sequence at most 32."""
    return max(_FIXED_PLACES, 1 << (-(-max_model_len // _MAX_FIXED_PARTS) - 1).bit_length())


def latent_part(max_model_len: int) -> int:
    """KV indices of a part of latents, in every step: of a model's longest sequence at most 32."""
    return max(_LATENT_PLACES, 1 << (-(-max_model_len // _MAX_FIXED_PARTS) - 1).bit_length())


def gathered(shape: HeadShape) -> AttendPaged:
    """The way that works everywhere, for a model's heads."""
    return partial(attend_gathered, latent_dim=shape.latent_dim) if shape.latent_dim else attend_gathered


def _fastest(backend: Backend, model: Model) -> Backend:
    if not backend.rivals:
        return backend
    try:
        inputs = InputMaker(model.shape, model.dtype, model.device, backend.block_size, model.max_model_len)
        kernels = (AttendKernel(backend.name, backend.attend), *backend.rivals)
        return replace(backend, attend=measure(kernels, inputs, CudaTimer(model.device)))
    # Whatever a driver raises: the backend works as it is.
    except Exception as error:
        _log.info("attention kernels were not timed: %s: %s", type(error).__name__, error)
        return backend


def make_backend(name: str, model: Model, block_size: int | None) -> Backend:
    if name == "gather":
        return Backend(name, gathered(model.shape), store_rows, block_size or DEFAULT_BLOCK_SIZE)
    if model.device.type != "cuda":
        raise ConfigError(f"the device is {model.device.type!r}; allowed: 'cuda'")
    if name == "triton" and model.shape.latent_dim:
        from specray.engine.attention.latent_triton import LatentAttend

        part = latent_part(model.max_model_len)
        attend = LatentAttend(model.shape.latent_dim, part)
        return Backend(name, attend, store_rows, block_size or DEFAULT_BLOCK_SIZE, fixed_part=part)
    if model.shape.latent_dim:
        raise ConfigError("the model has latent attention; allowed: 'triton' or 'gather'")
    if name == "triton":
        return _triton(model.device, block_size or DEFAULT_BLOCK_SIZE)
    if model.has_sinks:
        raise ConfigError("the model has attention sinks; allowed: 'triton' or 'gather'")
    if model.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"the numbers are {model.dtype}; allowed: bfloat16")
    size = block_size or VARLEN_BLOCK_SIZE
    if size % VARLEN_BLOCK_SIZE:
        raise ConfigError(f"block_size is {size}; allowed: multiples of {VARLEN_BLOCK_SIZE}")
    others = _beside_varlen(model, size)
    own = () if others.name == "gather" else (AttendKernel(others.name, others.attend),)
    return Backend(name, VarlenAttend(others.attend), others.store, size, (*own, *others.rivals))


def _triton(device: torch.device, block_size: int) -> Backend:
    from specray.engine.attention import store_triton
    from specray.engine.attention.triton import TritonAttend

    attend = TritonAttend(torch.cuda.get_device_properties(device).multi_processor_count)
    rivals = tuple(
        AttendKernel(f"triton-{count}", attend.splitting(count)) for count in _PROGRAMS_PER_PROCESSOR
    )
    return Backend("triton", attend, store_triton.store_rows, block_size, rivals)


def _beside_varlen(model: Model, block_size: int) -> Backend:
    """What stores rows, and attends where rows have masks."""
    try:
        backend = _triton(model.device, block_size)
        check_backend(backend, model)
    except Exception as error:
        _log.info("rows with masks gather: %s: %s", type(error).__name__, error)
        return make_backend("gather", model, block_size)
    return backend


@torch.inference_mode()
def check_backend(backend: Backend, model: Model) -> None:
    """Works on small steps against ``gather``. Raises ArithmeticError where the numbers differ."""
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    shape, reference = model.shape, gathered(model.shape)
    if shape.latent_dim:
        assert backend.store is store_rows, "there is no other"
    else:
        _check_store(backend.store, model, tolerance)
    stored = shape.of_layer.num_numbers // shape.head_dim, shape.head_dim
    generator = torch.Generator().manual_seed(0)
    for rows in _checked_steps(backend.block_size):
        num_rows = sum(item.num_rows for item in rows)
        num_slots = backend.block_size * (1 + max(max(item.block_ids) for item in rows))
        query, layer = (
            torch.randn(size, generator=generator).to(device=model.device, dtype=model.dtype)
            for size in (
                (num_rows, shape.num_heads, shape.head_dim),
                (num_slots, *(stored[1:] if shape.latent_dim else stored)),
            )
        )
        batch = make_batch(rows, backend.block_size, model.device)
        # From one that hardly weighs to one that outweighs all keys.
        sinks = torch.linspace(-4.0, 8.0, shape.num_heads, device=model.device)
        for window in _CHECKED_WINDOWS[: 1 if shape.latent_dim else None]:
            options: dict[str, Any] = {
                "block_size": backend.block_size,
                "scale": shape.scale,
                "window": window,
                "sinks": sinks if model.has_sinks else None,
            }
            output, expected = (
                attend(query, layer, batch, **options) for attend in (backend.attend, reference)
            )
            _check_equal(output, expected, tolerance)


def _check_store(store: StoreRows, model: Model, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shape, num_rows = model.shape, 3
    num_stored = 2 * shape.num_kv_heads
    heads, layer, cos, sin = (
        torch.randn(size, generator=generator).to(device=model.device, dtype=model.dtype)
        for size in (
            (num_rows, shape.num_heads + num_stored, shape.head_dim),
            (8, num_stored, shape.head_dim),
            *[(num_rows, 1, shape.head_dim)] * 2,
        )
    )
    slots = torch.tensor([6, 0, 3], device=model.device)
    weight = 1.0 + heads[0, : shape.num_heads + shape.num_kv_heads].abs()
    for head_norm in (None, HeadNorm(weight, 1e-6), HeadNorm(weight.float(), 1e-6)):
        layers = layer.clone(), layer.clone()
        queries = [
            each(heads.clone(), own, slots, cos, sin, head_norm)
            for each, own in zip((store, store_rows), layers, strict=True)
        ]
        _check_equal(queries[0], queries[1], tolerance)
        _check_equal(layers[0], layers[1], tolerance)


def _check_equal(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares numbers: the tolerance is one of the larger of 1 and their size, as rounding is."""
    errors = (output.float() - expected.float()).abs() / expected.float().abs().clamp(min=1.0)
    error = float(errors.max())
    if not error < tolerance:
        raise ArithmeticError(f"its numbers are off by {error:.2g}; allowed: {tolerance}")


def _checked_steps(block_size: int) -> Iterator[tuple[SequenceRows, ...]]:
    """Single tokens, rows of different widths over several blocks, branches and a tree."""
    long = 2 * block_size + 5
    even, odd = range(0, 20, 2), range(1, 21, 2)
    single = (SequenceRows(0, 1, long, even), SequenceRows(1, 1, 3, odd))
    yield single[:1]
    yield single
    yield (SequenceRows(0, 5, long - 5, even), SequenceRows(5, 2, 0, odd))
    yield (SequenceRows(0, long, 0, even),)
    branches = (branch_visibility(3, 6, 1), branch_visibility(3, 6, 2), branch_visibility(5, 8, 1))
    yield (SequenceRows(0, 2, 7, even), SequenceRows(2, 3, 3, odd, branches))
    tree = tree_visibility(block_size, (-1, 0, 0, 2, 1, -1, 3))
    yield (SequenceRows(0, 7, block_size, even, tree), SequenceRows(7, 1, 3, odd))
