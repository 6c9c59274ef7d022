"""Compare a golden with another trace, probe by probe, in the order in which the numbers arose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from loudfail.golden.cases import SCORES, runs_at
from loudfail.golden.store import Golden, Probe, fingerprint
from loudfail.harness.compare import relative_error
from loudfail.harness.record import plain

if TYPE_CHECKING:
    import torch

Outcome = Literal["same", "drifted", "changed"]


@dataclass(frozen=True)
class Row:
    """One probe, then and now.

    Attributes:
        name: of the probe.
        outcome: ``same`` bit for bit, ``drifted`` inside the tolerance, or ``changed``.
        error: relative error ``‖now − then‖ / ‖then‖``; this is judged.
        tolerance: of the golden.
        spread: that it comes from.
        max_abs: largest ``|now − then|``.
        cosine: of the angle between the two; None where one of them is zero.
        bias: mean of ``now − then``, with its sign, relative to the root mean square of then.
        note: why numbers are missing: another shape or dtype, not there, not finite.
        weakest: relative effect of the weakest known fault that reaches this probe; None: none does.
        now: hash of what is there now, so that two verifications of one golden can be compared bit for bit; empty where nothing is.
    """

    name: str
    outcome: Outcome
    error: float | None = None
    tolerance: float = 0.0
    spread: float = 0.0
    max_abs: float | None = None
    cosine: float | None = None
    bias: float | None = None
    note: str = ""
    weakest: float | None = None
    now: str = ""

    def __str__(self) -> str:
        if self.note or self.error is None:
            return f"{self.name}: {self.note}"
        numbers = [f"relative {self.error:.3g}", f"tolerance {self.tolerance:.3g}", f"max abs {self.max_abs:.3g}", f"bias {self.bias:+.3g}"]
        return f"{self.name}: {', '.join(numbers)}" + (f", cosine {self.cosine:.6g}" if self.cosine is not None else "")


@dataclass
class Verification:
    """What became of one golden.

    Attributes:
        name: of the golden.
        outcome: ``same`` bit for bit; ``drifted``: something differs inside its tolerance, which passes; ``changed``: something left it, which fails.
        rows: every compared probe, in order.
        versions: package → version then and now, where they differ.
        left_out: probes that were not compared, since their degree was not run.
        message: why nothing could be compared; the outcome is ``changed`` then.
    """

    name: str
    outcome: Outcome
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    left_out: int = 0
    message: str = ""

    @property
    def first(self) -> Row | None:
        """The first probe that decides the outcome: that is not the same, or that left its tolerance."""
        return next((row for row in self.rows if row.outcome == self.outcome), None) if self.outcome != "same" else None

    def to_dict(self) -> dict[str, Any]:
        """An entry of ``goldens`` in a report: ``name``, ``outcome``, ``first`` (name), ``first_difference`` (its row), ``versions``, ``message``,
        ``left_out``, ``probes`` (a row each)."""
        first = self.first
        message = self.message or (str(first) if first else "")
        rows = [asdict(row) for row in self.rows]
        return plain(
            {
                "name": self.name,
                "outcome": self.outcome,
                "first": first.name if first else None,
                "first_difference": asdict(first) if first else None,
                "versions": self.versions,
                "message": message,
                "left_out": self.left_out,
                "probes": rows,
            }
        )


def compare(golden: Golden, now: Mapping[str, torch.Tensor], versions: Mapping[str, str], degrees: Collection[int] | None = None) -> Verification:
    """Compare a golden with a trace.

    Args:
        golden: what is right, with its tolerances.
        now: the trace that is judged.
        versions: package → version that it was made with.
        degrees: compare the probes of these tensor-parallel degrees only, and those of no degree; None for all.
    """

    def wanted(name: str) -> bool:
        if name.startswith(SCORES) and not (name in now and name in golden.tensors):
            return False
        return degrees is None or runs_at(name, degrees)

    probes = [probe for probe in golden.probes if wanted(probe.name)]
    rows = [_row(probe, golden.tensors[probe.name], now.get(probe.name)) for probe in probes]
    known = {probe.name for probe in golden.probes}
    rows += [Row(name, "changed", note="is not in the golden", now=fingerprint(now[name])) for name in now if name not in known and wanted(name)]
    outcomes = {row.outcome for row in rows}
    outcome: Outcome = "changed" if "changed" in outcomes else "drifted" if "drifted" in outcomes else "same"
    return Verification(golden.name, outcome, rows, dict(_differing(golden.versions, versions)), len(golden.probes) - len(probes))


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    for package in dict.fromkeys((*then, *now)):
        if then.get(package) != now.get(package):
            yield package, (then.get(package), now.get(package))


def _row(probe: Probe, then: torch.Tensor, now: torch.Tensor | None) -> Row:
    import torch

    if now is None:
        return Row(probe.name, "changed", note="is missing")
    found = fingerprint(now)
    row = Row(probe.name, "same", 0.0, probe.tolerance, probe.spread, 0.0, None, 0.0, weakest=probe.weakest, now=found)
    unmeasured = replace(row, outcome="changed", error=None, max_abs=None, bias=None)
    if now.shape != then.shape or now.dtype != then.dtype:
        return replace(unmeasured, tolerance=0.0, spread=0.0, note=f"is {now.dtype} {tuple(now.shape)}, was {then.dtype} {tuple(then.shape)}")
    if now.is_floating_point() and not bool(torch.isfinite(now).all()):
        return replace(unmeasured, note="is not finite")
    if found == probe.sha256:
        return row
    error = relative_error(now, then)
    a, b = then.double().reshape(-1), now.double().reshape(-1)
    size_a, size_b = a.norm().item(), b.norm().item()
    return replace(
        row,
        outcome="drifted" if error <= probe.tolerance else "changed",  # other bits with an error of zero: the two zeros, which are equal
        error=error,
        max_abs=(b - a).abs().max().item(),
        cosine=(a @ b).item() / (size_a * size_b) if size_a and size_b else None,
        bias=(b - a).mean().item() / (size_a / math.sqrt(a.numel())) if size_a else math.copysign(math.inf, (b - a).mean().item()),
    )


def table(verification: Verification, *, everything: bool = False) -> str:
    """The rows as text, those that differ unless ``everything`` is asked for."""
    rows = [row for row in verification.rows if everything or row.outcome != "same"]
    if not rows:
        return ""
    width = max(len(row.name) for row in rows)
    lines = [f"  {'probe':{width}}  outcome   relative  tolerance    max abs       bias  1 - cosine"]
    for row in rows:
        cells = (row.error, None if row.note else row.tolerance, row.max_abs, row.bias, None if row.cosine is None else 1 - row.cosine)
        numbers = "".join(f"{'' if cell is None else format(cell, '.2e'):>11}" for cell in cells)
        lines.append(f"  {row.name:{width}}  {row.outcome:8}{numbers}  {row.note}".rstrip())
    return "\n".join(lines)
