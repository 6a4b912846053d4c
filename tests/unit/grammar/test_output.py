"""Tests of what a router asks of a grammar."""

from __future__ import annotations

from specray.grammar import GuidedOutputs, PreparedCompiler
from specray.grammar.forms import json_grammar
from specray.tokenization import Tokenizer, load_tokenizer
from specray.types import Grammar, GrammarKind

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}


def tokenizer() -> Tokenizer:
    return load_tokenizer("embedded")


def outputs() -> GuidedOutputs:
    return GuidedOutputs(PreparedCompiler.of(tokenizer()))


async def test_forced_tokens_spell_what_the_grammar_leaves_no_choice_about() -> None:
    guided = await outputs()(json_grammar(SCHEMA), ())
    output = tokenizer().encode('{"', add_special_tokens=False)
    forced = guided.forced(output, 32)
    assert tokenizer().decode(forced).startswith("color")
    assert guided.forced(output, 1) == forced[:1]
    assert guided.count_legal(output, forced) == len(forced)


async def test_illegal_token_and_all_behind_it_are_not_legal() -> None:
    guided = await outputs()(json_grammar(SCHEMA), ())
    [legal] = tokenizer().encode("{", add_special_tokens=False)
    [illegal] = tokenizer().encode("x", add_special_tokens=False)
    assert guided.count_legal((), (legal, illegal, legal)) == 1
    assert guided.count_legal((legal,), (illegal,)) == 0


async def test_grammar_that_cannot_be_compiled_says_nothing() -> None:
    guided = await outputs()(Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}'), ())
    assert guided.forced((), 8) == ()
    assert guided.count_legal((), (1, 2, 3)) == 3


async def test_output_that_breaks_its_grammar_says_nothing() -> None:
    guided = await outputs()(json_grammar(SCHEMA), ())
    broken = tokenizer().encode("hello", add_special_tokens=False)
    assert guided.forced(broken, 8) == ()
    assert guided.count_legal(broken, (1, 2)) == 2
    # And it can be asked again about an output that does not.
    assert guided.count_legal((), tokenizer().encode('{"', add_special_tokens=False)) >= 1
