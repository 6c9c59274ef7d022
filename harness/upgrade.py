"""``loudfail upgrade``: what other versions of the packages change for a port, in an environment beside the present one.

Gate and goldens run in both environments; what differs is the drift table. See `environments` for how an environment is made, `upgrade_run` for
what runs in it, `upgrade_drift` for what is compared.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loudfail.harness import options as opts
from loudfail.harness.options import UsageProblem, prepare_folder
from loudfail.harness.record import write_json

SCHEMA = "loudfail.upgrade/2"
HOLDS, VIOLATED, NOTHING = 0, 1, 5
PASSING = ("works", "drifted")


@dataclass(frozen=True)
class Request:
    """A row of the table.

    Attributes:
        packages: what is asked for, as an installer takes it.
        override: install it even where something else that is installed forbids it.
        expect: the verdict that is known; any other fails. Empty: ``works`` or ``drifted``.
        because: why, for people.
    """

    packages: tuple[str, ...]
    override: bool = False
    expect: str = ""
    because: str = field(default="", compare=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own options."""
    parser.add_argument("port", metavar="PORT", help="name of a port (see `loudfail list`) or package.module:Class")
    parser.add_argument("--with", dest="packages", metavar="REQUIREMENT", action="append", default=[], help="diffusers==0.42.1, say; may be repeated")
    parser.add_argument("--override", action="store_true", help="install it even where an installed package forbids it, and say so in the report")
    parser.add_argument("--matrix", metavar="FILE", type=Path, help="TOML file with several upgrades, see ci/matrix.toml")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/upgrade"), help="folder of the report (default: %(default)s)")
    parser.add_argument("--envs", metavar="DIR", type=Path, help="folder of environments and finished runs (default: in the user's cache)")
    parser.add_argument("--fresh", action="store_true", help="run again what was run before")
    parser.add_argument("-k", metavar="EXPRESSION", help="only checks whose id matches, as pytest's -k")
    opts.add_options(parser, {name: keywords for name, keywords in opts.PORT_OPTIONS.items() if name != "--weights"})


def run(parsed: argparse.Namespace) -> int:
    """Carry the command out.

    Returns:
        0: every upgrade works or drifts, or does what was expected of it; 1: one does not; 5: no version could be installed, so nothing ran.

    Raises:
        UsageProblem: what was asked for makes no sense, no index answers, files were edited meanwhile, or a folder cannot be written.
    """
    from loudfail.harness import environments, upgrade_run

    requests = _requests(parsed)
    cache = (parsed.envs or environments.default_cache()).absolute()
    try:
        return _run(parsed, requests, cache)
    except (upgrade_run.Void, environments.IndexUnreachable, environments.InstallFailed) as error:
        raise UsageProblem(str(error)) from None
    except OSError as error:
        then = "mend that, or give another folder; what is finished is kept, and the same command goes on from there"
        raise UsageProblem(f"{error.filename or cache}: {error.strerror or error}: {then}") from None


def _run(parsed: argparse.Namespace, requests: Sequence[Request], cache: Path) -> int:
    from loudfail.harness import environments, upgrade_drift, upgrade_report, upgrade_run
    from loudfail.harness.environment import describe
    from loudfail.harness.progress import StatusLine

    chosen = opts.from_namespace(parsed)
    port = chosen.port
    prepare_folder(parsed.out, upgrade_report.FILES)
    prepare_folder(cache, (), option="--envs")
    line = StatusLine()
    question, here = _question(parsed), environments.present()
    record: dict[str, Any] = {
        "schema": SCHEMA, "port": port, "command": _command(parsed), "degrees": list(chosen.degrees), "rows": [], "notes": [],
        "before": {"python": platform.python_version(), "packages": upgrade_run.stack(here), "cpu": describe("cpu")["cpu"], "seconds": {}},
    }  # fmt: skip
    try:
        # First what takes seconds, so that a name that is wrong or a pin that forbids is told before anything is run.
        rows = [_row(request, port) for request in requests]
        installed, find = environments.installed(), environments.finder(cache)
        plans = [_plan(request, row, installed, find, line.show) for request, row in zip(requests, rows, strict=True)]
        arguments = {"cache": cache, "fresh": parsed.fresh, "say": line.show}
        before: dict[str, Any] = {}
        if any(plans):
            question, before = _before(question, here, record, line, arguments)
        for request, row, wanted in zip(requests, rows, plans, strict=True):
            if wanted is not None:
                try:
                    environment = environments.build(wanted, cache, say=lambda text: line.show(text, now=True))
                    row["environment"] = {"key": environment.key, "bytes": environment.bytes}
                    after = upgrade_run.measure(question, environment, name=upgrade_report.moves(row), **arguments)
                    row["drift"] = upgrade_drift.compare(before, after)
                    row["verdict"], row["first"] = row["drift"]["verdict"], row["drift"]["first"]
                except environments.InstallFailed as failure:
                    said = str(failure).splitlines()
                    row |= {"verdict": "conflict", "first": f"not installed: {said[0]}", "conflict": said[1:][-8:], "failed": True}
            row["as_expected"] = bool(request.expect) and row["verdict"] == request.expect and not row["failed"]
            record["rows"].append(row)
            _write(record, parsed.out)  # after each row, so that an interrupted matrix leaves what it has
            line.print(_line(row))
            if row["verdict"] == "conflict" and " requires " in row["first"] and not request.override:
                line.print("    --override installs it regardless of such a pin, and the report says so")
    finally:
        line.clear()
    line.print(f"written to {parsed.out}")
    if all(row["drift"] is None and not row["failed"] for row in rows) and not all(row["as_expected"] for row in rows):
        return NOTHING
    return HOLDS if all(row["as_expected"] or (not row["expect"] and row["verdict"] in PASSING) for row in rows) else VIOLATED


def _plan(request: Request, row: dict[str, Any], installed: Any, find: Any, say: Any) -> Any:
    """The plan of a row, or None: the row has the conflict then."""
    from loudfail.harness import environments

    try:
        wanted = environments.plan(request.packages, installed, find, override=request.override, say=say)
    except environments.NoSuchPackage as nothing:
        raise UsageProblem(str(nothing)) from None
    except environments.Conflict as conflict:
        row |= {"verdict": "conflict", "first": str(conflict), "conflict": conflict.reasons}
        return None
    row |= {"moves": [vars(move) for move in wanted.moves], "overridden": wanted.overridden}
    return wanted


def _before(question: Any, here: Any, record: dict[str, Any], line: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What holds in the present environment, with goldens recorded now if the port has none; the question with those goldens.

    Raises:
        UsageProblem: nothing does.
    """
    from loudfail.harness import upgrade_drift, upgrade_run

    before = upgrade_run.measure(question, here, name="before", **arguments)
    if not upgrade_run.holds_anything(before):
        why = next(iter(str(before["gate_error"]).strip().splitlines()[-1:]), f"see `loudfail gate {question.port}`")
        raise UsageProblem(f"no check holds before the upgrade, so there is nothing to compare: {why}")
    about_goldens = []
    if before["goldens"] is not None and not upgrade_run.has_goldens(before):
        folder = arguments["cache"] / f"goldens-{question.key(here)}"
        if why := upgrade_run.record_goldens(question, here, folder, say=line.show):
            about_goldens = [f"no goldens, and none could be recorded, so only checks are compared: {why}"]
        else:
            about_goldens = ["the port has no goldens; these were recorded before the upgrade, with tolerances measured on this machine"]
            question = upgrade_run.Question(question.port, question.gate, (*question.golden, "--folder", str(folder)))
            before = upgrade_run.measure(question, here, name="before", **arguments)
    record["before"]["seconds"] = before["seconds"]
    record["notes"] = upgrade_drift.compare(before, before)["notes"] + about_goldens
    for note in record["notes"]:
        line.print(f"note: {note}")
    return question, before


def _row(request: Request, port: str) -> dict[str, Any]:
    words = [
        "loudfail",
        "upgrade",
        port,
        *(word for one in request.packages for word in ("--with", one)),
        *(["--override"] if request.override else []),
    ]
    return {
        "requests": list(request.packages), "override": request.override, "expect": request.expect, "because": request.because, "moves": [],
        "overridden": [], "drift": None, "environment": None, "failed": False, "rerun": shlex.join(words),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    """A row on the terminal."""
    from loudfail.harness.upgrade_report import checks_in_brief, goldens_in_brief, moves, ratio_in_brief

    note = " as expected" if row["as_expected"] else f", but {row['expect']} was expected" if row["expect"] else ""
    lines = [f"{moves(row)}: {row['verdict']}{note}"]
    if row["drift"]:
        lines.append(f"    checks: {checks_in_brief(row)} · goldens: {goldens_in_brief(row)} · {ratio_in_brief(row)}")
    return "\n".join([*lines, f"    {row['first']}", *(f"    {text}" for text in row["overridden"])])


def _write(record: dict[str, Any], out: Path) -> None:
    """Write the three files of a record; one of an older schema becomes one of this."""
    from loudfail.harness import upgrade_report

    write_json(out / "upgrade.json", upgrade_report.compact(record) | {"schema": SCHEMA})
    upgrade_report.write(record, out)


def _question(parsed: argparse.Namespace) -> Any:
    from loudfail.harness.upgrade_run import Question

    def given(*flags: str) -> list[str]:
        return [f"{flag}={value}" for flag in flags if (value := getattr(parsed, opts.destination(flag))) is not None]

    # Goldens have both dtypes and one scale.
    device = [f"--device={parsed.device}"] if parsed.device in ("cpu", "cuda") else []
    gate = given("--tp", "--device", "--scale", "--dtype", "--attention") + ([f"-k={parsed.k}"] if parsed.k else [])
    return Question(parsed.port, tuple(gate), tuple(given("--tp") + device))


def _command(parsed: argparse.Namespace) -> str:
    words = ["loudfail", "upgrade", parsed.port]
    asked = {"--with": parsed.packages, "--matrix": parsed.matrix, "-k": parsed.k}
    for flag in opts.PORT_OPTIONS:
        asked[flag] = getattr(parsed, opts.destination(flag), None)
    for flag, value in asked.items():
        for one in value if isinstance(value, list) else [value] if value is not None else []:
            words += [flag, str(one)]
    return shlex.join([*words, *(["--override"] if parsed.override else [])])


def _requests(parsed: argparse.Namespace) -> list[Request]:
    found = [Request(_checked(parsed.packages, "--with"), parsed.override)] if parsed.packages else []
    found += read_matrix(parsed.matrix) if parsed.matrix is not None else []
    if not found:
        raise UsageProblem('say what to upgrade: --with "diffusers==0.42.1", or --matrix FILE')
    return found


def _checked(packages: Sequence[str], place: str) -> tuple[str, ...]:
    """The requests as they are; raises `UsageProblem`, with the place, before anything is run for what no installer would take."""
    for text in packages:
        if problem := _problem(text):
            raise UsageProblem(f"{place}: {problem}")
    return tuple(packages)


def _problem(text: str) -> str:
    """What is wrong with a request, and what to give instead; empty if nothing is."""
    from packaging.requirements import InvalidRequirement, Requirement

    from loudfail.harness.environments import is_file

    if is_file(text) and " @ " not in text:
        if not Path(text).exists():
            return f"{text}: there is no such file; give the path of a wheel that is there"
        if Path(text).is_dir():
            return f"{text} is a folder; make a wheel of it (`pip wheel --no-deps {text}`) and give that"
        return ""
    try:
        if Requirement(text).url:
            return f"{text!r} is an address; download the wheel and give its path, whose content the environment is cached under"
    except InvalidRequirement as error:
        return f"{text!r} is no requirement, such as diffusers==0.42.1: {str(error).splitlines()[0]}"
    return ""


def read_matrix(path: Path) -> list[Request]:
    """The rows of a matrix file: tables ``[[upgrade]]`` with ``with`` (a requirement or a list), ``override``, ``expect`` and ``because``.

    Raises:
        UsageProblem: it cannot be read, or a row makes no sense.
    """
    from loudfail.harness.upgrade_drift import VERDICTS

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageProblem(f"--matrix {path}: {error}") from None
    rows = content.get("upgrade")
    if not isinstance(rows, list) or not rows or set(content) != {"upgrade"}:
        raise UsageProblem(f'--matrix {path}: wants tables [[upgrade]], each with = "diffusers==0.42.1" or a list')
    return [_request(row, f"--matrix {path}: upgrade {place}", VERDICTS) for place, row in enumerate(rows, 1)]


def _request(row: Any, place: str, verdicts: Sequence[str]) -> Request:
    if not isinstance(row, dict):
        raise UsageProblem(f"{place}: wants a table [[upgrade]], not {row!r}")
    if unknown := sorted(set(row) - {"with", "override", "expect", "because"}):
        raise UsageProblem(f"{place}: {unknown[0]!r} is none of with, override, expect, because")
    packages = [row["with"]] if isinstance(row.get("with"), str) else row.get("with")
    if not isinstance(packages, list) or not packages or not all(isinstance(one, str) and one.strip() for one in packages):
        said = f"with = {row['with']!r}" if "with" in row else "with is missing"
        raise UsageProblem(f'{place}: {said}; wants a requirement, such as "diffusers==0.42.1", or a list of them')
    expect, because = row.get("expect", ""), row.get("because", "")
    if not isinstance(row.get("override", False), bool):
        raise UsageProblem(f"{place}: override = {row['override']!r} is neither true nor false")
    if expect and expect not in verdicts:
        raise UsageProblem(f"{place}: expect = {expect!r} is none of {', '.join(verdicts)}")
    if expect and expect not in PASSING and not str(because).strip():
        raise UsageProblem(f"{place}: a verdict of {expect} that is expected needs a reason: because = …")
    return Request(_checked(packages, place), row.get("override", False), expect, str(because))
