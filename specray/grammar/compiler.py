"""Compiles grammars for one tokenizer within bounded work, and keeps the latest ones."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specray.errors import InvalidRequestError
from specray.grammar.matcher import GrammarMatcher, MatcherStats
from specray.types import Grammar, GrammarKind

MAX_SOURCE_LEN = 65_536
"""Characters of a grammar's source; longer ones are refused."""
MAX_PROPERTIES = 1_000
"""Properties of a JSON schema, over all its objects; more are refused."""
_MAX_ENTRIES = 64
"""Compiled grammars and refusals that are kept."""


@dataclass(slots=True)
class CompilerStats:
    """Counts of one process's compiler; only ever grows."""

    compile_s: float = 0.0
    """Seconds spent on compiling."""
    num_compiled: int = 0
    num_cache_hits: int = 0
    matchers: MatcherStats = field(default_factory=MatcherStats)


class GrammarCompiler:
    """Grammars of one tokenizer. Safe to use from several threads.

    Args:
        tokenizer_json: the text of the model's ``tokenizer.json``.
        vocab_size: width of the model's logits; at least the tokenizer's own size.
        eos_token_ids: every token that ends an output; legal only where a grammar may end.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.stats = CompilerStats()
        self.vocab_size = vocab_size
        """Width of the model's logits."""
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._limits = _make_limits()
        self._kept: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: Grammar, *, field: str) -> None:
        """Raises InvalidRequestError, naming ``field`` and the keyword, for what cannot be enforced."""
        compiled = self._compile(grammar)
        if isinstance(compiled, str):
            raise InvalidRequestError(f"{field} cannot be enforced: {compiled}", field=field)

    def holds(self, grammar: Grammar) -> bool:
        """Whether to check it is no work, since it was compiled, or refused, lately."""
        with self._lock:
            return grammar in self._kept

    def matcher(self, grammar: Grammar, stop_token_ids: Collection[int] = ()) -> GrammarMatcher:
        """A matcher at the start of an output.

        Args:
            stop_token_ids: tokens beside the model's own that end this output.

        Raises:
            InvalidRequestError: the grammar cannot be enforced.
        """
        compiled = self._compile(grammar)
        if isinstance(compiled, str):
            raise InvalidRequestError(f"grammar cannot be enforced: {compiled}", field="grammar")
        return GrammarMatcher(
            compiled,
            vocab_size=self.vocab_size,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=stop_token_ids,
            stats=self.stats.matchers,
        )

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        """The compiled grammar, or why there is none."""
        if len(grammar.source) > MAX_SOURCE_LEN:
            # Not kept: the sources alone would take all memory.
            return f"it has {len(grammar.source)} characters; allowed: at most {MAX_SOURCE_LEN}"
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
                self.stats.num_cache_hits += 1
                return kept
        started = time.perf_counter()
        compiled = self._compile_anew(grammar)
        with self._lock:
            self.stats.compile_s += time.perf_counter() - started
            self.stats.num_compiled += 1
            self._kept[grammar] = compiled
            while len(self._kept) > _MAX_ENTRIES:
                self._kept.popitem(last=False)
        return compiled

    def _compile_anew(self, grammar: Grammar) -> LLMatcher | str:
        try:
            source = _llguidance_source(grammar)
        except (ValueError, RecursionError) as error:
            return str(error)[:300]
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # The first mask does work that building the matcher puts off; it may exceed the limits, too.
            matcher.deep_copy().compute_bitmask()
        return _reason(matcher.get_error()) if matcher.is_error() else matcher


def _make_limits() -> LLParserLimits:
    """Counted work that a grammar may cost, in llguidance's own units; a lexer state is 1 to 2 kilobytes."""
    return LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=20_000,
        max_lexer_states=20_000,
        max_grammar_size=150_000,
        verbose_errors=False,
    )


def _llguidance_source(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.source)
    num_properties = _count_properties(json.loads(grammar.source))
    if num_properties > MAX_PROPERTIES:
        raise ValueError(f"properties has {num_properties} entries in all; allowed: at most {MAX_PROPERTIES}")
    return LLMatcher.grammar_from_json_schema(grammar.source)


def _count_properties(schema: object) -> int:
    if isinstance(schema, list):
        return sum(map(_count_properties, schema))
    if not isinstance(schema, dict):
        return 0
    own = schema.get("properties")
    return (len(own) if isinstance(own, dict) else 0) + sum(map(_count_properties, schema.values()))


def _reason(error: str) -> str:
    """One line of what llguidance says, without what it adds for its own debugging."""
    return " ".join(error.split())[:300]
