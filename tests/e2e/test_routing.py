"""Two Routers: a prompt goes where it has been computed, and elsewhere when that Router dies."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from specray.bench.testbed.beds import Bed, open_bed
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.parts import PartRole, of_role
from specray.config import parse_config
from tests.e2e.calls import complete, eventually, metric, samples, streamed, text_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True, "temperature": 0}


def prompt(number: int) -> str:
    return "\n".join(f"def step_{number}_{line}(x):\n    return x + {line}\n" for line in range(8))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bed]:
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "num_threads": 1,
        "profile_s": 0.1,
    }
    config = parse_config(
        {
            "target": engine,
            "draft": {**engine, "num_replicas": 0},
            "router": {"num_replicas": 2, "start_timeout_s": 120},
        }
    )
    async with open_bed(BedKind.PROCESSES, config, directory=tmp_path_factory.mktemp("bed")) as bed:
        yield bed


@pytest_asyncio.fixture(loop_scope="module")
async def http(bed: Bed) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(bed.url, timeout=aiohttp.ClientTimeout(total=120)) as http:
        yield http


async def num_cached(http: aiohttp.ClientSession, **fields: Any) -> int:
    answer = await complete(http, max_tokens=2, **fields)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_prompts_are_found_again_however_many_go_between(http: aiohttp.ClientSession) -> None:
    texts = [prompt(number) for number in range(6)]
    assert [await num_cached(http, prompt=text) for text in texts] == [0] * 6
    answer = await complete(http, prompt=texts[0], max_tokens=2)
    most = (answer["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert most > 64
    for text in (*texts, *texts):
        found = await num_cached(http, prompt=text)
        assert found > 64, "a prompt of the same length, up to its last unit"
    assert await metric(http, "specray_routing_total", reason="prefix") >= 13
    assert await metric(http, "specray_routing_mispredicted_tokens_total") == 0


async def test_salts_have_nothing_in_common(http: aiohttp.ClientSession) -> None:
    assert [await num_cached(http, prompt=prompt(9), cache_salt=salt) for salt in "aab"] == [
        0,
        pytest.approx(128, abs=64),
        0,
    ]


async def test_both_routers_have_work_where_nothing_is_known(http: aiohttp.ClientSession) -> None:
    for number in range(20, 30):
        await num_cached(http, prompt=prompt(number))
    served = {
        sample.labels["replica"]: sample.value
        for sample in await samples(http)
        if sample.name == "specray_prompt_tokens_total"
    }
    assert len(served) == 2 and min(served.values()) > 0


async def test_an_output_goes_on_elsewhere_when_the_warm_router_dies(
    bed: Bed, http: aiohttp.ClientSession
) -> None:
    expected = await text_of(http, prompt=prompt(40), **LONG)
    routers = of_role(await bed.control.parts(), PartRole.ROUTER)
    assert len(routers) == 2
    before = {
        router.replica: await metric(http, "specray_output_tokens_total", replica=router.replica)
        for router in routers
    }

    async def kill() -> None:
        after = {name: await metric(http, "specray_output_tokens_total", replica=name) for name in before}
        [warm] = [router for router in routers if after[router.replica] > before[router.replica]]
        os.kill(warm.pid, signal.SIGKILL)

    assert await streamed(http, kill, prompt=prompt(40), **LONG) == (expected, None)
    assert await text_of(http, prompt=prompt(40), **LONG) == expected

    async def has_two() -> bool:
        return len(of_role(await bed.control.parts(), PartRole.ROUTER)) == 2

    await eventually(has_two, "the Router that died is replaced", deadline_s=120)
    assert await text_of(http, prompt=prompt(40), **LONG) == expected
