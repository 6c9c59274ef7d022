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


def equal(port: Port, one: str, other: str) -> bool:
    """Whether two adapters are equal, bit for bit; compared where they are if the port's actor holds them as PEFT does, by their states otherwise."""
    actor = getattr(port, "actor", None)
    parameters = dict(actor.named_parameters()) if isinstance(actor, torch.nn.Module) else {}
    pairs = {name: name.replace(f".{one}.", f".{other}.") for name in parameters if _of_adapter(name, one)}
    if pairs and all(match in parameters for match in pairs.values()):
        return bool(torch.stack([torch.eq(parameters[name], parameters[match]).all() for name, match in pairs.items()]).all())
    return same(port.adapter_state(one), port.adapter_state(other))


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _of_adapter(name: str, adapter: str) -> bool:
    return f".lora_A.{adapter}." in name or f".lora_B.{adapter}." in name


def masters(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """What the optimizer updates: the parameters themselves, or float32 copies of those that are stored narrower.

    The spacing of bfloat16 is 0.4 % of a value: a smaller update of a stored weight would be rounded away, and training would stand still.
    """
    return {
        name: parameter if parameter.dtype.itemsize >= 4 else torch.nn.Parameter(parameter.detach().float()) for name, parameter in parameters.items()
    }


def take_gradients(own: Mapping[str, torch.nn.Parameter], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Hand the gradients of the model's parameters to their `masters`."""
    for name, master in own.items():
        if master is not parameters[name]:
            gradient, parameters[name].grad = parameters[name].grad, None
            master.grad = None if gradient is None else gradient.float()


@torch.no_grad()
def give_values(own: Mapping[str, torch.nn.Parameter], parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Round `masters` into the model's parameters."""
    for name, master in own.items():
        if master is not parameters[name]:
            parameters[name].copy_(master)


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
