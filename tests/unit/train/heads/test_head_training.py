"""Heads in training: they learn, runs repeat and go on, and the engine drafts what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from specray.draft_tokens import NO_DRAFT
from specray.engine.features import medusa as layout
from specray.errors import ConfigError
from specray.train.draft.writing import Written
from specray.train.heads import medusa
from specray.train.heads.base import DraftHead
from specray.train.heads.block import BlockHead
from specray.train.heads.eagle import EagleHead
from specray.train.heads.methods import Medusa, Target
from specray.train.heads.target import FeatureReader
from specray.train.heads.training import train_head
from tests.unit.engine.features.targets import Session, make_target, step
from tests.unit.train.heads.runs import ROW_LEN, begin, config, held_out, methods, proposals, target_model

pytestmark = pytest.mark.slow

PROMPT = [1, 60, 70, 80, 90, 100, 110, 61, 62, 63]
NO = np.zeros(1, bool)
FILES = {"medusa": "medusa_lm_head.safetensors"}
NUM_STEPS = 8
METHODS = ["eagle3", "peagle", "medusa", "block", "pard"]


@pytest.fixture(scope="module")
def trained(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which all were trained, with a pause but for Medusa."""
    work_dir = begin(tmp_path_factory.mktemp("run"))
    for name, method in methods(target_path.parent).items():
        if name != "medusa":
            train_head(method, str(target_path), work_dir, config(NUM_STEPS), stop_after=2)
        command = f"specray train {name} toy"
        train_head(method, str(target_path), work_dir, config(NUM_STEPS), command=command)
    return work_dir


def weights(directory: Path, method: str) -> dict[str, torch.Tensor]:
    return load_file(directory / method / FILES.get(method, "model.safetensors"))


def loaded_head(target_path: Path, trained: Path, model: Any, method: str) -> DraftHead:
    """The head in training with the weights that were written, under its own names."""
    train = Written(np.zeros((1, ROW_LEN), np.uint16), np.ones((1, ROW_LEN), bool), np.array(["text"]), NO)
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    # What a run keeps beside its checkpoint (ids and mask) is in its directory.
    head = methods(target_path.parent)[method].make(Target(model, tokenizer, None, train, trained, seed=5))
    renamed = {"lm_head.weight": "unembedding"} if method in ("eagle3", "peagle") else {}
    renamed |= {f"{k}.0.linear.{part}": f"blocks.{k}.{part}" for k in range(9) for part in ("weight", "bias")}
    named = {renamed.get(name, name): tensor for name, tensor in weights(trained, method).items()}
    own = {name for name, _ in head.module.named_parameters()}
    assert named.keys() - {"d2t", "t2d"} == own
    head.module.load_state_dict({name: named[name] for name in own}, strict=False)
    if isinstance(head, EagleHead | BlockHead):
        # What was written is for features as they are.
        head.fc.sizes.fill_(1.0)
    return head


@torch.no_grad()
def drafted(head: DraftHead, model: Any, token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the training forward drafts behind the last token, whose features are unknown."""
    reader = FeatureReader(model, head.feature_layers)
    features = reader.read(torch.tensor([token_ids[:-1]])).features
    known, tokens = list(token_ids), []
    anchor = torch.tensor([len(token_ids) - 2])
    for depth in range(num_tokens):
        rows = head.unroll(features, torch.tensor([known]), [anchor] * (depth + 1))
        tokens.append(int(head.draft_ids[rows[depth].logits[0, 0].argmax()]))
        known = [*known, tokens[-1]]
    return tuple(tokens)


@pytest.mark.parametrize("name", METHODS)
def test_the_held_out_loss_falls(trained: Path, target_path: Path, tmp_path: Path, name: str) -> None:
    method = methods(target_path.parent)[name]
    train_head(method, str(target_path), begin(tmp_path, text_of=trained), config(NUM_STEPS), stop_after=1)
    first, last = held_out(tmp_path, name)[0], held_out(trained, name)[-1]
    assert (first["step"], last["step"]) == (1, NUM_STEPS)
    assert last["held_out_loss"] < first["held_out_loss"]


@pytest.mark.parametrize("name", ["eagle3", "peagle", "block", "pard"])
def test_a_run_that_was_resumed_ends_with_the_weights_of_one_that_was_not(
    trained: Path, target_path: Path, tmp_path: Path, name: str
) -> None:
    method = methods(target_path.parent)[name]
    work_dir = begin(tmp_path / "whole", text_of=trained)
    train_head(method, str(target_path), work_dir, config(NUM_STEPS))
    whole, resumed = weights(work_dir, name), weights(trained, name)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("name", ["eagle3", "pard"])
def test_another_seed_trains_other_weights(
    trained: Path, target_path: Path, tmp_path: Path, name: str
) -> None:
    method = methods(target_path.parent)[name]
    runs = [begin(tmp_path / str(seed), text_of=trained) for seed in (0, 1)]
    for seed, run in enumerate(runs):
        train_head(method, str(target_path), run, config(1, seed=seed))
    first, second = (weights(run, name) for run in runs)
    assert any(not torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["eagle3", "peagle", "medusa", "block"])
def test_the_engine_drafts_what_the_training_forward_drafts(
    trained: Path, target_path: Path, name: str
) -> None:
    model = target_model(target_path)
    head = loaded_head(target_path, trained, model, name)
    engine = make_target(target_path, trained / name)
    session = Session("a", list(PROMPT))
    draft, seen = NO_DRAFT, set()
    for _ in range(4):
        [verdict] = step(engine, [session], [draft], 3)
        assert verdict.draft.token_ids == drafted(head, model, session.token_ids, 3)
        draft = verdict.draft
        seen.update(draft.token_ids)
    assert len(seen) > 3


def test_the_draft_engine_proposes_what_the_training_forward_of_a_draft_with_masks_drafts(
    trained: Path, target_path: Path
) -> None:
    model = target_model(target_path)
    head = loaded_head(target_path, trained, model, "pard")
    rounds = list(proposals(trained / "pard", PROMPT, 3))
    assert [found for _, found in rounds] == [drafted(head, model, tokens, 3) for tokens, _ in rounds]
    assert len({token for _, found in rounds for token in found}) > 1


def test_the_card_has_the_command_and_the_acceptance_of_each_depth(trained: Path) -> None:
    card = (trained / "eagle3/README.md").read_text("utf-8")
    first, last = held_out(trained, "eagle3")
    assert "    specray train eagle3 toy\n" in card
    places = " | ".join(f"{last[f'held_out_accepted_{place}']:.3f}" for place in (1, 2, 3))
    assert f"| accepted | {places} |" in card
    rows = [line.split(" | ") for line in card.splitlines()[-2:]]
    assert [(row[0], row[4]) for row in rows] == [
        (f"| {found['step']}", f"{found['held_out_loss']:.3f}") for found in (first, last)
    ]


def test_medusas_configuration_has_the_chance_of_each_rank(trained: Path) -> None:
    files = [json.loads((trained / name / "config.json").read_text("utf-8")) for name in METHODS]
    assert "medusa_rank_acceptance" not in files[0], "EAGLE's rows know the tokens before them"
    assert medusa.RANK_ACCEPTANCE == layout.RANK_ACCEPTANCE == "medusa_rank_acceptance"
    rates, last = files[METHODS.index("medusa")]["medusa_rank_acceptance"], held_out(trained, "medusa")[-1]
    assert [len(row) for row in rates] == [8, 8, 8]
    assert all(sum(row) <= 1.0 + 8 * 0.05 for row in rates)
    # The first head's first rank is where it agrees with the target.
    assert rates[0][0] == pytest.approx(last["held_out_accepted_1"], abs=0.02)


def test_text_of_another_length_is_refused(trained: Path, target_path: Path) -> None:
    other = config(NUM_STEPS)
    other = type(other)(other.limit, type(other.text)(num_rows=24, rows_per_batch=12, row_len=64))
    with pytest.raises(ConfigError, match="row_len is 64"):
        train_head(Medusa(), str(target_path), trained, other)
