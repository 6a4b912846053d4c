"""Heads of some token ids alone: cut from whole ones by a file of ids, or stored so in a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file

from specray.config import Config, DraftConfig
from specray.engine.build import build_draft_engine
from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder_config import HEAD
from specray.engine.model.layers.vocabulary import GatheredHead
from specray.engine.model.lowering import lower
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.preflight import check_model
from specray.engine.runner.assembly import build_runner
from specray.errors import ConfigError
from specray.types import Proposal, SamplingParams, SpeculateItem
from tests.unit.engine.model.checkpoints import VOCAB_SIZE, change_config, changing_tensors, write_checkpoint
from tests.unit.engine.model.test_lowering import CONFIG, Recorder, rank

IDS = [95, 3, 0, 41, 40, 77, 12]
TOKENS = [5, 17, 93, 40, 2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole models: with a tied head, with one of its own, and one that the library runs."""
    root = tmp_path_factory.mktemp("whole")
    return {name: write_checkpoint(root / name, name) for name in ("llama", "qwen3", "gpt_neox")}


def config_of(model: Path, **values: Any) -> DraftConfig:
    options = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_model_len": 32, "max_num_seqs": 2}
    return DraftConfig(model=str(model), **{**options, **values})


def logits_of(config: DraftConfig) -> tuple[torch.Tensor, list[int] | None]:
    """Logits of every row of a prompt, and the token ids that they are of."""
    runner = build_runner(config, role="draft")
    output = runner.run([SequenceInput(TOKENS, 0, [0], len(TOKENS))])
    ids = runner.info.token_ids
    return output.logits, None if ids is None else ids.tolist()


def write_ids(path: Path, ids: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, np.array(ids))
    elif path.suffix == ".safetensors":
        save_arrays({"ids": np.array(ids)}, path)
    else:
        path.write_text(json.dumps(ids))
    return path


def trim_stored(source: Path, target: Path, ids: list[int], **changes: Any) -> Path:
    """The checkpoint with a head of these ids' rows, in this order, and with ``d2t``."""
    shutil.copytree(source, target)
    change_config(target, draft_vocab_size=len(ids))
    with changing_tensors(target) as tensors:
        tensors[HEAD] = tensors[HEAD][ids].clone()
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
        tensors |= changes
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del tensors[name]
    return target


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("kind", ["ids.json", "ids.npy", "ids.safetensors"])
def test_head_is_cut_to_the_ids_of_a_file(
    name: str, kind: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    whole, none = logits_of(config_of(checkpoints[name]))
    assert none is None
    file = write_ids(tmp_path / kind, IDS)
    logits, ids = logits_of(config_of(checkpoints[name], vocabulary_ids=str(file)))
    assert ids == sorted(IDS)
    torch.testing.assert_close(logits, whole[:, sorted(IDS)], rtol=1e-5, atol=1e-5)


def test_head_stored_for_some_ids_in_any_order(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    whole, _ = logits_of(config_of(checkpoints["qwen3"]))
    stored = trim_stored(checkpoints["qwen3"], tmp_path / "stored", IDS)
    logits, ids = logits_of(config_of(stored))
    assert ids == sorted(IDS)
    torch.testing.assert_close(logits, whole[:, sorted(IDS)], rtol=1e-5, atol=1e-5)
    assert check_model(config_of(stored), "draft").vocab_size == VOCAB_SIZE


def test_ranks_share_the_rows_that_are_left() -> None:
    rows = torch.tensor([6, 1, 3, 2, 5])
    heads = []
    for number in range(2):
        recorder = Recorder(CONFIG)
        forward: Any = lower(
            CONFIG,
            recorder,
            TorchOperators(torch.float32),
            rank(number, 2),
            max_model_len=16,
            head_rows=rows,
        )
        assert isinstance(forward.head, GatheredHead) and forward.head.num_logits == 5
        assert HEAD not in recorder.parts
        heads.append(forward.head.local.weight.shape[0])
    assert heads == [3, 2]


def test_a_draft_proposes_by_target_ids(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """From a checkpoint through the real forward, at every position the best of the ids that are left."""
    file = write_ids(tmp_path / "ids.json", IDS)
    config = config_of(checkpoints["llama"], vocabulary_ids=str(file))
    draft = build_draft_engine(Config(draft=config))
    assert draft.info.vocab_size == VOCAB_SIZE
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=len(TOKENS))
    [reply] = draft.speculate([SpeculateItem("a", 1, 0, tuple(TOKENS), 5, sampling=sampling)]).replies
    assert isinstance(reply, Proposal)
    whole = build_runner(config_of(checkpoints["llama"]), role="draft")
    known = list(TOKENS)
    for token_id in reply.draft.token_ids:
        logits = whole.run([SequenceInput(known, 0, [0], 1)]).logits[0]
        assert token_id == sorted(IDS)[int(logits[sorted(IDS)].argmax())]
        known.append(token_id)
    assert len(known) == len(TOKENS) + 5


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 96], "holds token id 96; allowed: 0..95"),
        ([1, -1], "holds token id -1; allowed: 0..95"),
        ([4, 2, 4], "holds token id 4 twice; allowed: each id once"),
        ([], "holds no token id; allowed: 1..96 of them"),
        ([1.5], "is no list of whole numbers"),
        ({"a": 1}, "is no list of whole numbers"),
        ([[1], [2]], "is no list of whole numbers"),
        ([[1], [2, 3]], "is no list of whole numbers"),
        ([True, False], "is no list of whole numbers"),
    ],
)
def test_ids_that_cannot_be(ids: Any, message: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file = write_ids(tmp_path / "ids.json", ids)
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(checkpoints["llama"], vocabulary_ids=str(file)), "draft")
    assert str(caught.value) == f"draft.vocabulary_ids: {file} {message}"


@pytest.mark.parametrize("name", ["ids.json", "ids.npy", "ids.safetensors", "none.json"])
def test_file_that_cannot_be_read(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    if name != "none.json":
        (tmp_path / name).write_bytes(b"\x93NUMPY?")
    with pytest.raises(ConfigError, match=r"^draft.vocabulary_ids: \S+ cannot be read: "):
        check_model(config_of(checkpoints["llama"], vocabulary_ids=str(tmp_path / name)), "draft")


def offsets(*token_ids: int) -> torch.Tensor:
    return torch.tensor(token_ids) - torch.arange(len(token_ids))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (offsets(1, 2, 3), "d2t holds 3 ids; allowed: draft_vocab_size of them, 7"),
        (None, "d2t is missing, though draft_vocab_size is 7"),
        (offsets(1, 2, 3, 4, 5, 6, 96), "d2t holds token id 96; allowed: 0..95"),
        (offsets(1, 2, 3, 4, 5, 6, 3), "d2t holds token id 3 twice; allowed: each id once"),
        (torch.zeros(7), "d2t is no list of whole numbers"),
    ],
)
def test_stored_ids_that_cannot_be(
    stored: torch.Tensor | None, message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = trim_stored(checkpoints["qwen3"], tmp_path / "stored", IDS, d2t=stored)
    for load in (lambda: check_model(config_of(model), "draft"), lambda: logits_of(config_of(model))):
        with pytest.raises(ConfigError) as caught:
            load()
        assert str(caught.value) == f"model {str(model)!r}: {message}"


def test_head_of_another_size_than_its_configuration_says(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    whole = load_file(checkpoints["qwen3"] / "model.safetensors")[HEAD]
    model = trim_stored(checkpoints["qwen3"], tmp_path / "stored", IDS, **{HEAD: whole})
    with pytest.raises(ConfigError, match=r"lm_head.weight is \[96, 32\], its configuration says \[7, 32\]"):
        logits_of(config_of(model))


@pytest.mark.parametrize(
    ("values", "options", "role", "message"),
    [
        ({}, {}, "target", "draft_vocab_size is 7; allowed: for a draft alone"),
        (
            {"draft_vocab_size": 97},
            {},
            "draft",
            "draft_vocab_size is 97; allowed: at most its vocab_size, 96",
        ),
        ({"draft_vocab_size": 0}, {}, "draft", "cannot be loaded: draft_vocab_size is 0; allowed: 1 or more"),
        ({}, {"vocabulary_ids": "x.json"}, "draft", "draft_vocab_size is 7; allowed: without draft.vocabula"),
        ({}, {"forward": "hf"}, "draft", "draft_vocab_size is 7; allowed: model types aria_text, "),
    ],
)
def test_trimmed_checkpoint_where_it_cannot_be(
    values: dict[str, int],
    options: dict[str, str],
    role: str,
    message: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    model = trim_stored(checkpoints["qwen3"], tmp_path / "stored", IDS)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError, match=message):
        check_model(config_of(model, **options), role)
