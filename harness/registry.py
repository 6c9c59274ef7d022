"""Invariants and faults by id. An id is ``<file>::<function>``; the file says the link of the chain, the function's name is the claim."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

INVARIANTS_PACKAGE = "loudfail.invariants"
FAULTS_PACKAGE = "loudfail.invariants.faults"

#: The links of the chain in data order; files of `loudfail.invariants` are run in this order.
CHAIN = (
    "schedule",
    "conventions",
    "packing",
    "prompts",
    "adapters",
    "sync",
    "rollout",
    "rewards",
    "conditions",
    "advantages",
    "objective",
    "update",
    "resume",
)

#: Seams whose checks ask the rollout's side, which may have much to import.
ROLLOUT_SEAMS = frozenset({"engine", "prompt", "presentation"})

#: Scales of a check that is worth its time at real widths too.
BOTH = ("tiny", "wide")

Strategies = dict[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Invariant:
    """A claim about a port.

    Attributes:
        id: ``file::name``.
        claim: the first paragraph of its docstring, a sentence that is true when it passes.
        seams: the seams of the port that it needs.
        per_degree: it takes ``tp`` and is run once for each tensor-parallel degree.
        examples: how many inputs Hypothesis draws; 0 when nothing is drawn.
        strategies: parameter name → function of the port that returns a Hypothesis strategy.
        scales: the scales of a port at which it runs: `BOTH` where real widths can show something that the tiny model cannot.
        processes: it starts processes of its own from the server that also forks the rollout's ranks.
    """

    id: str
    claim: str
    doc: str
    function: Callable[..., None]
    seams: tuple[str, ...]
    per_degree: bool
    examples: int
    strategies: Strategies = field(hash=False, default_factory=dict)
    scales: tuple[str, ...] = ("tiny",)
    processes: bool = False

    @property
    def link(self) -> str:
        return self.id.split("::")[0]

    @property
    def rolls_out(self) -> bool:
        """Whether it waits for the rollout's side to be imported."""
        return self.per_degree or self.processes or not ROLLOUT_SEAMS.isdisjoint(self.seams)


@dataclass(frozen=True)
class Fault:
    """One thing broken on purpose.

    Attributes:
        id: ``file::name``.
        claim: what is wrong (the docstring's first paragraph).
        source: public report that it comes from, or ``own``.
        catches: ids of the invariants that must be violated.
        inject: context manager function ``(port) -> None`` that breaks the port, or an upstream class, and undoes it on exit.
        seams: the seams that a port must offer for the fault to be injectable.
        degrees: the tensor-parallel degrees at which it must be caught; empty for all that are run.
        ports: names of ports whose own parts it breaks; empty for any port with the seams.
        unless: port → why it is no fault there, such as a part that the port does not have; empty where it is one.
        cause: the name that `loudfail.harness.diagnose` must give the mistake; empty where it has none.
        exact: it changes no more than bfloat16 rounds away, so that float32 alone shows it.
    """

    id: str
    claim: str
    doc: str
    inject: Callable[..., Any]
    source: str
    catches: tuple[str, ...]
    seams: tuple[str, ...]
    degrees: tuple[int, ...] = ()
    ports: tuple[str, ...] = ()
    unless: Callable[[Any], str] = lambda port: ""
    cause: str = ""
    exact: bool = False


_invariants: dict[str, Invariant] = {}
_faults: dict[str, Fault] = {}


def _claim(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split()).rstrip(".")


def invariant(
    *seams: str, examples: int = 0, scales: Iterable[str] = ("tiny",), processes: bool = False, **strategies: Callable[[Any], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as an invariant.

    The function takes ``port``; ``tp`` if it is run at each tensor-parallel degree; and one parameter for each keyword given here, whose value
    is a function ``port -> Hypothesis strategy``.

    Args:
        seams: names from `loudfail.harness.port.SEAMS` that the check needs.
        examples: inputs drawn in a normal run; must be positive if and only if there are strategies.
        scales, processes: see `Invariant`.

    Raises:
        TypeError: no docstring, unknown parameters, or examples without strategies.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = f"{function.__module__.rsplit('.', 1)[-1]}::{function.__name__}"
        parameters = list(inspect.signature(function).parameters)
        if not (function.__doc__ or "").strip():
            raise TypeError(f"{name}: an invariant states its claim in the first paragraph of its docstring")
        if set(parameters) != {"port", *(["tp"] if "tp" in parameters else []), *strategies}:
            raise TypeError(f"{name}: takes {parameters}, but gets port, tp (optional) and {sorted(strategies)}")
        if bool(strategies) != (examples > 0):
            raise TypeError(f"{name}: examples and strategies go together")
        doc = inspect.getdoc(function) or ""
        _invariants[name] = Invariant(
            name, _claim(doc), doc, function, seams, "tp" in parameters, examples, dict(strategies), tuple(scales), processes
        )
        return function

    return register


def fault(
    *seams: str,
    catches: Iterable[str],
    source: str = "own",
    degrees: Iterable[int] = (),
    ports: Iterable[str] = (),
    unless: Callable[[Any], str] = lambda port: "",
    cause: str = "",
    exact: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a generator function ``(port)`` that breaks something, yields once, and mends it, as a fault. See `Fault` for the arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        from contextlib import contextmanager

        name = f"{function.__module__.rsplit('.', 1)[-1]}::{function.__name__}"
        doc = inspect.getdoc(function) or ""
        if not doc:
            raise TypeError(f"{name}: a fault says in its docstring what is wrong")
        claim, inject = _claim(doc), contextmanager(function)
        _faults[name] = Fault(name, claim, doc, inject, source, tuple(catches), seams, tuple(degrees), tuple(ports), unless, cause, exact)
        return function

    return register


def _import_all(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not module.ispkg:
            importlib.import_module(f"{package}.{module.name}")


def _position(link: str) -> int:
    return CHAIN.index(link) if link in CHAIN else len(CHAIN)


def invariants() -> list[Invariant]:
    """All invariants, in data order."""
    _import_all(INVARIANTS_PACKAGE)
    return sorted(_invariants.values(), key=lambda i: _position(i.link))


def faults() -> list[Fault]:
    """All faults, in data order.

    Raises:
        ValueError: a fault names an invariant that does not exist, or none.
    """
    invariants()
    _import_all(FAULTS_PACKAGE)
    for one in _faults.values():
        unknown = sorted(set(one.catches) - set(_invariants))
        if unknown or not one.catches:
            raise ValueError(f"fault {one.id} must name existing invariants that catch it; unknown: {unknown}")
    return sorted(_faults.values(), key=lambda f: _position(f.id.split("::")[0]))


class UnknownId(ValueError):
    """No invariant, fault or port of that name; the message suggests the nearest ones."""


def nearest(name: str, known: Iterable[str], kind: str) -> UnknownId:
    """The error for a name that is not there, with the nearest names."""
    known = list(known)
    close = [k for k in known if name.lower() in k.lower()][:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = (
        f"nearest: {', '.join(close)}"
        if close
        else f"there are {len(known)}, see `loudfail list`"
        if len(known) > 5
        else f"there is {', '.join(known)}"
    )
    return UnknownId(f"no {kind} {name!r}; {hint}")


def ports() -> dict[str, str]:
    """Named ports (entry-point group ``loudfail.ports``) → ``package.module:Class``."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group="loudfail.ports")}


def find_port(name: str) -> type:
    """The port class of a registered name or of ``package.module:Class``; the current folder is importable.

    Raises:
        UnknownId: no such name; nearest names are suggested.
        ImportError: the module cannot be imported, or has no such class; the message says which and why.
    """
    import os
    import sys
    from pathlib import Path

    from loudfail.harness.port import Port

    target = ports().get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        if "." in name or "/" in name:
            raise UnknownId(f"no port {name!r}: a port of your own is package.module:Class, without .py, from the folder that holds it")
        raise nearest(name, ports(), "port")
    if module_name.endswith(".py") or "/" in module_name:
        plain = Path(module_name).name.removesuffix(".py")
        raise UnknownId(f"no port {name!r}: name the module, {plain}:{class_name}, from the folder that holds it")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(f"port {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    cls = getattr(module, class_name, None)
    if cls is None:
        if getattr(module, "__file__", None) is None:
            raise ImportError(f"port {name!r}: {module_name} is a folder here, no module; run this inside it")
        near = difflib.get_close_matches(class_name, [k for k, v in vars(module).items() if isinstance(v, type)], n=3)
        raise ImportError(f"port {name!r}: {module_name} has no {class_name}" + (f"; nearest: {', '.join(near)}" if near else ""))
    if not (isinstance(cls, type) and issubclass(cls, Port)):
        raise ImportError(f"port {name!r}: {class_name} is not a subclass of loudfail.harness.port.Port")
    return cls
