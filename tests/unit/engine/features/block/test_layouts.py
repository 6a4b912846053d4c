"""Every layout of a block drafter against a forward that is written down once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.engine.features.base import TargetShape
from specray.engine.features.block.attention import BlockReach
from specray.engine.features.block.drafter import BlockDrafter
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.loader import read_layout
from specray.errors import ConfigError
from tests.unit.engine.features.block.checkpoints import (
    LAYOUTS,
    MASK_ID,
    SIZE,
    Block,
    block_weights,
    dflash,
    dspark,
    speculators,
)
from tests.unit.engine.features.block.reference import drafted
from tests.unit.engine.features.checkpoints import HIDDEN, VOCAB_SIZE, write
from tests.unit.engine.features.targets import PROMPT, Session, check_rounds, make_target, step
from tests.unit.engine.model.checkpoints import reference_model

TARGET = TargetShape(num_layers=3, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_round_drafts_what_the_reference_does_in_one_forward(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    block = LAYOUTS[layout]
    target, model = make_target(llama, write(tmp_path, *block.files)), reference_model(llama)
    blocks, run = [], BlockDrafter._run

    def counted(drafter: BlockDrafter, contexts: Any) -> Any:
        blocks.append(len(contexts))
        return run(drafter, contexts)

    monkeypatch.setattr(BlockDrafter, "_run", counted)

    def wanted(known: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        found = drafted(model, block, known, SIZE)
        assert len(found.tokens) == SIZE - block.first_row
        return found[:2]

    check_rounds(target, wanted, SIZE)
    assert blocks == [2] * 3


def changed(block: Block, drop: str = "", **tensors: torch.Tensor) -> tuple[Any, Any]:
    weights = {name: tensor for name, tensor in block.stored.items() if name != drop}
    return weights | {name.replace("__", "."): each for name, each in tensors.items()}, block.config


CASES: dict[str, tuple[tuple[Any, Any], str]] = {
    "no norm": (changed(dflash(), "hidden_norm.weight"), "hidden_norm.weight is missing"),
    "no key": (changed(dflash(), "layers.1.self_attn.k_proj.weight"), "k_proj.weight is missing"),
    "no input norm": (changed(dflash(), "layers.0.input_layernorm.weight"), "layernorm.weight is miss"),
    "narrow fc": (changed(dflash(), fc__weight=torch.ones(HIDDEN, 50)), "fc.weight reads 50 numbers"),
    "Domino": (changed(dflash(), prefix_gru__weight=torch.ones(2)), "prefix_gru.weight: the DFlash"),
    "DFlash2": (
        changed(dflash(), layers__0__attn_conv__weight=torch.ones(2)),
        "layers.0.attn_conv.weight: the DFlash layout has no place",
    ),
    "projector": (dflash(own={"projector_type": "domino"}).files, "projector_type is 'domino'; allowed"),
    "no mask": (dflash(own={"mask_token_id": None}).files, "mask_token_id is None; allowed"),
    "mask beyond": (dflash(own={"mask_token_id": 4000}).files, "mask_token_id is 4000; allowed"),
    "no size": (dflash(block_size=None).files, "block_size is None; allowed: a whole number above 1"),
    "only the last token": (dflash(block_size=1).files, "block_size is 1; allowed: a whole number above 1"),
    "verified": (dspark(verification_block_size=8).files, "verification_block_size is 8; allowed: 5"),
    "offset": (dspark(proposal_hidden_offset=2).files, "proposal_hidden_offset is 2; allowed: 0"),
    "rotary": (dflash(is_neox_style=False).files, "is_neox_style is False; allowed: True"),
    "rotated in part": (
        dflash(own={"partial_rotary_factor": 0.5}).files,
        "partial_rotary_factor is 0.5; allowed: 1",
    ),
    "layer kinds": (dflash(layer_types=["full_attention"]).files, "layer_types is .*; allowed: 2 of"),
    "layer kinds against a flag": (
        dflash(
            layer_types=["sliding_attention"] * 2, use_sliding_window=False, sliding_window=4
        ).files,
        "use_sliding_window is False and layer_types",
    ),
    "layer kinds in lists": (
        dflash(layer_types=[["full_attention"]] * 2).files,
        r"layer_types is \[\['full_attention'\], .*; allowed: 2 of",
    ),
    "scale in words": (dflash(logit_scale="x").files, "logit_scale is 'x'; allowed: a number above 0, at m"),
    "scale of a list": (dflash(logit_scale=[1.0]).files, r"logit_scale is \[1.0\]; allowed: a number above"),
    "scale beyond floats": (dflash(logit_scale=10**400).files, "logit_scale is 10+; allowed: a number above"),
    "section in words": (dflash(dflash_config="x").files, "dflash_config is 'x'; allowed: a mapping"),
    "layers in a list": (
        dflash(transformer_layer_config=[1]).files,
        r"transformer_layer_config is \[1\]; allowed: a mapping",
    ),
    "architectures by number": (dflash(architectures=7, dflash_config=0.5).files, "dflash_config is 0.5; al"),
    "no scale": (dflash(logit_scale=0).files, "logit_scale is 0; allowed: a number above 0"),
    "window": (dflash(own={"use_swa": True}).files, "sliding_window is None; allowed"),
    "layer beyond": (
        dflash(own={"target_layer_ids": [0, 1, 3]}).files,
        r"dflash_config.target_layer_ids is \[0, 1, 3\]; allowed: numbers -1..2, as the target has 3 layers",
    ),
    "layers in words": (
        dflash(own={"target_layer_ids": [0, 1, "2"]}).files,
        r"ids is \[0, 1, '2'\]; allowed: numbers -1..2",
    ),
    "too few layers": (dflash(own={"target_layer_ids": [0, 1]}).files, "names 2 layers; allowed: 3"),
    "no layers": (dflash(own={"target_layer_ids": None}).files, "target_layer_ids is not set"),
    "another target": (dflash(target_hidden_size=64).files, "target_hidden_size is 64; allowed: 32"),
    "anchor": (dflash(sample_from_anchor="no").files, "sample_from_anchor is 'no'; allowed"),
    "shift": (dflash(shift_label=1).files, "shift_label is 1; allowed: true or false"),
    "shift against anchor": (
        dspark(sample_from_anchor=True, shift_label=False).files,
        "shift_label is False and sample_from_anchor True; allowed: the same",
    ),
    "two shifts": (
        dflash(own={"shift_label": True}, shift_label=False).files,
        "shift_label is False and shift_label True; allowed: the same",
    ),
    "first rows without a head": (
        dflash(own={"pure_draft_prefix_len": 1}).files,
        "pure_draft_prefix_len is 1; allowed: 0, None",
    ),
    "Markov kind": (dspark(markov_head_type="gated").files, "markov_head_type is 'gated'; allowed"),
    "Markov rows": (
        changed(speculators("vanilla"), markov_head__markov_w2__weight=torch.ones(VOCAB_SIZE, 6)),
        r"markov_w2.weight is \[96, 6\]; allowed: \[24, 6\]",
    ),
    "Markov tokens": (
        changed(dspark(), markov_head__markov_w1__weight=torch.ones(24, 6)),
        r"markov_w1.weight is \[24, 6\]; allowed: \[96, 6\]",
    ),
    "confidence": (
        changed(dspark(), confidence_head__proj__weight=torch.ones(1, 5)),
        "confidence_head.proj.weight reads 5 numbers; allowed: 32 or 38",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    files, message = CASES[name]
    with pytest.raises(ConfigError, match=message):
        read_layout(str(write(tmp_path, *files)), TARGET)


def test_a_markov_heads_rows_of_padding_are_left(tmp_path: Path) -> None:
    stored = dict(dspark().stored)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        stored[name] = torch.cat((stored[name], torch.ones(8, stored[name].shape[1])))
    layout = read_layout(str(write(tmp_path, stored, {**dspark().config, "vocab_size": 104})), TARGET)
    assert isinstance(layout, BlockLayout) and layout.markov is not None
    assert torch.equal(layout.markov.embedding, dspark().weights["markov_head.markov_w1.weight"])
    assert torch.equal(layout.markov.output, dspark().weights["markov_head.markov_w2.weight"])


def bare(**changes: Any) -> tuple[Any, Any]:
    """DSpark whose name alone says so: no Markov head, no confidence head."""
    config = {**dspark(judges="no").config, "markov_rank": 0, **changes}
    return block_weights(), config


@pytest.mark.parametrize(
    ("files", "first_row"),
    [
        (dflash().files, 1),
        (dflash(shift_label=False).files, 1),
        (dflash(own={"pure_draft_prefix_len": 0, "shift_label": True}).files, 0),
        (dflash(sample_from_anchor=True, shift_label=True).files, 0),
        (speculators(shift_label=True).files, 0),
        (dspark().files, 0),
        (dspark(shift_label=False).files, 1),
        (dspark(shift_label=False, sample_from_anchor=False).files, 1),
        (bare(), 0),
        (bare(sample_from_anchor=False), 1),
        (bare(architectures=["DFlashDraftModel"], speculators_model_type="dspark"), 0),
    ],
)
def test_the_row_that_draws_first(tmp_path: Path, files: tuple[Any, Any], first_row: int) -> None:
    layout = read_layout(str(write(tmp_path, *files)), TARGET)
    assert isinstance(layout, BlockLayout) and layout.first_row == first_row


WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}


@pytest.mark.parametrize(
    ("files", "second"),
    [
        (dflash(**WINDOWS).files, BlockReach(4, True)),
        (dflash(use_sliding_window=True, sliding_window=4, max_window_layers=1).files, BlockReach(4, True)),
        (dflash(**WINDOWS, sliding_window_non_causal=True).files, BlockReach(4, False)),
        (dspark(**WINDOWS).files, BlockReach(4, False)),
        (bare(**WINDOWS), BlockReach(4, False)),
        (dspark(**WINDOWS, sliding_window_non_causal=False).files, BlockReach(4, True)),
    ],
)
def test_what_rows_of_a_layer_with_a_window_see(
    tmp_path: Path, files: tuple[Any, Any], second: BlockReach
) -> None:
    layout = read_layout(str(write(tmp_path, *files)), TARGET)
    assert isinstance(layout, BlockLayout)
    assert layout.reaches == (BlockReach(None, False), second)


def test_a_field_says_of_all_layers_that_they_are_causal(tmp_path: Path) -> None:
    layout = read_layout(str(write(tmp_path, *dspark(**WINDOWS, causal=True).files)), TARGET)
    assert isinstance(layout, BlockLayout)
    assert layout.reaches == (BlockReach(None, True), BlockReach(4, True))


@pytest.mark.parametrize("ids", [None, []])
def test_the_authors_layers_where_none_are_named(tmp_path: Path, ids: list[int] | None) -> None:
    weights = block_weights() | {"fc.weight": torch.ones(HIDDEN, 5 * HIDDEN)}
    path = str(write(tmp_path, *dflash(weights, own={"target_layer_ids": ids}).files))
    layout = read_layout(path, TargetShape(36, HIDDEN, VOCAB_SIZE))
    assert layout.feature_layers == (2, 10, 18, 26, 34)


def test_a_vocabulary_in_another_order(llama: Path, tmp_path: Path) -> None:
    block = speculators("vanilla")
    ids = torch.tensor(tuple(reversed(block.token_ids or ())))
    order = torch.arange(len(ids)).flip(0)
    stored = block.stored | {"d2t": ids - torch.arange(len(ids))}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        stored[name] = block.weights[name][order]
    target = make_target(llama, write(tmp_path, stored, block.config))
    session = Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], SIZE)
    assert (
        list(verdict.draft.token_ids)
        == drafted(reference_model(llama), block, session.token_ids, SIZE).tokens
    )


def test_the_mask_token_is_seen(llama: Path, tmp_path: Path) -> None:
    """Were it not, a wrong one would only be accepted less."""
    drafts = []
    for mask in (MASK_ID, MASK_ID + 1):
        path = write(tmp_path / str(mask), *dflash(own={"mask_token_id": mask}).files)
        [verdict] = step(make_target(llama, path), [Session("a", list(PROMPT))], [NO_DRAFT], SIZE)
        drafts.append(verdict.draft)
    assert isinstance(drafts[0], DraftTokens) and drafts[0] != drafts[1]
