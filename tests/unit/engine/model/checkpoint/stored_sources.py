"""Reads the quantised checkpoints of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.model.description import ModelArgs, check_loadable
from specray.engine.model.loader import DecoderSource, load_model
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import changing_tensors

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


def source(path: Path, dtype: torch.dtype = torch.float32) -> DecoderSource:
    args = ModelArgs(str(path), role="target")
    check_loadable(args)
    loaded = load_model(args, dtype=dtype, device=CPU)
    assert isinstance(loaded.source, DecoderSource)
    return loaded.source


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_loadable(ModelArgs(str(path), role="target", **options))
    assert "\n" not in str(caught.value) and repr(str(path)) in str(caught.value)
    return str(caught.value)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Sets tensors of the last layer's down projection; None: takes it away."""
    with changing_tensors(path) as values:
        for suffix, tensor in tensors.items():
            name = DOWN.removesuffix("weight") + suffix
            values.pop(name, None)
            if tensor is not None:
                values[name] = tensor
