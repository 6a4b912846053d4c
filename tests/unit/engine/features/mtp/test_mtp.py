"""MTP layers of a target's own checkpoint, in every naming, against the library's layer without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLTextConfig

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.features.mtp import layout
from specray.errors import ConfigError
from tests.unit.engine.features.mtp.checkpoints import FAMILIES, Weights, Written, drafted, write_target
from tests.unit.engine.features.targets import (
    PROMPT,
    Session,
    check_drafted,
    generate,
    make_target,
    step,
    watch,
)
from tests.unit.engine.model.checkpoints import reference_greedy, reference_model

K = 3


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_target(tmp_path_factory.mktemp("mtp"), request.param)


def test_every_round_drafts_what_the_layer_says_without_a_cache(written: Written) -> None:
    """Behind rounds of which nothing, a part and all was accepted; two sessions side by side."""
    model = reference_model(written.path)
    alone = reference_greedy(model, PROMPT, 24)
    target = make_target(written.path, "mtp")
    watched = watch(target)
    assert target.info.drafter == "mtp"
    sessions, drafts = [Session("a", list(PROMPT)), Session("b", PROMPT[:4])], [NO_DRAFT, NO_DRAFT]
    for right in (1, 3, 0, 2):
        watched.logits.clear()
        verdicts = step(target, sessions, drafts, K)
        for place, (session, verdict) in enumerate(zip(sessions, verdicts, strict=True)):
            wanted = drafted(written, session.token_ids, K)
            check_drafted(watched, verdict.draft, wanted, place=place, within=1e-4)
        done = len(sessions[0].token_ids) - len(PROMPT)
        draft = verdicts[0].draft.token_ids
        drafts = [DraftTokens((*alone[done : done + right], *draft[right:])[:K]), verdicts[1].draft]
    assert sessions[0].token_ids[len(PROMPT) :] == alone[: len(sessions[0].token_ids) - len(PROMPT)]
    assert {0, 1, 2, 3} > set(sessions[0].accepted) > {1}


def test_nodes_of_a_tree_see_their_own_path(written: Written) -> None:
    target, session = make_target(written.path, "mtp"), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], K, next_tree=TreeBudget.of_widths((2, 1, 1)))
    draft = verdict.draft
    paths = {tuple(draft.token_ids[node] for node in draft.path(leaf)) for leaf in range(len(draft))}
    firsts = drafted(written, session.token_ids, 1)[0][0].topk(2).indices.tolist()
    wanted = {tuple(drafted(written, session.token_ids, K, path=(first,))[1]) for first in firsts}
    assert len(wanted) == 2 and wanted <= paths


def test_chunks_and_cached_prefixes_draft_the_same(tmp_path: Path) -> None:
    written = write_target(tmp_path, "MiMo")
    long = [(7 * index) % 90 + 3 for index in range(70)]
    target = make_target(written.path, "mtp", max_num_batched_tokens=24, block_size=16, attention="gather")
    for name in ("a", "b"):
        session = Session(name, list(long))
        [verdict] = step(target, [session], [NO_DRAFT], K)
        assert list(verdict.draft.token_ids) == drafted(written, session.token_ids, K)[1]
    assert verdict.num_cached_tokens >= 32


def drop(weights: Weights, name: str) -> None:
    del weights[name]


def put(weights: Weights, name: str, tensor: torch.Tensor) -> None:
    weights[name] = tensor


LAYER, INFINITE = "model.mtp_layers.0.", torch.full((32,), float("inf"))
REFUSED = {
    "none": ("MiMo", lambda weights: [drop(weights, each) for each in list(weights) if "mtp" in each],
             r"drafter is 'mtp', and model .* has no MTP layer \(none of model.layers.2.eh_proj.weight"),
    "several": ("MiMo", lambda weights: put(weights, "model.mtp_layers.1.input_proj.weight", torch.ones(2)),
                r"has several MTP layers \(model.mtp_layers.1.\); allowed: one"),
    "no norm": ("MiMo", lambda weights: drop(weights, f"{LAYER}token_layernorm.weight"),
                r"mtp_layers.0.token_layernorm.weight is missing; allowed: \[32\]"),
    "narrow": ("MiMo", lambda weights: put(weights, f"{LAYER}input_proj.weight", torch.ones(32, 32)),
               r"mtp_layers.0.input_proj.weight is \[32, 32\]; allowed: \[32, 64\]"),
    "no key": ("MiMo", lambda weights: drop(weights, f"{LAYER}self_attn.k_proj.weight"),
               r"its MTP layer lacks model.mtp_layers.0.self_attn.k_proj.weight"),
    "unknown": ("MiMo", lambda weights: put(weights, f"{LAYER}extra.weight", torch.ones(2)),
                r"its MTP layer has no place for model.mtp_layers.0.extra.weight"),
    "unknown beside the layer": (
        "Qwen3-Next",
        lambda weights: [put(weights, name, torch.ones(2)) for name in ("mtp.extra.weight", "mtp.fc.bias")],
        r"its MTP layer has no place for mtp.extra.weight, mtp.fc.bias; allowed with mtp.: mtp.embed_tok",
    ),
    "unknown beside the layers": (
        "MiMo",
        lambda weights: put(weights, "model.mtp_layers.norm", torch.ones(2)),
        r"no place for model.mtp_layers.norm; allowed with model.mtp_layers.: model.mtp_layers.0.final_l",
    ),
    "not finite": ("MiMo", lambda weights: put(weights, f"{LAYER}hidden_layernorm.weight", INFINITE),
                   r"the weight 'model.mtp_layers.0.hidden_layernorm.weight' holds NaN"),
    "own head": ("GLM", lambda weights: weights["model.layers.2.shared_head.head.weight"].add_(1),
                 r"model.layers.2.shared_head.head.weight is not the target's"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    family, change, message = REFUSED[name]
    path = write_target(tmp_path, family, change).path
    with pytest.raises(ConfigError, match=message):
        make_target(path, "mtp")


def test_a_text_part_without_a_model_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_target(tmp_path, "MiMo").path
    monkeypatch.setattr(layout, "_one_layer", lambda text, **kwargs: Qwen3VLTextConfig())
    with pytest.raises(ConfigError, match="has no text model of its own for model type 'qwen3_vl_text' of"):
        make_target(path, "mtp")


def test_a_norm_that_holds_more_than_a_weight_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        layout._like("/m", "mtp.norm.weight", torch.nn.LayerNorm(4), torch.ones(4))
    assert str(caught.value) == (
        "model '/m': mtp.norm.weight alone makes no LayerNorm, the target's kind of norm, which holds bias, "
        "weight; allowed: norms that hold a weight alone"
    )


def test_a_directory_of_that_name_is_named_by_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_config({"target": {"drafter": "mtp"}}).target.drafter == "mtp"
    assert parse_config({"target": {"drafter": "./mtp"}}).target.drafter == str(tmp_path / "mtp")


def test_the_layer_is_nobodys_where_it_is_not_asked_for(tmp_path: Path) -> None:
    written = write_target(tmp_path, "GLM")
    target = make_target(written.path, None)
    assert target.info.drafter in ("", None)
    assert generate(target, Session("a", list(PROMPT)), 4, 0) == reference_greedy(
        reference_model(written.path), PROMPT, 4
    )
