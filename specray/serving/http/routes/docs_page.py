"""The page /docs: the OpenAPI document for people, as one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from specray.serving.http.responses import GET

Json = Mapping[str, Any]

_ORIGIN: Final = "http://127.0.0.1:8000"
"""Address in the examples of a page that was saved; a served one puts in its own."""
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: .25rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8886; padding: .25rem .5rem; text-align: left; vertical-align: top }
h2, h3 { margin-top: 2rem }
"""
_SCRIPT: Final = """
const base = location.href.replace(/\\/docs\\/?([?#].*)?$/, "");
if (location.protocol.startsWith("http")) {
  for (const place of document.querySelectorAll(".origin")) place.textContent = base;
}
"""
_SCRIPT_HASH: Final = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_HEADERS: Final = {
    # Nothing is loaded, and what is not of this page does not run.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_SCRIPT_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_docs_route(app: FastAPI, document: Callable[[], Json]) -> None:
    @app.api_route("/docs", methods=GET)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(document()), headers=_HEADERS)


def docs_page(document: Json) -> str:
    """Writes the page: every path with an example for curl, then every schema with its fields."""
    info, paths = document["info"], document["paths"]
    asks_for_key = "security" in document
    title = escape(f"{info['title']} {info['version']}")
    places = [(path, method, call) for path, methods in paths.items() for method, call in methods.items()]
    operations = "".join(_operation(*place, asks_for_key=asks_for_key) for place in places)
    schemas = "".join(_schema(name, entry) for name, entry in document["components"]["schemas"].items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        + ("<p>Calls need a key; the examples take it from <code>$KEY</code>.</p>" if asks_for_key else "")
        + f"<h2>Paths</h2>{operations}<h2>Schemas</h2>{schemas}<script>{_SCRIPT}</script></body></html>\n"
    )


def _operation(path: str, method: str, call: Json, *, asks_for_key: bool) -> str:
    content = call.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = f"<p>Body: {_type(content['schema'])}</p>" if content else ""
    answers = ", ".join(sorted({kind for entry in call["responses"].values() for kind in entry["content"]}))
    example = _example(path, method, content.get("example"), asks_for_key=asks_for_key)
    name, heading = escape(f"{method}-{path}"), escape(f"{method.upper()} {path}")
    return (
        f'<section id="{name}"><h3><code>{heading}</code></h3><p>{escape(call["summary"])}</p>{body}'
        f"<p>Answers: {escape(answers)}</p><pre>{example}</pre></section>"
    )


def _example(path: str, method: str, body: object, *, asks_for_key: bool) -> str:
    origin = f'<span class="origin">{_ORIGIN}</span>'
    lines = [f"curl -s {origin}{escape(path)}"]
    if asks_for_key:
        lines.append(escape('-H "Authorization: Bearer $KEY"'))
    if method == "post":
        lines.append("-H 'Content-Type: application/json'")
        text = json.dumps(body or {}, ensure_ascii=False).replace("'", r"'\''")
        lines.append(escape(f"-d '{text}'", quote=False))
    return " \\\n  ".join(lines)


def _schema(name: str, schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(entry)}</td>"
        f"<td>{'required' if field in required else ''}</td></tr>"
        for field, entry in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return (
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{about}</p><table>'
        f"<tr><th>field</th><th>type</th><th></th></tr>{rows}</table></section>"
    )


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix("#/components/schemas/"))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        kinds = [entry for entry in schema["anyOf"] if entry.get("type") != "null"]
        return " or ".join(map(_type, kinds))
    if "const" in schema or "enum" in schema:
        return ", ".join(escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    name = " or ".join(kind) if isinstance(kind, list) else kind
    return " ".join((escape(name), *_bounds(schema)))


def _bounds(schema: Json) -> Iterator[str]:
    if "minimum" in schema:
        yield f"from {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']}"
    if "maximum" in schema:
        yield f"to {schema['maximum']}"
