"""End tokens of GGUF files: those of the header and of the vocabulary, as llama.cpp takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specray.models.gguf.ends import end_token_ids, write_ends

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
FILLED = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def ends(*tokens: str, control: tuple[str, ...] | None = None, **header: int) -> list[str]:
    """Names of the end tokens of a file with these tokens; ``header``: places by role."""
    vocabulary = {token: place for place, token in enumerate(tokens)}
    values = {f"tokenizer.ggml.{role}_token_id": place for role, place in header.items()}
    control_ids = {vocabulary[name] for name in (tokens if control is None else control)}
    return [tokens[token_id] for token_id in end_token_ids(values, vocabulary, control_ids)]


@pytest.mark.parametrize("eos", [0, 2])
def test_text_and_turn_both_end_whichever_of_them_is_eos(eos: int) -> None:
    assert ends(*QWEN, eos=eos) == ["<|endoftext|>", "<|im_end|>"]


def test_filling_in_ends_at_padding_and_at_the_next_file() -> None:
    assert ends(*QWEN, *FILLED, eos=2) == ["<|endoftext|>", "<|im_end|>", *FILLED]


@pytest.mark.parametrize("role", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_every_end_that_the_header_names_counts_whatever_its_text(role: str) -> None:
    assert ends("a", "b", "c", **{role: 1}) == ["b"]


@pytest.mark.parametrize("role", ["bos", "unknown", "padding", "fim_pre", "fim_suf", "fim_mid"])
def test_other_tokens_of_the_header_end_nothing(role: str) -> None:
    assert ends("a", "b", **{role: 1}) == []


def test_an_id_outside_of_the_vocabulary_is_passed_over() -> None:
    assert ends("a", "</s>", eos=1, eot=2) == ["</s>"]


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_end_of_a_part_is_no_end_of_an_answer_in_parts(beside: tuple[str, str]) -> None:
    assert ends("<|end|>", "<|channel|>", *beside, eos=2) == list(beside)
    assert ends("<|end|>", "<|channel|>", *beside, eos=0, eot=0) == list(beside)


def test_end_of_a_turn_of_the_same_name_ends() -> None:
    assert ends("<|endoftext|>", "<|user|>", "<|end|>", eos=0) == ["<|endoftext|>", "<|end|>"]


def test_a_tag_of_html_is_no_end_unless_it_is_a_control_token() -> None:
    gemma = ("<eos>", "<end_of_turn>", "<s>", "</s>")
    assert ends(*gemma, control=gemma[:2], eos=0) == ["<eos>", "<end_of_turn>"]
    assert ends("<unk>", "<s>", "</s>", eos=1) == ["<s>", "</s>"]


@pytest.mark.parametrize(
    "name",
    [
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["),
        *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>"),
    ],
)
def test_ends_of_other_families_are_known_by_name_and_need_not_be_control_tokens(name: str) -> None:
    assert ends("a", name, control=()) == [name]


def test_ends_are_listed_beside_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    write_ends(path, [1, 2])
    assert json.loads(path.read_text()) == {"eos_token_id": [1, 2]}
    path.write_text('{"eos_token_id": 2, "temperature": 0.5}')
    write_ends(path, [1, 2])
    assert json.loads(path.read_text()) == {"eos_token_id": [1, 2], "temperature": 0.5}
