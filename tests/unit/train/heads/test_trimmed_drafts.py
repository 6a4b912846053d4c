"""A draft that proposes some token ids alone is trained behind masks, and served with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specray.errors import ConfigError
from specray.train.heads.loading import loaded_draft
from specray.train.heads.methods import Pard
from specray.train.heads.pard import PardDraft
from specray.train.heads.training import train_head
from tests.unit.train.heads.runs import begin, config, held_out, proposals

pytestmark = pytest.mark.slow

IDS = [258, *range(255, 30, -2), 4, 2]
"""Token ids of the head, in no order; the mask is none of them."""
PROMPT = [1, 60, 70, 80, 90, 100, 110, 61, 62, 63]
NUM_DEPTHS, NUM_STEPS = 3, 8


@pytest.fixture(scope="module")
def trimmed(target_path: Path) -> Path:
    """The pair's draft with a head of these rows."""
    return trim(target_path.parent / "draft", target_path.parent / "trimmed")


@pytest.fixture(scope="module")
def run(target_path: Path, trimmed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which it was trained, with a pause."""
    work_dir = begin(tmp_path_factory.mktemp("run"))
    train_head(pard(trimmed), str(target_path), work_dir, config(NUM_STEPS), stop_after=2)
    train_head(pard(trimmed), str(target_path), work_dir, config(NUM_STEPS))
    return work_dir


def pard(draft: Path) -> Pard:
    return Pard(str(draft), num_depths=NUM_DEPTHS, keep_rate=0.6, min_kept=0.1, mask_token=257)


def trim(whole: Path, directory: Path, **changes: torch.Tensor) -> Path:
    """The checkpoint with a head of ``IDS`` alone; some of its tensors are others."""
    shutil.copytree(whole, directory)
    own = json.loads((directory / "config.json").read_text("utf-8"))
    own |= {"draft_vocab_size": len(IDS), "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(own), "utf-8")
    tensors = load_file(directory / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head[IDS].clone()
    tensors["d2t"] = torch.tensor(IDS) - torch.arange(len(IDS))
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor.numel()}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory


@torch.no_grad()
def test_a_trimmed_draft_is_the_whole_one_with_fewer_columns(target_path: Path, trimmed: Path) -> None:
    whole, _, none = loaded_draft(str(target_path.parent / "draft"), torch.float32)
    model, _, ids = loaded_draft(str(trimmed), torch.float32)
    assert none is None and ids is not None and ids.tolist() == sorted(IDS)
    tokens = torch.tensor([PROMPT])
    expected = whole(input_ids=tokens).logits[..., sorted(IDS)]
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_it_learns_and_is_written_as_it_came(run: Path, trimmed: Path) -> None:
    first, last = held_out(run, "pard")
    assert (first["step"], last["step"]) == (2, NUM_STEPS)
    assert last["held_out_loss"] < first["held_out_loss"]
    written = json.loads((run / "pard/config.json").read_text("utf-8"))
    assert (written["draft_vocab_size"], written["pard_token"]) == (len(IDS), 257)
    before, after = (load_file(each / "model.safetensors") for each in (trimmed, run / "pard"))
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    assert (after["d2t"] + torch.arange(len(IDS))).tolist() == sorted(IDS)
    mask = after["model.embed_tokens.weight"][257].float()
    assert not torch.equal(mask, before["model.embed_tokens.weight"][257].bfloat16().float())
    assert f"{len(IDS)} of the target's 259 tokens can be drafted" in (run / "pard/README.md").read_text()


@torch.no_grad()
def test_the_engine_proposes_what_its_forward_behind_masks_says(run: Path) -> None:
    model, _, ids = loaded_draft(str(run / "pard"), torch.float32)
    assert ids is not None and AutoConfig.from_pretrained(run / "pard").vocab_size == 259
    seen = set[int]()
    # What is accepted are tokens of the head; some that follow it does not have.
    for tokens, found in proposals(run / "pard", PROMPT, NUM_DEPTHS):
        masks = [257] * (NUM_DEPTHS - 1)
        rows = model(input_ids=torch.tensor([[*tokens, *masks]])).logits[0, -NUM_DEPTHS:]
        assert found == tuple(ids[rows.argmax(-1)].tolist())
        seen.update(found)
    assert len(seen) > 1 and seen <= set(IDS)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"d2t": torch.empty(0)}, r"has draft_vocab_size 116; allowed: as many rows of lm_head.weight and"),
        ({"lm_head.weight": torch.zeros(5, 16)}, r"has draft_vocab_size 116; allowed: as many rows"),
        (
            {"d2t": 259 - torch.arange(116)},
            r"d2t holds ids from 259 to 259; allowed: different ones of 0..258",
        ),
        ({"d2t": -torch.arange(116)}, r"d2t holds ids from 0 to 0; allowed: different ones of 0..258"),
        ({"model.norm.weight": torch.empty(0)}, r"cannot be loaded by .*: model.norm.weight is missing"),
        ({"extra": torch.zeros(1)}, r"cannot be loaded by .*: extra is missing, or has no place in it"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    target_path: Path, tmp_path: Path, changes: dict[str, torch.Tensor], says: str
) -> None:
    draft = trim(target_path.parent / "draft", tmp_path / "wrong", **changes)
    with pytest.raises(ConfigError, match=says):
        loaded_draft(str(draft), torch.float32)


def test_ids_that_the_target_lacks_are_refused(trimmed: Path) -> None:
    model, _, ids = loaded_draft(str(trimmed), torch.float32)
    with pytest.raises(ConfigError, match=r"proposes token id 258; allowed: 0\.\.257"):
        PardDraft(
            model,
            vocab_size=258,
            num_depths=2,
            mask_id=257,
            keep_rate=1.0,
            min_kept=1.0,
            row_len=10,
            token_ids=ids,
        )
