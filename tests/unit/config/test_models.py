"""Several models in one configuration: what each gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.config.live import changes
from specray.config.models import slug
from specray.errors import ConfigError
from specray.serving.reload import check_defaults

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


def test_a_reload_says_that_defaults_of_models_do_not_change() -> None:
    old = parse_config(VALUES)
    new = old.model_copy(update={"router": old.router.model_copy(update={"max_queued_tokens": 9})})
    with pytest.raises(ConfigError, match="router beside models is a default"):
        check_defaults(new, changes(old, new))
