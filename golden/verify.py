"""Run the recorded cases again and say what became of them. Nothing is ever written: a golden that is missing is a failure, not a first recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loudfail.golden.cases import GoldenCase, cases_of, record_trace, threads
from loudfail.golden.diff import Verification, compare
from loudfail.golden.record import name_of, versions
from loudfail.golden.store import TRACES, Golden, GoldenError, load, path_of
from loudfail.harness.port import Port
from loudfail.harness.record import plain

Progress = Callable[[str], None]


def _nothing(text: str) -> None: ...


def verify(
    port: Port, *, degrees: Sequence[int] = (1, 2, 4), folder: Path = TRACES, cases: Sequence[str] = (), progress: Progress = _nothing
) -> list[Verification]:
    """Verify the goldens of a port at its scale, dtype and device.

    Args:
        port: what is judged.
        degrees: tensor-parallel degrees to run; the probes of others are left out and counted.
        folder: folder of goldens.
        cases: names of cases; empty for all.
        progress: told what is being run.

    Returns:
        One verification a case. A golden that is missing, unsound, or of another case is ``changed``, with the reason in ``message``.
    """
    known = [golden for golden in cases_of(port) if not cases or golden.name in cases]
    return [verify_case(port, golden, degrees=degrees, folder=folder, progress=progress) for golden in known]


def verify_case(port: Port, case: GoldenCase, *, degrees: Sequence[int], folder: Path = TRACES, progress: Progress = _nothing) -> Verification:
    """Verify the golden of one case; see `verify`. On a GPU that has no golden of its own, the CPU's is compared."""
    name = name_of(case, port)
    if not path_of(name, folder).exists():
        name = name_of(case, port, device="cpu")
    try:
        golden = load(path_of(name, folder))
        _require_same_case(golden, name, plain(case.describe(port)), degrees)
    except GoldenError as error:
        return Verification(name, "changed", message=str(error))
    progress(name)
    with threads(1):
        now = record_trace(port, case, [degree for degree in degrees if degree in golden.degrees])
    return compare(golden, now, versions(), degrees)


def _require_same_case(golden: Golden, name: str, case: dict[str, Any], degrees: Sequence[int]) -> None:
    """Raise `GoldenError` unless the golden is of the case that would be run."""
    if golden.name != name:
        raise GoldenError(f"the file of {name} holds {golden.name}; restore it from version control")
    if golden.case != case:
        differing = sorted(key for key in set(golden.case) | set(case) if golden.case.get(key) != case.get(key))
        raise GoldenError(f"{name} was recorded for another case: {', '.join(differing)} differ; record it again with the reason")
    if absent := sorted(set(degrees) - set(golden.degrees)) if golden.degrees else []:
        raise GoldenError(f"{name} has no degree {', '.join(map(str, absent))}; it has {', '.join(map(str, golden.degrees))}")
