"""Tests of a load's lengths and arrivals."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.planning.load import (
    FixedLength,
    ListedLength,
    LognormalLength,
    OpenLoad,
    SharedPrefixes,
    parse_lengths,
    parse_prefixes,
)


def test_numbers_and_distributions_are_read() -> None:
    assert parse_lengths("512", "prompt") == FixedLength(512)
    assert parse_lengths("lognormal:400,1200", "prompt") == LognormalLength(400, 1200)


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt": 7, "output": 2}\n\n9\n', encoding="utf-8")
    assert parse_lengths(f"@{path}", "prompt") == ListedLength((7, 9))


def test_lognormal_lengths_have_the_mean_and_the_percentile() -> None:
    rng = random.Random(1)
    lengths = sorted(LognormalLength(400, 1200).draw(rng, 10**6) for _ in range(20_000))
    assert sum(lengths) / len(lengths) == pytest.approx(400, rel=0.03)
    assert lengths[19_000] == pytest.approx(1200, rel=0.05)


def test_no_length_is_over_the_limit_or_empty() -> None:
    rng = random.Random(1)
    for lengths in (FixedLength(900), ListedLength((900, 1)), LognormalLength(400, 1200)):
        assert {1 <= lengths.draw(rng, 100) <= 100 for _ in range(200)} == {True}


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1e3", "lognormal:", "lognormal:400", "lognormal:400,300", "lognormal:400,1700"]
)
def test_wrong_lengths_are_refused_by_option_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--output is .*allowed: "):
        parse_lengths(text, "output")


@pytest.mark.parametrize("text", ["12\nx\n", '{"prompt": 4}\n', "0\n", "true\n"])
def test_wrong_line_of_a_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--output .*line \d: .*allowed: a number in"):
        parse_lengths(f"@{path}", "output")


def test_empty_and_absent_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="there is no number in it"):
        parse_lengths(f"@{tmp_path}/empty", "prompt")
    with pytest.raises(ConfigError, match="No such file"):
        parse_lengths(f"@{tmp_path}/absent", "prompt")


def test_poisson_arrivals_have_the_rate_and_equal_ones_the_interval() -> None:
    load = OpenLoad(4.0, FixedLength(1), FixedLength(1))
    last = next(itertools.islice(load.arrivals(random.Random(1)), 9_999, None))
    assert last == pytest.approx(2500, rel=0.03)
    even = OpenLoad(4.0, FixedLength(1), FixedLength(1), is_poisson=False)
    assert list(itertools.islice(even.arrivals(random.Random(1)), 3)) == [0.25, 0.5, 0.75]


def test_shared_prefixes_are_read_and_drawn() -> None:
    prefixes = parse_prefixes("16,256,0.75")
    assert prefixes == SharedPrefixes(16, 256, 0.75)
    assert parse_prefixes("1,8") == SharedPrefixes(1, 8, 1.0)
    rng = random.Random(1)
    drawn = [prefixes.draw(rng, 100) for _ in range(4000)]
    assert {len(each) for each in drawn} == {0, 100}
    assert sum(map(bool, drawn)) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert len(set(drawn)) == 17


@pytest.mark.parametrize("text", ["", "16", "0,8", "1,0", "501,8", "1,8,0", "1,8,1.5", "1,8,1,1", "a,b"])
def test_wrong_prefixes_are_refused_by_option_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shared-prefixes is .*allowed: NUMBER,TOKENS"):
        parse_prefixes(text)
