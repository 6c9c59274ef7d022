"""DiffusionNFT (arXiv 2509.16117) as pure functions: advantages, optimality probability, loss, and the law of the old policy.

In Loudfail's convention, velocity ``v = noise − x0``, with ``β`` the strength of the implicit policies and ``r`` the optimality probability::

    v⁺ = (1 − β)·v_old + β·v_θ        v⁻ = (1 + β)·v_old − β·v_θ
    L  = r·‖v⁺ − v‖² + (1 − r)·‖v⁻ − v‖²
    r  = ½ + ½·clip(A / Z, −1, 1)

At ``θ = old`` the gradient is ``2β(2r − 1)·(v_old − v)·∂v_θ``: with r = 1 it is flow matching on the sample, with r = 0 its exact opposite, with
r = ½ zero, while the loss is the same number. **The loss says nothing about whether training works.**

Nothing here knows a model, a file or a device; everything runs in float64 as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Spread = Literal["group", "global"]
Weighting = Literal["none", "adaptive"]
Schedule = Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999"]

#: Added to the standard deviation, so that a group of equal rewards gives zeros and not a division by zero.
EPSILON = 1e-4
#: Smallest error by which adaptive weighting divides.
FLOOR = 1e-5


def group_advantages(rewards: torch.Tensor, groups: Sequence[int], spread: Spread = "group") -> torch.Tensor:
    """How much better each sample is than its group, in standard deviations.

    Args:
        rewards: ``(B,)``, higher is better.
        groups: the group of each sample: the identity of the draw, not the text of its prompt; one prompt drawn twice makes two groups.
        spread: divide by the standard deviation inside the ``group``, or by the one of all centred rewards (``global``).

    Returns:
        ``(B,)`` float64 with mean 0 in every group.

    Raises:
        ValueError: lengths differ, a reward is not finite, or a group has one sample, which can be neither better nor worse.
    """
    if rewards.ndim != 1 or len(groups) != len(rewards):
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} for {len(groups)} group numbers; give one of each a sample")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"{int((~torch.isfinite(rewards)).sum())} rewards are not finite")
    values, group = rewards.detach().double(), torch.tensor(list(groups), device=rewards.device)
    centred = torch.empty_like(values)
    members = [group == number for number in group.unique()]
    for member in members:
        if int(member.sum()) < 2:
            raise ValueError(f"group {int(group[member][0])} has one sample; an advantage needs at least 2")
        centred[member] = values[member] - values[member].mean()
    if spread == "global":
        return centred / (centred.square().mean().sqrt() + EPSILON)
    result = torch.empty_like(values)
    for member in members:
        result[member] = centred[member] / (centred[member].square().mean().sqrt() + EPSILON)
    return result


def optimality(advantages: torch.Tensor, clip: float) -> torch.Tensor:
    """The optimality probability ``½ + ½·clip(A / Z, −1, 1)`` in [0, 1].

    Args:
        advantages: any shape, in standard deviations.
        clip: ``Z``, the advantage that counts as certain, > 0.
    """
    if clip <= 0:
        raise ValueError(f"clip is {clip}; it must be above 0")
    return 0.5 + 0.5 * (advantages / clip).clamp(-1, 1)


def nft_loss(
    velocity: torch.Tensor,
    old: torch.Tensor,
    target: torch.Tensor,
    probability: torch.Tensor,
    beta: float,
    sigma: torch.Tensor | None = None,
    weighting: Weighting = "none",
) -> torch.Tensor:
    """The loss of each sample in one modality.

    Args:
        velocity: ``v_θ``, ``(B, *shape)``; the only argument through which a gradient goes.
        old: ``v_old`` of the same shape.
        target: ``v = noise − x0`` of the same shape.
        probability: ``r``, ``(B,)`` in [0, 1].
        beta: β > 0.
        sigma: ``(B,)``; needed for adaptive weighting, which is defined on the error of x0, ``sigma`` times that of the velocity.
        weighting: ``none`` as in the formula; ``adaptive`` divides each of the two squared errors of x0 by that sample's mean absolute error, through
            which no gradient goes. It flattens the loss over sigma.

    Returns:
        ``(B,)``: means over the elements of a sample.
    """
    old, target = old.detach(), target.detach()
    positive = (1 - beta) * old + beta * velocity
    negative = (1 + beta) * old - beta * velocity
    good, bad = (_error(v - target, sigma, weighting) for v in (positive, negative))
    r = probability.to(good)
    return r * good + (1 - r) * bad


def _error(difference: torch.Tensor, sigma: torch.Tensor | None, weighting: Weighting) -> torch.Tensor:
    squared = difference.square().flatten(1).mean(1)
    if weighting == "none":
        return squared
    if sigma is None:
        raise ValueError("adaptive weighting is defined on x0 and needs sigma")
    sigma = sigma.to(squared)
    size = (sigma * difference.detach().abs().flatten(1).mean(1)).clamp_min(FLOOR)
    return sigma.square() * squared / size


def reference_term(velocity: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Distance from the reference policy, ``(B,)``: mean squared difference of velocities, the KL term up to a factor of sigma."""
    return (velocity - reference.detach()).square().flatten(1).mean(1)


@dataclass(frozen=True)
class Settings:
    """What decides the objective.

    Attributes:
        beta: β, the strength of the implicit policies, > 0. It matters only off-policy.
        clip: Z, the advantage (in standard deviations) that counts as certain, > 0.
        weighting: see `nft_loss`.
        reference: coefficient of the reference term, ≥ 0; with 0 it is not computed.
        modalities: modality → its weight in the sum, ≥ 0.
    """

    beta: float
    clip: float
    weighting: Weighting
    reference: float
    modalities: Mapping[str, float]


def objective(
    velocity: Mapping[str, torch.Tensor],
    old: Mapping[str, torch.Tensor],
    target: Mapping[str, torch.Tensor],
    sigmas: Mapping[str, torch.Tensor],
    probability: torch.Tensor,
    settings: Settings,
    reference: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective of each sample over all modalities, and its parts.

    The policy term is multiplied by ``clip / β``, so that at ``θ = old`` its gradient is the advantage-weighted flow-match
    gradient, whatever the two are. Arguments are modality → ``(B, *shape)`` (sigmas ``(B,)``), generated rows only:
    a port leaves given rows out of its velocity.

    Returns:
        ``(B,)``, differentiable in ``velocity``; and batch means ``policy/<modality>``, ``reference/<modality>``, without a gradient.

    Raises:
        ValueError: a modality has no weight, or the reference is missing although its coefficient is above 0.
    """
    if set(velocity) != set(settings.modalities):
        raise ValueError(f"weights are given for {sorted(settings.modalities)}, the model has {sorted(velocity)}")
    if settings.reference > 0 and reference is None:
        raise ValueError("the reference term has a coefficient, but no reference velocity was given")
    total, parts = torch.zeros(len(probability), device=probability.device, dtype=torch.float64), {}
    for modality, v in velocity.items():
        policy = nft_loss(v, old[modality], target[modality], probability, settings.beta, sigmas[modality], settings.weighting)
        parts[f"policy/{modality}"] = policy.detach().mean()
        sample = settings.clip / settings.beta * policy
        if settings.reference > 0 and reference is not None:
            distance = reference_term(v, reference[modality])
            parts[f"reference/{modality}"] = distance.detach().mean()
            sample = sample + settings.reference * distance
        total = total + settings.modalities[modality] * sample
    return total, parts


def old_decay(schedule: Schedule, step: int) -> float:
    """How much of itself the old policy keeps at a refresh, in [0, 1): ``old ← decay·old + (1 − decay)·θ``.

    ``copy``: 0. ``linear_to_0_5``: 0.001 a step up to 0.5. ``delayed_linear_to_0_999``: 0 for 75 steps, then 0.0075 a step up to 0.999.
    As published with DiffusionNFT.
    """
    if schedule == "copy":
        return 0.0
    if schedule == "linear_to_0_5":
        return min(0.001 * step, 0.5)
    if schedule == "delayed_linear_to_0_999":
        return min(max(0.0, 0.0075 * (step - 75)), 0.999)
    raise ValueError(f"no schedule {schedule!r} of the old policy; there are copy, linear_to_0_5 and delayed_linear_to_0_999")


def refreshed(old: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor], decay: float) -> dict[str, torch.Tensor]:
    """The old policy's adapter after a refresh; with ``decay`` 0 the current one, bit for bit."""
    if decay == 0:
        return {name: value.clone() for name, value in current.items()}
    return {name: decay * old[name] + (1 - decay) * value for name, value in current.items()}
