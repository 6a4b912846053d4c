"""The process that converts a GGUF file: ``python -m specray.models.gguf.converter FILE DIRECTORY``.

transformers reads the weights, each dequantised, and writes them as a bfloat16 checkpoint. It runs as a
process of its own, whose memory and imports end with it. A failure is one line of JSON on stdout.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specray.gguf.header import GgufHeader, read_header
from specray.models.gguf.ends import end_token_ids, write_ends
from specray.models.gguf.families import read_config
from specray.models.gguf.keys import UnfitError
from specray.models.gguf.tokenizer_files import write_tokenizer

_EXIT_FAILED = 2
_MAX_NAMES = 3
_SHARED_GATE = "ffn_gate_inp_shexp.weight"


@contextmanager
def _adapted() -> Iterator[None]:
    """Lets transformers make the map of tensor names once, not once per module, and read older gates.

    Most of a conversion's time would be the map's: it was made 126 times for a model of 7 layers.
    """
    import gguf

    ways: dict[str, Any] = {
        "GGUFReader": _reader_of(gguf.GGUFReader),
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    before = {name: getattr(gguf, name) for name in ways}
    try:
        for name, way in ways.items():
            setattr(gguf, name, way)
        yield
    finally:
        for name, value in before.items():
            setattr(gguf, name, value)


def _reader_of(reader_class: Any) -> Callable[[str], Any]:
    """Reads a file with the gate of shared experts as a vector, which transformers expects of older files."""

    def read(path: str) -> Any:
        reader = reader_class(path)
        reader.tensors = [
            tensor._replace(data=tensor.data[0])
            if tensor.name.endswith(_SHARED_GATE) and tensor.data.ndim == 2
            else tensor
            for tensor in reader.tensors
        ]
        return reader

    return read


@_adapted()
def convert_file(source: Path, destination: Path) -> None:
    """Writes the checkpoint.

    Args:
        source: the GGUF file, in a directory of its own.

    Raises:
        UnfitError: a key is not read, or transformers cannot read the file, or not all of it.
    """
    import transformers

    # Most of it has no types.
    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    header = read_header(source)
    values, apart = read_config(source, header)
    with _refused("refuses its configuration"):
        config = library.AutoConfig.for_model(**values)
    options: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = _read_model(library, config, options)
    _check_all_used(header, model, apart)
    # Without it the tensors are saved as they lie in memory, all experts in one.
    model._weight_conversions = None
    model.save_pretrained(destination)
    written = write_tokenizer(source, destination)
    ends = end_token_ids(header.values, written.vocabulary, written.special_ids)
    write_ends(destination / "generation_config.json", ends)


@contextmanager
def _refused(problem: str) -> Iterator[None]:
    """Turns whatever transformers raises, of which there are all kinds, into one sentence."""
    try:
        yield
    except Exception as error:
        raise UnfitError(f"transformers {problem}: {_one_line(error)}") from error


def _read_model(library: Any, config: Any, options: dict[str, Any]) -> Any:
    """The model in bfloat16. Raises UnfitError where tensors are missing."""
    import torch

    with _refused("cannot read its weights"):
        model, told = library.AutoModelForCausalLM.from_pretrained(
            **options,
            config=config,
            quantization_config=library.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
    # What is missing would be random numbers.
    missing = sorted(told["missing_keys"]) + sorted(map(str, told["mismatched_keys"]))
    if missing:
        names = ", ".join(missing[:_MAX_NAMES])
        raise UnfitError(f"{len(missing)} tensors are missing or of another shape, such as {names}")
    return model


def _check_all_used(header: GgufHeader, model: Any, apart: Collection[str]) -> None:
    """Refuses a file with unused tensors, ``apart`` excepted: another model would be computed."""
    # Tied weights are in it twice, at one place in memory.
    used = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    left_over = sum(tensor.num_values for tensor in header.tensors if tensor.name not in apart) - used
    if left_over > 0:
        raise UnfitError(
            f"{left_over} of its numbers have no place in the model that transformers makes of it"
        )


def main(arguments: list[str]) -> int:
    """Converts one file. Returns the exit code."""
    source, destination = map(Path, arguments)
    try:
        convert_file(source, destination)
    except UnfitError as error:
        print(json.dumps({"error": str(error)}))
        return _EXIT_FAILED
    return 0


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
