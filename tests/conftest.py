"""Fixtures of more than one test file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from loudfail.harness import plugin, registry

HERE = Path(__file__).parent


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@pytest.fixture
def toysuite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`toysuite` in the place of Loudfail's invariants and faults, in this process, for one test."""
    monkeypatch.setattr(registry, "INVARIANTS_PACKAGE", "toysuite")
    monkeypatch.setattr(registry, "FAULTS_PACKAGE", "toysuite.faults")
    monkeypatch.setattr(registry, "_invariants", {})
    monkeypatch.setattr(registry, "_faults", {})
    plugin._folders.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "toysuite"]:
        del sys.modules[name]  # importing them again registers them again
    yield
    plugin._folders.cache_clear()


@pytest.fixture
def loudfail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], toysuite: None) -> Callable[..., Ran]:
    """Run the command line in this process, in an empty folder, on `toysuite`."""
    from loudfail.harness.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    # pytest.main inside pytest: plugins of the outer run that were given on its command line do not concern the inner one.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*arguments: str | Path) -> Ran:
        return _run(main, [str(one) for one in arguments], capfd)

    return run


def _run(main: Callable[[Sequence[str]], int], arguments: list[str], capfd: pytest.CaptureFixture[str]) -> Ran:
    capfd.readouterr()
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capfd.readouterr()
    return Ran(code, out, err)


def one_thread(name: str) -> Iterator[object]:
    """A tiny port on one thread: two threads spin against each other on two busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    port = registry.find_port(name)()
    yield port
    port.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def browser() -> str:
    """A headless browser's path."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)
    if found is None and os.environ.get("CI"):
        pytest.fail("no Chromium found; install it (Debian: apt-get install chromium)")
    if found is None:
        # On a developer's machine only: in CI its absence is the failure above.
        pytest.skip("no Chromium found, so the page was not rendered; install it (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="session")
def h3() -> Iterator[object]:
    """The tiny H3 port, shared by all files."""
    yield from one_thread("loudfail.harness.ports.h3:H3")


@pytest.fixture(scope="session")
def ltx2() -> Iterator[object]:
    """The tiny LTX-2 port, shared by all files."""
    yield from one_thread("loudfail.harness.ports.ltx2:LTX2")
