"""Several models in one configuration: what each gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specray.cli.settings import changed_config
from specray.config import Config, parse_config
from specray.config.live import LiveConfig, changes, check_live, split
from specray.config.models import slug
from specray.errors import ConfigError
from specray.serving.reload import check_defaults

KEY = {"name": "k", "sha256": "0" * 64}
VALUES: dict[str, Any] = {
    "models": [
        {"name": "a", "aliases": ["x"], "draft": {"pool": "p"}},
        {"name": "b", "target": {"max_num_seqs": 3}, "router": {"max_queued_tokens": 5}},
    ],
    "drafts": [{"name": "p", "num_replicas": 2}],
    "router": {"drain_timeout_s": 3, "max_queued_tokens": 7},
    "default_model": "x",
}


def test_a_model_has_the_configuration_of_a_service_of_it_alone() -> None:
    config = parse_config(VALUES)
    alone = parse_config(
        {
            "served_model_name": "b",
            "target": {"max_num_seqs": 3},
            "router": {"drain_timeout_s": 3, "max_queued_tokens": 5},
        }
    )
    assert config.of_model("b") == alone
    pooled = config.of_model("a")
    assert (pooled.draft.num_replicas, pooled.router.max_queued_tokens) == (2, 7)
    assert parse_config(pooled.model_dump(mode="json")) == pooled
    assert config.of_pool("p").draft == pooled.draft
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "the name 'a' twice"),
        ({"drafts": []}, "draft.pool of 'a' is 'p'; allowed: none, since there are no drafts"),
        ({"target": {"max_num_seqs": 3}}, "target is set together with models"),
        ({"served_model_name": "z"}, "served_model_name is set together with models"),
        ({"models": []}, "drafts is set without models"),
        ({"auth": {"keys": [{**KEY, "models": ["x"]}]}}, "models of 'k' has 'x'; allowed: a, b"),
        (
            {"auth": {"keys": [{**KEY, "model_quotas": {"z": {}}}]}},
            "model_quotas of 'k' has 'z'; allowed: a, b",
        ),
        ({"default_model": "z"}, "default_model is 'z'; allowed: a, x, b"),
        ({"models": [{"name": "a", "draft": {"pool": "p", "num_replicas": 3}}]}, "'p' with num_replicas"),
        ({"models": [{"name": "a b"}]}, "models.0.name"),
        ({"models": [{"name": "a", "draft": {"model": "features"}}]}, "without target.drafter"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**VALUES, **change})


def test_an_error_about_the_whole_file_shows_no_keys() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({**VALUES, "default_model": "z", "auth": {"keys": [{"name": "k", "sha256": "0" * 64}]}})
    assert "000" not in str(refusal.value)


def test_names_of_applications_differ_where_names_differ_in_marks_alone() -> None:
    slugs = [slug(name) for name in ("smollm2", "Smollm2", "org/smollm2", "org.smollm2", "-")]
    assert slugs[0] == "smollm2"
    assert len(set(slugs)) == 5
    assert all(part.replace("-", "").isalnum() for part in slugs)


def with_routers(service: int, of_b: int) -> Config:
    models = [VALUES["models"][0], {**VALUES["models"][1], "router": {"max_queued_tokens": of_b}}]
    return parse_config(
        {**VALUES, "models": models, "router": {**VALUES["router"], "max_queued_tokens": service}}
    )


def test_a_change_of_a_models_own_value_is_told_with_its_name_and_is_live() -> None:
    old, new = with_routers(7, 5), with_routers(7, 6)
    found = changes(old, new)
    assert [str(change) for change in found] == ["models.b.router.max_queued_tokens: 5 -> 6"]
    check_live(found)
    check_defaults(new, found)
    live = LiveConfig(old)
    live.set(split(new)[1])
    assert live.now == new
    alone = LiveConfig(old.of_model("b"))
    alone.set(split(new.of_model("b"))[1])
    assert alone.now == new.of_model("b")


def test_a_change_of_what_a_model_is_loaded_with_is_refused_by_its_name() -> None:
    other = [VALUES["models"][0], {**VALUES["models"][1], "target": {"max_num_seqs": 4}}]
    with pytest.raises(ConfigError, match=r"models\.b\.target\.max_num_seqs: 3 -> 4 \(the target is loaded"):
        check_live(changes(parse_config(VALUES), parse_config({**VALUES, "models": other})))
    with pytest.raises(ConfigError, match=r"models: .*each model is an application"):
        check_live(changes(parse_config(VALUES), parse_config({**VALUES, "models": [*other, {"name": "c"}]})))


def test_a_default_may_change_where_a_model_follows_it_and_alone_it_is_refused() -> None:
    old = with_routers(7, 5)
    check_defaults(with_routers(9, 5), changes(old, with_routers(9, 5)))
    new = old.model_copy(update={"router": old.router.model_copy(update={"max_queued_tokens": 9})})
    with pytest.raises(ConfigError, match=r"allowed: models\.NAME\.router\.max_queued_tokens of a, b"):
        check_defaults(new, changes(old, new))


def test_live_values_of_models_that_there_are_not_are_refused() -> None:
    live = LiveConfig(parse_config(VALUES))
    with pytest.raises(ConfigError, match="allowed: a mapping of a, b"):
        live.set({"models": {"c": {}}})
    with pytest.raises(ConfigError, match="the target is loaded and placed by it"):
        live.set({"models": {"a": {"target": {}}}})


def test_an_assignment_names_a_model_whatever_dots_its_name_has() -> None:
    values = {"models": [{"name": "qwen2"}, {"name": "qwen2.5"}]}
    after = changed_config(values, ["models.qwen2.5.router.max_queued_tokens=9"])
    assert [each.router.max_queued_tokens for each in after.models] == [262_144, 9]
    with pytest.raises(ConfigError, match=r"models\.z\.load names no model; allowed: .* of qwen2, qwen2\.5"):
        changed_config(values, ["models.z.load=demand"])
