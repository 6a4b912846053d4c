"""The numbers of a tensor of a GGUF file, dequantised by the gguf library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specray.errors import ConfigError
from specray.gguf.header import read_header


def read_numbers(path: Path, name: str) -> NDArray[np.float32]:
    """A tensor in float32, in numpy's order of dimensions.

    Raises:
        ConfigError: the file has no such tensor, or ends within it.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    header = read_header(path)
    tensor = header.tensor(name)
    if tensor is None:
        raise ConfigError(f"{path} has no tensor {name!r}")
    kind = GGMLQuantizationType(tensor.type_number)
    values_per_block, block_size = GGML_QUANT_SIZES[kind]
    num_bytes = tensor.num_values // values_per_block * block_size
    content = np.memmap(path, np.uint8, mode="r")[header.data_start + tensor.offset :][:num_bytes]
    if len(content) < num_bytes:
        raise ConfigError(f"{path} ends within the tensor {name!r}")
    numbers: NDArray[np.float32] = dequantize(content.reshape(*tensor.shape[:0:-1], -1), kind)
    # Those of float32 are a view of the file.
    return np.require(numbers, requirements="W")
