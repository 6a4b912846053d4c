"""Outcomes from features: branches are what the drafter draws where it goes on from its own output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import TreeBudget
from specray.engine.build import build_draft_engine
from specray.engine.features.remote.engine import FeatureDraftEngine
from specray.errors import ConfigError
from specray.types import Branch, Outcomes, SamplingParams, SpeculateItem
from tests.unit.engine.features.block.checkpoints import dflash
from tests.unit.engine.features.checkpoints import masked_weights, medusa_files, official, write
from tests.unit.engine.features.remote.pairs import RemoteSession, make_pair, pair_config
from tests.unit.engine.features.targets import GREEDY, PROMPT, watch

K = 3
SAMPLINGS = {"greedy": GREEDY, "coupled": SamplingParams(temperature=30.0, seed=11)}


@pytest.fixture(
    scope="module", params=[{}, {"block_size": 16, "attention": "gather"}], ids=["whole", "paged"]
)
def pair(llama: Path, eagle: Path, request: Any) -> Any:
    return make_pair(llama, eagle, **request.param)


def ask(draft: FeatureDraftEngine, *asked: tuple[RemoteSession, tuple[int, ...], tuple[int, ...]]) -> Any:
    """Branches by outcome, for each session with its proposed tokens and its fan-out."""
    items = [
        SpeculateItem(each.request_id, 0, each.told, (), K, proposed, fanout)
        for each, proposed, fanout in asked
    ]
    replies = draft.speculate(items).replies
    draft.check_integrity()
    found = []
    for reply in replies:
        assert isinstance(reply, Outcomes), reply
        found.append({(each.num_accepted_tokens, each.next_token_id): each for each in reply.branches})
    return found


@pytest.mark.parametrize("name", SAMPLINGS)
def test_branches_go_on_as_chains_and_trees_do(pair: Any, name: str) -> None:
    target, draft = pair
    first, second = RemoteSession("a", list(PROMPT), SAMPLINGS[name]), RemoteSession("b", PROMPT[:4])
    for session in (first, second):
        session.verify(target)
    watched = watch(draft)
    chain = first.propose(draft, 2 * K + 1).token_ids
    expected = watched.logits[K + 1 :]
    tree = first.propose(draft, K + 1, tree=TreeBudget.of_widths((2, 1, 1, 1)))
    other = second.propose(draft, 2 * K + 1).token_ids
    watched.logits.clear()
    [mine, theirs] = ask(draft, (first, chain[:K], (1, 0, 0, 1)), (second, other[:1], (0, 2)))
    # All accepted, and then what the chain has next.
    assert tree.parents is not None
    second_best = [node for node, parent in enumerate(tree.parents) if parent == -1][1]
    instead = tree.token_ids[second_best]
    assert set(mine) == {(0, instead), (K, chain[K])}
    assert mine[K, chain[K]].draft.token_ids == chain[K + 1 :]
    # Its rows are the first ones. Tokens may be the same by chance; what they are drawn from is not.
    for own, other_rows in zip(watched.logits, expected, strict=True):
        assert float((own[0] - other_rows[0]).abs().max()) < 1e-4 * float(other_rows.abs().max())
    # None accepted, and the second best in its place: the other branch of the tree.
    deepest = max(range(len(tree)), key=lambda node: len(tree.path(node)) * (second_best in tree.path(node)))
    beside = tuple(tree.token_ids[node] for node in tree.path(deepest))
    assert (instead, *mine[0, instead].draft.token_ids) == beside and len(beside) == K + 1
    branch = theirs[1, other[1]]
    assert isinstance(branch, Branch) and branch.draft.token_ids == other[2 : 2 + K] and len(theirs) == 2
    # What was read for it changes nothing of what is drafted from features.
    assert first.propose(draft, 2 * K + 1).token_ids == chain
    for engine in pair:
        engine.release(["a", "b"])
    assert draft.info.num_blocks_in_use == 0


def test_without_features_there_is_no_branch(pair: Any) -> None:
    target, draft = pair
    session = RemoteSession("none", list(PROMPT))
    session.verify(target)
    session.propose(draft, K, loses_features=True)
    assert ask(draft, (session, (7, 8), (1, 1, 1))) == [{}]
    for engine in pair:
        engine.release(["none"])


@pytest.mark.parametrize("kind", ["P-EAGLE", "Medusa", "DFlash or DSpark"])
def test_a_drafter_of_one_pass_has_no_outcomes(llama: Path, tmp_path: Path, kind: str) -> None:
    written: dict[str, tuple[Any, ...]] = {
        "P-EAGLE": official(masked_weights(), mask_token_id=17),
        "Medusa": medusa_files(),
        "DFlash or DSpark": dflash().files,
    }
    drafter = write(tmp_path, *written[kind])
    config = pair_config(llama, drafter)
    speculation = config.speculation.model_copy(update={"overlap": "enumerate"})
    said = rf"is a {kind} drafter and speculation\.overlap is enumerate; allowed: auto, serial"
    with pytest.raises(ConfigError, match=said):
        build_draft_engine(config.model_copy(update={"speculation": speculation}))
    target, draft = make_pair(llama, drafter)
    assert draft.info.lacks_outcomes
    session = RemoteSession("a", list(PROMPT))
    session.verify(target)
    assert len(session.propose(draft, K)) == K
    assert ask(draft, (session, (7, 8), (1, 1, 1))) == [{}]
