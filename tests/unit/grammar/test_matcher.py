"""Masks over windows and trees are those of one token at a time; stops, dead ends and errors are told."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specray.demo.paths import demo_target_path
from specray.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from specray.tokenization import load_tokenizer
from specray.types import Grammar, GrammarKind

VOCAB_SIZE = 4100
"""Width of the logits; more than the tokenizer's 4096 entries, as in padded models."""
EOS, SECOND_EOS = 1, 0
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "n": {"type": "integer", "minimum": 0, "maximum": 9999},
                "ok": {"enum": [True, False]},
            },
            "required": ["name", "n", "ok"],
            "additionalProperties": False,
        }
    ),
)
ANYTHING = Grammar(GrammarKind.REGEX, r"(.|\n)*")
ENDS = {EOS, SECOND_EOS}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer("embedded"), vocab_size=VOCAB_SIZE, eos_token_ids=sorted(ENDS))


@cache
def backend() -> Tokenizer:
    return Tokenizer.from_file(str(demo_target_path() / "tokenizer.json"))


def encode(text: str) -> tuple[int, ...]:
    return tuple(backend().encode(text, add_special_tokens=False).ids)


def legal(row: NDArray[np.int32]) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def one_at_a_time(grammar: Grammar, output_ids: tuple[int, ...]) -> set[int]:
    """The same question to a matcher that never went anywhere else."""
    return legal(compiler().matcher(grammar).masks(output_ids)[0])


def walk(seed: int, matcher: GrammarMatcher, length: int) -> list[int]:
    """A random legal output, at most ``length`` tokens, that has not ended."""
    chance, output = random.Random(seed), list[int]()
    for _ in range(length):
        choices = sorted(legal(matcher.masks(output)[0]) - ENDS)
        if not choices:
            break
        output.append(chance.choice(choices))
    return output


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_window_equal_masks_one_token_at_a_time(seed: int) -> None:
    chance = random.Random(seed)
    output = walk(seed, compiler().matcher(SCHEMA), 14)
    matcher = compiler().matcher(SCHEMA)
    start = 0
    while start < len(output):
        draft = output[start : start + chance.randrange(0, 6)]
        if draft and chance.random() < 0.5:
            draft[chance.randrange(len(draft))] = chance.randrange(VOCAB_SIZE)
        masks = matcher.masks(output[:start], draft)
        for row in range(len(draft) + 1):
            expected = one_at_a_time(SCHEMA, (*output[:start], *draft[:row]))
            assert legal(masks[row]) == expected, (start, draft, row)
            if row < len(draft) and (draft[row] not in expected or draft[row] in ENDS):
                assert all(len(legal(mask)) == VOCAB_SIZE for mask in masks[row + 1 :])
                break
        # What is committed may be shorter than the draft: the next window goes back.
        start += chance.randrange(1, len(draft) + 2)


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_a_tree_are_those_of_each_nodes_path(seed: int) -> None:
    chance = random.Random(seed)
    matcher = compiler().matcher(SCHEMA)
    output = walk(seed, matcher, chance.randrange(0, 8))
    tokens, parents, paths = list[int](), list[int](), list[list[int]]()
    for node in range(12):
        parent = chance.randrange(-1, node)
        path = paths[parent] if parent >= 0 else []
        try:
            choices = sorted(one_at_a_time(SCHEMA, (*output, *path)))
        except GrammarError:
            choices = []
        tokens.append(
            chance.choice(choices) if choices and chance.random() < 0.8 else chance.randrange(VOCAB_SIZE)
        )
        parents.append(parent)
        paths.append([*path, tokens[-1]])
    masks = matcher.masks(output, tokens, parents)
    assert legal(masks[0]) == one_at_a_time(SCHEMA, tuple(output))
    for node, path in enumerate(paths):
        is_reached = (
            all(
                token in one_at_a_time(SCHEMA, (*output, *path[:depth])) and token not in ENDS
                for depth, token in enumerate(path)
            )
            if all(token not in ENDS for token in path[:-1])
            else False
        )
        expected = one_at_a_time(SCHEMA, (*output, *path)) if is_reached else set(range(VOCAB_SIZE))
        assert legal(masks[node + 1]) & set(range(VOCAB_SIZE)) == expected, (node, path)
    # The matcher stands where it stood: the next question is answered as if there had been no tree.
    assert legal(matcher.masks(output)[0]) == one_at_a_time(SCHEMA, tuple(output))


def test_every_end_token_is_legal_exactly_where_the_grammar_may_end() -> None:
    done = encode('{"name": "a", "n": 1, "ok": true}')
    matcher = compiler().matcher(SCHEMA)
    for length in range(len(done)):
        assert not legal(matcher.masks(done[:length])[0]) & ENDS
    assert legal(matcher.masks(done)[0]) == ENDS
    assert matcher.is_complete(done)


def test_a_stop_token_of_the_request_is_legal_where_the_grammar_may_end() -> None:
    stop = encode("!")[0]
    done = encode('{"name": "a", "n": 1, "ok": true}')
    matcher = compiler().matcher(SCHEMA, stop_token_ids=(stop,))
    assert legal(matcher.masks(done)[0]) == ENDS | {stop}
    assert stop not in legal(matcher.masks(done[:2])[0])
    assert matcher.count_legal(done[:-1], (done[-1], stop, 7)) == 2


def test_rows_behind_a_stop_token_allow_everything_and_rows_before_it_do_not() -> None:
    done = encode('{"name": "a", "n": 1, "ok": true}')
    matcher = compiler().matcher(SCHEMA)
    masks = matcher.masks(done[:-1], (done[-1], EOS, 5, 6))
    assert legal(masks[1]) == ENDS
    assert [len(legal(mask)) for mask in masks[2:]] == [VOCAB_SIZE] * 3
    # The stop token was not fed: going back and on again works.
    assert legal(matcher.masks(done)[0]) == ENDS


def test_ids_that_no_token_has_are_never_legal() -> None:
    assert not legal(compiler().matcher(ANYTHING).masks(())[0]) & set(range(4096, VOCAB_SIZE))


def test_a_grammar_that_allows_any_text_allows_every_token_that_is_text() -> None:
    allowed = legal(compiler().matcher(ANYTHING).masks(encode("abc"))[0])
    assert allowed >= ENDS
    assert {token for token in range(4096) if token not in ENDS and "\ufffd" not in piece(token)} <= allowed


def test_legal_tokens_are_counted_up_to_the_first_illegal_one() -> None:
    done = encode('{"name": "a", "n": 1, "ok": true}')
    matcher = compiler().matcher(SCHEMA)
    wrong = (*done[:3], encode("}")[0], *done[4:])
    assert matcher.count_legal((), done) == len(done)
    assert matcher.count_legal((), wrong) == 3
    assert matcher.count_legal((), (EOS,)) == 0
    assert matcher.count_legal(done, (EOS, 5)) == 1
    # Asking does not move it.
    assert matcher.count_legal((), done) == len(done)


def test_forced_tokens_are_what_the_grammar_leaves_no_choice_about() -> None:
    grammar = Grammar(GrammarKind.REGEX, "yes, of course(!|\\?)")
    matcher = compiler().matcher(grammar)
    start = encode("yes")
    forced = matcher.forced(start, 16)
    text = "".join(piece(token) for token in (*start, *forced))
    assert "yes, of course".startswith(text) and len(text) > 8
    assert matcher.forced(start, 1) == forced[:1]


def piece(token_id: int) -> str:
    return str(backend().decode([token_id]))


def test_a_fork_moves_on_its_own() -> None:
    done = encode('{"name": "a", "n": 1, "ok": true}')
    matcher = compiler().matcher(SCHEMA)
    matcher.masks(done[:4])
    other = matcher.fork()
    assert legal(other.masks(done)[0]) == ENDS
    assert legal(matcher.masks(done[:4])[0]) == one_at_a_time(SCHEMA, done[:4])


def test_an_output_that_breaks_its_grammar_is_an_error_and_the_matcher_recovers() -> None:
    matcher = compiler().matcher(SCHEMA)
    done = encode('{"name": "a", "n": 1, "ok": true}')
    with pytest.raises(GrammarError, match="breaks its grammar"):
        matcher.masks(encode("hello"))
    assert legal(matcher.masks(done)[0]) == ENDS


def test_illegal_drafts_and_mask_time_are_counted() -> None:
    fresh = GrammarCompiler(load_tokenizer("embedded"), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    matcher = fresh.matcher(SCHEMA)
    matcher.masks((), (*encode("{"), *encode("}"), 9))
    assert fresh.stats.matchers.num_illegal_drafts == 1
    assert fresh.stats.matchers.mask_s > 0
    fresh.matcher(SCHEMA)
    assert (fresh.stats.num_compiled, fresh.stats.num_cache_hits) == (1, 1)
