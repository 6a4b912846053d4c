"""Every layout of a drafter against a forward that is written down once more, over several steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT
from specray.engine.target.engine import TargetEngine
from tests.unit.engine.features import checkpoints, reference
from tests.unit.engine.features.checkpoints import (
    HIDDEN,
    eagle1_weights,
    eagle3_weights,
    medusa_weights,
    nvidia,
    official,
    random_weights,
    speculators,
    write,
)
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import Session, make_target, step, watch
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, reference_model, write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


def drafted(
    target: TargetEngine, prompt: Sequence[int] = PROMPT
) -> tuple[list[torch.Tensor], list[int], int]:
    """Logits and tokens of a first draft, and the token that it follows."""
    watched, session = watch(target), Session("a", list(prompt))
    [verdict] = step(target, [session], [NO_DRAFT], NUM_STEPS)
    assert verdict.next_token_id is not None
    return [rows[0] for rows in watched.logits], list(verdict.draft.token_ids), verdict.next_token_id


def check(
    found: tuple[list[torch.Tensor], list[int], int], wanted: tuple[list[torch.Tensor], list[int]]
) -> None:
    logits, tokens, _ = found
    assert tokens == wanted[1]
    assert len(logits) == len(wanted[0])
    for own, expected in zip(logits, wanted[0], strict=True):
        assert float((own - expected).abs().max()) < 1e-5 * float(expected.abs().max())


LAYOUTS = {"official": official, "speculators": speculators, "nvidia": nvidia}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle3_layouts(llama: Path, tmp_path: Path, layout: str) -> None:
    weights = eagle3_weights()
    path = write(tmp_path, *LAYOUTS[layout](weights))
    found = drafted(make_target(llama, path))
    check(found, reference.eagle3(reference_model(llama), weights, Flags(), PROMPT, found[2], NUM_STEPS))


def test_hf_targets_give_the_same(llama: Path, tmp_path: Path) -> None:
    weights = eagle3_weights()
    found = drafted(make_target(llama, write(tmp_path, *official(weights)), forward="hf"))
    check(found, reference.eagle3(reference_model(llama), weights, Flags(), PROMPT, found[2], NUM_STEPS))


@pytest.mark.parametrize(
    "changes, flags",
    [
        ({"norm_before_residual": True}, {"is_residual_normed": True}),
        ({"norm_output": True}, {"is_output_normed": True}),
        ({"eagle_aux_hidden_state_layer_ids": [3, 0, 1]}, {"layers": (3, 0, 1)}),
    ],
)
def test_eagle3_flags(llama: Path, tmp_path: Path, changes: Any, flags: Any) -> None:
    weights = eagle3_weights()
    path = write(tmp_path, *official(weights, **changes))
    found = drafted(make_target(llama, path))
    wanted = reference.eagle3(reference_model(llama), weights, Flags(**flags), PROMPT, found[2], NUM_STEPS)
    check(found, wanted)


@pytest.mark.parametrize(
    "extra",
    [
        {"input_norm.weight": (3 * HIDDEN,)},
        {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)},
        {"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)},
    ],
    ids=["norm of all", "norm of each", "own embedding"],
)
def test_eagle3_optional_tensors(llama: Path, tmp_path: Path, extra: Any) -> None:
    weights, own = eagle3_weights(), random_weights(extra, seed=3)
    tensors, config = official(weights)
    flags = {"norm_before_fc": True} if "input_norm.weight" in own else {}
    path = write(tmp_path, tensors | own, config | flags)
    found = drafted(make_target(llama, path))
    wanted = reference.eagle3(reference_model(llama), weights, Flags(extra=own), PROMPT, found[2], NUM_STEPS)
    check(found, wanted)


def test_eagle3_without_a_head_uses_the_targets(llama: Path, tmp_path: Path) -> None:
    weights = eagle3_weights(has_head=False)
    tensors, config = official(weights, draft_vocab_size=None)
    del tensors["d2t"], tensors["t2d"]
    found = drafted(make_target(llama, write(tmp_path, tensors, config)))
    flags = Flags(token_ids=None)
    check(found, reference.eagle3(reference_model(llama), weights, flags, PROMPT, found[2], NUM_STEPS))


def test_eagle3_of_two_layers(llama: Path, tmp_path: Path) -> None:
    weights = eagle3_weights(num_layers=2)
    found = drafted(make_target(llama, write(tmp_path, *speculators(weights))))
    check(found, reference.eagle3(reference_model(llama), weights, Flags(), PROMPT, found[2], NUM_STEPS))


def test_a_vocabulary_in_another_order(llama: Path, tmp_path: Path) -> None:
    weights = eagle3_weights()
    ids = tuple(reversed(checkpoints.DRAFT_IDS))
    tensors, config = official(weights)
    found = drafted(make_target(llama, write(tmp_path, tensors | checkpoints.vocabulary(ids), config)))
    wanted = reference.eagle3(
        reference_model(llama), weights, Flags(token_ids=ids), PROMPT, found[2], NUM_STEPS
    )
    check(found, ([row.flip(0) for row in wanted[0]], wanted[1]))


@pytest.mark.parametrize("has_bias", [True, False])
def test_eagle1(llama: Path, tmp_path: Path, has_bias: bool) -> None:
    weights = eagle1_weights(has_bias=has_bias)
    path = write(tmp_path, weights, checkpoints.LLAMA)
    found = drafted(make_target(llama, path))
    check(found, reference.eagle1(reference_model(llama), weights, PROMPT, found[2], NUM_STEPS))


MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}


@pytest.mark.parametrize("kind", ["authors", "authors, two blocks", "TGI, shared head", "vLLM"])
def test_medusa_layouts(llama: Path, tmp_path: Path, kind: str) -> None:
    weights = medusa_weights(num_layers=2 if "two" in kind else 1, has_heads="shared" not in kind)
    tensors, name = weights, "medusa_lm_head.safetensors"
    if kind == "vLLM":
        tensors, name = {}, "model.safetensors"
        for key, tensor in weights.items():
            head, layer, *rest = key.split(".")
            own = (
                f"lm_heads.{head}.weight"
                if rest == ["weight"]
                else f"blocks.{head}.layers.{layer}.{rest[-1]}"
            )
            tensors[f"medusa_heads.{own}"] = tensor
    path = write(tmp_path, tensors, MEDUSA, name)
    found = drafted(make_target(llama, path))
    # Three heads, whatever the configuration says: no fourth token.
    check(found, reference.medusa(reference_model(llama), weights, PROMPT, found[2], 3))


def test_official_and_speculators_files_of_the_same_weights_propose_the_same(
    llama: Path, tmp_path: Path
) -> None:
    weights, outputs = eagle3_weights(), []
    for layout in ("official", "speculators"):
        target = make_target(llama, write(tmp_path / layout, *LAYOUTS[layout](weights)))
        session, draft, drafts = Session("a", list(PROMPT)), NO_DRAFT, []
        for _ in range(5):
            [verdict] = step(target, [session], [draft], NUM_STEPS)
            draft = verdict.draft
            drafts.append(draft)
        outputs.append((session.token_ids, drafts))
    assert outputs[0] == outputs[1]
    assert all(len(draft) == NUM_STEPS for draft in outputs[0][1])
