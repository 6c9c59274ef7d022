"""Which convention is wrong: after a violation, known alternatives are tried on the port until one makes the claim hold.

`diagnose` runs small experiments of its own through the port's seams; which ones, the link of the violated invariant says. Each compares the port
with an oracle (the vendor's loop, the other framework, LoRA's definition, a formula), first as it is and then under one known mistake after another.
A mistake is named only if the port disagrees with the oracle as it is and agrees under that mistake alone, to rounding. No experiment knows a model.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loudfail.harness.port import offers

if TYPE_CHECKING:
    from loudfail.harness.port import Port
    from loudfail.harness.result import Result

#: The longest that the experiments of one violation take, in seconds; checked between trials.
SECONDS = 5.0
#: Relative residual up to which a mistake explains what was seen, per dtype; and above which there is something to explain, by the same numbers.
FITS = {"float32": 2e-5, "bfloat16": 3e-2}

#: Link of the chain → its experiments ``module:function`` in the order in which they are asked; the first cause that fits is the diagnosis.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "schedule": ("causes_velocity:grid", "causes_velocity:rollout_grid"),
    "conventions": (
        "causes_velocity:repeat",
        "causes_inputs:round_trip",
        "causes_velocity:vendor",
        "causes_velocity:told",
        "causes_velocity:grid",
        "causes_velocity:batch",
        "causes_inputs:given",
        "causes_inputs:round_trip",
        "causes_inputs:rows",
        "causes_velocity:rounding",
        "causes_velocity:trained",
    ),
    "packing": ("causes_inputs:round_trip", "causes_inputs:rows", "causes_velocity:vendor"),
    "prompts": (
        "causes_inputs:dataset_ids",
        "causes_inputs:rollout_ids",
        "causes_inputs:embedding",
        "causes_inputs:conditions",
        "causes_inputs:hearing",
        "causes_velocity:batch",
    ),
    "adapters": (
        "causes_velocity:repeat",
        "causes_adapter:stored",
        "causes_adapter:selection",
        "causes_adapter:strength",
        "causes_adapter:gradient",
    ),
    "sync": ("causes_adapter:response", "causes_adapter:base_weights", "causes_velocity:engine"),
    "rollout": (
        "causes_inputs:round_trip",
        "causes_velocity:vendor",
        "causes_adapter:handed",
        "causes_adapter:base_weights",
        "causes_velocity:engine",
        "causes_velocity:sharded",
        "causes_velocity:replay",
        "causes_velocity:without_given",
        "causes_inputs:given",
        "causes_velocity:told",
        "causes_velocity:batch",
        "causes_velocity:walked",
        "causes_adapter:selection",
    ),
    "rewards": ("causes_rewards:decoding", "causes_rewards:scores", "causes_rewards:total"),
    "conditions": (
        "causes_inputs:given",
        "causes_velocity:vendor",
        "causes_velocity:told",
        "causes_velocity:batch",
        "causes_velocity:without_given",
        "causes_velocity:sharded",
    ),
    "advantages": ("causes_rewards:advantages",),
    "update": ("causes_rewards:advantages",),
}


@dataclass(frozen=True)
class Diagnosis:
    """What explains a violation.

    Attributes:
        cause: the kind of mistake, such as ``time flipped``; empty if no known one fits.
        text: a sentence for people: the cause, where, and what it leaves.
        residual: relative error that remains under that mistake; None without a cause.
        also: other kinds of mistakes that explain it as well.
        tried: the mistakes that were tried, in order.
        seconds: that it took.
    """

    cause: str
    text: str
    residual: float | None = None
    also: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Mistake:
    """One alternative.

    Attributes:
        cause: the kind.
        text: a sentence that says it of what was seen.
        residual: what is left under it, asked for only if there is time; infinite or NaN where it makes no sense.
    """

    cause: str
    text: str
    residual: Callable[[], float]


@dataclass
class Trial:
    """The tries of one diagnosis.

    Attributes:
        port: on which they are made.
        degree: tensor-parallel degree of the violated check, or 1.
        until: `time.perf_counter` after which no further one is begun.
        tried: their names.
        nearest: the mistake that left least so far, and what it left.
    """

    port: Port
    degree: int
    until: float
    tried: list[str] = field(default_factory=list)
    nearest: tuple[str, float] = ("", math.inf)

    @property
    def bound(self) -> float:
        """See `FITS`."""
        return FITS.get(self.port.dtype, FITS["bfloat16"])

    def fits(self, cause: str, residual: float, bound: float | None = None) -> bool:
        """Note one try; whether its residual is small enough.

        Raises:
            OutOfTime: the time is over.
        """
        if cause not in self.tried:
            self.tried.append(cause)
        if time.perf_counter() > self.until:
            raise OutOfTime
        if residual < self.nearest[1]:
            self.nearest = (cause, residual)
        return residual <= (self.bound if bound is None else bound)

    def says(self, cause: str, seen: bool) -> bool:
        """Note one try that is no matter of degree; whether it is what was seen.

        Raises:
            OutOfTime: the time is over.
        """
        if cause not in self.tried:
            self.tried.append(cause)
        if time.perf_counter() > self.until:
            raise OutOfTime
        return seen

    def found(self, cause: str, text: str, residual: float = 0.0, also: tuple[str, ...] = ()) -> Diagnosis:
        """The diagnosis that this cause explains it."""
        left = f" (residual {residual:.2g})" if residual else ""
        others = f"; as well explained by: {', '.join(also)}" if also else ""
        return Diagnosis(cause, f"{text}{left}{others}", residual, also, tuple(self.tried))

    def first(self, mistakes: Iterable[Mistake], bound: float | None = None, plain: float = math.inf) -> Diagnosis | None:
        """The first mistake that fits and leaves a tenth of ``plain`` at most; other kinds that fit as well are named with it."""
        fitting: list[tuple[Mistake, float]] = []
        for mistake in mistakes:
            try:
                residual = mistake.residual()
                if self.fits(mistake.cause, residual, bound) and residual <= plain / 10:
                    fitting.append((mistake, residual))
            except OutOfTime:
                if not fitting:
                    raise
                break
            except Exception:  # an alternative may be impossible for these shapes
                continue
        if not fitting:
            return None
        mistake, residual = fitting[0]
        also = dict.fromkeys(m.cause for m, r in fitting if m.cause != mistake.cause and r <= max(3 * residual, 1e-12))
        return self.found(mistake.cause, mistake.text, residual, tuple(also))


class OutOfTime(Exception):
    """No time is left for another try."""


Experiment = Callable[[Trial], "Diagnosis | None"]
_added: dict[str, list[Experiment]] = {}


def experiment(*links: str) -> Callable[[Experiment], Experiment]:
    """Register a function as an experiment of these links, asked before those of `EXPERIMENTS`; for what needs the formulas of an invariant."""

    def register(function: Experiment) -> Experiment:
        for link in links:
            _added.setdefault(link, []).append(function)
        return function

    return register


def experiments(link: str) -> Iterator[Experiment]:
    """The experiments of a link, in order."""
    yield from _added.get(link, ())
    for name in EXPERIMENTS.get(link, ()):
        module, function = name.split(":")
        found: Experiment = getattr(importlib.import_module(f"loudfail.harness.{module}"), function)
        yield found


def diagnose(port: Port, result: Result, *, seconds: float = SECONDS) -> Diagnosis:
    """Name the known mistake that explains a violation.

    Nothing that an experiment raises leaves this function, and the adapters ``default`` and ``old`` are afterwards as they were.

    Args:
        port: the port that violated a claim, in the state in which it did.
        result: the violated result; its link says what is tried.
        seconds: the longest that it takes, but for the try that is under way then.
    """
    started = time.perf_counter()
    trial = Trial(port, result.degree or 1, started + seconds)
    with _restored(port):
        found = _explanation(trial, result.id.split("::")[0])
    return replace(found, seconds=time.perf_counter() - started)


def _explanation(trial: Trial, link: str) -> Diagnosis:
    for attempt in experiments(link):
        try:
            if found := attempt(trial):
                return found
        except OutOfTime:
            break
        except Exception:  # a broken port breaks experiments too; the verdict stands without a diagnosis
            continue
    cause, residual = trial.nearest
    nearest = f"; nearest of {len(trial.tried)}: {cause}, which leaves {residual:.2g}" if residual < 0.5 else ""
    return Diagnosis("", f"no known cause fits{nearest}", None, (), tuple(trial.tried))


@contextlib.contextmanager
def _restored(port: Port) -> Iterator[None]:
    """Put the adapters back."""
    states = {}
    with contextlib.suppress(Exception):
        if offers(port, "adapter"):
            states = {name: port.adapter_state(name) for name in ("default", "old") if name in port.adapter_names()}
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            for name, state in states.items():
                port.load_adapter(name, state)
            if states:
                port.select_trainable("default")
