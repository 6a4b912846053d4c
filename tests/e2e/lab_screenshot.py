"""Makes the picture of docs/lab.md: a race on the lab page of a running service.

``python -m tests.e2e.lab_screenshot http://127.0.0.1:8000 docs/images/lab.png``
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.browser import browser

PROMPT = "Write a haiku about rivers, then explain each line."
WIDTH = 1100


async def picture(url: str, path: Path) -> None:
    """Writes the page after a race, without the empty space below it."""
    with tempfile.TemporaryDirectory() as folder:
        async with browser(Path(folder)) as page:
            await page.open(f"{url}/lab", width=WIDTH)
            await page.until(
                "!document.getElementById('model').textContent.endsWith('…')", "the model is known"
            )
            await page.evaluate(f"document.getElementById('prompt').value = {PROMPT!r}")
            await page.click("#race")
            result = "document.getElementById('race-result').textContent !== ''"
            await page.until(f"{result} && document.body.dataset.state === 'idle'", "the race is over")
            texts = "['off', 'on'].map(arm => document.getElementById(`${arm}-text`).textContent)"
            await page.until(
                f"(([off, on]) => off.length > 200 && off === on)({texts})", "the replay is over"
            )
            await page.click("#show-rejected")
            await page.evaluate("document.getElementById('output').focus(); scrollTo(0, 0)")
            for _ in range(9):
                await page.press("ArrowRight")
            height = await page.evaluate("document.documentElement.scrollHeight")
            await page.size(WIDTH, int(height))
            await page.screenshot(path)


if __name__ == "__main__":
    asyncio.run(picture(sys.argv[1], Path(sys.argv[2])))
