"""A drafter beside the target reads the embedding as the model's own module gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.features.parts import DraftHead, model_embedding, read_again
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.description import ModelArgs
from specray.engine.model.operators_torch import TorchOperators
from tests.unit.engine.model.checkpoints import reference_model, write_checkpoint
from tests.unit.engine.runners import cpu_runner

TOKENS = torch.tensor([5, 90, 5, 0])


@pytest.mark.parametrize("name", ["gemma3", "granite"])
def test_of_the_forward_and_read_again(name: str, tmp_path: Path) -> None:
    """Gemma's has a scale of its own; Granite scales what it gives."""
    path = write_checkpoint(tmp_path, name)
    expected = reference_model(path).get_input_embeddings()(TOKENS).detach()
    forward = cpu_runner(path, max_num_seqs=1).forward
    assert isinstance(forward, DecoderForward)
    torch.testing.assert_close(model_embedding(forward)(TOKENS), expected)
    layout: Any = None  # Named in a refusal alone.
    operators = TorchOperators(torch.float32)
    args, device = ModelArgs(str(path)), torch.device("cpu")
    again, _ = read_again(args, layout, operators, torch.float32, device, DraftHead())
    torch.testing.assert_close(again(TOKENS), expected)
