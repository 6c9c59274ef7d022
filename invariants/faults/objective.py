"""The objective broken on purpose: what enters the loss, the loss, and how its gradient is gathered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace as with_fields
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.case import Case
from loudfail.harness.port import Port, Step, Trajectory
from loudfail.harness.registry import fault
from loudfail.invariants.faults.advantages import STEP, another_trainer, code
from loudfail.invariants.faults.conventions import one_modality

SIGNS = "objective::at_the_old_policy_an_update_is_flow_matching_with_the_sign_of_the_advantage"
PAPER = "objective::off_policy_the_gradient_is_the_papers"
ADAPTIVE = "objective::adaptive_weighting_divides_by_each_samples_error_and_carries_no_gradient"
REFERENCE = "objective::the_reference_term_pulls_towards_the_base_model"
ALONE = "objective::each_modality_trains_with_its_own_weight_alone"
GIVEN = "objective::given_frames_have_no_part_in_an_update"
MICRO = "objective::micro_batches_add_up_to_the_batch"
CLEARED = "objective::an_update_starts_from_no_gradient"
LEVELS = "objective::training_levels_are_those_that_the_rollout_walks"
NOISE = "objective::every_sample_is_noised_afresh"

SEAMS = ("objective", "adapter", "update")


def single(port: Port) -> str:
    """Why no modality can be trained at another's expense."""
    return another_trainer(port) or one_modality(port)


def _loss(port: Port, formula: Callable[..., torch.Tensor], *, detached: bool = True) -> AbstractContextManager[Any]:
    """The trainer's loss of one modality with another formula: ``formula(v, old, target, r, beta, error)``, ``error`` being its weighted square."""
    nft = code(port).nft

    def make(original: Any) -> Any:
        def nft_loss(v: Any, old: Any, target: Any, r: Any, beta: float, sigma: Any = None, weighting: str = "none") -> Any:
            r = r.to(v)
            return formula(v, old.detach() if detached else old, target.detach(), r, beta, lambda d: nft._error(d, sigma, weighting))

        return nft_loss

    return inject.replace(nft, "nft_loss", make)


def _objective(port: Port, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """The trainer's objective, changed: ``change(original, velocity, old, target, sigmas, r, settings, reference)``."""
    return inject.replace(code(port).nft, "objective", lambda original: lambda *arguments: change(original, *arguments))


def _rolled(value: torch.Tensor) -> torch.Tensor:
    return value.roll(1, 0)


# -- the two policies --------------------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[SIGNS, PAPER, STEP], unless=another_trainer, cause="policies exchanged")
def positive_and_negative_are_exchanged(port: Port) -> Iterator[None]:
    """Good samples pull the negative policy, bad ones the positive."""
    with _loss(port, lambda v, old, t, r, b, e: (1 - r) * e((1 - b) * old + b * v - t) + r * e((1 + b) * old - b * v - t)):
        yield


@fault(*SEAMS, catches=[SIGNS, PAPER], unless=another_trainer, cause="another sample's probability")
def probabilities_belong_to_other_samples(port: Port) -> Iterator[None]:
    """Between the advantages and the loss the samples of a call have exchanged their r."""
    with _objective(port, lambda original, v, old, t, s, r, *rest: original(v, old, t, s, _rolled(r), *rest)):
        yield


@fault(*SEAMS, catches=[PAPER], unless=another_trainer, cause="β ignored")
def beta_is_ignored(port: Port) -> Iterator[None]:
    """The implicit policies are those of β = 1, whatever the recipe says; on policy only the size of the step differs."""
    with _loss(port, lambda v, old, t, r, b, e: (r * e(v - t) + (1 - r) * e(2 * old - v - t)) * b):
        yield


@fault(*SEAMS, catches=[PAPER], unless=another_trainer)
def beta_weighs_the_old_policy(port: Port) -> Iterator[None]:
    """β and 1 − β have changed places in the positive policy."""
    with _loss(port, lambda v, old, t, r, b, e: r * e((1 - b) * v + b * old - t) + (1 - r) * e((1 + b) * old - b * v - t)):
        yield


@fault(*SEAMS, catches=[SIGNS, PAPER], unless=another_trainer, cause="negative policy missing")
def only_good_samples_are_learnt_from(port: Port) -> Iterator[None]:
    """The negative policy's half of the loss is missing: rejection sampling."""
    with _loss(port, lambda v, old, t, r, b, e: r * e((1 - b) * old + b * v - t)):
        yield


@fault(*SEAMS, catches=[SIGNS], unless=another_trainer, cause="old policy carries a gradient")
def the_old_policy_carries_a_gradient(port: Port) -> Iterator[None]:
    """On policy the velocity stands for the old one too, without being detached: the reward cancels."""

    def formula(v: Any, old: Any, t: Any, r: Any, b: float, e: Any) -> Any:
        old = v if torch.equal(old, v.detach()) else old
        return r * e((1 - b) * old + b * v - t) + (1 - r) * e((1 + b) * old - b * v - t)

    with _loss(port, formula, detached=False):
        yield


@fault(*SEAMS, catches=[PAPER], source="huggingface/trl #1340", unless=another_trainer, cause="base model for the old policy")
def the_base_model_stands_for_the_old_policy(port: Port) -> Iterator[None]:
    """The old policy's velocity is asked of the model without adapters."""
    with inject.replace(
        code(port).loop, "velocities", lambda original: lambda p, adapter, pieces: original(p, None if adapter == "old" else adapter, pieces)
    ):
        yield


@fault(*SEAMS, catches=[PAPER], source="Tencent-Hunyuan/UniRL PR #21", unless=another_trainer, cause="training policy for the old one")
def every_update_counts_as_on_policy(port: Port) -> Iterator[None]:
    """The old policy's call is saved although the policy has gone on."""
    with inject.replace(code(port).adapters, "equal", lambda original: lambda *arguments: True):
        yield


# -- the target --------------------------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[SIGNS, PAPER, STEP], source="verl-omni 786dd36c; primepake/splitmeanflow #2", unless=another_trainer, cause="target reversed")
def the_target_points_from_noise_to_data(port: Port) -> Iterator[None]:
    """The target is x0 − noise for a velocity that is noise − x0."""
    with _objective(port, lambda original, v, old, t, *rest: original(v, old, {m: -x for m, x in t.items()}, *rest)):
        yield


@fault(*SEAMS, catches=[SIGNS, PAPER], unless=another_trainer, cause="another sample's target")
def the_target_has_the_noise_of_another_sample(port: Port) -> Iterator[None]:
    """The samples of a call have exchanged their targets."""
    with _objective(port, lambda original, v, old, t, *rest: original(v, old, {m: _rolled(x) for m, x in t.items()}, *rest)):
        yield


@fault(*SEAMS, catches=[SIGNS, PAPER, STEP], source="verl-omni 786dd36c", unless=another_trainer, cause="mixed by the data fraction")
def latents_are_mixed_by_the_data_fraction(port: Port) -> Iterator[None]:
    """Latents are mixed at 1 − sigma and labelled sigma."""
    with inject.replace(
        code(port).loop, "noised", lambda original: lambda x0, noise, sigmas: original(x0, noise, {m: 1 - s for m, s in sigmas.items()})
    ):
        yield


def _pieces(port: Port, change: Callable[[Any, int], Any]) -> AbstractContextManager[Any]:
    """The model calls of an update, each changed by its number."""

    def make(original: Any) -> Any:
        return lambda *arguments: [change(piece, number) for number, piece in enumerate(original(*arguments))]

    return inject.replace(code(port).loop, "draw_pieces", make)


@fault(*SEAMS, catches=[SIGNS, PAPER, STEP], source="verl-omni 2e08eeff (#25)", unless=another_trainer, cause="another sample's conditions")
def samples_are_trained_under_another_prompt(port: Port) -> Iterator[None]:
    """The conditions of a model call are those of another draw."""

    def make(original: Any) -> Any:
        def draw_pieces(*arguments: Any) -> Any:
            pieces = list(original(*arguments))
            texts = [piece.conditions[0] for piece in pieces]
            return [with_fields(piece, conditions=[text] * len(piece.rows)) for piece, text in zip(pieces, texts[1:] + texts[:1], strict=True)]

        return draw_pieces

    with inject.replace(code(port).loop, "draw_pieces", make):
        yield


# -- weighting and the reference term ----------------------------------------------------------------------------------------------------------------
def _error(port: Port, formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
    """Adaptive weighting by another formula of the difference of velocities and sigma; without weighting nothing changes."""

    def make(original: Any) -> Any:
        def error(difference: torch.Tensor, sigma: Any, weighting: str) -> torch.Tensor:
            return original(difference, sigma, weighting) if weighting == "none" else formula(difference, sigma.to(difference))

        return error

    return inject.replace(code(port).nft, "_error", make)


def _square(difference: torch.Tensor) -> torch.Tensor:
    return difference.square().flatten(1).mean(1)


def _size(difference: torch.Tensor) -> torch.Tensor:
    return difference.abs().flatten(1).mean(1)


@fault(*SEAMS, catches=[ADAPTIVE], unless=another_trainer)
def the_divisor_carries_a_gradient(port: Port) -> Iterator[None]:
    """Adaptive weighting is differentiated through the error that it divides by."""
    with _error(port, lambda d, sigma: sigma * _square(d) / _size(d)):
        yield


@fault(*SEAMS, catches=[ADAPTIVE], unless=another_trainer)
def one_divisor_serves_the_batch(port: Port) -> Iterator[None]:
    """Adaptive weighting divides by the mean error of all samples of the call."""
    with _error(port, lambda d, sigma: sigma**2 * _square(d) / (sigma * _size(d)).mean().detach()):
        yield


@fault(*SEAMS, catches=[ADAPTIVE], unless=another_trainer)
def the_divisor_is_the_error_of_the_velocity(port: Port) -> Iterator[None]:
    """The squared error of x0 is divided by the mean error of the velocity, so that noise levels are weighted by another power of sigma."""
    with _error(port, lambda d, sigma: sigma**2 * _square(d) / _size(d).detach()):
        yield


@fault(*SEAMS, catches=[ADAPTIVE], source="Lightricks/LTX-2 #94", unless=single)
def one_divisor_serves_the_packed_sequence(port: Port) -> Iterator[None]:
    """Adaptive weighting divides by the mean error over all modalities' elements, so that the modality with more rows decides for both."""
    queue: list[torch.Tensor] = []

    def objective(original: Any, v: Any, old: Any, t: Any, s: Any, r: Any, settings: Any, *rest: Any) -> Any:
        if settings.weighting == "adaptive":
            packed = []
            for sign in (1, -1):
                parts = [(s[m].view(-1, 1).to(v[m].device) * (old[m] + sign * settings.beta * (v[m] - old[m]) - t[m]).abs().flatten(1)) for m in v]
                packed.append(torch.cat(parts, 1).mean(1).detach())
            queue.extend(packed * len(v))
        return original(v, old, t, s, r, settings, *rest)

    with _objective(port, objective), _error(port, lambda d, sigma: sigma**2 * _square(d) / queue.pop(0).to(d.device)):
        yield


@fault(*SEAMS, catches=[REFERENCE], source="Flow-Factory commit 8bc04d0 (#123)", unless=another_trainer, cause="reference term without gradient")
def the_reference_term_has_no_gradient(port: Port) -> Iterator[None]:
    """The distance from the reference is computed without a graph: it is logged, and pulls nothing."""
    with inject.replace(code(port).nft, "reference_term", torch.no_grad()):
        yield


@fault(*SEAMS, catches=[REFERENCE], source="huggingface/trl #4723, #6591", unless=another_trainer)
def the_old_policy_is_the_reference(port: Port) -> Iterator[None]:
    """The reference's velocity is asked of the old policy."""
    with inject.replace(
        code(port).loop, "velocities", lambda original: lambda p, adapter, pieces: original(p, "old" if adapter is None else adapter, pieces)
    ):
        yield


@fault(*SEAMS, catches=[REFERENCE], unless=another_trainer, cause="reference term reversed")
def the_reference_term_pushes_away(port: Port) -> Iterator[None]:
    """The distance from the reference is subtracted."""
    with inject.replace(code(port).nft, "reference_term", lambda original: lambda *arguments: -original(*arguments)):
        yield


# -- modalities and given frames ---------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[ALONE, PAPER], source="ostris/ai-toolkit #701", unless=single, cause="modality missing")
def one_modality_is_left_out(port: Port) -> Iterator[None]:
    """The last modality's velocity has no gradient; its loss is logged."""
    last = port.modalities[-1]
    with _objective(port, lambda original, v, *rest: original(v | {last: v[last].detach()}, *rest)):
        yield


@fault(*SEAMS, catches=[ALONE, PAPER], source="Lightricks/LTX-2 #94", unless=single, cause="weights ignored")
def the_weights_of_modalities_are_ignored(port: Port) -> Iterator[None]:
    """Every modality has the weight 1."""

    def objective(original: Any, v: Any, old: Any, t: Any, s: Any, r: Any, settings: Any, *rest: Any) -> Any:
        return original(v, old, t, s, r, with_fields(settings, modalities=dict.fromkeys(settings.modalities, 1.0)), *rest)

    with _objective(port, objective):
        yield


@fault(*SEAMS, catches=[ALONE, PAPER], source="modelscope/DiffSynth-Studio #1655", unless=single, cause="modalities weighted by their size")
def modalities_are_weighted_by_their_size(port: Port) -> Iterator[None]:
    """The loss is a mean over all elements of the packed sequence."""

    def objective(original: Any, v: Any, old: Any, t: Any, s: Any, r: Any, settings: Any, *rest: Any) -> Any:
        sizes = {m: x[0].numel() for m, x in v.items()}
        share = {m: len(v) * weight * sizes[m] / sum(sizes.values()) for m, weight in settings.modalities.items()}
        return original(v, old, t, s, r, with_fields(settings, modalities=share), *rest)

    with _objective(port, objective):
        yield


@fault(*SEAMS, "condition", catches=[GIVEN], source="verl-omni RFC #396, PR #401", ports=["h3", "ltx2"])
def given_rows_are_in_the_loss(port: Port) -> Iterator[None]:
    """The model's output on given rows is pulled towards zero with the rest."""
    outputs: list[torch.Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            outputs.append(output[0])

    def objective(original: Any, v: Any, *rest: Any) -> Any:
        total, parts = original(v, *rest)
        generated = port.pack({m: x.detach() for m, x in v.items()})["video"].shape[1]
        given = outputs.pop()[:, :-generated].float()
        outputs.clear()
        return (total + given.square().flatten(1).mean(1) if given.numel() else total), parts

    handle = port.actor.register_forward_hook(keep)
    try:
        with _objective(port, objective):
            yield
    finally:
        handle.remove()


@fault(*SEAMS, "condition", catches=[GIVEN], source="Lightricks/LTX-2 #283", ports=["h3"], cause="given frames dropped")
def given_frames_are_left_out_in_training(port: Port) -> Iterator[None]:
    """The samples of given frames are trained as if nothing had been given."""
    bare = port.conditions(Case(extent={axis: min(sizes) for axis, sizes in port.extents.items()}))[0].extra["given_rows"]

    def change(piece: Any, number: int) -> Any:
        conditions = [with_fields(one, given={}, extra=one.extra | {"given_rows": bare}) for one in piece.conditions]
        return with_fields(piece, conditions=conditions)

    with _pieces(port, change):
        yield


# -- levels and noise --------------------------------------------------------------------------------------------------------------------------------
def _levels(port: Port, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> AbstractContextManager[Any]:
    """The levels that an update takes from the rollout's trajectory."""

    def make(original: Any) -> Any:
        def improve(run: Any, batch: Any, trajectory: Trajectory, *rest: Any) -> Any:
            return original(run, batch, Trajectory([Step(s.latents, change(s.sigmas), s.velocity, s.after) for s in trajectory.steps]), *rest)

        return improve

    return inject.replace(code(port).loop, "improve", make)


def one_schedule(port: Port) -> str:
    """Why one level for all modalities is no fault: they share a schedule, or the trainer is another one."""
    shared = len(set(port.shift.values())) < 2
    return another_trainer(port) or ("every modality has the same published schedule" if shared else "")


@fault(*SEAMS, catches=[LEVELS], source="verl-omni a1139baf; ostris/ai-toolkit PR #720", unless=one_schedule, cause="one modality at another's level")
def one_level_serves_every_modality(port: Port) -> Iterator[None]:
    """Audio is noised and told as the video is, although the sampler walks two schedules."""
    with _levels(port, lambda sigmas: dict.fromkeys(sigmas, sigmas[port.modalities[0]])):
        yield


@fault(*SEAMS, catches=[LEVELS], unless=another_trainer, cause="sigma rounded")
def levels_are_truncated_to_integer_timesteps(port: Port) -> Iterator[None]:
    """Sigma goes through an integer timestep of a thousand."""
    with _levels(port, lambda sigmas: {m: (s * 1000).long() / 1000 for m, s in sigmas.items()}):
        yield


@fault(*SEAMS, catches=[LEVELS], source="Lightricks/LTX-2 #283", unless=another_trainer, cause="levels off the grid")
def levels_are_drawn_uniformly(port: Port) -> Iterator[None]:
    """Training levels are uniform in (0, 1), not those of the grid that is sampled."""

    def uniform(sigmas: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {m: torch.full_like(s, 0.02 + 0.96 * float((s[0] * 7919) % 1)) for m, s in sigmas.items()}

    with _levels(port, uniform):
        yield


@fault(*SEAMS, catches=[LEVELS], source="hao-ai-lab/FastVideo PR #885", unless=another_trainer, cause="one level for every sample")
def every_sample_has_the_first_level(port: Port) -> Iterator[None]:
    """Only the first call of the rollout is ever trained."""
    with inject.replace(code(port).loop, "draw_levels", lambda original: lambda *arguments: [0] * len(original(*arguments))):
        yield


@fault(*SEAMS, catches=[LEVELS], source="verl-omni #280", unless=another_trainer, cause="grid of another request")
def levels_are_those_of_another_number_of_calls(port: Port) -> Iterator[None]:
    """Training takes its levels from a table that is one point longer than the rollout's."""

    def make(original: Any) -> Any:
        def improve(run: Any, batch: Any, trajectory: Trajectory, *rest: Any) -> Any:
            grid = run.rollout.grid(len(trajectory.steps) + 1)
            steps = [
                Step(s.latents, {m: torch.full_like(x, float(grid[m][i + 1])) for m, x in s.sigmas.items()}, s.velocity, s.after)
                for i, s in enumerate(trajectory.steps)
            ]
            return original(run, batch, Trajectory(steps), *rest)

        return improve

    with inject.replace(code(port).loop, "improve", make):
        yield


def _noise(port: Port, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Training noise alone, changed: ``change(original, run, purpose, count)``."""

    def make(original: Any) -> Any:
        def noise_of(run: Any, purpose: str, count: int) -> Any:
            return change(original, run, purpose, count) if purpose.startswith("train/") else original(run, purpose, count)

        return noise_of

    return inject.replace(code(port).loop, "noise_of", make)


@fault(*SEAMS, catches=[NOISE], source="verl-omni commit e71e6579 (#60)", unless=another_trainer, cause="training noise shared")
def one_training_noise_serves_the_group(port: Port) -> Iterator[None]:
    """Every sample of a group is noised with the same draw."""
    with _noise(port, lambda original, run, purpose, count: {m: x[:1].expand_as(x).clone() for m, x in original(run, purpose, count).items()}):
        yield


@fault(*SEAMS, catches=[NOISE], source="verl-omni commit e71e6579 (#60)", unless=another_trainer, cause="training noise repeats")
def training_noise_repeats_every_step(port: Port) -> Iterator[None]:
    """The seed of the training noise forgets the step."""
    with _noise(port, lambda original, run, purpose, count: original(run, re.sub(r"^train/\d+/", "train/0/", purpose), count)):
        yield


@fault(*SEAMS, catches=[NOISE], unless=another_trainer, cause="training noise scaled")
def training_noise_has_the_scale_of_other_latents(port: Port) -> Iterator[None]:
    """Training noise is divided by the scaling factor of another autoencoder."""
    with _noise(port, lambda original, run, purpose, count: {m: x / 0.18215 for m, x in original(run, purpose, count).items()}):
        yield


# -- gathering ---------------------------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[MICRO, PAPER], unless=another_trainer, cause="last micro-batch only")
def only_the_last_micro_batch_counts(port: Port) -> Iterator[None]:
    """Gradients are cleared before every micro-batch instead of before every update."""

    def objective(original: Any, *arguments: Any) -> Any:
        for parameter in port.trainable().values():
            parameter.grad = None
        return original(*arguments)

    with _objective(port, objective):
        yield


@fault(*SEAMS, catches=[MICRO], source="ml-explore/mlx-lm #1544", unless=another_trainer, cause="micro-batches count alike")
def unequal_micro_batches_count_alike(port: Port) -> Iterator[None]:
    """Every micro-batch's mean has the same weight, however few samples it has."""

    def make(original: Any) -> Any:
        def improve(run: Any, *rest: Any) -> Any:
            samples, size = run.config.algorithm.samples, run.config.micro_batch
            calls = -(-samples // size)

            def objective(proper: Any, v: Any, *arguments: Any) -> Any:
                total, parts = proper(v, *arguments)
                return total * (samples / calls / len(total)), parts

            with _objective(port, objective):
                return original(run, *rest)

        return improve

    with inject.replace(code(port).loop, "improve", make):
        yield


@fault(*SEAMS, catches=[MICRO, PAPER], source="verl-project/verl #3332", unless=another_trainer, cause="micro-batches summed")
def micro_batches_are_summed(port: Port) -> Iterator[None]:
    """Micro-batches add up their means, so that the gradient grows with their number."""

    def make(original: Any) -> Any:
        def improve(run: Any, batch: Any, *rest: Any) -> Any:
            trained = len(batch.groups) * run.config.algorithm.sigmas

            def objective(proper: Any, v: Any, *arguments: Any) -> Any:
                total, parts = proper(v, *arguments)
                return total * (trained / len(total)), parts

            with _objective(port, objective):
                return original(run, batch, *rest)

        return improve

    with inject.replace(code(port).loop, "improve", make):
        yield


def nothing_is_left(port: Port) -> str:
    """Why a gradient that is not cleared is no fault here: it is not added to."""
    return another_trainer(port) or ("" if port.dtype == "float32" else "in bfloat16 each gradient is handed to the float32 weights anew")


@fault(*SEAMS, catches=[CLEARED], unless=nothing_is_left, cause="gradient not cleared")
def gradients_are_never_cleared(port: Port) -> Iterator[None]:
    """Each update's gradient is added to those before."""

    def make(original: Any) -> Any:
        return lambda self, *arguments, **keywords: None

    with inject.replace(torch.optim.AdamW, "zero_grad", make):
        yield
    for parameter in port.trainable().values():
        parameter.grad = None
