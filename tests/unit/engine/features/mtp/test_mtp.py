"""MTP layers of a target's own checkpoint, in every naming, against the library's layer without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers.generation.candidate_generator import MTPCandidateGenerator

from specray.config import parse_config
from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.errors import ConfigError
from tests.unit.engine.features.mtp.checkpoints import (
    FAMILIES,
    NUM_LAYERS,
    Weights,
    Written,
    drafted,
    write_target,
)
from tests.unit.engine.features.targets import (
    PROMPT,
    Session,
    check_drafted,
    generate,
    make_target,
    step,
    watch,
)
from tests.unit.engine.model.checkpoint.light import write_light
from tests.unit.engine.model.checkpoints import (
    changing_tensors,
    reference_greedy,
    reference_model,
    write_tokenizer,
)
from tests.unit.engine.model.stored_layouts import LAYOUTS, quantise_checkpoint

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


@pytest.mark.parametrize(("family", "num_layers"), [("GLM", 1), ("GLM", 2), ("GLM", 3), ("Mellum", 1)])
def test_drafts_are_those_of_generate(
    family: str, num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every round, by the library's own MTP layers: with several, one token of each."""
    path = write_target(tmp_path, family, num_mtp_layers=num_layers).path
    drafts: dict[tuple[int, ...], list[int]] = {}
    own = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found, logits = own(self, input_ids, *args, **kwargs)
        known = input_ids.shape[1]
        if found.shape[1] > known:
            drafts[tuple(input_ids[0].tolist())] = found[0, known:].tolist()
        return found, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    prompt, model = PROMPT[:3], reference_model(path)
    if family != "Mellum":
        # The library knows the layers by their number in the published models alone.
        names = [rf"model\.layers\.{NUM_LAYERS + index}\..*" for index in range(num_layers)]
        monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", names)
    model.generate(
        torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    target, session, draft, seen = make_target(path, "mtp"), Session("a", list(prompt)), NO_DRAFT, 0
    while len(session.token_ids) < len(prompt) + 20:
        [verdict] = step(target, [session], [draft], num_layers)
        draft = verdict.draft
        wanted = drafts[tuple(session.token_ids)]
        assert list(draft.token_ids) == wanted
        seen += len(wanted)
    assert seen >= 10 * num_layers


def test_layers_in_turn_grow_trees_longer_than_their_number(tmp_path: Path) -> None:
    path = write_target(tmp_path, "GLM", num_mtp_layers=2).path
    target, tree = make_target(path, "mtp"), TreeBudget.of_widths((2, 2, 1))
    [alone] = step(target, [Session("a", list(PROMPT))], [NO_DRAFT], K)
    [beside] = step(target, [Session("b", list(PROMPT))], [NO_DRAFT], K, next_tree=tree)
    draft = beside.draft
    paths = {tuple(draft.token_ids[node] for node in draft.path(leaf)) for leaf in range(len(draft))}
    assert tuple(alone.draft.token_ids) in paths and len(draft) >= 6
    output = generate(target, Session("c", list(PROMPT)), 20, K, next_tree=tree)
    assert output == reference_greedy(reference_model(path), PROMPT, 20)


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


def check_first(target: Any, written: Written, *, within: float = 1e-4) -> None:
    """A round behind a prompt, and one behind what it drafted."""
    watched, session, draft = watch(target), Session("a", list(PROMPT)), NO_DRAFT
    for _ in range(2):
        watched.logits.clear()
        [verdict] = step(target, [session], [draft], K)
        check_drafted(watched, verdict.draft, drafted(written, session.token_ids, K), within=within)
        draft = verdict.draft


def stack(weights: Weights, root: str) -> None:
    """Makes one weight of those of all experts below ``root``."""
    layers = {
        name.split("experts.0.")[0] for name in weights if name.startswith(root) and "experts.0." in name
    }
    for layer in layers:
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            own = [
                [weights.pop(f"{layer}experts.{number}.{part}.weight") for part in parts]
                for number in range(4)
            ]
            weights[f"{layer}experts.{name}"] = torch.stack([torch.cat(each) for each in own])


@pytest.mark.parametrize("root", ["mtp.", "model."])
def test_experts_are_stacked_in_the_layer_and_apart_in_the_target_or_the_other_way(
    tmp_path: Path, root: str
) -> None:
    """As Qwen3.5's are published."""
    written = write_target(tmp_path, "Qwen3.5-MoE")
    other = write_target(tmp_path / "other", "Qwen3.5-MoE", lambda weights: stack(weights, root))
    check_first(make_target(other.path, "mtp"), written)


def test_the_layer_of_a_published_checkpoint_is_plain_where_the_rest_is_quantised(tmp_path: Path) -> None:
    """Under the names of a multimodal one."""
    written, other = write_target(tmp_path, "Qwen3.5"), write_target(tmp_path / "other", "Qwen3.5")
    with changing_tensors(other.path) as weights:
        own = [name.removesuffix(".weight") for name in weights if name.startswith("mtp.")]
    meant = quantise_checkpoint(other.path, LAYOUTS["compressed-int8"], plain=tuple(own))
    with changing_tensors(written.path) as weights:
        weights |= {name: tensor.clone() for name, tensor in meant.items()}
    with changing_tensors(other.path) as weights:
        for name in [name for name in weights if name.startswith("model.")]:
            weights[f"model.language_model.{name.removeprefix('model.')}"] = weights.pop(name)
        assert any(tensor.dtype == torch.int8 for tensor in weights.values())
    config = json.loads((other.path / "config.json").read_text())
    text = {name: value for name, value in config.items() if name != "quantization_config"}
    whole = {
        "model_type": "qwen3_5",
        "text_config": text,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
    }
    whole["quantization_config"] = config["quantization_config"]
    (other.path / "config.json").write_text(json.dumps(whole))
    check_first(make_target(other.path, "mtp"), written, within=1e-3)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_the_layer_of_a_gguf_file_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Both have the last attending layer of the target once more; files hold norms plus one."""
    torch.manual_seed(5)
    sizes = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head_norm": (64,)}
    own = {part: 0.3 * torch.randn(size) for part, size in sizes.items()}

    def more(tensors: dict[str, Any]) -> dict[str, Any]:
        layer = {f"blk.4.{key[6:]}": value for key, value in tensors.items() if key.startswith("blk.3.")}
        is_norm = {part: float(part != "eh_proj") for part in own}
        return layer | {
            f"blk.4.nextn.{part}.weight": (value + is_norm[part]).numpy() for part, value in own.items()
        }

    model = write_light(tmp_path / "light", name, lambda stored: Type.F32, more=more)
    model.save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain", model.config.vocab_size)
    with changing_tensors(tmp_path / "plain") as weights:
        layer = {key: value.clone() for key, value in weights.items() if key.startswith("model.layers.3.")}
        weights |= {f"mtp.layers.0.{key.removeprefix('model.layers.3.')}": layer[key] for key in layer}
        parts = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        weights |= {f"{part}.weight": value for part, value in zip(parts, own.values(), strict=True)}
    drafts = []
    for directory in ("light", "plain"):
        target, session = (
            make_target(tmp_path / directory, "mtp", max_model_len=128),
            Session("a", [5, 7, 9, 3, 8]),
        )
        watched, draft = watch(target), NO_DRAFT
        for _ in range(3):
            [verdict] = step(target, [session], [draft], K)
            draft = verdict.draft
            drafts.append(draft.token_ids)
        drafts.append(watched.logits)
    assert drafts[:3] == drafts[4:7]
    for found, expected in zip(drafts[3], drafts[7], strict=True):
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("format", ["none", "int8"])
def test_a_head_for_drafting_alone(tmp_path: Path, format: str) -> None:
    """It draws the best of its tokens; outputs stay the target's."""
    written, ids = write_target(tmp_path, "Qwen3.5"), [3, 90, *range(10, 40)]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    settings = {"drafter_vocabulary_ids": str(file), "drafter_head_quantization": format}
    target, session = make_target(written.path, "mtp", **settings), Session("a", list(PROMPT))
    watched = watch(target)
    [verdict] = step(target, [session], [NO_DRAFT], K)
    [logits], _ = drafted(written, session.token_ids, 1)
    found, expected = watched.logits[0][0], logits[sorted(ids)]
    assert len(found) == len(ids)
    error = float((found - expected).abs().max()) / float(expected.abs().max())
    assert error < 1e-4 if format == "none" else 1e-4 < error < 0.02
    assert verdict.draft.token_ids[0] == sorted(ids)[int(found.argmax())]
    output = generate(target, Session("b", list(PROMPT)), 16, K)
    assert output == reference_greedy(reference_model(written.path), PROMPT, 16)


def test_ids_of_a_drafting_head_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    path, file = write_target(tmp_path, "MiMo").path, tmp_path / "ids.json"
    file.write_text("[1, 96]")
    with pytest.raises(
        ConfigError, match=r"target.drafter_vocabulary_ids: .* holds token id 96; allowed: 0..95"
    ):
        make_target(path, "mtp", drafter_vocabulary_ids=str(file))


def drop(weights: Weights, name: str) -> None:
    del weights[name]


def put(weights: Weights, name: str, tensor: torch.Tensor) -> None:
    weights[name] = tensor


LAYER, SECOND, INFINITE = "model.mtp_layers.0.", "model.mtp_layers.1.", torch.full((32,), float("inf"))
REFUSED = {
    "none": ("MiMo", lambda weights: [drop(weights, each) for each in list(weights) if "mtp" in each],
             r"drafter is 'mtp', and model .* has no MTP layer \(none of model.layers.2.eh_proj.weight"),
    "half of a second": ("MiMo", lambda weights: put(weights, f"{SECOND}input_proj.weight", INFINITE),
                r"its MTP layer lacks model.mtp_layers.1.final_layernorm.weight, model.mtp_layers.1.hidden"),
    "no norm": ("MiMo", lambda weights: drop(weights, f"{LAYER}token_layernorm.weight"),
                r"its MTP layer lacks model.mtp_layers.0.token_layernorm.weight"),
    "narrow": ("MiMo", lambda weights: put(weights, f"{LAYER}input_proj.weight", torch.ones(32, 32)),
               r"mtp_layers.0.input_proj.weight is \[32, 32\]; allowed: \[32, 64\]"),
    "no key": ("MiMo", lambda weights: drop(weights, f"{LAYER}self_attn.k_proj.weight"),
               r"its MTP layer lacks model.mtp_layers.0.self_attn.k_proj.weight"),
    "unknown": ("MiMo", lambda weights: put(weights, f"{LAYER}extra.weight", torch.ones(2)),
                r"its MTP layer has no place for model.mtp_layers.0.extra.weight"),
    "unknown beside the layer": (
        "Qwen",
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
