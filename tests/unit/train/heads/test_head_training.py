"""Heads in training: they learn, runs repeat and go on, and the engine drafts what was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specray.draft_tokens import NO_DRAFT
from specray.engine.features import medusa as layout
from specray.errors import ConfigError
from specray.train.heads import medusa
from specray.train.heads.base import Head
from specray.train.heads.eagle import EagleHead
from specray.train.heads.medusa import MedusaHeads
from specray.train.heads.target import FeatureReader
from specray.train.heads.training import Method, train_head
from tests.unit.engine.features.targets import Session, make_target, step
from tests.unit.train.heads.runs import begin, config, held_out, target_model, write_target

FILES = {"eagle3": "model.safetensors", "medusa": "medusa_lm_head.safetensors"}
NUM_STEPS = 8
METHODS: list[Method] = ["eagle3", "medusa"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of so small products wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which both heads were trained, EAGLE-3 with a pause."""
    work_dir = begin(tmp_path_factory.mktemp("run"))
    train_head("eagle3", str(target), work_dir, config(NUM_STEPS), stop_after=2)
    train_head("eagle3", str(target), work_dir, config(NUM_STEPS), command="specray train eagle3 toy")
    train_head("medusa", str(target), work_dir, config(NUM_STEPS), command="specray train medusa toy")
    return work_dir


def load(head: Head, directory: Path) -> None:
    """Gives a head in training what was written, under its own names."""
    tensors = load_file(directory / FILES[head.name])
    own = head.module.state_dict()
    renamed = {"lm_head.weight": "unembedding"}
    renamed |= {f"{k}.0.linear.{part}": f"blocks.{k}.{part}" for k in range(9) for part in ("weight", "bias")}
    named = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    head.module.load_state_dict({name: named[name] for name in own})


def drafted(head: Head, model: Any, token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    """What the training forward drafts behind the last token, whose features are unknown."""
    reader = FeatureReader(model, head.feature_layers)
    features = reader.read(torch.tensor([token_ids[:-1]])).features
    known, tokens = token_ids[1:], []
    for depth in range(num_tokens):
        logits = head.unroll(features, torch.tensor([known]), depth + 1)[depth]
        tokens.append(int(head.draft_ids[logits[0, len(token_ids) - 2].argmax()]))
        known = [*known, tokens[-1]]
    return tuple(tokens)


@pytest.mark.parametrize("method", METHODS)
def test_the_held_out_loss_falls(trained: Path, target: Path, tmp_path: Path, method: Method) -> None:
    train_head(method, str(target), begin(tmp_path, text_of=trained), config(NUM_STEPS), stop_after=1)
    first, last = held_out(tmp_path, method)[0], held_out(trained, method)[-1]
    assert (first["step"], last["step"]) == (1, NUM_STEPS)
    assert last["held_out_loss"] < first["held_out_loss"]


def test_a_run_that_was_resumed_ends_with_the_weights_of_one_that_was_not(
    trained: Path, target: Path, tmp_path: Path
) -> None:
    work_dir = begin(tmp_path / "whole", text_of=trained)
    whole = load_file(train_head("eagle3", str(target), work_dir, config(NUM_STEPS)) / FILES["eagle3"])
    resumed = load_file(trained / "eagle3" / FILES["eagle3"])
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    work_dir = begin(tmp_path / "other", text_of=trained)
    seeded = train_head("eagle3", str(target), work_dir, config(NUM_STEPS, seed=1), stop_after=1)
    other = load_file(seeded / FILES["eagle3"])
    assert not torch.equal(whole["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_drafts_what_the_training_forward_drafts(
    trained: Path, target: Path, method: Method
) -> None:
    model = target_model(target)
    head: Any
    if method == "medusa":
        head = MedusaHeads(model, num_depths=3)
    else:
        d2t = load_file(trained / "eagle3" / FILES["eagle3"])["d2t"]
        ids = d2t + torch.arange(len(d2t))
        head = EagleHead(model, ids, feature_layers=(1, 2, 3), num_depths=3, seed=5)
    load(head, trained / method)
    engine = make_target(target, trained / method)
    session = Session("a", [1, 60, 70, 80, 90, 100, 110, 61, 62, 63])
    draft, seen = NO_DRAFT, set()
    for _ in range(4):
        [verdict] = step(engine, [session], [draft], 3)
        assert verdict.draft.token_ids == drafted(head, model, session.token_ids, 3)
        draft = verdict.draft
        seen.update(draft.token_ids)
    assert len(seen) > 3


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
    files = [json.loads((trained / method / "config.json").read_text("utf-8")) for method in METHODS]
    assert "medusa_rank_acceptance" not in files[0], "EAGLE's rows know the tokens before them"
    assert medusa.RANK_ACCEPTANCE == layout.RANK_ACCEPTANCE == "medusa_rank_acceptance"
    rates, last = files[1]["medusa_rank_acceptance"], held_out(trained, "medusa")[-1]
    assert [len(row) for row in rates] == [8, 8, 8]
    assert all(sum(row) <= 1.0 + 8 * 0.05 for row in rates)
    # The first head's first rank is where it agrees with the target.
    assert rates[0][0] == pytest.approx(last["held_out_accepted_1"], abs=0.02)


def test_text_of_another_length_is_refused(trained: Path, target: Path) -> None:
    other = config(NUM_STEPS)
    other = type(other)(other.limit, type(other.text)(num_rows=24, rows_per_batch=12, row_len=64))
    with pytest.raises(ConfigError, match="row_len is 64"):
        train_head("medusa", str(target), trained, other)
