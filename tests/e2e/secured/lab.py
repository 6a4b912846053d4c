"""What tests of the lab page ask of it."""

from __future__ import annotations

import json
from typing import Any

from tests.browser import Page

IDLE = "document.body.dataset.state === 'idle'"
RACED = f"{IDLE} && document.getElementById('figure').className === 'final'"


async def text(page: Page, name: str) -> Any:
    return await page.evaluate(f"document.getElementById({json.dumps(name)}).textContent")


async def shown(page: Page, name: str) -> Any:
    """The output in an element, without the draft tokens that are not part of it."""
    tokens = json.dumps(f"#{name} .token:not(.rejected)")
    return await page.evaluate(
        f"Array.from(document.querySelectorAll({tokens}), e => e.textContent).join('')"
    )


async def run(page: Page) -> None:
    await page.click("#run")
    await page.until(
        f"{IDLE} && document.querySelectorAll('#on-text .token').length > 0", "the run has ended"
    )
    assert await text(page, "problem") == ""


async def race(page: Page) -> None:
    await page.click("#race")
    await page.until(RACED, "the race is over")
    assert await text(page, "problem") == ""
