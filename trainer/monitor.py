"""Monitors: cheap checks inside a training run, at every hand-over. A library: no function here knows this trainer's loop.

A run with a fault looks healthy: the loss is finite and the reward may rise. Each function measures one thing that a fault cannot fake and returns a
`Reading`; `Watch` collects them and stops the run, or warns. docs/trainer.md shows them in another trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from loudfail.harness.case import Case
from loudfail.harness.compare import relative_error
from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Port, Step, Trajectory, offers, probe
from loudfail.harness.violation import show
from loudfail.trainer.adapters import effect
from loudfail.trainer.sampler import Sampler

Latents = Mapping[str, torch.Tensor]
Score = Callable[[Latents, Sequence[str]], dict[str, torch.Tensor]]

PROBES = 8


@dataclass(frozen=True)
class Reading:
    """What one monitor measured.

    Attributes:
        monitor: its name.
        got: the measurement; not a number counts as a fault.
        bound: largest ``got`` without a fault; smallest if ``at_least``.
        where: the place: modality, projection, group.
        vacuous: why it can say nothing this time; empty if it can.
    """

    monitor: str
    got: float
    bound: float
    where: str = ""
    at_least: bool = False
    vacuous: str = ""

    @property
    def fires(self) -> bool:
        return not self.vacuous and not (self.got >= self.bound if self.at_least else self.got <= self.bound)

    def __str__(self) -> str:
        return f"{self.monitor}: got {show(float(self.got))}, want {'≥' if self.at_least else '≤'} {self.bound:.3g}" + (
            f" ({self.where})" if self.where else ""
        )


class MonitorFired(RuntimeError):
    """A monitor saw a fault under the policy ``stop``.

    Attributes:
        readings: those that fired.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.readings = list(readings)
        super().__init__("; ".join(map(str, readings)))


@dataclass
class Watch:
    """Judges readings and counts them.

    Attributes:
        policy: ``stop`` raises `MonitorFired`; ``warn`` calls ``warn`` and goes on.
        counts: monitor → ``ran``, ``fired``, ``vacuous`` → number, and ``worst``, the reading nearest to its bound as a share of it.
        shares: monitor → its last reading as a share of its bound; above 1 it fired. Whoever wants those of a step alone empties it.
    """

    policy: Literal["stop", "warn"] = "stop"
    warn: Callable[[str], None] = print
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def judge(self, *readings: Reading) -> dict[str, float]:
        """Count the readings; monitor → measurement of those that say something.

        Raises:
            MonitorFired: one fires and the policy is ``stop``.
        """
        for reading in readings:
            count = self.counts.setdefault(reading.monitor, {"ran": 0, "fired": 0, "vacuous": 0, "worst": 0.0})
            count["vacuous" if reading.vacuous else "ran"] += 1
            count["fired"] += reading.fires
            if not reading.vacuous:
                self.shares[reading.monitor] = _load(reading)
                count["worst"] = max(count["worst"], self.shares[reading.monitor])
        fired = [reading for reading in readings if reading.fires]
        if fired and self.policy == "stop":
            raise MonitorFired(fired)
        for reading in fired:
            self.warn(f"MONITOR {reading}")
        return {reading.monitor: float(reading.got) for reading in readings if not reading.vacuous}


def worst(readings: Sequence[Sequence[Reading]]) -> list[Reading]:
    """Out of the same monitors' readings in several processes, each monitor's nearest to firing, with the number of the process that it is of.

    Args:
        readings: one sequence a process.
    """
    if len(readings) == 1:
        return list(readings[0])
    found: dict[str, Reading] = {}
    for number, own in enumerate(readings):
        for reading in own:
            here = found.get(reading.monitor)
            if here is None or _urgency(reading) > _urgency(here):
                found[reading.monitor] = replace(reading, where=", ".join(filter(None, (reading.where, f"process {number}"))))
    return list(found.values())


def _urgency(reading: Reading) -> tuple[bool, bool, float]:
    load = _load(reading)
    return reading.fires, not reading.vacuous, load if not math.isnan(load) else math.inf


def velocity_replay(port: Port, adapter: str, step: Step, conditions: Sequence[Conditions], rows: Sequence[int]) -> Reading:
    """The trainer's policy, asked at the latents and sigmas that the rollout recorded, gives the velocity that the rollout recorded.

    The best single check: sees wrong time, sign, prompt, and an adapter that is missing, partial, swapped, mis-scaled or stale.

    Args:
        port: offers ``objective`` and ``adapter``.
        adapter: name of the policy that the rollout should have sampled with.
        step: one recorded model call of the rollout.
        conditions: of each sample, the *trainer's*.
        rows: the samples that are replayed.
    """
    index = torch.tensor(list(rows))
    latents = {m: x[index.to(x.device)].to(port.device) for m, x in step.latents.items()}
    sigmas = {m: s[index.to(s.device)] for m, s in step.sigmas.items()}
    with torch.no_grad(), port.using(adapter):
        again = port.predict_velocity(latents, sigmas, [conditions[i] for i in rows])
    errors = {m: relative_error(again[m], v[index.to(v.device)]) for m, v in step.velocity.items()}
    worst = max(errors, key=lambda m: math.inf if math.isnan(errors[m]) else errors[m])
    where = f"{worst}, sigma {float(sigmas[worst][0]):.3f}"
    return Reading("velocity_replay", errors[worst], port.bound(float32=1e-5, bfloat16=1e-1), where)


def walked_grid(port: Port, trajectory: Trajectory, case: Case | None = None) -> Reading:
    """The rollout walked the grid of sigmas that training draws from, for every modality; ``case``: as for `Port.grid`."""
    grid, worst = port.grid(len(trajectory.steps), case), (0.0, "")
    for call, step in enumerate(trajectory.steps):
        for m, sigma in step.sigmas.items():
            worst = max(worst, (float((sigma.cpu() - grid[m][call].cpu()).abs().max()), f"call {call}, {m}"))
    return Reading("walked_grid", worst[0], 1e-6, worst[1])


def adapter_arrived(
    rollout: Sampler,
    state: Mapping[str, torch.Tensor],
    config: AdapterConfig,
    version: int,
    projections: Mapping[str, tuple[int, int]],
    *,
    bfloat16: bool = False,
) -> list[Reading]:
    """What the rollout really holds: the version, and for every projection what its layer adds, read back and compared with ``alpha / r · B A``.

    Args:
        rollout: the engine.
        state: the adapter that was handed over, as the trainer has it.
        config: its rank and alpha.
        version: the version under which it was handed over.
        projections: every projection that it must reach → ``(out, in)``.
        bfloat16: the rollout runs in bfloat16.
    """
    here = rollout.adapter_version()
    want = effect(state, config, {name: probe(size, PROBES, version) for name, (_, size) in projections.items()})
    norm = math.sqrt(sum(float(value.square().sum()) for value in want.values()))
    vacuous = "B is still 0: every adapter adds nothing" if norm == 0 else ""
    got = rollout.delta_response(PROBES, version)
    worst = (0.0, "")
    for name, response in want.items():
        if float(response.norm()) > 0:
            worst = max(worst, (relative_error(got[name], response) if name in got else math.inf, name if name in got else f"{name}: no LoRA layer"))
    return [
        Reading("adapter_version", 0.0 if here == version else 1.0, 0.0, f"rollout has {here}, handed over {version}"),
        Reading("adapter_delta", worst[0], 6e-2 if bfloat16 else 5e-6, worst[1], vacuous=vacuous),
    ]


def adapter_bound(report: BindReport, version: int, projections: int) -> Reading:
    """The rollout bound all that it registered, at least one pair for every projection (a fused layer may count one a slice), under this version."""
    missing = max(report.registered - report.bound, projections - report.bound, 0) + (report.version != version)
    return Reading("adapter_bound", float(missing), 0.0, f"registered {report.registered}, bound {report.bound} of {projections} projections")


def prompt_ids(
    port: Port, prompts: Sequence[str], conditions: Sequence[Conditions], rows: Sequence[int], *, through_rollout: bool = False
) -> Reading:
    """The token ids and embeddings that the model is conditioned on are those of the dataset's prompts; with an engine, also at *its* encoder.

    Args:
        port: offers ``prompt``, otherwise the reading is vacuous.
        prompts: the dataset's text of each sample.
        conditions: what the rollout was given.
        rows: the samples that are looked at.
        through_rollout: ask the rollout's own encoder too.
    """
    if not offers(port, "prompt"):
        return Reading("prompt_ids", 0.0, 0.0, vacuous="the port has no prompt seam")
    wrong = []
    for row in rows:
        ids, condition = tuple(port.tokenize(prompts[row])), conditions[row]
        if tuple(condition.prompt_ids) != ids:
            wrong.append(f"sample {row}: other ids")
        elif not condition.given and not torch.equal(condition.embeds.cpu(), port.encode_prompt(ids).cpu()):
            wrong.append(f"sample {row}: other embedding")
        elif through_rollout and tuple(port.rollout_prompt(ids)[0]) != ids:
            wrong.append(f"sample {row}: other ids at the rollout's encoder")
    return Reading("prompt_ids", float(len(wrong)), 0.0, ", ".join(wrong[:3]))


def reward_recomputed(score: Score, latents: Latents, prompts: Sequence[str], logged: Mapping[str, torch.Tensor], bound: float = 1e-6) -> Reading:
    """Every sub-score and the total, computed again from the stored latents by a scorer that the loop does not use, equal the logged ones.

    Sees a reward computed from silent, shifted or other media, from other prompts, negated, or partly left out.
    """
    again = score(latents, prompts)
    if set(again) != set(logged):
        return Reading("reward_recomputed", math.inf, bound, f"sub-scores {sorted(logged)}, want {sorted(again)}")
    errors = {name: float((again[name] - logged[name].cpu().double()).abs().max()) for name in again}
    worst = max(errors, key=lambda name: errors[name])
    return Reading("reward_recomputed", errors[worst], bound, worst)


def hears_every_modality(score: Score, latents: Latents, prompts: Sequence[str], groups: Sequence[int], logged: torch.Tensor) -> list[Reading]:
    """Exchanging one modality between groups moves the total; a reward that is deaf or blind, or gets silence, does not move at all.

    Args:
        score: as the loop scores, media and all.
        latents: of the batch.
        prompts: of each sample.
        groups: of each sample; samples are exchanged across groups, since inside one they become alike as training goes on.
        logged: the totals of the batch.
    """
    if len(set(groups)) < 2:
        return [Reading("hears_every_modality", 0.0, 0.0, at_least=True, vacuous="one group: nothing to exchange")]
    order = sorted(range(len(groups)), key=lambda i: groups[i])
    shift = max(list(groups).count(group) for group in set(groups))
    other = torch.empty(len(groups), dtype=torch.long)
    other[torch.tensor(order)] = torch.tensor(order[shift:] + order[:shift])
    readings = []
    for modality in latents:
        changed = {m: x[other.to(x.device)] if m == modality else x for m, x in latents.items()}
        moved = float((score(changed, prompts)["total"] - logged.cpu().double()).abs().mean())
        readings.append(Reading(f"hears_{modality}", moved, 1e-6, "mean change of the total", at_least=True))
    return readings


def group_means(advantages: torch.Tensor, groups: Sequence[int]) -> Reading:
    """The mean advantage of every group, by the identity of the draw, is 0. Sees advantages taken across prompts, and groups that were mixed up."""
    group = torch.tensor(list(groups))
    means = {int(g): abs(float(advantages.detach().cpu().double()[group == g].mean())) for g in group.unique()}
    worst = max(means, key=lambda g: means[g])
    return Reading("group_mean_advantage", means[worst], 1e-6, f"group {worst}")


def advantages_follow_rewards(probability: torch.Tensor, totals: torch.Tensor, groups: Sequence[int]) -> Reading:
    """Inside every group, the optimality probability rises with the *recomputed* total. Sees a flipped sign, a shuffle, and rewards of another step.

    Args:
        probability: r, ``(B,)``, as the update gets it.
        totals: ``(B,)``, recomputed.
        groups: of each sample.
    """
    group, worst, place = torch.tensor(list(groups)), 1.0, ""
    r, totals = probability.detach().cpu().double(), totals.detach().cpu().double()
    compared = 0
    for g in group.unique():
        a, b = r[group == g], totals[group == g]
        above = (b[:, None] - b[None]) > 1e-9
        compared += int(above.sum())
        if above.any():
            share = float(((a[:, None] - a[None])[above] >= 0).double().mean())
            if share < worst:
                worst, place = share, f"group {int(g)}"
    vacuous = "" if compared else "all rewards of every group are equal"
    constant = compared > 0 and float((2 * r - 1).abs().max()) == 0
    return Reading("advantages_follow_rewards", 0.0 if constant else worst, 1.0, place or "share of pairs in order", at_least=True, vacuous=vacuous)


def group_spread(latents: Latents, groups: Sequence[int]) -> Reading:
    """The samples of a group differ, in every modality. Sees one noise for all samples of a group."""
    group, smallest, place = torch.tensor(list(groups)), math.inf, ""
    for modality, x in latents.items():
        for g in group.unique():
            spread = float(x[(group == g).to(x.device)].double().std(0, correction=0).mean())
            if not spread >= smallest:
                smallest, place = spread, f"{modality}, group {int(g)}"
    return Reading("group_spread", smallest, 1e-4, place, at_least=True)


def old_policy_law(
    before: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    decay: float | None,
    rounding: float = 1e-6,
) -> Reading:
    """The old policy is ``decay·before + (1 − decay)·current`` after a refresh, and untouched (``decay`` None) without one.

    The difference is measured against how far the refresh should move it, so that an old policy that never moves shows.

    Args:
        before, current, after: states of the old policy, the trained one, and the old one again.
        decay: what the schedule says.
        rounding: of the stored state, as a share of its size.
    """
    if decay is None or decay == 0:
        want = before if decay is None else current
    else:
        want = {name: decay * before[name].double() + (1 - decay) * current[name].double() for name in before}
    miss, move = _norm([after[name] - want[name] for name in before]), _norm([want[name] - before[name] for name in before])
    size = _norm(before.values())
    if move == 0:
        return Reading("old_policy_law", 0.0 if miss == 0 else miss / max(size, 1e-30), 1e-7, "must not move")
    return Reading(
        "old_policy_law", miss / move, 1e-5 + rounding * size / move, f"decay {decay}"
    )  # the second part is the rounding of the state itself


def _norm(values: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2 for value in values))


def every_modality_trains(gradients: Mapping[str, float], weights: Mapping[str, float], probability: torch.Tensor) -> Reading:
    """The loss has a gradient in the predicted velocity of every modality that has a weight. Sees a modality that is left out of the loss.

    Args:
        gradients: modality → norm of the loss's gradient in its velocity.
        weights: modality → weight in the objective.
        probability: r of the samples; with r = ½ everywhere there is nothing to learn.
    """
    if float((2 * probability - 1).abs().max()) < 1e-9:
        return Reading("every_modality_trains", 0.0, 0.0, at_least=True, vacuous="r is ½ everywhere")
    weighted = {m: gradients.get(m, 0.0) for m, weight in weights.items() if weight > 0}
    least = min(weighted, key=lambda m: weighted[m])
    return Reading("every_modality_trains", weighted[least], 1e-9, least, at_least=True)


@dataclass
class Call:
    """Arguments of one differentiable model call."""

    latents: dict[str, torch.Tensor]
    sigmas: dict[str, torch.Tensor]
    conditions: list[Conditions] = field(default_factory=list)


@contextmanager
def first_training_call(port: Port) -> Iterator[list[Call]]:
    """Record what the first differentiable `Port.predict_velocity` inside really gets, whatever the trainer believes that it gives."""
    calls: list[Call] = []
    original = port.predict_velocity

    def spy(latents: Latents, sigmas: Latents, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        if torch.is_grad_enabled() and not calls:
            calls.append(Call({m: x.detach() for m, x in latents.items()}, {m: s.detach() for m, s in sigmas.items()}, list(conditions)))
        return original(latents, sigmas, conditions)

    had = vars(port).get("predict_velocity")
    port.predict_velocity = spy  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        if had is None:
            del port.predict_velocity
        else:
            port.predict_velocity = had  # type: ignore[method-assign]


def training_noise(call: Call, x0: Latents) -> Reading:
    """The noise level that the model is told in training is the one of the latents that it gets, for every modality.

    With the level as told, ``(x − (1 − sigma)·x0) / sigma`` must be standard normal: its mean square is 1 up to the spread of as many draws. Sees
    sigma passed as data fraction, the level of another modality, and truncated timesteps.

    Args:
        call: what the model got.
        x0: the clean latents of the same samples.
    """
    worst = (0.0, "")
    for m, clean in x0.items():
        sigma = call.sigmas[m].to(clean.device).double().view(-1, *[1] * (clean.ndim - 1))
        noise = (call.latents[m].double() - (1 - sigma) * clean.double()) / sigma
        # In units of the standard deviation that the mean square of this many normal draws has.
        worst = max(worst, (abs(float(noise.square().mean()) - 1) / math.sqrt(2 / noise.numel()), f"{m}, told sigma {float(sigma.flatten()[0]):.3f}"))
    return Reading("training_noise", worst[0], 8.0, worst[1])


def given_rows(port: Port, call: Call, conditions: Sequence[Conditions]) -> list[Reading]:
    """Given frames are fixed, unnoised and out of the loss. In the first sample of a training call, the given rows that enter the model hold the
    clean latents that were sampled with, are told no more than the level at which upstream holds them, and get no gradient, as generated rows do.

    One more forward and backward pass of one sample; gradients that were there stay. What the rollout does with given frames, `velocity_replay` sees.

    Args:
        port: with the trained adapter active.
        call: what the model got.
        conditions: of the same samples, as the rollout had them.
    """
    names = ("given_rows_clean", "given_rows_told", "given_rows_out_of_loss")
    missing = [seam for seam in ("condition", "packing") if not offers(port, seam)]
    if missing or not conditions[0].given:
        why = f"the port offers no {missing[0]}" if missing else "nothing is given"
        return [Reading(name, 0.0, 0.0, vacuous=why) for name in names]
    parameters = list(port.trainable().values())
    before = [parameter.grad for parameter in parameters]
    latents = {m: x[:1] for m, x in call.latents.items()}
    try:
        with torch.enable_grad():
            velocity, (table,) = port.observe(latents, {m: s[:1] for m, s in call.sigmas.items()}, call.conditions[:1])
            torch.stack([v.float().square().sum() for v in velocity.values()]).sum().backward()
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    found = [m for m in table.values if bool(table.given_of(m).any())]
    where = ", ".join(conditions[0].given)
    if len(found) != 1:
        return [Reading(name, math.inf, 0.0, f"given rows in {', '.join(found) or 'no modality'}, {where}") for name in names]
    (m,) = found
    given = table.given_of(m)
    frames = [port.pack({**latents, m: frame[None].to(latents[m])})[m][0] for frame in conditions[0].given.values()]
    want, rows = torch.cat(frames).double().cpu(), table.values[m][given].double().cpu()
    bound = max(15 * 2**0.5 * port.given_sigma, port.bound(float32=1e-5, bfloat16=3e-2))
    wrong, size = 0, {}
    for name in port.modalities:
        output = table.output[name]
        grad = output.grad if output.grad is not None else torch.zeros_like(output)
        grad = grad[int(table.output.get("sample", torch.tensor(0)))] if output.ndim == 3 else grad
        size[name] = grad.abs().sum(dim=-1).cpu()
        wrong += int((size[name][table.given_of(name)] != 0).sum()) + int((size[name][~table.given_of(name)] == 0).sum())
    return [
        Reading(names[0], relative_error(rows, want) if rows.shape == want.shape else math.inf, bound, f"{m}, {where}"),
        Reading(names[1], float((table.sigma_of(m)[given].double() - port.given_sigma).clamp(min=0).max()), 6e-7, f"{m}, {where}"),
        Reading(names[2], float(wrong), 0.0, "given rows in the loss, or generated rows outside it"),
    ]


def training_grid(told: Sequence[Latents], grid: Latents) -> Reading:
    """The noise levels that the model is told in training are levels of the rollout's grid, those of all modalities of one and the same model call.

    Sees truncated timesteps, one modality trained at the level of another, and levels that the rollout never visits.

    Args:
        told: modality → ``(B,)`` sigmas of each training call.
        grid: modality → sigmas that the rollout walks.
    """
    worst = 0.0
    for sigmas in told:
        apart = torch.stack([(s.double().cpu()[:, None] - grid[m].double().cpu()[None]).abs() for m, s in sigmas.items()]).amax(0)  # (B, calls + 1)
        worst = max(worst, float(apart.amin(1).max()))
    return Reading("training_grid", worst, 1e-6, "distance from the nearest model call")


def _load(reading: Reading) -> float:
    """How near a reading is to its bound; above 1 it fires."""
    return _ratio(reading.bound, reading.got) if reading.at_least else _ratio(reading.got, reading.bound)


def _ratio(a: float, b: float) -> float:
    return 0.0 if a == 0 else (a / b if b else math.inf)
