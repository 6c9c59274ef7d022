"""The rollout on the actor itself: an Euler loop in Loudfail's convention with an adapter of its own, behind the signature of the engines.

The adapter is handed over to it like to any engine, so that a hand-over that fails shows here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from loudfail.harness.case import Case
from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Port, Step, Trajectory, need, probe
from loudfail.trainer.adapters import effect
from loudfail.trainer.parallel import Ranks

ADAPTER = "rollout"


class Sampler(Protocol):
    """What a trainer needs of a rollout: the part of `loudfail.harness.port.Rollout` that `LocalRollout` has too."""

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport: ...

    def adapter_version(self) -> int | None: ...

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]: ...

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]: ...

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory: ...


class LocalRollout:
    """A `Sampler` on a port's actor.

    Args:
        port: offers ``objective`` and ``adapter``; gets the adapter ``rollout``.
        micro_batch: samples of one model call at most.
        case: size and condition mode of what is sampled, on which the grid may depend.

    Attributes:
        ranks: the processes that share the actor's shards; one process until it is set.
    """

    degree = 1

    def __init__(self, port: Port, micro_batch: int = 64, case: Case | None = None) -> None:
        need(port, "objective", "adapter")
        self.case = case
        self.port, self.micro_batch, self.version = port, micro_batch, None  # type: tuple[Port, int, int | None]
        self.ranks = Ranks()
        if ADAPTER not in port.adapter_names():
            port.add_adapter(ADAPTER, port.adapter)

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
        if config != self.port.adapter:
            raise RuntimeError(f"the local rollout has adapters of {self.port.adapter}; it was given one of {config}")
        self.port.load_adapter(ADAPTER, state)
        self.version = version
        bound = {name.removesuffix(".lora_B.weight") for name in self.port.adapter_state(ADAPTER) if name.endswith(".lora_B.weight")}
        return BindReport(version, sum(name.endswith(".lora_B.weight") for name in state), len(bound))

    def remove_adapter(self) -> None:
        self.version = None

    def adapter_version(self) -> int | None:
        return self.version

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        """From the weights that the actor holds for this adapter; an engine measures its layers instead."""
        if self.version is None:
            return {}
        inputs = {name: probe(in_features, count, seed) for name, (_, in_features) in self.port.projections().items()}
        return effect(self.port.adapter_state(ADAPTER), self.port.adapter, inputs)

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return self.port.grid(calls, case or self.case)

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """``x ← x + (next sigma − sigma)·v`` for each modality on its own grid, from the given noise."""
        grid, port = self.grid(calls), self.port
        x, conditions = {m: send(value, port.device) for m, value in noise.items()}, sent(conditions, port.device)
        steps = []
        with torch.no_grad(), port.using(ADAPTER if self.version is not None else None), self.ranks.in_step():
            for call in range(calls):
                sigmas = {m: grid[m][call].repeat(len(conditions)) for m in x}
                v = velocity_of(port, x, sigmas, conditions, self.micro_batch)
                after = {m: x[m] + (grid[m][call + 1] - grid[m][call]).item() * v[m] for m in x}
                steps.append(Step(x, sigmas, v, after))
                x = after
        return Trajectory(steps)


class SharedRollout:
    """One engine for several processes of a trainer: the first of them owns it and samples for all, as many as the engine has ranks.

    Every process of the run makes one, and all members of a team make the same calls.

    Args:
        ranks: the processes of the run.
        team: number of processes that share an engine; neighbours, so that the engine's ranks sit on their GPUs.
        make: builds the engine; called in the owner.

    Attributes:
        owner: whether the engine lives in this process.

    Raises:
        RuntimeError: the owner could not build or call the engine; in every member of the team, with the owner's words.
    """

    def __init__(self, ranks: Ranks, team: int, make: Callable[[], Sampler]) -> None:
        self.first = ranks.rank - ranks.rank % team
        self.owner = ranks.rank == self.first
        self.place, self.team, self.group = ranks.rank - self.first, team, None  # type: int, int, Any
        for first in range(0, ranks.size, team):  # every process takes part in making every group
            group = dist.new_group(list(range(first, first + team)), backend="gloo")
            if first == self.first:
                self.group = group
        self._engine: Sampler | None = None
        self._ask(lambda: self._build(make))

    def _build(self, make: Callable[[], Sampler]) -> None:
        self._engine = make()

    @property
    def engine(self) -> Sampler:
        assert self._engine is not None  # only the owner asks
        return self._engine

    @property
    def degree(self) -> int:
        return self.team

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
        return self._ask(lambda: self.engine.set_adapter(state, config, version))

    def adapter_version(self) -> int | None:
        return self._ask(lambda: self.engine.adapter_version())

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        return self._ask(lambda: self.engine.delta_response(count, seed))

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return self._ask(lambda: self.engine.grid(calls, case))

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """The samples of all members in one call of the engine; each member gets its own back."""
        parts: list[Any] = [None] * self.team
        dist.gather_object((dict(noise), list(conditions)), parts if self.owner else None, dst=self.first, group=self.group)

        def sample() -> list[Trajectory]:
            joined = {m: torch.cat([part[0][m] for part in parts]) for m in noise}
            whole = self.engine.rollout(joined, calls, [condition for part in parts for condition in part[1]])
            sizes = [len(part[1]) for part in parts]
            return [_rows(whole, sum(sizes[:i]), sizes[i]) for i in range(self.team)]

        result: list[Any] = [None]
        dist.scatter_object_list(result, self._told(sample, spread=True) if self.owner else None, src=self.first, group=self.group)
        return self._heard(result[0])

    def _ask(self, call: Callable[[], Any]) -> Any:
        """What the owner's call gives, in every member."""
        answer: list[Any] = self._told(call) if self.owner else [None]
        dist.broadcast_object_list(answer, src=self.first, group=self.group)
        return self._heard(answer[0])

    def _told(self, call: Callable[[], Any], *, spread: bool = False) -> list[Any]:
        try:
            result = call()
        except Exception as error:  # told to the others, who would wait for ever
            return [("failed", f"{type(error).__name__}: {error}")] * (self.team if spread else 1)
        return [("done", one) for one in (result if spread else [result])]

    def _heard(self, answer: tuple[str, Any]) -> Any:
        if answer[0] == "failed":
            raise RuntimeError(f"the rollout engine of process {self.first}: {answer[1]}")
        return answer[1]


def _rows(trajectory: Trajectory, start: int, count: int) -> Trajectory:
    def cut(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {m: value[start : start + count].clone() for m, value in values.items()}

    return Trajectory([Step(cut(s.latents), cut(s.sigmas), cut(s.velocity), cut(s.after)) for s in trajectory.steps])


def send(value: torch.Tensor, device: str) -> torch.Tensor:
    """To the device; on a GPU without waiting for what it is at, which a copy from memory that is not pinned does."""
    return value.pin_memory().to(device, non_blocking=True) if device == "cuda" and not value.is_cuda else value.to(device)


def sent(conditions: Sequence[Conditions], device: str) -> list[Conditions]:
    """The conditions with their embeddings on the device, each object once; the same objects on a CPU."""
    if device == "cpu":
        return list(conditions)
    there = {id(condition): replace(condition, embeds=send(condition.embeds, device)) for condition in conditions}
    return [there[id(condition)] for condition in conditions]


def velocity_of(
    port: Port, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions], micro_batch: int
) -> dict[str, torch.Tensor]:
    """`Port.predict_velocity` in pieces of at most ``micro_batch`` samples, those of one layout together."""
    pieces = chunks(conditions, micro_batch)
    result: dict[str, torch.Tensor] = {}
    for rows in pieces:
        index = torch.tensor(rows)
        part = port.predict_velocity(
            {m: v[index] for m, v in latents.items()}, {m: s[index] for m, s in sigmas.items()}, [conditions[i] for i in rows]
        )
        for m, v in part.items():
            result.setdefault(m, torch.empty_like(latents[m], dtype=v.dtype))[index] = v
    return result


def chunks(conditions: Sequence[Conditions], micro_batch: int) -> list[list[int]]:
    """Samples of one layout (prompt length and given latents) together, in pieces of at most ``micro_batch``: one model call serves one layout."""
    layouts: dict[object, list[int]] = {}
    for row, condition in enumerate(conditions):
        key = (len(condition.embeds), *((name, tuple(value.shape)) for name, value in condition.given.items()))
        layouts.setdefault(key, []).append(row)
    return [rows[start : start + micro_batch] for rows in layouts.values() for start in range(0, len(rows), micro_batch)]
