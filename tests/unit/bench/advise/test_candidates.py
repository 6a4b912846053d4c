"""Candidates by name, and the prompts of a domain."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.bench.advise.candidate import (
    Candidate,
    candidates_of,
    processes_of,
    short_names,
    split_keys,
    without_draft,
)
from specray.bench.advise.domains import read_domain
from specray.bench.load.prompts import Prompt
from specray.config import parse_config
from specray.errors import ConfigError
from specray.types import DraftKind


def test_drafts_with_trees_come_with_chains_first() -> None:
    configs = {name: parse_config({"draft": {"model": name}}) for name in ("embedded", "ngram", "lookahead")}
    found = candidates_of(configs, ["2x2"])
    assert [one.name for one in found] == ["embedded", "embedded:2x2", "ngram", "ngram:2x2", "lookahead"]
    assert [one.timed_as for one in found] == ["embedded", "embedded", "ngram", "ngram", "lookahead"]
    assert [one.kind for one in found[:3:2]] == [DraftKind.MODEL, DraftKind.NGRAM]
    assert found[1].method("draft-0").process == "draft-0"


@pytest.mark.parametrize("tree", ["auto", "off"])
def test_tree_that_is_not_set_is_refused(tree: str) -> None:
    with pytest.raises(ConfigError, match=f"--tree is '{tree}'; allowed: a number of nodes, or children"):
        candidates_of({"embedded": parse_config({})}, [tree])


def test_paths_end_where_the_shape_of_a_tree_does() -> None:
    config = parse_config({})
    assert Candidate("a", config, "4x2x1").fitting((1, 2, 4, 8)) == [1, 2, 3]
    assert Candidate("a", config, "4x2x1").fitting((2, 3, 4)) == [2, 3]
    assert Candidate("a", config, "16").fitting((1, 2)) == [1, 2]
    assert Candidate("a", config).fitting((1, 8)) == [1, 8]


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert short_names(["owner/small", "ngram"]) == ["small", "ngram"]
    assert short_names(["a/small", "b/small"]) == ["a/small", "b/small"]
    quick = ["a/small", "a/small@quantization=int4", "a/small@vocabulary_ids=v/ids.json,window=64"]
    expected = ["small", "small@quantization=int4", "small@vocabulary_ids=v/ids.json,window=64"]
    assert short_names(quick) == expected


def test_keys_of_a_draft_stand_behind_it() -> None:
    assert split_keys("a/small") == ("a/small", [])
    assert split_keys("a@b/small@quantization=int4,window=64") == (
        "a@b/small",
        ["quantization=int4", "window=64"],
    )
    assert split_keys("a@b/small") == ("a@b/small", [])


def test_trees_share_the_worker_of_their_draft() -> None:
    configs = {name: parse_config({"draft": {"model": name}}) for name in ("ngram", "a/b", "c/d")}
    assert processes_of(candidates_of(configs, ["2x2"])) == {"a/b": "draft-0", "c/d": "draft-1"}


def test_target_alone_has_no_draft() -> None:
    config = parse_config(
        {"target": {"max_num_seqs": 3, "drafter": "d"}, "speculation": {"num_speculative_tokens": 4}}
    )
    assert config.draft.kind_in_use is DraftKind.FEATURES
    alone = without_draft(config)
    assert (alone.draft.has_model, alone.target.max_num_seqs, alone.target.drafter) == (False, 3, None)
    assert (alone.draft.kind_in_use, alone.speculation.num_speculative_tokens) == (DraftKind.MODEL, "auto")


def test_prompts_of_a_domain(tmp_path: Path) -> None:
    file = tmp_path / "law.txt"
    file.write_text(
        'Plain text\n\n{"prompt": "A"}\n{"turns": ["B", "C"]}\n{ not JSON\nlast\n', encoding="utf-8"
    )
    expected = [Prompt(text, "law") for text in ("Plain text", "A", "B", "{ not JSON")]
    assert read_domain(f"law={file}", 4) == expected


def test_a_prompt_may_hold_other_ends_of_lines_than_those_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "law.jsonl"
    file.write_bytes('{"prompt": "one\u2028two"}\r\n\r\nthree\x85four\r\n'.encode())
    assert [one.text for one in read_domain(f"law={file}", 4)] == ["one\u2028two", "three\x85four"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("\n", "there is no prompt in it"), ('{"text": "A"}', "line 1: there is neither `prompt` nor `turns`")],
)
def test_file_without_prompts_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "law.txt"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_domain(f"law={file}", 4)


@pytest.mark.parametrize("assignment", ["law", "=file", "law="])
def test_prompts_need_a_name_and_a_file(assignment: str) -> None:
    with pytest.raises(ConfigError, match=f"--prompts is '{assignment}'; allowed: NAME=FILE"):
        read_domain(assignment, 1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts .*nothing: No such file"):
        read_domain(f"law={tmp_path / 'nothing'}", 1)
