"""The tokens at which outputs of a GGUF file's model end, and the settings that list them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from specray.tokenization.ends import named_ends, part_end

_END_KEYS: Final = tuple(
    f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
)


def end_token_ids(
    values: Mapping[str, Any], vocabulary: Mapping[str, int], control_ids: Collection[int]
) -> list[int]:
    """Ids, ascending, at which llama.cpp ends an output; transformers takes one of the header's."""
    known = set(vocabulary.values())
    named = {token_id for key in _END_KEYS if isinstance(token_id := values.get(key), int)} & known
    return sorted((named | named_ends(vocabulary, control_ids)) - {part_end(vocabulary)})


def write_ends(path: Path, token_ids: list[int]) -> None:
    """Lists the end tokens in a checkpoint's ``generation_config.json``."""
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    settings["eos_token_id"] = token_ids
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
