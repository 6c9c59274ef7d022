"""Comparisons that invariants use. Each one measures, records what it measured, and raises `Violation` past its bound.

A measurement is recorded whether it passes or not, so that a report can show how far a clean port stays below each bound and how far each
fault goes above it. Bounds are relative to the *effect* that is tested (``scale``), never to something larger that would hide it.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loudfail.harness.violation import Violation

if TYPE_CHECKING:
    import torch


@dataclass
class Measurements:
    """What the comparisons of one run of one invariant measured: the worst ``got`` and its bound, and how many there were."""

    count: int = 0
    got: float | None = None
    bound: float | None = None
    where: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def add(self, got: float, bound: float, where: str) -> None:
        self.count += 1
        load = math.inf if bound == 0 and got > 0 else (got / bound if bound else 0.0)
        worst = -1.0 if self.got is None else (math.inf if self.bound == 0 and self.got > 0 else (self.got / self.bound if self.bound else 0.0))
        if not load <= worst:  # NaN counts as worse
            self.got, self.bound, self.where = got, bound, where


_current: contextvars.ContextVar[Measurements | None] = contextvars.ContextVar("loudfail_measurements", default=None)


@contextlib.contextmanager
def measuring() -> Iterator[Measurements]:
    """Collect what the comparisons inside measure."""
    measurements = Measurements()
    token = _current.set(measurements)
    try:
        yield measurements
    finally:
        _current.reset(token)


def note(got: float, bound: float, where: str = "") -> None:
    """Record a measurement without judging it."""
    if (measurements := _current.get()) is not None:
        measurements.add(float(got), float(bound), where)


def chart(key: str, value: float) -> None:
    """Keep one named number for the report (for example a parity per layer, projection and degree); the largest value of a key stays."""
    if (measurements := _current.get()) is not None:
        measurements.values[key] = max(value, measurements.values.get(key, -math.inf))


def relative_error(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | float | None = None) -> float:
    """``‖got − want‖ / ‖scale‖`` in float64; ``scale`` defaults to ``want``. NaN or infinity anywhere gives infinity."""
    import torch

    difference = torch.linalg.vector_norm(got.detach().double().cpu() - want.detach().double().cpu()).item()
    if scale is None:
        scale = want
    size = float(scale) if isinstance(scale, int | float) else torch.linalg.vector_norm(scale.detach().double().cpu()).item()
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return 0.0 if difference == 0 else (math.inf if size == 0 else difference / size)


def require(condition: bool, got: object, want: object, where: str = "") -> None:
    """An exact claim about something that is no tensor."""
    note(0.0 if condition else 1.0, 0.0, where)
    if not condition:
        raise Violation(got=got, want=want, bound=0, where=where)


def require_close(got: torch.Tensor, want: torch.Tensor, *, bound: float, where: str, scale: torch.Tensor | float | None = None) -> float:
    """``relative_error(got, want, scale) ≤ bound``; the error is returned.

    Raises:
        Violation: the shapes differ, a value is not finite, or the error is above ``bound``.
    """
    if tuple(got.shape) != tuple(want.shape):
        raise Violation(got=f"shape {tuple(got.shape)}", want=f"shape {tuple(want.shape)}", bound=0, where=where)
    error = relative_error(got, want, scale)
    note(error, bound, where)
    if not error <= bound:
        raise Violation(got=error, want="relative error within the bound", bound=bound, where=where)
    return error


def require_each_close(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], *, bound: float, where: str, scale: Mapping[str, torch.Tensor] | None = None
) -> None:
    """`require_close` for each name (modality, projection, …); the names must be the same. The worst one is reported."""
    missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    require(not missing and not extra, got=f"missing {missing[:8]}, unexpected {extra[:8]}", want=f"the {len(want)} names of the oracle", where=where)
    worst: Violation | None = None
    for name in want:
        try:
            require_close(got[name], want[name], bound=bound, where=f"{where}, {name}", scale=None if scale is None else scale[name])
        except Violation as violation:
            if worst is None or not _severity(violation) <= _severity(worst):
                worst = violation
    if worst is not None:
        raise worst


def require_equal(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
    """Bitwise equality: dtype, shape and every element."""
    import torch

    if got.dtype != want.dtype or tuple(got.shape) != tuple(want.shape):
        raise Violation(got=f"{got.dtype} {tuple(got.shape)}", want=f"{want.dtype} {tuple(want.shape)}", bound=0, where=where)
    differing = int((got.detach().cpu() != want.detach().cpu()).sum())
    note(differing, 0, where)
    if differing or not torch.equal(got.detach().cpu(), want.detach().cpu()):
        raise Violation(got=f"{differing} of {want.numel()} elements differ", want="bitwise equal", bound=0, where=where)


def require_at_least(got: float, bound: float, where: str) -> None:
    """``got ≥ bound``: an effect that must be there is there. The margin recorded is ``bound / got``, so that smaller is better as elsewhere."""
    note(math.inf if not got > 0 else bound / got, 1.0, where)
    if not got >= bound:
        raise Violation(got=float(got), want=f"at least {bound:.4g}", bound=bound, where=where)


def _severity(violation: Violation) -> float:
    return violation.got if isinstance(violation.got, float) else math.inf
