"""Environments beside the present one, in which some packages have other versions.

An environment is a virtual environment that holds only what differs; for everything else it looks into the environment that it was made from,
which is only read. So it takes seconds and megabytes instead of minutes and gigabytes, and what is compared is the user's own environment with and
without the change. It is cached under the exact versions that it has.

Which packages have to move with the requested ones is found from what the distributions declare: as few as possible. A requirement that the present
environment already breaks (a companion of torch that does not load beside it, say) stays broken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

RECORD = "loudfail-environment.json"
Say = Callable[[str], None]


class Conflict(Exception):
    """The requested versions do not go together with what is installed.

    Attributes:
        reasons: a line for each requirement that forbids it, with the package that has it.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__("; ".join(reasons))


class NoSuchPackage(Conflict):
    """No index has a package of that name."""


class InstallFailed(Exception):
    """The installer failed, or what it installed is not what would be imported; the message says why, and has the end of the installer's output."""


class IndexUnreachable(Exception):
    """An index of packages does not answer, so nothing is known about what was asked for."""


@dataclass(frozen=True)
class Distribution:
    """A package at one version.

    Attributes:
        name: as the index normalizes it.
        version: exact.
        requires: the requirements that it declares, as text.
        install: what the installer is asked for: ``name==version``, or a local file.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    install: str = ""


@dataclass(frozen=True)
class Move:
    """A package that differs: its version before (None: it was not there) and after, and why."""

    name: str
    before: str | None
    after: str
    why: str


@dataclass
class Plan:
    """What has to be installed.

    Attributes:
        moves: packages that differ, the requested ones first.
        installs: what the installer is asked for, in the same order.
        overridden: requirements that are broken on purpose, a line each.
        versions: every distribution of the new environment → version.
    """

    moves: list[Move]
    installs: list[str]
    overridden: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Environment:
    """An environment that can be run in.

    Attributes:
        python: its interpreter.
        key: a hash of its exact versions.
        versions: distribution → version.
        bytes: what it takes on disk beyond the one that it was made from.
    """

    python: Path
    key: str
    versions: Mapping[str, str] = field(repr=False)
    bytes: int = 0


def normalize(name: str) -> str:
    """A distribution's name as the index has it."""
    return name.lower().replace("_", "-").replace(".", "-")


def installed() -> dict[str, Distribution]:
    """The distributions of this process by name; of one that is there twice the one that is imported."""
    found: dict[str, Distribution] = {}
    for one in metadata.distributions():
        if (name := one.metadata["Name"]) and normalize(name) not in found:
            found[normalize(name)] = Distribution(normalize(name), one.version, tuple(one.requires or ()))
    return found


def present() -> Environment:
    """The environment of this process."""
    versions = {name: one.version for name, one in installed().items()}
    return Environment(Path(sys.executable), digest(versions), versions)


def digest(versions: Mapping[str, str], *more: str) -> str:
    """Identity of an environment: versions, interpreter, where it looks, and what is said in addition."""
    parts = [sys.version, *_searched(), *more, *(f"{name}=={version}" for name, version in sorted(versions.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# -- which packages move -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Edge:
    """``owner`` requires ``requirement``, which names the package ``name``."""

    owner: str
    name: str
    requirement: str

    def say(self, dists: Mapping[str, Distribution]) -> str:
        return f"{self.owner} {dists[self.owner].version} requires {self.requirement}"


def _requirements(dist: Distribution) -> Iterator[tuple[str, Requirement]]:
    """Name and requirement of what a distribution needs on this machine, without extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in dist.requires:
        with contextlib.suppress(InvalidRequirement):
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                yield normalize(one.name), one


def _broken(dists: Mapping[str, Distribution]) -> list[_Edge]:
    """Requirements that are not met, in the order of the names."""
    found = []
    for owner in sorted(dists):
        for name, one in _requirements(dists[owner]):
            if name not in dists or not one.specifier.contains(dists[name].version, prereleases=True):
                found.append(_Edge(owner, name, f"{one.name}{one.specifier}"))
    return found


def plan(
    requests: Sequence[str], base: Mapping[str, Distribution], find: Callable[[str], Distribution], *, override: bool = False, say: Say = print
) -> Plan:
    """Which packages have to move for the requests.

    Args:
        requests: such as ``diffusers==0.42.1``, ``peft`` (the newest) or the path of a wheel.
        base: what is installed now.
        find: gives the distribution that an index has for a requirement; raises `Conflict` if it has none.
        override: install what was asked for even if a requirement of something else forbids it; each is listed.
        say: told what is looked up.

    Raises:
        Conflict: a requirement forbids it, or an index has no such version.
    """
    now, moved = dict(base), dict[str, Distribution]()
    why, asked = dict[str, str](), set[str]()
    tolerated = {(edge.owner, edge.name) for edge in _broken(base)}

    def move(text: str, reason: str) -> Distribution:
        say(f"looking up {text}")
        one = find(text)
        now[one.name] = moved[one.name] = one
        why.setdefault(one.name, reason)
        return one

    for text in requests:
        asked.add(move(text, "requested").name)
    overridden: dict[_Edge, str] = {}
    for _ in range(200):  # each turn moves one package or overrides one requirement; far more than any stack has
        edges = [edge for edge in _broken(now) if (edge.owner, edge.name) not in tolerated and edge not in overridden]
        if not edges:
            break
        forbidding = [edge for edge in edges if edge.name in asked]
        if forbidding and not override:
            raise Conflict([f"{edge.say(now)}, not {now[edge.name].version}" for edge in forbidding])
        if forbidding:
            overridden |= {edge: f"{edge.say(now)}; {now[edge.name].version} is installed regardless" for edge in forbidding}
            continue
        edge = next((edge for edge in edges if edge.owner in moved), edges[0])
        everyone = [(owner, one) for owner in now for name, one in _requirements(now[owner]) if name == edge.name and (owner, name) not in tolerated]
        reason = edge.say(now)
        try:
            move(f"{edge.name}{','.join(dict.fromkeys(str(one.specifier) for _, one in everyone if one.specifier))}", reason)
        except Conflict:
            try:
                alone = find(edge.requirement)
            except Conflict as nothing:
                raise Conflict([reason, *nothing.reasons]) from None
            against = [f"{owner} {now[owner].version} requires {one}" for owner, one in everyone if not one.specifier.contains(alone.version)]
            if not override:
                raise Conflict([f"{reason}, which would be {alone.version}", *against]) from None
            asked.add(move(edge.requirement, reason).name)
    else:
        raise Conflict([edge.say(now) for edge in edges])
    changed = {name: one for name, one in moved.items() if name not in base or base[name].version != one.version or os.sep in one.install}
    moves = [Move(name, base[name].version if name in base else None, one.version, why[name]) for name, one in changed.items()]
    versions = {name: one.version for name, one in now.items()}
    return Plan(moves, [one.install for one in changed.values()], list(overridden.values()), versions)


# -- the installers ------------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pip(cache: Path) -> Iterator[list[str]]:
    """pip of this environment; where it has none, one in a small environment beside the others."""
    from importlib.util import find_spec

    python = sys.executable
    if find_spec("pip") is None:
        tools = cache / "pip"
        with locked(tools):
            if not (tools / "bin" / "pip").exists():
                try:
                    venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(tools)
                except subprocess.CalledProcessError as error:
                    raise InstallFailed(f"this environment has no pip, and none can be made ({error}): install pip in it") from None
        python = str(tools / "bin" / "python")
    yield [python, "-m", "pip", "--disable-pip-version-check"]


def finder(cache: Path) -> Callable[[str], Distribution]:
    """Looks requirements up with pip and its settings (`PIP_INDEX_URL` and the like); nothing is installed.

    Args:
        cache: folder for what this needs.
    """

    def find(text: str) -> Distribution:
        with tempfile.TemporaryDirectory() as folder, _pip(cache) as pip:
            report = Path(folder) / "report.json"
            done = subprocess.run(
                [*pip, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), text],
                capture_output=True, text=True, env=_clean(), check=False,
            )  # fmt: skip
            if done.returncode or not report.exists():
                raise _not_found(text, done.stderr)
            items = json.loads(report.read_text())["install"]
        if not items:
            raise Conflict([f"{text}: its marker excludes this machine"])
        about = items[0]["metadata"]
        name, version = normalize(about["name"]), about["version"]
        return Distribution(
            name, version, tuple(about.get("requires_dist", ())), str(Path(text).resolve()) if is_file(text) else f"{name}=={version}"
        )

    return find


#: What pip says where an index cannot be asked; that it finds nothing then says nothing about the package.
_NO_ANSWER = re.compile(r"connection broken|Could not fetch URL|not a trusted or secure host|Failed to establish|ConnectionError|SSLError|ProxyError")


def _not_found(text: str, said: str) -> Conflict | IndexUnreachable:
    """Why pip has nothing for a requirement, from what it said."""
    if unanswered := [line for line in said.splitlines() if _NO_ANSWER.search(line)]:
        why = unanswered[0].rpartition("connection broken by ")[2].removeprefix("WARNING: ")[:200]
        return IndexUnreachable(f"{text}: an index of packages does not answer; see PIP_INDEX_URL, the proxy and `pip config list`: {why}")
    if there := re.search(r"\(from versions: ([^)]*)\)", said):
        versions = [] if there[1] == "none" else there[1].split(", ")
        if versions:
            return Conflict([f"{text}: there is no such version; the newest that fit here are {', '.join(versions[-3:])}"])
        if "require a different python version" in said:
            return Conflict([f"{text}: no version is for Python {sys.version.split()[0]}"])
        return NoSuchPackage([f"{text}: no index has such a package for this machine; is the name spelled right?"])
    if "conflicting dependencies" in said:  # without dependencies only what pip was told can conflict
        return Conflict([f"{text}: a constraint in pip's settings forbids it, see `pip config list` and PIP_CONSTRAINT"])
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR")]
    return Conflict([f"{text}: {errors[-1] if errors else 'pip finds nothing'}"])


@contextlib.contextmanager
def locked(folder: Path, say: Say = print) -> Iterator[int]:
    """Let one process at a time make what is in a folder. Another one waits, and says so.

    Yields:
        The lock's file descriptor. It is free when every process that has it has ended, killed or not.
    """
    with (folder.parent / f".{folder.name}.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                say(f"another process is at {folder.name}; waiting for it")
                time.sleep(0.5)
        yield file.fileno()


def is_file(text: str) -> bool:
    """Whether a request is a file or folder and no name of a package."""
    return text.endswith(".whl") or os.sep in text


def _clean() -> dict[str, str]:
    """The process's environment without what would lead another interpreter to the packages of this one."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _searched() -> list[str]:
    """Folders of packages that this process looks into, in order: what `PYTHONPATH` names, then site-packages."""
    named = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys(place for place in (*named, *user, *site.getsitepackages()) if os.path.isdir(place)))


def build(wanted: Plan, cache: Path, *, say: Say = print) -> Environment:
    """The environment of a plan: made, or taken from the cache.

    Args:
        wanted: from `plan`.
        cache: folder of environments.
        say: told what is being done, and how large it has become.

    Raises:
        InstallFailed: see there. What was begun is removed.
        OSError: the folder cannot be written.
    """
    local = [hashlib.sha256(Path(one).read_bytes()).hexdigest() for one in wanted.installs if os.sep in one]
    key = digest(wanted.versions, *local)
    folder = cache / f"env-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(folder, say) as lock:
        if (size := _finished(folder)) is None:
            size = _make(wanted, folder, cache, say, lock)
        else:
            say(f"environment {key} is there already ({size / 2**20:.0f} MiB)")
    return Environment(folder / "bin" / "python", key, wanted.versions, size)


def _finished(folder: Path) -> int | None:
    """Bytes of an environment; None unless its record, its interpreter and as many files as were installed are there."""
    try:
        about = json.loads((folder / RECORD).read_text())
        size, files = int(about["bytes"]), int(about.get("files", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if os.access(folder / "bin" / "python", os.X_OK) and _files(_packages(folder)) >= files else None


def _packages(folder: Path) -> Path:
    """Folder of packages of a virtual environment."""
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))


def _make(wanted: Plan, folder: Path, cache: Path, say: Say, lock: int) -> int:
    """Make an environment; returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)  # one that was begun and not finished
    started = time.monotonic()
    try:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        packages = _packages(folder)
        _install(wanted.installs, packages, cache, say, lock)
        # Read after the environment's own folder, so that what is there comes first; addsitedir obeys .pth files, of editable installations too.
        lines = [f"import site; site.addsitedir({place!r})" for place in _searched()]
        (packages / "loudfail_base.pth").write_text("\n".join(lines) + "\n")
        _see_origins(folder)
        size = _size(packages)
        about = {
            "versions": dict(wanted.versions), "installed": wanted.installs, "overridden": wanted.overridden, "bytes": size,
            "files": _files(packages),
        }  # fmt: skip
        (folder / RECORD).write_text(json.dumps(about, indent=1) + "\n")  # last: an environment without it is not used
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"environment {folder.name[4:]}: {len(wanted.installs)} packages, {size / 2**20:.0f} MiB, {time.monotonic() - started:.0f} s")
    return size


#: Run in an environment: the top-level modules of its own that would be imported from elsewhere, an import hook of the base being first.
_ELSEWHERE = """
import sys, importlib.util
from pathlib import Path
for path in sorted(Path(sys.argv[1]).iterdir()):
    name = path.name.partition(".")[0]
    if not name.isidentifier() or not (path.suffix in (".py", ".so") or (path / "__init__.py").exists()):
        continue
    try:
        origin = getattr(importlib.util.find_spec(name), "origin", None)
    except Exception:  # such a module has no specification; sys.modules has it already
        continue
    if origin and not Path(origin).resolve().is_relative_to(Path(sys.argv[1]).resolve()):
        print(f"{name} is imported from {origin}")
"""


def _see_origins(folder: Path) -> None:
    """See that what was installed is what is imported; a comparison of the present environment with itself finds nothing.

    Raises:
        InstallFailed: something else would be.
    """
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-c", _ELSEWHERE, str(_packages(folder))], capture_output=True, text=True, env=_clean(), check=False
    )
    if done.returncode:
        raise InstallFailed(f"the interpreter does not start in the environment\n{done.stderr[-3000:]}")
    if other := [line for line in done.stdout.splitlines() if " is imported from " in line]:
        raise InstallFailed(f"{other[0]}, not from what was installed; an editable installation of it is in the way: uninstall that first")


def _install(requirements: Sequence[str], target: Path, cache: Path, say: Say, lock: int) -> None:
    """Install exactly these, with uv where there is one, else pip; says how much has arrived while it runs. The installer holds the lock too: it goes
    on for a while where this process is killed."""
    if not requirements:
        return
    uv = shutil.which("uv")
    # pip unpacks in its temporary folder and moves everything at the end: one in the environment, so on the same disk, watched, and removed with it.
    with _pip(cache) as pip, tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory(dir=target.parent) as unpacked:
        command = [uv, "pip", "install", "--python", sys.executable] if uv else [*pip, "install", "--progress-bar=off"]
        command += ["--no-deps", "--target", str(target), *(["--compile-bytecode"] if uv else ["--upgrade"]), *requirements]
        say(f"installing with {'uv' if uv else 'pip'}: {', '.join(Path(one).name for one in requirements)}")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_clean() | {"TMPDIR": unpacked}, pass_fds=(lock,))
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                if process.returncode is None:
                    say(f"installing: {(_size(target) + _size(Path(unpacked))) / 2**20:.0f} MiB there so far")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            log.seek(0)
            said = log.read()[-3000:]
            last = next(reversed(said.strip().splitlines()), f"exit code {process.returncode}")
            raise InstallFailed(f"{last}\n{' '.join(command)}\n{said}")


def _files(folder: Path) -> int:
    """Number of files but those that an interpreter adds."""
    return sum(not name.endswith(".pyc") for _, _, files in os.walk(folder) for name in files)


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def default_cache() -> Path:
    """Folder of environments and runs in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loudfail" / "upgrade"


def child(environment: Environment) -> dict[str, Any]:
    """Environment variables for a process in an environment. Thread counts and offline use are those of this process, one thread by default."""
    return _clean() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | _path_of(environment)


def _path_of(environment: Environment) -> dict[str, str]:
    here = Path(sys.executable) == environment.python
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if here and os.environ.get("PYTHONPATH") else {}
