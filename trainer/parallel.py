"""Data parallelism over processes, as ``torchrun`` starts them: each takes its share of the prompt groups, gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


def world_size() -> int:
    """Number of processes of this run, by the environment that ``torchrun`` sets; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def start(device: str) -> Ranks:
        """Join the process group if there is more than one process: nccl on GPUs, gloo on CPUs. One that is there already is used as it is."""
        if dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        if world_size() == 1:
            return Ranks()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return Ranks(dist.get_rank(), dist.get_world_size())

    def share(self, count: int) -> range:
        """The items out of ``count`` that are this process's."""
        return range(self.rank, count, self.size)

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over processes, in place."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def mean(self, values: Mapping[str, float], device: str) -> dict[str, float]:
        """Means over processes; the names must be the same in all."""
        if self.size == 1:
            return dict(values)
        tensor = torch.tensor([values[name] for name in sorted(values)], dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return dict(zip(sorted(values), (tensor / self.size).tolist(), strict=True))

    def any(self, flag: bool, device: str) -> bool:
        """Whether the flag is set in any process."""
        return self.mean({"flag": float(flag)}, device)["flag"] > 0

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
