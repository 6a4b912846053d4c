"""Sliding windows of EAGLE-3 and P-EAGLE drafters, against forwards that are written down once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT, TreeBudget
from specray.engine.features.base import TargetShape
from specray.engine.features.eagle.layout import EagleLayout
from specray.engine.features.loader import read_layout
from specray.errors import ConfigError
from tests.unit.engine.features import reference
from tests.unit.engine.features.checkpoints import (
    HIDDEN,
    LLAMA,
    eagle3_weights,
    masked_weights,
    official,
    speculators,
    write,
)
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import (
    PROMPT,
    Session,
    check_drafted,
    check_rounds,
    make_target,
    step,
    watch,
)
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, reference_model

TARGET = TargetShape(num_layers=3, hidden_size=HIDDEN, vocab_size=VOCAB_SIZE)
SLIDING, FULL = "sliding_attention", "full_attention"
WEIGHTS = eagle3_weights(num_layers=2)
K, MASK_ID = 4, 17
KINDS: dict[str, tuple[list[str], tuple[int | None, int | None]]] = {
    "first": ([SLIDING, FULL], (3, None)),
    "second": ([FULL, SLIDING], (None, 3)),
    "both": ([SLIDING, SLIDING], (3, 3)),
}


def windowed(**changes: Any) -> dict[str, Any]:
    """A configuration of layers with windows of 3."""
    return {**LLAMA, "use_sliding_window": True, "sliding_window": 3, **changes}


@pytest.mark.parametrize("name", KINDS)
def test_rows_see_the_last_positions_alone(llama: Path, tmp_path: Path, name: str) -> None:
    kinds, windows = KINDS[name]
    files = speculators(WEIGHTS, transformer_layer_config=windowed(layer_types=kinds))
    target, model = make_target(llama, write(tmp_path, *files)), reference_model(llama)
    flags = Flags(windows=windows)
    check_rounds(
        target,
        lambda known: reference.eagle3(model, WEIGHTS, flags, known[:-1], known[-1], K),
        K,
        second=[5],
    )


def test_masks_see_the_last_positions_alone(llama: Path, tmp_path: Path) -> None:
    weights = masked_weights(num_layers=2)
    config = windowed(layer_types=[SLIDING, FULL])
    target = make_target(
        llama,
        write(tmp_path, *speculators(weights, transformer_layer_config=config, mask_token_id=MASK_ID)),
    )
    watched, session = watch(target), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], K)
    known = session.token_ids
    model = reference_model(llama)
    wanted = reference.peagle(model, weights, MASK_ID, known[:-1], known[-1], K, windows=(3, None))
    check_drafted(watched, verdict.draft, wanted)


def test_nodes_see_the_last_of_the_text_and_of_their_path(llama: Path, tmp_path: Path) -> None:
    config = windowed(layer_types=[SLIDING, SLIDING])
    target = make_target(llama, write(tmp_path, *speculators(WEIGHTS, transformer_layer_config=config)))
    session, model, flags = Session("a", list(PROMPT)), reference_model(llama), Flags(windows=(3, 3))
    [verdict] = step(target, [session], [NO_DRAFT], 4, next_tree=TreeBudget.of_widths((2, 1, 1, 1)))
    draft, known = verdict.draft, session.token_ids
    paths = {tuple(draft.token_ids[node] for node in draft.path(leaf)) for leaf in range(len(draft))}
    roots = {path[0] for path in paths}
    assert len(roots) == 2
    for root in roots:
        wanted = reference.eagle3(model, WEIGHTS, flags, known[:-1], known[-1], 4, path=(root,))[1]
        assert tuple(wanted) in paths


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": None}, (None, None)),
        ({"use_sliding_window": False}, (None, None)),
        ({"use_sliding_window": False, "model_type": "mistral"}, (None, None)),
        ({"sliding_window": None}, (None, None)),
        ({"layer_types": [FULL, FULL]}, (None, None)),
        ({"layer_types": [FULL, SLIDING], "use_sliding_window": None}, (None, 3)),
        ({"max_window_layers": 1}, (None, 3)),
        ({"max_window_layers": 28}, (None, None)),
        ({"model_type": "mistral", "use_sliding_window": None}, (3, 3)),
        ({"model_type": "mistral", "sliding_window": None, "use_sliding_window": None}, (None, None)),
    ],
)
def test_fields_that_name_windows(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, int | None]
) -> None:
    config = windowed(**fields)
    layout = read_layout(str(write(tmp_path, *official(WEIGHTS, **config))), TARGET)
    assert isinstance(layout, EagleLayout) and layout.windows == windows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "max_window_layers is None, and use_sliding_window true; allowed: a whole number from 0 on"),
        ({"max_window_layers": -1}, "max_window_layers is -1, and use_sliding_window true"),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; allowed: true or false"),
        ({"layer_types": [SLIDING]}, r"layer_types is \['sliding_attention'\]; allowed: 2 of"),
        ({"layer_types": [SLIDING, "chunked_attention"]}, r"layer_types is .*chunked.*; allowed: 2 of"),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": None},
            "sliding_window is None; allowed: a whole",
        ),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 0}, "sliding_window is 0; allowed: a whole"),
        (
            {"layer_types": [SLIDING, FULL], "use_sliding_window": False},
            r"use_sliding_window is False and layer_types \['sliding_attention', 'full_attention'\]; allowed",
        ),
        (
            {"model_type": "gpt_oss", "use_sliding_window": None},
            "layer_types is not set, and model_type 'gpt_oss' has a sliding_window of 3; allowed: 2 of",
        ),
    ],
)
def test_windows_that_cannot_be_read_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = str(write(tmp_path, *official(WEIGHTS, **windowed(**fields))))
    with pytest.raises(ConfigError, match=message):
        read_layout(path, TARGET)
