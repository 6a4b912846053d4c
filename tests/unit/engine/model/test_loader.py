"""What cannot be loaded says why, naming the value and what is allowed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from specray.engine.device import num_threads_for, num_threads_for_logits, num_usable_cores
from specray.engine.model.description import ModelArgs
from specray.engine.model.loader import load_model
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import change_config, write_checkpoint
from tests.unit.engine.runners import cpu_runner

CPU = torch.device("cpu")


def load(path: Path | str, **options: Any) -> Any:
    return load_model(ModelArgs(str(path), **options), dtype=torch.float32, device=CPU)


def rewrite_config(source: Path, target: Path, **values: Any) -> Path:
    """The same checkpoint with other values in config.json."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    change_config(target, **values)
    return target


def test_what_a_loaded_model_says(llama: Path) -> None:
    loaded = load(llama)
    assert (loaded.vocab_size, loaded.max_model_len) == (96, 128)
    assert loaded.name == llama.name


@pytest.mark.parametrize("path", ["/no/such/model", "./no/such", "not a hub id"])
def test_missing_path(path: str) -> None:
    with pytest.raises(ConfigError, match="does not exist, and is not a hub id"):
        load(path)


def test_file_instead_of_directory(llama: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; a directory"):
        load(llama / "config.json")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        load(tmp_path)


def test_weights_that_are_not_safetensors(tmp_path: Path, llama: Path) -> None:
    rewrite_config(llama, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file"):
        load(tmp_path)


def test_truncated_weights(tmp_path: Path, llama: Path) -> None:
    rewrite_config(llama, tmp_path)
    weights = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"intermediate_size": 64}, "cannot be loaded"),
        # Missing weights are not made up.
        ({"num_hidden_layers": 3}, r"lacks weights: .*layers\.2"),
        ({"model_type": "no_such_model"}, "cannot be loaded"),
    ],
)
def test_configuration_of_another_model(
    tmp_path: Path, llama: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(rewrite_config(llama, tmp_path, **values))


def test_broken_config(tmp_path: Path, llama: Path) -> None:
    rewrite_config(llama, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(tmp_path)


def test_remote_code_is_not_run(tmp_path: Path, llama: Path) -> None:
    rewrite_config(
        llama,
        tmp_path,
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"},
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(tmp_path)


def test_encoder_decoder(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration; allowed: decoder-only"):
        load(tmp_path)


def test_missing_tokenizer(tmp_path: Path, llama: Path) -> None:
    rewrite_config(llama, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        load(tmp_path)


def test_max_model_len_over_the_models(llama: Path) -> None:
    assert load(llama, max_model_len=128).max_model_len == 128
    with pytest.raises(ConfigError, match=r"max_model_len is 129; model .* allows at most 128"):
        load(llama, max_model_len=129)


def test_batch_dependent_rope_is_held_to_its_original_context(tmp_path: Path) -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    path = write_checkpoint(tmp_path, "llama", rope_parameters=rope)
    assert load(path).max_model_len == 32


def test_one_block_holds_a_whole_sequence_on_cpu(llama: Path) -> None:
    runner = cpu_runner(llama, max_num_seqs=5)
    assert (runner.info.block_size, runner.info.num_blocks) == (128, 5)


def test_cache_memory_bounds_the_blocks(llama: Path) -> None:
    # 2 layers x (2 kv heads x 8) x keys and values x 4 bytes = 256 bytes per token, 4096 per block.
    runner = cpu_runner(llama, block_size=16, max_num_seqs=64, cache_memory_gib=4096 * 10 / 2**30)
    assert runner.info.num_blocks == 10


def test_cache_memory_too_small_for_one_sequence(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache_memory_gib is .*; one sequence of max_model_len 128 needs"):
        cpu_runner(llama, cache_memory_gib=1e-6)


def test_decoder_where_it_does_not_apply(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "gpt_neox")
    with pytest.raises(ConfigError, match="forward is 'decoder', which does not cover this 'gpt_neox' model"):
        cpu_runner(path, forward="decoder")
    assert cpu_runner(path).info.forward == "hf"


def test_cuda_where_there_is_none(llama: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="device is 'cuda', but no CUDA device is available"):
        cpu_runner(llama, device="cuda")


def test_threads_for_logits_grow_with_the_vocabulary() -> None:
    sizes = (1, 8_192, 65_536, 131_072, 152_064, 262_144)
    assert [num_threads_for_logits(size, 16) for size in sizes] == [1, 1, 1, 2, 2, 4]
    assert num_threads_for_logits(262_144, 2) == 2


def test_threads_follow_the_configuration(llama: Path) -> None:
    before = torch.get_num_threads()
    try:
        cpu_runner(llama, num_threads=2)
        assert torch.get_num_threads() == 2
        cpu_runner(llama, num_threads=None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_model_of_eight_mebibytes_gets_every_core() -> None:
    assert num_threads_for(8 * 2**20 - 1) == 1
    assert num_threads_for(8 * 2**20) == num_usable_cores()
