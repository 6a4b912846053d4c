"""How the lab page looks: what stands on its first screen, one scale of type, contrast in light and dark."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.browser import CHROMIUM, Page
from tests.e2e.secured.lab import RACED, race, run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
PARTS = (
    *("kind-chat", "prompt", "examples", "run", "race", "k", "temperature", "max-tokens", "seed", "key"),
    *("figure", "short", "status", "on-text", "detail", "legend", "whole", "rows", "bars"),
)
"""What belongs on the first screen, from controls to timeline."""


async def places(page: Page, names: tuple[str, ...] = PARTS) -> dict[str, dict[str, float]]:
    """Left, top, right and bottom of elements by their id, in pixels of the window."""
    result: dict[str, dict[str, float]] = await page.evaluate(
        f"Object.fromEntries({json.dumps(names)}.map(name => [name, document.getElementById(name)"
        ".getBoundingClientRect().toJSON()]))"
    )
    return result


async def assert_on_the_first_screen(page: Page, names: tuple[str, ...] = PARTS) -> None:
    assert await page.evaluate("scrollY") == 0
    for name, place in (await places(page, names)).items():
        assert 0 <= place["left"] < place["right"] <= 1300, name
        assert 0 <= place["top"] < place["bottom"] <= 900, name
    assert await page.evaluate("document.documentElement.scrollWidth") <= 1300
    # No control is hidden in a column of its own that scrolls.
    assert await page.evaluate("(e => e.scrollHeight - e.clientHeight)(document.getElementById('ask'))") <= 0


async def test_everything_of_a_run_is_on_the_first_screen_before_and_after_it(page: Page) -> None:
    await page.evaluate("document.getElementById('problem').textContent = ''")
    await assert_on_the_first_screen(page)
    visible = "Array.from(document.querySelectorAll('.hint')).filter(e => e.checkVisibility()).length"
    # Answer, timeline and decisions say what will be there; the lane of a race is not shown yet.
    assert await page.evaluate(visible) == 3
    await run(page)
    await page.evaluate("scrollTo(0, 0)")
    await assert_on_the_first_screen(page)
    assert await page.evaluate(visible) == 0


async def test_race_stands_side_by_side_and_its_figure_is_the_largest_text(page: Page) -> None:
    await race(page)
    await page.evaluate("scrollTo(0, 0)")
    await assert_on_the_first_screen(page, (*PARTS, "off-text", "replay"))
    lanes = await places(page, ("off", "on"))
    assert lanes["off"]["top"] == lanes["on"]["top"] and lanes["off"]["right"] < lanes["on"]["left"]
    assert lanes["off"]["width"] == pytest.approx(lanes["on"]["width"], abs=1)
    sizes = await _sizes(page)
    assert await _style(page, "#figure-value", "fontSize") == f"{max(sizes):g}px"
    assert max(sizes) > 3 * sorted(sizes)[-2]
    assert await _style(page, "#figure-value", "color") == await _style(page, "#run", "backgroundColor")


async def test_type_has_one_scale_and_one_family_beside_the_fixed_width(page: Page) -> None:
    await run(page)
    assert await _sizes(page) == pytest.approx([12, 15, 18.75, 57.225], abs=0.01)
    assert await _all(page, "fontFamily") == {"system-ui, sans-serif", "ui-monospace, monospace"}


async def test_400_pixels_have_one_column_in_order(page: Page) -> None:
    await page.size(400, 900)
    await page.click("#race")
    await page.until("document.body.dataset.state === 'running' && scrollY > 0", "the result is in view")
    stop = (await places(page, ("stop",)))["stop"]
    assert 0 <= stop["top"] < stop["bottom"] <= 900
    await page.until(RACED, "the race is over")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400
    order = (
        "model",
        "prompt",
        "run",
        "k",
        "figure",
        "off-text",
        "on-text",
        "legend",
        "bars",
        "numbers",
        "decisions",
    )
    found = await places(page, order)
    for above, below in itertools.pairwise(order):
        assert found[above]["bottom"] <= found[below]["top"], (above, below)
    assert all(place["left"] >= 0 and place["right"] <= 400 for place in found.values())
    # What was asked for is in view after the press of a button further up.
    assert found["figure"]["top"] < 900 and found["off-text"]["top"] < 900


@pytest.mark.parametrize("is_dark", [False, True])
async def test_colours_follow_the_browser_and_every_text_can_be_read(page: Page, is_dark: bool) -> None:
    await page.prefer(is_dark=is_dark)
    await run(page)
    await page.click("#show-rejected")
    ground = await page.evaluate(f"({_CONTRASTS})().ground")
    assert ground < 0.05 if is_dark else ground > 0.9
    for entry in await page.evaluate(f"({_CONTRASTS})().texts"):
        least = 3 if entry["size"] >= 24 else 4.5
        assert entry["contrast"] >= least, entry


async def test_without_motion_the_first_run_is_not_shown_again(page: Page) -> None:
    await page.prefer(is_dark=False, is_still=True)
    await page.evaluate(
        "window.lengths = []; new MutationObserver(() => window.lengths.push("
        "document.getElementById('on-text').textContent.length))"
        ".observe(document.getElementById('on-text'), { childList: true })"
    )
    await race(page)
    lengths = await page.evaluate("window.lengths")
    assert lengths == sorted(lengths) and lengths[-1] > 100


_CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = Array.from(canvas.getImageData(0, 0, 1, 1).data, (value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : colour;
  };
  const texts = Array.from(document.querySelectorAll("body *"))
    .filter((element) => element.checkVisibility())
    .filter((element) => !element.closest("svg, :disabled, .choice label:has(:disabled)"))
    .filter((element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((element) => {
      const style = getComputedStyle(element);
      const [ink, ground] = [light(style.color), light(behind(element))];
      const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
      return { text: element.textContent.slice(0, 40), size: parseFloat(style.fontSize), contrast };
    });
  return { ground: light(getComputedStyle(document.body).backgroundColor), texts };
}"""
"""Luminance of the page's ground, and the contrast of every visible text with what lies behind it."""


async def _style(page: Page, selector: str, name: str) -> Any:
    return await page.evaluate(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}")


async def _all(page: Page, name: str) -> set[str]:
    values = f"Array.from(document.querySelectorAll('body, body *'), e => getComputedStyle(e).{name})"
    return set(await page.evaluate(values))


async def _sizes(page: Page) -> list[float]:
    return sorted(float(size.removesuffix("px")) for size in await _all(page, "fontSize"))
