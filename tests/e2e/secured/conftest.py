"""Starts the service of all tests of the whole path: one with keys, certificates and a secret."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from specray.serving.admission.api_keys import key_hash
from tests.browser import Page, browser
from tests.e2e.calls import DEADLINE_S
from tests.e2e.service import Service, started


@pytest.fixture(scope="package")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.e2e.secured.access import write_peers  # Skips what asks for it without cryptography.

    directory = tmp_path_factory.mktemp("peers")
    write_peers(directory)
    return directory


@pytest.fixture(scope="package")
def service(directory: Path) -> Iterator[Service]:
    from tests.e2e.secured.access import KEY, peer

    keys = [{"name": "team-a", "sha256": key_hash(KEY), "can_observe": True}]
    engine = {"profile_s": 0}
    rpc = peer(directory, "ours").model_dump()
    access = {"keys": keys, "open_paths": ["/lab"]}
    with started(target=engine, draft=engine, auth=access, rpc=rpc) as service:
        yield service


@pytest.fixture
async def http(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that shows the service's key."""
    from tests.e2e.secured.access import HEADERS

    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(service.url, headers=HEADERS, timeout=timeout) as session:
        yield session


@pytest.fixture
async def page(service: Service, tmp_path: Path) -> AsyncIterator[Page]:
    """The lab page in a browser of 1300 by 900 pixels, with the key of the service in its field."""
    from tests.e2e.secured.access import KEY

    async with browser(tmp_path) as page:
        await page.open(f"{service.url}/lab/", width=1300, height=900)
        await page.until("document.getElementById('problem').textContent !== ''", "a key is asked for")
        # The browser's own note of the call without a key.
        assert len(page.problems) == 1 and "401" in page.problems.pop()
        await page.evaluate(f"document.getElementById('key').value = {json.dumps(KEY)}")
        yield page
