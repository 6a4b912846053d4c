"""The process that converts a GGUF file: ``python -m specray.models.gguf.converter FILE DIRECTORY``.

transformers reads the file, each weight dequantised, and writes it as a bfloat16 checkpoint. It runs as a
process of its own, whose memory and imports end with it. A failure is one line of JSON on stdout.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from specray.models.gguf.ends import end_token_ids, write_ends
from specray.models.gguf.header import GgufHeader, read_header

_EXIT_FAILED = 2
_MAX_NAMES = 3
_FOREIGN_KEYS = frozenset({"_model_name_or_path", "unk_token_id"})
"""Keys from a GGUF header that mean nothing to a model."""
_OUTPUT = "output.weight"
"""Name of the output projection in GGUF."""


class UnfitError(Exception):
    """Why a file cannot be converted, in words that follow "cannot be converted: "."""


def _parse_once() -> None:
    """Lets transformers parse the file once in this process, and make the map of tensor names once.

    It parses the file for the configuration, the tokenizer and the weights, and asks for the map once per
    module. For SmolLM2-135M (4 bits, 2 cores) the conversion took 101 s of processor time so, and 32 s now.
    """
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


def convert_file(source: Path, destination: Path) -> None:
    """Writes the checkpoint.

    Args:
        source: the GGUF file, in a directory of its own.

    Raises:
        UnfitError: transformers cannot read it, or not all of it.
    """
    import torch
    import transformers

    # Most of it has no types.
    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        config = library.AutoConfig.from_pretrained(**options)
    except Exception as error:  # A missing key raises KeyError, an unknown architecture ValueError.
        raise UnfitError(f"transformers cannot read its configuration: {_one_line(error)}") from error
    if type(config) not in library.AutoModelForCausalLM._model_mapping:
        raise UnfitError(f"{config.model_type} is no decoder-only language model")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(**options)
    except Exception as error:
        raise UnfitError(f"transformers cannot read its tokenizer: {_one_line(error)}") from error
    try:
        model, told = library.AutoModelForCausalLM.from_pretrained(
            **options,
            config=config,
            quantization_config=library.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
    except Exception as error:
        raise UnfitError(f"transformers cannot read its weights: {_one_line(error)}") from error
    # What is missing would be random numbers.
    missing = sorted(told["missing_keys"]) + sorted(map(str, told["mismatched_keys"]))
    if missing:
        names = ", ".join(missing[:_MAX_NAMES])
        raise UnfitError(f"{len(missing)} tensors are missing or of another shape, such as {names}")
    header = read_header(source)
    _check_all_used(header, model, is_tied=bool(config.tie_word_embeddings))
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _drop_foreign_keys(destination / "config.json")
    control_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    # What transformers adds to the vocabulary has no row in the embedding.
    rows = {
        token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id < config.vocab_size
    }
    ends = end_token_ids(header.values, rows, control_ids)
    write_ends(destination / "generation_config.json", ends)


def _check_all_used(header: GgufHeader, model: Any, *, is_tied: bool) -> None:
    """Refuses a file of which transformers has passed a tensor over: another model would be computed."""
    # Tied weights are in it twice, at one place in memory.
    used = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    # A copy of the embedding, which the model has once.
    copied = sum(tensor.num_values for tensor in header.tensors if is_tied and tensor.name == _OUTPUT)
    left_over = header.num_values - copied - used
    if left_over > 0:
        raise UnfitError(
            f"{left_over} of its numbers have no place in the model that transformers makes of it"
        )


def _drop_foreign_keys(path: Path) -> None:
    """Takes out of the configuration what only GGUF says, so that it is read without transformers."""
    values = json.loads(path.read_text("utf-8"))
    kept = {key: value for key, value in values.items() if key not in _FOREIGN_KEYS}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Converts one file. Returns the exit code."""
    source, destination = map(Path, arguments)
    _parse_once()
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
