"""Bits of the target: a row's logits are the same alone and in any company, with and without drafts."""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.config import TargetConfig
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from tests.conformance.bits import PlainLogits, RandomSchedule, check_chunks, random_texts
from tests.pairwise import pairs
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runners import cpu_runner

pytest.importorskip("numba")


@functools.cache
def target(dtype: str, num_threads: int, block_size: int | None = None) -> tuple[ModelRunner, PlainLogits]:
    """The embedded target, and what it says of texts alone; both for all tests."""
    config = TargetConfig(
        dtype=dtype,
        num_threads=num_threads,
        block_size=block_size,
        max_model_len=256,
        max_num_seqs=40,
        cache_memory_gib=0.25,
        device="cpu",
    )
    runner = build_runner(config, role="target")
    assert runner.info.is_deterministic, "what these tests prove"
    return runner, PlainLogits(runner)


@settings(max_examples=12, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(("bfloat16", "float32")),
    st.sampled_from((1, 2)),
    st.sampled_from((16, None)),
)
def test_a_row_has_the_same_bits_in_every_schedule(
    random: Random, dtype: str, num_threads: int, block_size: int | None
) -> None:
    """Chunks, chains and trees of drafts, preemption, prefixes of others, neighbours that come and go."""
    runner, plain = target(dtype, num_threads, block_size)
    RandomSchedule(runner, plain, random_texts(6, 40, 256), random).run(12)


@pairs(dtype=("bfloat16", "float32"), num_threads=(1, 2), chunk=(16, 64, 512), num_others=(0, 1, 7, 31))
def test_a_prompt_has_the_same_bits_among_others_and_in_any_chunks(
    dtype: str, num_threads: int, chunk: int, num_others: int
) -> None:
    runner, plain = target(dtype, num_threads)
    check_chunks(runner, plain, random_texts(32, 130, 256), chunk, num_others)


@pairs(name=("deepseek_v3", "youtu"), dtype=("bfloat16", "float32"), num_threads=(1, 2), seed=(0, 1))
def test_latent_attention_has_the_same_bits_in_every_schedule(
    name: str, dtype: str, num_threads: int, seed: int, tmp_path: Path
) -> None:
    """Prompts, single rows and trees are all computed in the latents' space, and captured after a while."""
    wide = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "hidden_size"), 64)
    heads = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
    path = write_checkpoint(tmp_path, name, vocab_size=256, intermediate_size=64, **wide, **heads)
    runner = cpu_runner(path, dtype=dtype, num_threads=num_threads, max_num_seqs=40, block_size=16)
    assert runner.info.is_deterministic
    # Experts are captured where the router's weight is of the model's type.
    assert name == "deepseek_v3" or runner.cpu_graphs is not None
    plain, random = PlainLogits(runner), Random(seed)
    RandomSchedule(runner, plain, random_texts(6, 40, 256), random).run(12)
    check_chunks(runner, plain, random_texts(8, 60, 256), 17, seed)
