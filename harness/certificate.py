"""The certificate ``gate.json``: what was checked, on what, with which result, and whether it fits what is about to be run.

A certificate is data: it is parsed as JSON, its checksum is compared, and nothing that it names is imported.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loudfail.harness import environment
from loudfail.harness.port import Port
from loudfail.harness.record import plain

SCHEMA = "loudfail.gate/1"
#: What a certificate takes over from the report of its run.
SHARED = (
    "port",
    "verdict",
    "declared",
    "counts",
    "seconds",
    "peak_rss_bytes",
    "environment",
    "classes",
    "complete",
    "selection",
    "seed",
    "examples",
    "expected",
)


class Refused(Exception):
    """The certificate does not vouch for what is about to be run.

    Attributes:
        reasons: one line for each thing that is wrong or differs.
    """

    def __init__(self, path: Path, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(f"{path} does not vouch for this run:\n" + "\n".join(f"  {reason}" for reason in reasons))


def fingerprint(port: Port, degrees: Sequence[int]) -> dict[str, Any]:
    """What a result depends on: port and adapter configuration, sources, degrees, packages, Python, device."""
    return {
        "port": plain(port.describe()),
        "port_source": source_hash(type(port)),
        "suite_source": suite_hash(),
        "degrees": sorted(degrees),
        "collectives": {str(degree): talk for degree in sorted(degrees) if (talk := port.collectives(degree))},
        "packages": environment.versions(),
        "python": platform.python_version(),
        "device": environment.device_name(port.device),
    }


def source_hash(cls: type) -> str:
    """SHA-256 of the files that define a port: its class's module and those of its base classes."""
    digest = hashlib.sha256()
    for one in cls.__mro__:
        if one is not object:
            file = inspect.getsourcefile(one)
            digest.update(Path(file).read_bytes() if file else b"")
    return digest.hexdigest()


def suite_hash() -> str:
    """SHA-256 of the harness and the invariants, so that a certificate of an edited suite is not one of this suite."""
    from importlib.util import find_spec

    digest = hashlib.sha256()
    for package in ("loudfail.harness", "loudfail.invariants"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def make(report: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate of a run: extracts of its report, the `fingerprint`, and a checksum over both."""
    content = {"schema": SCHEMA} | {key: report.get(key) for key in SHARED} | {"fingerprint": dict(identity)}
    content = plain(content)
    return content | {"sha256": checksum(content)}


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the checksum itself, in canonical JSON."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Read a certificate and see that it is whole.

    Raises:
        Refused: it cannot be read, is no certificate, of another schema, or was edited.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(path, [f"cannot be read: {error.strerror or error}"]) from None
    except ValueError:  # bad JSON or bad UTF-8
        raise Refused(path, ["is not JSON; make it again with `loudfail gate PORT --out DIR`"]) from None
    except RecursionError:
        raise Refused(path, ["is nested too deeply to be a certificate"]) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise Refused(path, [f"schema is {found!r}, not {SCHEMA!r}"])
    try:
        whole = content.get("sha256") == checksum(content)
    except ValueError:  # not a number
        whole = False
    if not whole or not isinstance(content.get("fingerprint"), dict):
        raise Refused(path, ["was edited after the run: its checksum does not fit its content"])
    identity = content["fingerprint"]
    degrees = identity.get("degrees")
    sound = isinstance(identity.get("port"), dict) and isinstance(degrees, list) and all(type(degree) is int for degree in degrees)
    if not sound or not isinstance(content.get("verdict"), str) or not isinstance(content.get("counts"), dict):
        raise Refused(path, ["is no certificate: port, verdict, counts or degrees are missing or of another type"])
    return content


def require(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate, if it vouches for a run with this `fingerprint`.

    Raises:
        Refused: the verdict is not ``holds``, the run was restricted, or something differs; all of it is listed.
    """
    content = read(path)
    reasons = []
    if content["verdict"] != "holds":
        counts = ", ".join(f"{number} {status}" for status, number in (content.get("counts") or {}).items() if number)
        reasons.append(f"verdict is {content['verdict']} ({counts})")
    if not content.get("complete"):
        reasons.append(f"the run was restricted: {content.get('selection') or 'not every check was run'}")
    reasons += list(differences(content["fingerprint"], plain(dict(identity))))
    if reasons:
        raise Refused(path, reasons)
    return content


def differences(certified: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One line for each item that differs, with both values."""
    for key in dict.fromkeys((*certified, *here)):
        was, now, name = certified.get(key), here.get(key), f"{prefix}{key}"
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{name}.")
        elif was != now and key.endswith("_source"):
            yield f"{name}: the code was changed since ({str(was)[:12]} then, {str(now)[:12]} now)"
        elif was != now:
            yield f"{name}: certified {_text(was)}, here {_text(now)}"


def _text(value: object) -> str:
    return "nothing" if value is None else str(value)
