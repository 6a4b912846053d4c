"""Adapters by name: what a request's model and adapter stand for, and loading and unloading them by name.

Names are kept in a store that all Ingresses see; which bytes a name stands for is what the target has read.
Engines know digests alone, and Routers load what requests bring: what a process has lost, it loads again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from specray.adapter_folders import ADAPTER_NAME, is_adapter_name
from specray.config.adapters import AdaptersConfig
from specray.errors import InvalidRequestError, ModelNotFoundError, shown
from specray.interfaces import AdapterManager
from specray.requests import AdapterRef
from specray.types import ADAPTER

FRESH_S: Final = 1.0
"""Seconds for which what was read of the store counts; another Ingress may have changed it meanwhile."""
_UNLOADED: Final = "."
"""What a name of the configuration begins with in the store once it was unloaded; no adapter's does."""
MAX_NAMES: Final = 1024
"""Most names of adapters of a service."""


class AdapterStore(Protocol):
    """Names that all Ingresses of a service see, and that outlive each of them."""

    async def read(self) -> dict[str, AdapterRef]: ...

    async def write(self, ref: AdapterRef) -> None:
        """Lets a name stand for an adapter, in place of what it stood for."""
        ...

    async def claim(self, ref: AdapterRef) -> bool:
        """Lets a free name stand for an adapter; of several who claim it, one gets True."""
        ...

    async def remove(self, name: str) -> None: ...


class OwnStore:
    """A store of this process alone."""

    def __init__(self) -> None:
        self.refs: dict[str, AdapterRef] = {}

    async def read(self) -> dict[str, AdapterRef]:
        return dict(self.refs)

    async def write(self, ref: AdapterRef) -> None:
        self.refs[ref.name] = ref

    async def claim(self, ref: AdapterRef) -> bool:
        return self.refs.setdefault(ref.name, ref) is ref

    async def remove(self, name: str) -> None:
        self.refs.pop(name, None)


class AdapterCatalog:
    """The adapters of a service, by name.

    Args:
        config: None: there are none.
        base: name of the model without an adapter.
        aliases: further names of it.
        loader: the Routers.
        store: default: one of this process alone.
        is_shared: there are other Ingresses: a change is answered once all have seen it.
    """

    def __init__(
        self,
        config: AdaptersConfig | None,
        *,
        base: str,
        aliases: Sequence[str] = (),
        loader: AdapterManager | None,
        store: AdapterStore | None = None,
        is_shared: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._base = base
        self._bases = (base, *aliases)
        self._loader = loader
        self._store = store or OwnStore()
        self._is_shared = is_shared
        self._monotonic = monotonic
        self._known: dict[str, AdapterRef] = {}
        self._unloaded: frozenset[str] = frozenset()
        """Names of the configuration that were unloaded: only a load brings them back."""
        self._read_s: float | None = None
        self._reading = asyncio.Lock()
        self._turn = asyncio.Lock()

    async def refs(self) -> list[AdapterRef]:
        """All that have a name, also those that are loaded at the start, by name."""
        await self._refresh()
        for name in () if self._config is None else self._config.preload:
            if name not in self._known and name not in self._unloaded:
                await self._loaded(name, name)
        return [self._known[name] for name in sorted(self._known)]

    async def find(self, model: str | None, adapter: str = "") -> AdapterRef | None:
        """What a request's model and adapter stand for; None: the base.

        Raises:
            ModelNotFoundError: there is no such model or adapter; the message names those that there are.
            InvalidRequestError: both name different adapters, or the adapter cannot be loaded.
            OverloadedError, EngineLostError: it could not be loaded now.
        """
        named = ""
        if model and model not in self._bases:
            base, colon, rest = model.partition(":")
            named = rest if colon and base in self._bases else model
        if named and adapter and named != adapter:
            raise InvalidRequestError(
                f"adapter is {shown(adapter)} and model names {shown(named)}; allowed: one of them",
                field=ADAPTER,
            )
        name = named or adapter
        if not name:
            return None
        if self._config is not None and is_adapter_name(name):
            async with self._reading:
                if not self._is_fresh:
                    await self._refresh()
            if (ref := self._known.get(name) or await self._found_first(name)) is not None:
                return ref
        field, value = ("model", model) if named else (ADAPTER, adapter)
        raise self._unknown(field, str(value))

    def check_base(self, model: str | None) -> None:
        """Raises ModelNotFoundError where ``model`` is given, and is not the one that adapters change."""
        if model is not None and model not in self._bases:
            names = ", ".join(map(repr, self._bases))
            raise ModelNotFoundError(
                f"model {shown(model)} is not served here; allowed: {names}", field="model"
            )

    async def load(self, name: str, folder: str, *, in_place: bool = False) -> AdapterRef:
        """Lets ``name`` stand for what lies in ``folder`` now.

        Args:
            in_place: the name may stand for other bytes already; requests that run keep those.

        Raises:
            InvalidRequestError: the name or the adapter is not allowed, or the name is taken; nothing has
                changed.
            OverloadedError, EngineLostError: it could not be loaded now.
        """
        if self._config is None:
            raise InvalidRequestError("this service has no adapters; set target.adapters", field="lora_name")
        if not is_adapter_name(name) or name in self._bases:
            raise InvalidRequestError(
                f"lora_name is {shown(name)}; allowed: what matches {ADAPTER_NAME}, but not the model's name",
                field="lora_name",
            )
        await self._refresh()
        self._check_free(name, in_place=in_place)
        try:
            ref = await self._read(name, folder)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), field="lora_path") from None
        await self._refresh()
        known = self._known.get(name)
        if in_place:
            await self._store.write(ref)
        elif not await self._store.claim(ref):
            # Another load of the name, maybe of another Ingress, has ended meanwhile.
            await self._refresh()
            await self._let_go(ref)
            raise self._taken(name)
        await self._named(ref)
        if known is not None:
            await self._let_go(known)
        await self._settle()
        return ref

    async def unload(self, name: str) -> AdapterRef:
        """Lets a name stand for nothing; requests that run keep its adapter.

        Raises:
            ModelNotFoundError: there is no such adapter.
            EngineLostError: no Router answers; the name is gone.
        """
        await self._refresh()
        ref = self._known.pop(name, None)
        if ref is None:
            raise self._unknown("lora_name", name)
        if self._is_configured(name):
            await self._store.write(AdapterRef(f"{_UNLOADED}{name}", b"", ""))
        await self._store.remove(name)
        await self._let_go(ref)
        await self._settle()
        return ref

    @property
    def _is_fresh(self) -> bool:
        return self._read_s is not None and self._monotonic() < self._read_s + FRESH_S

    async def _refresh(self) -> None:
        if self._config is not None:
            refs = await self._store.read()
            self._known = {name: ref for name, ref in refs.items() if not name.startswith(_UNLOADED)}
            self._unloaded = frozenset(name.removeprefix(_UNLOADED) for name in refs.keys() - self._known)
            self._read_s = self._monotonic()

    def _is_configured(self, name: str) -> bool:
        return self._config is not None and name in (*self._config.preload, *self._config.pinned)

    def _check_free(self, name: str, *, in_place: bool) -> None:
        """Raises InvalidRequestError where the name may not stand for another adapter."""
        if name in self._known:
            if not in_place:
                raise self._taken(name)
        elif len(self._known) >= MAX_NAMES:
            raise InvalidRequestError(
                f"{len(self._known)} adapters have names; allowed: {MAX_NAMES}", field="lora_name"
            )

    async def _found_first(self, name: str) -> AdapterRef | None:
        """The adapter in the folder of that name, where its first request may load it."""
        assert self._config is not None
        is_wanted = self._is_configured(name) and name not in self._unloaded
        if not (is_wanted or self._config.autoload):
            return None
        async with self._turn:
            await self._refresh()
            if name in self._known or len(self._known) >= MAX_NAMES:
                return self._known.get(name)
            try:
                return await self._loaded(name, name)
            except InvalidRequestError as error:
                if is_wanted:
                    raise
                raise ModelNotFoundError(
                    f"model {shown(name)} is not served here: {error}", field="model"
                ) from None

    async def _loaded(self, name: str, folder: str) -> AdapterRef:
        """Loads what lies in a folder, and lets the name stand for it."""
        ref = await self._read(name, folder)
        if not await self._store.claim(ref):
            await self._refresh()
            return self._known.get(name, ref)
        await self._named(ref)
        return ref

    async def _read(self, name: str, folder: str) -> AdapterRef:
        """Loads what lies in a folder; the name does not stand for it yet."""
        assert self._config is not None and self._loader is not None
        is_pinned = name in self._config.pinned
        digest = await self._loader.load_adapter(folder, is_pinned=is_pinned)
        return AdapterRef(name, digest, folder, is_pinned)

    async def _named(self, ref: AdapterRef) -> None:
        self._known[ref.name] = ref
        if ref.name in self._unloaded:
            await self._store.remove(f"{_UNLOADED}{ref.name}")

    async def _let_go(self, ref: AdapterRef) -> None:
        """Lets an adapter leave memory, unless it has another name."""
        assert self._loader is not None
        if all(other.digest != ref.digest for other in self._known.values()):
            await self._loader.unload_adapter(ref.digest)

    async def _settle(self) -> None:
        """Waits until every Ingress has read the store again."""
        if self._is_shared:
            await asyncio.sleep(FRESH_S)

    @staticmethod
    def _taken(name: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"lora_name {name!r} is loaded; allowed: another name, or load_inplace: true", field="lora_name"
        )

    def _unknown(self, field: str, value: str) -> ModelNotFoundError:
        """``value`` names no adapter, and no model where that may name one, too."""
        models = [self._base] if field == "model" else []
        names = ", ".join(repr(name) for name in [*models, *sorted(self._known)])
        return ModelNotFoundError(
            f"{field} {shown(value)} is not served here; allowed: {names or 'none, no adapter is loaded'}",
            field=field,
        )
