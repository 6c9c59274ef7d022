"""Small ports with the objective seam only, right and wrong in known ways; and one with ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rank_calls import number

from loudfail.harness.case import Case
from loudfail.harness.port import Conditions, Port
from loudfail.harness.world import World


class Toy(Port):
    """``velocity = x``: the right velocity of data that is zero at sigma 1."""

    name = "toy"
    modalities = ("video", "audio")
    extents = {"length": (2, 3)}

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        return {"video": (2, case.extent["length"]), "audio": (3,)}

    def conditions(self, case: Case) -> list[Conditions]:
        return [Conditions(tuple(prompt.encode()), torch.ones(len(prompt.encode()), 2)) for prompt in case.prompts]

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return {modality: torch.linspace(1.0, 0.0, calls + 1) for modality in self.modalities}

    def predict_velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        return {modality: x.clone() for modality, x in latents.items()}


class Bent(Toy):
    """Its grid is not uniform."""

    name = "bent"

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return {modality: torch.linspace(1.0, 0.0, calls + 1) ** 2 for modality in self.modalities}


class Ranked(Toy):
    """With an engine of ranks that only count."""

    name = "ranked"

    def engine(self, degree: int) -> Any:
        if degree not in self.__dict__.setdefault("engines", {}):
            self.engines[degree] = Counting(degree)
        return self.engines[degree]

    def close(self) -> None:
        for engine in self.__dict__.get("engines", {}).values():
            engine.world.close()


class OddOnly(Ranked):
    """Says before any rank is started that its heads cannot be divided."""

    name = "odd-only"

    def check_degree(self, degree: int) -> None:
        if 3 % degree:
            raise ValueError(f"3 heads cannot be divided over {degree} ranks")


class DoesNotDivide(Ranked):
    """Three heads."""

    name = "three-heads"

    def engine(self, degree: int) -> Any:
        if 3 % degree:
            raise ValueError(f"3 heads cannot be divided over {degree} ranks")
        return super().engine(degree)


class Dies(Ranked):
    """Takes the process with it that asks for two ranks."""

    name = "dies"

    def engine(self, degree: int) -> Any:
        import os

        return os._exit(0) if degree == 2 else super().engine(degree)


class ForgetsWhatRan(Toy):
    """Cannot say in the end which classes ran, as one whose rank has died by then."""

    name = "forgets"

    def classes(self) -> list[str]:
        raise RuntimeError("rank 0 of 1 died")


class Counting:
    """Ranks that know their number."""

    def __init__(self, degree: int) -> None:
        self.degree, self.world = degree, World(degree, timeout=30)

    def numbers(self) -> list[int]:
        return self.world.call(number)

    def velocity(self, latents: Mapping[str, torch.Tensor], sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return {modality: x.clone() for modality, x in latents.items()}

    def _not_here(self, *_: Any) -> Any:
        raise NotImplementedError

    load_base = base_response = set_adapter = remove_adapter = adapter_version = delta_response = replicated = rollout = grid = classes = _not_here


class Constructs(Toy):
    def __init__(self, **fields: Any) -> None:
        raise OSError("no weights here")


class Empty(Port):
    """Offers nothing."""

    modalities = ("video",)


class Lacking(Toy):
    """No ``predict_velocity``."""

    predict_velocity = Port.predict_velocity


class WrongKeys(Toy):
    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        return {"video": torch.linspace(1.0, 0.0, calls + 1)}


class WrongShape(Toy):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return {modality: x[..., :1] for modality, x in latents.items()}


class WrongDtype(Toy):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return {modality: x.double() for modality, x in latents.items()}


class WrongDevice(Toy):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return {modality: x.to("meta") for modality, x in latents.items()}


class NotFinite(Toy):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        return {modality: x / 0 for modality, x in latents.items()}


class Raises(Toy):
    def predict_velocity(self, latents: Any, sigmas: Any, conditions: Any) -> dict[str, torch.Tensor]:
        raise KeyError("time_embed")


class Slow(Toy):
    """Sleeps in the check that draws, to be interrupted there, with ranks up."""

    name = "slow"

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        import os
        import time
        from pathlib import Path

        if not hasattr(self, "world"):
            self.world = World(2, timeout=60)
            Path(os.environ["TOY_PIDS"]).write_text(" ".join(map(str, self.world.pids)))
            time.sleep(60)
        return super().grid(calls, case)
