"""Limits of the served model, as the router reports them."""

from __future__ import annotations

from specray.config import Config
from specray.config.live import LiveConfig
from specray.interfaces import RouterClient
from specray.requests import ServiceInfo
from specray.serving.admission.api_keys import level_of
from specray.serving.admission.capacity import max_requests
from specray.serving.readiness import answer_within
from specray.serving.validation import MAX_CHOICES, Limits
from specray.tokenization import Tokenizer

INFO_TIMEOUT_S = 30.0
_BYTES_PER_TOKEN = 64
"""Bytes of a body per token of the context: text has 3 to 6, escaped and in JSON."""


class ServiceLimits:
    """The limits of the service of ``client``; the router is asked once, since its own do not change."""

    def __init__(self, client: RouterClient, tokenizer: Tokenizer, config: Config | LiveConfig) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._config = LiveConfig.of(config)
        self._info: ServiceInfo | None = None

    async def info(self) -> ServiceInfo:
        """Asks the router again: its draft may have changed. Raises EngineLostError after a timeout."""
        async with answer_within(INFO_TIMEOUT_S, "answer of the router"):
            self._info = await self._client.service_info()
        return self._info

    @property
    def max_chat_bytes(self) -> int:
        """Bytes of the longest body of a single prompt: what the context could hold at most."""
        most = self._config.now.http.max_body_bytes
        if self._info is None:
            return most
        # Bytes of what is in a body beside its prompt.
        return min(most, 1024 * 1024 + self._info.max_model_len * _BYTES_PER_TOKEN)

    async def known_info(self) -> ServiceInfo:
        """What the router has told once; raises like :meth:`info`."""
        return self._info or await self.info()

    async def get(self) -> Limits:
        info = await self.known_info()
        config = self._config.now
        return Limits(
            model_name=config.model_name,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=tuple(
                token_id for token_id in self._tokenizer.eos_token_ids if token_id < info.vocab_size
            ),
            verification=config.speculation.verification,
            has_draft_model=config.draft.has_model,
            cuts_max_tokens=config.ingress.excess_max_tokens == "cut",
            max_choices=min(MAX_CHOICES, max_requests(config)),
            level=level_of(config.router.slo),
        )
