"""Tests of the plan of several models: what is loaded together, what leaves for what, and what never fits."""

from __future__ import annotations

from typing import Any

from specray.config import parse_config
from specray.loading.table import Room
from specray.planning.models import plan_models

GIB = 2.0**30


def model(name: str, gib: float, **options: Any) -> dict[str, Any]:
    return {"name": name, "memory_gib": gib, **options}


def test_each_model_is_asked_for_once_and_the_least_urgent_leaves_first() -> None:
    config = parse_config(
        {
            "models": [
                model("demanded", 3, load="demand"),
                model("pinned", 2, pinned=True),
                model("last", 2, priority=1),
                model("first", 1),
                model("large", 9, load="demand"),
            ]
        }
    )
    plan = plan_models(config, memory_bytes=6 * GIB)
    assert [(each.model.name, each.is_at_start, each.leaving) for each in plan.loads] == [
        ("pinned", True, ()),
        ("first", True, ()),
        ("last", True, ()),
        ("demanded", False, ("last",)),
        ("large", False, ()),
    ]
    assert plan.loads[-1].problem == "it needs 9.00 GiB; allowed for all models: 6.00 GiB"
    assert (plan.total, plan.fits) == (Room(17 * GIB), False)


def test_what_is_pinned_leaves_for_nobody_and_that_is_said() -> None:
    config = parse_config({"models": [model("a", 2, pinned=True), model("b", 2)]})
    (first, second) = plan_models(config, memory_bytes=3 * GIB).loads
    assert first.problem == ""
    assert second.problem == "nothing may leave for it: all that is loaded is pinned"


def test_without_a_number_there_are_as_many_gpus_as_the_models_need() -> None:
    target = {"device": "cuda", "tensor_parallel_size": 2}
    config = parse_config({"models": [{"name": name, "target": target} for name in "ab"]})
    assert plan_models(config, memory_bytes=99 * GIB).fits
    plan = plan_models(config, memory_bytes=99 * GIB, num_gpus=3)
    assert (plan.total.gpus, plan.fits, plan.loads[1].leaving) == (4, False, ("a",))
