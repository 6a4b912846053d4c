"""A draft with adapters of its own, by the names of the target's that they draft for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specray.config import Config, DraftConfig
from specray.config.models import PoolConfig
from specray.engine.build import build_draft_engine
from specray.engine.drafting.engine import DraftEngine
from specray.errors import ConfigError
from specray.types import ItemFailed, SpeculateItem
from tests.unit.engine.adapters.files import write_adapter
from tests.unit.engine.draft_ranks import GREEDY, NUM_DRAFTS, PROMPT, answers, enumerated, serial
from tests.unit.engine.model.checkpoints import write_checkpoint


def draft_of(model: Path, **values: Any) -> DraftEngine:
    options = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_model_len": 128, "max_num_seqs": 4}
    engine = build_draft_engine(Config(draft=DraftConfig(model=str(model), **{**options, **values})))
    assert isinstance(engine, DraftEngine)
    return engine


def test_it_drafts_as_the_merged_model_for_its_names_and_as_the_base_for_others(
    tmp_path: Path, llama: Path
) -> None:
    """Chains and branches; two names may have one adapter."""
    written = write_adapter(tmp_path / "x", llama)
    other = write_adapter(tmp_path / "y", llama, seed=1, rank=2)
    names = {"sql": written.folder, "sql-2": written.folder, "chat": other.folder}
    draft = draft_of(llama, adapters={name: str(folder) for name, folder in names.items()})
    assert draft.info.adapter_names == ("sql", "sql-2", "chat")
    sql, again, chat = draft.info.adapters
    assert sql == again != chat
    models = {b"": llama, sql: written.merged(tmp_path / "1"), chat: other.merged(tmp_path / "2")}
    said = []
    for digest, model in models.items():
        sampling, merged = replace(GREEDY, adapter=digest), draft_of(model)
        found = [ask(draft, digest.hex(), sampling) for ask in (serial, enumerated)]
        assert found == [ask(merged, "merged", GREEDY) for ask in (serial, enumerated)]
        said.append(found)
    assert said[0] != said[1] != said[2] != said[0]
    draft.check_integrity()


def test_sequences_of_several_adapters_are_drafted_for_in_one_batch(tmp_path: Path, llama: Path) -> None:
    folders = {
        name: write_adapter(tmp_path / name, llama, seed=seed).folder for seed, name in enumerate("xy")
    }
    draft = draft_of(llama, adapters={name: str(folder) for name, folder in folders.items()})
    items = [
        SpeculateItem(
            f"of {digest.hex()}", 0, 0, PROMPT, NUM_DRAFTS, sampling=replace(GREEDY, adapter=digest)
        )
        for digest in (*draft.info.adapters, b"")
    ]
    together = answers(draft, items)
    draft.release([item.request_id for item in items])
    assert together == [answers(draft, [item])[0] for item in items]
    assert len({*together}) == 3


def test_an_adapter_that_it_has_not_is_no_question_of_the_bases(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path / "x", llama)
    draft = draft_of(llama, adapters={"x": str(tmp_path / "x")})
    item = SpeculateItem("a", 0, 0, PROMPT, 2, sampling=replace(GREEDY, adapter=b"?" * 32))
    [reply] = draft.speculate([item]).replies
    assert isinstance(reply, ItemFailed) and reply.lacks_adapter


def test_bad_adapters_are_refused_by_their_names(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.adapters\.sql is '.*/absent'; allowed: a directory with"):
        draft_of(llama, adapters={"sql": str(tmp_path / "absent")})
    write_adapter(tmp_path / "of another", write_checkpoint(tmp_path / "other", "llama", hidden_size=64))
    with pytest.raises(ConfigError, match=r"draft\.adapters: adapter 'sql' adapts model\.layers\.0.* as \["):
        draft_of(llama, adapters={"sql": str(tmp_path / "of another")})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own: DraftConfig(model="ngram", adapters=own), "with model 'ngram'; allowed: with a model"),
        (lambda own: DraftConfig(model="remote-features", adapters=own), "allowed with it: none"),
        (
            lambda own: PoolConfig(name="d", adapters=own),
            "the draft 'd' that models share, whose adapters of",
        ),
        (lambda own: DraftConfig(adapters={"../x": "x"}), "should match pattern"),
    ],
)
def test_drafts_that_cannot_have_any_refuse_them(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make({"sql": "/adapters/sql"})
