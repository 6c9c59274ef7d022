"""Signs, time axes and noise levels: the port's velocity against the vendor's loop, and against a model that has learned something."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from loudfail.harness.case import Case, cases, largest, mixed_conditions, smallest
from loudfail.harness.compare import chart, relative_error, require_at_least, require_close, require_each_close, require_equal
from loudfail.harness.port import Conditions, Port, no_grad, noised
from loudfail.harness.registry import BOTH, invariant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: Bounds. Measured on the clean port: velocity 2e-6 (both dtypes), final latents 1.2e-6, batch 0, absolute level 3e-8.
VELOCITY = {"float32": 2e-5, "bfloat16": 3e-5}
LATENTS = {"float32": 2e-5, "bfloat16": 1e-2}
BATCH = {"float32": 1e-5, "bfloat16": 5e-2}
LEVEL = 6e-7


def calls(port: Port) -> SearchStrategy[int]:
    """Numbers of model calls of a short rollout."""
    from hypothesis import strategies as st

    return st.integers(2, 5)


def levels(port: Port) -> SearchStrategy[float]:
    """Noise levels away from the ends and from the middle, where a flipped time axis would be its own mirror image."""
    from hypothesis import strategies as st

    return st.one_of(st.floats(0.12, 0.3), st.floats(0.7, 0.88))


def seeds(port: Port) -> SearchStrategy[int]:
    from hypothesis import strategies as st

    return st.integers(0, 2**31 - 1)


@invariant("objective", "vendor", scales=BOTH, examples=4, case=cases(batch=(1, 2)), calls=calls)
def the_velocity_is_that_of_the_vendors_loop(port: Port, case: Case, calls: int) -> None:
    """At every call of the vendor's sampling loop, the port's velocity is the one by which that loop moved the latents, per modality.

    The vendor's loop labels rows, signs outputs and steps in its own convention, from upstream parts alone; its latents before and after say which
    way and how far it went. Sees sigma passed as data fraction, a sign, one modality's time for the other, wrong row labels, wrong text labels.
    Does not see what vendor and port do wrong together: the trained model and the other framework do.
    """
    trajectory = port.vendor_rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case))
    conditions = port.conditions(case)
    for index, step in enumerate(trajectory.steps):
        with no_grad():
            got = port.predict_velocity(step.latents, step.sigmas, conditions)
        bound = port.bound(**VELOCITY)
        require_each_close(got, step.velocity, bound=bound, where=f"call {index} of {calls}, given {case.given}")


@invariant("objective", "vendor", examples=3, case=cases(batch=(1, 2)), calls=calls)
def the_clean_estimate_of_the_last_call_is_the_vendors_result(port: Port, case: Case, calls: int) -> None:
    """``x − sigma·v`` at the last call is what the vendor's loop ends with, per modality, each with its own sigma.

    This is the formula from which the objective takes its target. With the data fraction in place of sigma, or a sign, it lands elsewhere.
    """
    conditions = port.conditions(case)
    trajectory = port.vendor_rollout(case.normal("noise", port.shapes(case)), calls, conditions)
    last = trajectory.steps[-1]
    with no_grad():
        velocity = port.predict_velocity(last.latents, last.sigmas, conditions)
    clean = {m: last.latents[m] - last.sigmas[m].view(-1, *[1] * (v.ndim - 1)) * v for m, v in velocity.items()}
    bound = port.bound(**VELOCITY)
    require_each_close(clean, trajectory.final, bound=bound, where=f"{calls} calls, given {case.given}")


@invariant("objective", "vendor", examples=3, case=cases(batch=(1, 2)), calls=calls)
def an_euler_loop_in_our_convention_ends_where_the_vendors_does(port: Port, case: Case, calls: int) -> None:
    """From the same noise, ``x + (sigma' − sigma)·v`` along the port's grid ends in the vendor's latents, per modality.

    Grid, labels, sign and step together, as the trainer's own sampler uses them; errors add up over the calls.
    """
    conditions = port.conditions(case)
    noise = case.normal("noise", port.shapes(case))
    want = port.vendor_rollout(noise, calls, conditions).final
    grid = port.grid(calls, case)
    latents = dict(noise)
    for index in range(len(grid[port.modalities[0]]) - 1):
        with no_grad():
            velocity = port.predict_velocity(latents, {m: grid[m][index].repeat(case.batch) for m in grid}, conditions)
        latents = {m: latents[m] + (grid[m][index + 1] - grid[m][index]) * velocity[m] for m in latents}
    bound = port.bound(**LATENTS)
    require_each_close(latents, want, bound=bound, where=f"{calls} calls, given {case.given}")


@invariant("objective", "packing", scales=BOTH, examples=6, case=cases(batch=(1, 3)))
def every_generated_row_is_told_the_level_it_is_at(port: Port, case: Case) -> None:
    """The noise level that the model is told for each generated row is its own sample's and its own modality's, to float32 precision.

    Read off the model's input. Sees one level for a whole batch, one level for both modalities, levels rounded to integers or to bfloat16.
    Does not see that told and meant are two things (a label in the wrong direction that is read back in the same direction): the vendor's loop does.
    """
    sigmas = case.sigmas("sigmas", port.modalities)
    with no_grad():
        _, tables = port.observe(case.normal("latents", port.shapes(case)), sigmas, port.conditions(case))
    for index, table in enumerate(tables):
        for modality in port.modalities:
            told = table.sigma_of(modality)[~table.given_of(modality)].double()
            meant = torch.full_like(told, float(sigmas[modality][index]))
            require_close(told, meant, bound=LEVEL, scale=len(told) ** 0.5, where=f"sample {index} of {case.batch}, {modality} rows")


@invariant("objective", examples=5, case=cases(batch=(2, 3)))
def the_samples_of_a_batch_do_not_influence_each_other(port: Port, case: Case) -> None:
    """A sample's velocity is the same alone as in a batch with other prompts, prompt lengths, noise levels and latents, and in any order.

    Models that pack one sequence take one list of noise levels for the whole batch and use it silently for every sample. Sees that, padding that
    leaks, positions that go on counting from sample to sample, and results that come back in another order.
    """
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with no_grad():
        together = port.predict_velocity(latents, sigmas, conditions)
        turned = port.predict_velocity(
            {m: v.flip(0) for m, v in latents.items()}, {m: s.flip(0) for m, s in sigmas.items()}, list(reversed(conditions))
        )
        bound = port.bound(**BATCH)
        for index in range(case.batch):
            alone = port.predict_velocity(
                {m: v[index : index + 1] for m, v in latents.items()}, {m: s[index : index + 1] for m, s in sigmas.items()}, [conditions[index]]
            )
            where = f"sample {index} of {case.batch}"
            require_each_close({m: together[m][index] for m in alone}, {m: v[0] for m, v in alone.items()}, bound=bound, where=where)
            require_each_close(
                {m: turned[m][case.batch - 1 - index] for m in alone},
                {m: v[0] for m, v in alone.items()},
                bound=bound,
                where=f"{where}, reversed batch",
            )


@invariant("objective", examples=3, case=cases(batch=(1, 1)))
def nearby_levels_are_told_apart(port: Port, case: Case) -> None:
    """Moving one modality's sigma by 0.0005 changes the velocity: the level reaches the model unrounded.

    A level cast to bfloat16 or to an integer step before its embedding takes two hundred values instead of a continuum; neighbouring calls of a long
    rollout then share one label. Several levels are tried, so that no rounding grid falls between them by chance.
    """
    latents, conditions = case.normal("latents", port.shapes(case)), port.conditions(case)
    base = case.sigmas("sigmas", port.modalities, low=0.1, high=0.85)
    for modality in port.modalities:
        changes = []
        for step in range(3):
            here = {m: s + (0.0317 * step if m == modality else 0) for m, s in base.items()}
            there = here | {modality: here[modality] + 5e-4}
            with no_grad():
                first, second = port.predict_velocity(latents, here, conditions), port.predict_velocity(latents, there, conditions)
            changes.append(relative_error(second[modality], first[modality]))
        require_at_least(min(changes), port.bound(float32=1e-6, bfloat16=1e-6), where=f"{modality}, sigma + 0.0005")


@invariant("objective", examples=3, case=cases(batch=(1, 2)))
def the_same_call_gives_the_same_velocity(port: Port, case: Case) -> None:
    """Velocity is a function of latents, sigmas and conditions: the same bits again, after other calls, and with gradients on.

    Dropout that is active on one side, noise drawn anew for given frames, or a cache keyed by too little make the policy ratio differ from 1 at the
    start.
    """
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with no_grad():
        want = port.predict_velocity(latents, sigmas, conditions)
        port.predict_velocity(case.normal("other", port.shapes(case)), case.sigmas("other", port.modalities), conditions)
    got = port.predict_velocity(latents, sigmas, port.conditions(case))
    for modality in port.modalities:
        require_equal(got[modality].detach(), want[modality], where=modality)


def _trained(
    port: Port, seed: int, level: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], list[Conditions]]:
    """Data that the model was trained on, at one level: target velocity, noised latents, sigmas, conditions."""
    clean, conditions = port.trained_batch(seed, 16)
    generator = torch.Generator().manual_seed(seed)
    noise = {m: torch.randn(x.shape, generator=generator) for m, x in clean.items()}
    sigmas = {m: torch.full((len(x),), level) for m, x in clean.items()}
    return {m: noise[m] - clean[m] for m in clean}, noised(clean, noise, sigmas), sigmas, conditions


@invariant("objective", "trained", examples=3, scales=("tiny",), seed=seeds, level=levels)
def a_trained_velocity_points_from_data_to_noise(port: Port, seed: int, level: float) -> None:
    """On data that the model was trained on, the velocity correlates positively with ``noise − x0``, per modality.

    The oracle is what the model has learned, which no convention of port, vendor or engine can change. Sees a sign that all of them share. By
    chance the correlation of so many values is 0.01.
    """
    target, latents, sigmas, conditions = _trained(port, seed, level)
    with no_grad():
        velocity = port.predict_velocity(latents, sigmas, conditions)
    for modality, v in velocity.items():
        correlation = float(torch.nn.functional.cosine_similarity(v.flatten().double(), target[modality].flatten().double(), dim=0))
        chart(f"sign/{modality}", correlation)
        require_at_least(correlation, 0.05, where=f"{modality}, sigma {level:.3f}, correlation with noise − x0")


@invariant("objective", "trained", examples=3, scales=("tiny",), seed=seeds, level=levels)
def a_trained_model_hears_sigma_as_the_noise_fraction(port: Port, seed: int, level: float) -> None:
    """On data that the model was trained on, a modality's true sigma predicts better than one minus sigma, per modality.

    With sigma passed as data fraction the loss is a few per cent higher, training runs and the reward rises; only what the model has learned knows
    which end of the axis is noise. Measured as the logarithm of the ratio of the two squared errors: positive when right, negative when mirrored, 0
    when not heard.
    """
    target, latents, sigmas, conditions = _trained(port, seed, level)
    with no_grad():
        right = port.predict_velocity(latents, sigmas, conditions)
        for modality in port.modalities:
            flipped = port.predict_velocity(latents, sigmas | {modality: 1 - sigmas[modality]}, conditions)
            errors = [float((v[modality].double() - target[modality].double()).square().mean()) for v in (right, flipped)]
            gain = math.log(errors[1] / errors[0])
            chart(f"time/{modality}", gain)
            require_at_least(gain, 0.02, where=f"{modality}, sigma {level:.3f}, log of the error at one minus sigma over that at sigma")


@invariant("objective", "vendor")
def long_sequences_follow_the_vendor(port: Port) -> None:
    """With the longest prompt and the largest clip of the port, and every frame given that can be, the velocity is that of the vendor's loop.

    Prompts are cut or padded at 77 or 128 tokens and rotary tables end: short fixtures see none of it. Oracle: the vendor's own loop.
    """
    case = largest(port, seed=15, given=max(port.givens, key=len))
    conditions = port.conditions(case)
    trajectory = port.vendor_rollout(case.normal("noise", port.shapes(case)), 3, conditions)
    for call, step in enumerate(trajectory.steps):
        with no_grad():
            velocity = port.predict_velocity(step.latents, step.sigmas, conditions)
        require_each_close(velocity, step.velocity, bound=port.bound(float32=2e-5, bfloat16=1e-2), where=f"call {call} of 3")


@invariant("objective")
def samples_with_different_conditions_share_a_batch(port: Port) -> None:
    """In one batch of five, with different prompts and each condition mode in turn, every sample has the velocity that it has on its own.

    Layouts, masks and levels belong to a sample. A batch that takes them from its first sample is right in every test with equal samples.
    """
    case = smallest(port, seed=16, prompts=("rain", "a bell rings twice", " two dogs bark", "rain", "a bell rings twice"))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), mixed_conditions(port, case)
    with no_grad():
        together = port.predict_velocity(latents, sigmas, conditions)
        for index, condition in enumerate(conditions):
            one = {m: v[index : index + 1] for m, v in latents.items()}, {m: s[index : index + 1] for m, s in sigmas.items()}, [condition]
            alone = port.predict_velocity(*one)
            for modality in port.modalities:
                bound = port.bound(float32=2e-6, bfloat16=5e-2)
                require_close(
                    together[modality][index], alone[modality][0], bound=bound, where=f"{modality}, sample {index}, given {tuple(condition.given)}"
                )
