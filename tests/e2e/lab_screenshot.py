"""Makes the picture of docs/lab.md: the first screen of the lab page after a race, at a running service.

``python -m tests.e2e.lab_screenshot http://127.0.0.1:8000 docs/images/lab.png ["a prompt of your own"]``
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.browser import browser

PROMPT = (
    "Write a Python function that returns the longest common prefix of a list of strings, "
    "and explain it in two sentences."
)
NUM_NEW_TOKENS = 200
NUM_STEPS = 30
"""Number of tokens up to the one whose round is shown."""


async def picture(url: str, path: Path, prompt: str = PROMPT) -> None:
    """Writes the first screen, of 1300 by 900 pixels."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(Path(folder)) as page:
            await page.open(f"{url}/lab", width=1300, height=900)
            await page.call("Emulation.setScrollbarsHidden", hidden=True)
            await page.until(
                "!document.getElementById('model').textContent.endsWith('…')", "the model is known"
            )
            await page.evaluate(f"document.getElementById('prompt').value = {json.dumps(prompt)}")
            await page.evaluate(f"document.getElementById('max-tokens').value = {NUM_NEW_TOKENS}")
            await page.click("#race")
            await page.until("document.getElementById('figure').className === 'final'", "the race is over")
            await page.evaluate("document.getElementById('on-text').focus(); scrollTo(0, 0)")
            for _ in range(NUM_STEPS):
                await page.press("ArrowRight")
            await page.evaluate("document.activeElement.blur()")
            await page.screenshot(path, is_whole=False)


if __name__ == "__main__":
    asyncio.run(picture(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4]))
