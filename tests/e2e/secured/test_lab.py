"""The lab page in a real browser, in front of a real service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.browser import CHROMIUM, Page, browser
from tests.e2e.secured.access import KEY
from tests.e2e.service import Service

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
IDLE = "document.body.dataset.state === 'idle'"


@pytest.fixture
async def page(service: Service, tmp_path: Path) -> AsyncIterator[Page]:
    """The page, with the key of the service in its field."""
    async with browser(tmp_path) as page:
        await page.open(f"{service.url}/lab/")
        await page.until("document.getElementById('problem').textContent !== ''", "a key is asked for")
        # The browser's own note of the call without a key.
        assert len(page.problems) == 1 and "401" in page.problems.pop()
        await page.evaluate(f"document.getElementById('key').value = {json.dumps(KEY)}")
        yield page


async def text(page: Page, name: str) -> Any:
    return await page.evaluate(f"document.getElementById({json.dumps(name)}).textContent")


async def numbers(page: Page) -> dict[str, str]:
    pairs = (
        "Array.from(document.querySelectorAll('#numbers div'), e => [...e.children].map(c => c.textContent))"
    )
    return dict(await page.evaluate(pairs))


async def test_run_shows_every_token_by_its_kind_and_the_services_own_numbers(
    service: Service, page: Page, http: aiohttp.ClientSession
) -> None:
    before = await _counters(http)
    await page.click("#run")
    await page.until(f"{IDLE} && document.querySelectorAll('#output .token').length > 0", "the run has ended")
    assert await text(page, "problem") == ""
    shown = await page.evaluate(
        "Array.from(document.querySelectorAll('#output .token:not(.rejected)'), e => e.textContent).join('')"
    )
    answer = await _plain(page, http)
    assert shown == answer["text"]
    told, after = await numbers(page), await _counters(http)
    assert int(told["Tokens"]) == answer["num_tokens"] > 8
    assert int(told["Draft tokens"]) == after["draft"] - before["draft"] > 0
    assert int(told["Accepted"]) == after["accepted"] - before["accepted"]
    assert told["Acceptance rate"] == f"{int(told['Accepted']) / int(told['Draft tokens']):.3f}"
    assert "The formula" in await text(page, "formula")
    assert await page.evaluate("document.querySelectorAll('#timeline rect.target').length") > 0
    assert await page.evaluate("document.querySelectorAll('#decisions tr').length") > 0
    await _arrow_keys_tell_a_round(page)
    await _rejected_tokens_are_behind_a_toggle(page)
    assert page.problems == []
    assert {url.split("/")[2] for url in page.urls} == {service.url.split("/")[2]}


async def _plain(page: Page, http: aiohttp.ClientSession) -> dict[str, Any]:
    """What the page's form asks for, without drafts."""
    prompt = await page.evaluate("document.getElementById('prompt').value")
    body: dict[str, Any] = {"max_tokens": 128, "temperature": 0, "speculation": {"enabled": False}}
    path = "/v1/completions"
    if await page.evaluate("document.getElementById('kind-chat').checked"):
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    async with http.post(path, json=body) as response:
        answer = await response.json()
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {"text": text, "num_tokens": answer["usage"]["completion_tokens"]}


async def _arrow_keys_tell_a_round(page: Page) -> None:
    await page.evaluate("document.getElementById('output').focus()")
    for _ in range(2):
        await page.press("ArrowRight")
    chosen = await page.evaluate("document.querySelector('#output .chosen').textContent")
    detail = await text(page, "detail")
    assert detail.startswith(json.dumps(chosen, ensure_ascii=False)) and "Round " in detail


async def _rejected_tokens_are_behind_a_toggle(page: Page) -> None:
    visible = "Array.from(document.querySelectorAll('#output .rejected')).filter(e => e.offsetParent).length"
    assert await page.evaluate(visible) == 0
    await page.click("#show-rejected")
    assert await page.evaluate(visible) == await page.evaluate(
        "document.querySelectorAll('#output .rejected').length"
    )


async def test_race_ends_with_one_text_on_both_sides_and_fits_a_phone(page: Page) -> None:
    await page.size(390, 844)
    await page.click("#race")
    await page.until(
        f"{IDLE} && document.getElementById('race-result').textContent !== ''", "the race is over"
    )
    assert await text(page, "problem") == ""
    assert "Both texts are the same." in await text(page, "race-result")
    await page.until(
        "document.getElementById('off-text').textContent.length > 100 &&"
        "document.getElementById('off-text').textContent === document.getElementById('on-text').textContent",
        "the replay is over",
    )
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.problems == []


async def _counters(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    names = {
        "draft": "specray_spec_decode_num_draft_tokens_total",
        "accepted": "specray_spec_decode_num_accepted_tokens_total",
    }
    return {
        short: sum(float(line.split()[-1]) for line in lines if line.startswith(name))
        for short, name in names.items()
    }
