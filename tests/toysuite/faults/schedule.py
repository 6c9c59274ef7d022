"""Faults with a known outcome."""

from collections.abc import Iterator

from loudfail.harness.inject import replace
from loudfail.harness.port import Port
from loudfail.harness.registry import fault


@fault("objective", catches=["schedule::grid_is_uniform"])
def squared_grid(port: Port) -> Iterator[None]:
    """The grid is squared."""
    with replace(port, "grid", lambda original: lambda calls: {m: g**2 for m, g in original(calls).items()}):
        yield


@fault("objective", catches=["schedule::grid_descends"])
def unnoticed(port: Port) -> Iterator[None]:
    """Named for a check that does not see it: escapes."""
    with replace(port, "grid", lambda original: lambda calls: {m: g**2 for m, g in original(calls).items()}):
        yield


@fault("objective", catches=["schedule::grid_descends"])
def never_fires(port: Port) -> Iterator[None]:
    """Breaks what nobody calls: inert."""
    with replace(port, "close", lambda original: original):
        yield


@fault("objective", catches=["schedule::grid_descends"])
def raises(port: Port) -> Iterator[None]:
    """Crashes instead of being caught."""

    def broken(calls: int) -> None:
        raise RuntimeError("broken on purpose")

    with replace(port, "grid", lambda original: broken):
        yield


@fault("vendor", catches=["schedule::vendor_agrees"])
def not_for_this_port(port: Port) -> Iterator[None]:
    """Needs a seam that no toy has."""
    yield
