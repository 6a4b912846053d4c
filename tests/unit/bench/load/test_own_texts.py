"""Prompts that come with the package."""

from __future__ import annotations

import ast

from specray.bench.load.own_texts import EDITS, edit_prompts, json_prompts
from specray.bench.load.prompts import Dataset, load_prompts


def test_each_edit_renames_a_class_that_its_file_defines_and_none_that_it_has() -> None:
    for prompt, (_, name, new) in zip(edit_prompts(), EDITS, strict=True):
        source = prompt.split("```python\n")[1].removesuffix("```")
        assert name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
        assert new not in source


def test_the_packages_data_sets_need_no_file_and_begin_again() -> None:
    assert load_prompts(Dataset.EDITS, None, 6) == [*edit_prompts(), edit_prompts()[0]]
    assert load_prompts(Dataset.JSON, None, 2) == json_prompts()[:2]
