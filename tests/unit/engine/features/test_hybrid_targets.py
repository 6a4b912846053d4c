"""Drafters beside targets with recurrent layers and experts: features of accepted rows are valid at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, TreeBudget
from specray.types import SamplingParams
from tests.unit.engine.features import reference
from tests.unit.engine.features.block import reference as block_reference
from tests.unit.engine.features.block.checkpoints import LAYOUTS
from tests.unit.engine.features.checkpoints import eagle3_weights, official, write
from tests.unit.engine.features.mtp.checkpoints import HYBRIDS, write_target
from tests.unit.engine.features.reference import Flags
from tests.unit.engine.features.targets import LONG, PROMPT, Session, generate, make_target, step, watch
from tests.unit.engine.features.test_target_drafting import Kind
from tests.unit.engine.model.checkpoints import reference_model, write_family
from tests.unit.engine.model.zoo import FAMILIES, Family

WEIGHTS = eagle3_weights()
K = 3
OWN = {"num_hidden_layers": 3}
HYBRID = {**OWN, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
TARGETS = {"qwen3_5_moe": HYBRID, "qwen3_next": HYBRID, "glm4_moe": OWN}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = FAMILIES[request.param]
    values = {**own.values, **TARGETS[request.param]}
    return write_family(tmp_path_factory.mktemp("target"), Family(own.model_type, values))


@pytest.fixture(scope="module", params=["eagle", "block"])
def kind(request: Any, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    model, directory = reference_model(target), tmp_path_factory.mktemp("drafter")
    if request.param == "eagle":
        path = write(directory, *official(WEIGHTS))
        return Kind(path, lambda known: reference.eagle3(model, WEIGHTS, Flags(), known[:-1], known[-1], K))
    block = LAYOUTS["windows"]
    path = write(directory, *block.files)
    return Kind(path, lambda known: block_reference.drafted(model, block, known, K)[:2])


def test_drafts_behind_partly_accepted_rounds_are_those_of_a_fresh_start(target: Path, kind: Kind) -> None:
    alone = generate(make_target(target, None), Session("alone", list(PROMPT)), 30, 0)
    engine, session, draft = make_target(target, kind.path), Session("a", list(PROMPT)), NO_DRAFT
    watched = watch(engine)
    for right in (1, 2, 0, 3, 1, 0, 2):
        [verdict] = step(engine, [session], [draft], K)
        kind.check(watched, session, verdict)
        done = len(session.token_ids) - len(PROMPT)
        draft = DraftTokens((*alone[done : done + right], *verdict.draft.token_ids[right:])[:K])
    assert session.token_ids[len(PROMPT) :] == alone[: len(session.token_ids) - len(PROMPT)]
    assert {0, 1, 2, 3} == set(session.accepted)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("num_tokens", [K, 12])
def test_outputs_with_mtp_are_those_without(tmp_path: Path, family: str, num_tokens: int) -> None:
    """Chains longer than the records, too, of a prompt in chunks, greedy and seeded."""
    path = write_target(tmp_path, family).path
    plain = make_target(path, None)
    drafting = make_target(path, "mtp", max_num_batched_tokens=64, max_model_len=128)
    for number, sampling in enumerate((SamplingParams(temperature=0.0), SamplingParams(seed=3))):
        sessions = [Session(f"{number}", list(LONG[:50]), sampling) for _ in range(2)]
        expected = generate(plain, sessions[0], 24, 0)
        assert generate(drafting, sessions[1], 24, num_tokens) == expected
        assert len(sessions[1].accepted) <= 24


def test_of_trees_that_a_drafter_grows_first_chains_are_verified(tmp_path: Path) -> None:
    """Whose nodes need not be the first ones. Shared noise makes drafter and target draw alike."""
    path, sampling = write_target(tmp_path, HYBRIDS[0]).path, SamplingParams(temperature=30.0, seed=11)
    paths: set[tuple[int, ...]] = set()
    expected = generate(make_target(path, None), Session("alone", list(PROMPT), sampling), 24, 0)
    engine, session, draft = make_target(path, "mtp"), Session("a", list(PROMPT), sampling), NO_DRAFT
    while len(session.token_ids) < len(PROMPT) + 24:
        [verdict] = step(engine, [session], [draft], K, next_tree=TreeBudget.of_widths((3, 2, 2)))
        assert verdict.last_accepted_node is None
        paths.add(draft.first_path[: verdict.num_accepted_tokens])
        draft = verdict.draft
    assert session.token_ids[len(PROMPT) :][:24] == expected
    assert max(session.accepted) == K and any(path != tuple(range(len(path))) for path in paths)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prefix_that_was_found_brings_the_features_of_its_tokens(tmp_path: Path, family: str) -> None:
    """Drafts, and so accepted tokens, are those of a cold cache."""
    path, prompt = write_target(tmp_path, family).path, [(7 * i * i + i) % 90 + 2 for i in range(90)]
    sizes = {"max_num_batched_tokens": 128, "max_model_len": 128}
    said = []
    for names in (("a",), ("b", "c")):
        engine = make_target(path, "mtp", **sizes)
        for name in names:
            session = Session(name, list(prompt), SamplingParams(temperature=0.0, num_prompt_tokens=90))
            output = generate(engine, session, 20, K)
            engine.release([name])
        said.append((output, session.accepted))
    assert said[0] == said[1]
    assert engine.info.num_prefix_cache_hits >= 64
