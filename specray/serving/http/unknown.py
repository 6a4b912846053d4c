"""Leaves out the fields of a body that its API does not have, where the service is to ignore them."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from specray.serving.http.extras import is_known
from specray.serving.http.schemas import GRAMMAR_FIELDS


def without_unknown(schema: type[BaseModel], values: object) -> object:
    """Returns a decoded body without the fields that nobody knows, also within its objects.

    Fields that are known and not supported stay, and are refused.
    """
    if not isinstance(values, dict):
        return values
    known: dict[str, Any] = {}
    for name, value in values.items():
        field = schema.model_fields.get(name)
        if field is not None:
            inner = _object_of(field.annotation)
            known[name] = value if inner is None else _fields_of(inner, value)
        elif name in GRAMMAR_FIELDS or is_known(name):
            known[name] = value
    return known


def _fields_of(schema: type[BaseModel], value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {name: entry for name, entry in value.items() if name in schema.model_fields}


def _object_of(annotation: object) -> type[BaseModel] | None:
    """The schema of a field that holds one object, absent or not."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next(
        (entry for entry in options if isinstance(entry, type) and issubclass(entry, BaseModel)), None
    )
