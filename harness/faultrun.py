"""``loudfail faults``: the clean port first, then one fault after another, and the kill matrix of them all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loudfail.harness import environment, registry
from loudfail.harness.gate import Gate
from loudfail.harness.killmatrix import OUTCOMES, Kill, blind, checks, kill_each, obstacle
from loudfail.harness.options import Options, UsageProblem, prepare_folder
from loudfail.harness.portcheck import PortProblem
from loudfail.harness.progress import StatusLine, failure_text
from loudfail.harness.record import write_json
from loudfail.harness.registry import Fault, Invariant
from loudfail.harness.result import Result

SCHEMA = "loudfail.faults/1"
#: Statuses of an invariant that says nothing about the port.
NOT_RUN = ("uncovered", "unavailable")


def choose(names: Sequence[str], text: str = "") -> list[Fault]:
    """The faults of these ids (all, if there are none) whose id contains the text.

    Raises:
        UsageProblem: an id does not exist (the nearest are named), or nothing is left.
    """
    faults = {fault.id: fault for fault in registry.faults()}
    for name in names:
        if name not in faults:
            raise UsageProblem(str(registry.nearest(name, faults, "fault")))
    chosen = [fault for fault in faults.values() if (not names or fault.id in names) and text in fault.id]
    if not chosen:
        raise UsageProblem(f"no fault's id contains {text!r}; see `loudfail list`" if text else "no faults are installed")
    return chosen


def run(options: Options, names: Sequence[str], text: str = "") -> int:
    """Run the kill matrix and print it; written to ``faults.json`` if there is a folder.

    Returns:
        0 if every fault was caught and the clean port raised no alarm, 1 if not, 5 if no fault applies to the port.

    Raises:
        UsageProblem: nothing could be run.
    """
    started = time.perf_counter()
    gate = Gate(options)
    chosen = choose(names, text)
    if options.out is not None:
        prepare_folder(options.out, ["faults.json"])
    line = StatusLine()
    line.print(f"loudfail faults {options.port} · TP {','.join(map(str, options.degrees))} · {len(chosen)} faults")
    try:
        gate.construct()
        obstacles = {} if gate.port is None else {fault.id: obstacle(fault, gate.port) for fault in chosen}
        faults = [fault for fault in chosen if not obstacles.get(fault.id)]
        named = {name for fault in faults for name in fault.catches}
        invariants = [invariant for invariant in registry.invariants() if invariant.id in named]
        if faults and isinstance(
            problem := next((p for i in invariants for d in gate.degrees_of(i) if (p := gate.problem(i, d))), None), PortProblem
        ):
            line.print(f"ERROR the port does not work: {problem}")
            return 1
        if not faults:
            return _none(options, obstacles, line)
        clean = _baseline(gate, invariants, line)
        alarms = [result for result in clean if result.status not in ("holds", *NOT_RUN)]
        idle = {(result.id, result.degree): f"{result.name} is {result.status}, {result.message}" for result in clean if result.status in NOT_RUN}
        obstacles |= {fault.id: blind(fault, checks(fault, invariants, options.degrees), idle) for fault in faults}
        if not (faults := [fault for fault in faults if not obstacles[fault.id]]):
            return _none(options, obstacles, line)
        kills = _matrix(gate, faults, invariants, idle, line)
    finally:
        gate.close()
    record = summarize(options, chosen, kills, alarms, time.perf_counter() - started, obstacles)
    if options.out is not None:
        write_json(options.out / "faults.json", record)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in record["counts"].items() if number)
    weakest = record["weakest_margin"]
    line.print(
        f"{counts} of {len(kills)} · {len(alarms)} false alarms · {record['not_applicable']} not applicable · "
        f"weakest margin {'none' if weakest is None else f'{weakest:.3g}×'} · {record['seconds']:.1f} s"
    )
    if part := sum(kill.outcome == "caught" and bool(kill.message) for kill in kills):
        line.print(f"{part} of those caught by some of their checks only: {options.dtype} hides them from the others")
    if marked := record["diagnosis"]["marked"]:
        wrong = record["diagnosis"]["misdiagnosed"]
        line.print(f"diagnosis: {marked - len(wrong)} of {marked} named rightly{', misdiagnosed: ' if wrong else ''}{', '.join(wrong)}")
    _explain(obstacles, line)
    if options.out is not None:
        line.print(f"written to {options.out / 'faults.json'}")
    return 1 if alarms or any(kill.outcome != "caught" for kill in kills) else 0


def _none(options: Options, obstacles: Mapping[str, str], line: StatusLine) -> int:
    line.print(f"none of the {len(obstacles)} faults applies to {options.port}")
    _explain(obstacles, line)
    return 5


def _explain(obstacles: Mapping[str, str], line: StatusLine) -> None:
    """The faults that do not apply, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in obstacles.items():
        if why:
            reasons.setdefault(why, []).append(name)
    for why, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        line.print(f"not applicable, {len(names)}: {why}: {', '.join(names[:2])}{' …' if len(names) > 2 else ''}")


def _baseline(gate: Gate, invariants: Sequence[Invariant], line: StatusLine) -> list[Result]:
    """Results of the clean port; whatever is violated there is a false alarm."""
    pairs = [(invariant, degree) for invariant in invariants for degree in gate.degrees_of(invariant)]
    pairs.sort(key=lambda pair: pair[1] is not None or "engine" in pair[0].seams)  # the ranks import meanwhile
    results, started = list[Result](), time.perf_counter()
    for number, (invariant, degree) in enumerate(pairs, 1):
        line.show(f"clean port: {number} of {len(pairs)} · {invariant.id}")
        result = gate.check(invariant, degree)
        results.append(result)
        if result.status not in ("holds", *NOT_RUN):
            line.print(f"FALSE ALARM {failure_text(result)}")
    skipped = sum(result.status in NOT_RUN for result in results)
    alarms = sum(result.status != "holds" for result in results) - skipped
    line.print(f"clean port: {len(pairs)} checks, {alarms} false alarms, {skipped} not run · {time.perf_counter() - started:.1f} s")
    return results


def _matrix(
    gate: Gate, faults: Sequence[Fault], invariants: Sequence[Invariant], idle: Mapping[tuple[str, int | None], str], line: StatusLine
) -> list[Kill]:
    kills: list[Kill] = []

    def progress(kill: Kill) -> None:
        kills.append(kill)
        margin = f"{kill.margin:.3g}×" if kill.margin is not None and math.isfinite(kill.margin) else "exact" if kill.margin else ""
        text = f"{len(kills):>3} of {len(faults)}  {kill.outcome:<8} {kill.fault:<64} {margin:>10} {kill.seconds:5.1f} s"
        line.print(f"{text}\n      {kill.message}" if kill.message else text)
        if kill.misdiagnosed:
            line.print(f"      MISDIAGNOSED as {kill.named or 'nothing known'}, not {kill.cause}: {kill.diagnosis}")
        for result in kill.results:
            result.rerun = f"loudfail faults {gate.options.port} {kill.fault}"

    kill_each(faults, gate.port, invariants, gate.options.degrees, idle=idle, progress=progress)
    return kills


def summarize(
    options: Options, chosen: Sequence[Fault], kills: Sequence[Kill], alarms: Sequence[Result], seconds: float, obstacles: Mapping[str, str]
) -> dict[str, Any]:
    """The record ``faults.json``.

    A margin is ``got / bound`` of the weakest violation; null where the claim is exact, without a bound. ``diagnosis`` counts the caught faults whose
    cause has a known name, and lists those that were given another.
    """
    margins = {kill.fault: kill.margin if kill.margin is not None and math.isfinite(kill.margin) else None for kill in kills}
    finite = [margin for margin in margins.values() if margin is not None]
    named = {name for fault in chosen for name in fault.catches}
    return {
        "schema": SCHEMA,
        "port": options.port,
        "degrees": list(options.degrees),
        "counts": {outcome: sum(kill.outcome == outcome for kill in kills) for outcome in OUTCOMES},
        "not_applicable": len(chosen) - len(kills),
        "obstacles": {name: why for name, why in obstacles.items() if why},
        "false_alarms": len(alarms),
        "alarms": [result.to_dict() for result in alarms],
        "unbroken": sorted(invariant.id for invariant in registry.invariants() if invariant.id not in named),
        "margins": margins,
        "diagnosis": {
            "marked": sum(bool(kill.cause) and kill.outcome == "caught" for kill in kills),
            "misdiagnosed": [kill.fault for kill in kills if kill.misdiagnosed],
        },
        "weakest_margin": min(finite, default=None),
        "seconds": round(seconds, 3),
        "environment": environment.describe("cpu" if options.device == "auto" else options.device),
        "matrix": [kill.to_dict() | {"margin": margins[kill.fault]} for kill in kills],
    }
