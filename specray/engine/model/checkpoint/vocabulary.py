"""Reads which token ids the rows of a trimmed head stand for: from a file of ids, or from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from specray.engine.model.checkpoint.headers import weight_files
from specray.errors import ConfigError
from specray.json_files import read_json_file

OFFSETS = "d2t"
"""Name of the tensor that a checkpoint with a trimmed head holds: token id minus row, for each row."""
MEMBERS = "t2d"
"""Name of the tensor next to it that says of each token id whether it has a row; it is not needed."""
_SETTING = "draft.vocabulary_ids"
DRAFTER_SETTING = "target.drafter_vocabulary_ids"


@dataclass(frozen=True, slots=True)
class TrimmedHead:
    """The rows of a head for some token ids alone."""

    token_ids: NDArray[np.int64]
    """Token ids, ascending, so that of equally likely tokens the lowest comes first, as in a whole head."""
    rows: NDArray[np.int64]
    """Row of each in the weight as it is stored."""


def read_head(file: str, vocab_size: int, setting: str = _SETTING) -> TrimmedHead:
    """The head that ``draft.vocabulary_ids``, or another setting, leaves of a whole one.

    Args:
        file: ids as a JSON list, an array of numpy (.npy), or the only tensor of a safetensors file.
        vocab_size: token ids of the model.

    Raises:
        ConfigError: the file cannot be read, or an id is out of range or there twice.
    """
    ids = _as_ids(_read_file(Path(file), setting), f"{setting}: {file}")
    _check_ids(ids, vocab_size, f"{setting}: {file}")
    token_ids = np.sort(ids)
    return TrimmedHead(token_ids, token_ids)


def stored_head(
    path: str, directory: Path, *, num_rows: int, vocab_size: int, entry: str | None = None
) -> TrimmedHead:
    """The head of a checkpoint with ``draft_vocab_size`` rows.

    Args:
        path: as the user wrote it, for messages.
        entry: name of the one file, or of the index of several; None: the usual names.

    Raises:
        ConfigError: the tensor with the ids is missing, of another length or of another type, or an id is
            out of range or there twice.
    """
    offsets = _read_offsets(path, directory, entry)
    what = f"model {path!r}: {OFFSETS}"
    if offsets is None:
        raise ConfigError(f"{what} is missing, though draft_vocab_size is {num_rows}")
    offsets = _as_ids(offsets, what)
    if len(offsets) != num_rows:
        raise ConfigError(f"{what} holds {len(offsets)} ids; allowed: draft_vocab_size of them, {num_rows}")
    ids = offsets + np.arange(num_rows, dtype=np.int64)
    _check_ids(ids, vocab_size, what)
    rows = np.argsort(ids)
    return TrimmedHead(ids[rows], rows)


def _check_ids(ids: NDArray[np.int64], vocab_size: int, what: str) -> None:
    if not len(ids):
        raise ConfigError(f"{what} holds no token id; allowed: 1..{vocab_size} of them")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ConfigError(f"{what} holds token id {outside[0]}; allowed: 0..{vocab_size - 1}")
    known, counts = np.unique(ids, return_counts=True)
    if len(known) < len(ids):
        raise ConfigError(f"{what} holds token id {known[counts > 1][0]} twice; allowed: each id once")


def _as_ids(values: Any, what: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except ValueError:  # Rows of different lengths.
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"{what} is no list of whole numbers")
    return array.astype(np.int64)


def _read_file(file: Path, setting: str) -> Any:
    try:
        if file.suffix == ".npy":
            return np.load(file, allow_pickle=False)
        if file.suffix == ".safetensors":
            return _only_tensor(file)
        return read_json_file(file)
    except (OSError, ValueError, EOFError, SafetensorError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error}") from None


def _only_tensor(file: Path) -> Any:
    with safe_open(str(file), framework="np") as opened:
        names = list(opened.keys())
        if len(names) != 1:
            raise ValueError(f"it holds {len(names)} tensors; allowed: one, with the ids")
        return opened.get_tensor(names[0])


def _read_offsets(path: str, directory: Path, entry: str | None) -> Any:
    for file in weight_files(directory, entry):
        try:
            with safe_open(str(file), framework="np") as opened:
                if OFFSETS in opened.keys():  # noqa: SIM118
                    return opened.get_tensor(OFFSETS)
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigError(f"model {path!r} cannot be loaded: {error}") from None
    return None


def trimmed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint without those that say which token ids its head knows."""
    return {name: shape for name, shape in shapes.items() if name not in (OFFSETS, MEMBERS)}
