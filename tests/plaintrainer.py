"""A trainer that owes nothing to Loudfail's behind the seam ``update``: a plain PyTorch loop on the toy actor, right, and with a mistake each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toyactor import ToyActor

from loudfail.harness.case import Case
from loudfail.harness.port import Conditions, Noised, Plan, Port, Scored, Update, find_trainer
from loudfail.harness.violation import Uncovered


class PlainTrainer(Update):
    """DiffusionNFT with Adam: a random generator of its own, prompts in shuffled order, each sample at levels of its own, no adaptive weighting."""

    def __init__(self, port: Port) -> None:
        self.port = port

    def begin(self, plan: Plan) -> None:
        if plan.weighting != "none":
            raise Uncovered("this trainer has no adaptive weighting")
        self.plan, self.done, port = plan, 0, self.port
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        start = torch.Generator().manual_seed(plan.seed)
        state = {n: torch.zeros_like(v) if "lora_B" in n else torch.randn(v.shape, generator=start) for n, v in port.adapter_state("default").items()}
        if "old" not in port.adapter_names():
            port.add_adapter("old", port.adapter)
        for name in ("default", "old"):
            port.load_adapter(name, state)
        port.select_trainable("default")
        self.adam = torch.optim.Adam(port.trainable().values(), lr=plan.learning_rate)
        self.random = torch.Generator().manual_seed(1000 * (plan.seed % 10**6) + self.rank)
        self.order = torch.randperm(len(plan.prompts), generator=start).tolist()

    # -- the algorithm
    def advantages(self, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        if len(rewards) != len(draws) or not bool(rewards.isfinite().all()):
            raise ValueError("one finite reward for each sample, please")
        same = torch.tensor(draws)[:, None] == torch.tensor(draws)[None]
        if int(same.sum(1).min()) < 2:
            raise ValueError("a draw of one sample")
        share = same.double() / same.sum(1, keepdim=True)
        centred = rewards.double() - share @ rewards.double()
        centred[centred.abs() < 1e-12 * rewards.abs().max()] = 0.0
        variance = share @ centred.square() if spread == "group" else centred.square().mean()
        return centred / (variance.sqrt() + 1e-8)

    def optimality(self, advantages: torch.Tensor, clip: float) -> torch.Tensor:
        return (advantages / clip).clamp(-1, 1) / 2 + 0.5

    def levels(self, count: int) -> dict[str, torch.Tensor]:
        """Noise levels of ``count`` samples."""
        index = torch.randint(self.plan.calls, (count,), generator=self.random)
        return {m: points[index] for m, points in self.port.grid(self.plan.calls).items()}

    def learn(self, scored: Scored) -> list[Noised]:
        plan, port = self.plan, self.port
        r = self.optimality(self.advantages(scored.rewards, scored.draws, scored.prompts, plan.spread), plan.clip).float()
        self.adam.zero_grad()
        made = []
        for rows in self.batches(len(r)):
            sigmas = self.levels(len(rows))
            x0 = {m: x[rows] for m, x in scored.clean.items()}
            noise = {m: torch.randn(x.shape, generator=self.random) for m, x in x0.items()}
            by = {m: sigmas[m].view(-1, *[1] * (x.ndim - 1)) for m, x in x0.items()}
            call = {m: (1 - by[m]) * x0[m] + by[m] * noise[m] for m in x0}, sigmas, [scored.conditions[row] for row in rows]
            with torch.no_grad(), port.using("old"):
                old = port.predict_velocity(*call)
            with torch.no_grad(), port.using(None):
                base = port.predict_velocity(*call)
            v = port.predict_velocity(*call)
            loss = torch.zeros(len(rows))
            for m in v:
                step, target = plan.beta * (v[m] - old[m]), noise[m] - x0[m]
                good, bad = ((old[m] + sign * step - target).square().flatten(1).mean(1) for sign in (1, -1))
                loss = loss + plan.modalities[m] * (r[rows] * good + (1 - r[rows]) * bad)
                loss = loss + plan.modalities[m] * plan.reference * (v[m] - base[m]).square().flatten(1).mean(1)
            (loss.sum() / (len(r) * plan.levels)).backward()
            made.append(Noised(rows, noise, sigmas))
        self.exchange()
        self.adam.step()
        return made

    def batches(self, count: int) -> Iterator[list[int]]:
        for _ in range(self.plan.levels):
            for start in range(0, count, self.plan.micro_batch):
                yield list(range(start, min(start + self.plan.micro_batch, count)))

    def exchange(self) -> None:
        """Average gradients over processes."""
        if self.size > 1:
            for parameter in self.port.trainable().values():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def refresh(self, step: int) -> None:
        if step % self.plan.old_every:
            return
        decay = {"copy": 0.0, "linear_to_0_5": min(step / 1000, 0.5)}.get(self.plan.old, min(max(0.0, (step - 75) * 0.0075), 0.999))
        old, now = self.port.adapter_state("old"), self.port.adapter_state("default")
        self.port.load_adapter("old", {n: decay * old[n] + (1 - decay) * now[n] if decay else now[n] for n in now})

    # -- the loop
    def step(self) -> tuple[Scored, list[Noised]]:
        plan, scored = self.plan, Scored({}, [], [], [], torch.empty(0))
        for group in range(self.rank, plan.groups, self.size):
            draw = self.done * plan.groups + group
            place = self.order[draw % len(self.order)]
            scored.prompts += [plan.prompts[place]] * plan.samples
            scored.draws += [draw] * plan.samples
        scored.conditions = self.port.conditions(Case(extent=plan.extent, prompts=tuple(scored.prompts)))
        noise = {m: torch.randn(len(scored.draws), *s, generator=self.random) for m, s in self.port.shapes(Case(extent=plan.extent)).items()}
        scored.clean = self.sample(noise, plan.calls, scored.conditions)
        scored.rewards = plan.reward(scored.clean, scored.prompts)
        made = self.learn(scored)
        self.refresh(self.done)
        self.done += 1
        return scored, made

    def sample(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        grid, x = self.port.grid(calls), dict(noise)
        with torch.no_grad(), self.port.using("old"):
            for i in range(calls):
                v = self.port.predict_velocity(x, {m: grid[m][i].expand(len(conditions)) for m in x}, conditions)
                x = {m: x[m] + (grid[m][i + 1] - grid[m][i]) * v[m] for m in x}
        return x

    def evaluate(self) -> float:
        case = Case(seed=99, extent=self.plan.extent, prompts=self.plan.prompts)
        clean = self.sample(case.normal("noise", self.port.shapes(case)), self.plan.calls, self.port.conditions(case))
        return float(self.plan.reward(clean, case.prompts).mean())

    def optimizer(self) -> torch.optim.Optimizer:
        return self.adam

    # -- checkpoints
    def state(self) -> dict[str, Any]:
        adapters = {name: self.port.adapter_state(name) for name in ("default", "old")}
        return {"adapters": adapters, "adam": self.adam.state_dict(), "random": self.random.get_state(), "done": self.done}

    def save(self, folder: Path) -> None:
        torch.save(self.state(), folder / "run.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "run.pt", weights_only=True)
        for name, state in saved["adapters"].items():
            self.port.load_adapter(name, state)
        self.adam.load_state_dict(saved["adam"])
        if "random" in saved:
            self.random.set_state(saved["random"])
        self.done = saved["done"]


class PlainPort(ToyActor):
    """The toy actor, trained by that loop."""

    name = "toy-plain"
    trainer = "plaintrainer:PlainTrainer"

    def update(self) -> Update:
        return find_trainer(self.trainer)(self)


class OneBaseline(PlainTrainer):
    """The baseline is the mean of all samples of a step."""

    def advantages(self, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        return super().advantages(rewards, [0] * len(draws), prompts, spread)


class OneLevel(PlainTrainer):
    """The audio is trained at the video's level."""

    def levels(self, count: int) -> dict[str, torch.Tensor]:
        levels = super().levels(count)
        return dict.fromkeys(levels, levels["video"])


class ForgetsItsGenerator(PlainTrainer):
    """The generator's state is in no checkpoint."""

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in super().state().items() if name != "random"}


class AddsUp(PlainTrainer):
    """Gradients of processes are summed."""

    def exchange(self) -> None:
        super().exchange()
        for parameter in self.port.trainable().values():
            parameter.grad *= self.size


class MovesTheWrongWay(PlainTrainer):
    """The old policy keeps what it should give up."""

    def refresh(self, step: int) -> None:
        old = self.port.adapter_state("old")
        super().refresh(step)
        now, then = self.port.adapter_state("old"), self.port.adapter_state("default")
        self.port.load_adapter("old", {n: old[n] + then[n] - now[n] for n in now})


class SamplesWhatItTrains(PlainTrainer):
    """The rollout uses the adapter that trains."""

    def sample(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        kept = self.port.adapter_state("old")
        self.port.load_adapter("old", self.port.adapter_state("default"))
        result = super().sample(noise, calls, conditions)
        self.port.load_adapter("old", kept)
        return result


class KnowsNoOld(Update):
    """A wrapper that gives its advantages only."""

    def __init__(self, port: Port) -> None:
        self.inner = PlainTrainer(port)

    def advantages(self, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        return self.inner.advantages(rewards, draws, prompts, spread)
