"""Outputs under a grammar: valid, and the same whatever is drafted; over the embedded pair in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.target.engine import TargetEngine
from specray.grammar import GrammarCompiler
from specray.grammar.forms import json_grammar
from specray.serving.tools.harmony.channels import Channels, Marker
from specray.serving.tools.harmony.forced import forced_channels
from specray.serving.tools.harmony.prompt import ChannelPrompt, PromptEnd
from specray.serving.tools.request import parse_tools
from specray.tokenization import Tokenizer, load_tokenizer
from specray.types import Grammar, GrammarKind, ItemFailed, SamplingParams, Verdict, Verification
from tests.unit.engine.harness import Session, outcomes, propose, verify, verify_all, verify_item

CONFIG: dict[str, Any] = {
    name: {"dtype": "float32", "profile_s": 0, "max_model_len": 256, "max_num_seqs": 4, "num_threads": 1}
    for name in ("target", "draft")
}
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["color", "sizes", "is_new"],
    "additionalProperties": False,
}
MAX_TOKENS = 32
Drafter = Callable[[Session, int], DraftTokens]


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("embedded")


@cache
def target() -> TargetEngine:
    return build_target_engine(parse_config(CONFIG))


@cache
def draft() -> DraftEngine:
    return build_draft_engine(parse_config(CONFIG))


def sampling(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "temperature": 0.0,
        "seed": 7,
        "stop_token_ids": tokenizer().eos_token_ids,
        "grammar": json_grammar(SCHEMA),
    }
    return SamplingParams(**{**values, **changes})


def generate(drafter: Drafter, num_drafts: int, **changes: Any) -> list[int]:
    """An output up to and without its stop token, or of MAX_TOKENS tokens."""
    session = started(f"r{random.random()}", **changes)
    num_prompt, stops = len(session.token_ids), set(tokenizer().eos_token_ids)
    try:
        while len(session.token_ids) < num_prompt + MAX_TOKENS:
            verify(target(), session, drafter(session, num_drafts))
            output = session.token_ids[num_prompt:]
            ends = [index for index, token in enumerate(output) if token in stops]
            if ends:
                return output[: ends[0]]
        return session.token_ids[num_prompt : num_prompt + MAX_TOKENS]
    finally:
        target().release([session.request_id])
        draft().release([session.request_id])


def started(name: str, **changes: Any) -> Session:
    prompt = list(tokenizer().encode("ITEM = "))
    return Session(name, prompt, sampling(num_prompt_tokens=len(prompt), **changes))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), vocab_size=tokenizer().vocab_size)


def none(session: Session, count: int) -> DraftTokens:
    return NO_DRAFT


def by_model(session: Session, count: int) -> DraftTokens:
    return propose(draft(), session, count) if count else NO_DRAFT


def by_chance(session: Session, count: int) -> DraftTokens:
    chance = random.Random(len(session.token_ids))
    return DraftTokens(tuple(chance.randrange(tokenizer().vocab_size) for _ in range(count)))


def by_knowing(output: list[int]) -> Drafter:
    """Proposes the right tokens, and stop tokens and others behind the end."""

    def propose_known(session: Session, count: int) -> DraftTokens:
        place = len(session.token_ids) - session.sampling.num_prompt_tokens
        known = [*output[place:], *tokenizer().eos_token_ids, 9, 9, 9, 9, 9, 9, 9, 9]
        return DraftTokens(tuple(known[:count]))

    return propose_known


def by_tree(output: list[int]) -> Drafter:
    """Proposes trees: right and wrong tokens beside each other, stop tokens and others behind the end."""
    source = random.Random(len(output))

    def propose_tree(session: Session, count: int) -> DraftTokens:
        place = len(session.token_ids) - session.sampling.num_prompt_tokens
        known = [*output[place:], *tokenizer().eos_token_ids, *[9] * 20]
        parents = tuple(source.randrange(max(-1, node - 4), node) for node in range(3 * count))
        depths = DraftTokens((0,) * len(parents), parents).depths
        tokens = (
            known[depth] if source.random() < 0.7 else source.randrange(tokenizer().vocab_size)
            for depth in depths
        )
        return DraftTokens(tuple(tokens), parents)

    return propose_tree


def checked(output: list[int]) -> list[int]:
    if len(output) < MAX_TOKENS:
        jsonschema.validate(json.loads(tokenizer().decode(output)), SCHEMA)
    return output


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5}]
)
def test_output_under_a_grammar_is_valid_and_the_same_with_any_draft(changes: dict[str, Any]) -> None:
    plain = checked(generate(none, 0, **changes))
    assert plain
    for num_drafts in (1, 6):
        for drafter in (by_model, by_chance, by_knowing(plain), by_tree(plain)):
            assert generate(drafter, num_drafts, **changes) == plain, (num_drafts, drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_forced", [True, False])
def test_text_with_the_name_of_a_stop_token_is_the_same_with_any_draft(
    temperature: float, is_forced: bool
) -> None:
    ends = tokenizer().eos_token_ids
    texts = [f"a {name} b" for name in tokenizer().token_strings(ends)]
    texts = texts[:1] if is_forced else [*texts, *(text[2:] for text in texts), "a <"]
    grammar = Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(text) for text in texts))
    changes: dict[str, Any] = {"grammar": grammar, "temperature": temperature}
    plain = generate(none, 0, **changes)
    assert tokenizer().decode(plain, skip_special_tokens=False) in texts
    for num_drafts in (1, 6):
        for drafter in (by_model, by_chance, by_knowing(plain), by_tree(plain)):
            assert generate(drafter, num_drafts, **changes) == plain, (num_drafts, drafter)


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channels]:
    """Some tokens of the vocabulary as gpt-oss's control tokens."""
    ids = {marker: 600 + index for index, marker in enumerate(Marker)}
    monkeypatch.setattr(Tokenizer, "control_ids", frozenset({*tokenizer().eos_token_ids, *ids.values()}))
    for engine in (target, draft):
        engine.cache_clear()
    yield Channels(ids)
    for engine in (target, draft):
        engine.cache_clear()


def test_channels_under_a_grammar_are_the_same_with_any_draft(channels: Channels) -> None:
    function = {"name": "f", "strict": True, "parameters": SCHEMA}
    kinds = set[int]()
    for choice, place, temperature in (("required", PromptEnd.ROLE, 0.0), ("auto", PromptEnd.REASONING, 1.0)):
        use = parse_tools([{"type": "function", "function": function}], choice, None)
        grammar = forced_channels(ChannelPrompt(channels, place), use, None, field="")
        changes: dict[str, Any] = {"grammar": grammar, "temperature": temperature}
        plain = generate(none, 0, **changes)
        kinds.update(plain)
        for drafter in (by_model, by_chance, by_knowing(plain), by_tree(plain)):
            assert generate(drafter, 6, **changes) == plain, (choice, place, drafter)
    assert {channels.ids[Marker.CHANNEL], channels.ids[Marker.MESSAGE]} <= kinds


def test_draft_model_proposes_only_what_the_grammar_allows() -> None:
    free = by_model(started("free", grammar=None), 6)
    masked = by_model(started("masked"), 6)
    draft().release(["free", "masked"])
    matcher = compiler().matcher(json_grammar(SCHEMA), tokenizer().eos_token_ids)
    assert matcher.count_legal((), free.token_ids) == 0, "it would write something else"
    assert matcher.count_legal((), masked.token_ids) == 6


def test_draft_model_ranks_only_next_tokens_that_the_grammar_allows() -> None:
    session = started("ranked")
    proposed = by_model(session, 3).token_ids
    branches = outcomes(draft(), session, DraftTokens(proposed), (2, 2, 2, 2), 3).branches
    draft().release(["ranked"])
    matcher = compiler().matcher(json_grammar(SCHEMA), tokenizer().eos_token_ids)
    assert branches
    for branch in branches:
        output = (*proposed[: branch.num_accepted_tokens], branch.next_token_id, *branch.draft.token_ids)
        assert matcher.count_legal((), output) == len(output)


def test_engine_says_what_grammars_cost_it() -> None:
    before, draft_before = target().info.grammar, draft().info.grammar
    generate(by_chance, 4)
    by_model(started("counted"), 4)
    draft().release(["counted"])
    after = target().info.grammar
    assert (after.num_compiled, after.num_cache_hits) > (before.num_compiled, before.num_cache_hits)
    assert after.mask_s > before.mask_s and after.compile_s > 0
    assert after.num_illegal_drafts > before.num_illegal_drafts
    assert draft().info.grammar.mask_s > draft_before.mask_s


def test_draft_model_proposes_nothing_behind_a_stop_token() -> None:
    session = started("ended", grammar=Grammar(GrammarKind.REGEX, "x"))
    proposed = by_model(session, 6).token_ids
    draft().release(["ended"])
    assert tokenizer().decode(proposed[:-1]) == "x" and proposed[-1] in tokenizer().eos_token_ids


def test_draft_without_its_grammar_goes_on_without_masks() -> None:
    bad = Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}')
    assert by_model(started("bad", grammar=bad), 4) == by_model(started("none", grammar=None), 4)
    draft().release(["bad", "none"])


@pytest.mark.parametrize("seed", range(3))
def test_output_by_rejection_is_valid(seed: int) -> None:
    changes = {"temperature": 1.0, "seed": seed, "verification": Verification.REJECTION}
    assert checked(generate(by_model, 4, **changes))


def test_without_the_mask_the_model_writes_something_else() -> None:
    free = tokenizer().decode(generate(none, 0, grammar=None))
    with pytest.raises(ValueError):
        jsonschema.validate(json.loads(free), SCHEMA)


def test_requests_with_and_without_a_grammar_share_a_step() -> None:
    alone = generate(none, 0), generate(none, 0, grammar=None)
    sessions = [started("with"), started("without", grammar=None)]
    num_prompt = len(sessions[0].token_ids)
    for _ in range(12):
        verify_all(target(), sessions, [NO_DRAFT] * 2)
    target().release(["with", "without"])
    assert tuple(session.token_ids[num_prompt:] for session in sessions) == tuple(one[:12] for one in alone)


def test_a_grammar_that_cannot_be_enforced_fails_its_item_alone() -> None:
    bad = Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}')
    items = [verify_item(each, NO_DRAFT) for each in (started("bad", grammar=bad), started("good"))]
    failed, answered = target().verify(items).replies
    target().release(["bad", "good"])
    assert isinstance(failed, ItemFailed) and "uniqueItems" in failed.message and not failed.is_retriable
    assert (failed.is_invalid, failed.field) == (True, "grammar")
    assert isinstance(answered, Verdict)


def test_an_output_that_breaks_its_grammar_fails_its_item_alone() -> None:
    session = started("broken")
    session.token_ids += tokenizer().encode("hello")
    [reply] = target().verify([verify_item(session, NO_DRAFT)]).replies
    target().release(["broken"])
    assert isinstance(reply, ItemFailed) and "breaks its grammar" in reply.message
