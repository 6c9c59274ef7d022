"""Claims whose outcome is known for each port of `toyports`."""

from hypothesis import strategies as st

from loudfail.harness.compare import require, require_close
from loudfail.harness.port import Port
from loudfail.harness.registry import invariant


@invariant("objective", examples=5, calls=lambda _: st.integers(1, 9))
def grid_descends(port: Port, calls: int) -> None:
    """The grid of each modality descends from 1 to 0."""
    for modality, grid in port.grid(calls).items():
        require(bool((grid[1:] < grid[:-1]).all()), got=grid.tolist(), want="descending", where=modality)


@invariant("objective")
def grid_is_uniform(port: Port) -> None:
    """The grid is uniform."""
    import torch

    for modality, grid in port.grid(4).items():
        require_close(grid, torch.linspace(1, 0, 5), bound=1e-6, where=modality)


@invariant("vendor")
def vendor_agrees(port: Port) -> None:
    """The vendor's grid is the port's."""
    require(False, got="a grid", want="none", where="never reached on ports without a vendor")
