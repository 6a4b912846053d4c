"""Steps in which rows have adapters: the merged model's numbers, and bits that depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.inputs import SequenceInput
from specray.engine.runner.cpu_graphs import CpuGraphForward
from specray.engine.runner.runner import ModelRunner
from tests.unit.engine.adapters.files import adapted_runner, put, write_adapter
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from tests.unit.engine.runners import cpu_runner

PROMPT = [5, 7, 9, 11, 13, 2, 60, 33]
SLOTS = (0, 1, -1, 2, 3, 0, -1, 1)
"""Of a batch of eight sequences, with four adapters."""
NUM_STEPS = 5
"""So many that steps of one shape are recorded, and run again."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose steps are recorded: all sizes are whole blocks."""
    return write_checkpoint(tmp_path_factory.mktemp("recorded"), "llama", intermediate_size=96)


def item(tokens: Sequence[int], start: int, block: int, slot: int, num_logits: int = 1) -> SequenceInput:
    return SequenceInput(tokens, start, [block], num_logits, adapter_slot=slot)


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * place) % 90 + 2 for place in range(6 + index)]


def greedy(runner: ModelRunner, slot: int, num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    logits = runner.run([item(tokens, 0, 0, slot)]).logits
    while len(tokens) < len(PROMPT) + num_tokens:
        tokens.append(int(logits[0].argmax()))
        logits = runner.run([item(tokens[-1:], len(tokens) - 1, 0, slot)]).logits
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama-biased-scaled", {"use_rslora": True}),
        ("phi3", {"rank": 1}),
        ("gemma3", {"part": ".default"}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
        pytest.param("granite", {"rank": 8}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"alpha_pattern": {"q_proj": 8}}, marks=pytest.mark.slow),
    ],
)
def test_logits_and_tokens_are_those_of_the_merged_model(
    tmp_path: Path, checkpoint: Callable[[str], Path], name: str, config: dict[str, Any]
) -> None:
    """Joined weights, biases, normed outputs, layers beside experts; another adapter is in the next slot."""
    base = checkpoint(name)
    written = write_adapter(tmp_path / "adapters" / "x", base, **config)
    write_adapter(tmp_path / "adapters" / "y", base, seed=9)
    runner = adapted_runner(base, tmp_path / "adapters", ("y", "x"))
    reference = reference_model(written.merged(tmp_path / "merged"))
    expected = reference_logits(reference, PROMPT)
    logits = runner.run([item(PROMPT, 0, 0, 1, len(PROMPT))]).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert float((expected - reference_logits(reference_model(base), PROMPT)).abs().max()) > 0.1
    assert greedy(runner, 1, 12) == reference_greedy(reference, PROMPT, 12)


def test_an_adapter_of_alpha_zero_adds_nothing(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path / "x", llama, lora_alpha=0)
    runner = adapted_runner(llama, tmp_path, ("x",))
    expected = cpu_runner(llama).run([item(PROMPT, 0, 0, -1, len(PROMPT))]).logits
    assert torch.equal(runner.run([item(PROMPT, 0, 0, 0, len(PROMPT))]).logits, expected)


def outputs_of(runner: ModelRunner, batch: Sequence[tuple[int, int]]) -> dict[int, torch.Tensor]:
    """Logits of prompts in two pieces and of steps after them, by the number of the sequence.

    Args:
        batch: numbers of sequences, and their slots.
    """
    found: dict[int, list[torch.Tensor]] = {index: [] for index, _ in batch}

    def run(items: Sequence[SequenceInput]) -> None:
        logits, first = runner.run(items).logits, 0
        for (index, _), each in zip(batch, items, strict=True):
            found[index].append(logits[first : first + each.num_logits].clone())
            first += each.num_logits

    prompts = {index: prompt_of(index) for index, _ in batch}
    run([item(prompts[index][:4], 0, index, slot, 0) for index, slot in batch])
    run([item(prompts[index][4:], 4, index, slot) for index, slot in batch])
    for step in range(NUM_STEPS):
        run([item([40 + step, 3], len(prompts[index]) + 2 * step, index, slot, 2) for index, slot in batch])
    return {index: torch.cat(pieces) for index, pieces in found.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16", "num_threads": 2},
        {"dtype": "bfloat16", "quantization": "int4"},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32"}, marks=pytest.mark.slow),
    ],
)
def test_a_sequence_has_the_same_bits_alone_and_among_four_adapters(
    tmp_path: Path, recorded: Path, changes: dict[str, Any]
) -> None:
    """And those of no adapter have the bits of a model that knows none."""
    names, base = ("a", "b", "c", "d"), recorded
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, base, seed=seed, rank=1 + 2 * seed)
    runner = adapted_runner(base, tmp_path, names, **changes)
    together = outputs_of(runner, list(enumerate(SLOTS)))
    plain = cpu_runner(base, max_num_seqs=9, **changes)
    for index, slot in enumerate(SLOTS):
        alone = outputs_of(runner, [(index, slot)])[index]
        assert torch.equal(alone, together[index]), f"sequence {index} of slot {slot}"
        without = outputs_of(plain, [(index, -1)])[index]
        assert torch.equal(without, alone) == (slot < 0)


def test_a_slot_that_another_adapter_takes_is_read_anew_by_recorded_steps(
    tmp_path: Path, recorded: Path
) -> None:
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, recorded, seed=seed, rank=2 + 5 * seed)
    runner = adapted_runner(recorded, tmp_path, ("a", "b"))
    assert runner.adapters is not None and isinstance(runner.adapters.forward, CpuGraphForward)
    first, second = (outputs_of(runner, [(0, slot)])[0] for slot in (0, 1))
    assert not torch.equal(first, second)
    put(runner, 0, "b")
    assert torch.equal(outputs_of(runner, [(0, 0)])[0], second)
    runner.adapters.clear(0)
    assert torch.equal(outputs_of(runner, [(0, 0)])[0], outputs_of(runner, [(0, -1)])[0])


def test_a_step_after_one_with_adapters_is_told_everything(tmp_path: Path, recorded: Path) -> None:
    """What a step of the base left behind is not what the step before it was."""
    write_adapter(tmp_path / "a", recorded)
    runner = adapted_runner(recorded, tmp_path, ("a",))
    for _ in range(NUM_STEPS):
        runner.run([item([5], 0, 0, -1)])
    assert runner.advance([0], [7]) is not None
    runner.run([item([5], 0, 0, -1)])
    runner.run([item([5], 0, 1, 0)])
    assert runner.advance([0], [7]) is None


def test_torchs_operators_add_what_the_kernels_do(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors without our kernels."""
    write_adapter(tmp_path / "a", llama)
    write_adapter(tmp_path / "b", llama, seed=1)
    expected = outputs_of(adapted_runner(llama, tmp_path, ("a", "b")), [(0, 1), (1, -1), (2, 0)])
    monkeypatch.setattr("specray.engine.model.operators_cpu.can_tile", lambda weight: False)
    runner = adapted_runner(llama, tmp_path, ("a", "b"))
    found = outputs_of(runner, [(0, 1), (1, -1), (2, 0)])
    for index, logits in expected.items():
        torch.testing.assert_close(found[index], logits, atol=1e-4, rtol=0)
