"""One run of the invariants on a port: the port, its first check, the judgement of each result, and the record of them all.

It knows nothing of pytest, which drives it (`loudfail.harness.plugin`).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import re
import shlex
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loudfail.harness import certificate, environment, portcheck, registry, runner
from loudfail.harness.options import Options, UsageProblem, prepare_folder
from loudfail.harness.port import SEAMS, offers
from loudfail.harness.record import write_json
from loudfail.harness.registry import Invariant
from loudfail.harness.result import Result, counts, verdict
from loudfail.harness.violation import Unavailable

SCHEMA = "loudfail.report/1"
FILES = ("report.json", "gate.json", "summary.md", "junit.xml", "report.html")
#: How the message of a check begins that was not carried out because the port failed its first check.
NOT_RUN = "not run: "
#: The message of a check that was declared and never begun, such as one that was left to a process that was killed.
NOT_REACHED = f"{NOT_RUN}the session ended before it"


#: Seams that bring an oracle for sign and time axis; without any of them a port only agrees with itself.
ORACLES = ("vendor", "trained", "engine")
UNPROVEN = f"sign and time axis are not proven: nothing outside the port says what they are; add one of the seams {', '.join(ORACLES)}"


class Gate:
    """A run.

    Args:
        options: what is run.
        cls: the port's class, if it need not be found by name.

    Raises:
        UsageProblem: no such port, or it cannot be imported, or ``--expect`` names a check that does not exist.
    """

    def __init__(self, options: Options, cls: type | None = None) -> None:
        self.options = options
        self.started = time.perf_counter()
        try:
            self.cls = registry.find_port(options.port) if cls is None else cls
        except (registry.UnknownId, ImportError) as error:
            raise UsageProblem(str(error)) from None
        self.port: Any = None
        self._problem: portcheck.PortProblem | None = None
        self._checked = False
        self._rollout_checked = False
        self._rollout_problem: portcheck.PortProblem | None = None
        self._engines: dict[int, portcheck.PortProblem | Unavailable | None] = {}
        #: Seconds that are left for diagnoses: a port that violates everything is explained by its first violations.
        self._patience = 60.0

    # -- the port ----------------------------------------------------------------------------------------------------------------------------

    def construct(self) -> None:
        """Make the port. What its constructor raises is the problem of every check that needs it."""
        if self.options.scale == "tiny" and "OMP_NUM_THREADS" not in os.environ:
            # Threads cost a tiny model more than they give: beside the ranks, on a busy machine, two are many times slower than one.
            import torch

            torch.set_num_threads(1)
        try:
            self.port = self.options.construct(self.cls)
        except Exception as error:
            self._problem = portcheck.PortProblem(f"{self.cls.__name__}() raised {type(error).__name__}: {error}")
            self._problem.details = traceback.format_exc()
        if self.port is not None and offers(self.port, "engine"):
            for degree in self.options.degrees:
                try:
                    self.port.check_degree(degree)
                except ValueError as error:
                    raise UsageProblem(f"--tp: {error}") from None

    def problem(self, invariant: Invariant, degree: int | None) -> portcheck.PortProblem | Unavailable | None:
        """Why a check cannot be carried out: the port, its rollout's side or its engine at this degree breaks the contract. Found once, then
        remembered; the rollout's side is asked when the first check needs it, so that the others do not wait for its imports."""
        if self._problem is None and not self._checked:
            self._checked = True
            try:
                portcheck.check_port(self.port)
                gc.collect()
                gc.freeze()  # by now everything is imported: a million objects that no later collection needs to look at
            except portcheck.PortProblem as problem:
                self._problem = problem
            except Unavailable as error:
                self._problem = portcheck.PortProblem(f"not available: {error}")
        if self._problem is not None or not invariant.rolls_out:
            return self._problem
        if not self._rollout_checked:
            self._rollout_checked = True
            try:
                portcheck.check_rollout(self.port)
            except portcheck.PortProblem as problem:
                self._rollout_problem = problem
        if self._rollout_problem is not None or "engine" not in invariant.seams or not offers(self.port, "engine"):
            return self._rollout_problem
        wanted = self.options.degrees[0] if degree is None else degree
        if wanted not in self._engines:
            try:
                portcheck.check_engine(self.port, wanted)
                self._engines[wanted] = None
            except (portcheck.PortProblem, Unavailable) as problem:
                self._engines[wanted] = problem
        return self._engines[wanted]

    # -- checks ------------------------------------------------------------------------------------------------------------------------------

    def degrees_of(self, invariant: Invariant) -> tuple[int | None, ...]:
        return self.options.degrees if invariant.per_degree else (None,)

    def see_expected(self) -> None:
        """See that each id of ``--expect`` exists.

        Raises:
            UsageProblem: one does not; the nearest ids are named.
        """
        known = {invariant.id: invariant for invariant in registry.invariants()}
        for key in self.options.expect:
            name, degree = re.fullmatch(r"(.*?)(\[tp\d+\])?", key, re.DOTALL).groups()  # type: ignore[union-attr]
            if name not in known or (degree and not known[name].per_degree):
                raise UsageProblem(
                    f"--expect: {registry.nearest(name, known, 'invariant')}" if name not in known else f"--expect: {name} has no degrees"
                )

    def check(self, invariant: Invariant, degree: int | None) -> Result:
        """Run one invariant and judge its result by what is required and expected."""
        problem = self.problem(invariant, degree)
        if problem is None:
            result = runner.run(invariant, self.port, degree, seed=self.options.seed, examples=self.options.examples, explain=self._patience > 0)
            self._patience -= (result.diagnosis or {}).get("seconds", 0.0)
        elif isinstance(problem, Unavailable):
            result = Result(invariant.id, invariant.claim, "unavailable", degree, message=str(problem), seed=self.options.seed)
        else:
            result = Result(invariant.id, invariant.claim, "error", degree, message=f"{NOT_RUN}{problem}", seed=self.options.seed)
            result.traceback = problem.details
        result.rerun = self.rerun(invariant.id, degree)
        reason = self.options.expect.get(result.name) or self.options.expect.get(result.id)
        if reason and result.status == "violated":
            result.status, result.message = "expected", reason
        elif reason and result.status == "holds":
            result.status, result.message = "fixed", f"holds, though expected to fail ({reason}); take it out of the list"
        if result.status in ("uncovered", "unavailable") and self._required(invariant):
            result.status, result.message = "error", f"required, but {result.status}: {result.message}"
        return result

    def _required(self, invariant: Invariant) -> bool:
        return "all" in self.options.require or bool(set(self.options.require) & set(invariant.seams))

    def rerun(self, name: str, degree: int | None) -> str:
        """The command that runs just this check."""
        degrees = [] if degree is None else [f"--tp {degree}"]
        return " ".join(["loudfail gate", shlex.quote(self.options.port), *degrees, *self.options.given, f"-k '{name}'"])

    # -- the record --------------------------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What only the process that holds the port knows."""
        found: dict[str, Any] = {"classes": [], "fingerprint": None, "layout": [], "seams": portcheck.missing_methods(self.cls)}
        problems = portcheck.misspelt_methods(self.cls)
        if all(found["seams"][seam] for seam in ORACLES):
            problems.append(UNPROVEN)
        if problems:
            found["problems"] = problems
        if self.port is None or self._problem is not None or not self._checked:
            return found
        for key, read in (("classes", self.port.classes), ("fingerprint", self._fingerprint), ("layout", self._layout)):
            try:
                found[key] = read()
            except Exception as error:
                found.setdefault("problems", []).append(f"{key}: {type(error).__name__}: {error}")
                found["unread"] = found.get("unread", False) or key != "layout"  # without a layout the report lacks a picture, no more
        return found

    def _fingerprint(self) -> dict[str, Any]:
        return certificate.fingerprint(self.port, self.options.degrees)

    def _layout(self) -> list[dict[str, Any]]:
        """The rows of one sample for each condition mode, for the picture in the report."""
        if not (offers(self.port, "objective") and offers(self.port, "packing")):
            return []
        from loudfail.harness.case import smallest
        from loudfail.harness.port import no_grad
        from loudfail.harness.report import layout_of

        tables, titles = [], []
        for given in self.port.givens:
            case = smallest(self.port, given=given)
            with no_grad():
                noise, sigmas = case.normal("noise", self.port.shapes(case)), case.sigmas("sigma", self.port.modalities)
                tables.append(self.port.observe(noise, sigmas, self.port.conditions(case))[1][0])
            titles.append(f"given: {', '.join(given) or 'nothing'}")
        return layout_of(tables, titles)

    def report(
        self, results: Sequence[Result], facts: Mapping[str, Any], *, peak: int, selection: str = "", total: int | None = None
    ) -> dict[str, Any]:
        """The record of the run.

        Args:
            results: one for each check that was declared for it.
            facts: of the process that holds the port. Where it could not say what ran (a rank died after its last check), nothing is certified.
            peak: resident bytes of all processes.
            selection: how the run was restricted, if it was.
            total: checks that the suite has for these degrees.
        """
        few = self.options.examples is not None and any(self.options.examples < i.examples for i in registry.invariants())
        restricted = "; ".join(filter(None, [selection, f"--examples {self.options.examples}" if few else ""]))
        identity = facts.get("fingerprint") or {}
        return {
            "schema": SCHEMA,
            "port": identity.get("port", {}).get("port", getattr(self.cls, "name", self.options.port)),
            "verdict": "error" if facts.get("unread") else verdict(list(results)),
            "declared": len(results),
            "counts": counts(list(results)),
            "seconds": round(time.perf_counter() - self.started, 3),
            "peak_rss_bytes": peak,
            "environment": environment.describe((identity.get("port") or {}).get("device") or (self.port.device if self.port is not None else "cpu"))
            | {"collectives": identity.get("collectives") or {}},
            "classes": list(facts.get("classes") or []),
            "complete": not restricted and len(results) == (total if total is not None else len(results)),
            "selection": restricted,
            "degrees": list(self.options.degrees),
            "seed": self.options.seed,
            "examples": self.options.examples,
            "required": list(self.options.require),
            "expected": dict(self.options.expect),
            "configuration": identity.get("port"),
            "fingerprint": identity or None,
            "seams": facts.get("seams") or {},
            "problems": list(facts.get("problems") or []),
            "layout": list(facts.get("layout") or []),
            "results": [result.to_dict() for result in results],
        }

    def prepare(self) -> None:
        """See that the records can be written, before anything is run.

        Raises:
            UsageProblem: they cannot.
        """
        if self.options.out is not None:
            prepare_folder(self.options.out, FILES)

    def write(self, report: Mapping[str, Any]) -> list[Path]:
        """Write the records; the certificate comes last, so that it is there only if all of them are."""
        out = self.options.out
        if out is None:
            return []
        record = {key: value for key, value in report.items() if key != "fingerprint"}
        write_json(out / "report.json", record)
        faults = _read_faults(out)
        written = importlib.import_module("loudfail.harness.report").write_reports(record | ({"faults": faults} if faults else {}), out)
        write_json(out / "gate.json", certificate.make(report, report.get("fingerprint") or {}))
        return [out / "report.json", *written, out / "gate.json"]

    def close(self) -> None:
        """End the port's ranks. Idempotent."""
        if self.port is not None:
            self.port.close()


def _read_faults(out: Path) -> dict[str, Any] | None:
    """The kill matrix of an earlier ``loudfail faults --out`` into the same folder, for the page; None if there is none that can be read."""
    import json

    try:
        record = json.loads((out / "faults.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == "loudfail.faults/1" else None


def revive(record: Mapping[str, Any]) -> Result:
    """A `Result` from its dictionary, as it comes back from another process."""
    return Result(**{field.name: record[field.name] for field in dataclasses.fields(Result) if field.name in record})


def split_name(name: str) -> tuple[str, int | None]:
    """``sync::claim[tp2]`` → id and degree."""
    match = re.fullmatch(r"(.*?)(?:\[tp(\d+)\])?", name)
    return (match[1], int(match[2]) if match[2] else None) if match else (name, None)


def uncovered_seams(seams: Mapping[str, Iterable[str]]) -> list[str]:
    """One line for each seam that a port does not offer, with the methods that it would take."""
    return [f"{seam}: {', '.join(seams[seam])}" for seam in SEAMS if seams.get(seam)]
