"""Names of adapters in the cluster's store: every process sees them, and reads only what has changed."""

from __future__ import annotations

from typing import Any

import pytest

from specray.actors import live as live_module
from specray.actors.live import AdapterNames
from specray.requests import AdapterRef

SQL = AdapterRef("sql", b"s" * 32, "sql")
CHAT = AdapterRef("chat", b"c" * 32, "chat-2", is_pinned=True)


class Store:
    """Ray's internal_kv in memory; keys come back as bytes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_reads = 0

    def _internal_kv_get(self, key: str, *, namespace: str) -> str | None:
        self.num_reads += 1
        return self.values.get(key)

    def _internal_kv_put(self, key: str, value: str, *, overwrite: bool, namespace: str) -> bool:
        was_there = key in self.values
        if overwrite or not was_there:
            self.values[key] = value
        return was_there

    def _internal_kv_del(self, key: str, *, namespace: str) -> None:
        self.values.pop(key, None)

    def _internal_kv_list(self, prefix: str, *, namespace: str) -> list[bytes]:
        return [key.encode() for key in self.values if key.startswith(prefix)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made: Any = Store()
    monkeypatch.setattr(live_module, "internal_kv", made)
    return made


async def test_what_one_process_writes_another_reads_and_one_read_tells_that_nothing_has_changed(
    store: Store,
) -> None:
    first, second = AdapterNames("service"), AdapterNames("service")
    assert await second.read() == {}
    await first.write(SQL)
    await first.write(CHAT)
    assert await second.read() == {"sql": SQL, "chat": CHAT}
    store.num_reads = 0
    assert await second.read() == {"sql": SQL, "chat": CHAT}
    assert store.num_reads == 1
    await second.write(AdapterRef("sql", b"2" * 32, "sql"))
    await second.remove("chat")
    assert await first.read() == await second.read() == {"sql": AdapterRef("sql", b"2" * 32, "sql")}
    # A process that starts knows them, another service has its own, and the end leaves nothing.
    assert await AdapterNames("service").read() == await first.read()
    assert await AdapterNames("service-2").read() == {}
    first.forget()
    assert store.values == {}


async def test_of_two_processes_that_claim_a_name_one_has_it(store: Store) -> None:
    first, second = AdapterNames("service"), AdapterNames("service")
    assert await first.claim(SQL)
    assert not await second.claim(AdapterRef("sql", b"2" * 32, "sql-2"))
    assert await second.read() == {"sql": SQL}
    await second.remove("sql")
    assert await second.claim(CHAT) and await second.claim(SQL)
    assert await first.read() == {"sql": SQL, "chat": CHAT}
