"""Tests of profiles as files: what is refused, and how; and the times that engines get from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specray.draft_tokens import DraftTokens
from specray.errors import ConfigError
from specray.planning.curves import Surface, interpolate
from specray.planning.profile import LinearTime, Profile, load_profile, save_profile
from specray.planning.simulation.times import SimulatedDraftTimes, SimulatedTargetTimes, StepSize
from specray.types import Outcomes, Proposal, SpeculateItem
from tests.unit.planning.parts import VERIFY_S, acceptance, draft, output, target

CURVE = [(1.0, 10.0), (3.0, 14.0), (7.0, 16.0)]


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 10), (1, 10), (2, 12), (3, 14), (5, 15), (7, 16), (9, 17), (27, 26)]
)
def test_curve_is_flat_below_linear_between_and_grows_on_behind(size: float, seconds: float) -> None:
    assert interpolate(CURVE, size) == pytest.approx(seconds)


def test_curve_that_falls_at_its_end_stays_there() -> None:
    assert interpolate([(1.0, 10.0), (2.0, 9.0)], 50) == 9.0


def test_surface_interpolates_in_both_sizes() -> None:
    surface = Surface([(1, 1, 10.0), (1, 3, 20.0), (5, 1, 30.0)])
    assert surface(1, 2) == 15.0
    assert surface(3, 1) == 20.0
    assert surface(3, 3) == 25.0
    assert surface(9, 1) == 50.0


def test_target_step_by_rows_sequences_and_context() -> None:
    times = SimulatedTargetTimes(
        target(
            verify=[{"num_rows": 1, "seconds": 0.010}, {"num_rows": 11, "seconds": 0.020}],
            per_sequence_s=0.001,
            context=[{"num_tokens": 100, "seconds": 0}, {"num_tokens": 600, "seconds": 0.005}],
        )
    )

    def seconds(num_sequences: int, num_rows: int, num_context_tokens: int) -> float:
        return times.seconds(StepSize([], num_sequences, num_rows, num_context_tokens))

    assert seconds(2, 6, 200) == pytest.approx(0.015 + 0.002)
    assert seconds(2, 6, 1200) == pytest.approx(0.017 + 0.010)
    assert seconds(1, 1, 0) == pytest.approx(0.010 + 0.001)


PROMPTS = [{"num_tokens": 100, "seconds": 0.05}, {"num_tokens": 500, "seconds": 0.45}]


def test_later_chunk_of_a_prompt_takes_what_the_longer_prompt_takes_more() -> None:
    times = SimulatedTargetTimes(target(prefill=PROMPTS))
    assert times.seconds(StepSize([(0, 500)])) == pytest.approx(0.45)
    assert times.seconds(StepSize([(500, 100)])) == pytest.approx(VERIFY_S + 0.10)


def test_parts_of_a_step_read_the_weights_once() -> None:
    times = SimulatedTargetTimes(target(prefill=PROMPTS))
    assert times.seconds(StepSize([(0, 100), (0, 300)])) == pytest.approx(0.05 + 0.25 - VERIFY_S)
    assert times.seconds(StepSize([(0, 100)], 1, 1, 0)) == pytest.approx(0.05)
    assert times.seconds(StepSize()) == 0.0


def test_what_a_round_brings_is_no_prompt() -> None:
    size = StepSize()
    size.add(0, 3, 0)
    size.add(40, 200, 2)
    size.add(90, 1, 3)
    size.add(80, 2, 0)
    assert size == StepSize([(0, 3), (40, 202)], 2, 6, 170, has_drafts=True)


def item(request_id: str, k: int, base_len: int = 100, **more: Any) -> SpeculateItem:
    return SpeculateItem(request_id, 1, base_len, (1,), k, **more)


def whole(request_id: str, k: int) -> tuple[SpeculateItem, Proposal]:
    """Returns a question, and a proposal with as many tokens as it asks for."""
    return item(request_id, k), Proposal(request_id, 1, 100, DraftTokens((1,) * k))


def test_draft_step_by_sequences_and_the_longest_proposal() -> None:
    points = [(1, 1, 0.001), (1, 5, 0.005), (9, 1, 0.002), (9, 5, 0.010)]
    propose = [{"num_sequences": n, "num_tokens": k, "seconds": s} for n, k, s in points]
    times = SimulatedDraftTimes(draft(propose=propose), network_s=0.25)
    assert times.step_s([whole("a", 3)]) == pytest.approx(0.003)
    assert times.step_s([whole(str(i), 5) for i in range(9)]) == pytest.approx(0.010)
    assert times.transport == LinearTime(fixed_s=0.25)


def test_outcomes_that_were_not_measured_cost_as_sequences_and_a_ranking() -> None:
    propose = [{"num_sequences": n, "num_tokens": 1, "seconds": 0.001 * n} for n in (1, 10)]
    times = SimulatedDraftTimes(draft(propose=propose))
    asked = item("a", 1, proposed_token_ids=(1,), fanout=(8, 8), max_branches=4)
    assert times.step_s([(asked, Outcomes("a", 1, 100, ()))]) == pytest.approx(0.004 + 0.001)


@pytest.fixture
def values() -> dict[str, Any]:
    measured = acceptance(0.5).model_copy(update={"outputs": (output("101"),)})
    profile = Profile(target=target(), draft=draft(), acceptance=(measured,))
    return profile.model_dump(mode="json")


def loaded(tmp_path: Path, values: Any) -> Profile:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return load_profile(path)


def test_profile_that_is_saved_is_loaded_again(tmp_path: Path, values: dict[str, Any]) -> None:
    profile = Profile.model_validate(values)
    save_profile(profile, tmp_path / "saved.json")
    assert load_profile(tmp_path / "saved.json") == profile


def test_acceptance_is_that_of_the_nearest_temperature() -> None:
    warm = acceptance(0.3).model_copy(update={"temperature": 1.0})
    profile = Profile(target=target(), draft=draft(), acceptance=(acceptance(0.9), warm))
    nearest = profile.acceptance_at(0.6)
    assert nearest is not None and nearest.by_position == (0.3,)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("schema_version",), 1, "schema_version is 1; allowed: 2"),
        (("target", "verify"), [], "target.verify: "),
        (("target", "verify", 0, "seconds"), -1, "seconds: Input should be greater than 0 (got -1)"),
        (("target", "colour"), "red", "target.colour: Extra inputs are not permitted"),
        (("draft", "transport", "fixed_s"), -0.5, "draft.transport.fixed_s: "),
        (("draft", "vocab_size"), 17, "draft.vocab_size is 17, target.vocab_size 16"),
        (("acceptance",), [], "acceptance is empty"),
        (("acceptance", 0, "outputs", 0, "agreements"), "012", "outputs.0.agreements: String should match"),
        (("acceptance", 0, "outputs", 0, "agreements"), "01", "agreements are 2 characters for 3 tokens"),
        (
            ("acceptance", 0, "outputs", 0, "lengths"),
            [{"min_acceptance": 0.5, "by_position": "12"}],
            "lengths at 0.5 are 2 characters for 3 tokens",
        ),
        (("acceptance", 0, "by_position"), [0.5, 1.5], "by_position[1] is 1.5; allowed: 0..1"),
    ],
)
def test_wrong_profile_is_refused_by_field_and_value(
    tmp_path: Path, values: dict[str, Any], where: tuple[Any, ...], value: Any, words: str
) -> None:
    inner: Any = values
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, values)
    assert words in str(error.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("verify: 3")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(tmp_path / "text.json")
    with pytest.raises(ConfigError, match="schema_version is None"):
        loaded(tmp_path, [1, 2])
