"""Settings of a router that may change between two rounds: one holder, swapped as a whole."""

from __future__ import annotations

from specray.config import RouterConfig, SpeculationConfig


class Settings:
    """Sections of the configuration in force; its readers keep the holder, not what it holds."""

    def __init__(self, router: RouterConfig, speculation: SpeculationConfig) -> None:
        self._sections = router, speculation

    @property
    def router(self) -> RouterConfig:
        return self._sections[0]

    @property
    def speculation(self) -> SpeculationConfig:
        return self._sections[1]

    @property
    def stream_interval_s(self) -> float:
        """Least seconds between two chunks of a stream."""
        return self.router.stream_interval_ms / 1e3

    def swap(self, router: RouterConfig, speculation: SpeculationConfig) -> None:
        """Brings other sections into force, both at once."""
        self._sections = router, speculation
