"""Reads the training text: Python source of the standard library and of permissively licensed packages.

Which packages count is decided from their installed metadata alone. Whole files are held out, chosen
by the hash of their path, so that the split does not depend on the order or number of the others.
"""

import hashlib
import importlib.metadata
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PERMISSIVE_LICENSES = frozenset(
    {
        "MIT",
        "MIT-0",
        "0BSD",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "Apache-2.0",
        "PSF-2.0",
        "Python-2.0",
    }
)

_CLASSIFIER_LICENSES = {
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: MIT No Attribution License (MIT-0)": "MIT-0",
    "License :: OSI Approved :: BSD License": "BSD",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}

# Free-text field of older metadata: only these exact spellings count as a licence.
_FREE_TEXT_LICENSES = {
    "mit": "MIT",
    "mit license": "MIT",
    "bsd": "BSD",
    "bsd-2-clause": "BSD-2-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "psf-2.0": "PSF-2.0",
}

# Directories whose files are tests, data tables, or copies of other distributions.
_SKIPPED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "_vendor",
        "dist-packages",
        "idle_test",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
        "vendor",
        "vendored",
    }
)


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Limits of what is read, and the split.

    `max_source_bytes` bounds one distribution (the standard library is taken whole), so that no single
    package sets the style. One file in `holdout_modulus` is held out.
    """

    max_source_bytes: int = 5_000_000
    min_file_bytes: int = 200
    max_file_bytes: int = 200_000
    max_mean_line_len: float = 80.0
    max_digit_share: float = 0.15
    holdout_modulus: int = 40


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Python file; `path` is relative to its source, with forward slashes."""

    source: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class _Distribution:
    name: str
    files: tuple[tuple[str, Path], ...]  # (path relative to the source, absolute path)
    max_bytes: int | None


def training_files(config: CorpusConfig) -> Iterator[SourceFile]:
    """Yields this environment's files as they are read, but those of ``held_out_files``."""
    return (file for file in _all_files(config) if not _is_held_out(file, config))


def held_out_files(config: CorpusConfig) -> Iterator[SourceFile]:
    """Yields one file in ``holdout_modulus``, by the hash of its path: stable across machines and runs."""
    return (file for file in _all_files(config) if _is_held_out(file, config))


def permissive_license(
    expression: str | None, classifiers: Iterable[str], free_text: str | None
) -> str | None:
    """The licence as an SPDX-like text when all of it is permissive, else None.

    The `License-Expression` field wins over classifiers, and these over the free-text field.
    """
    if expression:
        return expression if _is_permissive_expression(expression) else None
    named = [line for line in classifiers if line.startswith("License ::")]
    if named:
        if all(line in _CLASSIFIER_LICENSES for line in named):
            return " AND ".join(sorted({_CLASSIFIER_LICENSES[line] for line in named}))
        return None
    return _FREE_TEXT_LICENSES.get((free_text or "").strip().lower())


def is_readable_code(text: str, config: CorpusConfig) -> bool:
    """Returns False for files that are tables, blobs, or too small or large to teach anything about code."""
    num_bytes = len(text.encode())
    if not config.min_file_bytes <= num_bytes <= config.max_file_bytes:
        return False
    if "\x00" in text:
        return False
    num_digits = sum(character.isdigit() for character in text)
    return (
        num_bytes / (text.count("\n") + 1) <= config.max_mean_line_len
        and num_digits / num_bytes <= config.max_digit_share
    )


def _is_permissive_expression(expression: str) -> bool:
    """Checks an SPDX expression: AND needs every part, OR one; refuses nested brackets."""
    if re.search(r"\([^()]*\(|\bWITH\b", expression):
        return False
    parts = re.split(r"\s+AND\s+", expression)
    return all(
        any(name.strip(" ()") in _PERMISSIVE_LICENSES for name in re.split(r"\s+OR\s+", part))
        for part in parts
    )


def _all_files(config: CorpusConfig) -> Iterator[SourceFile]:
    seen_contents: set[bytes] = set()
    for source in _find_sources(config):
        yield from _read_source(source, config, seen_contents)


def _is_held_out(file: SourceFile, config: CorpusConfig) -> bool:
    return _hash_number(f"{file.source}/{file.path}") % config.holdout_modulus == 0


def _find_sources(config: CorpusConfig) -> Iterator[_Distribution]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    yield _Distribution("python-stdlib", tuple(_walk(stdlib)), None)
    distributions: dict[str, importlib.metadata.Distribution] = {
        distribution.metadata["Name"]: distribution for distribution in importlib.metadata.distributions()
    }
    for name in sorted(distributions):
        if name == "specray":
            continue
        distribution = distributions[name]
        metadata = distribution.metadata
        permitted = permissive_license(
            (metadata.get_all("License-Expression") or (None,))[0],
            metadata.get_all("Classifier") or (),
            (metadata.get_all("License") or (None,))[0],
        )
        if permitted is not None:
            files = tuple(_distribution_files(distribution))
            yield _Distribution(name, files, config.max_source_bytes)


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED_DIRECTORIES)
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(directory) / file
                yield path.relative_to(root).as_posix(), path


def _distribution_files(distribution: importlib.metadata.Distribution) -> Iterator[tuple[str, Path]]:
    for file in distribution.files or ():
        parts = file.parts
        if file.suffix == ".py" and ".." not in parts and not _SKIPPED_DIRECTORIES.intersection(parts):
            yield file.as_posix(), Path(str(file.locate()))


def _read_source(source: _Distribution, config: CorpusConfig, seen: set[bytes]) -> Iterator[SourceFile]:
    """Yields files in the order of their hashed keys until the bound is met; skips contents seen before."""
    left = source.max_bytes
    for path, location in sorted(source.files, key=lambda item: _hash_number(f"{source.name}/{item[0]}")):
        text = _read_text(location)
        if text is None or not is_readable_code(text, config):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        num_bytes = len(text.encode())
        if digest in seen or (left is not None and num_bytes > left):
            continue
        seen.add(digest)
        left = None if left is None else left - num_bytes
        yield SourceFile(source.name, path, text)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _hash_number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
