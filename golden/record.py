"""Freeze traces, with tolerances that were measured: above what differs between runs that are right, far below what a known fault does."""

from __future__ import annotations

import inspect
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from loudfail.golden.cases import GoldenCase, other_kernels, record_trace, runs_at, same_claim, sample_of, threads
from loudfail.golden.elsewhere import trace_elsewhere
from loudfail.golden.store import FACTOR, RATIO, TRACES, Detection, Golden, GoldenError, Probe, case_hash, fingerprint, path_of, save
from loudfail.harness import environment, inject
from loudfail.harness.compare import relative_error
from loudfail.harness.port import Port, offers
from loudfail.harness.record import plain

if TYPE_CHECKING:
    import torch

    from loudfail.harness.trace import Trace

    Probes = Mapping[str, torch.Tensor]

#: Runs that must give the same result up to rounding. The recorded run has one thread.
RUNS = {
    "repeat": "the same again",
    "threads": "two threads, in actor and ranks",
    "kernels": "attention by plain products and no oneDNN, in actor and ranks",
    "instructions": "a process that uses none of the processor's wider instructions",
    "device": "the actor on the CPU instead of the GPU, or on the GPU instead of the CPU where there is one",
    "rounding 1": "inputs rounded another way, by half a unit in the last place of the port's dtype",
    "rounding 2": "inputs rounded yet another way",
}
#: What the recorded run itself shows: numbers that were computed in several ways.
ACROSS = {"degrees": "the same number at another tensor-parallel degree, or from another scheduler"}


class Unsound(GoldenError):
    """What was measured gives no golden: a value is not finite, a whole number is not repeatable, or the tolerances are too close to a fault."""


def name_of(golden: GoldenCase, port: Port, device: str | None = None) -> str:
    """Name of the golden of a case on a port: its dtype, and its device (the port's, if None) unless that is the CPU."""
    device = device or port.device
    return f"{port.name}/{golden.name}-{port.dtype}" + ("" if device == "cpu" else f"-{device}")


def record(
    port: Port, golden: GoldenCase, *, reason: str, degrees: Sequence[int] = (1, 2, 4), folder: Path = TRACES, allow_dirty: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Golden:  # fmt: skip
    """Run a case on a port in all the ways that are needed, and write its golden.

    Args:
        port: what is recorded.
        golden: one of `loudfail.golden.cases.cases_of`.
        reason: why; kept in the golden.
        degrees: tensor-parallel degrees of the rollout.
        folder: folder of goldens.
        allow_dirty: paths or patterns, relative to the checkout's root, that may differ from the commit.
        progress: told what is being run.

    Raises:
        GoldenError: no reason, uncommitted changes that are not allowed, or `Unsound`. Nothing is written then.
    """
    if not reason.strip():
        raise GoldenError("recording needs a reason; say why the values are right, or what moves them")
    import torch

    commit, dirty = source_state(port, path_of(name_of(golden, port), folder).parent, allow_dirty)

    def run(what: str, **options: object) -> Trace:
        progress(what)
        return record_trace(port, golden, degrees, **options)  # type: ignore[arg-type]

    runs: dict[str, Probes] = {}
    with threads(1):
        reference = run("the run that is recorded")
        runs["repeat"] = run(RUNS["repeat"])
        runs["rounding 1"] = run(RUNS["rounding 1"], nudge=1)
        runs["rounding 2"] = run(RUNS["rounding 2"], nudge=2)
        faults = {name: run(f"fault: {change.claim}", change=change) for name, change in golden.changes.items()}
        port.close()  # the rollout's text encoder, too, is built for kernels
        with ExitStack() as stack:
            stack.enter_context(other_kernels())
            if offers(port, "engine"):
                stack.enter_context(inject.in_ranks(port, other_kernels, 1, rebuild=True))
            runs["kernels"] = run(RUNS["kernels"])
        port.close()
    with ExitStack() as stack:
        stack.enter_context(threads(2))
        if offers(port, "engine"):
            stack.enter_context(inject.in_ranks(port, threads, 2))
        runs["threads"] = run(RUNS["threads"])
    if port.device == "cpu":
        progress(RUNS["instructions"])
        runs["instructions"] = trace_elsewhere(port, golden, degrees)
    if torch.cuda.is_available():
        progress(RUNS["device"])
        runs["device"] = trace_elsewhere(port, golden, degrees, "cpu" if port.device == "cuda" else "cuda")
    claims = {name: change.claim for name, change in golden.changes.items()}
    probes, detections = derive(reference, runs, faults, claims)
    case = plain(golden.describe(port))
    frozen = Golden(
        name=name_of(golden, port),
        claim=golden.claim,
        reason=reason.strip(),
        commit=commit,
        dirty=dirty,
        recorded=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        device=device(port.device),
        port=plain(port.describe()),
        degrees=tuple(degrees) if offers(port, "engine") else (),
        case=case,
        case_hash=case_hash(case),
        factor=FACTOR,
        ratio=RATIO,
        runs={name: text for name, text in RUNS.items() if name in runs} | ACROSS,
        faults=detections,
        probes=probes,
        tensors=dict(reference),
    )
    save(frozen, folder)
    return frozen


def versions() -> dict[str, str]:
    """Versions that a golden names, those of a certificate among them."""
    described = environment.describe("cpu")
    return {"python": described["python"]} | described["packages"]


def device(kind: str) -> str:
    """``cpu`` or the GPU's name, and the processor."""
    return f"{environment.device_name(kind)} ({environment.describe('cpu')['cpu']})"


def derive(
    reference: Probes, runs: Mapping[str, Probes], faults: Mapping[str, Probes], claims: Mapping[str, str]
) -> tuple[tuple[Probe, ...], tuple[Detection, ...]]:
    """Tolerances from what was measured.

    Args:
        reference: the trace that is recorded.
        runs: name → trace of a run that is as right as the recorded one.
        faults: name → trace with a known fault.
        claims: what is wrong in each fault.

    Returns:
        The probes in the order of the trace, and where each fault is seen best.

    Raises:
        Unsound: see there.
    """
    import torch

    for what, trace in {"the recorded run": reference, **runs, **faults}.items():
        for name, value in trace.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise Unsound(f"{name} is not finite in {what}; nothing is recorded")
    for what, trace in runs.items():
        expected = [name for name in reference if what != "device" or runs_at(name, ())]
        if list(trace) != expected:
            raise Unsound(f"run {what!r} gave other probes: {sorted(set(trace) ^ set(reference))[:3]}")
    peers: dict[str, list[str]] = {}
    for name in reference:
        peers.setdefault(same_claim(name), []).append(name)
    spreads: dict[str, tuple[float, str]] = {}
    for name, value in reference.items():
        measured = {what: _distance(trace[name], value) for what, trace in runs.items() if name in trace}
        measured["degrees"] = max(_distance(reference[peer], value) for peer in peers[same_claim(name)])
        widest = max(measured, key=lambda what: measured[what])
        if not math.isfinite(measured[widest]):
            raise Unsound(f"{name} has another shape in run {widest!r}, or is zero in one and not in the other; nothing is recorded")
        if not value.is_floating_point() and measured[widest] > 0:
            raise Unsound(f"{name} holds whole numbers and differs in run {widest!r}; whole numbers have no tolerance")
        spreads[name] = (measured[widest], widest if measured[widest] > 0 else "")
    pools: dict[str, list[str]] = {}  # the samples of a batch are computed alike, and one of them alone says little
    for name in reference:
        pools.setdefault(sample_of(name), []).append(name)
    spreads = {name: max((spreads[other] for other in pools[sample_of(name)]), key=lambda pair: pair[0]) for name in reference}

    effects = {fault: _effects(trace, reference) for fault, trace in faults.items()}
    detections = []
    for fault, effect in effects.items():
        margins = {name: size / (FACTOR * spreads[name][0]) for name, size in effect.items() if size > 0 and spreads[name][0] > 0}
        best = max(margins, key=lambda name: margins[name], default="")
        if not best or margins[best] < RATIO:
            seen = f"at best {margins[best]:.3g} tolerances away, at {best}" if best else "nowhere"
            raise Unsound(f"fault {fault} is seen {seen}; at least {RATIO:g} are needed. Raise the effect or lower the noise of the case")
        detections.append(Detection(fault, claims.get(fault, fault), best, effect[best], margins[best]))
    probes = []
    for name, value in reference.items():
        reached = [size for effect in effects.values() if (size := effect.get(name, 0.0)) > 0]
        spread, widest = spreads[name]
        dtype = str(value.dtype).removeprefix("torch.")
        probes.append(Probe(name, tuple(value.shape), dtype, fingerprint(value), spread, widest, FACTOR * spread, min(reached, default=None)))
    return tuple(probes), tuple(detections)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error; infinite for another shape."""
    return relative_error(got, want) if got.shape == want.shape and got.dtype == want.dtype else math.inf


def _effects(trace: Probes, reference: Probes) -> dict[str, float]:
    """A fault's effect at each probe where it counts: in what was computed, not in what was put in; and where it can be measured."""
    sizes = {name: _distance(trace[name], value) for name, value in reference.items() if name in trace and not name.startswith("inputs.")}
    return {name: size for name, size in sizes.items() if math.isfinite(size)}


def source_state(port: Port, goldens: Path, allow_dirty: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Commit of the checkout that the port's source is in, and the paths that differ from it; the goldens themselves do not count.

    Raises:
        GoldenError: a path differs that is not allowed to, or there is no commit and ``allow_dirty`` is empty.
    """
    file = inspect.getsourcefile(type(port))
    place = Path(file).resolve().parent if file else Path.cwd()
    try:
        root = Path(_git(place, "rev-parse", "--show-toplevel").strip())
        commit = _git(root, "rev-parse", "HEAD").strip()
        status = [entry for entry in _git(root, "status", "--porcelain", "--no-renames", "--untracked-files=all", "-z").split("\0") if entry]
    except (OSError, subprocess.SubprocessError):
        if not allow_dirty:
            raise GoldenError(f"{place} is in no git checkout with a commit, so none can be named; --allow-dirty . records without one") from None
        return None, ()
    changed = sorted(path for path in (entry[3:] for entry in status) if not (root / path).is_relative_to(goldens.resolve()))
    refused = [path for path in changed if not any(_covers(pattern, path) for pattern in allow_dirty)]
    if refused:
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise GoldenError(f"uncommitted changes in {', '.join(refused[:3])}{more}; commit them, or name what may differ with --allow-dirty PATH")
    return commit, tuple(changed)


def _covers(pattern: str, path: str) -> bool:
    folder = pattern.removesuffix("/")
    return pattern == "." or path == folder or path.startswith(f"{folder}/") or fnmatch(path, pattern)


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
