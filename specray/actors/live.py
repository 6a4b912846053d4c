"""Live values of one replica: from Serve's ``user_config``, from ``specray reload``, and stored for the next.

Serve takes a replica whose ``user_config`` changes out of its routing for a moment. So ``specray reload``
calls the replicas themselves, and leaves the values in the cluster's key-value store, where replicas that
start later find them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ray.experimental import internal_kv

from specray.config import Config
from specray.config.live import LiveConfig, Values
from specray.errors import ConfigError
from specray.requests import AdapterRef

logger = logging.getLogger(__name__)

_NAMESPACE: Final = "specray"


class LiveReplica:
    """Takes live values for one replica, one after the other, and never half of them.

    Args:
        live: holder of the configuration that this replica started with.
        store: key of the stored values; None: the service is not reloaded, Serve alone brings values.
        apply: brings a configuration into force beyond the listeners of ``live``; None: there is nothing.
    """

    def __init__(
        self,
        live: LiveConfig,
        *,
        store: str | None = None,
        apply: Callable[[Config], Awaitable[None]] | None = None,
    ) -> None:
        self._live = live
        self._store = store
        self._apply = apply
        self._has_begun = False
        self._turn = asyncio.Lock()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Takes Serve's values; stored ones take precedence.

        Raises:
            ConfigError: a value is wrong, and the replica has not served yet. Later the error is logged and
                the old values stay in force: Serve would end a replica that raises, with its target.
        """
        is_first, self._has_begun = not self._has_begun, True
        try:
            values = None if self._store is None else await asyncio.to_thread(read_stored, self._store)
            await self.take(user_config if values is None else values)
        except ConfigError as error:
            if is_first:
                raise
            logger.error("user_config is refused, the values before stay in force: %s", error)

    async def take(self, values: Mapping[str, Any]) -> str:
        """Brings values into force over those of the start, and returns the digest of all in force.

        Raises:
            ConfigError: one is unknown, not live or not allowed; nothing has changed.
        """
        async with self._turn:
            found = self._live.set(values)
            if found and self._apply is not None:
                await self._apply(self._live.now)
            for change in found:
                logger.info("changed while serving: %s", change)
            return self._live.digest


def read_stored(key: str) -> Values | None:
    """The live values of the last ``specray reload``; None: there was none. Asks Ray, and so blocks."""
    text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    if text is None:
        return None
    values: Values = json.loads(text)
    return values


def write_stored(key: str, values: Values, *, is_new: bool = False) -> bool:
    """Writes what a key stands for; with ``is_new`` only if it stands for nothing. Returns whether it did."""
    was_there = internal_kv._internal_kv_put(
        key, json.dumps(values), overwrite=not is_new, namespace=_NAMESPACE
    )
    return not (is_new and was_there)


def forget_stored(key: str) -> None:
    internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def _values_of(ref: AdapterRef) -> Values:
    return {"digest": ref.digest.hex(), "folder": ref.folder, "is_pinned": ref.is_pinned}


class AdapterNames:
    """What adapters' names stand for, in the cluster's key-value store: each name has a key of its own.

    Every change sets a mark, so that who reads again and finds the same mark need not read the names.

    Args:
        store: key of the service; the names of another service are others.
    """

    def __init__(self, store: str) -> None:
        self._prefix = f"{store}/adapters/"
        self._mark_key = f"{store}/adapters-mark"
        self._read_mark: Values | None = None
        self._known: dict[str, AdapterRef] = {}

    async def read(self) -> dict[str, AdapterRef]:
        return await asyncio.to_thread(self._read)

    async def write(self, ref: AdapterRef) -> None:
        await asyncio.to_thread(write_stored, self._prefix + ref.name, _values_of(ref))
        await asyncio.to_thread(self._mark)

    async def claim(self, ref: AdapterRef) -> bool:
        """Asks the cluster's store, which gives a name to one of all who claim it: whether it is this one."""
        is_new = await asyncio.to_thread(write_stored, self._prefix + ref.name, _values_of(ref), is_new=True)
        if is_new:
            await asyncio.to_thread(self._mark)
        return is_new

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(forget_stored, self._prefix + name)
        await asyncio.to_thread(self._mark)

    def forget(self) -> None:
        """Forgets all names. Asks Ray, and so blocks."""
        for key in (*self._keys(), self._mark_key):
            forget_stored(key)

    def _mark(self) -> None:
        write_stored(self._mark_key, {"mark": secrets.token_hex(8)})

    def _keys(self) -> list[str]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [key.decode() if isinstance(key, bytes) else key for key in keys]

    def _read(self) -> dict[str, AdapterRef]:
        # Before the names: what changes meanwhile sets another mark.
        mark = read_stored(self._mark_key)
        if mark is None or mark == self._read_mark:
            return dict(self._known)
        found: dict[str, AdapterRef] = {}
        for key in self._keys():
            if (values := read_stored(key)) is not None:
                name = key.removeprefix(self._prefix)
                digest = bytes.fromhex(values["digest"])
                found[name] = AdapterRef(name, digest, values["folder"], values["is_pinned"])
        self._known, self._read_mark = found, mark
        return dict(found)
