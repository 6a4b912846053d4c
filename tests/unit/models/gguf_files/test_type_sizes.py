"""Sizes of the data types of GGUF files, against the library of llama.cpp."""

from __future__ import annotations

import gguf

from specray.gguf.type_sizes import TYPE_SIZES


def test_every_type_of_the_library_has_its_size() -> None:
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()} == TYPE_SIZES
