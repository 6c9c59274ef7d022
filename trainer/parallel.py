"""Several processes, as ``torchrun`` starts them: each takes its share of the prompts, gradients are averaged, and the base can be sharded (FSDP2).

Only the frozen base is sharded. Adapters are small, so every process holds them whole: hand-overs and checkpoints need no gathering, and a run can be
resumed by another number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from loudfail.harness.environment import world_size

T = TypeVar("T")


def local_device(device: str) -> str:
    """The device of this process; on GPUs ``torchrun``'s local rank is made the current one."""
    if device == "cuda" and world_size() > 1:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return device


class LostProcess(RuntimeError):
    """Another process of the run is gone or does not answer."""


@contextmanager
def noticing_losses() -> Iterator[None]:
    """Turn the errors of collectives inside into `LostProcess`.

    Raises:
        LostProcess: a collective failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:  # gloo raises plain ones
        if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise LostProcess(f"another process of this run is gone or does not answer ({str(error).splitlines()[0][:200]})") from error
        raise


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Attributes:
        rank: number of this process.
        size: number of processes.
        pace: set when the base is sharded; see `in_step`.
    """

    rank: int = 0
    size: int = 1
    pace: Pace | None = field(default=None, compare=False)

    @staticmethod
    def start(device: str, timeout: float = 600) -> Ranks:
        """Join the process group if there is more than one process: nccl for GPU tensors, gloo for the rest. One that is there already is used as
        it is.

        Args:
            device: ``cpu`` or ``cuda``.
            timeout: seconds that a collective may take before the others are given up.
        """
        if dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        if world_size() == 1:
            return Ranks()
        dist.init_process_group("cpu:gloo,cuda:nccl" if local_device(device) == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
        return Ranks(dist.get_rank(), dist.get_world_size())

    def share(self, count: int) -> range:
        """The items out of ``count`` that are this process's."""
        return range(self.rank, count, self.size)

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average gradients over processes, in place: one collective for each kind of parameter, in float32 at least."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (_, dtype), members in kinds.items():
            wide = torch.promote_types(dtype, torch.float32)
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(wide) for p in members])
            dist.all_reduce(flat)
            flat /= self.size
            for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                parameter.grad = part.view_as(parameter).to(dtype)

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

    def gather(self, value: T) -> list[T]:
        """The value of every process, in order; it is sent as a pickle."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For model calls without gradient whose number may differ between processes.

        The shards of a base are gathered by all processes at once. Layouts differ from prompt to prompt, so one process may need more calls than
        another, which would wait for ever: it repeats its last call until all are done, and drops the result.
        """
        if self.pace is None:
            yield
            return
        with self.pace.keeping():
            yield

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Pace:
    """Keeps the forward calls of a sharded model in step over processes: each call is announced, and who has none left repeats its last one.

    Args:
        model: whose calls gather shards.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.inside = model, False
        self.last: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        model.register_forward_pre_hook(self._announce, with_kwargs=True, prepend=True)

    def _announce(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.last = (args, kwargs)
        if self.inside:
            self._vote(True)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
        while self._vote(False):
            if self.last is None:
                raise RuntimeError("this process has called the model never, another has; every process needs a prompt")
            with torch.no_grad():
                self.model(*self.last[0], **self.last[1])

    @staticmethod
    def _vote(more: bool) -> bool:
        flag = torch.tensor(int(more))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


def shard(model: Any, ranks: Ranks, device: str) -> Ranks:
    """Shard a model's frozen base over all processes with FSDP2, one group of parameters a repeated block; adapters stay whole.

    Weights are gathered as they are stored, so that what upstream keeps in float32 beside bfloat16 stays float32, and every call computes what it
    computed before, bit for bit.

    Args:
        model: a diffusers model with LoRA; the classes of its repeated blocks are its own ``_repeated_blocks``.
        ranks: the processes.
        device: ``cpu`` or ``cuda``.

    Returns:
        The processes, which now keep their model calls in step.

    Raises:
        ValueError: the model names no repeated blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    adapters = {parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    mesh = init_device_mesh(device, (ranks.size,))
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
    return Ranks(ranks.rank, ranks.size, Pace(model))


def compile_blocks(model: Any) -> None:
    """Compile the repeated blocks, once for all of a kind.

    Raises:
        ValueError: the model names no repeated blocks.
    """
    # Each adapter, none, and with or without gradient is a variant of the same code; past the limit, blocks would silently not be compiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in repeated_blocks(model):
        block.compile()


def repeated_blocks(model: Any) -> list[torch.nn.Module]:
    """The blocks that a diffusers model repeats, by its own account.

    Raises:
        ValueError: it names none.
    """
    kinds = getattr(model, "_repeated_blocks", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise ValueError(f"{type(model).__name__} names no repeated blocks (_repeated_blocks); it can be neither sharded nor compiled by block")
    return blocks
