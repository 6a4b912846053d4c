"""What of a machine decides how a draft is served: features of its processor, and a GPU's driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from specray.models import machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 f16c fma sse\n", True),
        ("flags : fpu avx2 fma\n", False),
        ("flags : fpu avx2_other f16c fma\n", False),
        ("Features : fp asimd\n", False),
        ("", False),
    ],
)
def test_int8_kernels_need_three_features(
    text: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(text, "utf-8")
    assert machine.has_int8_kernels() is expected


def test_what_cannot_be_told_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "missing")
    assert not machine.has_int8_kernels()


def test_driver_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NVIDIA_CONTROL", tmp_path / "control")
    assert not machine.has_nvidia_gpu()
    (tmp_path / "control").touch()
    assert machine.has_nvidia_gpu()
