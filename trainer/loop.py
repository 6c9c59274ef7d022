"""The training loop: rollout → score → advantages → update → refresh old → hand over, with monitors in between. Read it top to bottom.

What is left out on purpose: classifier-free guidance, and pipelining of rollout and training.

Everything random is drawn from the seed, the step and the sample's own number, so neither micro-batches, nor a
restart, nor the number of processes change it.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from loudfail.harness.case import Case
from loudfail.harness.port import BindReport, Conditions, Port, Trajectory, noised
from loudfail.trainer import adapters, data, monitor, nft
from loudfail.trainer.config import Config
from loudfail.trainer.logs import MONITOR
from loudfail.trainer.parallel import Ranks
from loudfail.trainer.sampler import Sampler, send, sent

Latents = dict[str, torch.Tensor]
Scores = dict[str, torch.Tensor]


@dataclass
class Run:
    """All that a run consists of.

    Attributes:
        config: the recipe.
        port: the model, with the adapters of `adapters.prepare`.
        rollout: the engine that samples; holds the old policy under ``version``.
        score: latents and prompts → sub-scores and ``total``, as the loop rewards.
        score_again: the same from a scorer of its own, for monitors and validation: the *true* reward.
        prompts: the dataset.
        parameters: what the optimizer updates, by the names of the port's trainable parameters; see `adapters.masters`.
        optimizer: over these.
        watch: judges the monitors.
        ranks: this process among those of the run.
        step: steps that are finished.
        version: version of the adapter that the rollout was handed last.
        bound: what the rollout said when it was handed over.
        timing: seconds by part of a step, summed.
        old: the old policy in float32 where the actor stores it narrower; None until it is first refreshed, and where it does not.
        observe: called after each update with what it was made from: batch, clean latents, sub-scores, and the update.
        exhibit: shows samples of a validation, see `logs.Exhibition.show`.
        rows: of the dataset, one for each of ``prompts``, where they bring pictures; empty where the port draws what is given.
    """

    config: Config
    port: Port
    rollout: Sampler
    score: monitor.Score
    score_again: monitor.Score
    prompts: Sequence[str]
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    watch: monitor.Watch
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    version: int = 0
    bound: BindReport | None = None
    timing: dict[str, float] = field(default_factory=dict)
    old: dict[str, torch.Tensor] | None = None
    observe: Callable[[Batch, Latents, Scores, Update], None] = lambda *_: None
    exhibit: Callable[[int, Mapping[int, int], Sequence[str], Latents, Scores], dict[int, dict[str, float]]] = lambda *_: {}
    rows: Sequence[data.Row] = ()


@dataclass
class Batch:
    """The samples of one step: ``samples`` of each drawn prompt. ``groups`` number the draws, so a prompt drawn twice makes two groups."""

    prompts: list[str]
    groups: list[int]
    conditions: list[Conditions]
    noise: Latents


@dataclass
class Update:
    """What an update did.

    Attributes:
        parts: means of the loss and its parts.
        gradient_norm: of the last epoch, before clipping.
        prediction_gradients: modality → norm of the loss's gradient in the predicted velocity.
        calls: what the first model call really got; and ``first_x0``, its clean latents, and ``first_conditions``, as the rollout had them.
        told: the sigmas that each training call was told.
        pieces: the model calls of the last epoch.
    """

    parts: dict[str, float]
    gradient_norm: float
    prediction_gradients: dict[str, float]
    calls: list[monitor.Call]
    first_x0: Latents
    first_conditions: list[Conditions]
    told: list[Latents]
    pieces: list[Piece]


def train_step(run: Run) -> dict[str, Any]:
    """One step; the record of it.

    Raises:
        MonitorFired: a monitor saw a fault and the policy is to stop; nothing of the step is kept.
    """
    step, port, algorithm = run.step, run.port, run.config.algorithm
    start = time.monotonic()
    seen: dict[str, float] = {}
    run.watch.shares = {}
    thorough = step % run.config.monitors.every == 0

    batch = draw(run, step)
    with timed(run, "rollout"):
        trajectory = run.rollout.rollout(batch.noise, run.config.rollout.calls, batch.conditions)
        x0 = {m: x.to(port.device) for m, x in trajectory.final.items()}
    with timed(run, "score"):
        scores = run.score(x0, batch.prompts)
    with timed(run, "monitors"), run.ranks.in_step():
        readings = [*after_rollout(run, batch, trajectory, x0, scores, thorough)]
    with timed(run, "monitors"):
        seen |= judge(run, *readings)

    advantages = nft.group_advantages(scores["total"], batch.groups, algorithm.spread)
    probability = nft.optimality(advantages, algorithm.clip)
    with timed(run, "monitors"):
        totals = run.score_again(x0, batch.prompts)["total"] if thorough else scores["total"]
        seen |= judge(run, monitor.group_means(advantages, batch.groups), monitor.advantages_follow_rewards(probability, totals, batch.groups))

    with timed(run, "update"):
        update = improve(run, batch, trajectory, x0, probability)
    run.observe(batch, x0, scores, update)
    with timed(run, "monitors"):
        seen |= judge(
            run,
            monitor.every_modality_trains(update.prediction_gradients, modality_weights(run), probability),
            monitor.training_noise(update.calls[0], update.first_x0),
            *(monitor.given_rows(port, update.calls[0], update.first_conditions) if thorough else ()),
            monitor.training_grid(update.told, run.rollout.grid(run.config.rollout.calls, case_of(run.config, run.port))),
        )

    before = port.adapter_state(adapters.OLD)
    decay = refresh_old(run, step, before)
    hand_over(run)
    with timed(run, "monitors"):
        seen |= judge(run, *after_hand_over(run, before, decay))

    run.step = step + 1
    means = {f"score/{name}": float(value.mean()) for name, value in scores.items()}
    means |= {"true_reward": float(totals.mean()), "advantage_spread": float(advantages.abs().mean()), "gradient_norm": update.gradient_norm}
    means |= update.parts | {f"prediction_gradient/{m}": value for m, value in update.prediction_gradients.items()}
    means = run.ranks.mean(means, port.device)
    return {
        "step": step,
        "logged_reward": means["score/total"],
        **means,
        "version": run.version,
        "seconds": time.monotonic() - start,
        "monitors": seen,
        "shares": run.watch.shares,
    }


def judge(run: Run, *readings: monitor.Reading) -> dict[str, float]:
    """Judge the readings of all processes, in all of them: what fires in one stops every one, and none is left waiting."""
    return run.watch.judge(*monitor.worst(run.ranks.gather(readings)))


def draw(run: Run, step: int) -> Batch:
    """This process's samples of a step: prompts in order, round and round; noise from seed, step and group."""
    config, count = run.config, run.config.algorithm.prompts
    shapes = run.port.shapes(Case(extent=extent_of(run)))
    batch = Batch([], [], [], {m: torch.empty(0, *shape) for m, shape in shapes.items()})
    for place in run.ranks.share(count):
        group = step * count + place
        index = group % len(run.prompts)
        batch.prompts += [run.prompts[index]] * config.algorithm.samples
        batch.groups += [group] * config.algorithm.samples
        batch.conditions += [condition_of(run, index)] * config.algorithm.samples
        fresh = noise_of(run, f"rollout/{group}", config.algorithm.samples)
        batch.noise = {m: torch.cat([batch.noise[m], fresh[m]]) for m in shapes}
    return batch


@dataclass
class Piece:
    """One model call of an update: samples of one prompt at one noise level a modality. Latents are modality → ``(b, *shape)``; sigmas are on the
    CPU, where ports read them."""

    rows: list[int]
    conditions: list[Conditions]
    clean: Latents
    noise: Latents
    sigmas: Latents
    latents: Latents
    target: Latents


def improve(run: Run, batch: Batch, trajectory: Trajectory, x0: Latents, probability: torch.Tensor) -> Update:
    """Train ``default`` on the samples: each prompt's at some noise levels of the grid that the rollout walked, one optimizer step an epoch."""
    config, port, algorithm = run.config, run.port, run.config.algorithm
    weights = modality_weights(run)
    settings = nft.Settings(algorithm.beta, algorithm.clip, algorithm.weighting, algorithm.reference, weights)
    parameters = list(run.parameters.values())
    trained = len(batch.groups) * algorithm.sigmas  # samples times noise levels
    update = Update({}, 0.0, {}, [], {}, [], [], [])
    # Sums stay on the device until the end: reading one would wait for all that was asked of it.
    sums: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for epoch in range(algorithm.epochs):
        on_policy = epoch == 0 and adapters.equal(port, adapters.TRAINED, adapters.OLD)
        # Drawn one by one as they are needed, while the device works on the one before.
        for_reference, for_old, pieces = itertools.tee(draw_pieces(run, epoch, batch, trajectory, x0), 3)
        with run.ranks.in_step():
            references = velocities(port, None, for_reference) if settings.reference > 0 else itertools.repeat(None)
            olds = itertools.repeat(None) if on_policy else velocities(port, adapters.OLD, for_old)
        del for_reference, for_old
        run.optimizer.zero_grad()
        update.pieces = []
        for piece, old, reference in zip(pieces, olds, references, strict=False):
            with monitor.first_training_call(port) as calls:
                velocity = port.predict_velocity(piece.latents, piece.sigmas, piece.conditions)
            for v in velocity.values():
                v.retain_grad()
            # On policy, θ = old bit for bit: the same call would give the same velocity.
            old = old or {m: v.detach() for m, v in velocity.items()}
            r = probability[piece.rows].to(port.device)
            losses, parts = nft.objective(velocity, old, piece.target, piece.sigmas, r, settings, reference)
            (losses.sum() / trained).backward()

            share = len(piece.rows) / trained / algorithm.epochs
            for name, value in (parts | {"loss": losses.detach().mean()}).items():
                sums[name] = sums.get(name, 0.0) + share * value.double()
            for m, v in velocity.items():
                squares[m] = squares.get(m, 0.0) + (torch.zeros_like(r.double()).sum() if v.grad is None else v.grad.double().square().sum())
            if not update.calls:
                update.calls, update.first_x0 = calls, piece.clean
                update.first_conditions = [batch.conditions[row] for row in piece.rows]
            update.told.append(calls[0].sigmas)
            update.pieces.append(piece)
        adapters.take_gradients(run.parameters, port.trainable())
        run.ranks.average_gradients(parameters)
        update.gradient_norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip))
        if not math.isfinite(update.gradient_norm):  # whatever the policy: a step with it would destroy the adapter
            raise monitor.MonitorFired([monitor.Reading("finite_gradient", math.inf, sys.float_info.max, "no optimizer step was taken")])
        run.optimizer.step()
        adapters.give_values(run.parameters, port.trainable())
    run.optimizer.zero_grad()
    update.parts = {name: float(value) for name, value in sums.items()}
    update.prediction_gradients = {m: float(squares[m]) ** 0.5 for m in weights}
    return update


def draw_pieces(run: Run, epoch: int, batch: Batch, trajectory: Trajectory, x0: Latents) -> Iterator[Piece]:
    """The model calls of an update. The samples of a prompt share layout and noise level, so they go in one call, or in as few as fit.

    Levels are those of the trajectory, one a modality and call, drawn one a stratum, in random order: the level decides the loss more than r does.
    """
    config, port, algorithm = run.config, run.port, run.config.algorithm
    pairs = [{m: float(sigma[0]) for m, sigma in step.sigmas.items()} for step in trajectory.steps]
    levels = draw_levels(run, epoch, algorithm.prompts * algorithm.sigmas, len(pairs))
    for number in range(algorithm.sigmas):
        for group, place in enumerate(run.ranks.share(algorithm.prompts)):
            pair = pairs[levels[number * algorithm.prompts + place]]
            fresh = noise_of(run, f"train/{run.step}/{epoch}/{number}/{place}", algorithm.samples)
            for first in range(0, algorithm.samples, config.micro_batch):
                members = list(range(first, min(first + config.micro_batch, algorithm.samples)))
                rows = [group * algorithm.samples + member for member in members]
                clean = {m: x[rows] for m, x in x0.items()}
                noise = {m: send(x[members], port.device) for m, x in fresh.items()}
                sigmas = {m: torch.full((len(rows),), pair[m]) for m in clean}
                conditions = sent([batch.conditions[row] for row in rows], port.device)
                target = {m: noise[m] - clean[m] for m in clean}
                yield Piece(rows, conditions, clean, noise, sigmas, noised(clean, noise, sigmas), target)


def velocities(port: Port, adapter: str | None, pieces: Iterable[Piece]) -> list[Latents]:
    """Velocities of a policy that does not train, of all pieces in a row: switching the adapter costs more than a small model's call."""
    with torch.no_grad(), port.using(adapter):
        return [port.predict_velocity(piece.latents, piece.sigmas, piece.conditions) for piece in pieces]


def refresh_old(run: Run, step: int, before: Mapping[str, torch.Tensor]) -> float | None:
    """Move the old policy from its state ``before`` by its schedule; the decay used, None when no refresh is due."""
    algorithm, port = run.config.algorithm, run.port
    if (step + 1) % algorithm.old_every:
        return None
    decay = nft.old_decay(algorithm.old, step)
    refreshed = nft.refreshed(run.old or before, port.adapter_state(adapters.TRAINED), decay)
    port.load_adapter(adapters.OLD, refreshed)
    if port.dtype == "bfloat16":  # small moves would be rounded away
        run.old = refreshed
    return decay


def hand_over(run: Run) -> None:
    """Give the old policy to the rollout under a new version."""
    with timed(run, "hand over"):
        run.version += 1
        run.bound = run.rollout.set_adapter(run.port.adapter_state(adapters.OLD), run.port.adapter, run.version)


def after_rollout(run: Run, batch: Batch, trajectory: Trajectory, x0: Latents, scores: Scores, thorough: bool) -> Iterator[monitor.Reading]:
    """What is known once samples and scores are there. Replayed are one sample of every other prompt at one model call, others at the next step."""
    samples, calls = run.config.algorithm.samples, len(trajectory.steps)
    rows = [start + run.step % samples for start in range(0, len(batch.groups), samples)]
    assert run.bound is not None  # set by the hand-over before the first step
    yield monitor.adapter_bound(run.bound, run.version, len(run.port.projections()))
    yield monitor.walked_grid(run.port, trajectory, case_of(run.config, run.port))
    yield monitor.group_spread(x0, batch.groups)
    if thorough:
        yield monitor.velocity_replay(run.port, adapters.OLD, trajectory.steps[run.step % calls], batch.conditions, rows[run.step % 2 :: 2] or rows)
        # Of a shared engine its owner alone asks the encoder.
        engine = run.config.rollout.engine == "vllm_omni" and getattr(run.rollout, "owner", True)
        yield monitor.prompt_ids(run.port, batch.prompts, batch.conditions, rows, through_rollout=engine)
        # Media go through decoders whose last bits depend on the batch; latents do not.
        yield monitor.reward_recomputed(run.score_again, x0, batch.prompts, scores, 1e-6 if run.config.reward.on == "latents" else 1e-3)
        yield from monitor.hears_every_modality(run.score, x0, batch.prompts, batch.groups, scores["total"])


def after_hand_over(run: Run, before: Mapping[str, torch.Tensor], decay: float | None) -> Iterator[monitor.Reading]:
    """What is known once the rollout has the new adapter."""
    port = run.port
    old = port.adapter_state(adapters.OLD)
    rounding = port.bound(float32=1e-6, bfloat16=2**-8)
    yield monitor.old_policy_law(before, port.adapter_state(adapters.TRAINED), old, decay, rounding if decay else 1e-6)
    yield from monitor.adapter_arrived(run.rollout, old, port.adapter, run.version, port.projections(), bfloat16=port.dtype == "bfloat16")


def validate(run: Run) -> dict[str, float]:
    """Mean of every true sub-score of samples of *fixed prompts from fixed noise*, through the rollout with the policy that it holds; and under
    ``monitor/`` those of the media that were shown, see `logs.Exhibition`."""
    config = run.config.validation
    count = min(len(run.prompts), 64)
    own = run.ranks.share(count)
    mine = list(own) or [run.ranks.rank % count]  # every process makes model calls; one without a prompt repeats another's
    prompts = [run.prompts[index] for index in mine for _ in range(config.samples)]
    conditions = [condition for index in mine for condition in [condition_of(run, index)] * config.samples]
    noises = [noise_of(run, f"validation/{index}", config.samples) for index in mine]
    noise = {m: torch.cat([one[m] for one in noises]) for m in noises[0]}
    final = run.rollout.rollout(noise, config.calls, conditions).final
    scores = {name: value.cpu().view(len(mine), -1) for name, value in run.score_again(final, prompts).items()}
    watched = run.exhibit(run.step, {index: place * config.samples for place, index in enumerate(own)}, prompts, final, scores)
    by_prompt: dict[int, dict[str, torch.Tensor]] = {}
    shown: dict[int, dict[str, float]] = {}
    for numbers, part, seen in run.ranks.gather((mine, scores, watched)):
        by_prompt |= {index: {name: value[place] for name, value in part.items()} for place, index in enumerate(numbers)}
        shown |= seen
    means = {name: float(torch.cat([by_prompt[index][name] for index in range(count)]).mean()) for name in scores}
    monitors = [shown[index] for index in sorted(shown)]
    return means | {f"{MONITOR}{name}": sum(one[name] for one in monitors) / len(monitors) for name in (monitors[0] if monitors else ())}


def draw_levels(run: Run, epoch: int, count: int, calls: int) -> list[int]:
    """``count`` model calls out of ``calls``, one from each of ``count`` equal strata, in random order; the same in every process."""
    generator = Case(seed=run.config.seed).generator(f"levels/{run.step}/{epoch}")
    strata = torch.randperm(count, generator=generator)
    places = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    return (places * calls).long().clamp_max(calls - 1).tolist()


def noise_of(run: Run, purpose: str, count: int) -> Latents:
    """Standard normal latents ``(count, *shape)`` of each modality, a function of the run's seed and the purpose."""
    case = Case(seed=run.config.seed)
    shapes = run.port.shapes(Case(extent=extent_of(run)))
    return {m: torch.randn(count, *shape, generator=case.generator(f"{purpose}/{m}")) for m, shape in shapes.items()}


def condition_of(run: Run, index: int) -> Conditions:
    """Conditions of one prompt of the dataset; the same at every step."""
    case = Case(seed=run.config.seed + index, extent=extent_of(run), prompts=(run.prompts[index],), given=run.config.data.given)
    if not run.rows:
        return run.port.conditions(case)[0]
    return run.port.pictured(case, [data.pixels(run.rows[index], run.port.canvas(case))])[0]


def extent_of(run: Run) -> dict[str, int]:
    return dict(case_of(run.config, run.port).extent)


def case_of(config: Config, port: Port) -> Case:
    """Size and condition mode of every sample: the recipe's extent, completed by the port's first sizes."""
    extent = {axis: sizes[0] for axis, sizes in port.extents.items()} | dict(config.data.extent)
    return Case(extent=extent, given=config.data.given)


def modality_weights(run: Run) -> dict[str, float]:
    return {m: run.config.algorithm.modalities.get(m, 1.0) for m in run.port.modalities}


@contextmanager
def timed(run: Run, part: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        run.timing[part] = run.timing.get(part, 0.0) + time.monotonic() - start
