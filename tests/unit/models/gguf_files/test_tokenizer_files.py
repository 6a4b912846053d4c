"""Tokenizers written from GGUF headers: the tokens and texts that transformers makes of the same file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specray.models.gguf.keys import UnfitError
from specray.models.gguf.tokenizer_files import write_tokenizer
from specray.tokenization import load_tokenizer
from specray.tokenization.tokenizer import Tokenizer
from tests.unit.models.gguf_files.texts import (
    BYTE_WORDS,
    MERGES,
    SENTENCE_WORDS,
    Vocabulary,
    byte_level,
    sentencepiece,
)
from tests.unit.models.gguf_files.writer import original, write_file

TEXTS = [
    "",
    " ",
    "  a  b\n\n\tx(1234567, 'it''s I'M 12ab1');\r\n",
    "\u00e9\u4e2d\u6587 \u65e5\u672c\u8a9e \ud55c\uad6d \u0627\u0644\u0639 \u0939\u093f\u0928\u094d",
    "\u05e2\u05d1\u05e8 \u0e44\u0e17\u0e22",
    "e\u0301 \u1100\u1161 \ufb01 A\u030a",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f3f3\ufe0f\u200d\U0001f308",
    "<|im_start|>user\n<|end|> a<|start|>b<|endoftext|><tool> <|pad|> <mask>",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # \u00fcn\u00ef\n",
    "0123456789 1,234.5 \u0661\u0662 \u2167 \u00bd",
    "\x00\x01\x7f\u200b\ufeff\u2028x\ufffd\U0010ffff\ue000",
    "don't WON'T we'LL 'S \u2019s",
    "   \n  \n\n   x\u2581\u2581a \u2581 <0x41><0xFF>",
    "aaaaaaaaaa'aa''a a12a12 ab1ab1 He LL",
]
_WORDS = (*BYTE_WORDS, "<|endoftext|>", "<tool>", "<|pad|>", "<|unk|>")
_TYPES = [3, 3, *[1] * (len(BYTE_WORDS) - 2), 1, 4, 3, 1]
_LAST = len(_WORDS) - 1


def _named(family: str, name: str, **settings: Any) -> Vocabulary:
    keys = {"padding_token_id": _LAST - 1, "unknown_token_id": _LAST, "token_type": _TYPES, **settings}
    return Vocabulary(family, _WORDS, {"pre": name, "merges": MERGES, **keys})


def _gemma(family: str, **settings: Any) -> Vocabulary:
    words = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "   ", *SENTENCE_WORDS[3:], "<turn>")
    types = [3, 3, 3, 2, 3, 4, *[6] * 256, *[1] * (len(words) - 263), 3]
    roles = {"padding_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3}
    scores = [-1000.0] * len(words)
    return sentencepiece(family, words, token_type=types, scores=scores, **roles, **settings)


def _sentences(family: str, **settings: Any) -> Vocabulary:
    words = ("<unk>", "<s>", "</s>", *SENTENCE_WORDS[3:], "<tool>")
    draw = random.Random(1)
    scores = [0.0] * 259 + [-float(draw.randrange(5)) for _ in words[259:]]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) - 260), 4]
    return sentencepiece(family, words, token_type=types, scores=scores, **settings)


CASES = {
    **{f"qwen-{family}": _named(family, "qwen2") for family in ("qwen2", "qwen3", "qwen3moe", "llama")},
    "qwen-with-ends": _named("llama", "qwen2", add_bos_token=True, add_eos_token=True),
    "qwen-without-roles": _named(
        "llama", "qwen2", add_bos_token=True, bos_token_id=None, unknown_token_id=None
    ),
    **{
        f"llama-{name}": _named("llama", name)
        for name in ("dbrx", "smaug-bpe", "gpt-4o", "llama4", "qwen35", "deepseek-r1-qwen", "gpt-2")
    },
    **{f"whole-{name}": _named("llama", name, add_bos_token=True) for name in ("llama-bpe", "tekken")},
    "phi3": _sentences("phi3"),
    "phi3-without-bos": _sentences("phi3", add_bos_token=False, add_eos_token=True),
    "gemma2": _gemma("gemma2", add_space_prefix=False),
    "gemma3": _gemma("gemma3"),
}


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file with the vocabulary of a name, and what is written of it."""
    vocabulary = CASES[request.param] if isinstance(request.param, str) else request.param
    tiny = vocabulary.model()
    path = write_file(tmp_path / "model.gguf", tiny, original(tiny), tokenizer=vocabulary.keys())
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text("{}")
    yield path, tmp_path / "ours"


def of_transformers(path: Path, model_type: str) -> Tokenizer:
    """The tokenizer that transformers makes of a file, saved and loaded again, as any checkpoint's."""
    import transformers

    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    directory = path.parent / "theirs"
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return load_tokenizer(directory)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("written", "name"), [(name, name) for name in CASES], indirect=["written"], ids=list(CASES)
)
def test_tokens_and_texts_are_those_of_transformers(written: tuple[Path, Path], name: str) -> None:
    path, directory = written
    write_tokenizer(path, directory)
    ours = load_tokenizer(directory)
    theirs = of_transformers(path, CASES[name].model().config["model_type"])
    if name.startswith("whole-"):
        # transformers does not look for whole pieces, as llama.cpp and the originals do.
        theirs = load_with_whole_pieces(path.parent / "theirs")
    assert ours.vocabulary == theirs.vocabulary
    assert ours.special_names == theirs.special_names
    assert ours.eos_token_ids == theirs.eos_token_ids
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert ours.special_id(role) == theirs.special_id(role), role
    for text in TEXTS:
        for adds in (True, False):
            assert ours.encode(text, add_special_tokens=adds) == theirs.encode(text, add_special_tokens=adds)
    draw = random.Random(0)
    lists = [[draw.randrange(ours.vocab_size) for _ in range(12)] for _ in range(100)]
    for token_ids in [*lists, *(ours.encode(text) for text in TEXTS)]:
        for skips in (True, False):
            found, expected = (each.decode(token_ids, skip_special_tokens=skips) for each in (ours, theirs))
            assert found == expected


def load_with_whole_pieces(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    values = json.loads(file.read_text("utf-8"))
    values["model"]["ignore_merges"] = True
    file.write_text(json.dumps(values), encoding="utf-8")
    return load_tokenizer(directory)


FOREIGN = "<\uff5cend\u2581of\u2581text\uff5c>"
"""A control token with characters that byte-level vocabularies do not spell with."""


def _with_foreign(kind: int) -> Vocabulary:
    words = (*BYTE_WORDS, FOREIGN)
    types = [3, 3, *[1] * (len(BYTE_WORDS) - 2), kind]
    return byte_level("gpt-2", words, token_type=types)


@pytest.mark.parametrize(
    ("written", "kind"), [(_with_foreign(3), 3), (_with_foreign(4), 4)], indirect=["written"]
)
def test_a_control_token_in_any_script_keeps_its_id(written: tuple[Path, Path], kind: int) -> None:
    path, directory = written
    assert write_tokenizer(path, directory).vocabulary[FOREIGN] == len(BYTE_WORDS)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == len(BYTE_WORDS) + 1
    assert tokenizer.encode(f"a{FOREIGN}") == (tokenizer.vocabulary["a"], len(BYTE_WORDS))
    assert tokenizer.is_special(len(BYTE_WORDS)) == (kind == 3)
    assert tokenizer.decode([len(BYTE_WORDS)], skip_special_tokens=False) == FOREIGN


@pytest.mark.parametrize("written", [byte_level("gpt-2"), sentencepiece("llama")], indirect=True)
def test_no_token_is_made_up_that_the_model_has_no_row_for(written: tuple[Path, Path]) -> None:
    path, directory = written
    vocabulary = write_tokenizer(path, directory).vocabulary
    assert not {"<|endoftext|>", "<s>", "</s>", "<bos>"} & vocabulary.keys()
    assert max(vocabulary.values()) == len(vocabulary) - 1


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (byte_level("gpt-2", merges=["1 2", "a"]), "tokenizer.ggml.merges has 'a'; allowed: two tokens"),
        (byte_level("gpt-2", merges=["1 2", "a nothing"]), "tokenizer.ggml.merges cannot be used: "),
        (byte_level("gpt-2", unknown_token_id=9999), "a special token has the id 9999; allowed: 0 to "),
    ],
    indirect=["written"],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(written: tuple[Path, Path], problem: str) -> None:
    path, directory = written
    with pytest.raises(UnfitError) as refused:
        write_tokenizer(path, directory)
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize("written", [byte_level("gpt-2")], indirect=True)
def test_neither_torch_nor_transformers_is_imported(written: tuple[Path, Path]) -> None:
    path, directory = written
    program = (
        "import sys; from pathlib import Path\n"
        "from specray.models.gguf.tokenizer_files import write_tokenizer\n"
        "from specray.tokenization import load_tokenizer\n"
        f"write_tokenizer(Path({str(path)!r}), Path({str(directory)!r}))\n"
        f"load_tokenizer({str(directory)!r})\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'numpy'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]", ended.stderr
