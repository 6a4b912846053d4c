"""Makes checkpoints of GGUF files: light ones at once, others by a converter after all checks."""

from __future__ import annotations

import json
from pathlib import Path

from specray.errors import ConfigError
from specray.gguf.header import GgufHeader, check_whole, read_header
from specray.models.child import module_command, run_child
from specray.models.gguf.families import read_config
from specray.models.gguf.keys import UnfitError
from specray.models.gguf.light import is_light, write_light
from specray.models.gguf.sizes import Config
from specray.models.gguf.tokenizer import check_tokenizer, names_no_split
from specray.models.progress import Listener
from specray.models.space import LIGHT_BYTES, check_space

_CONVERSION_DEADLINE_S = 3600.0
_BYTES_PER_VALUE = 2
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def make_checkpoint(gguf: Path, destination: Path, work: Path, listener: Listener, name: str) -> None:
    """Writes what engines load of a GGUF file: a light checkpoint, or a converted one where they need it.

    Args:
        destination: the directory to write; it must not exist.
        work: a path for temporary files, on the same disk.
        name: of the model, for the listener.

    Raises:
        ConfigError: as :func:`convert`.
    """
    header = read_header(gguf)
    if not is_light(header, _checked_config(gguf, header)):
        return convert(gguf, destination, work, listener, f"converting {name}")
    _tell_cut(gguf, header, listener)
    check_space(destination.parent, LIGHT_BYTES, f"keeping {name}")
    try:
        write_light(gguf, header, destination)
    except UnfitError as error:
        raise ConfigError(_sentence(gguf, header, str(error))) from None


def convert(gguf: Path, destination: Path, work: Path, listener: Listener, what: str) -> None:
    """Writes a bfloat16 checkpoint: configuration, weights, tokenizer, chat template.

    Args:
        destination: the directory to write; it must not exist.
        work: an empty directory for temporary files, on the same disk.
        what: name of the work for the listener.

    Raises:
        ConfigError: the file is damaged, or of a kind that cannot be converted; one sentence.
    """
    header = read_header(gguf)
    check_convertible(gguf, header)
    _tell_cut(gguf, header, listener)
    check_space(destination.parent, header.num_values * _BYTES_PER_VALUE + LIGHT_BYTES, what)
    work.mkdir()
    # A directory with this file alone: nothing that lies next to the user's file is read with it.
    source = work / "model.gguf"
    source.symlink_to(gguf.absolute())
    ended = run_child(
        module_command("specray.models.gguf.converter", str(source), str(destination)),
        directory=work,
        environment=_OFFLINE,
        deadline_s=_CONVERSION_DEADLINE_S,
        tick=lambda: listener.progress(what),
    )
    if ended.returncode is None:
        raise ConfigError(f"{gguf} was not converted within {_CONVERSION_DEADLINE_S:g} s")
    if ended.returncode != 0:
        raise ConfigError(_sentence(gguf, header, _reason(ended.output, ended.errors)))


def _tell_cut(gguf: Path, header: GgufHeader, listener: Listener) -> None:
    if names_no_split(header):
        listener.notice(
            f"{gguf} does not name its pre-tokenizer (tokenizer.ggml.pre): texts are cut as GPT-2's"
        )


def check_convertible(gguf: Path, header: GgufHeader) -> None:
    """Refuses files of which a part is missing, or would be passed over.

    Raises:
        ConfigError: says what.
    """
    _checked_config(gguf, header)


def _checked_config(gguf: Path, header: GgufHeader) -> Config:
    """What config.json says of the model. Raises as :func:`check_convertible`."""
    kind = header.values.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{gguf} has general.type {kind!r}; allowed: 'model'")
    if not header.architecture or not header.tensors:
        raise ConfigError(f"{gguf} holds no model: it names no architecture, or has no tensors")
    num_parts = header.values.get("split.count", 1)
    if num_parts != 1:
        raise ConfigError(f"{gguf} is one of {num_parts} parts of a model; allowed: a model in one file")
    check_whole(gguf, header)
    try:
        config, _ = read_config(gguf, header)
        check_tokenizer(header)
    except UnfitError as error:
        raise ConfigError(_sentence(gguf, header, str(error))) from None
    return config


def _sentence(gguf: Path, header: GgufHeader, reason: str) -> str:
    return f"{gguf} (architecture {header.architecture!r}) cannot be converted: {reason}"


def _reason(output: str, errors: str) -> str:
    """What the converter says of its failure, or the last line that it wrote."""
    try:
        return str(json.loads(output.strip().splitlines()[-1])["error"])
    except (ValueError, KeyError, TypeError, IndexError):
        lines = errors.strip().splitlines()
        return lines[-1][:300] if lines else "the converter ended without a word"
