"""Tests of the corpus: permissive licences, held-out files, and the token stream."""

import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from specray.train.corpus import (
    CorpusConfig,
    is_held_out,
    is_readable_code,
    load_corpus,
    permissive_license,
    training_files,
)
from specray.train.data import split_windows, window_batch

CODE = "def add(first, second):\n    return first + second\n" * 10


@pytest.mark.parametrize(
    ("expression", "classifiers", "free_text", "expected"),
    [
        ("MIT", (), None, "MIT"),
        ("Apache-2.0 OR BSD-2-Clause", (), None, "Apache-2.0 OR BSD-2-Clause"),
        ("GPL-3.0-only OR MIT", (), None, "GPL-3.0-only OR MIT"),
        ("MIT AND (Apache-2.0 OR GPL-2.0-only)", (), None, "MIT AND (Apache-2.0 OR GPL-2.0-only)"),
        ("MIT AND GPL-3.0-only", (), None, None),
        ("MPL-2.0", (), "MIT", None),
        ("Apache-2.0 WITH LLVM-exception", (), None, None),
        (None, ("License :: OSI Approved :: BSD License",), None, "BSD"),
        (
            None,
            ("License :: OSI Approved :: MIT License", "License :: OSI Approved :: Apache Software License"),
            None,
            "Apache-2.0 AND MIT",
        ),
        (
            None,
            ("License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"),
            "MIT",
            None,
        ),
        (None, ("Programming Language :: Python",), "Apache 2.0 License", "Apache-2.0"),
        (None, (), "MIT, except the parts that are not", None),
        (None, (), None, None),
    ],
)
def test_only_wholly_permissive_metadata_counts(
    expression: str | None, classifiers: tuple[str, ...], free_text: str | None, expected: str | None
) -> None:
    assert permissive_license(expression, classifiers, free_text) == expected


def test_a_file_is_held_out_by_its_path_alone() -> None:
    held_out = [key for key in (f"package/module_{i}.py" for i in range(400)) if is_held_out(key, 40)]
    assert held_out == [f"package/module_{i}.py" for i in (46, 64, 117, 164, 311, 344, 350, 353, 362, 380)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CODE, True),
        ("x = 1\n", False),
        (CODE * 1000, False),
        ("TABLE = [" + "12345, " * 100 + "]\n", False),
        ("NAME = '" + "abcdefgh " * 100 + "'\n", False),
        (CODE + "\x00", False),
    ],
    ids=["code", "too-small", "too-large", "digits", "long-lines", "nul"],
)
def test_tables_and_blobs_are_no_code(text: str, expected: bool) -> None:
    assert is_readable_code(text, CorpusConfig()) is expected


def write_distribution(site: Path, name: str, license_expression: str, files: dict[str, str]) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {license_expression}\n"
    )
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info.joinpath("RECORD").write_text("".join(f"{path},,\n" for path in files))


def test_tests_copies_and_other_licences_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdlib, site = tmp_path / "stdlib", tmp_path / "site"
    for path in ("json/decoder.py", "test/test_json.py", "site-packages/other.py"):
        file = stdlib / path
        file.parent.mkdir(parents=True)
        file.write_text(CODE + f"# {path}\n")
    write_distribution(
        site,
        "alpha",
        "MIT",
        {
            "alpha/core.py": CODE + "# alpha\n",
            "alpha/copy.py": CODE + "# alpha\n",
            "alpha/_vendor/other.py": CODE + "# vendored\n",
            "alpha/data.json": "{}",
        },
    )
    write_distribution(site, "beta", "GPL-3.0-only", {"beta.py": CODE + "# beta\n"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(stdlib))
    monkeypatch.setattr(sys, "path", [str(site)])
    corpus = load_corpus(CorpusConfig(holdout_modulus=10**9))
    assert [file.text.splitlines()[-1] for file in corpus.train] == ["# json/decoder.py", "# alpha"]
    assert [(s.source, s.license, s.num_files) for s in corpus.sources] == [
        ("python-stdlib", "PSF-2.0", 1),
        ("alpha", "MIT", 1),
    ]


def test_one_distribution_gives_no_more_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdlib").mkdir()
    files = {f"alpha/m{i}.py": CODE + f"# {i}\n" for i in range(10)}
    write_distribution(tmp_path / "site", "alpha", "MIT", files)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    corpus = load_corpus(CorpusConfig(max_source_bytes=3 * (len(CODE) + 4) + 1, holdout_modulus=10**9))
    assert len(corpus.train) == 3


def test_training_files_are_the_corpuss_and_are_read_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdlib").mkdir()
    files = {f"alpha/m{i}.py": CODE + f"# {i}\n" for i in range(30)}
    write_distribution(tmp_path / "site", "alpha", "MIT", files)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    config = CorpusConfig(holdout_modulus=3)
    corpus = load_corpus(config)
    assert corpus.held_out
    found = training_files(config)
    assert next(found) == corpus.train[0]
    for path in files:
        (tmp_path / "site" / path).write_text(CODE)
    assert next(found) != corpus.train[1], "it was read only now"


def test_an_epoch_visits_every_window_once_and_the_next_has_another_order() -> None:
    tokens = np.arange(10 * 8 + 1, dtype=np.uint16)
    windows_per_epoch = 9
    epochs = [
        window_batch(tokens, seed=0, cursor=epoch * windows_per_epoch, num_windows=9, window_len=8)
        for epoch in (0, 1)
    ]
    for epoch in epochs:
        starts = sorted(epoch[:, 0].tolist())
        assert [start - starts[0] for start in starts] == [8 * i for i in range(9)]
        assert torch.equal(epoch[:, 1:] - epoch[:, :-1], torch.ones(9, 8, dtype=torch.int64))
    assert epochs[0][:, 0].tolist() != epochs[1][:, 0].tolist()


def test_batches_do_not_depend_on_how_they_are_cut() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    whole = window_batch(tokens, seed=3, cursor=120, num_windows=8, window_len=8)
    parts = [window_batch(tokens, seed=3, cursor=c, num_windows=4, window_len=8) for c in (120, 124)]
    assert torch.equal(whole, torch.cat(parts))


def test_split_windows_predict_every_token_of_the_window_once() -> None:
    split = split_windows(torch.arange(2 * 9).reshape(2, 9), 4)
    assert split.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [9, 10, 11, 12, 13], [13, 14, 15, 16, 17]]


def test_a_stream_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens are too few for windows of 8"):
        window_batch(np.arange(5, dtype=np.uint16), seed=0, cursor=0, num_windows=1, window_len=8)
