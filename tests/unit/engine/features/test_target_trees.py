"""Trees of the target's drafter: every node sees its own path alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.engine.features.base import Context, Continued
from specray.engine.features.eagle.drafter import EagleDrafter
from specray.engine.features.tap import FeatureTap
from specray.engine.visibility import Visibility
from specray.errors import ConfigError
from specray.types import SamplingParams, Verdict, Verification
from tests.unit.engine.features import reference
from tests.unit.engine.features.checkpoints import (
    DRAFT_IDS,
    eagle3_weights,
    medusa_files,
    medusa_weights,
    write,
)
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import PROMPT, Session, generate, make_target, step
from tests.unit.engine.model.checkpoints import reference_model

WEIGHTS = eagle3_weights()
WIDE = TreeBudget.of_widths((3, 2, 2))
PAGED = {"attention": "gather", "block_size": 16}


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("medusa"), *medusa_files())


def children(draft: DraftTokens, node: int) -> list[int]:
    """Tokens of a node's children, in their order."""
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    return [token for token, parent in zip(draft.token_ids, parents, strict=True) if parent == node]


def check_tree(llama: Path, token_ids: list[int], draft: DraftTokens, widths: tuple[int, ...]) -> None:
    """Each node's children are the best of what the reference says behind its own path."""
    model, depths = reference_model(llama), (-1, *draft.depths)
    for node in range(-1, len(draft)):
        depth = depths[node + 1] + 1
        if depth == len(widths):
            continue
        path = [draft.token_ids[index] for index in draft.path(node)]
        logits = reference.eagle3(
            model, WEIGHTS, Flags(), token_ids[:-1], token_ids[-1], depth + 1, path=path
        )[0][-1]
        best = [DRAFT_IDS[int(place)] for place in logits.topk(widths[depth]).indices]
        assert sorted(children(draft, node)) == sorted(best), (node, path)


@pytest.mark.parametrize("changes", [{}, PAGED], ids=["whole", "paged"])
def test_every_node_sees_the_text_and_its_own_path(llama: Path, eagle: Path, changes: Any) -> None:
    target = make_target(llama, eagle, **changes)
    sessions = [Session("a", list(PROMPT)), Session("b", PROMPT[:4])]
    drafts = [NO_DRAFT, NO_DRAFT]
    for _ in range(2):
        verdicts = step(target, sessions, drafts, 3, next_tree=WIDE)
        drafts = [verdict.draft for verdict in verdicts]
        for session, draft in zip(sessions, drafts, strict=True):
            assert len(draft) == WIDE.num_nodes
            check_tree(llama, session.token_ids, draft, WIDE.widths)


def test_a_node_that_sees_its_siblings_is_noticed(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = EagleDrafter.advance

    def blind(drafter: EagleDrafter, continued: Any) -> Any:
        seen = [
            replace(each, visibility=[row._replace(ancestors=row.ancestors | 1) for row in each.visibility])
            for each in continued
        ]
        return advance(drafter, seen)

    monkeypatch.setattr(EagleDrafter, "advance", blind)
    target, session = make_target(llama, eagle), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], 3, next_tree=WIDE)
    with pytest.raises(AssertionError):
        check_tree(llama, session.token_ids, verdict.draft, WIDE.widths)


def test_features_that_do_not_follow_the_accepted_path_are_noticed(
    llama: Path, eagle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = generate(make_target(llama, None), Session("alone", list(PROMPT)), 8, 0)
    tree = DraftTokens((90, 91, alone[1], 92, alone[2]), (-1, 0, -1, 2, 2))
    for is_broken in (False, True):
        target, session = make_target(llama, eagle), Session("a", list(PROMPT))
        step(target, [session], [NO_DRAFT], 0)
        if is_broken:
            monkeypatch.setattr(FeatureTap, "move_tokens", lambda tap, *args: tap._runner.move_tokens(*args))
        [verdict] = step(target, [session], [tree], 3, next_tree=WIDE)
        assert session.token_ids[len(PROMPT) :] == alone[:4]
        if is_broken:
            with pytest.raises(AssertionError):
                check_tree(llama, session.token_ids, verdict.draft, WIDE.widths)
        else:
            check_tree(llama, session.token_ids, verdict.draft, WIDE.widths)


def test_a_tree_of_a_number_has_the_likeliest_nodes_and_a_depth(llama: Path, eagle: Path) -> None:
    target, session = make_target(llama, eagle), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], 4, next_tree=TreeBudget(9))
    draft = verdict.draft
    assert len(draft) == 9 and not draft.is_chain and draft.depth <= 4
    first, best = draft.first_chain().token_ids, session.token_ids
    chain = reference.eagle3(reference_model(llama), WEIGHTS, Flags(), best[:-1], best[-1], len(first))[1]
    assert list(first) == chain, "the first child is what a chain would have"
    assert target.info.num_blocks_in_use <= 1


@pytest.mark.parametrize(
    ("ancestors", "is_chain"), [(0b1, True), (0b111, True), (0b11000, False), (0b101, False)]
)
def test_a_node_alone_at_its_depth_is_a_chain_only_if_nothing_lies_between(
    ancestors: int, is_chain: bool
) -> None:
    """Besides the first chain a node lies further back, and must not see what lies before it."""
    context = Context([1] * 11, range(4), 10)
    continued = Continued(context, (5,), (0,), (Visibility(11, 11, ancestors),))
    assert continued.is_chain == is_chain


@pytest.mark.parametrize("num_nodes", [3, 7])
@pytest.mark.parametrize("start", [1, 6])
def test_every_node_of_a_tree_of_a_number_sees_its_own_path(
    llama: Path, eagle: Path, num_nodes: int, start: int
) -> None:
    target, model = make_target(llama, eagle), reference_model(llama)
    session, draft = Session("a", [start + 2, *PROMPT]), NO_DRAFT
    for _ in range(6):
        [verdict] = step(target, [session], [draft], 5, next_tree=TreeBudget(num_nodes))
        draft = verdict.draft
        for node in range(-1, len(draft)):
            own = children(draft, node)
            if not own:
                continue
            path = [draft.token_ids[index] for index in draft.path(node)]
            tokens = session.token_ids
            logits = reference.eagle3(
                model, WEIGHTS, Flags(), tokens[:-1], tokens[-1], len(path) + 1, path=path
            )[0][-1]
            best = [DRAFT_IDS[int(place)] for place in logits.topk(len(own)).indices]
            assert sorted(own) == sorted(best), (node, path)


def test_chains_and_trees_of_any_length_are_drafted_side_by_side(llama: Path, eagle: Path) -> None:
    target, model = make_target(llama, eagle, max_num_seqs=6), reference_model(llama)
    sizes = {"tree": 9, "one": 5, "four": 7, "other": 6, "two": 4}
    sessions = {name: Session(name, PROMPT[:size]) for name, size in sizes.items()}
    other = TreeBudget.of_widths((2, 1))
    for _ in range(2):
        items = [
            sessions["tree"].item(num_next=3, next_tree=WIDE),
            sessions["one"].item(num_next=1),
            sessions["four"].item(num_next=4),
            sessions["other"].item(num_next=2, next_tree=other),
            sessions["two"].item(num_next=2),
        ]
        drafts = {}
        for name, verdict in zip(sizes, target.verify(items).replies, strict=True):
            assert isinstance(verdict, Verdict)
            sessions[name].take(NO_DRAFT, verdict)
            drafts[name] = verdict.draft
        target.check_integrity()
        check_tree(llama, sessions["tree"].token_ids, drafts["tree"], WIDE.widths)
        check_tree(llama, sessions["other"].token_ids, drafts["other"], other.widths)
        for name, count in (("one", 1), ("four", 4), ("two", 2)):
            known = sessions[name].token_ids
            wanted = reference.eagle3(model, WEIGHTS, Flags(), known[:-1], known[-1], count)[1]
            assert list(drafts[name].token_ids) == wanted


def test_medusas_heads_are_those_of_the_depth_for_every_node(llama: Path, medusa: Path) -> None:
    target = make_target(llama, medusa)
    sessions = [Session("a", list(PROMPT)), Session("b", PROMPT[:4])]
    verdicts = step(target, sessions, [NO_DRAFT] * 2, 3, next_tree=WIDE)
    for session, verdict in zip(sessions, verdicts, strict=True):
        token_ids, draft = session.token_ids, verdict.draft
        heads = reference.medusa(reference_model(llama), medusa_weights(), token_ids[:-1], token_ids[-1], 3)[
            0
        ]
        depths = (-1, *draft.depths)
        for node in range(-1, len(draft)):
            depth = depths[node + 1] + 1
            if depth < 3:
                best = heads[depth].topk(WIDE.widths[depth]).indices.tolist()
                assert sorted(children(draft, node)) == sorted(best)


def test_ranks_that_training_measured_choose_medusas_nodes(llama: Path, tmp_path: Path) -> None:
    rates = [[0.5, 0.3, 0.05], [0.4, 0.35], [0.9, 0.01]]
    drafter = write(tmp_path, *medusa_files(medusa_rank_acceptance=rates))
    target, session = make_target(llama, drafter), Session("a", list(PROMPT))
    [verdict] = step(target, [session], [NO_DRAFT], 3, next_tree=TreeBudget(7))
    token_ids, draft = session.token_ids, verdict.draft
    heads = reference.medusa(reference_model(llama), medusa_weights(), token_ids[:-1], token_ids[-1], 3)[0]
    paths = {
        ranks: math.prod(rates[depth][rank] for depth, rank in enumerate(ranks))
        for length in (1, 2, 3)
        for ranks in product(*(range(len(rates[depth])) for depth in range(length)))
    }
    best = sorted(paths, key=lambda ranks: -paths[ranks])[:7]
    wanted = {
        tuple(int(heads[depth].topk(4).indices[rank]) for depth, rank in enumerate(ranks)) for ranks in best
    }
    found = {tuple(draft.token_ids[index] for index in draft.path(node)) for node in range(len(draft))}
    assert found == wanted and (1, 0) in best


@pytest.mark.parametrize("rates", [[[0.5]], [[0.5], [0.2], [0.0]], [[0.5], [], [0.1]], "many"])
def test_ranks_that_are_no_chances_are_refused_by_name(llama: Path, tmp_path: Path, rates: Any) -> None:
    drafter = write(tmp_path, *medusa_files(medusa_rank_acceptance=rates))
    with pytest.raises(ConfigError, match=r"medusa_rank_acceptance is .* for each of 3 heads"):
        make_target(llama, drafter)


def test_rejection_gets_a_chain(llama: Path, eagle: Path) -> None:
    sampling = SamplingParams(temperature=9.0, seed=3, verification=Verification.REJECTION)
    target, session = make_target(llama, eagle), Session("a", list(PROMPT), sampling)
    [verdict] = step(target, [session], [NO_DRAFT], 3, next_tree=WIDE, next_min_acceptance=0.9)
    assert verdict.draft.is_chain and len(verdict.draft) == len(verdict.draft.probs) == 3


def test_a_chain_ends_where_its_chance_is_below_the_bound(llama: Path, eagle: Path) -> None:
    sampling = SamplingParams(temperature=30.0, seed=11)

    def drafts(**wanted: Any) -> tuple[int, ...]:
        target, session = make_target(llama, eagle), Session("a", list(PROMPT), sampling)
        [verdict] = step(target, [session], [NO_DRAFT], 6, **wanted)
        return tuple(verdict.draft.token_ids)

    whole = drafts()
    lengths = [len(drafts(next_min_acceptance=bound)) for bound in (1e-9, 0.2, 0.99)]
    assert len(whole) == 6 and lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 1, "the first token is always there"
    for bound, length in zip((1e-9, 0.2), lengths, strict=False):
        assert drafts(next_min_acceptance=bound) == whole[:length]
