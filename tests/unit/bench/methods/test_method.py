"""Methods by name, and the figures of ``specray bench methods``."""

from __future__ import annotations

import asyncio

import pytest

from specray.bench.core.figures import Tally
from specray.bench.methods.along import walk_along
from specray.bench.methods.drafts import drafts_of, methods_of
from specray.bench.methods.method import ALL, Method, MethodRow
from specray.bench.methods.report import methods_chart, methods_tables
from specray.bench.plans import METHODS, MethodsPlan
from specray.config import parse_config
from specray.errors import ConfigError
from specray.requests import SpeculationStats
from specray.types import DraftKind


def test_name_says_what_drafts_and_its_tree() -> None:
    assert Method.parse("plain") == Method("plain", None, "off")
    assert Method.parse("ngram") == Method("ngram", DraftKind.NGRAM, "off")
    assert Method.parse("model:4x2x1") == Method("model:4x2x1", DraftKind.MODEL, "4x2x1")
    assert [Method.parse(name).name for name in METHODS] == list(METHODS)
    assert Method.parse("lookahead") == Method("lookahead", DraftKind.LOOKAHEAD)
    assert Method.parse("features:4x2x1") == Method("features:4x2x1", DraftKind.FEATURES, "4x2x1")
    in_target = [kind for kind in DraftKind if Method.parse(kind.value).is_in_target]
    assert in_target == [DraftKind.LOOKAHEAD, DraftKind.FEATURES]
    assert Method.parse("pard") == Method("pard", DraftKind.MODEL, process="pard")
    for name in ("eagle", "plain:4", "cascade:16", "pard:4x2", "lookahead:8", ""):
        with pytest.raises(ConfigError, match=f"--method is '{name}'; allowed: plain, model, ngram, suffix"):
            Method.parse(name)


def test_router_of_a_method_has_its_tree_and_nothing_beside() -> None:
    config = parse_config({"speculation": {"fallback": "suffix", "num_speculative_tokens": 5}})
    own = Method.parse("model:16").config(config).speculation
    assert (own.tree, own.fallback, own.num_speculative_tokens) == ("16", "none", 5)
    assert Method.parse("model").config(config).speculation.tree == "off"
    with pytest.raises(ConfigError, match="tree is 8x8"):
        Method.parse("model:8x8").config(config)


def test_plain_decoding_is_always_measured() -> None:
    model, plain = Method.parse("model"), Method.parse("plain")
    assert methods_of(MethodsPlan(method=["model"]), None, None) == [plain, model]
    assert methods_of(MethodsPlan(method=["model", "plain"]), None, None) == [model, plain]
    names = [method.name for method in methods_of(MethodsPlan(), "pard", "drafter")]
    assert names == [*METHODS, "pard", "features", "features:16"]


def test_methods_with_a_draft_of_their_own_have_a_process_of_their_own() -> None:
    config = parse_config(
        {"draft": {"model": "some/model", "draft": "some/smaller", "vocabulary_ids": "ids"}}
    )
    methods = [Method.parse(name) for name in ("plain", "model", "cascade", "pard", "lookahead")]
    own, others = drafts_of(config, methods, "some/masked")
    assert own.draft.draft is None and own.draft.model == "some/model" and own.draft.vocabulary_ids
    assert sorted(others) == ["cascade", "pard"]
    assert (others["cascade"].draft.model, others["cascade"].draft.draft) == ("some/model", "some/smaller")
    masked = others["pard"].draft
    assert (masked.model, masked.draft, masked.vocabulary_ids) == ("some/masked", None, None)
    plain = parse_config({"draft": {"model": "some/model"}})
    assert drafts_of(plain, methods[2:3], None)[1]["cascade"].draft.draft == "ngram"
    assert drafts_of(plain, methods[:2], None) == (plain, {})
    with pytest.raises(ConfigError, match=r"--method is 'pard'; allowed with .* --pard"):
        drafts_of(plain, methods, None)
    without = parse_config({"draft": {"model": "ngram"}})
    with pytest.raises(ConfigError, match="--method is 'cascade'; allowed with a draft model: --draft"):
        drafts_of(without, methods[2:3], None)
    assert drafts_of(without, methods[3:4], "some/masked")[1]["pard"].draft.has_model


async def no_draft_along(method: str) -> None:
    await walk_along(None, Method.parse(method), [], 4)


def test_what_drafts_in_the_target_cannot_be_led_along_an_output() -> None:
    with pytest.raises(ConfigError, match="--method is 'lookahead', which drafts in the target's steps"):
        asyncio.run(no_draft_along("lookahead"))


def tally_of(*, seconds: tuple[float, ...], histogram: tuple[int, ...] = ()) -> Tally:
    """Ten output tokens a turn, in the given seconds."""
    tally = Tally()
    for turn in seconds:
        tally.begin_turn()
        accepted = sum(count * number for number, count in enumerate(histogram))
        stats = SpeculationStats(sum(histogram), 4 * sum(histogram), accepted, histogram)
        tally.add(stats, num_tokens=10, seconds=turn, draft_s=0.04, is_equal=True)
    return tally


def test_figures_are_medians_of_turns_and_sums_over_outputs() -> None:
    plain = tally_of(seconds=(1.0, 2.0, 4.0))
    tally = tally_of(seconds=(1.0, 1.0, 1.0), histogram=(1, 1, 0, 1))
    row = MethodRow.of(0.0, ALL, "model", tally, plain)
    assert (row.tokens_per_s, row.speedup) == (10.0, 2.0)
    # Ten tokens, four of them accepted, in six steps; three steps had draft tokens.
    assert row.tokens_per_round == 10 / 6
    assert row.acceptance_length == pytest.approx(1 + 4 / 3)
    assert row.nodes_per_step == 4.0
    assert row.draft_ms == pytest.approx(40 / 6)
    assert (row.num_equal, row.num_outputs) == (3, 3)
    base = MethodRow.of(0.0, ALL, "plain", plain, plain)
    assert (base.speedup, base.acceptance_length, base.nodes_per_step, base.tokens_per_round) == (
        1.0,
        None,
        None,
        1.0,
    )


def test_acceptance_by_depth_is_of_the_steps_that_came_so_far() -> None:
    # Ten steps: four accepted none, three one, three two.
    for histogram, rates in (([4, 3, 3], (0.6, 0.5)), ([0, 0, 5], (1.0, 1.0)), ([5, 0, 0], (0.0,)), ([], ())):
        assert Tally(histogram=histogram).by_depth == rates


def test_report_has_a_table_per_temperature_and_one_by_category() -> None:
    plain, tally = tally_of(seconds=(1.0,)), tally_of(seconds=(0.5,), histogram=(1, 1, 0, 1))
    rows = [
        MethodRow.of(temperature, category, name, one, plain)
        for temperature in (0.0, 1.0)
        for category in (ALL, "math")
        for name, one in (("plain", plain), ("model:16", tally))
    ]
    tables = methods_tables(rows)
    assert [table.title for table in tables] == [
        f"temperature {temperature}{rest}"
        for temperature in (0, 1)
        for rest in (", all prompts", ": tokens per round, speedup")
    ]
    assert [list(column.cells) for column in tables[1].columns] == [
        [ALL, "math"],
        ["1.00  1.00"] * 2,
        ["1.67  2.00"] * 2,
    ]
    chart = methods_chart(rows)
    assert chart.startswith("<svg ") and "model:16" in chart and ">plain<" not in chart
