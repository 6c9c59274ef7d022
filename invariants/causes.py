"""Mistakes of the objective: experiments of `loudfail.harness.diagnose` that need the reference gradient of `objective`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from loudfail.harness.case import Case
from loudfail.harness.compare import relative_error
from loudfail.harness.diagnose import Diagnosis, Mistake, Trial, experiment
from loudfail.harness.port import Noised, Plan, Port, noised, offers, random_adapter
from loudfail.harness.violation import Uncovered
from loudfail.invariants.advantages import advantages, optimality
from loudfail.invariants.objective import Gradient, Learned, drawn, flat, learn, plan_for, slope
from loudfail.invariants.update import SCHEDULES

Change = Callable[[torch.Tensor], torch.Tensor]
State = dict[str, torch.Tensor]


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def gradient_if(
    one: Learned,
    *,
    plan: Plan | None = None,
    old: str = "old",
    r: Change = same,
    target: Change = same,
    mixed: Change = same,
    conditions: Sequence[object] | None = None,
    positive: bool = False,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of an update, all tensors in one, if the trainer had made this mistake.

    Args:
        plan: what it follows instead of its plan.
        old: the adapter whose velocity it takes for the old policy's; ``none`` is the base model.
        r, target, mixed: what becomes of the probabilities, the targets and the levels at which latents are mixed, ``(B, …)`` over all calls.
        conditions: of each row, instead of its own.
        positive: the negative policy's half is missing.
        weights: of each row, instead of 1 / rows.
    """
    port, wrong = one.port, plan or one.plan
    rows = [row for call in one.calls for row in call.rows]
    noise, sigmas = drawn(port, one.calls)
    clean = {m: one.scored.clean[m].to(port.device)[rows] for m in port.modalities}
    levels = {m: mixed(s) for m, s in sigmas.items()}
    latents = {m: x.float() for m, x in noised({m: x.double() for m, x in clean.items()}, noise, levels).items()}
    told = list(conditions) if conditions is not None else [one.scored.conditions[row] for row in rows]
    chance = r(optimality(advantages(one.scored.rewards, one.scored.draws), wrong.clip)[rows])
    port.load_adapter("default", one.default)
    port.load_adapter("old", one.old)
    port.select_trainable("default")
    with torch.no_grad(), port.using(None if old == "none" else old):
        before = port.predict_velocity(latents, sigmas, told)  # type: ignore[arg-type]
    with torch.enable_grad():
        velocity = port.predict_velocity(latents, sigmas, told)  # type: ignore[arg-type]
    share = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64) if weights is None else weights
    slopes = {}
    for m, v in velocity.items():
        aim = target(noise[m].double() - clean[m].double())
        scale = one.update.policy_scale(one.plan)
        half = torch.ones_like(chance) if positive else chance
        column = (share * (chance if positive else 1)).to(v.device).view(-1, *[1] * (v.ndim - 1))
        slopes[m] = wrong.modalities[m] * column * slope(wrong, scale, half, v, before[m], before[m], aim, sigmas[m])
    parameters = port.trainable()
    tensors = list(parameters.values())
    found = torch.autograd.grad([velocity[m] for m in slopes], tensors, [slopes[m].to(velocity[m]) for m in slopes], allow_unused=True)
    gradient: Gradient = {
        name: (torch.zeros_like(p) if g is None else g).detach().double().cpu() for (name, p), g in zip(parameters.items(), found, strict=True)
    }
    return flat(gradient)


def in_each(calls: Sequence[Noised], change: Change) -> Change:
    """A change of ``(B, …)`` within each model call."""
    sizes = [len(call.rows) for call in calls]
    return lambda x: torch.cat([change(part) for part in x.split(sizes)])


@experiment("objective", "update")
def optimizer(trial: Trial) -> Diagnosis | None:
    """What the optimizer holds, its direction and its rate."""
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "update")):
        return None
    update, plan = port.update(), plan_for(port, learning_rate=3e-3)
    update.begin(plan)
    groups = update.optimizer().param_groups
    held = {id(p) for group in groups for p in group["params"]}
    trained = {id(p) for p in (update.parameters() or port.trainable()).values()}
    if trial.says("optimizer holds other tensors", not held & trained):
        return trial.found(
            "optimizer holds other tensors", f"none of the {len(trained)} tensors that train is among the {len(held)} of the optimizer"
        )
    if trial.says("optimizer misses tensors", bool(trained - held)):
        return trial.found("optimizer misses tensors", f"{len(trained - held)} of {len(trained)} tensors that train are not the optimizer's")
    if trial.says("optimizer holds too much", bool(held - trained)):
        return trial.found("optimizer holds too much", f"the optimizer steps {len(held - trained)} tensors beside the {len(trained)} of the adapter")
    if trial.says("optimizer climbs", any(group.get("maximize") for group in groups)):
        return trial.found("optimizer climbs", "the optimizer maximizes the loss")
    rates = sorted({float(group["lr"]) for group in groups})
    if trial.says("another learning rate", rates != [plan.learning_rate]):
        return trial.found("another learning rate", f"the optimizer has {rates}, the plan says {plan.learning_rate:g}")
    return None


@experiment("update")
def refreshing(trial: Trial) -> Diagnosis | None:
    """What a refresh makes of the old policy, under each schedule and at two intervals, against what the schedule says."""
    port = trial.port
    if not (offers(port, "adapter") and offers(port, "update")):
        return None
    bound = port.bound(float32=1e-5, bfloat16=1e-2)

    def refreshed(schedule: str, steps: Sequence[int], every: int) -> list[tuple[State, State, State]]:
        """Of each step: old as it is, as it was, and what trains."""
        update, seen = port.update(), []
        update.begin(plan_for(port, old=schedule, old_every=every))
        for step in steps:
            for number, name in enumerate(("default", "old")):
                port.load_adapter(name, random_adapter(port, port.adapter, 641 + number + 2 * step))
            then, theta = port.adapter_state("old"), port.adapter_state("default")
            update.refresh(step)
            seen.append((port.adapter_state("old"), then, theta))
        return seen

    at = {"copy": 2, "linear_to_0_5": 300, "delayed_linear_to_0_999": 100}
    moved = {schedule: refreshed(schedule, [step], 1)[0] for schedule, step in at.items()}

    def off(decay: Callable[[float], float] = lambda d: d, part: str = "") -> float:
        """The worst error if that is made of the schedule's decay, the step counted from 0 or from 1; old stays in tensors of another part."""

        def error(first: int) -> float:
            errors = []
            for schedule, (now, then, theta) in moved.items():
                meant = decay(SCHEDULES[schedule](at[schedule] + first))
                for n in now:
                    d = meant if part in n else 1.0
                    errors.append(relative_error(now[n], d * then[n].double() + (1 - d) * theta[n].double()))
            return max(errors)

        return min(error(0), error(1))

    if (plain := off()) > bound:
        never, reverse = "a refresh leaves the old policy as it was, whatever the schedule", "old keeps 1 − d of itself where the schedule says d"
        copied = "a refresh copies what trains: the schedule is ignored, or not told the step"
        mistakes = [
            Mistake("old policy never refreshed", never, lambda: off(lambda d: 1.0)),
            Mistake("decay reversed", reverse, lambda: off(lambda d: 1 - d)),
            Mistake("old policy is a copy", copied, lambda: off(lambda d: 0.0)),
            Mistake("old policy refreshed in part", "a refresh moves B and leaves A as it was", lambda: off(part="lora_B")),
            Mistake("old policy refreshed in part", "a refresh moves A and leaves B as it was", lambda: off(part="lora_A")),
        ]
        return trial.first(mistakes, bound, plain)
    still = [all(torch.equal(now[n], then[n]) for n in now) for now, then, _ in refreshed("copy", range(6), 3)]
    if trial.says("refresh interval ignored", sum(still) != 4):
        return trial.found("refresh interval ignored", f"with an interval of 3 old is refreshed after {6 - sum(still)} of 6 steps")
    return None


@experiment("objective", "update")
def gradient(trial: Trial) -> Diagnosis | None:
    """The gradient of one update off policy, in micro-batches of unequal size, against that of each known mistake; then with given frames."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "adapter") and offers(port, "update")):
        return None
    bound = port.bound(float32=1e-4, bfloat16=0.1)
    one = learn(port, plan_for(port, beta=0.7, clip=0.6, micro_batch=2), 47)
    got, want = flat(one.gradient), flat(one.reference())
    plain = relative_error(got, want)
    if plain > bound:
        if found := trial.first(_mistakes(port, one, got), bound, plain):
            return found
        again = learn(port, one.plan, 57, update=one.update)
        if trial.fits("gradient not cleared", relative_error(flat(again.gradient) - got, flat(again.reference())), bound):
            return trial.found("gradient not cleared", "the gradient of an update holds that of those before")
        factor = float((got @ want) / (want @ want))
        if trial.fits("gradient scaled", relative_error(got, factor * want), bound):
            return trial.found("gradient scaled", f"the gradient of an update is {factor:.4g} times the paper's")
        return None
    return _on_policy(trial, bound) or _given(trial, bound) or _pulled(trial, bound) or _kept(trial, bound)


def _kept(trial: Trial, bound: float) -> Diagnosis | None:
    """A second update of a run, whose gradient must be its own."""
    port, plan = trial.port, plan_for(trial.port)
    one = learn(port, plan, 107)
    again = learn(port, plan, 117, update=one.update)
    got, want = flat(again.gradient), flat(again.reference())
    if relative_error(got, want) > bound and trial.fits("gradient not cleared", relative_error(got, want + flat(one.gradient)), bound):
        return trial.found("gradient not cleared", "the gradient of a second update holds that of the first")
    return None


def _pulled(trial: Trial, bound: float) -> Diagnosis | None:
    """The reference term: missing in the gradient, or with the other sign."""
    port = trial.port
    try:
        one = learn(port, plan_for(port, reference=3.0), 127)
    except Uncovered:
        return None
    got, whole, without = flat(one.gradient), flat(one.reference()), flat(one.reference(replace(one.plan, reference=0.0)))
    if relative_error(got, whole, whole - without) <= bound:
        return None
    mistakes = [
        Mistake("reference term without gradient", "the reference term adds nothing to the gradient", lambda: relative_error(got, without, whole)),
        Mistake("reference term reversed", "the reference term pushes away from the base", lambda: relative_error(got, 2 * without - whole, whole)),
    ]
    return trial.first(mistakes, bound)


def _mistakes(port: Port, one: Learned, got: torch.Tensor) -> Iterator[Mistake]:
    plan, calls = one.plan, one.calls
    rows = [row for call in calls for row in call.rows]
    conditions = [one.scored.conditions[row] for row in rows]
    sizes = {m: x[0].numel() for m, x in one.scored.clean.items()}
    everything = sum(sizes.values())

    def off(**mistake: object) -> Callable[[], float]:
        return lambda: relative_error(got, gradient_if(one, **mistake))  # type: ignore[arg-type]

    def scaled(**mistake: object) -> Callable[[], float]:
        """Up to one factor."""

        def residual() -> float:
            other = gradient_if(one, **mistake)  # type: ignore[arg-type]
            return relative_error(got, (got @ other) / (other @ other) * other)

        return residual

    def weighing(weights: dict[str, float]) -> Callable[[], float]:
        return off(plan=replace(plan, modalities=weights))

    yield Mistake("policies exchanged", "r and 1 − r have changed places: good samples pull the negative policy", off(r=lambda r: 1 - r))
    yield Mistake("gradient reversed", "the update goes the other way", lambda: relative_error(got, -gradient_if(one)))
    yield Mistake("target reversed", "the target is x0 − noise for a velocity that is noise − x0", off(target=torch.neg))
    yield Mistake("another sample's target", "samples of a call have exchanged their targets", off(target=in_each(calls, lambda t: t.roll(1, 0))))
    yield Mistake("another sample's probability", "samples of a call have exchanged their r", off(r=in_each(calls, lambda r: r.roll(1, 0))))
    yield Mistake("mixed by the data fraction", "latents are mixed at 1 − sigma and labelled sigma", off(mixed=lambda s: 1 - s))
    firsts = [one.scored.conditions[call.rows[0]] for call in calls]
    turned = [text for call, text in zip(calls, firsts[1:] + firsts[:1], strict=True) for _ in call.rows]
    yield Mistake("another sample's conditions", "a model call has the conditions of the next one", off(conditions=turned))
    yield Mistake("another sample's conditions", "samples are trained under the next one's prompt", off(conditions=[*conditions[1:], conditions[0]]))
    yield Mistake("negative policy missing", "only the positive policy is trained: rejection sampling", off(positive=True))
    yield Mistake("β ignored", "the implicit policies are those of β = 1, but for the size of the step", scaled(plan=replace(plan, beta=1.0)))
    yield Mistake("clip ignored", "the clip is 1 whatever the plan says", off(plan=replace(plan, clip=1.0)))
    yield Mistake("clip ignored", "the clip is 5 whatever the plan says", off(plan=replace(plan, clip=5.0)))
    yield Mistake("base model for the old policy", "the old policy's velocity is the base model's", off(old="none"))
    yield Mistake("training policy for the old one", "the old policy's velocity is the training one's", off(old="default"))
    for lost in port.modalities:
        weights = {m: 0.0 if m == lost else w for m, w in plan.modalities.items()}
        yield Mistake("modality missing", f"{lost} has no part in the gradient", weighing(weights))
    yield Mistake("weights ignored", "every modality has the weight 1", weighing(dict.fromkeys(port.modalities, 1.0)))
    shares = {m: len(sizes) * w * sizes[m] / everything for m, w in plan.modalities.items()}
    yield Mistake("modalities weighted by their size", "the loss is a mean over all elements of the sequence", weighing(shares))
    lengths = torch.tensor([len(call.rows) for call in calls for _ in call.rows], dtype=torch.float64)
    last = torch.zeros(len(rows), dtype=torch.float64)
    last[-len(calls[-1].rows) :] = 1 / len(rows)
    yield Mistake("last micro-batch only", "the gradient is that of the last model call", off(weights=last))
    yield Mistake("micro-batches count alike", "each model call has the same weight, however few its samples", off(weights=1 / lengths / len(calls)))
    yield Mistake("micro-batches summed", "the means of model calls are added up", off(weights=1 / lengths))


def _on_policy(trial: Trial, bound: float) -> Diagnosis | None:
    """At ``θ = old``, where a gradient through the old policy's velocity makes the reward cancel."""
    port = trial.port
    one = learn(port, plan_for(port, beta=0.7, clip=0.6), 67, off_policy=False)
    got, want = flat(one.gradient), flat(one.reference())
    if relative_error(got, want) <= bound:
        return None
    # With v for old in both, v⁺ = v⁻ = v: plain flow matching, whatever the reward. `slope` at r = 1 is that, times β.
    matched = gradient_if(one, r=torch.ones_like) / one.plan.beta
    if trial.fits("old policy carries a gradient", relative_error(got, matched), bound):
        return trial.found(
            "old policy carries a gradient", "on policy the gradient is that of flow matching, whatever the reward: old is not detached"
        )
    return None


def _given(trial: Trial, bound: float) -> Diagnosis | None:
    """With given frames, whether they were left out."""
    port = trial.port
    if not any(port.givens):
        return None
    one = learn(port, plan_for(port, given=max(port.givens, key=len)), 77)
    got = flat(one.gradient)
    if relative_error(got, flat(one.reference())) <= bound:
        return None
    rows = [row for call in one.calls for row in call.rows]
    bare = port.conditions(Case(extent=one.plan.extent))[0]
    mine = [one.scored.conditions[row] for row in rows]
    without = [replace(c, given={}, extra={n: bare.extra[n] if n == "given_rows" else v for n, v in c.extra.items()}) for c in mine]
    if trial.fits("given frames dropped", relative_error(got, gradient_if(one, conditions=without)), bound):
        return trial.found("given frames dropped", "samples with given frames are trained as if none had been given")
    return None


@experiment("objective")
def levels(trial: Trial) -> Diagnosis | None:
    """The levels of training against the grid that the rollout walks."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "adapter") and offers(port, "update")):
        return None
    plan = plan_for(port, levels=3, calls=max(7, port.least_calls))  # of which no level between is a thousandth
    update = port.update()
    update.begin(plan)
    calls = [call for number in range(2) for call in learn(port, plan, 87 + number, update=update).calls]
    _, told = drawn(port, calls)
    case = Case(extent=plan.extent)

    def away(heard: torch.Tensor, points: torch.Tensor) -> float:
        return float((heard.double().cpu()[:, None] - points.double().cpu()[None]).abs().min(1).values.max())

    def worst(change: Callable[[str], torch.Tensor]) -> Callable[[], float]:
        return lambda: max(away(told[m], change(m)) for m in port.modalities)

    def cut(points: torch.Tensor) -> torch.Tensor:
        return (1000 * points).floor().double() / 1000  # where rounding decides, float32 and float64 may cut to different steps

    grid = port.grid(plan.calls, case)
    if worst(lambda m: grid[m])() <= 1e-6:
        used = {float(s) for s in told[port.modalities[0]]}
        if trial.says("one level for every sample", len(used) == 1):
            return trial.found("one level for every sample", f"only the level {used.pop():.3g} is ever trained")
        return None
    mistakes = [
        Mistake("one modality at another's level", f"every modality is trained at the levels of {other}", worst(lambda m, o=other: grid[o]))  # type: ignore[misc]
        for other in grid
    ]
    mistakes += [
        Mistake("sigma rounded", "levels are cut down to one of 1000 steps", worst(lambda m: torch.cat([cut(grid[m]), cut(grid[m].double())]))),
        Mistake("sigma rounded", "levels are rounded to one of 1000 steps", worst(lambda m: (1000 * grid[m]).round() / 1000)),
        Mistake("time flipped", "training is told 1 − sigma", worst(lambda m: 1 - grid[m])),
    ]
    for step in (1, -1):
        if plan.calls + step >= port.least_calls:
            other = port.grid(plan.calls + step, case)
            text = f"levels are those of {plan.calls + step} calls, the rollout makes {plan.calls}"
            mistakes.append(Mistake("grid of another request", text, worst(lambda m, other=other: other[m])))  # type: ignore[misc]
    if found := trial.first(mistakes, 1e-6):
        return found
    if trial.says("levels off the grid", True):
        return trial.found("levels off the grid", "levels are drawn from elsewhere than the grid that is sampled")
    return None


@experiment("objective")
def noise(trial: Trial) -> Diagnosis | None:
    """The noise of training: another one for every sample and step, of standard deviation 1."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "adapter") and offers(port, "update")):
        return None
    update = port.update()
    update.begin(plan_for(port, seed=97))
    steps = [drawn(port, update.step()[1])[0] for _ in range(2)]
    for modality in port.modalities:
        first, second = (step[modality].double().cpu().flatten(1) for step in steps)
        if trial.says("training noise repeats", bool((torch.cdist(first, second) < 1e-6).any())):
            return trial.found("training noise repeats", f"a second step has noises of {modality} of the first: the seed forgets the step")
        gaps = torch.cdist(first, first) + 9 * torch.eye(len(first), dtype=torch.float64)
        if trial.says("training noise shared", bool((gaps < 1e-6).any())):
            return trial.found("training noise shared", f"samples of one step have the same noise of {modality}")
        both = torch.cat([first, second])
        size = float(both.std())
        if trial.says("training noise scaled", abs(size - 1) > 7 * (2 * both.numel()) ** -0.5):
            return trial.found("training noise scaled", f"the training noise of {modality} has a standard deviation of {size:.3g}")
    return None
