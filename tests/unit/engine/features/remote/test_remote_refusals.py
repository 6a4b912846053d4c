"""What is refused of drafters in the draft's process, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.config import parse_config
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.preflight import check_models
from specray.errors import ConfigError
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.remote.pairs import pair_config
from tests.unit.engine.model.checkpoints import write_checkpoint


def test_a_drafter_of_another_target_is_refused_by_its_tensor(tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide", "llama", num_hidden_layers=3, hidden_size=64)
    eagle = write(tmp_path / "eagle", *official(eagle3_weights()))
    for build in (build_target_engine, build_draft_engine):
        with pytest.raises(ConfigError, match=r"fc.weight reads 96 numbers; allowed: a multiple of"):
            build(pair_config(wide, eagle))


@pytest.mark.parametrize("build", [build_target_engine, build_draft_engine], ids=["target", "draft"])
def test_a_target_without_an_mtp_layer_is_refused_on_both_sides(llama: Path, build: Any) -> None:
    with pytest.raises(ConfigError, match=r"target.drafter is 'mtp', and model '.*' has no MTP layer"):
        build(pair_config(llama, Path("mtp")))


def test_memory_for_less_than_a_sequence_is_refused(llama: Path, tmp_path: Path) -> None:
    eagle = write(tmp_path, *official(eagle3_weights()))
    with pytest.raises(ConfigError, match=r"draft.cache_memory_gib is 1e-07, room for 0 blocks"):
        build_draft_engine(pair_config(llama, eagle, cache_memory_gib=1e-7))


@pytest.mark.parametrize(
    "target, draft, says",
    [
        ({}, {}, "draft.model is 'remote-features' without target.drafter"),
        (
            {"drafter": "/e"},
            {"window": 64},
            "window is 64 with model 'remote-features'; allowed with it: ",
        ),
        ({"drafter": "/e"}, {"draft": "ngram"}, "draft is 'ngram' with model 'remote-features'"),
        ({"drafter": "/e"}, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2 with model"),
        ({"drafter": "/e"}, {"forward": "hf"}, "forward is 'hf' with model 'remote-features'; allowed with"),
        ({"drafter": "/e"}, {"quantization": "int8"}, "quantization is 'int8' with model 'remote-features'"),
    ],
)
def test_settings_that_do_not_go_together(target: Any, draft: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"target": target, "draft": {"model": "remote-features", **draft}})
    assert says in str(refused.value)


def test_a_switched_off_draft_needs_no_drafter() -> None:
    config = parse_config({"draft": {"model": "remote-features", "enabled": False}})
    assert not config.draft.reads_features and not config.draft.has_model


def test_the_start_looks_for_no_draft_model(llama: Path, tmp_path: Path) -> None:
    eagle = write(tmp_path, *official(eagle3_weights()))
    config = pair_config(llama, eagle)
    assert config.draft.has_model and config.draft.model == "remote-features"
    check_models(config)
    missing = pair_config(llama, tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"target.drafter is '.*missing'; allowed: a directory with"):
        check_models(missing)
