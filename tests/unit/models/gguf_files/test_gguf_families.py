"""Each family that is read from GGUF: the model of the safetensors original, and the tokens of llama.cpp.

``llama_cpp.json`` holds what llama.cpp v0.5.0 answers for the same files; ``record_llama_cpp.mjs`` makes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.gguf.header import read_header
from specray.models.gguf.converter import convert_file
from specray.models.gguf.families import read_config
from specray.models.gguf.light import is_light, write_light
from specray.tokenization import load_tokenizer
from tests.unit.models.gguf_files.families import LIGHT_MODELS, MODELS, PROMPT
from tests.unit.models.gguf_files.texts import TEXTS, VOCABULARIES
from tests.unit.models.gguf_files.writer import original, write_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LLAMA_CPP: dict[str, Any] = json.loads((Path(__file__).parent / "llama_cpp.json").read_text("utf-8"))
ATOL = 1e-3
"""Largest difference of a logit between specray's forward in float32 and that of transformers; a logit's
deviation is 4, and 1 in Gemma's."""


def test_answers_of_llama_cpp_are_there_for_each_file() -> None:
    assert LLAMA_CPP.keys() == MODELS.keys() | LIGHT_MODELS.keys() | VOCABULARIES.keys()


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return result


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_model_of_its_original_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    import transformers

    tiny = MODELS[name]
    model = original(tiny)
    checkpoint = convert_model(tmp_path, name, model)
    library: Any = transformers
    converted = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = logits_of(model, list(PROMPT))
    assert torch.equal(logits_of(converted, list(PROMPT)), expected)
    answer = LLAMA_CPP[name]
    tokens = [*PROMPT[: tiny.prompt_len], *answer]
    logits = served_logits(served_checkpoint(tmp_path, checkpoint), tokens)
    assert logits[tiny.prompt_len - 1 : -1].argmax(dim=-1).tolist() == answer
    assert float((logits - logits_of(model, tokens)).abs().max()) < ATOL


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_a_file_that_is_served_alone_gives_its_original_and_llama_cpp(name: str, tmp_path: Path) -> None:
    tiny = LIGHT_MODELS[name]
    model = original(tiny)
    path = write_file(tmp_path / "model.gguf", tiny, model)
    header = read_header(path)
    assert is_light(header, read_config(path, header)[0])
    write_light(path, header, tmp_path / "light")
    answer = LLAMA_CPP[name]
    tokens = [*PROMPT[: tiny.prompt_len], *answer]
    logits = served_logits(tmp_path / "light", tokens)
    assert logits[tiny.prompt_len - 1 : -1].argmax(dim=-1).tolist() == answer
    assert float((logits - logits_of(model, tokens)).abs().max()) < ATOL


def convert_model(directory: Path, name: str, model: Any) -> Path:
    path = write_file(directory / "model.gguf", MODELS[name], model)
    convert_file(path, directory / "checkpoint")
    return directory / "checkpoint"


def served_checkpoint(directory: Path, converted: Path) -> Path:
    """A light checkpoint where engines run the model from the file."""
    header = read_header(directory / "model.gguf")
    if not is_light(header, read_config(directory / "model.gguf", header)[0]):
        return converted
    write_light(directory / "model.gguf", header, directory / "light")
    return directory / "light"


def served_logits(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    """Logits that an engine computes of a checkpoint in float32."""
    config = EngineConfig(
        model=str(checkpoint), dtype="float32", device="cpu", max_model_len=128, max_num_seqs=2, num_threads=1
    )
    runner = build_runner(config, role="target")
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(len(tokens))
    return runner.run([SequenceInput(tokens, 0, table.block_ids, len(tokens))]).logits


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_are_cut_as_llama_cpp_cuts_them(name: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[name]
    tiny = vocabulary.model()
    path = write_file(tmp_path / "model.gguf", tiny, original(tiny), tokenizer=vocabulary.keys())
    convert_file(path, tmp_path / "checkpoint")
    tokenizer = load_tokenizer(tmp_path / "checkpoint")
    found = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    assert found == LLAMA_CPP[name]
