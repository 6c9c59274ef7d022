"""This trainer behind the seam ``update`` of a port, so that the invariants judge the code that really trains.

Nothing here computes: each method calls what `loop`, `nft`, `train` and `checkpoint` do in a run. For another trainer write a class like this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loudfail.harness.port import Conditions, Noised, Plan, Port, Scored, Step, Trajectory, Update
from loudfail.harness.violation import Uncovered
from loudfail.trainer import adapters, checkpoint, config, loop, nft, train

#: Above every gradient norm: a plan asks for none to be clipped.
UNCLIPPED = 1e30


def make(port: Port) -> ReferenceUpdate:
    """The reference trainer on a port that offers ``objective`` and ``adapter``."""
    return ReferenceUpdate(port)


class ReferenceUpdate(Update):
    """`loudfail.trainer` on one port."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self._run: loop.Run | None = None
        self._seen: tuple[Scored, list[Noised]] | None = None

    @property
    def run(self) -> loop.Run:
        if self._run is None:
            raise RuntimeError("nothing has begun; call begin(plan) first")
        return self._run

    def begin(self, plan: Plan) -> None:
        """See `Update.begin`. Monitors only warn, into the void: here the invariants judge."""
        self._run = run = train.set_up(configuration(plan, self.port), self.port, warn=lambda _: None)
        run.score = run.score_again = lambda latents, prompts: {"total": plan.reward(latents, prompts)}
        run.prompts = plan.prompts
        run.observe = self._keep

    def _keep(self, batch: loop.Batch, x0: loop.Latents, scores: loop.Scores, update: loop.Update) -> None:
        self._seen = Scored(x0, batch.conditions, batch.prompts, batch.groups, scores["total"]), drawn(update)

    def advantages(self, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        return nft.group_advantages(rewards, draws, "global" if spread == "global" else "group")

    def optimality(self, advantages: torch.Tensor, clip: float) -> torch.Tensor:
        return nft.optimality(advantages, clip)

    def policy_scale(self, plan: Plan) -> float:
        return plan.clip / plan.beta

    def learn(self, scored: Scored) -> list[Noised]:
        self._take_policies()
        run, algorithm = self.run, self.run.config.algorithm
        advantages = nft.group_advantages(scored.rewards, scored.draws, algorithm.spread)
        probability = nft.optimality(advantages, algorithm.clip)
        batch = loop.Batch(scored.prompts, scored.draws, scored.conditions, {})
        clean = {m: x.to(self.port.device) for m, x in scored.clean.items()}
        return drawn(loop.improve(run, batch, self._walked(scored), clean, probability))

    def _walked(self, scored: Scored) -> Trajectory:
        """A trajectory for its levels alone, which are all that an update takes from it."""
        calls = self.run.config.rollout.calls
        grid = self.run.rollout.grid(calls, loop.case_of(self.run.config, self.run.port))
        return Trajectory([Step({}, {m: points[i].repeat(len(scored.draws)) for m, points in grid.items()}, {}, {}) for i in range(calls)])

    def refresh(self, step: int) -> None:
        self._take_policies()
        loop.refresh_old(self.run, step, self.port.adapter_state(adapters.OLD))

    def step(self) -> tuple[Scored, list[Noised]]:
        self._take_policies()
        self._seen = None
        loop.train_step(self.run)
        assert self._seen is not None  # train_step observes
        return self._seen

    def sample(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        return self.run.rollout.rollout(noise, calls, conditions).final

    def evaluate(self) -> float:
        return loop.validate(self.run)["total"]

    def optimizer(self) -> torch.optim.Optimizer:
        return self.run.optimizer

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.run.parameters

    def _take_policies(self) -> None:
        """Where wider copies are kept: take over what a check has written into the port's adapters."""
        run = self.run
        with torch.no_grad():
            for name, stored in self.port.trainable().items():
                if not torch.equal(run.parameters[name].to(stored.dtype), stored):
                    run.parameters[name].copy_(stored)
        if run.old is not None:
            old = self.port.adapter_state(adapters.OLD)
            if any(not torch.equal(value.to(torch.bfloat16), old[name].to(torch.bfloat16)) for name, value in run.old.items()):
                run.old = None

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, train.snapshot(self.run, "not required", []), keep=1)

    def load(self, folder: Path) -> None:
        train.restore(self.run, checkpoint.load(checkpoint.listed(folder)[-1]))


def configuration(plan: Plan, port: Port) -> config.Config:
    """The recipe that a plan amounts to.

    Raises:
        Uncovered: this trainer has no such setting.
    """
    if set(plan.modalities) != set(port.modalities):
        raise Uncovered(f"the plan weighs {sorted(plan.modalities)}, the port has {sorted(port.modalities)}")
    return config.Config(
        seed=plan.seed,
        micro_batch=plan.micro_batch,
        data=config.Data(given=plan.given, extent=plan.extent),
        rollout=config.Rollout(calls=plan.calls),
        algorithm=config.Algorithm(
            prompts=plan.groups, samples=plan.samples, sigmas=plan.levels, spread=plan.spread, beta=plan.beta, clip=plan.clip,
            weighting=plan.weighting, reference=plan.reference, modalities=plan.modalities, old=plan.old, old_every=plan.old_every,
        ),
        optimizer=config.Optimizer(learning_rate=plan.learning_rate, clip=UNCLIPPED),
        validation=config.Validation(samples=1, calls=plan.calls),
        monitors=config.Monitors(policy="warn"),
    )  # fmt: skip


def drawn(update: loop.Update) -> list[Noised]:
    """The model calls of an update, with what was drawn for them."""
    return [Noised(piece.rows, piece.noise, piece.sigmas) for piece in update.pieces]
