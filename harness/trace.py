"""A trace: named tensors and numbers in the order in which they arose, so that the first one that differs can be named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Trace(Mapping[str, "torch.Tensor"]):
    """Ordered probes of one run. Names are unique; a tensor is detached and copied to the CPU when it is added."""

    def __init__(self) -> None:
        self._probes: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor | float | int) -> None:
        """Append a probe.

        Raises:
            ValueError: a probe of that name is already there.
        """
        import torch

        if name in self._probes:
            raise ValueError(f"probe {name!r} is already in the trace")
        self._probes[name] = torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()

    def add_each(self, prefix: str, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.add(f"{prefix}.{name}", value)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._probes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._probes)

    def __len__(self) -> int:
        return len(self._probes)
