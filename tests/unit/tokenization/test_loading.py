"""Loading of tokenizers: end tokens, chat templates, with and without transformers, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.tokenization import ChatMessage, load_tokenizer
from tests.unit.tokenization.tiny_tokenizer import CHAT_TEMPLATE, EOS, tiny_tokenizer, write_tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def test_load_reads_eos_from_all_three_files(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = {"eos_token_id": 8, "model_type": "llama", "text_config": {"eos_token_id": [10, 8]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).eos_token_ids == (EOS, 7, 8, 9, 10)


@pytest.mark.slow
def test_load_through_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    # A flag that may change the post-processor sends loading through transformers.
    write_tiny_tokenizer(tmp_path, add_eos_token=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": EOS}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("def hello")[:2] == TOKENIZER.encode("def hello")[:2]
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert loaded.has_chat_template
    assert loaded.eos_token_ids == (EOS,)


@pytest.mark.parametrize("is_verbatim", [True, False])
@pytest.mark.parametrize(
    ("names", "has_chat"), [(("tool_use", "default"), True), (("default",), True), (("tool_use",), False)]
)
def test_of_several_chat_templates_the_default_is_taken(
    tmp_path: Path, is_verbatim: bool, names: tuple[str, ...], has_chat: bool
) -> None:
    texts = {"default": CHAT_TEMPLATE, "tool_use": "wrong"}
    templates = [{"name": name, "template": texts[name]} for name in names]
    write_tiny_tokenizer(tmp_path, chat_template=templates, add_eos_token=not is_verbatim)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.has_chat_template is has_chat
    if has_chat:
        assert loaded.rendered([ChatMessage("user", "hello")]).text == "[user]hello[assistant]"


@pytest.mark.slow
def test_load_of_a_verbatim_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    code = (
        "import sys; from specray.tokenization import load_tokenizer; "
        f"t = load_tokenizer({str(tmp_path)!r}); assert t.encode('def') == (259,); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_load_of_a_damaged_file_is_a_config_error(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match=r"tokenizer"):
        load_tokenizer(tmp_path)
