"""Drafters that cannot be read are refused by the name of the tensor or field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import parse_config
from specray.engine.features.base import TargetShape
from specray.engine.features.eagle.layout import EagleLayout
from specray.engine.features.loader import read_layout
from specray.engine.preflight import check_pair
from specray.errors import ConfigError
from tests.unit.engine.features.checkpoints import (
    HIDDEN,
    LLAMA,
    Weights,
    eagle1_weights,
    eagle3_weights,
    medusa_weights,
    nvidia,
    official,
    speculators,
    write,
)
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, write_checkpoint

TARGET = TargetShape(num_layers=3, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE)
NO_IDS = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}
"""ModelOpt's section as its template has it."""
Files = tuple[Weights, dict[str, Any]]


def changed(tensors: Weights | None = None, drop: str = "", **config: Any) -> Files:
    weights, values = official(eagle3_weights())
    weights |= tensors or {}
    weights.pop(drop, None)
    return weights, values | config


CASES: dict[str, tuple[Files, str]] = {
    "missing tensor": (changed(drop="midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight is missing"),
    "wrong shape": (changed({"norm.weight": torch.ones(7)}), r"norm.weight is \[7\]; allowed: \[32\]"),
    "not finite": (changed({"norm.weight": torch.full((HIDDEN,), float("nan"))}), "norm.weight holds NaN"),
    "unknown tensor": (
        changed({"extra.weight": torch.ones(2)}),
        "extra.weight: the EAGLE-3 layout has no place",
    ),
    "block drafter": (changed({"mask_embedding": torch.ones(32)}), "mask_embedding belongs to a drafter of"),
    "mask without a token": (
        changed({"mask_hidden": torch.ones(1, 1, 96)}),
        "mask_token_id is None; allowed",
    ),
    "mask beyond": (
        changed({"mask_hidden": torch.ones(1, 1, 96)}, mask_token_id=4000),
        "mask_token_id is 4000; allowed",
    ),
    "narrow mask": (
        changed({"mask_hidden": torch.ones(1, 1, 64)}, mask_token_id=4),
        r"mask_hidden is \[1, 1, 64\]; allowed: \[1, 1, 96\]",
    ),
    "mask and norms": (
        changed(
            {"mask_hidden": torch.ones(1, 1, 96), "input_norm.weight": torch.ones(96)}, norm_before_fc=True
        ),
        "mask_hidden stands beside norms before fc",
    ),
    "no mask": (changed(speculators_model_type="peagle"), "mask_hidden is missing; allowed"),
    "both names": (changed({"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}), "allowed: one of them"),
    "layer beyond": (
        changed(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        r"ids is \[1, 2, 4\]; allowed: numbers 0..3",
    ),
    "layer beyond, of what leaves": (
        changed(
            eagle_aux_hidden_state_layer_ids=None,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        ),
        r"eagle_config.eagle_aux_hidden_state_layer_ids is \[1, 2, 3\]; allowed: numbers -1..2",
    ),
    "section": (changed(eagle_config="x"), "eagle_config is 'x'; allowed: a mapping"),
    "scale": (changed(logit_scale="x"), "logit_scale is 'x'; allowed: a number above 0, at most 3.40282e"),
    "scale that is none": (
        changed(logit_scale=float("nan")),
        "logit_scale is nan; allowed: a number above 0",
    ),
    "too few layers": (changed(eagle_aux_hidden_state_layer_ids=[1, 2]), "names 2 layers; allowed: 3"),
    "no ids": (changed(eagle_aux_hidden_state_layer_ids=None), "is not set, and the target has 3 layers"),
    "vocabulary": (changed(draft_vocab_size=48), "draft_vocab_size is 48; allowed: 24"),
    "offsets": (changed({"d2t": torch.full((24,), 90)}), "d2t gives token ids that are no 24 different"),
    "few offsets": (changed({"d2t": torch.zeros(5, dtype=torch.int64)}), r"d2t is \[5\]; allowed: \[24\]"),
    "heads": (changed(num_attention_heads=5), "num_attention_heads is 5, with 32 query"),
    "activation": (changed(hidden_act="gelu"), "hidden_act is 'gelu'; allowed: 'silu'"),
    "rope": (
        changed(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "not understood; allowed: rope types",
    ),
    "rotated in part": (changed(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5; allowed: 1"),
    "rotated in part, beside a section": (
        speculators(eagle3_weights(), partial_rotary_factor=0.25),
        "partial_rotary_factor is 0.25; allowed: 1",
    ),
    "rotated in part, in a section": (
        speculators(eagle3_weights(), transformer_layer_config={**LLAMA, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5; allowed: 1",
    ),
    "rotated in pairs": (changed(is_neox_style=False), "is_neox_style is False; allowed: True"),
    "fp8": (
        changed({"midlayer.self_attn.o_proj.weight": torch.ones(HIDDEN, 32).to(torch.float8_e4m3fn)}),
        "layers.0.self_attn.o_proj.weight holds float8_e4m3fn; allowed: float32, float16, bfloat16",
    ),
    "fp8 norm": (
        changed({"norm.weight": torch.ones(HIDDEN).to(torch.float8_e5m2)}),
        "norm.weight holds float8_e5m2; allowed: float32",
    ),
    "packed": (
        changed({"midlayer.self_attn.q_proj.weight": torch.ones(32, 16, dtype=torch.uint8)}),
        "layers.0.self_attn.q_proj.weight holds uint8; allowed: float32",
    ),
    "int8 that would fit": (
        changed({"midlayer.mlp.down_proj.weight": torch.ones(HIDDEN, 40, dtype=torch.int8)}),
        "layers.0.mlp.down_proj.weight holds int8; allowed: float32",
    ),
    "quantised medusa": (
        ({"0.0.linear.weight": torch.ones(HIDDEN, HIDDEN, dtype=torch.int8)}, {}),
        "0.0.linear.weight holds int8; allowed: float32",
    ),
    "offsets in floats": (changed({"d2t": torch.zeros(24)}), "d2t holds float32; allowed: int64, int32"),
    "more rows than token ids": (
        changed(
            {"lm_head.weight": torch.ones(104, HIDDEN)}, drop="d2t", draft_vocab_size=None, vocab_size=None
        ),
        "lm_head.weight has 104 rows, the target 96 token ids, and vocab_size is None; allowed: 96 rows",
    ),
    "more embeddings than token ids": (
        changed({"embed_tokens.weight": torch.ones(104, HIDDEN)}, vocab_size=90),
        "embed_tokens.weight has 104 rows, the target 96 token ids, and vocab_size is 90; allowed",
    ),
    "scale in a section": (changed(eagle_config={"logit_scale": -1}), "logit_scale is -1; allowed: a number"),
    "flag": (changed(norm_before_residual="yes"), "norm_before_residual is 'yes'; allowed: true or false"),
    "norm before fc": (changed(norm_before_fc=True), "norm_before_fc and input_norm.weight do not agree"),
    "one residual": (changed(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    "another target": (changed(target_hidden_size=64), "target_hidden_size is 64; allowed: 32"),
    "narrow fc": (changed({"fc.weight": torch.ones(HIDDEN, 50)}), "fc.weight reads 50 numbers"),
    "eagle1 with a norm": (
        ({**eagle1_weights(), "norm.weight": torch.ones(HIDDEN)}, official({})[1]),
        "norm.weight: the EAGLE-1 layout has no place",
    ),
    "medusa width": (({"0.0.linear.weight": torch.ones(8, 8)}, {}), r"0.0.linear.weight is \[8, 8\]"),
    "medusa head": (
        ({**medusa_weights(), "1.1.weight": torch.ones(9, HIDDEN)}, {}),
        r"1.1.weight is \[9, 32\]; allowed: \[96, 32\]",
    ),
    "medusa gap": (
        ({key: each for key, each in medusa_weights().items() if not key.startswith("1.")}, {}),
        "2.0.linear.bias, 2.0.linear.weight, 2.1.weight: the Medusa layout has no place",
    ),
    "another model": (({"model.wte.weight": torch.ones(3, 3)}, {}), "of no layout that is known"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    files, message = CASES[name]
    with pytest.raises(ConfigError, match=message):
        read_layout(str(write(tmp_path, *files)), TARGET)


@pytest.mark.parametrize("section", ["", "transformer_layer_config"])
def test_a_targets_quantization_that_was_copied_along_says_nothing(tmp_path: Path, section: str) -> None:
    leaked = {"quantization_config": {"quant_method": "fp8"}}
    if section:
        files = speculators(eagle3_weights(), transformer_layer_config={**LLAMA, **leaked})
    else:
        files = changed({"d2t": torch.arange(24, dtype=torch.int32)}, **leaked)
    read_layout(str(write(tmp_path, *files)), TARGET)


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 104}, {"draft_vocab_size": VOCAB_SIZE}])
def test_rows_behind_the_targets_token_ids_are_padding(tmp_path: Path, fields: dict[str, Any]) -> None:
    tables = {
        name: torch.arange(104.0 * HIDDEN).view(104, HIDDEN)
        for name in ("lm_head.weight", "embed_tokens.weight")
    }
    files = changed(tables, drop="d2t", **{"draft_vocab_size": None, "vocab_size": 104, **fields})
    layout = read_layout(str(write(tmp_path, *files)), TARGET)
    assert isinstance(layout, EagleLayout) and layout.token_ids is None
    for found in (layout.head, layout.embedding):
        assert found is not None and torch.equal(found, tables["lm_head.weight"][:VOCAB_SIZE])


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96)])
def test_a_mask_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    numbers = torch.arange(96.0)
    files = changed({"mask_hidden": numbers.view(shape)}, mask_token_id=4)
    layout = read_layout(str(write(tmp_path, *files)), TARGET)
    assert isinstance(layout, EagleLayout) and layout.masks is not None
    assert torch.equal(layout.masks.features, numbers[None])


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"eagle_config": {"logit_scale": 0.5}}, 0.5),
        ({"eagle_config": {"logit_scale": 0.5}, "logit_scale": 2}, 2.0),
    ],
)
def test_a_scale_beside_the_flags_is_read(tmp_path: Path, fields: dict[str, Any], scale: float) -> None:
    layout = read_layout(str(write(tmp_path, *changed(**fields))), TARGET)
    assert isinstance(layout, EagleLayout) and layout.logit_scale == scale


def test_all_numbers_rotated_is_what_is_read(tmp_path: Path) -> None:
    read_layout(str(write(tmp_path, *changed(partial_rotary_factor=1.0, is_neox_style=True))), TARGET)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        read_layout(str(tmp_path / "nowhere"), TARGET)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match="it holds no tensors"):
        read_layout(str(tmp_path), TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        read_layout(str(tmp_path), TARGET)


@pytest.mark.parametrize(
    "name", ["medusa_lm_head.pt", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"]
)
def test_a_pickled_file_is_refused_and_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / name).mkdir()  # To open it would be another error.
    with pytest.raises(ConfigError, match=rf"{name} is a pickle; allowed: \*\.safetensors \(docs/drafting"):
        read_layout(str(tmp_path), TARGET)


@pytest.mark.parametrize("layout", [official, speculators, nvidia])
def test_ids_of_both_conventions_are_the_same_layers(
    tmp_path: Path, layout: Callable[[Weights], Files]
) -> None:
    assert read_layout(str(write(tmp_path, *layout(eagle3_weights()))), TARGET).feature_layers == (1, 2, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"eagle_aux_hidden_state_layer_ids": None},
        {"eagle_aux_hidden_state_layer_ids": []},
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": NO_IDS},
    ],
)
def test_the_usual_layers_where_none_are_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    tensors, config = official(eagle3_weights(), **fields)
    path = str(write(tmp_path, tensors, config))
    assert read_layout(path, TargetShape(36, HIDDEN, VOCAB_SIZE)).feature_layers == (2, 18, 33)


def test_an_empty_list_leaves_the_ids_to_the_section(tmp_path: Path) -> None:
    tensors, config = nvidia(eagle3_weights())
    config["eagle_aux_hidden_state_layer_ids"] = []
    assert read_layout(str(write(tmp_path, tensors, config)), TARGET).feature_layers == (1, 2, 3)


def test_a_drafter_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama")
    config = parse_config({"target": {"model": str(target), "drafter": str(tmp_path / "nowhere")}})
    with pytest.raises(ConfigError, match=r"target\.drafter is '.*nowhere'; allowed: a directory with"):
        check_pair(config.target, None)


def test_fields_that_loosen_acceptance_are_named_and_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loose = {"proposal_type": "greedy", "verifier_accept_k": 3, "accept_tolerance": 0.5}
    exact = {"proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    tensors, config = speculators(eagle3_weights())
    config["speculators_config"]["proposal_methods"] = [exact, loose, None]
    path = write(tmp_path, tensors, config)
    read_layout(str(path), TARGET)
    assert [entry.getMessage().split(",")[0] for entry in caplog.records if entry.levelname == "WARNING"] == [
        f"drafter {str(path)!r}: verifier_accept_k is 3",
        f"drafter {str(path)!r}: accept_tolerance is 0.5",
    ]
