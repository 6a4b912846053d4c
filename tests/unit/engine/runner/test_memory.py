"""The cache takes what weights and a largest step leave; what does not fit names what to lower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.inputs import SequenceInput
from specray.engine.runner import assembly, cache_sizes, determinism
from specray.engine.runner.cuda_graphs import MAX_ROWS
from specray.engine.runner.memory import DrafterMemory, Usage, cache_bytes
from specray.engine.step import CacheShape
from specray.errors import ConfigError
from tests.unit.engine.runners import cpu_config

GIB = 2**30
VOCAB_SIZE = 1000
LOGITS = 4 * 4 * MAX_ROWS * VOCAB_SIZE


class FakeMemory:
    """A device of 80 GiB whose largest step takes one."""

    def __init__(self, free: int, own: int = 0) -> None:
        self._usage = Usage(free, 80 * GIB, own)

    def usage(self) -> Usage:
        return self._usage

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return GIB


def no_step() -> None:
    raise AssertionError("nobody has to know how large a step is")


def test_the_cpu_has_four_gib_and_what_is_configured_is_taken() -> None:
    assert cache_bytes(EngineConfig(), None, VOCAB_SIZE, no_step) == 4 * GIB
    memory = FakeMemory(free=1)
    assert cache_bytes(EngineConfig(cache_memory_gib=1.5), memory, VOCAB_SIZE, no_step) == 3 * GIB // 2


def test_auto_is_a_share_of_what_weights_and_the_largest_step_leave() -> None:
    steps: list[None] = []
    found = cache_bytes(EngineConfig(), FakeMemory(free=60 * GIB), VOCAB_SIZE, lambda: steps.append(None))
    assert found == int(0.92 * (59 * GIB - LOGITS))
    assert len(steps) == 1


def test_auto_keeps_to_its_part_of_a_shared_gpu() -> None:
    config = EngineConfig(ray_actor_options={"num_gpus": 0.25})
    found = cache_bytes(config, FakeMemory(free=70 * GIB, own=5 * GIB), VOCAB_SIZE, lambda: None)
    assert found == int(0.92 * (14 * GIB - LOGITS))
    found = cache_bytes(config, FakeMemory(free=3 * GIB, own=5 * GIB), VOCAB_SIZE, lambda: None)
    assert found == int(0.92 * (2 * GIB - LOGITS))
    assert cache_bytes(config, FakeMemory(free=GIB), VOCAB_SIZE, lambda: None) == 0


def test_auto_leaves_room_for_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_sizes, "CudaMemory", lambda device: FakeMemory(free=60 * GIB))
    monkeypatch.setattr(cache_sizes, "run_peak_step", lambda *arguments: None)
    info: Any = SimpleNamespace(device=torch.device("cuda"), vocab_size=VOCAB_SIZE)
    forward: Any = SimpleNamespace(cache_shape=CacheShape(1, 1, 8))
    config = EngineConfig(max_num_seqs=10)
    found = cache_sizes.cache_bytes_for(
        config, info, forward, None, DrafterMemory(GIB, 7, step_bytes=78_000_000)
    )
    assert found == int(0.92 * (58 * GIB - LOGITS - 78_000_000))


def test_a_largest_step_without_room_names_the_setting() -> None:
    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")

    with pytest.raises(ConfigError) as raised:
        cache_bytes(EngineConfig(), FakeMemory(free=GIB), VOCAB_SIZE, step)
    assert str(raised.value) == (
        "the device has too little memory: max_num_batched_tokens is 2048; lower it "
        "(CUDA out of memory. Tried to allocate 2 GiB.)"
    )


def config_of(path: Path, **values: object) -> EngineConfig:
    return cpu_config(path, max_num_seqs=2, max_model_len=64, **values)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("lower", "the weights of model .* take 0.0 GiB in all; take a smaller model or a larger tensor_par"),
        ("_cache", "cache_memory_gib is auto; lower it"),
    ],
)
def test_what_does_not_fit_at_the_start_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(assembly, broken, too_much)
    with pytest.raises(ConfigError, match=message):
        assembly.build_runner(config_of(llama), role="target")


def test_a_step_without_room_names_what_to_lower(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = assembly.build_runner(config_of(llama), role="target")

    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runner, "_forward", too_much)
    with pytest.raises(torch.OutOfMemoryError, match="a step of 3 rows found no memory; lower max_num_batch"):
        runner.run([SequenceInput([1, 2, 3], 0, [0], 1)])


@pytest.mark.parametrize("num_rows", [16, 100, 256])
def test_the_largest_step_has_all_rows_and_their_logits(
    llama: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    config = config_of(llama, max_num_batched_tokens=num_rows, attention="gather", block_size=16)
    runner = assembly.build_runner(config, role="target")
    seen: list[tuple[int, int]] = []
    run = assembly.ModelRunner.run

    def recorded(self: object, inputs: list[SequenceInput]) -> object:
        output = run(self, inputs)  # type: ignore[arg-type]
        seen.append((max(len(item.token_ids) for item in inputs), len(output.logits)))
        return output

    monkeypatch.setattr(assembly.ModelRunner, "run", recorded)
    cache_sizes.run_peak_step(config, runner.info, runner.forward)
    assert seen == [(min(64, num_rows), num_rows)]


def test_attention_is_tried_before_any_weight_is_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes beyond its buffers must have nothing there that it can spoil."""
    order: list[str] = []
    choose, lower = determinism.choose_backend, assembly.lower

    def chosen(*arguments: object) -> object:
        order.append("attention")
        return choose(*arguments)  # type: ignore[arg-type]

    def lowered(*arguments: object, **options: object) -> object:
        order.append("weights")
        return lower(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(determinism, "choose_backend", chosen)
    monkeypatch.setattr(assembly, "lower", lowered)
    assembly.build_runner(config_of(llama, attention="gather"), role="target")
    assert order == ["attention", "weights"]
