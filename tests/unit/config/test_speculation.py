"""The section ``speculation``: how a tree is written."""

from __future__ import annotations

import pytest
import yaml

from specray.config import parse_config
from specray.draft_tokens import TreeBudget
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
