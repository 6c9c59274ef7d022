"""Would the suite have noticed? Break one thing at a time and see whether the invariants named for it are violated."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from loudfail.harness import inject, runner
from loudfail.harness.port import Port, offers
from loudfail.harness.registry import Fault, Invariant
from loudfail.harness.result import Result

Outcome = Literal["caught", "crashed", "escaped", "inert"]
#: Seconds for a diagnosis: more than a gate gives it, so that what is named does not depend on how busy the machine is.
PATIENCE = 20.0
OUTCOMES: tuple[Outcome, ...] = ("caught", "crashed", "escaped", "inert")


@dataclass
class Kill:
    """One fault.

    Attributes:
        fault: its id.
        outcome: ``caught``: every invariant named for it was violated (per-degree ones at each degree at which the fault shows), or, in a dtype whose
            rounding may hide it from some, one of them; ``crashed``: one of them ended in an error instead; ``escaped``: one of them held;
            ``inert``: the broken code never ran.
        results: the named invariants' results under the fault.
        fired: how often the broken code ran.
        margin: smallest ``got / bound`` over the violated measurements; infinite where the bound is zero.
        message: why it is not caught, or which of its checks the dtype's rounding hides it from.
        cause: the name that the diagnosis must give; empty where none is asked for.
        named: the name that it gave; empty if none fits, None if none was asked for.
        diagnosis: its sentence.
    """

    fault: str
    claim: str
    source: str
    outcome: Outcome
    seconds: float
    fired: int = 0
    margin: float | None = None
    message: str = ""
    results: list[Result] = field(default_factory=list)
    cause: str = ""
    named: str | None = None
    diagnosis: str = ""

    @property
    def misdiagnosed(self) -> bool:
        """The diagnosis gave another name than it must, or none."""
        return bool(self.cause) and self.outcome == "caught" and self.named != self.cause

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def obstacle(fault: Fault, port: Port) -> str:
    """Why the fault cannot be injected into this port; empty if it can."""
    lacking = [seam for seam in fault.seams if not offers(port, seam)]
    if lacking:
        return f"the port does not offer {', '.join(lacking)}"
    if fault.ports and port.name not in fault.ports:
        return f"it breaks a part that only {', '.join(fault.ports)} has"
    if fault.exact and port.dtype != "float32":
        return f"it changes no more than {port.dtype} rounds away; float32 shows it"
    return fault.unless(port)


def applicable(fault: Fault, port: Port) -> bool:
    """Whether the fault can be injected into this port."""
    return not obstacle(fault, port)


def checks(fault: Fault, invariants: Iterable[Invariant], degrees: Sequence[int]) -> list[tuple[Invariant, int | None]]:
    """The invariants that must catch a fault, those that are per degree at each degree of a run at which it shows."""
    shown = [degree for degree in degrees if not fault.degrees or degree in fault.degrees]
    return [(one, degree) for one in invariants if one.id in fault.catches for degree in (shown if one.per_degree else (None,))]


def blind(fault: Fault, pairs: Sequence[tuple[Invariant, int | None]], idle: Mapping[tuple[str, int | None], str]) -> str:
    """Why none of the checks that must catch a fault can run, on the clean port either; empty if one can."""
    if not pairs:
        return f"it shows at tensor-parallel degree {', '.join(map(str, fault.degrees))} only"
    reasons = [idle.get((one.id, degree), "") for one, degree in pairs]
    return f"what would see it is not run here: {reasons[0]}" if all(reasons) else ""


def kill(
    fault: Fault,
    port: Port,
    invariants: Sequence[Invariant],
    degrees: Sequence[int],
    *,
    seed: int = 0,
    idle: Mapping[tuple[str, int | None], str] = MappingProxyType({}),
) -> Kill:
    """Inject one fault, run the invariants named for it, mend it.

    Args:
        invariants: all invariants; those that the fault names are run.
        degrees: tensor-parallel degrees of this run; per-degree invariants run at those at which the fault shows.
        idle: invariant and degree → why it is not run on the clean port, where it need not see anything.
    """
    started = time.perf_counter()
    pairs = [(one, degree) for one, degree in checks(fault, invariants, degrees) if (one.id, degree) not in idle]
    result = Kill(fault.id, fault.claim, fault.source, "escaped", 0.0, cause=fault.cause)
    with inject.counting() as fired:
        try:
            with fault.inject(port):
                for invariant, degree in pairs:
                    explain = bool(fault.cause) and result.named is None
                    one = runner.run(invariant, port, degree, seed=seed, shrink=False, explain=explain, patience=PATIENCE)
                    result.results.append(one)
                    if one.diagnosis is not None:
                        result.named, result.diagnosis = one.diagnosis["cause"], one.diagnosis["text"]
        except Exception as error:
            result.outcome, result.message = "crashed", f"the injection itself failed: {type(error).__name__}: {error}"
            result.results.append(Result(fault.id, fault.claim, "error", message=result.message, traceback=traceback.format_exc()))
    result.fired, result.seconds = fired.count, time.perf_counter() - started
    statuses = {one.status for one in result.results}
    if result.message:
        pass
    elif not result.results:
        result.outcome, result.message = "inert", "no named invariant could be run at these degrees"
    elif "error" in statuses:
        broken = next(one for one in result.results if one.status == "error")
        result.outcome, result.message = "crashed", f"{broken.name}: {broken.message}"
    elif fired.count == 0:
        result.outcome, result.message = "inert", "the broken code never ran"
    else:
        result.message = ", ".join(f"{one.name} {one.status}" for one in result.results if one.status != "violated")
        if statuses <= {"violated"} or ("violated" in statuses and port.dtype != "float32"):
            result.outcome = "caught"
            result.margin = min(_margin(one) for one in result.results if one.status == "violated")
    return result


def kill_each(
    faults: Iterable[Fault],
    port: Port,
    invariants: Sequence[Invariant],
    degrees: Sequence[int],
    *,
    idle: Mapping[tuple[str, int | None], str] = MappingProxyType({}),
    progress: Callable[[Kill], None] = lambda _: None,
) -> list[Kill]:
    """`kill` for each applicable fault, in order."""
    kills = []
    for fault in faults:
        if applicable(fault, port):
            kills.append(kill(fault, port, invariants, degrees, idle=idle))
            progress(kills[-1])
    return kills


def _margin(result: Result) -> float:
    """How far above its bound a violation lies."""
    violation = result.violation or {}
    got, bound = violation.get("got"), violation.get("bound")
    if isinstance(got, int | float) and not isinstance(got, bool) and bound:
        return got / bound if got > bound else (bound / got if got > 0 else math.inf)
    return math.inf
