"""Gate and goldens of a port in one environment, each in a process of its own, kept under what they depend on so that nothing is run twice."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loudfail.harness import environment as machine
from loudfail.harness.environments import Environment, child, locked
from loudfail.harness.record import write_json

Say = Callable[[str], None]
#: The command line, which ends with the process that started it, however that ends (`prctl(2)`, PR_SET_PDEATHSIG = 1).
COMMAND = (
    "-c",
    "import ctypes, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))\n"
    "from loudfail.harness.cli import command; command()",
)
#: Packages whose files decide what a run gives, goldens among them.
SOURCES = ("loudfail.harness", "loudfail.invariants", "loudfail.golden")
#: Modules of these names compare and show what was run.
VIEWS = ("upgrade", "environments", "report")
#: Seconds after which a gate or a verification is given up. A rank that hangs ends sooner, by its own limit.
TIMEOUT = 1800.0
REASON = "what the port computes before an upgrade"


class Void(Exception):
    """What ran says nothing about an upgrade: suite or port were edited meanwhile, or other versions ran than those that were to."""


@dataclass(frozen=True)
class Question:
    """What is run in each environment.

    Attributes:
        port: name, or ``package.module:Class``.
        gate: further arguments of ``loudfail gate``.
        golden: further arguments of ``loudfail golden verify``.
    """

    port: str
    gate: tuple[str, ...] = ()
    golden: tuple[str, ...] = ()

    def key(self, environment: Environment) -> str:
        """Identity of a run: environment, sources of suite and port, arguments, threads, and the processor, whose rounding is its own."""
        numbers = [os.environ.get("OMP_NUM_THREADS", "1"), os.environ.get("ATEN_CPU_CAPABILITY", ""), str(machine.describe("cpu")["cpu"])]
        parts = [environment.key, sources(self.port), self.port, *self.gate, "", *self.golden, "", *numbers]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def sources(port: str) -> str:
    """Hash of the files of suite, goldens and port, found without importing them."""
    digest = hashlib.sha256()
    for path in _files(port):
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _files(port: str) -> Iterator[Path]:
    names = [*SOURCES, *([port.partition(":")[0].split(".")[0]] if ":" in port and not port.startswith("loudfail.") else [])]
    with _importable(os.getcwd()):
        for name in names:
            spec = importlib.util.find_spec(name)
            for place in (spec.submodule_search_locations or []) if spec else []:
                yield from sorted(
                    path for path in Path(place).rglob("*") if path.suffix in (".py", ".safetensors") and not path.stem.startswith(VIEWS)
                )
            if spec and spec.origin and not spec.submodule_search_locations:
                yield Path(spec.origin)
    yield from sorted(Path("goldens").rglob("*.safetensors"))


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def measure(question: Question, environment: Environment, cache: Path, *, fresh: bool = False, name: str = "", say: Say = print) -> dict[str, Any]:
    """Run gate and goldens in an environment.

    Args:
        question: what is run.
        environment: where.
        cache: folder of runs; one that was finished with the same environment, sources and arguments is not run again.
        fresh: run again all the same.
        name: of the environment, for progress.
        say: told what is being run, and its last line.

    Returns:
        ``packages``, ``python``; ``gate``: the record of the gate or None; ``gate_error``: the end of its output if it left none;
        ``goldens``: list of verifications or None, with ``goldens_error`` likewise; ``seconds``: of each.

    Raises:
        Void: see there.
    """
    folder = cache / f"run-{question.key(environment)}"
    with locked(folder, lambda text: say(f"{name}: {text}")):
        if (known := _load(folder / "run.json")) and not fresh:
            say(f"{name}: was run before with these versions and sources")
            return known
        return _measure(question, environment, folder, name, say)


def _measure(question: Question, environment: Environment, folder: Path, name: str, say: Say) -> dict[str, Any]:
    at_start = sources(question.port)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record: dict[str, Any] = {"key": environment.key, "packages": stack(environment), "seconds": {}}

    out = folder / "gate"
    code, seconds, log = _call(environment, ["gate", question.port, *question.gate, "--out", str(out)], folder / "gate.log", f"{name}: gate", say)
    codes = [code]
    record["seconds"]["gate"] = seconds
    record["gate"] = _load(out / "report.json")
    record["gate_error"] = "" if record["gate"] else _tail(log, code)
    _see_versions(record["gate"], environment)

    arguments = ["golden", "verify", question.port, "--json", *question.golden]
    code, seconds, log = _call(environment, arguments, folder / "goldens.log", f"{name}: goldens", say, output=folder / "goldens.json")
    codes.append(code)
    record["seconds"]["goldens"] = seconds
    found = _load(folder / "goldens.json")
    record["goldens"] = found.get("goldens") if found else None
    record["goldens_error"] = "" if found else _tail(log, code)
    if sources(question.port) != at_start:
        raise Void("Loudfail's or the port's files were edited while this ran; what differs would not be the upgrade's. Run it again")
    # Last: a run without it was interrupted and is run again. So is one that was ended from outside, or in which nothing holds, by what may be the
    # machine's fault and mended meanwhile.
    if all(ended is not None and ended >= 0 for ended in codes) and holds_anything(record):
        write_json(folder / "run.json", record)
    return record


def holds_anything(run: Mapping[str, Any]) -> bool:
    """Whether any check of a run holds. Two runs in which none does agree, and that says nothing."""
    return any(result["status"] == "holds" for result in (run.get("gate") or {}).get("results") or [])


def has_goldens(run: Mapping[str, Any]) -> bool:
    """Whether a run compared anything with goldens."""
    return any(one.get("probes") for one in run.get("goldens") or [])


def record_goldens(question: Question, environment: Environment, folder: Path, *, say: Say = print) -> str:
    """Record goldens of a port that has none, with their measured tolerances.

    Returns:
        Empty, or why the port does not allow it.
    """
    with locked(folder, say):
        if (folder / "complete").exists():
            return ""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = ["golden", "record", question.port, "--folder", str(folder), "--reason", REASON, "--allow-dirty", ".", *question.golden]
        code, _, log = _call(environment, arguments, folder / "record.log", "recording goldens before the upgrade", say)
        if code != 0:
            return _tail(log, code).splitlines()[-1]
        (folder / "complete").touch()
        return ""


def _see_versions(gate: Mapping[str, Any] | None, environment: Environment) -> None:
    """See that a gate ran with the versions that its environment is said to have; nothing that it says is worth anything otherwise."""
    for name, version in ((gate or {}).get("environment", {}).get("packages") or {}).items():
        if environment.versions.get(name) != version:
            raise Void(f"the gate ran with {name} {version}, not {environment.versions.get(name)}; is PYTHONPATH or a .pth file in the way?")


def stack(environment: Environment) -> dict[str, str]:
    """Versions of what decides a result."""
    return {name: environment.versions[name] for name in (*machine.PACKAGES, *machine.ALSO) if name in environment.versions}


def _call(
    environment: Environment, arguments: Sequence[str], log: Path, label: str, say: Say, output: Path | None = None
) -> tuple[int | None, float, Path]:
    """Run the command line in an environment; exit code (None: given up after `TIMEOUT`), seconds, and the file with what it said."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(log.open("w"))
        told = stack.enter_context(output.open("w")) if output else said
        process = subprocess.Popen(
            [str(environment.python), *COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=told, stderr=said, env=child(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.perf_counter() - started < TIMEOUT:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
                if process.returncode is None:
                    say(f"{label}, {time.perf_counter() - started:.0f} s · {_last(log)}")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks too, if any is left
            process.wait()
    seconds = round(time.perf_counter() - started, 2)
    return (process.returncode if seconds < TIMEOUT else None), seconds, log


def _load(path: Path) -> dict[str, Any] | None:
    """A record; None if it is not there or not complete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _last(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return re.sub(r"^\s*…\s*", "", lines[-1])[:120] if lines else ""


def _tail(path: Path, code: int | None) -> str:
    """The end of what a process said, from a crash of the interpreter on if there was one, and how it ended."""
    lines = path.read_text(errors="replace").strip().splitlines()
    crash = next((place for place, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    said = lines[-40:] if crash is None else lines[crash : crash + 40]
    if code is None:
        ended = f"given up after {TIMEOUT:.0f} s"
    elif code < 0:
        ended = f"ended by {signal.Signals(-code).name}" + (", which the system sends where memory runs out" if code == -signal.SIGKILL else "")
    elif code == 0 or not said:
        ended = f"ended with exit code {code} and left no record"
    else:
        return "\n".join(said)
    return "\n".join([*said, ended])
