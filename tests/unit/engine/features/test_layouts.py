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
    Weights,
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
from tests.unit.engine.features.targets import PROMPT, Session, make_target, step, watch
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, reference_model

NUM_STEPS = 4


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
WEIGHTS = eagle3_weights()
TWO_LAYERS, HEADLESS = eagle3_weights(num_layers=2), eagle3_weights(has_head=False)
Files = tuple[Weights, dict[str, Any]]


def with_tensors(shapes: dict[str, tuple[int, ...]], **fields: Any) -> tuple[Files, Weights, Flags]:
    own, (tensors, config) = random_weights(shapes, seed=3), official(WEIGHTS)
    return (tensors | own, config | fields), WEIGHTS, Flags(extra=own)


def headless() -> Files:
    tensors, config = official(HEADLESS, draft_vocab_size=None)
    del tensors["d2t"], tensors["t2d"]
    return tensors, config


EAGLE3: dict[str, tuple[Files, Weights, Flags]] = {
    **{name: (layout(WEIGHTS), WEIGHTS, Flags()) for name, layout in LAYOUTS.items()},
    "normed residual": (
        official(WEIGHTS, norm_before_residual=True), WEIGHTS, Flags(is_residual_normed=True)
    ),
    "normed output": (official(WEIGHTS, norm_output=True), WEIGHTS, Flags(is_output_normed=True)),
    "layers": (
        official(WEIGHTS, eagle_aux_hidden_state_layer_ids=[3, 0, 1]), WEIGHTS, Flags(layers=(3, 0, 1))
    ),
    "norm of all": with_tensors({"input_norm.weight": (3 * HIDDEN,)}, norm_before_fc=True),
    "norm of each": with_tensors({f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}),
    "own embedding": with_tensors({"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}),
    "the target's head": (headless(), HEADLESS, Flags(token_ids=None)),
    "two layers": (speculators(TWO_LAYERS), TWO_LAYERS, Flags()),
}  # fmt: skip


@pytest.mark.parametrize(("name", "forward"), [*((name, "auto") for name in EAGLE3), ("official", "hf")])
def test_eagle3(llama: Path, tmp_path: Path, name: str, forward: str) -> None:
    files, weights, flags = EAGLE3[name]
    found = drafted(make_target(llama, write(tmp_path, *files), forward=forward))
    check(found, reference.eagle3(reference_model(llama), weights, flags, PROMPT, found[2], NUM_STEPS))


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
