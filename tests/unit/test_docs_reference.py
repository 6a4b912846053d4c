"""Reference pages are complete: a line for every module, a row for every key, a name for every metric."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from specray.config import Config
from specray.engine.model.library import LibraryConfig
from specray.serving.metrics import IngressMetrics
from specray.telemetry.draft import DraftMetrics
from specray.telemetry.metrics import RouterMetrics
from specray.telemetry.models import ModelMetrics
from tests.unit.engine.model.checkpoints import family_config
from tests.unit.engine.model.zoo import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "specray"
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_architecture_has_a_line_for_every_module() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `([\w/]+\.py)`: .", text, re.M)
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    # Generated code has no line.
    expected = {name for name in modules if not name.startswith("rpc/pb/")}
    assert len(listed) == len(set(listed))
    assert set(listed) == expected
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert {name for name in named if not name.startswith("tests/")} <= modules


def config_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, set[str]]]:
    """Each key with its default and its literal values; sections of the configuration are walked."""
    for name, field in section.model_fields.items():
        kinds = list(walk_types(field.annotation))
        literals = {value for kind in kinds for value in literal_values(kind)}
        default = None if field.default_factory else field.default
        yield prefix + name, default, literals
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from config_keys(kind, f"{prefix}{name}.")


def walk_types(annotation: Any) -> Iterator[Any]:
    yield annotation
    if typing.get_origin(annotation) is not typing.Literal:
        for argument in typing.get_args(annotation):
            yield from walk_types(argument)


def literal_values(kind: Any) -> set[str]:
    if typing.get_origin(kind) is typing.Literal:
        return {value if isinstance(value, str) else str(value).lower() for value in typing.get_args(kind)}
    values = getattr(kind, "__members__", {}).values()
    return {member.value for member in values}


def documented_key(key: str) -> str:
    """The row of a key: what engines, autoscaling and models have in common is written once."""
    head, _, rest = key.partition(".")
    if head == "models" and "." in rest and rest != "draft.pool":
        return documented_key(rest)
    if head == "drafts" and rest != "name":
        return documented_key(f"draft.{rest}")
    if rest.startswith("autoscaling."):
        return rest
    own = {"enabled", "vocabulary_ids", "draft", "inner_draft_tokens", "vocabulary", "window"}
    own |= {"num_replicas", "autoscaling", "adapters"}
    return rest if head == "target" or (head == "draft" and rest not in own) else key


def test_configuration_has_every_key_with_its_default() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", text, re.M)
    }
    keys = list(config_keys(Config))
    sections = {key.rpartition(".")[0] for key, _, _ in keys}
    for key, default, literals in keys:
        own_rows = {"draft.autoscaling", "router.autoscaling", "rpc.tls", "auth.keys"}
        if key in sections - own_rows - {"auth.keys.speculation"}:
            continue
        shown, allowed, meaning = rows[documented_key(key)]
        if default is PydanticUndefined:
            assert shown == "required", key
        elif default is None:
            assert shown in ("-", "empty"), key
        elif not key.endswith(".min_replicas"):
            text_of_default = str(default).lower() if isinstance(default, bool) else str(default)
            assert shown == ("empty" if default == () else f"`{text_of_default}`"), key
        assert all(f"`{value}`" in allowed + meaning for value in literals), key
    assert set(rows) - {documented_key(key) for key, _, _ in keys} == set()


def metric_names() -> set[str]:
    """Names of all metrics, without the suffix that counters get."""
    sources = (RouterMetrics(), DraftMetrics(), IngressMetrics(), ModelMetrics())
    return {family.name for source in sources for family in source.registry.collect()}


def test_metrics_in_documents_exist_and_all_are_there() -> None:
    names = metric_names()
    for path in DOCUMENTS:
        for name in re.findall(r"\bspecray_[a-z_]+[a-z](?![\w*])", path.read_text(encoding="utf-8")):
            assert name.removesuffix("_total") in names, f"{path.name}: {name}"
    text = (DOCS / "observability.md").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if name not in text and not name.endswith("_by_source")] == []
    assert "_by_source_total{source}" in text


def test_models_page_has_a_row_for_every_family_of_the_zoo() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| (.+?) \|(?: (one|several) \|)?", text, re.M)
    assert len(rows) == len(FAMILIES)
    for name, model_type, told, ranks in rows:
        family = FAMILIES[name]
        assert model_type == family.model_type, name
        if family.refusal is not None:
            assert family.refusal in told, name
            continue
        whole = family_config(family)
        config = LibraryConfig(whole, whole.get_text_config())
        assert told == ("`decoder`" if config.has_decoder("auto") else "`hf`"), name
        assert ranks == ("several" if config.can_be_shared("auto") else "one"), name
