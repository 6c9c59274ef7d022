"""Goldens on disk: ``<port>/<case>.safetensors`` with the tensors and the record, and a ``.json`` beside it with the same record for people.

Reading a golden trusts nothing in it: it is parsed as safetensors and strict JSON, every tensor is compared with its hash, and every tolerance with
the spread that it is said to come from. No code is loaded from a golden, and nothing that it names is imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loudfail.harness.record import plain, write_json

if TYPE_CHECKING:
    import torch

SCHEMA = "loudfail.golden/1"
#: Goldens that come with the package.
TRACES = Path(__file__).parent / "traces"
#: A tolerance is the measured spread times this. The spread is the largest of a handful of runs; later runs go beyond it, but not by much.
FACTOR = 3.0
#: Each known fault has to lie this many tolerances away at one probe at least.
RATIO = 20.0
#: Larger files are refused before they are read.
LARGEST_BYTES = 64 * 2**20
_NAME = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+")
_PROBE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_HASH = re.compile(r"[0-9a-f]{64}")
_KEY = "loudfail"


class GoldenError(ValueError):
    """A golden cannot be read or written; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Probe:
    """What is recorded of one tensor.

    Attributes:
        name: its name in the trace.
        shape, dtype: as in torch, the dtype without ``torch.``.
        sha256: of its bytes.
        spread: largest relative error ``‖other − recorded‖ / ‖recorded‖`` over runs that are all right; 0: every run gave the same bits.
        spread_from: the run that gave it; empty if it is 0.
        tolerance: ``FACTOR · spread``; 0 asks for the same bits.
        weakest: smallest relative effect that a known fault has here, of those that reach this probe; None: none does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    spread: float
    spread_from: str
    tolerance: float
    weakest: float | None


@dataclass(frozen=True)
class Detection:
    """Where a golden sees a known fault best: its relative effect at one probe, and ``margin = effect / tolerance`` there."""

    fault: str
    claim: str
    probe: str
    effect: float
    margin: float


@dataclass(frozen=True)
class Golden:
    """A frozen trace.

    Attributes:
        name: ``<port>/<case>-<dtype>``.
        claim: a sentence that is true while it verifies.
        reason: why it was recorded.
        commit: of the port's source; None if it is in no checkout.
        dirty: paths that differed from the commit.
        recorded: day, ISO 8601, UTC.
        versions: package → version.
        device: ``cpu`` or the GPU's name, and the processor.
        port: `Port.describe`.
        degrees: tensor-parallel degrees in it.
        case: what the inputs follow from.
        case_hash: SHA-256 of ``case``.
        factor, ratio: `FACTOR` and `RATIO` when it was recorded.
        runs: what the spread was measured over, name → what was different.
        faults: the known faults; their margins are the basis of the tolerances.
        probes: in the order of the trace.
        tensors: name → tensor; not part of the record.
    """

    name: str
    claim: str
    reason: str
    commit: str | None
    dirty: tuple[str, ...]
    recorded: str
    versions: dict[str, str]
    device: str
    port: dict[str, Any]
    degrees: tuple[int, ...]
    case: dict[str, Any]
    case_hash: str
    factor: float
    ratio: float
    runs: dict[str, str]
    faults: tuple[Detection, ...]
    probes: tuple[Probe, ...]
    tensors: Mapping[str, torch.Tensor] = field(repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("tensors", "faults", "probes")}
        listed = {"faults": [asdict(one) for one in self.faults], "probes": [asdict(one) for one in self.probes]}
        return plain({"schema": SCHEMA} | values | listed)


def fingerprint(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def case_hash(case: Mapping[str, Any]) -> str:
    """SHA-256 of a case's description in canonical JSON."""
    return hashlib.sha256(json.dumps(plain(dict(case)), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def path_of(name: str, folder: Path = TRACES) -> Path:
    """Where a golden of that name lies.

    Raises:
        GoldenError: the name is not ``<port>/<case>`` in letters, digits, ``-`` and ``_``.
    """
    if not _NAME.fullmatch(name):
        raise GoldenError(f"{name[:80]!r} is no name of a golden; names look like h3/t2va-float32")
    return folder / f"{name}.safetensors"


def save(golden: Golden, folder: Path = TRACES) -> Path:
    """Write both files, each under a temporary name that is then renamed, and read them back.

    Raises:
        GoldenError: the golden is not sound (see `load`), or the folder cannot be written.
    """
    from safetensors.torch import save as serialize

    path = path_of(golden.name, folder)
    _check(golden, path)
    record = golden.record()
    data = serialize(dict(golden.tensors), metadata={_KEY: json.dumps(record, sort_keys=True, allow_nan=False)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, data)
        write_json(path.with_suffix(".json"), record)
    except OSError as error:
        raise GoldenError(f"{path}: cannot be written: {error.strerror or error}") from error
    load(path)
    return path


def load(path: Path) -> Golden:
    """Read a golden and see that it is sound.

    Raises:
        GoldenError: it is missing, truncated, corrupted, pickled, foreign, of another schema, edited, or not finite.
    """
    data = _read(path)
    record, tensors = _parse(path, data)
    golden = _build(path, record, tensors)
    _check(golden, path)
    beside = path.with_suffix(".json")
    if _json(beside, _read(beside)) != record:
        raise GoldenError(f"{beside}: is not the record in {path.name}; restore both from version control, or record again")
    return golden


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise GoldenError(f"{path}: no such file; `loudfail golden record PORT --reason TEXT` makes goldens")
        if path.stat().st_size > LARGEST_BYTES:
            raise GoldenError(f"{path}: {path.stat().st_size} bytes; goldens have at most {LARGEST_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Record and tensors of a safetensors file of ours."""
    from safetensors import SafetensorError
    from safetensors.torch import load as deserialize

    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        if data[:4] == b"PK\x03\x04" or (data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
            raise GoldenError(f"{path}: is a pickle (torch.save); only safetensors are read, since a pickle can run code")
        raise GoldenError(f"{path}: is truncated or no safetensors file; restore it from version control")
    try:
        tensors = deserialize(data)
        header = json.loads(data[8 : 8 + length])
    except (SafetensorError, ValueError, RecursionError, KeyError) as error:
        raise GoldenError(f"{path}: is corrupted or truncated ({str(error)[:120]}); restore it from version control") from None
    text = (header.get("__metadata__") or {}).get(_KEY)
    if not isinstance(text, str):
        raise GoldenError(f"{path}: is a safetensors file, but no golden: its header has no record of Loudfail's")
    return _json(path, text.encode()), tensors


def _json(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object without NaN and without a key that comes twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no number")

    try:
        record = json.loads(data, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise GoldenError(f"{path}: its record is no strict JSON ({str(error)[:120]})") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise GoldenError(f"{path}: schema is {str(found)[:60]!r}; this version reads {SCHEMA!r}; record again")
    return record


_TEXT, _TEXTS, _TABLE, _OBJECTS = "a text", "a list of texts", "an object", "a list of objects"
_NUMBER, _NUMBERS = "a number", "a list of whole numbers"
#: Field → what it must be, for the three kinds of object in a record.
_KINDS: dict[type, dict[str, str]] = {
    Golden: {
        "name": _TEXT, "claim": _TEXT, "reason": _TEXT, "commit": f"{_TEXT} or null", "dirty": _TEXTS, "recorded": _TEXT, "versions": _TABLE,
        "device": _TEXT, "port": _TABLE, "degrees": _NUMBERS, "case": _TABLE, "case_hash": _TEXT, "factor": _NUMBER, "ratio": _NUMBER, "runs": _TABLE,
        "faults": _OBJECTS, "probes": _OBJECTS,
    },
    Probe: {
        "name": _TEXT, "shape": _NUMBERS, "dtype": _TEXT, "sha256": _TEXT, "spread": _NUMBER, "spread_from": _TEXT, "tolerance": _NUMBER,
        "weakest": f"{_NUMBER} or null",
    },
    Detection: {"fault": _TEXT, "claim": _TEXT, "probe": _TEXT, "effect": _NUMBER, "margin": _NUMBER},
}  # fmt: skip


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a kind of `_KINDS`."""
    if kind.endswith(" or null"):
        return value is None or _is(value, kind.removesuffix(" or null"))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "a number":
        return number and math.isfinite(value) and value >= 0
    if kind.startswith("a list of "):
        one = {"texts": str, "whole numbers": int, "objects": dict}[kind.removeprefix("a list of ")]
        return isinstance(value, list) and all(isinstance(item, one) and not isinstance(item, bool) for item in value)
    return isinstance(value, str if kind == _TEXT else dict)


def _object(cls: type, path: Path, values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The fields of one object of a record, lists as tuples."""
    kinds = _KINDS[cls]
    if wrong := sorted(set(kinds) ^ (set(values) - {"schema"})):
        raise GoldenError(f"{path}: {where}fields are missing or unknown: {', '.join(wrong)[:200]}")
    for name, kind in kinds.items():
        if not _is(values[name], kind):
            raise GoldenError(f"{path}: {where}{name} is not {kind}")
    return {name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in kinds}


def _build(path: Path, record: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Golden:
    values = _object(Golden, path, record)
    values["faults"] = tuple(Detection(**_object(Detection, path, one, "in faults, ")) for one in values["faults"])
    values["probes"] = tuple(Probe(**_object(Probe, path, one, "in probes, ")) for one in values["probes"])
    return Golden(**values, tensors=tensors)


def _check(golden: Golden, path: Path) -> None:
    """See that record and tensors fit each other and that every tolerance follows from what was measured."""
    import torch

    def refuse(text: str) -> GoldenError:
        return GoldenError(f"{path}: {text}")

    if not _NAME.fullmatch(golden.name):
        raise refuse(f"name {golden.name[:80]!r} is not <port>/<case>")
    if not golden.reason.strip():
        raise refuse("has no reason")
    if case_hash(golden.case) != golden.case_hash:
        raise refuse("the case does not have the recorded hash")
    names = [probe.name for probe in golden.probes]
    if bad := [name for name in names if not _PROBE.fullmatch(name)]:
        raise refuse(f"probe name {bad[0][:80]!r} is not allowed: letters, digits, - and _ between single dots")
    if not names or len(set(names)) != len(names):
        raise refuse("has no probes" if not names else "a probe is listed twice")
    missing, extra = [name for name in names if name not in golden.tensors], sorted(set(golden.tensors) - set(names))
    if missing or extra:
        raise refuse(f"tensors do not fit the record; missing: {missing[:3]}, not listed: {[name[:80] for name in extra[:3]]}")
    for probe in golden.probes:
        tensor = golden.tensors[probe.name]
        if tuple(tensor.shape) != probe.shape or str(tensor.dtype) != f"torch.{probe.dtype}":
            raise refuse(f"{probe.name} is {tensor.dtype} {tuple(tensor.shape)}, recorded as {probe.dtype} {probe.shape}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise refuse(f"{probe.name} is not finite")
        if fingerprint(tensor) != probe.sha256 or not _HASH.fullmatch(probe.sha256):
            raise refuse(f"{probe.name} does not have the recorded hash")
        if probe.tolerance != golden.factor * probe.spread:
            raise refuse(f"the tolerance of {probe.name} is not {golden.factor:g} times its measured spread; tolerances are measured, not typed")
    if golden.factor > FACTOR or golden.ratio < RATIO:
        raise refuse(f"factor {golden.factor:g} or ratio {golden.ratio:g} is looser than {FACTOR:g} and {RATIO:g}; record again")
    tolerances = {probe.name: probe.tolerance for probe in golden.probes}
    for one in golden.faults:
        tolerance = tolerances.get(one.probe, 0.0)
        if not tolerance or not math.isclose(one.effect / tolerance, one.margin, rel_tol=1e-9) or one.margin < golden.ratio:
            raise refuse(f"fault {one.fault[:80]} is not shown to lie {golden.ratio:g} tolerances away")
    if not golden.faults:
        raise refuse("its tolerances were compared with no fault")
