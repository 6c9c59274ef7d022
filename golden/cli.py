"""``loudfail golden record | verify | diff | list``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from loudfail.golden.diff import Verification
    from loudfail.golden.store import Golden
    from loudfail.harness.port import Port

#: Exit codes, those of pytest.
OK, CHANGED, USAGE = 0, 1, 4
DTYPES = ("float32", "bfloat16")
SCHEMA = "loudfail.goldens/1"


class UsageError(Exception):
    """What was asked for makes no sense; the message says why."""


class Parser(argparse.ArgumentParser):
    """Usage errors end with 4, as pytest's do."""

    def error(self, message: str) -> Any:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0: done, or everything verified is the same or drifted; 1: something changed, is missing, or may not be recorded; 4: usage.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    from loudfail.golden.record import Unsound
    from loudfail.golden.store import GoldenError
    from loudfail.harness.violation import Unavailable, Uncovered
    from loudfail.harness.world import RankError

    verbs: dict[str, Callable[[argparse.Namespace], int]] = {"record": _record, "verify": _verify, "diff": _diff, "list": _list}
    try:
        with _output(options.json) as options.output:
            return verbs[options.verb](options)
    except UsageError as error:
        return _fail(str(error), USAGE)
    except Unsound as error:
        return _fail(str(error), CHANGED)
    except GoldenError as error:
        return _fail(str(error), USAGE if options.verb == "record" else CHANGED)
    except (Uncovered, Unavailable, RankError) as error:
        return _fail(str(error), CHANGED)
    except KeyboardInterrupt:
        return _fail("interrupted", 2)


def _parser() -> Parser:
    parser = Parser(prog="loudfail golden", description="Traces recorded before a change, verified after it.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.add_argument("--folder", type=Path, help="folder of goldens (default: the package's for its own ports, else ./goldens)")
        added.add_argument("--json", action="store_true", help="JSON to standard output")
        return added

    def selection(added: argparse.ArgumentParser) -> None:
        added.add_argument("port", help="name of a port, or package.module:Class")
        added.add_argument("--case", action="append", default=[], help="only this case (may be repeated)")
        added.add_argument("--dtype", default=",".join(DTYPES), help="default: %(default)s")
        added.add_argument("--tp", default="1,2,4", help="tensor-parallel degrees (default: %(default)s)")
        added.add_argument("--device", default="cpu", choices=("cpu", "cuda"))

    record = verb("record", "Record the traces of a port, with tolerances from measured spread.")
    selection(record)
    record.add_argument("--reason", required=True, help="why; kept in the golden")
    record.add_argument("--allow-dirty", action="append", default=[], metavar="PATH", help="path, folder or pattern that may differ from the commit")
    check = verb("verify", "Run the recorded cases again: same, drifted or changed.")
    selection(check)
    check.add_argument("--all", action="store_true", help="show the probes that are the same, too")
    diff = verb("diff", "Compare two goldens, or a golden with the present.")
    diff.add_argument("a", help="name (h3/t2va-float32) or .safetensors file; its tolerances count")
    diff.add_argument("b", nargs="?", default="present", help="the same, or 'present' (default): run the case now")
    diff.add_argument("--port", help="for a file against the present: the port to run (default: the name's first part)")
    diff.add_argument("--all", action="store_true", help="show the probes that are the same, too")
    verb("list", "List the goldens and what they are based on.").add_argument("port", nargs="?", help="only this port's")
    return parser


def _record(options: argparse.Namespace) -> int:
    from loudfail.golden.cases import cases_of
    from loudfail.golden.record import name_of, record

    if not options.reason.strip():
        raise UsageError("--reason is empty; say why the values are right, or what moves them")
    degrees, written = _degrees(options), []
    for port in _ports(options):
        for case in cases_of(port):
            if options.case and case.name not in options.case:
                continue
            name = name_of(case, port)
            golden = record(
                port, case, reason=options.reason, degrees=degrees, folder=_folder(options, type(port)), allow_dirty=options.allow_dirty,
                progress=lambda what, name=name: _say(f"{name}: {what}"),  # type: ignore[misc]
            )  # fmt: skip
            written.append(golden)
    _show(options, [_entry(golden) for golden in written], "\n".join(map(_line, written)))
    return OK


def _verify(options: argparse.Namespace) -> int:
    from loudfail.golden.diff import Verification
    from loudfail.golden.verify import verify

    degrees, results, folder = _degrees(options), [], None
    for port in _ports(options):
        folder = _folder(options, type(port))
        results += verify(port, degrees=degrees, folder=folder, cases=options.case, progress=_say)
    if not options.case and options.dtype == ",".join(DTYPES) and options.device == "cpu" and results and folder is not None:
        verified = {result.name for result in results}
        found = sorted(f"{path.parent.name}/{path.stem}" for path in (folder / results[0].name.split("/")[0]).glob("*.safetensors"))
        results += [
            Verification(name, "changed", message=f"{name} belongs to no case any more; remove it from version control")
            for name in found
            if name not in verified and not name.endswith("-cuda")
        ]
    return _judge(options, results)


def _diff(options: argparse.Namespace) -> int:
    from loudfail.golden.cases import record_trace, threads
    from loudfail.golden.diff import compare
    from loudfail.golden.record import name_of, versions

    a = _load(options, options.a)
    if options.b != "present":
        b = _load(options, options.b)
        if a.case_hash != b.case_hash:
            _say(f"other inputs: {', '.join(key for key in a.case if a.case[key] != b.case.get(key)) or 'fields were added'}")
        for field in ("claim", "reason", "commit", "device", "recorded"):
            if getattr(a, field) != getattr(b, field):
                _say(f"{field}: {getattr(a, field)} → {getattr(b, field)}")
        return _judge(options, [compare(a, b.tensors, b.versions)])
    # Which port runs is said by whoever asks, never by the file.
    name = options.port or (options.a.split("/")[0] if not _is_file(options.a) else None)
    if name is None:
        raise UsageError("a file does not say which code to run; add --port PORT")
    dtype = str(a.case.get("dtype"))
    if dtype not in DTYPES:
        raise UsageError(f"the golden's dtype {dtype[:40]!r} is none of {', '.join(DTYPES)}")
    port = _port(name, dtype, "cuda" if a.name.endswith("-cuda") else "cpu")
    try:
        from loudfail.golden.cases import cases_of

        matching = [case for case in cases_of(port) if name_of(case, port) == a.name]
        if not matching:
            raise UsageError(f"port {name} has no case for {a.name}; it has {', '.join(name_of(case, port) for case in cases_of(port))}")
        _say(a.name)
        with threads(1):
            now = record_trace(port, matching[0], a.degrees)
    finally:
        port.close()
    return _judge(options, [compare(a, now, versions())])


def _list(options: argparse.Namespace) -> int:
    from loudfail.golden.store import TRACES, GoldenError, load

    folder = options.folder or TRACES
    entries, lines, bad = [], [], 0
    for path in sorted(folder.glob(f"{options.port or '*'}/*.safetensors")):
        try:
            golden = load(path)
        except GoldenError as error:
            bad += 1
            entries.append({"name": f"{path.parent.name}/{path.stem}", "refused": str(error)})
            lines.append(f"{path.parent.name}/{path.stem}: refused: {error}")
            continue
        entries.append(_entry(golden))
        lines.append(_line(golden))
    _show(options, entries, "\n".join(lines) or f"no goldens in {folder}")
    return CHANGED if bad else OK


def _judge(options: argparse.Namespace, results: list[Verification]) -> int:
    from loudfail.golden.diff import table

    if not results:
        raise UsageError("nothing to verify")
    lines = []
    for result in results:
        counted = f"{len(result.rows)} probes" + (f", {result.left_out} of other degrees left out" if result.left_out else "")
        lines.append(f"{result.name}: {result.outcome}" + (f": {result.message}" if result.message else f" ({counted})"))
        if result.first is not None:
            lines.append(f"  first: {result.first}")
        if result.outcome != "same" and result.versions:
            moved = [f"{name} {then or 'absent'} → {now or 'absent'}" for name, (then, now) in result.versions.items()]
            lines.append(f"  versions: {', '.join(moved)}")
        if rows := table(result, everything=options.all):
            lines.append(rows)
    _show(options, [result.to_dict() for result in results], "\n".join(lines))
    return CHANGED if any(result.outcome == "changed" for result in results) else OK


def _ports(options: argparse.Namespace) -> Iterator[Port]:
    """A port for each dtype, one after the other, closed when the next one is asked for."""
    from loudfail.golden.cases import cases_of

    dtypes = options.dtype.split(",")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UsageError(f"--dtype {unknown[0]!r} is none of {', '.join(DTYPES)}")
    for dtype in dict.fromkeys(dtypes):
        port = _port(options.port, dtype, options.device)
        try:
            names = [case.name for case in cases_of(port)]
            if unknown := [name for name in options.case if name not in names]:
                raise UsageError(f"no case {unknown[0]!r}; {port.name} has {', '.join(names)}")
            yield port
        finally:
            port.close()


def _port(name: str, dtype: str, device: str) -> Port:
    from loudfail.harness import environment
    from loudfail.harness.registry import UnknownId, find_port

    environment.use_exact_float32()
    try:
        return find_port(name)(dtype=dtype, device=device)
    except (UnknownId, ImportError) as error:
        raise UsageError(str(error)) from error


def _degrees(options: argparse.Namespace) -> list[int]:
    parts = options.tp.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--tp {options.tp!r}: give degrees such as 1,2,4")
    return sorted({int(part) for part in parts})


def _folder(options: argparse.Namespace, port: type) -> Path:
    from loudfail.golden.store import TRACES

    return options.folder or (TRACES if port.__module__.startswith("loudfail.") else Path("goldens"))


def _is_file(text: str) -> bool:
    return text.endswith(".safetensors")


def _load(options: argparse.Namespace, text: str) -> Golden:
    from loudfail.golden.store import TRACES, load, path_of

    return load(Path(text) if _is_file(text) else path_of(text, options.folder or TRACES))


def _entry(golden: Golden) -> dict[str, Any]:
    """What a list shows of a golden."""
    record = golden.record()
    return {key: value for key, value in record.items() if key != "probes"} | {"probes": len(golden.probes)}


def _line(golden: Golden) -> str:
    weakest = min(golden.faults, key=lambda one: one.margin)
    degrees = ", ".join(map(str, golden.degrees)) or "none"
    commit = (golden.commit or "none")[:12] + (" with uncommitted changes" if golden.dirty else "")
    return (
        f"{golden.name}: {golden.claim}\n  {len(golden.probes)} probes, tp {degrees}, {golden.recorded}, commit {commit}: {golden.reason}\n"
        f"  tolerances up to {max(probe.tolerance for probe in golden.probes):.2g} ({golden.factor:g} × measured spread); "
        f"weakest fault {weakest.fault}: {weakest.effect:.2g} at {weakest.probe}, {weakest.margin:.3g} tolerances"
    )


@contextlib.contextmanager
def _output(record: bool) -> Iterator[TextIO]:
    """Standard output. If a record goes there, what models and libraries print meanwhile, in ranks too, goes to standard error."""
    if not record:
        yield sys.stdout
        return
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # a stream of Python's alone
        output = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield output
        return
    kept = os.dup(number)
    try:
        os.dup2(sys.stderr.fileno(), number)
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as output:
            yield output
        sys.stdout.flush()
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _show(options: argparse.Namespace, entries: list[dict[str, Any]], text: str) -> None:
    record = {"schema": SCHEMA, "goldens": entries}
    print(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) if options.json else text, file=options.output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(text: str, code: int) -> int:
    _say(f"loudfail golden: {text}")
    return code
