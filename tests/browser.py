"""A real browser for tests: headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Path of the browser; None: this machine has none."""
DEADLINE_S = 90.0
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-port=0",
)


class Page:
    """One page. What it logs, raises and asks of the network is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.urls: list[str] = []
        """Addresses of all requests."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        message = await asyncio.wait_for(answer, DEADLINE_S)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited where it is a promise."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:1000])
        return result["result"].get("value")

    async def until(self, condition: str, what: str) -> None:
        """Waits until an expression is true."""
        end = asyncio.get_running_loop().time() + DEADLINE_S
        while not await self.evaluate(condition):
            assert asyncio.get_running_loop().time() < end, f"not within {DEADLINE_S} s: {what}"
            await asyncio.sleep(0.05)

    async def open(self, url: str, *, width: int = 1200, height: int = 900, is_dark: bool = False) -> None:
        """Loads a page, after the events are on."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        await self.prefer(is_dark=is_dark)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'", f"{url} is loaded")

    async def prefer(self, *, is_dark: bool, is_still: bool = False) -> None:
        """Sets what the user prefers: the scheme of colours, and no motion."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if is_still else "no-preference"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def size(self, width: int, height: int) -> None:
        """Sets the size of the window in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def click(self, selector: str) -> None:
        """Clicks an element where it is, as a mouse does."""
        place = await self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button=button, clickCount=1
            )

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key by its name; ``modifiers`` are bits of the protocol: 2 is Control."""
        about: dict[str, Any] = {"key": key, "code": key, "modifiers": modifiers}
        if key == "Enter":
            about |= {"windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, **about)

    async def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        """Writes the page as PNG."""
        result = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(result["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:1000])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(params["entry"])[:1000])
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Runs a browser with a profile of its own in ``folder``; yields an empty page."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_OPTIONS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(folder, process)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [entry for entry in await response.json() if entry["type"] == "page"]
            async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    await page.close()
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _port(folder: Path, process: asyncio.subprocess.Process) -> int:
    path = folder / "DevToolsActivePort"
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while not (path.exists() and path.read_text().strip()):
        assert process.returncode is None, f"the browser ended with {process.returncode}"
        assert asyncio.get_running_loop().time() < end, f"the browser did not start within {DEADLINE_S} s"
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])
