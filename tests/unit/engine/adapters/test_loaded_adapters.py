"""A target loads adapters while it serves, keeps those in use, and refuses what it cannot compute."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.checkpoint_digest import adapter_digest
from specray.engine.runner.assembly import build_runner
from specray.engine.target.engine import TargetEngine
from specray.errors import ConfigError, OverloadedError
from specray.types import ItemFailed, SamplingParams, Verdict, VerifyItem
from tests.unit.engine.adapters.files import load, target_config, write_adapter
from tests.unit.engine.harness import toy_target
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runners import info_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple((5 * place) % 90 + 2 for place in range(40))


def target(base: Path, directory: Path, **changes: Any) -> TargetEngine:
    runner = build_runner(target_config(base, directory, **changes), role="target")
    info = info_of(runner, max_model_len=128)
    return TargetEngine(runner, info, device=torch.device("cpu"), adapters=runner.adapters)


def begin(engine: TargetEngine, request_id: str, adapter: bytes = b"", **changes: Any) -> Any:
    """What the engine answers to the prompt."""
    sampling = replace(GREEDY, adapter=adapter, num_prompt_tokens=len(PROMPT), **changes)
    [reply] = engine.verify([VerifyItem(request_id, 1, 0, PROMPT, sampling=sampling)]).replies
    engine.check_integrity()
    return reply


def go_on(engine: TargetEngine, request_id: str, tokens: Sequence[int]) -> list[int]:
    """Tokens that follow a begun request's."""
    found = list(tokens)
    for round_id in range(2, 6):
        item = VerifyItem(request_id, round_id, len(PROMPT) + len(found) - 1, (found[-1],))
        [reply] = engine.verify([item]).replies
        assert isinstance(reply, Verdict) and reply.next_token_id is not None
        found.append(reply.next_token_id)
    return found


def output(engine: TargetEngine, request_id: str, adapter: bytes = b"") -> list[int]:
    reply = begin(engine, request_id, adapter, cache_salt=request_id)
    found = go_on(engine, request_id, [reply.next_token_id])
    engine.release([request_id])
    return found


def test_a_prefix_of_one_adapter_serves_no_other_and_no_base(tmp_path: Path, llama: Path) -> None:
    for seed, name in enumerate("xy"):
        write_adapter(tmp_path / name, llama, seed=seed)
    engine = target(llama, tmp_path)
    first, second = (load(engine, name) for name in "xy")
    cached = [
        begin(engine, str(number), adapter).num_cached_tokens
        for number, adapter in enumerate((first, second, b"", first, second, b""))
    ]
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] == cached[5] > 0
    # The folder has other bytes now, which are another adapter.
    write_adapter(tmp_path / "x", llama, seed=7)
    assert begin(engine, "changed", load(engine, "x")).num_cached_tokens == 0


def test_prompts_of_one_step_share_nothing_between_adapters(tmp_path: Path, llama: Path) -> None:
    """Long equal prompts wait for each other, and those of another adapter do not."""
    write_adapter(tmp_path / "x", llama)
    engine = target(llama, tmp_path)
    digest, prompt = load(engine, "x"), PROMPT * 2
    items = [
        VerifyItem(str(number), 1, 0, prompt, sampling=replace(GREEDY, adapter=adapter))
        for number, adapter in enumerate((digest, b"", digest, b""))
    ]
    replies = engine.verify(items).replies
    cached = [reply.num_cached_tokens for reply in replies if isinstance(reply, Verdict)]
    assert cached[:2] == [0, 0] and cached[2] == cached[3] > 0
    tokens = [reply.next_token_id for reply in replies if isinstance(reply, Verdict)]
    assert tokens[0] == tokens[2] and tokens[1] == tokens[3]


def test_a_running_sequence_keeps_the_adapter_that_another_has_replaced(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path / "x", llama)
    engine = target(llama, tmp_path)
    old = load(engine, "x")
    assert old == adapter_digest(tmp_path / "x")
    before = output(engine, "before", old)
    running = begin(engine, "running", old)
    write_adapter(tmp_path / "x", llama, seed=1)
    new = load(engine, "x")
    assert new != old and (engine.info.adapters, engine.info.adapter_names) == ((old, new), ("x", "x"))
    engine.unload_adapter(old)
    after = output(engine, "after", new)
    assert go_on(engine, "running", [running.next_token_id]) == before != after
    # It was to leave, and leaves with its last sequence; the base's tokens are not those of what is gone.
    assert old in engine.info.adapters
    engine.release(["running"])
    assert engine.info.adapters == (new,)
    reply = begin(engine, "late", old)
    assert isinstance(reply, ItemFailed) and reply.lacks_adapter
    with pytest.raises(ConfigError, match="has other bytes than it had, of digest"):
        load(engine, "x", old)


def test_none_leaves_for_another_and_a_full_target_says_so(tmp_path: Path, llama: Path) -> None:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, llama, seed=seed)
    engine = target(llama, tmp_path, adapters={"max_loaded": 2, "max_per_step": 2})
    a, b = load(engine, "a"), load(engine, "b")
    outputs = {name: output(engine, name, digest) for name, digest in (("a", a), ("b", b))}
    with pytest.raises(OverloadedError, match="2 adapters are loaded; allowed: 2"):
        load(engine, "c")
    # One that is to leave keeps its place while it is used, and then another has it.
    reply = begin(engine, "uses b", b)
    engine.unload_adapter(b)
    with pytest.raises(OverloadedError):
        load(engine, "c")
    assert set(engine.info.adapters) == {a, b}
    assert go_on(engine, "uses b", [reply.next_token_id]) == outputs["b"]
    engine.release(["uses b"])
    c = load(engine, "c")
    assert set(engine.info.adapters) == {a, c}
    assert output(engine, "is c", c) not in outputs.values()
    assert output(engine, "still a", a) == outputs["a"]


def test_a_sequence_ends_with_the_adapter_that_it_began_with(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path / "x", llama)
    engine = target(llama, tmp_path)
    digest = load(engine, "x")
    begin(engine, "a")
    reply = begin(engine, "a", digest)
    assert isinstance(reply, ItemFailed) and not reply.lacks_adapter
    assert "sampling.adapter is another than the sequence began with" in reply.message


def test_a_target_that_knows_no_adapters_never_answers_for_one() -> None:
    engine, runner = toy_target()
    item = VerifyItem("a", 1, 0, (1, 2), sampling=replace(GREEDY, adapter=b"x" * 32))
    [reply] = engine.verify([item]).replies
    assert isinstance(reply, ItemFailed) and reply.lacks_adapter and not runner.steps
    assert (engine.info.max_adapters, engine.info.max_adapter_rank) == (0, 0)
    with pytest.raises(ConfigError, match="the target has no adapters; allowed: a directory of them"):
        load(engine, "x")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, TargetEngine]:
    """A base with a dense layer beside experts, a directory, and a target over both."""
    base = write_checkpoint(tmp_path_factory.mktemp("base"), "qwen3_moe")
    directory = tmp_path_factory.mktemp("adapters")
    return base, directory, target(base, directory)


QUERY = "model.layers.1.self_attn.q_proj"
TENSORS = "adapter_model.safetensors"


def _change(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def _cut(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-10])


def _link_out(folder: Path) -> None:
    outside = folder.parent.parent / "outside.safetensors"
    (folder / TENSORS).rename(outside)
    (folder / TENSORS).symlink_to(outside)


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        change(tensors)
        save_file(tensors, folder / TENSORS)

    return changed


DOWN_NAME, UP_NAME = (f"base_model.model.{QUERY}.lora_{kind}.weight" for kind in "AB")
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut file": (_cut, "has a damaged adapter_model.safetensors: "),
    "an empty file": (lambda folder: (folder / TENSORS).write_bytes(b""), "has 0 bytes; allowed: 1.."),
    "no tensors": (_tensors(dict.clear), "holds no tensors"),
    "no file": (lambda folder: (folder / TENSORS).unlink(), "has no file adapter_model.safetensors"),
    "too large a file": (
        lambda folder: os.truncate(folder / TENSORS, 1 << 22),
        "adapter_model.safetensors has more than",
    ),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_bytes(b"{"),
        "has a damaged adapter_config.json: ",
    ),
    "deep JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("[" * 9999 + "]" * 9999),
        "nested too deep",
    ),
    "a link that leads out": (_link_out, "is a link that leads out of the directory of adapters"),
    "a chat template of its own": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        "has a chat template of its own, which would not be used; allowed: the model's, or none",
    ),
    "a large chat template": (
        lambda folder: (folder / "tokenizer_config.json").write_bytes(b" " * ((16 << 20) + 1)),
        "tokenizer_config.json has 16777217 bytes; allowed: 1..16777216",
    ),
    "DoRA": (_change(use_dora=True), "has use_dora True, which is not computed"),
    "a pattern without end": (_change(alpha_pattern={"(a+)+b": 2}), "in alpha_pattern; allowed: one of"),
    "an embedding": (
        _tensors(
            lambda each: each.update(
                {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 3)}
            )
        ),
        "holds F32 tensor 'base_model.model.model.embed_tokens.lora_embedding_A'",
    ),
    "added tokens": (_change(modules_to_save=["embed_tokens"]), "has modules_to_save ['embed_tokens']"),
    "NaN": (
        _tensors(lambda each: each[UP_NAME].fill_(float("nan"))),
        f"holds NaN or infinite values in '{UP_NAME}'",
    ),
    "another base": (
        _tensors(lambda each: each.update({UP_NAME: torch.ones(3, 3)})),
        f"adapts {QUERY}.weight as [3, 32], which the model has as [64, 32]",
    ),
    "a layer too many": (
        _tensors(
            lambda each: each.update(
                {name.replace(".1.", ".9."): tensor.clone() for name, tensor in list(each.items())}
            )
        ),
        "adapts weights for which the model has no place: model.layers.9.",
    ),
    "half a pair": (_tensors(lambda each: each.pop(UP_NAME)), "has no pair of matrices that fit each other"),
    "a tensor twice": (
        _tensors(
            lambda each: each.update({DOWN_NAME.replace("A.weight", "A.default.weight"): each[DOWN_NAME] + 1})
        ),
        f"has two tensors for base_model.model.{QUERY}.lora_A",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence_and_nothing_changes(
    served: tuple[Path, Path, TargetEngine], case: str
) -> None:
    base, directory, engine = served
    folder = directory / "bad"
    for file in folder.iterdir() if folder.exists() else ():
        file.unlink()
    write_adapter(folder, base, modules=(QUERY,))
    change, named = HOSTILE[case]
    change(folder)
    _refuses(engine, "bad", named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 9}, f"has rank 9 at {QUERY}.weight; allowed: at most 8"),
        ({"modules": ("lm_head",)}, "adapts lm_head.weight, the head; allowed while serving: projections of"),
        (
            {"modules": ("model.layers.0.mlp.experts.2.up_proj",)},
            "adapts model.layers.0.mlp.experts.2.up_proj.weight, an expert's; allowed while serving",
        ),
        (
            {"modules": ("model.layers.0.mlp.gate",)},
            "adapts model.layers.0.mlp.gate.weight, a router; allowed while",
        ),
    ],
)
def test_adapters_of_what_is_not_computed_are_refused(
    served: tuple[Path, Path, TargetEngine], options: dict[str, Any], named: str
) -> None:
    base, directory, engine = served
    write_adapter(directory / "other", base, **{"modules": (QUERY,), **options})
    _refuses(engine, "other", named)


@pytest.mark.parametrize("name", ["../adapters", "/etc", "..", ".", "", "a/b", "a" * 65, "a\0b", "absent"])
def test_names_lead_to_folders_of_the_directory_alone(
    served: tuple[Path, Path, TargetEngine], name: str
) -> None:
    _refuses(served[2], name, "adapter folder ")


def _refuses(engine: TargetEngine, folder: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(engine, folder)
    message = str(caught.value)
    assert message.startswith("adapter ") and named in message and "\n" not in message
    assert engine.info.adapters == () and isinstance(begin(engine, "a"), Verdict)
    engine.release(["a"])


def test_the_models_own_chat_template_may_lie_with_an_adapter(
    served: tuple[Path, Path, TargetEngine],
) -> None:
    base, directory, engine = served
    write_adapter(directory / "chats", base, modules=(QUERY,))
    (base / "chat_template.jinja").write_text("{{ messages }}\n")
    settings = {"chat_template": "{{ messages }}", "model_max_length": 8}
    (directory / "chats" / "tokenizer_config.json").write_text(json.dumps(settings))
    digest = load(engine, "chats")
    assert engine.info.adapters == (digest,)
    engine.unload_adapter(digest)
    (base / "chat_template.jinja").unlink()


def test_forward_hf_has_none(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ConfigError, match="runs with forward 'hf'; allowed: a model that the decoder covers"):
        build_runner(target_config(llama, tmp_path, forward="hf"), role="target")
