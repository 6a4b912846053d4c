"""Starts the service of all tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray import serve

from specray.actors import pair
from specray.config import Config
from specray.demo.paths import demo_target_path
from tests.e2e.ranks.service import TENSOR_PARALLEL_SIZE
from tests.e2e.service import Service, started


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    # Ranks are started many times here.
    target = {"profile_s": 0, "tensor_parallel_size": TENSOR_PARALLEL_SIZE}
    # The heads of the embedded draft, five, are not to be shared by two ranks; those of the target are.
    draft = {"model": str(demo_target_path()), "tensor_parallel_size": TENSOR_PARALLEL_SIZE, "profile_s": 0}
    router = {"verify_timeout_s": 3.0, "drain_timeout_s": 60.0}
    make_draft = pair.draft_deployment

    def one_version(config: Config) -> serve.Deployment:
        return make_draft(config).options(version="of these tests", _internal=True)

    with pytest.MonkeyPatch.context() as patch:
        # Serve replaces all whose code may be new; the draft's ranks need not start with another Router.
        patch.setattr(pair, "draft_deployment", one_version)
        with started(target=target, draft=draft, router=router, speculation={"overlap": "serial"}) as service:
            yield service
