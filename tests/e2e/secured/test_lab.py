"""The lab page in a real browser, in front of a real service."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import pytest

from tests.browser import CHROMIUM, Page
from tests.e2e.secured.lab import IDLE, race, run, shown, text
from tests.e2e.service import Service

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
CONTROL = 2
"""Bit of the Control key in the browser's protocol."""


async def numbers(page: Page) -> dict[str, str]:
    pairs = "document.querySelectorAll('#short div, #numbers div')"
    return dict(await page.evaluate(f"Array.from({pairs}, e => [...e.children].map(c => c.textContent))"))


async def test_run_shows_every_token_by_its_kind_and_the_services_own_numbers(
    service: Service, page: Page, http: aiohttp.ClientSession
) -> None:
    before = await _counters(http)
    await run(page)
    answer = await _plain(page, http)
    assert await shown(page, "on-text") == answer["text"]
    told, after = await numbers(page), await _counters(http)
    assert int(told["Tokens"]) == answer["num_tokens"] > 8
    assert int(told["Draft tokens"]) == after["draft"] - before["draft"] > 0
    assert int(told["Accepted"]) == after["accepted"] - before["accepted"]
    assert told["Acceptance rate"] == f"{int(told['Accepted']) / int(told['Draft tokens']):.3f}"
    assert "The formula" in await text(page, "formula")
    kinds = "document.querySelectorAll('#legend b')"
    counts = dict(await page.evaluate(f"Array.from({kinds}, e => [e.dataset.kind, Number(e.textContent)])"))
    assert sum(counts.values()) - counts["rejected"] == answer["num_tokens"]
    assert counts["accepted"] + counts["filler"] == int(told["Accepted"])
    assert re.fullmatch(r"[1-9]\d*\.\d", await text(page, "figure-value"))
    assert await page.evaluate("document.querySelectorAll('#bars rect.target').length") > 0
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
    await page.evaluate("document.getElementById('on-text').focus()")
    for _ in range(2):
        await page.press("ArrowRight")
    chosen = await page.evaluate("document.querySelector('#on-text .chosen').textContent")
    detail = await text(page, "detail")
    assert detail.startswith(json.dumps(chosen, ensure_ascii=False)) and "Round " in detail


async def _rejected_tokens_are_behind_a_toggle(page: Page) -> None:
    visible = "Array.from(document.querySelectorAll('#on-text .rejected')).filter(e => e.offsetParent).length"
    assert await page.evaluate(visible) == 0
    await page.click("#show-rejected")
    assert await page.evaluate(visible) == await page.evaluate(
        "document.querySelectorAll('#on-text .rejected').length"
    )


async def test_race_runs_side_by_side_on_clocks_and_ends_with_one_figure(page: Page) -> None:
    await page.evaluate(f"({_WATCH})()")
    await race(page)
    status = await text(page, "status")
    assert status.endswith("Both texts are the same.")
    off, on = await shown(page, "off-text"), await shown(page, "on-text")
    assert off == on and len(off) > 100
    drafted, plain = map(float, re.findall(r"\d+\.\d", status))
    figure = await text(page, "figure-value")
    assert re.fullmatch(r"\d+\.\d\d×", figure)
    assert float(figure[:-1]) == pytest.approx(drafted / plain, abs=0.01 + 0.1 * (drafted + plain) / plain**2)
    seen = await page.evaluate("window.seen")
    both = [entry for entry in seen if entry["running"] == ["off", "on"]]
    alone = [entry for entry in seen[: seen.index(both[0])] if entry["running"] == ["on"]]
    for entries, arm in ((alone, "on"), (both, "on"), (both, "off")):
        clock = [entry[arm] for entry in entries if entry[arm]]
        assert clock == sorted(clock) and len(set(clock)) > 2, (arm, clock)
    # The first run's words come again beside the second's; the bars of both move.
    assert len({entry["length"] for entry in both}) > 2
    assert len({entry["place"] for entry in both}) > 2
    assert page.problems == []


_WATCH = """() => {
  window.seen = [];
  const seconds = (arm) => {
    const shown = /([0-9.]+) s$/.exec(document.getElementById(`${arm}-time`).textContent);
    return shown === null ? 0 : Number(shown[1]);
  };
  new MutationObserver(() => window.seen.push({
    running: Array.from(document.querySelectorAll(".lane.running"), (lane) => lane.id),
    on: seconds("on"),
    off: seconds("off"),
    length: document.getElementById("on-text").textContent.length,
    place: document.querySelector("#bars svg").style.transform,
  })).observe(document.querySelector("#bars svg"), { attributes: true, attributeFilter: ["style"] });
}"""
"""Notes the clocks and texts of both lanes whenever the timeline moves."""


async def test_race_can_be_shown_again(page: Page) -> None:
    await race(page)
    whole = await shown(page, "on-text")
    await page.evaluate(f"({_WATCH})()")
    await page.click("#replay")
    await page.until("document.querySelectorAll('.lane.running').length === 0", "both runs are over")
    lengths = [entry["length"] for entry in await page.evaluate("window.seen")]
    assert lengths[0] < lengths[-1]
    assert await shown(page, "on-text") == await shown(page, "off-text") == whole
    assert await page.evaluate("document.getElementById('whole').checked")


async def test_keys_start_and_stop_a_run(page: Page) -> None:
    await page.evaluate(
        "document.getElementById('max-tokens').value = 500; document.getElementById('prompt').focus()"
    )
    await page.press("Enter", modifiers=CONTROL)
    await page.until("document.querySelectorAll('#on-text .token').length > 0", "the first token")
    await page.press("Escape")
    await page.until(
        f"{IDLE} && document.getElementById('status').textContent === 'Stopped.'", "it has stopped"
    )
    assert await text(page, "problem") == ""
    assert await page.evaluate("document.activeElement.id") == "prompt"


async def test_focus_stays_with_the_button_that_takes_the_place(page: Page) -> None:
    await page.evaluate("document.getElementById('race').focus()")
    await page.press("Enter")
    await page.until("document.activeElement.id === 'stop'", "the focus is on the button that stops")
    await page.press("Enter")
    await page.until(f"{IDLE} && document.activeElement.id === 'race'", "it is back")
    assert await text(page, "status") == "Stopped."


async def test_what_the_service_refuses_stands_beside_the_form(page: Page) -> None:
    await page.evaluate("document.getElementById('prompt').value = 'word '.repeat(20000)")
    await page.click("#run")
    await page.until(f"{IDLE} && document.getElementById('problem').textContent !== ''", "it is refused")
    assert "maximum context length" in await text(page, "problem")
    assert await page.evaluate("document.getElementById('problem').getAttribute('role')") == "alert"
    assert not await page.evaluate("document.getElementById('run').hidden")
    # The browser's own note of the refused call.
    assert len(page.problems) == 1 and "400" in page.problems[0]


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
