"""Makes `pytest` in a checkout test this checkout: refuses to run where `loudfail` is missing or is another copy (an installed wheel, say)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PACKAGES = ("harness", "invariants", "golden", "trainer")


def pytest_configure(config: pytest.Config) -> None:
    """Compare where the four packages are imported from with this folder.

    Raises:
        pytest.UsageError: one of them is not this checkout's.
    """
    cure = f"run `pip install --no-deps -e {HERE}`, or ci/test, which sets everything up"
    for name in PACKAGES:
        try:
            spec = importlib.util.find_spec(f"loudfail.{name}")
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise pytest.UsageError(f"loudfail.{name} is not installed; {cure}")
        mine = HERE / name / "__init__.py"
        if not os.path.samefile(spec.origin, mine):
            raise pytest.UsageError(f"loudfail.{name} is imported from {spec.origin}, not from this checkout ({mine}); {cure}")
