"""Run one invariant on a port and say how it ended."""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from loudfail.harness.compare import measuring
from loudfail.harness.diagnose import SECONDS, diagnose
from loudfail.harness.port import Port, need, offers
from loudfail.harness.registry import Invariant
from loudfail.harness.result import Result
from loudfail.harness.violation import Unavailable, Uncovered, Violation, show


def run(
    invariant: Invariant,
    port: Port,
    degree: int | None = None,
    *,
    seed: int = 0,
    examples: int | None = None,
    shrink: bool = True,
    explain: bool = False,
    patience: float = SECONDS,
) -> Result:
    """Run an invariant once, with as many drawn inputs as it declares.

    Args:
        invariant: what is claimed.
        port: the port it is claimed of.
        degree: tensor-parallel degree; required if and only if the invariant is per degree.
        seed: draws other inputs when it changes.
        examples: number of drawn inputs instead of the declared one.
        shrink: look for a simpler input that violates the claim.
        explain: after a violation, look for the known mistake that explains it; see `loudfail.harness.diagnose`.
        patience: the longest that this takes, in seconds.

    Returns:
        A result in status ``holds``, ``violated``, ``uncovered``, ``unavailable`` or ``error``; nothing but `KeyboardInterrupt` is raised.
    """
    if (degree is None) == invariant.per_degree:
        raise ValueError(f"{invariant.id} {'needs a' if invariant.per_degree else 'takes no'} degree")
    result = Result(invariant.id, invariant.claim, "holds", degree, seed=seed)
    started = time.perf_counter()
    arguments: dict[str, Any] = {"port": port} | ({"tp": degree} if degree is not None else {})
    with measuring() as measurements:
        try:
            need(port, *invariant.seams)
            if port.scale not in invariant.scales:
                raise Uncovered(f"not run at scale {port.scale!r}")
            adapter = port.adapter_state("default") if offers(port, "adapter") else None
            try:
                # A large model gets one input a check: what depends on real widths shows on any input, and each costs seconds.
                count = examples or (invariant.examples if port.scale == "tiny" else 1)
                if seed and count == 1 and examples is None:  # the first input drawn is the simplest, whatever the seed
                    count = 2
                result.examples = _drive(invariant, port, arguments, count, seed, shrink)
            finally:
                if adapter is not None:
                    port.load_adapter("default", adapter)
                    port.select_trainable("default")
            if measurements.count == 0:
                raise AssertionError(f"{invariant.id} compared nothing; a check that measures nothing cannot fail")
        except Violation as violation:
            violation.claim = violation.claim or invariant.claim
            result.status = "violated"
            result.violation = {
                "claim": violation.claim,
                "got": violation.got if isinstance(violation.got, int | float | str | bool) else show(violation.got),
                "want": show(violation.want),
                "bound": violation.bound,
                "where": violation.where,
                "example": "\n".join(getattr(violation, "__notes__", [])),
            }
        except Uncovered as error:
            result.status, result.message = "uncovered", str(error)
        except Unavailable as error:
            result.status, result.message = "unavailable", str(error)
        except Exception as error:
            result.status, result.message = "error", f"{type(error).__name__}: {show(error)}"
            result.traceback = traceback.format_exc()
    result.got, result.bound, result.where, result.values = measurements.got, measurements.bound, measurements.where, measurements.values
    if explain and result.status == "violated":
        result.diagnosis = asdict(diagnose(port, result, seconds=patience))
    result.seconds = time.perf_counter() - started
    return result


def _drive(invariant: Invariant, port: Port, arguments: dict[str, Any], examples: int, seed: int, shrink: bool) -> int:
    """Call the invariant, once or with drawn inputs; the number of calls is returned."""
    if not invariant.strategies:
        invariant.function(**arguments)
        return 1
    import hypothesis
    import hypothesis.errors

    calls = 0

    def body(**drawn: Any) -> None:
        nonlocal calls
        calls += 1
        invariant.function(**arguments, **drawn)

    body.__name__ = invariant.id.split("::")[1]
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    test: Callable[[], None] = hypothesis.given(**{name: strategy(port) for name, strategy in invariant.strategies.items()})(body)
    test = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )(test)
    # Our own seed instead of `derandomize`, so that it can be changed, is shown, and does not depend on the source text.
    test = hypothesis.seed(zlib.crc32(f"{invariant.id}/{seed}".encode()))(test)
    try:
        test()
    except hypothesis.errors.Flaky as flaky:
        # A claim that is false only sometimes is false.
        first = next((one for one in getattr(flaky, "exceptions", ()) if isinstance(one, Violation)), None)
        if first is None:
            raise
        raise Violation(first.got, f"{show(first.want)}; the same input held when it was tried again", first.bound, first.where) from flaky
    return calls
