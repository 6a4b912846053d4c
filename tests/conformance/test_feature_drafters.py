"""The theorem over drafters that read the target's features: on the target, and in another process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import TreeBudget
from specray.types import SamplingParams
from tests.pairwise import pairs
from tests.unit.engine.features.block.checkpoints import LAYOUTS, dflash, dspark
from tests.unit.engine.features.checkpoints import (
    eagle3_weights,
    masked_weights,
    medusa_files,
    official,
    write,
)
from tests.unit.engine.features.mtp.checkpoints import FAMILIES, write_target
from tests.unit.engine.features.remote.pairs import make_pair
from tests.unit.engine.features.remote.served import serve, written_alone
from tests.unit.engine.features.targets import Session, generate, make_target
from tests.unit.engine.model.checkpoints import write_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 30]
NUM_OUTPUT = 24
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=30.0, seed=11),
    "penalties": SamplingParams(
        temperature=60.0, seed=5, presence_penalty=1.5, num_prompt_tokens=len(PROMPT), top_k=40
    ),
}
DRAFTERS: dict[str, Callable[[], Any]] = {
    "eagle": lambda: official(eagle3_weights()),
    "peagle": lambda: official(masked_weights(num_layers=2), mask_token_id=17),
    "medusa": medusa_files,
    "medusa, no heads": lambda: medusa_files(has_heads=False),
    "windows": lambda: LAYOUTS["windows"].files,
    "dflash": lambda: dflash().files,
    "dspark": lambda: dspark().files,
}
"""Files of each kind beside a target of type llama; ``mtp`` layers are of the target's own files."""
TREES = {"chain": None, "likeliest": TreeBudget(12), "shape": TreeBudget.of_widths((3, 2, 2))}
BLOCKS = {"block_size": 16, "prefix_cache": False}
STORES: dict[str, Any] = {"whole": {}, "paged": BLOCKS, "gathered": {**BLOCKS, "attention": "gather"}}
Files = tuple[Path, Path]
"""A target, and the drafter as ``target.drafter`` names it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """Each kind's files are written once."""
    root = tmp_path_factory.mktemp("files")

    @functools.cache
    def llama() -> Path:
        return write_checkpoint(root / "llama", "llama", num_hidden_layers=3)

    @functools.cache
    def written(kind: str) -> Files:
        if kind in FAMILIES:
            return write_target(root / kind, kind).path, Path("mtp")
        return llama(), write(root / kind, *DRAFTERS[kind]())

    return written


@functools.cache
def alone(target: Path, name: str) -> list[int]:
    return generate(make_target(target, None), Session("alone", list(PROMPT), SAMPLINGS[name]), NUM_OUTPUT, 0)


@pairs(
    # The library's own forward attends in its own way.
    lambda kind, store, **_: kind not in ("DeepSeek", "GLM") or "attention" not in store,
    kind=(*(kind for kind in DRAFTERS if kind != "medusa, no heads"), *FAMILIES),
    name=tuple(SAMPLINGS),
    tree=TREES,
    store=STORES,
    k=(1, 3, 4),
)
def test_output_is_the_targets_alone(
    files: Callable[[str], Files], kind: str, name: str, tree: TreeBudget | None, store: Any, k: int
) -> None:
    target, drafter = files(kind)
    engine, session = make_target(target, drafter, **store), Session("a", list(PROMPT), SAMPLINGS[name])
    assert generate(engine, session, NUM_OUTPUT, k, next_tree=tree) == alone(target, name)
    if name != "greedy" and kind in DRAFTERS:
        assert sum(session.accepted) >= 2, "noise that is shared makes both draw alike"
    engine.release(["a"])
    assert store == {} or engine.info.num_blocks_in_use == 0


@pairs(
    lambda overlap, kind, **_: overlap == "serial" or kind in ("eagle", "MiMo"),
    kind=("eagle", "medusa, no heads", "dflash", "dspark", "MiMo"),
    overlap=("serial", "ahead", "enumerate", "auto"),
    is_greedy=(True, False),
    dies_after=(None, 8, 30),
)
def test_output_is_the_targets_alone_with_the_drafter_in_another_process(
    files: Callable[[str], Files], kind: str, overlap: str, is_greedy: bool, dies_after: int | None
) -> None:
    """Requests of three lengths share the steps; a draft that dies comes back without what it was given."""
    target, drafter = files(kind)
    outputs = written_alone(target)
    options = {"is_greedy": is_greedy, "dies_after": dies_after, "overlap": overlap}
    _, draft, accepted = serve(make_pair(target, drafter), outputs, together=True, **options)
    assert len([item for item in draft.items if item.num_speculative_tokens]) >= 12
    assert is_greedy or accepted >= 2
    # Auto takes turns where that is measured to be as fast.
    assert overlap in ("serial", "auto") or any(item.fanout for item in draft.items)
