"""A compiler that is made ahead of the first grammar."""

from __future__ import annotations

import threading

import pytest

from specray.grammar import GrammarCompiler, PreparedCompiler
from specray.tokenization import load_tokenizer

COMPILER = PreparedCompiler.of(load_tokenizer("embedded")).get()


def test_what_is_prepared_is_made_once_and_waited_for() -> None:
    allowed, threads = threading.Event(), list[str]()

    def make() -> GrammarCompiler:
        threads.append(threading.current_thread().name)
        assert allowed.wait(20)
        return COMPILER

    prepared = PreparedCompiler(make)
    thread = prepared.prepare(0)
    assert prepared.made is None
    threading.Timer(0.05, allowed.set).start()
    assert prepared.get() is COMPILER
    thread.join(20)
    assert prepared.made is COMPILER and threads == ["specray-grammars"]


def test_a_failure_is_told_to_each_who_needs_it_and_tried_again() -> None:
    outcomes = iter([ValueError("first"), ValueError("second"), None])

    def make() -> GrammarCompiler:
        error = next(outcomes)
        if error is not None:
            raise error
        return COMPILER

    prepared = PreparedCompiler(make)
    prepared.prepare(0).join(20)
    assert prepared.made is None
    with pytest.raises(ValueError, match="second"):
        prepared.get()
    assert prepared.get() is COMPILER


def test_what_is_to_be_prepared_later_is_made_where_it_is_needed() -> None:
    made = list[GrammarCompiler]()

    def make() -> GrammarCompiler:
        made.append(COMPILER)
        return COMPILER

    prepared = PreparedCompiler(make)
    thread = prepared.prepare(60)
    assert not thread.is_alive() and prepared.made is None
    assert prepared.get() is COMPILER and made == [COMPILER]
