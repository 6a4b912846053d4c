"""Finds what of a grammar can be begun and never ended, such as a schema that needs itself.

llguidance takes such grammars, and fails in the middle of an output.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

Needs = Mapping[Hashable, tuple[bool, Sequence[Hashable]]]
"""What each part needs: whether all of the others (else one of them), and which; unknown parts end."""
_ESCAPES: Final = re.compile("~[01]")


def endless_cycle(needs: Needs) -> list[Hashable]:
    """Parts that need each other in a circle and never end; empty: all parts end."""
    waiting: dict[Hashable, int] = {}
    users: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    ended: list[Hashable] = []
    for part, (is_all, others) in needs.items():
        waiting[part] = len(others) if is_all else 1
        for other in others:
            users[other].append(part)
        if is_all and not others:
            ended.append(part)
    ended += [part for part in users if part not in needs]
    while ended:
        for user in users[ended.pop()]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ended.append(user)
    part = next((part for part in needs if waiting[part] > 0), None)
    passed: dict[Hashable, int] = {}
    while part is not None and part not in passed:
        passed[part] = len(passed)
        part = next(other for other in needs[part][1] if waiting.get(other, 0) > 0)
    return [] if part is None else list(passed)[passed[part] :]


def endless_schema(schema: object) -> str | None:
    """Where a JSON schema needs itself without a way out, such as ``$defs.node``; None: nowhere."""
    graph = _SchemaGraph(schema)
    return next((graph.paths[part] for part in endless_cycle(graph.needs)), None)


def resolve(root: object, reference: object) -> tuple[object, str] | None:
    """What a ``$ref`` within ``root`` names, and its path; None: it cannot be found."""
    if not isinstance(root, dict) or not isinstance(reference, str):
        return None
    own = root.get("$id")
    fragment = reference.removeprefix(own) if isinstance(own, str) else reference
    if not fragment.startswith("#"):
        return None
    fragment = unquote(fragment[1:])
    if fragment and not fragment.startswith("/"):
        return _anchored(root, fragment)
    node: object = root
    path = ""
    for escaped in fragment.split("/")[1:]:
        key = _ESCAPES.sub(lambda match: "~" if match[0] == "~0" else "/", escaped)
        if isinstance(node, list) and key.isdecimal() and len(key) < 9 and int(key) < len(node):
            node, path = node[int(key)], f"{path}[{key}]"
        elif isinstance(node, dict) and key in node:
            node, path = node[key], joined(path, key)
        else:
            return None
    return node, path


def objects_within(value: object) -> Iterator[dict[str, Any]]:
    """All objects within a JSON value, itself included, whether a keyword makes them schemas or not."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            yield node


def joined(path: str, key: str) -> str:
    name = key if re.fullmatch(r"[$\w-]+", key) else repr(key[:60])
    return f"{path}.{name}" if path else name


def _anchored(root: dict[str, Any], name: str) -> tuple[object, str] | None:
    for where in ("$defs", "definitions"):
        entries = root.get(where)
        for key, entry in entries.items() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and entry.get("$anchor") == name:
                return entry, joined(where, key)
    return None


class _SchemaGraph:
    """What each part of a schema needs; the parts are identified by ``id``."""

    def __init__(self, root: object) -> None:
        self._root = root
        self.needs: dict[Hashable, tuple[bool, list[Hashable]]] = {}
        self.paths: dict[Hashable, str] = {}
        self._waiting: list[tuple[object, str]] = []
        self._reach(root, "")
        while self._waiting:
            node, path = self._waiting.pop()
            if isinstance(node, dict) and id(node) not in self.needs:
                self.paths[id(node)] = path or "the schema"
                self.needs[id(node)] = (True, [])
                self._read(node, path)

    def _read(self, node: dict[str, Any], path: str) -> None:
        for key in ("items", "additionalProperties", "additionalItems"):
            self._reach(node.get(key), joined(path, key))
        for key in ("properties", "patternProperties"):
            for name, entry in _entries(node.get(key)):
                self._reach(entry, joined(joined(path, key), name))
        for key in ("prefixItems", "items"):
            for index, entry in enumerate(_items(node.get(key))):
                self._reach(entry, f"{joined(path, key)}[{index}]")
        needed = self.needs[id(node)][1]
        needed += self._applied(node, path)
        if "enum" not in node and "const" not in node:
            needed += [self._reach(entry, entry_path) for entry, entry_path in _parts_of(node, path)]

    def _applied(self, node: dict[str, Any], path: str) -> Iterator[Hashable]:
        """Other schemas that a value must be of, too."""
        found = resolve(self._root, node["$ref"]) if "$ref" in node else None
        if found is not None:
            yield self._reach(*found)
        for index, entry in enumerate(_items(node.get("allOf"))):
            yield self._reach(entry, f"{joined(path, 'allOf')}[{index}]")
        for key in ("anyOf", "oneOf"):
            entries = _items(node.get(key))
            if entries:
                choice = (id(node), key)
                self.paths[choice] = joined(path, key)
                self.needs[choice] = (
                    False,
                    [
                        self._reach(entry, f"{joined(path, key)}[{index}]")
                        for index, entry in enumerate(entries)
                    ],
                )
                yield choice

    def _reach(self, node: object, path: str) -> Hashable:
        self._waiting.append((node, path))
        return id(node)


def _parts_of(node: dict[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """What is within each value of this schema, where all are objects, or all are lists."""
    if node.get("type") in ("object", ["object"]):
        properties = dict(_entries(node.get("properties")))
        for key in _items(node.get("required")):
            if key in properties:
                yield properties[key], joined(joined(path, "properties"), key)
            elif "patternProperties" not in node:
                yield node.get("additionalProperties"), joined(path, "additionalProperties")
    elif node.get("type") in ("array", ["array"]):
        least = node.get("minItems")
        num_items = int(least) if isinstance(least, int | float) else 0
        items = node.get("items")
        first = _items(node.get("prefixItems")) or _items(items)
        for index, entry in enumerate(first[:num_items]):
            yield entry, f"{joined(path, 'prefixItems')}[{index}]"
        if num_items > len(first) and isinstance(items, dict):
            yield items, joined(path, "items")


def _entries(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
