"""The page /docs: by option, under a key where keys are asked for, complete, and without anything to load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash, new_key
from specray.serving.http.routes.docs_page import docs_page
from specray.serving.http.routes.openapi import openapi_document
from tests.unit.serving.http.service import INFO, MODEL, serving


class Page(HTMLParser):
    """Collects ids, links, texts of <pre>, and whatever would be loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.examples: list[str] = []
        self.loaded: list[str] = []
        self._is_in_example = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.update(filter(None, [values.get("id")]))
        if tag == "a":
            self.links.append(values["href"] or "")
        if tag in ("link", "img", "iframe") or "src" in values:
            self.loaded.append(tag)
        if tag == "pre":
            self._is_in_example = True
            self.examples.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self._is_in_example = False

    def handle_data(self, data: str) -> None:
        if self._is_in_example:
            self.examples[-1] += data


def test_every_path_and_schema_is_there_and_nothing_is_loaded() -> None:
    document = openapi_document(asks_for_key=False)
    html = docs_page(document)
    page = Page(html)
    places = {f"{method}-{path}" for path, methods in document["paths"].items() for method in methods}
    assert page.ids == places | document["components"]["schemas"].keys()
    assert page.loaded == []
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert not re.search(r"https?://(?!127\.0\.0\.1:8000<)", html)
    assert "<td><code>temperature</code></td><td>number from 0 to 2</td>" in html
    assert "<td><code>top_p</code></td><td>number above 0 to 1</td>" in html
    assert '<td><code>messages</code></td><td>array of <a href="#MessageFields">' in html


def test_examples_are_commands_with_the_documents_bodies() -> None:
    document = openapi_document(asks_for_key=True)
    examples = Page(docs_page(document)).examples
    calls = [(path, call) for path, methods in document["paths"].items() for call in methods.values()]
    assert len(examples) == len(calls)
    for example, (path, call) in zip(examples, calls, strict=True):
        words = shlex.split(example.replace("\\\n", " "))
        assert words[:3] == ["curl", "-s", f"http://127.0.0.1:8000{path}"]
        assert "Authorization: Bearer $KEY" in words
        if "requestBody" in call:
            body = call["requestBody"]["content"]["application/json"]["example"]
            assert json.loads(words[words.index("-d") + 1]) == body
    assert "$KEY" not in docs_page(openapi_document(asks_for_key=False))


def test_text_of_the_document_is_text_of_the_page() -> None:
    nasty = "<script>alert('&')</script>"
    call = {"summary": nasty, "responses": {"200": {"content": {nasty: {}}}}}
    content = {"application/json": {"schema": {"$ref": nasty}, "example": {nasty: nasty}}}
    document = {
        "info": {"title": nasty, "version": nasty},
        "paths": {nasty: {"post": {**call, "requestBody": {"content": content}}}},
        "components": {"schemas": {nasty: {"description": nasty, "properties": {nasty: {"const": nasty}}}}},
    }
    html = docs_page(document)
    assert html.count("<script>") == 1
    assert nasty in unescape(html)


async def test_the_page_is_served_by_option_alone_with_a_policy_that_lets_its_script_run() -> None:
    for is_on, status in [(False, 404), (True, 200)]:
        config = parse_config({"served_model_name": MODEL, "http": {"openapi": is_on}})
        async with (
            serving(FakeRouterClient(info=INFO), config=config) as service,
            service.http.get("/docs") as response,
        ):
            assert response.status == status
            text, headers = await response.text(), response.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and f"script-src 'sha256-{digest}'" in policy


async def test_the_page_needs_a_key_where_keys_are_asked_for() -> None:
    key = new_key()
    values = {"auth": {"keys": [{"name": "a", "sha256": key_hash(key)}]}, "http": {"openapi": True}}
    async with serving(FakeRouterClient(info=INFO), config=parse_config(values)) as service:
        for path in ("/docs", "/openapi.json"):
            async with service.http.get(path) as response:
                assert response.status == 401
            async with service.http.get(path, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200
                assert key not in await response.text()
