"""Source files to write from: permissive licences, bounds, and read as they are asked for."""

import sys
import sysconfig
from hashlib import sha256
from pathlib import Path

import pytest

from specray.train.corpus import (
    CorpusConfig,
    held_out_files,
    is_readable_code,
    permissive_license,
    training_files,
)

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
    found = [
        (file.source, file.text.splitlines()[-1])
        for file in training_files(CorpusConfig(holdout_modulus=10**9))
    ]
    assert found == [("python-stdlib", "# json/decoder.py"), ("alpha", "# alpha")]


def test_files_are_bounded_and_read_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdlib").mkdir()
    files = {f"alpha/m{i}.py": CODE + f"# {i}\n" for i in range(10)}
    write_distribution(tmp_path / "site", "alpha", "MIT", files)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    config = CorpusConfig(max_source_bytes=3 * (len(CODE) + 4) + 1, holdout_modulus=10**9)
    whole = list(training_files(config))
    assert len(whole) == 3
    found = training_files(config)
    assert next(found) == whole[0]
    for path in files:
        (tmp_path / "site" / path).write_text(CODE)
    assert next(found) != whole[1], "it was read only now"


def test_one_file_in_three_is_held_out_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stdlib").mkdir()
    files = {f"alpha/m{i}.py": CODE + f"# {i}\n" for i in range(30)}
    write_distribution(tmp_path / "site", "alpha", "MIT", files)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    config = CorpusConfig(holdout_modulus=3)
    train, held_out = ({file.path for file in read(config)} for read in (training_files, held_out_files))
    assert not train & held_out and train | held_out == set(files)
    for path in held_out:
        assert int.from_bytes(sha256(f"alpha/{path}".encode()).digest()[:8], "big") % 3 == 0
