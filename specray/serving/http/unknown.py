"""Leaves out the fields of a body that its API does not have, where the service is to ignore them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specray.serving.http.extras import is_known
from specray.serving.http.schemas import GRAMMAR_FIELDS, Nested


def without_unknown(schema: type[BaseModel], values: object) -> object:
    """Returns a decoded body without the fields that nobody knows, also within its objects and lists.

    Fields that are known and not supported stay, and are refused.
    """
    if not isinstance(values, dict):
        return values
    others = {name: value for name, value in values.items() if name in GRAMMAR_FIELDS or is_known(name)}
    return {**others, **_known(schema, values)}


def _known(schema: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    fields = schema.model_fields
    return {name: _inner(fields[name], value) for name, value in values.items() if name in fields}


def _inner(field: FieldInfo, value: object) -> object:
    """A value of a field, without what its objects, or those in its list, do not have."""
    schema = next(_schemas(field), None)
    if schema is None:
        return value
    if isinstance(value, list):
        return [_known(schema, entry) if isinstance(entry, dict) else entry for entry in value]
    return _known(schema, value) if isinstance(value, dict) else value


def _schemas(field: FieldInfo) -> Iterator[type[BaseModel]]:
    yield from (entry.schema for entry in field.metadata if isinstance(entry, Nested))
    yield from _models(field.annotation)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Schemas of objects within a field's type, such as ``list[MessageFields] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for entry in get_args(annotation):
        yield from _models(entry)
