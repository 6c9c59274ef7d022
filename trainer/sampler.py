"""The rollout on the actor itself: an Euler loop in Loudfail's convention with an adapter of its own, behind the signature of the engines.

The adapter is handed over to it like to any engine, so that a hand-over that fails shows here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Port, Step, Trajectory, need, probe
from loudfail.trainer.adapters import effect

ADAPTER = "rollout"


class Sampler(Protocol):
    """What a trainer needs of a rollout: the part of `loudfail.harness.port.Rollout` that `LocalRollout` has too."""

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport: ...

    def adapter_version(self) -> int | None: ...

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]: ...

    def grid(self, calls: int) -> dict[str, torch.Tensor]: ...

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory: ...


class LocalRollout:
    """A `Sampler` on a port's actor.

    Args:
        port: offers ``objective`` and ``adapter``; gets the adapter ``rollout``.
        micro_batch: samples of one model call at most.
    """

    degree = 1

    def __init__(self, port: Port, micro_batch: int = 64) -> None:
        need(port, "objective", "adapter")
        self.port, self.micro_batch, self.version = port, micro_batch, None  # type: tuple[Port, int, int | None]
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

    def grid(self, calls: int) -> dict[str, torch.Tensor]:
        return self.port.grid(calls)

    def rollout(self, noise: Mapping[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """``x ← x + (next sigma − sigma)·v`` for each modality on its own grid, from the given noise."""
        grid, port = self.grid(calls), self.port
        x = {m: value.to(port.device) for m, value in noise.items()}
        steps = []
        with torch.no_grad(), port.using(ADAPTER if self.version is not None else None):
            for call in range(calls):
                sigmas = {m: grid[m][call].repeat(len(conditions)) for m in x}
                v = velocity_of(port, x, sigmas, conditions, self.micro_batch)
                after = {m: x[m] + (grid[m][call + 1] - grid[m][call]).item() * v[m] for m in x}
                steps.append(Step(x, sigmas, v, after))
                x = after
        return Trajectory(steps)


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
