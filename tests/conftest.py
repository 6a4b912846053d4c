"""What must be said before anything else of the tests imports gRPC or starts a Ray, and who runs what.

Importing the package says what it asks of gRPC, as Ray does.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from specray.serving.own_ray.ends import end_without_destructors

# No test fetches a model: pip finds nothing but what a test offers it.
os.environ |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
    os.environ.pop(name, None)
# Several Rays come and go in the process that runs all tests.
end_without_destructors()
# Collecting tests makes many objects that stay: to look for garbage among them is in vain.
gc.disable()
# A machine with other work draws slowly, which is no fault.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

STARTS_RAY = ("tests/e2e/", "tests/cluster/test_target_nodes.py")
"""Tests that have Ray processes of their own; ``make test`` looks for them nowhere else."""
PACKAGES_OF_ONE_SERVICE = "tests/e2e/"
"""Folder whose subfolders have one service each, for all their files."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (``-n``): the tests of a file, or of a folder with one service, are one worker's.

    So no service starts twice, and a worker has at most one; each has a Ray and ports of its own.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByService(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            folder = path.rpartition("/")[0]
            return folder if folder.startswith(PACKAGES_OF_ONE_SERVICE) else path

    # Files in their order, in which those that start a Ray, and take longest, come first.
    config.option.loadscopereorder = False
    return ByService(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        starts_ray = item.get_closest_marker("cluster") is not None
        if starts_ray is not item.nodeid.startswith(STARTS_RAY):
            raise pytest.UsageError(
                f"{item.nodeid}: 'cluster' is for the tests of {STARTS_RAY}, and all of them"
            )
    long_files = {_file_of(item) for item in items if item.get_closest_marker("slow") is not None}
    # What takes long begins first: no worker is left with it when the others have nothing more to do.
    items.sort(key=lambda item: (not item.nodeid.startswith(STARTS_RAY), _file_of(item) not in long_files))


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_finish() -> None:
    """Lets collections of garbage pass by all that lives to the end: modules and ten thousand tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
