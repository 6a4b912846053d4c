"""Compiles grammars for one tokenizer within bounded work, and keeps the latest ones."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Self

from llguidance import LLMatcher

from specray.errors import InvalidRequestError
from specray.grammar.bounds import make_limits, sentence
from specray.grammar.matcher import GrammarMatcher, MatcherStats
from specray.grammar.schemas import common_refusal, refusal
from specray.grammar.sources import endless_rule, texts
from specray.grammar.vocabulary import ModelTokenizer, TextVocabulary
from specray.types import Grammar, GrammarKind

logger = logging.getLogger(__name__)

MAX_SOURCE_LEN = 524_288
"""Characters of a grammar's source, which takes at most 2 s to compile; longer ones are refused."""
PREPARED_AFTER_S = 30.0
"""Seconds after a start in which no compiler is made that no request needs: each of a service's four takes
1.1 s with a vocabulary of 151,936 tokens, and the first answer waits for most of them."""
_MAX_ENTRIES = 64
"""Compiled grammars and refusals that are kept."""
_MAX_KEPT_LEN = 4_194_304
"""Characters of the sources of all that is kept."""


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
        tokenizer: the model's.
        vocab_size: width of the model's logits; at least the tokenizer's own size.
        eos_token_ids: every token that ends an output, legal only where a grammar may end; None: those that
            the tokenizer names.

    Raises:
        ValueError: no grammar can be enforced with this tokenizer.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, *, vocab_size: int, eos_token_ids: Collection[int] | None = None
    ) -> None:
        self.stats = CompilerStats()
        self.vocab_size = vocab_size
        """Width of the model's logits."""
        self._eos_token_ids = tuple(tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._vocabulary = TextVocabulary(tokenizer, vocab_size)
        self._tokenizer = self._vocabulary.backend(self._eos_token_ids)
        self._limits = make_limits()
        self._kept: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        self._kept_len = 0
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
            stop_token_ids: tokens besides the model's own that end this output.

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
            if grammar in self._kept:
                # Another thread was faster.
                return self._kept[grammar]
            self._kept[grammar] = compiled
            self._kept_len += len(grammar.source)
            while len(self._kept) > _MAX_ENTRIES or self._kept_len > _MAX_KEPT_LEN:
                self._kept_len -= len(self._kept.popitem(last=False)[0].source)
        return compiled

    def _compile_anew(self, grammar: Grammar) -> LLMatcher | str:
        try:
            source, is_json = _llguidance_source(grammar), grammar.kind is GrammarKind.JSON_SCHEMA
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if matcher.is_error():
                reason = refusal(json.loads(grammar.source)) if is_json else None
                return reason or sentence(matcher.get_error())
            if not is_json and (endless := endless_rule(grammar)) is not None:
                return f"{endless} needs itself, so that no text of it ever ends"
        except (ValueError, RecursionError) as error:
            return str(error)[:300]
        unwritten = self._unwritten(grammar)
        if unwritten is not None:
            return f"this model's tokenizer cannot write the text {unwritten[:60]!r}"
        return _begun(matcher)

    def _unwritten(self, grammar: Grammar) -> str | None:
        if self._vocabulary.writes_all:
            return None
        return next((text for text in texts(grammar) if not self._vocabulary.can_write(text)), None)


def _begun(matcher: LLMatcher) -> LLMatcher | str:
    """The matcher, or why it fails where nothing is free yet.

    The first mask does work that building the matcher puts off; it may exceed the limits, too.
    """
    copy = matcher.deep_copy()
    copy.consume_tokens(copy.compute_ff_tokens())
    if not copy.is_stopped():
        copy.compute_bitmask()
    return sentence(copy.get_error()) if copy.is_error() else matcher


def _llguidance_source(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(grammar.source)
    reason = common_refusal(json.loads(grammar.source))
    if reason is not None:
        raise ValueError(reason)
    return LLMatcher.grammar_from_json_schema(grammar.source)


class PreparedCompiler:
    """Makes a compiler at first need, or before; safe to use from several threads.

    For a large vocabulary that takes seconds, in which no other thread of the process runs.

    Args:
        make: makes it. What it raises is raised to who needs the compiler, and it is tried again.
    """

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    @classmethod
    def of(cls, tokenizer: ModelTokenizer) -> Self:
        """The compiler of a tokenizer, whose vocabulary is taken as the model's."""

        def make() -> GrammarCompiler:
            return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)

        return cls(make)

    @property
    def made(self) -> GrammarCompiler | None:
        """The compiler; None: it is not made yet."""
        return self._compiler

    def get(self) -> GrammarCompiler:
        """The compiler. Waits until it is made, and raises why it cannot be."""
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def prepare(self, after_s: float = PREPARED_AFTER_S) -> threading.Thread:
        """Makes the compiler in a thread that begins ``after_s`` seconds from now; or who needs it does."""
        # No daemon: the interpreter cannot end amid this work. While it waits, it can.
        thread = threading.Thread(target=self._try, name="specray-grammars")
        if after_s > 0:
            begin = threading.Timer(after_s, thread.start)
            begin.daemon = True
            begin.start()
        else:
            thread.start()
        return thread

    def _try(self) -> None:
        try:
            self.get()
        except Exception as error:
            # Most requests have no grammar; the first that has one is refused.
            logger.info("no grammar can be enforced: %s", error)
