"""What a process imports before it is ready decides how fast a service starts and a lost rank comes back."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARY = {"transformers", "torch._dynamo", "torch.distributed.tensor"}
"""What takes longer to import than everything else together; the first brings parts of the others."""


def imported(code: str, *, of: set[str]) -> set[str]:
    """Which of these modules a fresh process has imported when it has run the code."""
    told = f"import sys\n{code}\nprint(*sorted(set({sorted(of)!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", told], check=True, timeout=120, capture_output=True, text=True
    )
    return set(done.stdout.split())


def build(engine: str) -> str:
    return (
        "from specray.config import Config\n"
        f"from specray.engine.build import build_{engine}_engine\n"
        "config = Config.model_validate({'target': {'profile_s': 0}, 'draft': {'profile_s': 0}})\n"
        f"build_{engine}_engine(config).close()"
    )


@pytest.mark.slow
def test_engines_of_the_embedded_pair_are_built_without_the_library() -> None:
    code = f"{build('draft')}\n{build('target')}"
    assert imported(code, of=LIBRARY | {"torch"}) == {"torch"}


@pytest.mark.slow
def test_embedded_pair_is_checked_without_torch() -> None:
    code = (
        "from specray.config import Config\n"
        "from specray.serving.launch import check_models\n"
        "check_models(Config())"
    )
    assert imported(code, of=LIBRARY | {"torch", "numba", "specray.engine.preflight"}) == {
        "specray.engine.preflight"
    }


@pytest.mark.slow
def test_library_is_seen_where_it_is_imported() -> None:
    assert imported("import transformers", of=LIBRARY) >= {"transformers"}
