"""Processes of a test that have the engine imported from the start."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def preloaded_context() -> ForkServerContext:
    """Forks from one process that has imported torch and transformers, which is most of a rank's start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specray.engine.build", "specray.engine.model.library"])
    return context
