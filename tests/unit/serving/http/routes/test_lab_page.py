"""The lab page: who gets it, what it may load, and that its files hold nothing that it may not."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from yarl import URL

from specray.config import Config, parse_config
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash
from specray.serving.http.routes.lab_page import has_lab
from tests.unit.serving.http.service import INFO, MODEL, serving

FILES = {entry.name: entry.read_text("utf-8") for entry in (files("specray.serving.http") / "lab").iterdir()}
KEY = "sk-specray-" + "aB3_" * 10 + "xyz"


def config(**values: object) -> Config:
    return parse_config({"served_model_name": MODEL, **values})


@pytest.mark.parametrize(
    ("host", "lab", "is_served"),
    [
        ("127.0.0.1", "auto", True),
        ("::1", "auto", True),
        ("localhost", "auto", True),
        ("0.0.0.0", "auto", False),
        ("10.0.0.1", "auto", False),
        ("specray.example.com", "auto", False),
        ("0.0.0.0", "on", True),
        ("127.0.0.1", "off", False),
    ],
)
def test_by_default_only_this_machine_gets_it(host: str, lab: str, is_served: bool) -> None:
    assert has_lab(config(http={"host": host, "lab": lab}).http) is is_served


async def test_page_and_files_come_with_a_policy_that_lets_nothing_else_in() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path, kind in (
            ("/lab", "text/html; charset=utf-8"),
            ("/lab/", "text/html; charset=utf-8"),
            ("/lab/lab.css", "text/css; charset=utf-8"),
            ("/lab/lab.js", "text/javascript; charset=utf-8"),
            ("/lab/lab/lab.js", "text/javascript; charset=utf-8"),
        ):
            async with service.http.get(path) as response:
                assert (response.status, response.headers["Content-Type"]) == (200, kind)
                policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize(
    "path",
    ["/lab/other.js", "/lab/lab/lab/lab.js", "/lab/../app.py", "/lab/%2e%2e/app.py", "/lab/..%2fapp.py"],
)
async def test_nothing_else_is_served_below_it(path: str) -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.get(URL(service.url + path, encoded=True)) as response,
    ):
        assert response.status == 404


@pytest.mark.parametrize("path", ["//lab", "//lab/../v1/models", "/lab;/v1/models", "/lab/../v1/models"])
async def test_no_form_of_its_path_opens_the_api(path: str) -> None:
    keys = {"keys": [{"name": "a", "sha256": key_hash(KEY)}]}
    async with (
        serving(FakeRouterClient(info=INFO), config=config(auth=keys)) as service,
        service.http.get(URL(service.url + path, encoded=True)) as response,
    ):
        assert response.status in (401, 404)


async def test_without_it_the_path_is_unknown() -> None:
    off = config(http={"lab": "off"})
    async with (
        serving(FakeRouterClient(info=INFO), config=off) as service,
        service.http.get("/lab") as response,
    ):
        assert response.status == 404


@pytest.mark.parametrize(("open_paths", "page"), [([], 401), (["/lab"], 200)])
async def test_page_needs_a_key_unless_it_is_an_open_path_and_its_calls_do(
    open_paths: list[str], page: int
) -> None:
    auth = {"keys": [{"name": "a", "sha256": key_hash(KEY)}], "open_paths": open_paths}
    async with serving(FakeRouterClient(info=INFO), config=config(auth=auth)) as service:
        for path, status in (("/lab", page), ("/lab/lab.js", page), ("/labs", 401), ("/v1/models", 401)):
            async with service.http.get(path) as response:
                assert (path, response.status) == (path, status)


def test_files_hold_no_inline_code_and_no_address_of_another_host() -> None:
    page = FILES["index.html"]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", page)
    for name, text in FILES.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
    assert "innerHTML" not in "".join(FILES.values())


def test_every_file_of_the_page_is_there_and_used() -> None:
    loaded = set(re.findall(r'"lab/([\w.]+)"', FILES["index.html"]))
    loaded |= {name for text in FILES.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert loaded | {"index.html"} == set(FILES)
