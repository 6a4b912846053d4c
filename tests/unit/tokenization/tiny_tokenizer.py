"""Tiny tokenizers for tests, made without a download."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from specray.tokenization import Tokenizer

BOS, EOS = 0, 1
NUM_SPECIAL = 2
MERGES = [("d", "e"), ("de", "f"), ("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_backend() -> Backend:
    """Backend with 256 bytes and a few merges: ids 2..257 are the bytes in alphabet order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": BOS, "</s>": EOS} | {char: NUM_SPECIAL + i for i, char in enumerate(alphabet)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def tiny_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The tiny backend as a Tokenizer."""
    return Tokenizer(
        tiny_backend(),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=chat_template,
        eos_token_ids=[EOS],
    )


def write_tiny_tokenizer(directory: Path, **settings: object) -> Path:
    """Writes the tiny tokenizer as files; ``settings`` are added to tokenizer_config.json."""
    tiny_backend().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


PIECES = [
    "▁My", "▁name", "▁is", "▁John", "John", ".", "▁", "<0xC3>", "<0xA9>", "<0x0A>", "<0x5A>",
]  # fmt: skip
"""Pieces of ``sentencepiece_tokenizer`` by id; the special ``<s>`` and ``<|assistant|>`` follow."""


def sentencepiece_tokenizer(*, chat_template: str | None = None) -> Tokenizer:
    """Tokenizer like Llama 2's: a mark for spaces, byte fallback, no space before a text's first word."""
    vocabulary = {piece: token_id for token_id, piece in enumerate([*PIECES, "<s>", "<|assistant|>"])}
    backend = Backend(WordLevel(vocabulary, "<0x5A>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<|assistant|>")])
    return Tokenizer(backend, chat_template=chat_template)
