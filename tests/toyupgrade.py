"""A port whose model is another distribution's, `toystack`, of which `wheel` makes versions: as it is, or doctored in one place."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from toyactor import ToyActor

from loudfail.harness.case import Case
from loudfail.harness.port import AdapterConfig, Conditions

#: The distribution's only module.
SOURCE = """
import torch

TABLE = torch.linspace(0.5, 1.5, 6)


def grid(calls, shift=3.0):
    u = torch.linspace(1.0, 0.0, calls + 1)
    return shift * u / (1 + (shift - 1) * u)


class Net:
    def __init__(self, up, down):
        self.up, self.down = up, down

    def activate(self, x):
        return torch.tanh(x)
"""


def wheel(folder: Path, version: str, *edits: tuple[str, str], requires: Sequence[str] = (), name: str = "toystack") -> Path:
    """A wheel of a version in which each text of ``edits`` is replaced by the other."""
    source = SOURCE
    for old, new in edits:
        assert source.count(old) >= 1, f"{old!r} is not in the source"
        source = source.replace(old, new)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in files.items():
            archive.writestr(place, text)
    return path


class Stacked(ToyActor):
    """`ToyActor` with the grid, the prompt's table and the activation of `toystack`."""

    name = "stacked"
    adapter = AdapterConfig(rank=4, alpha=16.0, targets=("up", "down"))  # a scale whose loss is far above what bfloat16 blurs

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        import toystack

        self.net = toystack.Net(self.base["net.up"], self.base["net.down"])

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        from toystack import grid

        return {modality: grid(calls) for modality in self.modalities}

    def conditions(self, case: Case) -> list[Conditions]:
        from toystack import TABLE

        return [Conditions(one.prompt_ids, torch.tensor(one.prompt_ids)[:, None].sin() * TABLE) for one in super().conditions(case)]

    def predict_velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        assert self.net.up is self.base["net.up"]
        # Weights that differ much from token to token, so that the order of a prompt is no small effect.
        text = torch.stack([(one.embeds * torch.arange(len(one.embeds)).cos()[:, None]).sum(0) for one in conditions])
        x = torch.cat([*(latents[m].flatten(1) for m in self.modalities), *(sigmas[m][:, None] for m in self.modalities), text], 1)
        out = self._linear("net.down", self.net.activate(self._linear("net.up", x)))
        return {m: part.view_as(latents[m]) for m, part in zip(self.modalities, out.split(self.sizes, 1), strict=True)}
