"""The three policies on one frozen base: ``default`` (trains), ``old`` (samples, and is half of the loss), none (the reference)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from loudfail.harness.port import AdapterConfig, Port, need

TRAINED, OLD = "default", "old"


def prepare(port: Port, seed: int, rank: int = 0, alpha: float = 0.0) -> None:
    """Give the actor the adapters ``default`` and ``old``, equal, with B = 0; only ``default`` trains.

    Args:
        port: offers ``objective`` and ``adapter``.
        seed: draws A, the same in every process.
        rank, alpha: of the adapters; 0 for the port's own.

    Raises:
        Uncovered: the port lacks a seam.
    """
    need(port, "objective", "adapter")
    if rank:
        port.adapter = AdapterConfig(rank, alpha, port.adapter.targets)
    for name in (TRAINED, OLD):
        if name not in port.adapter_names():
            port.add_adapter(name, port.adapter)
    state = initial_state(port, seed)
    for name in (TRAINED, OLD):
        port.load_adapter(name, state)
    port.select_trainable(TRAINED)


def initial_state(port: Port, seed: int) -> dict[str, torch.Tensor]:
    """LoRA's usual start, drawn by us so that it depends on the seed alone: A uniform in ±1/√in, B = 0."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, (out_features, in_features) in sorted(port.projections().items()):
        bound = in_features**-0.5
        state[f"{name}.lora_A.weight"] = (2 * torch.rand(port.adapter.rank, in_features, generator=generator) - 1) * bound
        state[f"{name}.lora_B.weight"] = torch.zeros(out_features, port.adapter.rank)
    return state


def effect(state: Mapping[str, torch.Tensor], config: AdapterConfig, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each projection adds by LoRA's definition, ``alpha / r · B (A x)``, in float64.

    Args:
        state: ``<projection>.lora_A.weight`` ``(r, in)`` and ``<projection>.lora_B.weight`` ``(out, r)``.
        config: gives the scale.
        inputs: projection → ``(count, in)``.

    Returns:
        Projection → ``(out, count)``.
    """
    result = {}
    for name, x in inputs.items():
        a, b = state[f"{name}.lora_A.weight"].double(), state[f"{name}.lora_B.weight"].double()
        result[name] = config.scale * (b @ (a @ x.double().T))
    return result


def fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    """A short hash of names and bytes, for logs: equal adapters have equal ones."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
