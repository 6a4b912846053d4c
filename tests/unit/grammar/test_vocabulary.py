"""Text that a grammar forces is written as text, whatever tokens the vocabulary has by the same name."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specray.demo.paths import demo_target_path
from specray.errors import InvalidRequestError
from specray.grammar import GrammarCompiler
from specray.grammar.forms import json_grammar
from specray.grammar.vocabulary import TextVocabulary
from specray.tokenization import Tokenizer
from specray.types import Grammar, GrammarKind

EOS, CALL, CALL_END = 1, 4096, 4097
NAMES = ("<|end|>", "<tool_call>", "</tool_call>")
"""A token that ends outputs, and two added ones that are not special."""


@cache
def tokenizer() -> Tokenizer:
    """The embedded tokenizer, whose second token is called ``<|end|>``, with two more."""
    text = json.loads((demo_target_path() / "tokenizer.json").read_text(encoding="utf-8"))
    for token in text["added_tokens"]:
        if token["id"] == EOS:
            text["model"]["vocab"]["<|end|>"] = text["model"]["vocab"].pop(token["content"])
            token["content"] = "<|end|>"
    text["normalizer"] = {"type": "NFC"}
    backend = Backend.from_str(json.dumps(text))
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in NAMES[1:]])
    return Tokenizer(backend, eos_token_ids=[EOS])


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), vocab_size=tokenizer().vocab_size)


def written(grammar: Grammar, limit: int = 400) -> str:
    """The text under a grammar that leaves no choice of it, by the first legal token each time."""
    compiler().check(grammar, field="guided")
    matcher, output = compiler().matcher(grammar), list[int]()
    while len(output) < limit:
        bits = np.unpackbits(matcher.masks(output)[0].view(np.uint8), bitorder="little")
        legal = np.flatnonzero(bits[: tokenizer().vocab_size]).tolist()
        if EOS in legal:
            assert legal == [EOS]
            break
        assert not set(legal) & {CALL, CALL_END}
        assert matcher.forced(output, 1) in ((), (legal[0],))
        output.append(legal[-1])
    return tokenizer().decode(output, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_itself_reads_the_name_as_the_token(name: str) -> None:
    assert tokenizer().control_ids.intersection(tokenizer().encode_inner(f"a {name}"))


@pytest.mark.parametrize(
    "text", [*NAMES, *(f"a {name} b" for name in NAMES), "".join(NAMES), 40 * "ab <tool_call>"]
)
def test_a_choice_is_written_as_text(text: str) -> None:
    assert written(Grammar(GrammarKind.LARK, f"start: {json.dumps(text)}")) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_name_beside_another_choice_is_written_as_text(name: str) -> None:
    grammar = Grammar(GrammarKind.LARK, f'start: "x" ({json.dumps(name)} | {json.dumps(name + "!")}) "."')
    assert written(grammar) in (f"x{name}.", f"x{name}!.")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", ["const", "enum", "key", "pattern"])
def test_values_keys_and_patterns_of_json_are_written_as_text(name: str, schema: str) -> None:
    pattern = "^" + name.replace("|", r"\|") + "$"
    value = {"const": name} if schema == "const" else {"enum": [name]}
    value = {"type": "string", "pattern": pattern} if schema == "pattern" else value
    key = name if schema == "key" else "k"
    properties = {
        "type": "object",
        "properties": {key: value},
        "required": [key],
        "additionalProperties": False,
    }
    assert json.loads(written(json_grammar(properties, is_compact=True))) == {key: name}


def test_regular_expressions_are_written_as_text() -> None:
    assert written(Grammar(GrammarKind.REGEX, r"<tool_call>\n<\|end\|>")) == "<tool_call>\n<|end|>"


def test_text_that_the_tokenizer_would_change_is_written_as_it_is() -> None:
    decomposed = "cafe\u0301 <|end|>"
    assert tokenizer().decode(tokenizer().encode(decomposed), skip_special_tokens=False) != decomposed
    assert written(Grammar(GrammarKind.LARK, f"start: {json.dumps(decomposed)}")) == decomposed


@pytest.mark.parametrize("reference", [f"<[{CALL}]>", "<tool_call>"])
def test_a_token_that_a_grammar_names_is_the_token(reference: str) -> None:
    matcher = compiler().matcher(Grammar(GrammarKind.LARK, f'start: {reference} "<tool_call>"'))
    spelled = matcher.forced([], 99)
    assert spelled[0] == CALL and CALL not in spelled[1:]
    assert tokenizer().decode(spelled) == "<tool_call><tool_call>"


def narrow_vocabulary() -> Tokenizer:
    """Letters and few signs: no ``<`` but in one token, and no way to write ``é``."""
    table = {"a": 0, "b": 1, '"': 2, ":": 3, "{": 4, "}": 5, "<a": 6, "Ġ": 7, "<end>": 8}
    backend = Backend(models.BPE(vocab=table, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=[8])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.LARK, 'start: "ab" | "<end>"'),
        Grammar(GrammarKind.REGEX, "a<end>"),
        json_grammar({"enum": ["b", "<end>"]}),
        json_grammar({"type": "object", "properties": {"<end>": {"const": "a"}}}),
        json_grammar({"type": "object", "properties": {"a": {"const": "<end>"}}}),
    ],
)
def test_a_text_that_cannot_be_written_otherwise_is_refused(grammar: Grammar) -> None:
    narrow = narrow_vocabulary()
    with pytest.raises(InvalidRequestError, match=r"guided cannot be enforced: .*(<end>|vocabulary)"):
        GrammarCompiler(narrow, vocab_size=narrow.vocab_size).check(grammar, field="guided")


def test_a_text_is_spelled_where_some_tokens_write_it() -> None:
    vocabulary = TextVocabulary(narrow_vocabulary(), 9)
    assert vocabulary.can_write("b<a") and vocabulary("b<a") == [1, 6]
    assert not vocabulary.can_write("<b") and not vocabulary.can_write("a" * 40 + "\u00e9")


def test_a_token_without_a_logit_is_not_used() -> None:
    table = {"a": 0, "<": 1, ">": 2, "Ġ": 3, "<a>": 40}
    backend = Backend(models.BPE(vocab=table, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<a>", special=False)])
    vocabulary = TextVocabulary(Tokenizer(backend, eos_token_ids=[3]), 8)
    assert vocabulary("<a>a") == [1, 0, 2, 0]


def test_tokens_that_are_not_bytes_are_refused() -> None:
    backend = Backend(models.WordPiece(vocab={"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="not bytes of the text"):
        TextVocabulary(Tokenizer(backend, eos_token_ids=[2]), 3)
