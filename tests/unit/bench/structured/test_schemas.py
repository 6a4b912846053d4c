"""Composed schemas: the same for a seed, of every kind, valid, and enforced but for those that cannot be."""

from __future__ import annotations

from collections import Counter

import jsonschema
import pytest

from specray.bench.structured.schemas import REFUSED_EVERY, compose
from specray.errors import InvalidRequestError
from specray.grammar.forms import grammar_of
from tests.unit.grammar.test_matcher import compiler

CASES = compose(200, 0)


def test_schemas_follow_from_the_seed_and_more_of_them_begin_with_the_same() -> None:
    assert compose(10, 0) == CASES[:10]
    assert compose(10, 1) != CASES[:10]
    assert len({case.name for case in CASES}) == 200


def test_200_schemas_have_every_kind_often() -> None:
    counts = Counter(kind for case in CASES for kind in case.kinds)
    assert set(counts) == {
        *("nested object", "array", "enum", "pattern", "format", "$ref", "recursion", "anyOf"),
        *("bounds", "multipleOf", "const", "string length", "additionalProperties"),
    }
    assert min(counts.values()) >= 10
    refused = Counter(case.refused_by for case in CASES if case.refused_by)
    assert sum(refused.values()) == 200 // REFUSED_EVERY and len(refused) >= 6
    assert Counter(case.is_strict for case in CASES) == {True: 100, False: 100}


def test_every_schema_is_one_and_its_prompt_names_its_fields() -> None:
    for place, case in enumerate(CASES):
        if place % 5 == 0 or case.refused_by:
            jsonschema.Draft202012Validator.check_schema(case.schema)
        assert set(case.schema["required"]) <= set(case.schema["properties"])
        assert all(name in case.prompt for name in case.schema["properties"])


def test_schemas_are_enforced_but_for_those_whose_keyword_is_named() -> None:
    for case in CASES:
        form = {"name": case.name, "schema": case.schema, "strict": case.is_strict}
        found = grammar_of({"response_format": {"type": "json_schema", "json_schema": form}})
        assert found is not None
        if case.refused_by is None:
            compiler().check(found[0], field=found[1])
            continue
        with pytest.raises(InvalidRequestError) as caught:
            compiler().check(found[0], field=found[1])
        assert case.refused_by in str(caught.value)
