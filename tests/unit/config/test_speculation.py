"""The section ``speculation``: how a tree is written, and a key that was removed."""

from __future__ import annotations

import pytest
import yaml

from specray.config import parse_config
from specray.draft_tokens import LookaheadBudget, TreeBudget
from specray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "tree", "budget"),
    [
        ("off", "off", None),
        ("auto", "auto", None),
        ("16", "16", TreeBudget(16)),
        ("4x2x1", "4x2x1", TreeBudget(20, (4, 2, 1))),
        ("1x1", "1x1", TreeBudget(2, (1, 1))),
    ],
)
def test_tree_is_read_as_yaml_gives_it(text: str, tree: str, budget: TreeBudget | None) -> None:
    config = parse_config(yaml.safe_load(f"speculation: {{tree: {text}}}"))
    assert (config.speculation.tree, config.speculation.tree_budget) == (tree, budget)
    again = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))
    assert parse_config(again) == config


@pytest.mark.parametrize(
    "tree", ["on", "0", "65", "8x8", "4x0", "4x", "x4", "-1", "1x" * 32 + "1", "automatic", "", "4X2", "٤"]
)
def test_tree_that_is_none_is_refused_by_name(tree: str) -> None:
    with pytest.raises(
        ConfigError, match=r"speculation\.tree.*allowed: off, auto, a number of nodes 1\.\.64, or"
    ):
        parse_config({"speculation": {"tree": tree}})


def test_lookahead_is_read_as_three_numbers() -> None:
    assert parse_config({}).speculation.lookahead_budget == LookaheadBudget(7, 5, 7)
    given = parse_config({"speculation": {"lookahead": "3x4x12"}})
    assert given.speculation.lookahead_budget == LookaheadBudget(3, 4, 12)


@pytest.mark.parametrize(
    ("lookahead", "says"),
    [
        ("7x5", "three numbers such as 7x5x7"),
        ("", "three numbers such as 7x5x7"),
        ("axbxc", "three numbers such as 7x5x7"),
        ("0x5x7", "allowed: 1 or more"),
        ("7x1x7", "allowed: 2 or more"),
        ("9x5x9", "takes 71 rows; allowed: at most 64"),
    ],
)
def test_lookahead_that_is_none_is_refused_by_name(lookahead: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculation\.lookahead.*{says}"):
        parse_config({"speculation": {"lookahead": lookahead}})


def test_a_draft_of_the_draft_has_its_own_model_and_the_draft_s_settings() -> None:
    draft = {"model": "some/draft", "draft": "some/smaller", "dtype": "float32", "tensor_parallel_size": 2}
    config = parse_config({"draft": {**draft, "vocabulary_ids": "/ids.json"}}).draft
    inner = config.inner_model
    assert inner is not None
    assert (inner.model, inner.draft, inner.dtype) == ("some/smaller", None, "float32")
    assert (inner.vocabulary_ids, inner.tensor_parallel_size, inner.cache_memory_gib) == (None, 1, 1.0)
    bounded = parse_config({"draft": {**draft, "cache_memory_gib": 3.0}}).draft.inner_model
    assert bounded is not None and bounded.cache_memory_gib == 3.0
    assert parse_config({"draft": {"draft": "ngram"}}).draft.inner_model is None
    assert parse_config({"draft": {**draft, "enabled": False}}).draft.inner_model is None


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ({"draft": "suffix"}, "draft.draft is 'suffix'; allowed: 'ngram', path"),
        ({"draft": "embedded"}, "draft.draft is 'embedded'; allowed: 'ngram', path"),
        ({"draft": ""}, "draft.draft is ''; allowed: 'ngram', path"),
        ({"draft": "ngram", "model": "suffix"}, "draft.draft is 'ngram' with model 'suffix'"),
        ({"inner_draft_tokens": 0}, "draft.inner_draft_tokens"),
    ],
)
def test_a_draft_of_the_draft_that_is_none_is_refused(draft: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({"draft": draft})


@pytest.mark.parametrize("control", ["simple", "measured"])
def test_the_key_that_was_removed_is_refused_by_its_name(control: str) -> None:
    with pytest.raises(ConfigError, match=f"control is {control}; the key was removed, leave it out"):
        parse_config({"speculation": {"control": control}})
