"""The fingerprint is that of transformers' vocabulary, however it was read."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from specray.demo.paths import demo_draft_path, demo_target_path
from specray.errors import ConfigError
from specray.tokenization import load_tokenizer
from specray.tokenization.fingerprint import (
    library_vocabulary,
    read_vocabulary,
    record_vocabulary,
    tokenizer_vocabulary,
)
from tests.unit.tokenization.tiny_tokenizer import write_tiny_tokenizer

LETTERS = dict(zip(string.ascii_lowercase, range(3, 29), strict=True))


def write_config(directory: Path, model_type: str) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))


def words(directory: Path, model_type: str = "llama", prefix: str = "", **special: Any) -> Path:
    """Words, as the tests' checkpoints have them."""
    vocab = {"<s>": 0, "</s>": 1, **{f"{prefix}w{i}": i for i in range(2, 9)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **special).save_pretrained(directory)
    write_config(directory, model_type)
    return directory


def llama(directory: Path, model_type: str = "llama") -> Path:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **LETTERS, "ab": 29}
    LlamaTokenizer(vocab=vocab, merges=[("a", "b")]).save_pretrained(directory)
    write_config(directory, model_type)
    return directory


def qwen(directory: Path, model_type: str = "qwen3") -> Path:
    vocab = {**{letter: place - 3 for letter, place in LETTERS.items()}, "ab": 26, "<|endoftext|>": 27}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[("a", "b")])
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<think>")])
    tokenizer.save_pretrained(directory)
    write_config(directory, model_type)
    return directory


def change_json(file: Path, **values: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}))


def with_settings(write: Callable[[Path], Path], **values: Any) -> Callable[[Path], Path]:
    """The same tokenizer with other settings beside it."""

    def changed(directory: Path) -> Path:
        change_json(write(directory) / "tokenizer_config.json", **values)
        return directory

    return changed


def with_listed_tokens(write: Callable[[Path], Path], **others: str) -> Callable[[Path], Path]:
    """As older versions of the library save it, with the added tokens in tokenizer_config.json as well."""

    def changed(directory: Path) -> Path:
        write(directory)
        listed = {
            str(token.pop("id")): token
            for token in json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
        }
        for token_id, content in others.items():
            flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
            listed[token_id.removeprefix("_")] = {"content": content, "special": True, **flags}
        change_json(directory / "tokenizer_config.json", added_tokens_decoder=listed)
        return directory

    return changed


def tiny(directory: Path) -> Path:
    write_tiny_tokenizer(directory)
    write_config(directory, "llama")
    return directory


def padded(directory: Path) -> Path:
    file = words(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_padding(pad_token="<pad>", pad_id=9)
    tokenizer.save(str(file))
    return directory


def with_file(write: Callable[[Path], Path], name: str, values: Any) -> Callable[[Path], Path]:
    def changed(directory: Path) -> Path:
        (write(directory) / name).write_text(json.dumps(values))
        return directory

    return changed


READ: dict[str, Callable[[Path], Path]] = {
    "target": lambda _: demo_target_path(),
    "draft": lambda _: demo_draft_path(),
    "words": words,
    "words-qwen3": lambda directory: words(directory, "qwen3"),
    "words-mistral": lambda directory: words(directory, "mistral"),
    "words-fast": with_settings(words, tokenizer_class="PreTrainedTokenizerFast"),
    "words-named": lambda directory: words(directory, pad_token="</s>", additional_special_tokens=["w3"]),
    "words-added": lambda directory: words(directory, pad_token="<pad>"),
    "words-listed": with_listed_tokens(words),
    "tiny": tiny,
    "llama": llama,
    "llama-fast": with_settings(llama, tokenizer_class="LlamaTokenizerFast"),
    "llama-listed": with_listed_tokens(llama),
    "llama-mistral": lambda directory: llama(directory, "mistral"),
    "qwen2": lambda directory: qwen(directory, "qwen2"),
    "qwen3": qwen,
    "qwen-listed": with_listed_tokens(qwen),
}
LEFT: dict[str, Callable[[Path], Path]] = {
    "words-gpt2": lambda directory: words(directory, "gpt2"),
    "words-without-class": with_settings(words, tokenizer_class=None),
    "words-pad": with_settings(words, pad_token="<pad>"),
    "words-extra": with_settings(words, additional_special_tokens=["<a>", "<b>"]),
    "words-extra-by-name": with_settings(words, extra_special_tokens={"image_token": "<image>"}),
    "words-more": with_listed_tokens(words, _9="<more>"),
    "words-in-a-file": with_file(words, "added_tokens.json", {"<more>": 9}),
    "words-in-a-map": with_file(words, "special_tokens_map.json", {"pad_token": {"content": "<pad>"}}),
    "words-qwen2": lambda directory: words(directory, "qwen2"),
    "padded": padded,
    "llama-pad": with_settings(llama, pad_token="<pad>"),
    "llama-more": with_listed_tokens(llama, _30="<more>"),
    "qwen-llama": lambda directory: qwen(directory, "llama"),
    "qwen-fewer": with_settings(qwen, added_tokens_decoder={}),
}


@pytest.mark.parametrize("name", READ)
def test_vocabulary_is_read_without_the_library(name: str, tmp_path: Path) -> None:
    directory = READ[name](tmp_path)
    vocabulary = read_vocabulary(directory)
    assert vocabulary is not None
    assert vocabulary == library_vocabulary(str(directory))


@pytest.mark.parametrize("name", LEFT)
def test_vocabulary_that_the_library_may_change_is_left_to_it(name: str, tmp_path: Path) -> None:
    directory = LEFT[name](tmp_path)
    assert read_vocabulary(directory) is None
    tokens = library_vocabulary(str(directory))
    expected = "".join(f"{tokens[token]}:{token}\n" for token in sorted(tokens, key=lambda t: (tokens[t], t)))
    assert (
        tokenizer_vocabulary(str(directory), directory).fingerprint
        == hashlib.sha256(expected.encode()).hexdigest()
    )


def test_fingerprint_of_the_embedded_pair() -> None:
    """Processes of different versions compare it."""
    path = demo_draft_path()
    tokens = library_vocabulary(str(path))
    digest = hashlib.sha256()
    for token, token_id in sorted(tokens.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}:{token}\n".encode())
    assert tokenizer_vocabulary(str(path), path).fingerprint == digest.hexdigest()
    assert tokenizer_vocabulary(str(path)).fingerprint == digest.hexdigest()


def test_equal_vocabularies_have_equal_fingerprints(tmp_path: Path) -> None:
    one = words(tmp_path / "one")
    other = words(tmp_path / "other", "qwen3")
    different = words(tmp_path / "different", prefix="x")
    fingerprints = [tokenizer_vocabulary(str(path), path).fingerprint for path in (one, other, different)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert {len(fingerprint) for fingerprint in fingerprints} == {64}


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "no such"}}'])
def test_damaged_file_is_refused_in_the_librarys_words(tmp_path: Path, text: str) -> None:
    (words(tmp_path) / "tokenizer.json").write_text(text)
    assert read_vocabulary(tmp_path) is None
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded: "):
        tokenizer_vocabulary(str(tmp_path), tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    write_config(tmp_path, "llama")
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded: "):
        tokenizer_vocabulary(str(tmp_path), tmp_path)


def light(directory: Path) -> Path:
    """As this package writes tokenizers for GGUF files, of a model whose class the library would choose."""
    qwen(directory, "qwen2")
    change_json(directory / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    (directory / "model.gguf").symlink_to(directory / "file.gguf")
    return directory


def test_vocabulary_of_a_light_checkpoint_is_the_one_that_texts_are_read_with(tmp_path: Path) -> None:
    directory = light(tmp_path)
    assert read_vocabulary(directory) == load_tokenizer(directory).vocabulary


def test_a_damaged_tokenizer_of_a_light_checkpoint_is_not_guessed_at(tmp_path: Path) -> None:
    directory = light(tmp_path)
    change_json(directory / "tokenizer.json", model={})
    assert read_vocabulary(directory) is None


def test_what_a_light_checkpoint_records_holds_until_its_tokenizer_changes(tmp_path: Path) -> None:
    directory = light(tmp_path)
    read = tokenizer_vocabulary(str(directory), directory)
    record_vocabulary(directory)
    recorded = tokenizer_vocabulary(str(directory), directory)
    assert "ids" not in vars(recorded)
    assert (recorded.fingerprint, recorded.num_token_ids) == (read.fingerprint, read.num_token_ids)
    assert "ids" not in vars(recorded) and recorded.ids == read.ids
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    change_json(
        directory / "tokenizer.json", added_tokens=[*tokens, {**tokens[0], "content": "<more>", "id": 999}]
    )
    changed = tokenizer_vocabulary(str(directory), directory)
    assert changed.num_token_ids == 1000 and changed.fingerprint != read.fingerprint
