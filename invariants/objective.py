"""The objective: the gradient that an update really hands to its optimizer, against a float64 reference on the same draws.

Each check lets the trainer (`Port.update`) update once from samples with given rewards, reads the gradient where the optimizer reads it, and asks
which noise and levels were drawn. The reference is written from the paper's formulas (arXiv 2509.16117), differentiated by hand; it shares with
the trainer the port's `predict_velocity` and its derivative, which other links judge. The loss itself says nothing (it is the same number for any
reward at ``θ = old``), so it is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from loudfail.harness.case import PROMPTS, Case
from loudfail.harness.compare import require, require_at_least, require_close
from loudfail.harness.port import Noised, Plan, Port, Scored, Update, noised, random_adapter
from loudfail.harness.registry import invariant
from loudfail.harness.violation import Uncovered
from loudfail.invariants.adapters import seeds
from loudfail.invariants.advantages import advantages, optimality

Gradient = dict[str, torch.Tensor]
#: Spread of the rewards: so large that what a trainer adds to a standard deviation is nothing beside it.
SPREAD = 100.0


def brightness(latents: Mapping[str, torch.Tensor], prompts: Sequence[str]) -> torch.Tensor:
    """A reward for any latents: the sum over modalities of the mean of all elements, times `SPREAD`."""
    return SPREAD * torch.stack([x.detach().double().cpu().flatten(1).mean(1) for x in latents.values()]).sum(0)


def plan_for(port: Port, **fields: Any) -> Plan:
    """A small plan at the port's smallest extent, with the given fields replaced."""
    extent = {axis: min(sizes) for axis, sizes in port.extents.items()}
    weights = {m: 1.0 + 0.5 * index for index, m in enumerate(port.modalities)}
    return replace(Plan(tuple(PROMPTS[:3]), brightness, weights, extent), **fields)


def samples_for(port: Port, plan: Plan, seed: int, rewards: torch.Tensor | None = None) -> Scored:
    """Samples of ``plan.groups`` draws with rewards that have nothing to do with them."""
    count, conditions, prompts = plan.groups * plan.samples, [], []
    for group in range(plan.groups):
        prompt = plan.prompts[group % len(plan.prompts)]
        case = Case(seed=seed + group, extent=plan.extent, prompts=(prompt,), given=plan.given)
        conditions += [port.conditions(case)[0]] * plan.samples
        prompts += [prompt] * plan.samples
    case = Case(seed=seed, extent=plan.extent, prompts=tuple(prompts), given=plan.given)
    if rewards is None:
        rewards = SPREAD * torch.randn(count, generator=case.generator("rewards"), dtype=torch.float64)
    draws = [group for group in range(plan.groups) for _ in range(plan.samples)]
    return Scored(case.normal("clean", port.shapes(case)), conditions, prompts, draws, rewards)


@contextmanager
def watching(port: Port, update: Update) -> Iterator[list[Gradient]]:
    """The gradient of every trainable tensor as the optimizer finds it, once a step, in float64 on the CPU."""
    seen: list[Gradient] = []

    def keep(*_: Any) -> None:
        named = (update.parameters() or port.trainable()).items()
        seen.append({name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().cpu().clone() for name, p in named})

    handle = update.optimizer().register_step_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


@dataclass
class Learned:
    """One update that was watched: its plan, samples, model calls, and gradient; both policies as they were before it."""

    port: Port
    plan: Plan
    update: Update
    scored: Scored
    calls: list[Noised]
    gradient: Gradient
    default: dict[str, torch.Tensor]
    old: dict[str, torch.Tensor]

    def reference(self, plan: Plan | None = None) -> Gradient:
        """The gradient by the paper, under this or another plan."""
        plan = plan or self.plan
        return expected(self.port, plan, self.update.policy_scale(plan), self.scored, self.calls, self.default, self.old)

    def check(self, bound: float, where: str) -> None:
        require_gradient(self.gradient, self.reference(), bound, where)


def learn(
    port: Port, plan: Plan, seed: int, *, off_policy: bool = True, rewards: torch.Tensor | None = None, update: Update | None = None
) -> Learned:
    """Begin a run (unless one is given), set both policies, and watch one update."""
    if update is None:
        update = port.update()
        update.begin(plan)
    default = random_adapter(port, port.adapter, seed)
    old = random_adapter(port, port.adapter, seed + 1) if off_policy else default
    port.load_adapter("default", default)
    port.load_adapter("old", old)
    scored = samples_for(port, plan, seed, rewards)
    with watching(port, update) as seen:
        calls = update.learn(scored)
    require(len(seen) == 1, got=f"{len(seen)} steps of the optimizer", want="one", where="an update")
    return Learned(port, plan, update, scored, calls, seen[0], default, old)


def expected(
    port: Port,
    plan: Plan,
    scale: float,
    scored: Scored,
    calls: Sequence[Noised],
    default: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
) -> Gradient:
    """The gradient of the objective in `Plan` by the paper's formulas, for the model calls that were drawn. Leaves both policies as given here.

    Raises:
        Violation: not every sample was trained at ``plan.levels`` levels.
    """
    rows = [row for call in calls for row in call.rows]
    often = sorted({rows.count(row) for row in range(len(scored.draws))})
    require(often == [plan.levels], got=f"{often} levels a sample", want=f"{plan.levels} for each", where="model calls of the update")
    noise, sigmas = drawn(port, calls)
    clean = {m: scored.clean[m].to(port.device)[rows] for m in port.modalities}
    latents = {m: x.float() for m, x in noised({m: x.double() for m, x in clean.items()}, noise, sigmas).items()}
    conditions = [scored.conditions[row] for row in rows]
    r = optimality(advantages(scored.rewards, scored.draws), plan.clip)[rows]

    port.load_adapter("default", default)
    port.load_adapter("old", old)
    port.select_trainable("default")
    with torch.no_grad():
        with port.using("old"):
            v_old = port.predict_velocity(latents, sigmas, conditions)
        with port.using(None):
            v_base = port.predict_velocity(latents, sigmas, conditions) if plan.reference else v_old
    parameters = port.trainable()
    with torch.enable_grad():
        v = port.predict_velocity(latents, sigmas, conditions)
    slopes = {
        m: plan.modalities[m] / len(rows) * slope(plan, scale, r, v[m], v_old[m], v_base[m], noise[m].double() - clean[m].double(), sigmas[m])
        for m in port.modalities
    }
    gradients = torch.autograd.grad([v[m] for m in slopes], list(parameters.values()), [slopes[m].to(v[m]) for m in slopes], allow_unused=True)
    found = zip(parameters.items(), gradients, strict=True)
    return {name: (torch.zeros_like(p) if g is None else g).detach().double().cpu() for (name, p), g in found}


def slope(
    plan: Plan, scale: float, r: torch.Tensor, v: torch.Tensor, v_old: torch.Tensor, v_base: torch.Tensor, target: torch.Tensor, sigma: torch.Tensor
) -> torch.Tensor:
    """The derivative of one modality's objective in the velocity, by hand, ``(B, *shape)`` float64."""
    v, v_old, v_base = v.detach().double(), v_old.double(), v_base.double()
    column = [-1, *[1] * (v.ndim - 1)]
    size, r, sigma = v[0].numel(), r.to(v).view(column), sigma.to(v).view(column)
    result = torch.zeros_like(v)
    for sign, share in ((1.0, r), (-1.0, 1 - r)):
        error = v_old + sign * plan.beta * (v - v_old) - target
        weight = torch.ones_like(r)
        if plan.weighting == "adaptive":
            weight = sigma**2 / (sigma * error.abs().flatten(1).mean(1).view(column)).clamp_min(1e-5)
        result += scale * share * sign * 2 * plan.beta * weight * error / size
    return result + plan.reference * 2 * (v - v_base) / size


def flat(gradient: Gradient) -> torch.Tensor:
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def require_gradient(got: Gradient, want: Gradient, bound: float, where: str, scale: Gradient | None = None) -> None:
    """One relative error over all trainable tensors, of which there must be some."""
    require(set(got) == set(want) and bool(want), got=f"{len(got)} tensors", want=f"the {len(want)} that train", where=where)
    size = flat(scale or want)
    require_at_least(float(torch.linalg.vector_norm(size)), 1e-12, where=f"{where}, size of the gradient")
    require_close(flat(got), flat(want), bound=bound, where=f"{where}, gradient", scale=size)


def bound_of(port: Port) -> float:
    return port.bound(float32=1e-4, bfloat16=0.03)


def flow_match(one: Learned, weight: torch.Tensor) -> Gradient:
    """The gradient of ``weight · ‖v − (noise − x0)‖²``: mean over elements, sum over modalities, mean over samples and levels.

    Args:
        weight: ``(B,)``, of each sample.
    """
    port, rows = one.port, [row for call in one.calls for row in call.rows]
    port.load_adapter("default", one.default)
    noise, sigmas = drawn(port, one.calls)
    clean = {m: one.scored.clean[m].to(port.device)[rows] for m in port.modalities}
    parameters, total = port.trainable(), torch.zeros((), dtype=torch.float64, device=port.device)
    velocity = port.predict_velocity(noised(clean, noise, sigmas), sigmas, [one.scored.conditions[row] for row in rows])
    for m, v in velocity.items():
        error = (v.double() - (noise[m].double() - clean[m].double())).square().flatten(1).mean(1)
        total = total + one.plan.modalities[m] * (weight[rows].to(error) * error).mean()
    return {name: g.double().cpu() for name, g in zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True)}


def drawn(port: Port, calls: Sequence[Noised]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Noise and levels of all model calls, one after another."""
    noise = {m: torch.cat([call.noise[m] for call in calls]).to(port.device) for m in port.modalities}
    return noise, {m: torch.cat([call.sigmas[m] for call in calls]).to(port.device) for m in port.modalities}


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def at_the_old_policy_an_update_is_flow_matching_with_the_sign_of_the_advantage(port: Port, seed: int) -> None:
    """At ``θ = old`` the gradient is β(2r − 1) times each sample's flow-match gradient: whole at r = 1, opposite at r = 0, none at r = ½.

    Oracle: the derivative of ``‖v − (noise − x0)‖²``, which knows no second policy. The loss is the same number in all three cases.
    """
    plan = plan_for(port, samples=2, clip=0.5)
    better = torch.tensor([1.0, -1.0] * plan.groups, dtype=torch.float64)
    for what, rewards in (("r = 1 and 0", better), ("r = 0 and 1", -better), ("r = ½", 0 * better)):
        one = learn(port, plan, seed, off_policy=False, rewards=SPREAD * rewards)
        size = plan.beta * one.update.policy_scale(plan)
        want = flow_match(one, size * rewards)
        scale = want if what != "r = ½" else flow_match(one, size * better)
        require_gradient(one.gradient, want, bound_of(port), what, scale)


@dataclass(frozen=True)
class Setting:
    """What decides an off-policy gradient."""

    seed: int
    beta: float
    clip: float
    spread: str
    levels: int


def settings(port: Port) -> Any:
    from hypothesis import strategies as st

    return st.builds(
        Setting, seed=st.integers(0, 2**31 - 2), beta=st.sampled_from([0.1, 0.7, 1.0, 1.6]), clip=st.sampled_from([0.6, 1.0, 5.0]),
        spread=st.just("group"), levels=st.sampled_from([1, 3]),
    )  # fmt: skip


@invariant("objective", "adapter", "update", examples=3, setting=settings)
def off_policy_the_gradient_is_the_papers(port: Port, setting: Setting) -> None:
    """With ``θ ≠ old`` the gradient is that of ``r·‖v⁺ − v‖² + (1 − r)·‖v⁻ − v‖²``, in relative error, with an r of its own for each sample.

    β and the clip cancel at ``θ = old`` and show only here; so do exchanged policies, an old policy with a gradient, the base in its place, r
    shuffled or taken from the raw reward, and the noise of another draw. A cosine would pass half of them.
    """
    plan = plan_for(port, beta=setting.beta, clip=setting.clip, levels=setting.levels)
    learn(port, plan, setting.seed).check(bound_of(port), f"β {setting.beta:g}, clip {setting.clip:g}, {setting.levels} levels")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def adaptive_weighting_divides_by_each_samples_error_and_carries_no_gradient(port: Port, seed: int) -> None:
    """With adaptive weighting each of the two errors, of x0, is divided by the mean absolute one of that sample and modality, held constant.

    A gradient through the divisor changes the direction, and one divisor for the packed sequence couples the modalities by their row counts.
    """
    plan = plan_for(port, weighting="adaptive", beta=0.7)
    for off_policy in (True, False):
        learn(port, plan, seed, off_policy=off_policy).check(bound_of(port), f"{'off' if off_policy else 'on'} policy")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def the_reference_term_pulls_towards_the_base_model(port: Port, seed: int) -> None:
    """A coefficient of the reference term adds the gradient of the mean squared distance from the velocity of the model without adapters.

    Measured against that gradient alone. It is logged all the same when it has no gradient (Flow-Factory #123), or when the reference is the old
    policy, from which the distance is 0 on policy.
    """
    plan = plan_for(port, reference=3.0)
    one = learn(port, plan, seed)
    whole = one.reference()
    without = one.reference(replace(plan, reference=0.0))
    require_gradient(one.gradient, whole, bound_of(port), "reference term", {name: whole[name] - without[name] for name in whole})


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def each_modality_trains_with_its_own_weight_alone(port: Port, seed: int) -> None:
    """With one modality's weight at 2 and the others' at 0 the gradient is that modality's, twice, whichever it is.

    A modality that is left out of the loss shows in no total; only its sub-score stays behind (ai-toolkit #701). One that dominates by its rows or
    its scale shows here as the wrong weight (LTX-2 #94).
    """
    for alone in port.modalities:
        plan = plan_for(port, modalities={m: 2.0 if m == alone else 0.0 for m in port.modalities})
        learn(port, plan, seed).check(bound_of(port), f"{alone} alone")


@invariant("objective", "adapter", "condition", "update", examples=1, seed=seeds)
def given_frames_have_no_part_in_an_update(port: Port, seed: int) -> None:
    """With given frames the gradient is that of the generated rows alone, under the same conditions, at the same levels.

    In the loss, given frames teach the model to repeat its input (verl-omni #396); drawn without them, it learns another task.
    """
    if not any(port.givens):
        raise Uncovered(f"port {port.name!r} has no given frames")
    plan = plan_for(port, given=max(port.givens, key=len))
    learn(port, plan, seed).check(bound_of(port), f"given {plan.given}")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def micro_batches_add_up_to_the_batch(port: Port, seed: int) -> None:
    """Whatever the size of a micro-batch, also where it does not divide the samples, the gradient is the mean over all samples and levels.

    The last micro-batch alone, a sum, and a mean of means over micro-batches of unequal size all train on.
    """
    for size in (1, 2):
        plan = plan_for(port, micro_batch=size)
        one = learn(port, plan, seed)
        largest = max(len(call.rows) for call in one.calls)
        require(largest <= size, got=f"{largest} samples in one call", want=f"at most {size}", where="model calls")
        one.check(bound_of(port), f"micro-batches of {size}")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def an_update_starts_from_no_gradient(port: Port, seed: int) -> None:
    """The gradient of a second update is its own alone.

    Gradients that are not cleared add up: the steps turn into momentum that nobody asked for.
    """
    plan = plan_for(port)
    update = port.update()
    update.begin(plan)
    for number in range(2):
        learn(port, plan, seed + 10 * number, update=update).check(bound_of(port), f"update {number + 1}")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def training_levels_are_those_that_the_rollout_walks(port: Port, seed: int) -> None:
    """The levels of each training call belong to one and the same model call of the rollout, in every modality, and all calls get their turn.

    Time instead of sigma, integer timesteps, a uniform draw, the video's level for the audio, and another shift are consistent in themselves: noise
    and label agree, and the model is trained where the sampler never is. Oracle: the port's grid, which `schedule` checks.
    """
    plan = plan_for(port, levels=3, calls=3)
    update = port.update()
    update.begin(plan)
    grid = port.grid(plan.calls, Case(extent=plan.extent, given=plan.given))
    used: set[int] = set()
    for number in range(2):
        one = learn(port, plan, seed + number, update=update)
        for call in one.calls:
            for place in range(len(call.rows)):
                told = {m: float(call.sigmas[m][place]) for m in port.modalities}
                gaps = [max(abs(told[m] - float(grid[m][index])) for m in told) for index in range(plan.calls)]
                used.add(gaps.index(min(gaps)))
                require_close(torch.tensor([min(gaps)]), torch.zeros(1), bound=1e-6, scale=1.0, where=f"levels {told}")
    require(len(used) == plan.calls, got=f"calls {sorted(used)}", want=f"each of {plan.calls}", where="36 draws of a level")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def every_sample_is_noised_afresh(port: Port, seed: int) -> None:
    """Training noise is standard normal and another one for every sample, level and update.

    One noise for a batch, or for every step, correlates what the samples teach; noise of another variance is no sample of the path that is walked.
    """
    update = port.update()
    update.begin(plan_for(port, seed=seed))
    calls = [call for _ in range(2) for call in update.step()[1]]
    noise, _ = drawn(port, calls)
    require_fresh_noise(noise)
    for modality, value in noise.items():
        x, where = value.double().cpu(), f"{modality}, {value.numel()} numbers"
        # Seven standard deviations of each statistic.
        require_close(x.var(), torch.ones((), dtype=torch.float64), bound=7 * (2 / x.numel()) ** 0.5, where=f"{where}, variance")
        require_close(x.mean(), torch.zeros((), dtype=torch.float64), bound=7 * x.numel() ** -0.5, scale=1.0, where=f"{where}, mean")


def require_fresh_noise(noise: Mapping[str, torch.Tensor]) -> None:
    """No two noises are the same: root mean square distance, about √2 for independent ones of many numbers."""
    for modality, value in noise.items():
        x = value.double().cpu().flatten(1)
        gaps = torch.cdist(x, x) / x.shape[1] ** 0.5 + 9 * torch.eye(len(x), dtype=torch.float64)
        require_at_least(float(gaps.min()), 1e-3, where=f"{modality}, distance of the two nearest of {len(x)} noises")
