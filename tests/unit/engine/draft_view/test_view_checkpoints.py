"""Checkpoints with different tokenizers: what ``draft.vocabulary`` makes of them, and what it refuses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specray.config import Config, DraftConfig, TargetConfig
from specray.engine.build import build_draft_engine, build_target_engine
from specray.engine.draft_view import choice
from specray.engine.draft_view.engine import NO_LIMIT, DraftViewEngine, RetokenizingDraftEngine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.inputs import SequenceInput
from specray.engine.preflight import check_model, check_pair
from specray.engine.runner.assembly import build_runner
from specray.errors import ConfigError
from specray.tokenization import load_tokenizer
from specray.tokenization.pair import load_partners
from specray.types import SamplingParams, Verification
from tests.unit.engine.harness import Session, generate_serial
from tests.unit.engine.model.checkpoints import changing_tensors, write_checkpoint, write_tokenizer
from tests.unit.engine.trees.drafters import empty_drafter, engine_drafter
from tests.unit.tokenization.tiny_pair import byte_level_backend, pieces_backend, write_backend

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_num_seqs": 4}
PROMPT = "The quiet harbour\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that writes pieces, and its twin with byte-level tokens: the same weights for equal tokens."""
    root = tmp_path_factory.mktemp("pair")
    paths = root / "target", root / "draft"
    for path, backend in zip(paths, (pieces_backend(), byte_level_backend()), strict=True):
        path.mkdir()
        names = ("<bos>", "<eos>") if path.name == "target" else ("<s>", "<|end|>")
        width = backend.get_vocab_size() + 5 * (path.name == "draft")
        write_checkpoint(path, "mistral", vocab_size=width, max_position_embeddings=512)
        assert write_backend(path, backend, begin=names[0], end=names[1]) <= width
    target, draft = paths
    weights = load_file(target / "model.safetensors")
    with changing_tensors(draft) as twin:
        twin |= {name: weights[name] for name in twin if name not in (EMBEDDING, HEAD)}
        for own, theirs in load_partners(draft, target).draft_ids.items():
            for name in (EMBEDDING, HEAD):
                twin[name][theirs] = weights[name][own]
    return target, draft


def config_of(pair: tuple[Path, Path], **draft: Any) -> Config:
    return Config(
        target=TargetConfig(model=str(pair[0]), max_model_len=256, **OPTIONS),
        draft=DraftConfig(model=str(pair[1]), **{"max_model_len": 256, **OPTIONS, **draft}),
    )


def sessions(pair: tuple[Path, Path]) -> list[Session]:
    """Greedy, coupled and by rejection, of tokens that both have."""
    prompt = load_tokenizer(pair[0]).encode(PROMPT)
    allowed = tuple(sorted(load_partners(pair[1], pair[0]).draft_ids))[2:]
    shared = {"num_prompt_tokens": len(prompt), "allowed_token_ids": allowed, "seed": 5}
    samplings = [
        SamplingParams(temperature=0.0, **shared),  # type: ignore[arg-type]
        SamplingParams(**shared),  # type: ignore[arg-type]
        SamplingParams(verification=Verification.REJECTION, **shared),  # type: ignore[arg-type]
    ]
    return [Session(f"r{index}", list(prompt), sampling) for index, sampling in enumerate(samplings)]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, DraftViewEngine),
        ({"vocabulary": "intersect", "window": 16, "max_model_len": None}, DraftViewEngine),
        ({"vocabulary": "retokenize"}, RetokenizingDraftEngine),
    ],
    ids=["auto", "window", "retokenize"],
)
def test_output_is_the_targets_alone_and_the_twin_is_of_use(
    values: dict[str, Any], kind: type[DraftEngine], pair: tuple[Path, Path]
) -> None:
    config = config_of(pair, **values)
    target, draft = build_target_engine(config), build_draft_engine(config)
    assert type(draft) is kind
    assert (draft.info.vocab_size, draft.info.tokenizer_fingerprint) == (
        target.info.vocab_size,
        target.info.tokenizer_fingerprint,
    )
    assert draft.info.max_model_len == (NO_LIMIT if "window" in values else 256)
    for plain, current in zip(sessions(pair), sessions(pair), strict=True):
        output = generate_serial(target, engine_drafter(draft), current, 40, 4)
        if not plain.sampling.draws_by_rejection:
            plain.request_id = "plain"
            assert output == generate_serial(target, empty_drafter, plain, 40, 0)
            target.release(["plain"])
        mean = sum(current.accepted) / len(current.accepted)
        if not values and not plain.sampling.draws_by_rejection:
            assert mean == 4
        # Of text, at temperature 0.
        if not values or plain.sampling.is_greedy:
            assert mean > 1
    draft.check_integrity()


def test_auto_takes_the_text_where_little_probability_is_shared(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft says tokens that it has alone, such as `` morning``."""
    draft = Path(shutil.copytree(pair[1], tmp_path / "draft"))
    shared = set(load_partners(*reversed(pair)).draft_ids.values())
    with changing_tensors(draft) as weights:
        weights[HEAD][sorted(shared)] = 0.0
        alone = sorted(set(range(len(weights[HEAD]))) - shared)
        weights[HEAD][alone] = 8.0 * torch.randn(len(alone), weights[HEAD].shape[1])
    with caplog.at_level(logging.INFO):
        engine = build_draft_engine(config_of((pair[0], draft)))
    assert isinstance(engine, RetokenizingDraftEngine)
    assert "draft.vocabulary: retokenize, since " in caplog.text
    assert f"{len(shared)} of the draft's" in caplog.text
    assert type(build_draft_engine(config_of((pair[0], draft), vocabulary="intersect"))) is DraftViewEngine


def test_share_of_probability_is_that_of_shared_tokens(pair: tuple[Path, Path]) -> None:
    partners = load_partners(*reversed(pair))
    runner = build_runner(config_of(pair).draft, role="draft")
    token_ids = (3, 4, 5, 3)
    logits = runner.run([SequenceInput(token_ids, 0, [0], 4)]).logits
    probs = logits[:, : runner.info.vocab_size].softmax(-1)
    expected = sum(float(probs[:, own].mean()) for own in partners.draft_ids.values())
    assert 0.3 < expected < 0.95
    assert choice.shared_mass(runner, partners, token_ids) == pytest.approx(expected, rel=1e-4)


def test_equal_tokenizers_are_read_as_they_are(pair: tuple[Path, Path]) -> None:
    engine = build_draft_engine(config_of((pair[1], pair[1])))
    assert type(engine) is DraftEngine
    windowed = build_draft_engine(config_of((pair[1], pair[1]), window=32, max_model_len=None))
    assert type(windowed) is DraftViewEngine and windowed.info.vocab_size == engine.info.vocab_size
    assert windowed.info.tokenizer_fingerprint == engine.info.tokenizer_fingerprint


def test_a_draft_alone_and_one_that_is_told_so_keep_their_own_tokens(pair: tuple[Path, Path]) -> None:
    """The router then refuses it by its fingerprint."""
    alone = Config(draft=DraftConfig(model=str(pair[1]), **OPTIONS))
    for config in (alone, config_of(pair, vocabulary="same")):
        engine = build_draft_engine(config)
        assert type(engine) is DraftEngine
        assert engine.info.tokenizer_fingerprint == check_model(config.draft, "draft").vocabulary.fingerprint


def test_pairs_are_checked_before_anything_starts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = pair
    config = config_of(pair)
    for mode in ("auto", "intersect", "retokenize"):
        check_pair(config.target, config_of(pair, vocabulary=mode).draft)
    with pytest.raises(
        ConfigError, match=r"token ids mean the same string; .*; allowed: the same vocabulary$"
    ):
        check_pair(config.target, config_of(pair, vocabulary="same").draft)
    write_checkpoint(tmp_path, "llama", vocab_size=97, max_position_embeddings=512)
    write_tokenizer(tmp_path, 97)
    words = config_of((target, tmp_path))
    overlap = "1 of the draft's 97 tokens are the target's as well"
    said = f"draft.model: {tmp_path} has another tokenizer than the target {target}: {overlap}; allowed with "
    with pytest.raises(ConfigError) as caught:
        check_pair(words.target, words.draft)
    assert str(caught.value) == (
        f"{said}draft.vocabulary 'auto': the same vocabulary, or two tokenizers that can write any text"
    )
    with pytest.raises(ConfigError) as caught:
        build_draft_engine(words)
    assert str(caught.value).startswith(said)


def test_a_window_beyond_the_model_is_refused(pair: tuple[Path, Path]) -> None:
    config = config_of(pair, window=400, max_model_len=None)
    with pytest.raises(ConfigError) as caught:
        check_pair(config.target, config.draft)
    assert str(caught.value) == (
        f"draft.window leads to sequences of 732 tokens: max_model_len is 732; model '{pair[1]}' allows at "
        "most 512"
    )


def test_a_draft_of_the_draft_is_refused_with_a_window(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_draft_engine(config_of((pair[1], pair[1]), window=32, max_model_len=None, draft="ngram"))
    assert str(caught.value) == (
        "draft.draft is 'ngram' for a draft with a window or another tokenizer than the target; allowed: none"
    )
