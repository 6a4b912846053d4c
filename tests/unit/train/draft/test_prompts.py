"""Prompts of a file: domains, their shares, and that what is held out is never trained on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specray.errors import ConfigError
from specray.train.draft.prompt_file import Prompts, parse_mix, read_prompts, split_prompts
from specray.train.draft.prompts import Beginnings
from specray.train.draft.text import TextConfig, split_held_out, written_text
from specray.train.draft.writing import Written
from tests.unit.train.draft.test_writing import MARKERS, Template, scripted


def write_prompts(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n", "utf-8")
    return path


def test_a_file_has_texts_by_domain_and_some_have_none(tmp_path: Path) -> None:
    path = write_prompts(
        tmp_path / "p", {"prompt": "a", "domain": "code"}, {"prompt": "b"}, {"prompt": "c", "domain": "code"}
    )
    assert read_prompts(path) == {"code": ["a", "c"], "prompts": ["b"]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1 has no prompt"),
        ('{"prompt": " "}', "line 1 has no prompt"),
        ('{"prompt": "a", "domain": "x=y"}', "line 1 has the domain 'x=y'"),
        ('{"prompt": "a", "domain": 3}', "line 1 has the domain 3"),
        ('{"prompt": "a", "domain": " x"}', "line 1 has the domain ' x'"),
        ('{"prompt": "a", "domain": "x\\ny"}', r"line 1 has the domain 'x\\ny'"),
        ('{"prompt": "a", "domain": ""}', "line 1 has the domain ''"),
        ('{"prompt": "\\ud800"}', "line 1 has no prompt"),
        pytest.param("[" * 100_000, "line 1 is no JSON", id="deep"),
        ("", "holds no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "p").write_text(line, "utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_prompts(tmp_path / "p")


def test_a_text_may_hold_other_ends_of_lines_than_those_of_a_file(tmp_path: Path) -> None:
    line = '{"prompt": "one\u2028two\x85three"}'
    (tmp_path / "p").write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    assert read_prompts(tmp_path / "p") == {"prompts": ["one\u2028two\x85three"] * 2}


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "p")


def test_a_tenth_of_each_domain_is_held_out_and_equal_prompts_are_one() -> None:
    ids = {"code": [(each,) for each in (*range(20), *range(20))], "chat": [(1,), (2,), (1,)]}
    split = split_prompts(ids, seed=4)
    assert {name: len(own) for name, own in split.held_out.items()} == {"code": 2, "chat": 1}
    for name in ids:
        assert {*split.train[name], *split.held_out[name]} == set(ids[name])
        assert not {*split.train[name]} & {*split.held_out[name]}
    assert split == split_prompts(ids, seed=4)
    assert split != split_prompts(ids, seed=5)
    with pytest.raises(ConfigError, match="domain 'chat' has 1 prompts; allowed: at least 2"):
        split_prompts({"chat": [(1,), (1,)]}, seed=0)


def test_a_mix_is_names_and_shares() -> None:
    assert parse_mix("code=0.5, chat=2") == {"code": 0.5, "chat": 2.0}
    for text in ("code", "code=0", "code=x", "=1", "code=1,code=2", "code=inf", "code=nan"):
        with pytest.raises(ConfigError, match="--mix is"):
            parse_mix(text)


PROMPTS = Prompts(
    {"code": [(7, each) for each in range(30)], "chat": [(8, each) for each in range(10)]},
    {"code": [(7, 90)], "chat": [(8, 90)]},
)


def drawn(mix: dict[str, float] | None, count: int = 400) -> Beginnings:
    return Beginnings(MARKERS, Template().encode, ["word " * 2000], seed=3, prompts=PROMPTS, mix=mix)


def test_domains_have_their_shares_and_held_out_rows_the_prompts_that_no_other_has() -> None:
    found = drawn({"code": 1.0, "chat": 2.0, "open": 1.0}).draw(400)
    counts = Counter(each.domain for each in found)
    assert set(counts) == {"code", "chat", "open"}
    assert 160 < counts["chat"] < 240 and 70 < counts["code"] < 130
    assert [place for place, each in enumerate(found) if each.is_held_out] == list(range(0, 400, 10))
    for each in found:
        if each.domain != "open":
            assert (each.token_ids[1] == 90) == each.is_held_out
            assert each.token_ids[0] == {"code": 7, "chat": 8}[each.domain]
            assert each.goes_on == "assistant"
    assert not any(each.is_held_out for each in drawn(None).draw(50, first_place=480))


def test_without_a_mix_prompts_are_drawn_as_they_are_spread() -> None:
    counts = Counter(each.domain for each in drawn(None).draw(400))
    assert set(counts) == {"code", "chat"} and 260 < counts["code"] < 340


def test_a_mix_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--mix names 'music'; allowed: code, chat, open"):
        drawn({"music": 1.0})
    own = Prompts({"text": [(1,)]}, {"text": [(2,)]})
    with pytest.raises(ConfigError, match="--prompts has the domain 'text'"):
        Beginnings(MARKERS, Template().encode, [], seed=0, prompts=own)


class Letters(Template):
    """A tokenizer of letters without a template."""

    chat_template = None
    bos_token_id = 1
    eos_token_id = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) - 95 for letter in text] if text else [1] * bool(options["add_special_tokens"])


def test_prompts_are_continued_and_long_ones_left_out(tmp_path: Path) -> None:
    texts = ["cc", "dd", "ee", "ffffffffffff"]
    path = write_prompts(tmp_path / "p", *({"prompt": text, "domain": "letters"} for text in texts))
    config = TextConfig(num_rows=8, rows_per_batch=4, row_len=10, prompts=str(path))
    model = scripted({4: 9, 5: 9, 6: 9, 9: 10, 10: 9})
    written = written_text(model, Letters(), tmp_path, config, None)
    train, held_out = split_held_out(written)
    assert (len(train.token_ids), len(held_out.token_ids)) == (7, 1)
    assert not (tmp_path / "passages.json").exists(), "nothing is begun without a prompt"
    assert set(written.domains) == {"letters"}
    begun = {tuple(row[:3]) for row in train.token_ids.tolist()}
    [own] = [tuple(row[:3]) for row in held_out.token_ids.tolist()]
    assert own not in begun and {own, *begun} == {(1, 4, 4), (1, 5, 5), (1, 6, 6)}
    assert (written.token_ids[:, 3] == 9).all() and written.is_answer[:, 3:].all()
    again = written_text(model, Letters(), tmp_path, config, None)
    assert (again.token_ids == written.token_ids).all()


def test_the_writing_budget_counts_all_calls_and_rows_are_at_most_those_asked_for(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p", *({"prompt": text} for text in ("cc", "dd", "ee")))
    config = TextConfig(num_rows=6, rows_per_batch=4, row_len=10, prompts=str(path), writing_budget_s=100.0)
    model = scripted({4: 9, 5: 9, 6: 9, 9: 9})

    def num_rows(**changes: Any) -> int:
        return len(written_text(model, Letters(), tmp_path, replace(config, **changes), None).token_ids)

    assert num_rows() == 6, "two batches of four are written, and six rows taken"
    spent = tmp_path / "written" / "spent.json"
    assert 0.0 <= json.loads(spent.read_text("utf-8")) < 100.0
    spent.write_text("101.0", "utf-8")
    assert num_rows(num_rows=1000) == 8, "nothing is left of the budget"
    assert num_rows(num_rows=3) == 3
    spent.unlink()
    assert num_rows(num_rows=12) == 8, "text without a record is whole"
    spent.write_text("101.0", "utf-8")
    assert num_rows(num_rows=12, writing_budget_s=200.0) == 12


def test_text_of_a_directory_is_of_one_target_and_of_the_same_prompts(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p", *({"prompt": text} for text in ("cc", "dd", "ee")))
    config = TextConfig(num_rows=4, rows_per_batch=4, row_len=10, prompts=str(path))
    model = scripted({4: 9, 5: 9, 6: 9, 9: 9})
    work_dir = tmp_path / "run"
    written = written_text(model, Letters(), work_dir, config, None)
    # A copy of the file will do, and so will a directory from before there was a record.
    copy = path.rename(tmp_path / "q")
    config = replace(config, prompts=str(copy))
    (work_dir / "written" / "source.json").unlink()
    for _ in range(2):
        assert (written_text(model, Letters(), work_dir, config, None).token_ids == written.token_ids).all()
    for other, changed, named in (
        (scripted({4: 8, 5: 8, 6: 8, 8: 8}), config, "by another target"),
        (model, replace(config, mix="prompts=2"), "with another --mix"),
        (model, replace(config, asks=False), "with another --chat"),
    ):
        with pytest.raises(ConfigError, match=f"run.written' holds text that was written {named}; allowed"):
            written_text(other, Letters(), work_dir, changed, None)
    write_prompts(copy, *({"prompt": text} for text in ("ff", "gg")))
    with pytest.raises(ConfigError, match="written with another --prompts; allowed"):
        written_text(model, Letters(), work_dir, config, None)
    for file in (work_dir / "written").glob("*.npz"):
        file.unlink()
    again = written_text(model, Letters(), work_dir, config, None)
    assert {*again.token_ids[:, 1].tolist()} <= {7, 8}, "without text, there is nothing to fit"


def test_text_without_answers_is_refused() -> None:
    rows, no = np.zeros((2, 4), np.uint16), np.zeros((2, 4), bool)
    written = Written(rows, no, np.array(["a", "b"]), np.array([True, False]))
    with pytest.raises(ConfigError, match="no answers to train on or to hold out"):
        split_held_out(written)
