"""Mistakes of time, sign, level and schedule: experiments of `loudfail.harness.diagnose`."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from loudfail.harness.case import Case, largest, smallest
from loudfail.harness.compare import relative_error
from loudfail.harness.diagnose import Diagnosis, Mistake, Trial
from loudfail.harness.port import Conditions, Port, Step, noised, offers, random_adapter

Values = Mapping[str, torch.Tensor]
Change = Callable[[Values], dict[str, torch.Tensor]]
Ask = Callable[[Values], Values]

#: What rounds a level: the name, and the function of the level.
ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rounded to bfloat16": lambda s: s.bfloat16().to(s),
    "rounded to bfloat16 as 1 − sigma": lambda s: 1 - (1 - s).bfloat16().to(s),
    "rounded to bfloat16 as 1000·sigma": lambda s: (1000 * s).bfloat16().to(s) / 1000,
    "rounded to bfloat16 as 1000·(1 − sigma)": lambda s: 1 - (1000 * (1 - s)).bfloat16().to(s) / 1000,
    "rounded to one of 1000 steps": lambda s: (1000 * s).round() / 1000,
    "cut down to one of 1000 steps": lambda s: (1000 * s).floor() / 1000,
}


#: A level whose angle has as many radians as that of the given one has degrees: a quarter turn at pure noise, the same at clean data, and the angle
#: under which noise and data are mixed.
ANGLES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda s: s * math.pi / 180,
    lambda s: 1 - (1 - s) * math.pi / 180,
    lambda s: (angle := (torch.atan2(s, 1 - s) * math.pi / 180).tan()) / (1 + angle),
)


def worst(got: Values, want: Values) -> float:
    """The largest relative error over modalities; infinite where shapes differ or NaN is about."""
    errors = [relative_error(got[m], want[m]) if got[m].shape == want[m].shape else math.inf for m in want]
    return max(math.inf if math.isnan(e) else e for e in errors)


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets that are not empty, the whole first, then small ones."""
    sizes = [len(names), *range(1, len(names))]
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in sizes)


def _levels(modalities: Sequence[str]) -> Iterator[tuple[str, str, Change]]:
    """Known mistakes of a level that another level undoes: kind, where, and the change of sigmas. The last of them are not their own inverse."""
    for chosen in subsets(modalities):
        yield "time flipped", _of(chosen, modalities), lambda s, chosen=chosen: {m: 1 - v if m in chosen else v for m, v in s.items()}  # type: ignore[misc]
    for one, other in itertools.combinations(modalities, 2):
        yield "levels exchanged", f" between {one} and {other}", lambda s, a=one, b=other: {**s, a: s[b], b: s[a]}  # type: ignore[misc]
    for chosen in subsets(modalities):
        for change in ANGLES:
            yield "degrees for radians", _of(chosen, modalities), lambda s, c=chosen, f=change: {m: f(v) if m in c else v for m, v in s.items()}  # type: ignore[misc]
    yield "sigma 1000 times too large", "", lambda s: {m: v / 1000 for m, v in s.items()}
    yield "sigma 1000 times too small", "", lambda s: {m: v * 1000 for m, v in s.items()}


def _of(chosen: Sequence[str], modalities: Sequence[str]) -> str:
    return "" if len(chosen) == len(modalities) > 1 or len(modalities) == 1 else f" in {' and '.join(chosen)}"


def _converted(velocity: Values, told: Values, sigmas: Values) -> Iterator[Values]:
    """A velocity at changed levels as it is, and as it would be if only the network had heard of the change: an output that is x0, or noise, is
    converted with the right level all the same."""
    yield velocity
    for part in (lambda s: s, lambda s: 1 - s):
        share = {m: (part(told[m]) / part(sigmas[m])).view(-1, *[1] * (v.ndim - 1)) for m, v in velocity.items()}
        if all(bool(torch.isfinite(k).all()) for k in share.values()):
            yield {m: v * share[m].to(v) for m, v in velocity.items()}


def _signs(got: Values, want: Values) -> tuple[tuple[str, ...], float]:
    """The modalities whose sign has to be turned for both to agree best, and what then remains."""
    turned, residual = [], 0.0
    for modality in want:
        if got[modality].shape != want[modality].shape:
            return (), math.inf
        errors = [relative_error(sign * got[modality], want[modality]) for sign in (1.0, -1.0)]
        if errors[1] < errors[0]:
            turned.append(modality)
        residual = max(residual, min(errors))
    return tuple(turned), residual


TELLS = {
    "degrees for radians": "with an angle of π / 180 of it{where} it holds: the {who} passes degrees where the model wants radians",
    "time flipped": "with t = 1 − sigma{where} it holds: the {who} passes a noise fraction where the model wants a data fraction, or the reverse",
    "levels exchanged": "with sigmas exchanged{where} it holds: the {who} passes each modality the other's level",
    "sigma 1000 times too large": "with sigma / 1000 it holds: the {who} passes a timestep of 0 to 1000 where the model wants 0 to 1",
    "sigma 1000 times too small": "with 1000·sigma it holds: the {who} passes 0 to 1 where the model wants a timestep of 0 to 1000",
}


def _agree(trial: Trial, ask: Ask, sigmas: Values, want: Values, who: str) -> Diagnosis | bool:
    """Whether ``ask`` gives what is wanted as it is (True), under a known mistake (that), or under none (False)."""
    plain = ask(sigmas)
    error, names = worst(plain, want), list(want)
    if error <= trial.bound:
        return True
    fitting: list[tuple[str, str, float]] = []
    unchanged = ("", "", lambda s: dict(s))
    for kind, where, change in (unchanged, *_levels(names)):
        told = change(sigmas)
        if kind and all(torch.equal(told[m], sigmas[m]) for m in names):
            continue
        velocity = ask(told)
        signs, residual = min((_signs(one, want) for one in _converted(velocity, told, sigmas)), key=lambda pair: pair[1])
        if not kind and not signs:
            continue
        cause = f"{kind} and velocity sign flipped" if kind and signs else kind or "velocity sign flipped"
        cause = cause.replace("time flipped and velocity", "time and velocity")
        if not trial.fits(cause, residual) or residual > error / 10:
            continue
        texts = [TELLS[kind].format(where=where, who=who)] if kind else []
        texts += [f"with −v{_of(signs, names)} it holds: the {who} hands on x0 − noise as noise − x0, or the reverse"] if signs else []
        fitting.append((cause, "; and ".join(texts), residual))
    if not fitting:
        return _scaled(trial, plain, want, who) or False
    also = tuple(dict.fromkeys(cause for cause, _, residual in fitting if cause != fitting[0][0] and residual <= 3 * fitting[0][2]))
    return trial.found(*fitting[0], also)


def _scaled(trial: Trial, got: Values, want: Values, who: str) -> Diagnosis | None:
    """Whether one number for each modality is all that lies between them."""
    if any(got[m].shape != want[m].shape for m in want):
        return None
    factors = {m: float((got[m].double() * want[m].double()).sum() / want[m].double().square().sum()) for m in want}
    residual = max(relative_error(got[m], factors[m] * want[m], want[m]) for m in want)
    if not trial.fits("velocity scaled", residual) or any(abs(k) < 1e-3 for k in factors.values()):
        return None
    wrong = [f"{m} {k:.4g} times" for m, k in factors.items() if abs(k - 1) > trial.bound]
    return trial.found("velocity scaled", f"the {who} gives {', '.join(wrong)} what it should be", residual) if wrong else None


def repeat(trial: Trial) -> Diagnosis | None:
    """The same call twice."""
    port = trial.port
    if not offers(port, "objective"):
        return None
    for given in dict.fromkeys(((), max(port.givens, key=len))):
        case = smallest(port, seed=4, given=given)
        call = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
        with torch.no_grad():
            error = worst(port.predict_velocity(*call), port.predict_velocity(*call))
        if trial.says("randomness in the model", error > 0):
            return trial.found("randomness in the model", f"two equal calls differ by {error:.2g}: dropout, or noise that is drawn in the call")
    return None


def vendor(trial: Trial) -> Diagnosis | None:
    """The port's velocity against the vendor's loop, with nothing given, then with everything that can be."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "vendor")):
        return None
    for given in dict.fromkeys(((), max(port.givens, key=len))):
        case = smallest(port, seed=5, prompts=("rain", "a bell rings twice"), given=given)
        conditions = port.conditions(case)
        steps = port.vendor_rollout(case.normal("noise", port.shapes(case)), max(4, port.least_calls), conditions).steps
        agreed = [_agree_at(trial, step, conditions) for step in steps[1:3]]  # away from both ends, where a flipped level is far from its mirror
        found = [one for one in agreed if isinstance(one, Diagnosis)]
        scaled = any(one.cause == "velocity scaled" for one in found)
        if (scaled or not any(agreed)) and (one := _predicted(trial, steps[1:3], conditions)):
            return one
        same = {one.text.split(" (residual")[0] if scaled else one.cause for one in found}  # a factor that moves with the level is no factor
        if len(found) == len(agreed) and len(same) == 1:
            return found[0]
        if not all(agreed) and (one := _layout(trial, steps[1], conditions)):
            return one
    return heard_rows(trial, lambda latents, sigmas, conditions: port.predict_velocity(latents, sigmas, conditions), "the port")


def heard_rows(trial: Trial, ask: Callable[[Values, Values, list[Conditions]], Values], who: str) -> Diagnosis | None:
    """Whether the end of a long prompt changes nothing, its words or its embedding; where what is heard ends is found by halving."""
    port = trial.port
    case = largest(port, seed=5)
    latents, sigmas, (condition,) = case.normal("noise", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    words = case.prompts[0].split(" ")
    tensors = {"": condition.embeds} | condition.extra
    tensors = {n: v for n, v in tensors.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim == 2 and len(v) > 1}

    def reworded(start: int) -> Conditions:
        return port.conditions(replace(case, prompts=(" ".join([*words[:start], *reversed(words[start:])]),)))[0]

    def embedded(start: int) -> Conditions:
        other = {n: torch.cat([v[:start], v[start:].flip(0) + v.std()]) if start < len(v) else v for n, v in tensors.items()}
        return replace(condition, embeds=other.pop("", condition.embeds), extra=condition.extra | other)

    with torch.no_grad():
        plain = ask(latents, sigmas, [condition])
        for change, count in ((reworded, len(words) - 1), (embedded, max(len(v) for v in tensors.values()))):

            def heard(start: int, change: Callable[[int], Conditions] = change) -> bool:
                return worst(ask(latents, sigmas, [change(start)]), plain) > 0

            if count < 8 or heard(count - 1) or not heard(1):
                continue
            low, high = 1, count - 1  # heard from `low` on, not from `high` on
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if heard(middle) else (low, middle)
            if change is reworded:
                kept = sum(
                    1
                    for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reworded(high).prompt_ids, condition.prompt_ids, strict=False))
                )
            else:
                kept = high
            trial.says("prompt truncated", True)
            return trial.found("prompt truncated", f"of a prompt of {len(condition.prompt_ids)} tokens {who} hears at most the first {kept}")
    return None


def _velocity(port: Port, step: Step, conditions: Sequence[Conditions]) -> Ask:
    def ask(sigmas: Values) -> Values:
        with torch.no_grad():
            return port.predict_velocity(step.latents, sigmas, conditions)

    return ask


def _agree_at(trial: Trial, step: Step, conditions: Sequence[Conditions]) -> Diagnosis | bool:
    return _agree(trial, _velocity(trial.port, step, conditions), step.sigmas, step.velocity, "port")


#: What a velocity is if the network's output was taken for another quantity, undone: kind of mistake, and (handed on, latents, sigma) → velocity.
PREDICTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x0 is handed on as the velocity": lambda u, x, s: (x - u) / s,
    "noise is handed on as the velocity": lambda u, x, s: (u - x) / (1 - s),
    "an output that is x0 is converted as noise": lambda u, x, s: -u * (1 - s) / s,
    "an output that is noise is converted as x0": lambda u, x, s: -u * s / (1 - s),
    "an output that is the velocity is converted as x0": lambda u, x, s: x - s * u,
    "an output that is the velocity is converted as noise": lambda u, x, s: x + (1 - s) * u,
}


def _conversions(modality: str, steps: Sequence[Step]) -> Iterator[tuple[str, str, Callable[[torch.Tensor, Step], torch.Tensor]]]:
    """What may have been made of one modality's output: kind, sentence, and how to undo it in what was handed on at a step."""

    def level(step: Step, of: str) -> torch.Tensor:
        return step.sigmas[of].double().view(-1, *[1] * (step.latents[modality].ndim - 1))

    for text, undo in PREDICTIONS.items():

        def undone(u: torch.Tensor, step: Step, undo: Any = undo) -> torch.Tensor:
            made: torch.Tensor = undo(u, step.latents[modality].double(), level(step, modality))
            return made

        yield "another prediction type", f"in {modality} {text}", undone
    for other in steps[0].sigmas:
        if any(not torch.equal(step.sigmas[other], step.sigmas[modality]) for step in steps):

            def rescaled(u: torch.Tensor, step: Step, other: str = other) -> torch.Tensor:
                return u * level(step, other) / level(step, modality)

            yield "one modality at another's level", f"{modality} is converted with the level of {other}", rescaled


def _predicted(trial: Trial, steps: Sequence[Step], conditions: Sequence[Conditions]) -> Diagnosis | None:
    """Whether an output is taken for another kind of prediction, or converted with another modality's level, in any modality and at every step."""
    got = [_velocity(trial.port, step, conditions)(step.sigmas) for step in steps]
    texts, causes, residual = list[str](), list[str](), 0.0
    for m in trial.port.modalities:

        def left(change: Callable[[torch.Tensor, Step], torch.Tensor], m: str = m) -> float:
            return max(relative_error(change(velocity[m].double(), step), step.velocity[m]) for velocity, step in zip(got, steps, strict=True))

        if (error := left(lambda u, step: u)) <= trial.bound:
            residual = max(residual, error)
            continue
        for cause, text, change in _conversions(m, steps):
            if trial.fits(cause, error := left(change)):
                residual = max(residual, error)
                texts.append(text)
                causes.append(cause)
                break
        else:
            return None
    return trial.found(causes[0], "; ".join(texts), residual) if causes else None


def _layout(trial: Trial, step: Step, conditions: Sequence[Conditions]) -> Diagnosis | None:
    """Whether one modality's latents, rearranged before the model and back after it, agree: a layout that only the vendor can tell to be wrong."""
    port = trial.port

    def mistakes() -> Iterator[Mistake]:
        for modality in port.modalities:
            for what, forth, back in rearrangements(step.latents[modality]):

                def residual(modality: str = modality, forth: Any = forth, back: Any = back) -> float:
                    with torch.no_grad():
                        got = port.predict_velocity({**step.latents, modality: forth(step.latents[modality])}, step.sigmas, conditions)
                    return worst({**got, modality: back(got[modality])}, step.velocity)

                yield Mistake("layout", f"with {modality} {what} it holds: the port lays out {modality} in another order", residual)

    return trial.first(mistakes(), plain=worst(_velocity(port, step, conditions)(step.sigmas), step.velocity))


def rearrangements(x: torch.Tensor) -> Iterator[tuple[str, Change, Change]]:
    """Reorders of ``(B, *shape)`` that keep the shape: name, there, back."""
    axes = range(1, x.ndim)
    for axis in axes:
        yield f"reversed along axis {axis - 1}", lambda v, a=axis: v.flip(a), lambda v, a=axis: v.flip(a)  # type: ignore[misc]
    for one, other in itertools.combinations(axes, 2):
        shape = list(x.shape)
        shape[one], shape[other] = shape[other], shape[one]
        if shape == list(x.shape):
            swap = lambda v, a=one, b=other: v.transpose(a, b)  # noqa: E731
            yield f"with axes {one - 1} and {other - 1} exchanged", swap, swap
        # The same numbers read with the two axes in the other order, as after a wrong view.
        forth = lambda v, a=one, b=other: v.transpose(a, b).reshape(v.shape)  # noqa: E731
        back = lambda v, a=one, b=other, s=tuple(shape): v.reshape(s).transpose(a, b)  # noqa: E731
        yield f"interleaved over axes {one - 1} and {other - 1}", forth, back
        yield f"interleaved over axes {one - 1} and {other - 1}", back, forth


def told(trial: Trial) -> Diagnosis | None:
    """The levels that the model is told, read off its input, against those that were meant."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "packing")):
        return None
    case = smallest(port, seed=6, prompts=("rain", "a bell rings twice", "wind"))
    sigmas = case.sigmas("sigmas", port.modalities)
    with torch.no_grad():
        _, tables = port.observe(case.normal("latents", port.shapes(case)), sigmas, port.conditions(case))
    heard: dict[str, torch.Tensor] = {}
    for modality in port.modalities:
        rows = [table.sigma_of(modality)[~table.given_of(modality)].double() for table in tables]
        if any(float(r.max() - r.min()) > 1e-6 for r in rows):
            return None
        heard[modality] = torch.stack([r[0] for r in rows])
    meant = {m: s.double() for m, s in sigmas.items()}

    def error(change: Change) -> float:
        want = change(meant)
        return max(float((heard[m] - want[m]).abs().max()) for m in heard)

    if error(dict) <= 1e-6:
        return None
    names, mistakes = list(port.modalities), list[tuple[str, str, Change]]()
    for chosen in subsets(names):
        where = _of(chosen, names)
        mistakes.append(("time flipped", f"1 − sigma{where}", lambda s, c=chosen: {m: 1 - v if m in c else v for m, v in s.items()}))  # type: ignore[misc]
        for what, round_ in ROUNDINGS.items():
            change = lambda s, c=chosen, r=round_: {m: r(v.float()).double() if m in c else v for m, v in s.items()}  # noqa: E731
            mistakes.append(("sigma rounded", f"sigma{where} {what}", change))
        first = lambda s, c=chosen: {m: v[:1].expand_as(v) if m in c else v for m, v in s.items()}  # noqa: E731
        mistakes.append(("one sample's level for the batch", f"sample 0's sigma{where}", first))
    for source in names:
        for chosen in subsets([m for m in names if m != source]):
            taken = lambda s, a=source, c=chosen: {m: s[a] if m in c else v for m, v in s.items()}  # noqa: E731
            mistakes.append(("one modality at another's level", f"{source}'s sigma for {' and '.join(chosen)}", taken))
    mistakes.append(("sigma 1000 times too large", "1000·sigma", lambda s: {m: 1000 * v for m, v in s.items()}))
    mistakes.append(("sigma 1000 times too small", "sigma / 1000", lambda s: {m: v / 1000 for m, v in s.items()}))
    for cause, text, mistake in mistakes:
        if trial.fits(cause, residual := error(mistake), 1e-6):
            return trial.found(cause, f"the model is told {text}", residual)
    units = {m: _unit(heard[m], meant[m]) for m in names}
    if trial.says("level in another unit", all(units.values())):
        wrong = [f"{m} {text}" for m, text in units.items() if text != "sigma"]
        return trial.found("level in another unit", f"the model is told for {', for '.join(wrong)}")
    return None


def _unit(heard: torch.Tensor, meant: torch.Tensor) -> str:
    """A level that is sigma, or a constant times sigma or the data fraction, in words; empty where it is none."""
    if float((heard - meant).abs().max()) <= 1e-6:
        return "sigma"
    for what, read in (("sigma", lambda s: s), ("(1 − sigma)", lambda s: 1 - s)):
        ratio = read(heard) / read(meant)
        k = float(ratio.mean())
        if abs(k) > 1e-9 and float((ratio / k - 1).abs().max()) <= 1e-3:  # a small level is told to few digits once it was taken off 1
            return f"{k:.4g} · {what}"
    return ""


def rounding(trial: Trial) -> Diagnosis | None:
    """Whether the velocity is a function of a rounded level: it stays the same when the level is rounded, and moves when the level moves as far."""
    port = trial.port
    if not offers(port, "objective"):
        return None
    case = smallest(port, seed=7)
    latents, conditions = case.normal("latents", port.shapes(case)), port.conditions(case)

    def ask(level: torch.Tensor) -> Values:
        with torch.no_grad():
            return port.predict_velocity(latents, {m: level.view(1) for m in port.modalities}, conditions)

    for what, round_ in ROUNDINGS.items():
        moved, away = 0.0, 0.0
        for level in (0.2113, 0.5877, 0.8639):
            here = torch.tensor(level)
            there = round_(here)
            plain, rounded, far = ask(here), ask(there), ask(here + 0.05)
            moved = max(moved, *(relative_error(rounded[m], plain[m]) for m in plain))
            away += min(relative_error(far[m], plain[m]) for m in plain) * float((there - here).abs()) / 0.05 / 3
        if trial.says("sigma rounded", moved <= 0.02 * away):
            return trial.found("sigma rounded", f"the velocity stays the same when sigma is {what}: the model hears no more of it", moved)
    return None


def trained(trial: Trial) -> Diagnosis | None:
    """Against data that the model learned: which of time and sign has to be turned for it to predict best. It counts only if it is clearly better."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "trained")):
        return None
    clean, conditions = port.trained_batch(3, 16)
    generator = torch.Generator().manual_seed(3)
    noise = {m: torch.randn(x.shape, generator=generator) for m, x in clean.items()}
    sigmas = {m: torch.full((len(x),), 0.8) for m, x in clean.items()}
    x, target = noised(clean, noise, sigmas), {m: (noise[m] - clean[m]).double() for m in clean}
    with torch.no_grad():
        velocity = {f: port.predict_velocity(x, {m: 1 - s if f else s for m, s in sigmas.items()}, conditions) for f in (False, True)}
    errors = {
        (flip, sign): max(float((sign * velocity[flip][m].double() - target[m]).square().mean() / target[m].square().mean()) for m in target)
        for flip in (False, True)
        for sign in (1, -1)
    }
    flip, sign = min(errors, key=lambda key: errors[key])
    cause = {(True, 1): "time flipped", (False, -1): "velocity sign flipped", (True, -1): "time and velocity sign flipped"}.get((flip, sign))
    if blind := _untrained(trial, x, target, velocity):
        return blind
    # A model that learned these data predicts them better than nothing does; a mistake under which it still does not is another one.
    if cause is None or errors[flip, sign] >= 0.98 or not trial.fits(cause, errors[flip, sign] / errors[False, 1], 0.98):
        return None
    text = f"on data that the model learned the error falls from {errors[False, 1]:.3g} to {errors[flip, sign]:.3g} of the target"
    return trial.found(cause, f"{text}: port, vendor and rollout share the mistake")


def _untrained(trial: Trial, x: Values, target: Values, velocity: Mapping[bool, Values]) -> Diagnosis | None:
    """Whether the weights know nothing of the data: beside the noised latents, the velocity at neither level says anything of the target.

    Only where the vendor's loop agrees with the port, so that no convention can be what makes them useless.
    """
    port = trial.port
    if not offers(port, "vendor"):
        return None
    case = smallest(port, seed=5)
    conditions = port.conditions(case)
    step = port.vendor_rollout(case.normal("noise", port.shapes(case)), max(4, port.least_calls), conditions).steps[1]
    if worst(_velocity(port, step, conditions)(step.sigmas), step.velocity) > trial.bound:
        return None
    known, chance = 0.0, 0.0
    for m in target:
        left = _residue(target[m], [x[m]])
        known = max(known, 1 - float(_residue(target[m], [x[m], velocity[False][m], velocity[True][m]]).square().sum() / left.square().sum()))
        chance = max(chance, 20 / left.numel())
    if trial.fits("checkpoint not trained", known, chance):
        text = f"of what the noised latents leave of noise − x0 the velocity explains {known:.1g}, as chance would: random weights, or other data"
        return trial.found("checkpoint not trained", text, known)
    return None


def _residue(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What no linear combination of the parts explains."""
    columns = torch.stack([part.double().flatten().cpu() for part in parts], 1)
    wanted = target.double().flatten().cpu()
    return wanted - columns @ torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]


# -- who gets whose level and conditions -------------------------------------------------------------------------------------------------------
def _views(sigmas: Values, conditions: list[Conditions]) -> Iterator[tuple[str, str, dict[str, torch.Tensor], list[Conditions]]]:
    """Known mistakes of what a sample is told that cannot be undone: kind, sentence, and what is then really told."""
    names, count = list(sigmas), len(conditions)
    if count > 1:
        yield "one sample's level for the batch", "every sample gets sample 0's level", {m: s[:1].expand_as(s) for m, s in sigmas.items()}, conditions
        yield "one sample's conditions for the batch", "every sample gets sample 0's conditions", dict(sigmas), [conditions[0]] * count
        for shift in (1, count - 1):
            yield "another sample's conditions", "samples get each other's conditions", dict(sigmas), conditions[shift:] + conditions[:shift]
    for source in names:
        for chosen in subsets([m for m in names if m != source]):
            text = f"{' and '.join(chosen)} is told the level of {source}"
            yield "one modality at another's level", text, {m: sigmas[source] if m in chosen else s for m, s in sigmas.items()}, conditions
    for what, round_ in ROUNDINGS.items():
        yield "sigma rounded", f"sigma is {what}", {m: round_(s) for m, s in sigmas.items()}, conditions
    yield "prompt missing", "the prompt's embedding is zero", dict(sigmas), [replace(c, embeds=torch.zeros_like(c.embeds)) for c in conditions]
    yield "prompt reversed", "the prompt's rows are in reverse", dict(sigmas), [replace(c, embeds=c.embeds.flip(0)) for c in conditions]


def batch(trial: Trial) -> Diagnosis | None:
    """A batch against its samples one by one, each told what another sample should be."""
    port = trial.port
    if not offers(port, "objective"):
        return None
    modes = list(port.givens)
    for mixed in (False, True):
        case = smallest(port, seed=8, prompts=("rain", "a bell rings twice", "wind"))
        latents, sigmas = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities)
        per_mode = [port.conditions(replace(case, given=modes[i % len(modes)] if mixed else ())) for i in range(3)]
        conditions = [per_mode[i][i] for i in range(3)]

        def alone(levels: Values, told_: Sequence[Conditions]) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                rows = [
                    port.predict_velocity({m: v[i : i + 1] for m, v in latents.items()}, {m: s[i : i + 1] for m, s in levels.items()}, [told_[i]])  # noqa: B023
                    for i in range(3)
                ]
            return {m: torch.cat([row[m] for row in rows]) for m in port.modalities}

        with torch.no_grad():
            got = port.predict_velocity(latents, sigmas, conditions)
        want = alone(sigmas, conditions)
        if worst(got, want) <= trial.bound:
            continue
        for shift in (1, 2):
            if trial.fits("samples in another order", residual := worst(got, {m: v.roll(shift, 0) for m, v in want.items()})):
                return trial.found("samples in another order", "the velocities of a batch come back moved on by one sample", residual)
        for cause, text, levels, told_ in _views(sigmas, conditions):
            if "sample" in cause and trial.fits(cause, residual := worst(got, alone(levels, told_))):
                return trial.found(cause, f"{text}; alone each is right", residual)
    return None


def engine(trial: Trial) -> Diagnosis | None:
    """The rollout's velocity without an adapter against the actor's."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "engine") and offers(port, "adapter")):
        return None
    rollout = port.engine(trial.degree)
    rollout.remove_adapter()
    case = smallest(port, seed=9, prompts=("rain", "a bell rings twice"))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    ranks = rollout.replicated(latents, sigmas, conditions)
    if trial.says("not a number", any(not bool(torch.isfinite(v).all()) for rank in ranks for v in rank.values())):
        return trial.found("not a number", "the rollout's velocity is not finite")
    odd = [i for i, rank in enumerate(ranks) if any(not torch.equal(rank[m], ranks[0][m]) for m in rank)]
    if trial.says("ranks disagree", bool(odd)):
        return trial.found("ranks disagree", f"rank {', '.join(map(str, odd))} of {len(ranks)} returns another velocity than rank 0")
    got = rollout.velocity(latents, sigmas, conditions)

    def actor(levels: Values, told_: Sequence[Conditions] = conditions) -> Values:
        with torch.no_grad(), port.using(None):
            return port.predict_velocity(latents, levels, told_)

    # Finer than the bound of other trials: the two frameworks agree to 4e-7, and rounding on the way is one of the mistakes.
    plain = actor(sigmas)
    if port.dtype == "float32" and worst(got, plain) > 2e-6:
        rounded = {m: v.bfloat16().float() for m, v in plain.items()}
        if trial.fits("rounded to bfloat16", residual := worst(got, rounded), 5e-4):
            exact = max(float((got[m].bfloat16().float() - got[m]).abs().max()) for m in got)
            if exact == 0:
                return trial.found("rounded to bfloat16", "the rollout's velocity holds bfloat16 numbers only", residual)
    found = _agree(trial, actor, sigmas, got, "rollout (or the port)")
    if isinstance(found, Diagnosis):
        return found
    if not found:
        for cause, text, levels, told_ in _views(sigmas, conditions):
            if trial.fits(cause, residual := worst(got, actor(levels, told_))):
                return trial.found(cause, f"in the rollout {text}", residual)
    return heard_rows(trial, rollout.velocity, "the rollout")


def sharded(trial: Trial) -> Diagnosis | None:
    """The rollout's velocity without an adapter at this degree and at degree 1, against the actor's: weights that are right at both leave the
    computation between them."""
    port = trial.port
    if trial.degree == 1 or not (offers(port, "objective") and offers(port, "engine") and offers(port, "adapter")):
        return None
    case = smallest(port, seed=9, prompts=("rain", "a bell rings twice"))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with torch.no_grad(), port.using(None):
        want = port.predict_velocity(latents, sigmas, conditions)
    errors = {}
    for degree in (trial.degree, 1):
        begun = time.perf_counter()
        rollout = port.engine(degree)
        rollout.remove_adapter()
        trial.until += time.perf_counter() - begun  # a process of the gate may have no engine of degree 1 yet
        errors[degree] = worst(rollout.velocity(latents, sigmas, conditions), want)
    if errors[trial.degree] > trial.bound and trial.fits("computed over a shard", errors[1]):
        return trial.found(
            "computed over a shard",
            f"the rollout is the actor at degree 1 and off by {errors[trial.degree]:.2g} at degree {trial.degree}, with all base weights in place: "
            "what is computed between them misses other ranks, such as a norm over all heads, or a collective whose result is dropped",
            errors[1],
        )
    return None


def without_given(trial: Trial) -> Diagnosis | None:
    """A recorded rollout with everything given that can be, against the actor that is asked again as if nothing were."""
    port, given = trial.port, max(trial.port.givens, key=len)
    if not (given and offers(port, "objective") and offers(port, "engine") and offers(port, "adapter")):
        return None
    rollout, case = port.engine(trial.degree), smallest(port, seed=11, given=given)
    rollout.remove_adapter()
    conditions = port.conditions(case)
    step = rollout.rollout(case.normal("noise", port.shapes(case)), max(4, port.least_calls), conditions).steps[1]
    with torch.no_grad(), port.using(None):
        if worst(port.predict_velocity(step.latents, step.sigmas, conditions), step.velocity) <= trial.bound:
            return None
        residual = worst(port.predict_velocity(step.latents, step.sigmas, [replace(c, given={}) for c in conditions]), step.velocity)
    if trial.fits("given frames dropped", residual):
        return trial.found("given frames dropped", f"the rollout samples as if {' and '.join(given)} had not been given", residual)
    return None


def replay(trial: Trial) -> Diagnosis | None:
    """A recorded rollout against the actor that is asked again: with the records of other steps, and with other adapters."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "engine") and offers(port, "adapter")):
        return None
    case, calls = smallest(port, seed=10), max(5, port.least_calls)
    rollout = port.engine(trial.degree)
    state = random_adapter(port, port.adapter, 77)
    rollout.set_adapter(state, port.adapter, 900_001)
    port.load_adapter("default", state)
    conditions = port.conditions(case)
    steps = rollout.rollout(case.normal("noise", port.shapes(case)), calls, conditions).steps
    rollout.remove_adapter()
    if trial.says("a model call too few or too many", len(steps) != calls):
        return trial.found("a model call too few or too many", f"a rollout of {calls} calls makes {len(steps)}")

    def ask(latents: int, sigmas: int, name: str | None = "default") -> float:
        """The worst error over the steps, with latents and sigmas of so many steps later."""
        errors = []
        for i, step in enumerate(steps):
            if 0 <= i + latents < len(steps) and 0 <= i + sigmas < len(steps):
                with torch.no_grad(), port.using(name):
                    again = port.predict_velocity(steps[i + latents].latents, steps[i + sigmas].sigmas, conditions)
                errors.append(worst(again, step.velocity))
        return max(errors)

    if ask(0, 0) <= trial.bound:
        repeats = [i for i in range(1, len(steps)) if all(torch.equal(steps[i].latents[m], steps[i - 1].latents[m]) for m in steps[i].latents)]
        if trial.says("a step recorded twice", bool(repeats)):
            return trial.found("a step recorded twice", f"records {repeats[0] - 1} and {repeats[0]} of a rollout are the same step")
        return None
    for cause, text, latents, sigmas, name in (
        ("record one step off", "each record has the sigma of the step before", 0, 1, "default"),
        ("record one step off", "each record has the sigma of the step after", 0, -1, "default"),
        ("record one step off", "each record has the latents after its step", -1, 0, "default"),
        ("adapter missing", "the rollout samples without the adapter", 0, 0, None),
    ):
        if trial.fits(cause, residual := ask(latents, sigmas, name)):
            return trial.found(cause, text, residual)
    return None


# -- schedule ------------------------------------------------------------------------------------------------------------------------------------
Grid = Callable[[int, Case], dict[str, torch.Tensor]]


def grid(trial: Trial) -> Diagnosis | None:
    """The port's grid against the vendor's scheduler; without one, against one shift of an even grid."""
    port = trial.port
    if not offers(port, "objective"):
        return None
    if offers(port, "vendor"):
        found = _grids(trial, lambda n, case: port.grid(n, case), lambda n, case: port.vendor_grid(n, case), "the port's grid")
        if found is not None:
            return found
    if port.shift:
        found = _grids(
            trial, lambda n, case: port.grid(n, case), lambda n, case: {m: _shifted(_even(n), s) for m, s in port.shift.items()}, "the grid"
        )
        if found is not None:
            return found
    return _defined(trial)


def rollout_grid(trial: Trial) -> Diagnosis | None:
    """The rollout's grid against the port's, and the steps that its loop makes against its grid."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "engine")):
        return None
    rollout = port.engine(trial.degree)
    if found := _grids(trial, lambda n, case: rollout.grid(n, case), lambda n, case: port.grid(n, case), "the rollout's grid"):
        return found
    case, calls = smallest(port, seed=12), max(4, port.least_calls)
    if offers(port, "adapter"):
        rollout.remove_adapter()
    steps = rollout.rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case)).steps
    if trial.says("a model call too few or too many", len(steps) != calls):
        return trial.found("a model call too few or too many", f"a rollout of {calls} calls makes {len(steps)}")
    return None


def walked(trial: Trial) -> Diagnosis | None:
    """The levels by which the rollout really moved its latents against the port's grid, whatever it reports and records."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "engine")):
        return None
    rollout = port.engine(trial.degree)
    if offers(port, "adapter"):
        rollout.remove_adapter()

    def subject(calls: int, case: Case) -> dict[str, torch.Tensor]:
        steps = rollout.rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case)).steps
        levels = {}
        for m in port.modalities:
            pairs = [((step.latents[m] - step.after[m]).double().flatten(), step.velocity[m].double().flatten()) for step in steps]
            moves = [float(moved @ velocity / velocity.square().sum()) for moved, velocity in pairs]
            levels[m] = 1 - torch.tensor([0.0, *itertools.accumulate(moves)], dtype=torch.float64)
        return levels

    return _grids(trial, subject, lambda n, case: port.grid(n, case), "what the rollout walks", 2e-4)


def _even(calls: int) -> torch.Tensor:
    return torch.linspace(1, 0, calls + 1, dtype=torch.float64)


def _shifted(u: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * u / (1 + (shift - 1) * u)


def _shift_between(got: torch.Tensor, want: torch.Tensor, bound: float = 2e-6) -> float | None:
    """The factor k for which ``got`` is ``want`` shifted once more by k; None if no single one fits."""
    a, b = got[1:-1], want[1:-1]
    if got.shape != want.shape or len(a) < 2 or bool(((a <= 0) | (a >= 1)).any()):
        return None
    factors = a * (1 - b) / (b * (1 - a))
    k = float(factors.median())
    return k if float((_shifted(want, k) - got).abs().max()) <= bound else None


def _grids(trial: Trial, subject: Grid, oracle: Grid, who: str, bound: float = 2e-6) -> Diagnosis | None:
    port = trial.port
    case = smallest(port)
    counts = [max(n, port.least_calls) for n in (6, 9)]
    gots = [{m: g.detach().double().cpu().clone() for m, g in subject(n, case).items()} for n in counts]
    wants = [{m: g.detach().double().cpu().clone() for m, g in oracle(n, case).items()} for n in counts]

    def error(change: Callable[[int, str], torch.Tensor | None], names: Sequence[str]) -> float:
        """The worst error if the grid of the chosen modalities (of all others: as it should be) is that."""
        total = 0.0
        for i, got in enumerate(gots):
            for m in got:
                want = change(i, m) if m in names else wants[i][m]
                total = max(total, math.inf if want is None or want.shape != got[m].shape else float((want - got[m]).abs().max()))
        return total

    everything = list(port.modalities)
    if error(lambda i, m: wants[i][m], everything) <= bound:
        return _grid_state(trial, subject, oracle, who) if bound <= 2e-6 else None

    def of(n: int, m: str) -> torch.Tensor | None:
        return oracle(n, case)[m].detach().double().cpu() if n >= port.least_calls else None

    wrong = [
        m for m in everything if any(g[m].shape != w[m].shape or float((g[m] - w[m]).abs().max()) > bound for g, w in zip(gots, wants, strict=True))
    ]
    where = _of(wrong, everything)
    mistakes: list[tuple[str, str, Callable[[int, str], torch.Tensor | None]]] = [
        ("grid with a point less", "is that of one model call less", lambda i, m: of(counts[i] - 1, m)),
        ("grid with a point more", "is that of one model call more", lambda i, m: of(counts[i] + 1, m)),
        ("first level missing", "lacks its first level, pure noise", lambda i, m: wants[i][m][1:]),
        ("first level missing", "begins at the second level of one call more", lambda i, m: _tail(of(counts[i] + 1, m))),
        ("terminal level missing", "lacks the terminal 0", lambda i, m: wants[i][m][:-1]),
        ("terminal level doubled", "holds the terminal 0 twice", lambda i, m: torch.cat([wants[i][m], wants[i][m].new_zeros(1)])),
        ("grid flipped", "ascends from data to noise", lambda i, m: wants[i][m].flip(0)),
        ("time flipped", "holds data fractions: with 1 − sigma it is right", lambda i, m: 1 - wants[i][m]),
        ("sigma 1000 times too large", "holds timesteps of 0 to 1000", lambda i, m: 1000 * wants[i][m]),
        ("sigma rounded", "is rounded to one of 1000 steps", lambda i, m: (1000 * wants[i][m]).round() / 1000),
        ("sigma rounded", "is cut down to one of 1000 steps", lambda i, m: (1000 * wants[i][m]).floor() / 1000),
        ("sigma rounded", "is rounded to bfloat16", lambda i, m: wants[i][m].bfloat16().double()),
        ("grid of another clip", "is that of the largest clip", lambda i, m: oracle(counts[i], largest(port))[m].detach().double().cpu()),
        ("grid of another request", "is that of an earlier number of calls", lambda i, m: of(len(gots[i][m]) - 1, m)),
        ("grid starts below pure noise", "is cut at its first level", lambda i, m: wants[i][m].clamp(max=float(gots[i][m][0]))),
    ]
    for other in everything:
        mistakes += [("one modality at another's level", f"is that of {other}", lambda i, m, other=other: wants[i][other])]  # type: ignore[misc]
    for cause, text, change in mistakes:
        if cause == "grid of another request" and len({len(g[m]) for g in gots for m in g}) > 1:
            continue
        if cause == "grid starts below pure noise" and float(gots[0][wrong[0]][0]) >= 1:
            continue
        if trial.fits(cause, residual := error(change, wrong), bound):
            return trial.found(cause, f"{who}{where} {text}", residual)
    factors = {m: _shift_between(gots[1][m], wants[1][m], bound) for m in wrong}
    trial.says("another shift", True)
    if all(k is not None for k in factors.values()):
        base = {m: _shift_between(wants[1][m], _even(counts[1]), bound) for m in wrong}
        known = [(k, base[m]) for m, k in factors.items() if k is not None]
        if all(b is not None and abs(b - 1) > 1e-3 and abs(k - b) < 1e-3 * b for k, b in known):
            return trial.found("shift applied twice", f"{who}{where} is shifted twice, by {_numbers(b for _, b in known)}")
        if all(b is not None and abs(b - 1) > 1e-3 and abs(k * b - 1) < 1e-3 for k, b in known):
            return trial.found("shift missing", f"{who}{where} is even: the shift of {_numbers(b for _, b in known)} is not applied")
        shifts = " and ".join(f"{k * (b or 1):.4g} instead of {b or 1:.4g}" for k, b in known)
        return trial.found("another shift", f"{who}{where} has a shift of {shifts}")

    def euler(i: int, m: str) -> torch.Tensor | None:
        """End points shifted when the scheduler is built, and the grid between them again."""
        shift = port.shift.get(m)
        floor = None if shift is None else _shifted(torch.tensor(1e-3, dtype=torch.float64), shift)
        if shift is None or floor is None:
            return None
        points = torch.linspace(1, float(floor), counts[i], dtype=torch.float64)
        return torch.cat([_shifted(points, shift), torch.zeros(1, dtype=torch.float64)])

    if trial.fits("grid of flow-match Euler", residual := error(euler, wrong), bound):
        return trial.found("grid of flow-match Euler", f"{who}{where} is the usual flow-match Euler's, whose end points are shifted twice", residual)
    return None


def _tail(points: torch.Tensor | None) -> torch.Tensor | None:
    return None if points is None else points[1:]


def _defined(trial: Trial) -> Diagnosis | None:
    """A grid against its definition alone: as many levels as calls and one more, from 1 down to 0."""
    port = trial.port
    calls = max(6, port.least_calls)
    for m, g in port.grid(calls, smallest(port)).items():
        first, last, points = float(g[0]), float(g[-1]), g.numel()
        here = f"the grid of {m} for {calls} calls"
        if trial.says("grid flipped", first < last):
            return trial.found("grid flipped", f"{here} ascends from {first:.4g} to {last:.4g}")
        if trial.says("sigma 1000 times too large", first > 100):
            return trial.found("sigma 1000 times too large", f"{here} begins at {first:.4g}")
        if trial.says("first level missing", points == calls and first < 1 and last == 0):
            return trial.found("first level missing", f"{here} has {points} points and begins at {first:.4g}: the first, pure noise, is missing")
        if trial.says("terminal level missing", points == calls and first == 1 and last > 0):
            return trial.found("terminal level missing", f"{here} has {points} points and ends at {last:.4g}")
        if trial.says("terminal level doubled", points == calls + 2 and float(g[-2]) == last == 0):
            return trial.found("terminal level doubled", f"{here} holds the terminal 0 twice")
        if trial.says("grid starts below pure noise", points == calls + 1 and first < 1):
            return trial.found("grid starts below pure noise", f"{here} begins at {first:.4g}, though what is sampled from is pure noise")
    return None


def _numbers(values: Iterator[float | None]) -> str:
    return " and ".join(f"{v:.4g}" for v in dict.fromkeys(values) if v is not None)


def _grid_state(trial: Trial, subject: Grid, oracle: Grid, who: str) -> Diagnosis | None:
    """Whether a grid changes with what was done to an earlier one, or is that of the largest clip."""
    port = trial.port
    case, calls = smallest(port), max(7, port.least_calls)
    for levels in subject(calls, case).values():
        levels.fill_(0.5)
    again = subject(calls, case)
    if trial.says("grid shared with its callers", any(bool((s == 0.5).all()) for s in again.values())):
        return trial.found("grid shared with its callers", f"{who} is handed out without a copy: what a caller writes into it stays")
    big, small = largest(port), case
    got, want, least = subject(calls, big), oracle(calls, big), oracle(calls, small)
    if worst(got, want) > 2e-6:
        if trial.fits("grid of another clip", worst(got, least), 2e-6):
            return trial.found("grid of another clip", f"{who} is that of the smallest clip, whatever the clip")
        if trial.fits("grid of another clip", worst(subject(calls, small), want), 2e-6):
            return trial.found("grid of another clip", f"{who} is that of the largest clip, whatever the clip")
    return None
