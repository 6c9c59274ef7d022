"""A small port that trains: objective and adapter seams in a few lines of torch, for tests of the trainer that need no H3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from loudfail.harness.case import Case
from loudfail.harness.port import AdapterConfig, Conditions, Port

HIDDEN, TEXT = 24, 6


class ToyActor(Port):
    """Two linear layers over both modalities, sigmas and prompt, each with LoRA; shapes are the synthetic world's."""

    name = "toy-actor"
    modalities = ("video", "audio")
    extents = {"frames": (1,), "height": (2,), "width": (2,), "audio": (3,)}
    adapter = AdapterConfig(rank=4, alpha=8.0, targets=("up", "down"))

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        sizes = [torch.Size(shape).numel() for shape in self.shapes(Case(extent={"frames": 1, "height": 2, "width": 2, "audio": 3})).values()]
        self.sizes, inside, outside = sizes, sum(sizes) + 2 + TEXT, sum(sizes)
        draw = torch.Generator().manual_seed(11)
        self.base = {
            "net.up": torch.randn(HIDDEN, inside, generator=draw) / inside**0.5,
            "net.down": torch.randn(outside, HIDDEN, generator=draw) / HIDDEN**0.5,
        }
        self.adapters: dict[str, dict[str, torch.nn.Parameter]] = {}
        self.active: str | None = None
        self.add_adapter("default", self.adapter)
        self.select_trainable("default")

    # -- objective
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        return {"video": (2, case.extent["frames"], case.extent["height"], case.extent["width"]), "audio": (1, 8, case.extent["audio"])}

    def conditions(self, case: Case) -> list[Conditions]:
        result = []
        for prompt in case.prompts:
            ids = tuple(prompt.encode())
            result.append(Conditions(ids, torch.randn(len(ids), TEXT, generator=torch.Generator().manual_seed(sum(ids)))))
        return result

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        u = torch.linspace(1.0, 0.0, calls + 1)
        return {"video": 3 * u / (1 + 2 * u), "audio": u}

    def predict_velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        text = torch.stack([condition.embeds.mean(0) for condition in conditions])
        x = torch.cat([*(latents[m].flatten(1) for m in self.modalities), *(sigmas[m][:, None] for m in self.modalities), text], 1)
        out = self._linear("net.down", torch.tanh(self._linear("net.up", x)))
        return {m: part.view_as(latents[m]) for m, part in zip(self.modalities, out.split(self.sizes, 1), strict=True)}

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.base[name].T
        if self.active is not None:
            lora = self.adapters[self.active]
            y = y + self.adapter.scale * (x @ lora[f"{name}.lora_A.weight"].T @ lora[f"{name}.lora_B.weight"].T)
        return y

    # -- adapter
    def projections(self) -> dict[str, tuple[int, int]]:
        return {name: (weight.shape[0], weight.shape[1]) for name, weight in self.base.items()}

    def add_adapter(self, name: str, config: AdapterConfig) -> None:
        self.adapters[name] = {}
        for projection, (out_features, in_features) in self.projections().items():
            for part, size in (("A", (config.rank, in_features)), ("B", (out_features, config.rank))):
                self.adapters[name][f"{projection}.lora_{part}.weight"] = torch.nn.Parameter(torch.zeros(size), requires_grad=False)

    def adapter_names(self) -> list[str]:
        return list(self.adapters)

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        return {key: value.detach().clone() for key, value in self.adapters[name].items()}

    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        if {key: value.shape for key, value in state.items()} != {key: value.shape for key, value in self.adapters[name].items()}:
            raise ValueError("names or shapes do not match")
        with torch.no_grad():
            for key, value in state.items():
                self.adapters[name][key].copy_(value)

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        before, self.active = self.active, name
        try:
            yield
        finally:
            self.active = before

    def select_trainable(self, name: str) -> None:
        self.active = name
        for other, state in self.adapters.items():
            for value in state.values():
                value.requires_grad_(other == name)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {f"{name}/{key}": value for name, state in self.adapters.items() for key, value in state.items() if value.requires_grad}

    def base_state(self) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": value for name, value in self.base.items()}
