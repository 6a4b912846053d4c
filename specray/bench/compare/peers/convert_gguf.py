"""Runs llama.cpp's converter on checkpoints that have only a tokenizer.json, which it would refuse.

``python -m specray.bench.compare.peers.convert_gguf CONVERTER.py ARGUMENTS...``. The converter recognizes a
pre-tokenizer by the hash of its output for a sample text. A benchmark sends token ids, and all byte-level
vocabularies are turned back into text alike, so the choice does not matter: GPT-2's is named. The converter
also imports sentencepiece to look for a file of it; without such a file that is skipped.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

FALLBACK = "gpt-2"


def main(converter: Path, arguments: list[str]) -> None:
    """Runs the converter's file as a program, in this process."""
    sys.path.insert(0, str(converter.parent))
    sys.path.insert(1, str(converter.parent / "gguf-py"))
    text_model: Any = importlib.import_module("conversion.base").TextModel
    recognise = text_model.get_vocab_base_pre
    read_sentencepiece = text_model._create_vocab_sentencepiece

    def recognise_or_fall_back(model: Any, tokenizer: Any) -> str:
        try:
            return str(recognise(model, tokenizer))
        except NotImplementedError:
            return FALLBACK

    def read_sentencepiece_if_there(model: Any) -> Any:
        path = model.dir_model / "tokenizer.model"
        if not path.is_file():
            raise FileNotFoundError(path)
        return read_sentencepiece(model)

    text_model._create_vocab_sentencepiece = read_sentencepiece_if_there
    text_model.get_vocab_base_pre = recognise_or_fall_back
    sys.argv = [str(converter), *arguments]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
