"""Faults of signs, time axes and noise levels."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault
from loudfail.invariants.faults.schedule import one_grid

VENDOR = "conventions::the_velocity_is_that_of_the_vendors_loop"
CLEAN = "conventions::the_clean_estimate_of_the_last_call_is_the_vendors_result"
EULER = "conventions::an_euler_loop_in_our_convention_ends_where_the_vendors_does"
TOLD, BATCH = "conventions::every_generated_row_is_told_the_level_it_is_at", "conventions::the_samples_of_a_batch_do_not_influence_each_other"
NEARBY, SAME = "conventions::nearby_levels_are_told_apart", "conventions::the_same_call_gives_the_same_velocity"
SIGN, TIME = "conventions::a_trained_velocity_points_from_data_to_noise", "conventions::a_trained_model_hears_sigma_as_the_noise_fraction"


LONG = "conventions::long_sequences_follow_the_vendor"
#: The public report of a mirrored time axis.
MIRRORED = "verl-project/verl-omni PR #383, commit 786dd36c"
#: Which level modulates the attention between the streams differs from release to release, and between frameworks.
CROSS = "diffusers 0.40.0 use_cross_timestep; vllm-omni 0.30.0 ltx2_transformer"


def data_fraction(port: Port, modalities: Collection[str]) -> AbstractContextManager[Any]:
    """Pass ``1 − sigma`` where sigma is wanted, for some modalities."""

    def make(original: Any) -> Any:
        return lambda latents, sigmas, conditions: original(latents, {m: 1 - s if m in modalities else s for m, s in sigmas.items()}, conditions)

    return inject.replace(port, "predict_velocity", make)


def negated(port: Port, modalities: Collection[str]) -> AbstractContextManager[Any]:
    """Turn the sign of the velocity of some modalities."""

    def make(original: Any) -> Any:
        return lambda latents, sigmas, conditions: {m: -v if m in modalities else v for m, v in original(latents, sigmas, conditions).items()}

    return inject.replace(port, "predict_velocity", make)


def with_sigmas(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the sigmas on their way into `predict_velocity`."""

    def make(original: Any) -> Any:
        return lambda latents, sigmas, conditions: original(latents, change(sigmas), conditions)

    return inject.replace(port, "predict_velocity", make)


def one_mode(port: Port) -> str:
    return "" if len(port.givens) > 1 else "it has one condition mode"


def one_modality(port: Port) -> str:
    return "" if len(port.modalities) > 1 else "it has one modality"


def no_condition(port: Port) -> str:
    return "" if hasattr(port, "condition") else "it makes conditions from cases only"


def other_prompt(port: Any, condition: Any, ids: Any) -> Any:
    """The conditions of a sample under another prompt, its given frames kept."""
    return port.condition(tuple(ids), condition.given)


@fault(
    "objective",
    "vendor",
    "packing",
    catches=[VENDOR, CLEAN, EULER, TOLD],
    source="verl-project/verl-omni PR #383, commit 786dd36c",
    cause="time flipped",
)
def sigma_is_passed_as_the_data_fraction(port: Port) -> Iterator[None]:
    """The model gets one minus the level that it wants, in every modality."""
    with data_fraction(port, port.modalities):
        yield


@fault("objective", "vendor", "packing", catches=[VENDOR, CLEAN, EULER, TOLD], source=MIRRORED, unless=one_modality, cause="time flipped")
def the_videos_sigma_is_passed_as_the_data_fraction(port: Port) -> Iterator[None]:
    """The level of the first modality is mirrored, those of the others are right."""
    with data_fraction(port, port.modalities[:1]):
        yield


@fault("objective", "vendor", "packing", catches=[VENDOR, CLEAN, EULER, TOLD], source=MIRRORED, unless=one_modality, cause="time flipped")
def the_audios_sigma_is_passed_as_the_data_fraction(port: Port) -> Iterator[None]:
    """The level of the last modality is mirrored, those of the others are right."""
    with data_fraction(port, port.modalities[-1:]):
        yield


@fault("objective", "vendor", catches=[VENDOR, CLEAN, EULER], source="verl-project/verl-omni PR #383, commit 786dd36c", cause="velocity sign flipped")
def the_velocity_is_not_negated(port: Port) -> Iterator[None]:
    """The data-ward output is handed on as if it pointed to the noise."""
    with negated(port, port.modalities):
        yield


@fault("objective", "vendor", catches=[VENDOR, CLEAN, EULER], source="primepake/splitmeanflow#2", unless=one_modality, cause="velocity sign flipped")
def the_audios_velocity_is_not_negated(port: Port) -> Iterator[None]:
    """The last modality's velocity points to the data, those of the others to the noise."""
    with negated(port, port.modalities[-1:]):
        yield


@fault("objective", "vendor", catches=[VENDOR, CLEAN, EULER], source=MIRRORED, unless=one_modality, cause="velocity sign flipped")
def the_videos_velocity_is_not_negated(port: Port) -> Iterator[None]:
    """The first modality's velocity points to the data, those of the others to the noise."""
    with negated(port, port.modalities[:1]):
        yield


@fault(
    "objective",
    "vendor",
    "packing",
    catches=[VENDOR, CLEAN, EULER, TOLD],
    source="verl-project/verl-omni PR #568, RFC #551",
    cause="time and velocity sign flipped",
)
def both_conventions_are_mirrored(port: Port) -> Iterator[None]:
    """Time axis and sign are both mirrored; the two mistakes do not cancel."""
    with ExitStack() as stack:
        stack.enter_context(data_fraction(port, port.modalities))
        stack.enter_context(negated(port, port.modalities))
        yield


@fault("objective", "trained", catches=[TIME], source="verl-project/verl-omni PR #383, commit 786dd36c", ports=("h3",), cause="time flipped")
def trainer_and_vendor_share_a_mirrored_time_axis(port: Port) -> Iterator[None]:
    """The actor itself takes noise fractions, as after an upstream change: vendor's loop and port agree, the weights do not."""

    def make(original: Any) -> Any:
        return lambda *args, timestep, **kwargs: original(*args, timestep=1 - timestep, **kwargs)

    with inject.replace(port.actor, "forward", make):
        yield


@fault("objective", "trained", catches=[SIGN], source="verl-project/verl-omni PR #568, RFC #551", ports=("h3", "ltx2"), cause="velocity sign flipped")
def trainer_and_vendor_share_a_mirrored_sign(port: Port) -> Iterator[None]:
    """The actor itself returns the opposite velocity, as after an upstream change of sign: vendor's loop and port agree, the weights do not."""

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: tuple(-output for output in original(*args, **kwargs))

    with inject.replace(port.actor, "forward", make):
        yield


@fault(
    "objective",
    "vendor",
    "packing",
    catches=[VENDOR, EULER, TOLD],
    source="verl-project/verl-omni commit a1139baf",
    unless=one_grid,
    cause="one modality at another's level",
)
def audio_rows_are_told_the_videos_level(port: Port) -> Iterator[None]:
    """All rows of the sequence carry the video's time."""
    with with_sigmas(port, lambda sigmas: dict.fromkeys(sigmas, sigmas[port.modalities[0]])):
        yield


@fault(
    "objective",
    "packing",
    catches=[BATCH, TOLD],
    source="hao-ai-lab/FastVideo PR #885; diffusers PR #14355",
    cause="one sample's level for the batch",
)
def the_whole_batch_is_told_the_first_samples_level(port: Port) -> Iterator[None]:
    """One list of levels serves the batch, and every sample is denoised at the level of sample 0."""
    with with_sigmas(port, lambda sigmas: {m: s[:1].expand(len(s)).clone() for m, s in sigmas.items()}):
        yield


@fault("objective", "packing", catches=[NEARBY, TOLD], source="modelscope/DiffSynth-Studio PR #1025", cause="sigma rounded")
def sigma_is_rounded_to_bfloat16(port: Port) -> Iterator[None]:
    """The level is cast to bfloat16 before it is embedded."""
    with with_sigmas(port, lambda sigmas: {m: s.bfloat16().float() for m, s in sigmas.items()}):
        yield


@fault("objective", "packing", catches=[TOLD], source="modelscope/DiffSynth-Studio PR #1025", cause="sigma rounded")
def sigma_is_rounded_to_an_integer_step(port: Port) -> Iterator[None]:
    """The level is rounded to one of a thousand integer steps."""
    with with_sigmas(port, lambda sigmas: {m: (s * 1000).round() / 1000 for m, s in sigmas.items()}):
        yield


@fault("objective", catches=[NEARBY], source="modelscope/DiffSynth-Studio PR #1025", ports=("h3",), cause="sigma rounded")
def the_time_embedding_rounds_its_input(port: Port) -> Iterator[None]:
    """The upstream time embedding casts its input to bfloat16: labels look right, the model cannot tell neighbours apart."""
    with inject.replace(port.actor.time_proj, "forward", lambda original: lambda t: original(t.bfloat16().float())):
        yield


@fault("objective", "vendor", catches=[VENDOR], ports=("h3",))
def text_rows_are_told_that_they_are_clean(port: Port) -> Iterator[None]:
    """Text rows carry the clean level instead of the video's, which they inherit in the released model."""

    def make(original: Any) -> Any:
        def inputs(*args: Any) -> Any:
            arguments = original(*args)
            count = arguments["timestep"].numel()
            arguments["timestep"] = torch.cat([arguments["timestep"], arguments["timestep"].new_ones(1)])
            arguments["timestep_indices"] = arguments["timestep_indices"].clone().index_fill_(0, arguments["text_indices"], count)
            return arguments

        return inputs

    with inject.replace(port, "inputs", make):
        yield


@fault("objective", "vendor", catches=[VENDOR, CLEAN, EULER], ports=("h3",), cause="velocity sign flipped")
def the_scheduler_class_steps_the_other_way(port: Port) -> Iterator[None]:
    """An upgraded scheduler class takes the output to point to the noise, as the usual flow-match scheduler does."""
    from diffusers import MiniMaxH3Scheduler

    def make(original: Any) -> Any:
        return lambda self, model_output, *args, **kwargs: original(self, -model_output, *args, **kwargs)

    with inject.replace(MiniMaxH3Scheduler, "step", make):
        yield


@fault("objective", catches=[BATCH], cause="samples in another order")
def results_come_back_in_another_order(port: Port) -> Iterator[None]:
    """The velocities of a batch are those of its samples, moved on by one."""

    def make(original: Any) -> Any:
        return lambda *args: {m: v.roll(1, 0) for m, v in original(*args).items()}

    with inject.replace(port, "predict_velocity", make):
        yield


def _dropouts(port: Port) -> list[Any]:
    """The dropouts behind attention outputs of the actor's blocks."""
    found = getattr(port, "actor", torch.nn.Module()).named_modules()
    return [module for name, module in found if isinstance(module, torch.nn.Dropout) and name.startswith("transformer_blocks.0.attn")]


def no_dropout(port: Port) -> str:
    return "" if _dropouts(port) else "its actor's blocks have no dropout"


@fault("objective", catches=[SAME], source="huggingface/trl#3234, #3500", unless=no_dropout, cause="randomness in the model")
def dropout_is_active(port: Port) -> Iterator[None]:
    """Dropout is active in the attention output of one block."""
    with inject.replace(_dropouts(port)[0], "forward", lambda original: lambda x: torch.nn.functional.dropout(x, 0.1, training=True)):
        yield


@fault("objective", "vendor", catches=[LONG], source="verl-omni commit b6cd74b4 (#357)", unless=no_condition, cause="prompt truncated")
def the_actor_sees_no_more_than_77_tokens(port: Port) -> Iterator[None]:
    """The actor's copy of the prompt is cut at 77 tokens."""

    def make(original: Any) -> Any:
        def predict(latents: Any, sigmas: Any, conditions: Any) -> Any:
            cut = [other_prompt(port, one, one.prompt_ids[:77]) if len(one.prompt_ids) > 77 else one for one in conditions]
            return original(latents, sigmas, cut)

        return predict

    with inject.replace(port, "predict_velocity", make):
        yield


@fault("objective", "vendor", catches=["conventions::long_sequences_follow_the_vendor"], source="diffusers #13922", ports=["h3"])
def rotary_positions_end_at_120(port: Port) -> Iterator[None]:
    """The actor's rotary clock stops at 120, where a table ends."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed

    here = {"predicting": False}

    def predicting(original: Any) -> Any:
        def predict_velocity(*args: Any) -> Any:
            here["predicting"] = True
            try:
                return original(*args)
            finally:
                here["predicting"] = False

        return predict_velocity

    def make(original: Any) -> Any:
        return lambda self, position_ids: original(self, position_ids.clamp(max=120) if here["predicting"] else position_ids)

    with inject.replace(port, "predict_velocity", predicting), inject.replace(MiniMaxH3RotaryPosEmbed, "forward", make):
        yield


@fault(
    "objective",
    catches=["conventions::samples_with_different_conditions_share_a_batch"],
    source="verl-omni commit 2e08eeff (#25)",
    unless=one_mode,
    cause="one sample's conditions for the batch",
)
def a_mixed_batch_takes_the_first_samples_conditions(port: Port) -> Iterator[None]:
    """Where the samples of a batch have different condition modes, all of them get the first sample's."""

    def make(original: Any) -> Any:
        def predict_velocity(latents: Any, sigmas: Any, conditions: Any) -> Any:
            mixed = len({tuple(one.given) for one in conditions}) > 1
            return original(latents, sigmas, [conditions[0]] * len(conditions) if mixed else conditions)

        return predict_velocity

    with inject.replace(port, "predict_velocity", make):
        yield


@fault(
    "objective",
    "packing",
    catches=[TOLD],
    source="verl-project/verl-omni commit a1139baf",
    unless=one_modality,
    cause="one modality at another's level",
)
def every_modality_is_told_the_first_ones_level(port: Port) -> Iterator[None]:
    """One level serves all modalities, wherever they stand."""
    with with_sigmas(port, lambda sigmas: dict.fromkeys(sigmas, sigmas[port.modalities[0]])):
        yield


@fault("objective", "trained", catches=[TIME], source="verl-project/verl-omni PR #383, commit 786dd36c", ports=("ltx2",), cause="time flipped")
def trainer_and_vendor_share_a_label_that_runs_backwards(port: Port) -> Iterator[None]:
    """The actor itself takes ``1000 − t``, as after an upstream change: vendor's loop and port agree, the weights do not."""

    def make(original: Any) -> Any:
        def forward(*args: Any, timestep: Any, audio_timestep: Any = None, **kwargs: Any) -> Any:
            audio_timestep = timestep if audio_timestep is None else audio_timestep
            return original(*args, timestep=1000 - timestep, audio_timestep=1000 - audio_timestep, **kwargs)

        return forward

    with inject.replace(port.actor, "forward", make):
        yield


@fault("objective", catches=[NEARBY], source="modelscope/DiffSynth-Studio PR #1025", ports=("ltx2",), cause="sigma rounded")
def both_streams_time_embeddings_round_their_input(port: Port) -> Iterator[None]:
    """The upstream time embedding casts its input to bfloat16: labels look right, the model cannot tell neighbours apart."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle

    def make(original: Any) -> Any:
        return lambda self, timestep, *args, **kwargs: original(self, timestep.bfloat16().float(), *args, **kwargs)

    with inject.replace(LTX2AdaLayerNormSingle, "forward", make):
        yield


@fault("objective", "vendor", catches=[VENDOR, CLEAN, EULER], ports=("ltx2",), cause="velocity sign flipped")
def the_flow_match_class_steps_the_other_way(port: Port) -> Iterator[None]:
    """An upgraded scheduler class takes the output to point to the data."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def make(original: Any) -> Any:
        return lambda self, model_output, *args, **kwargs: original(self, -model_output, *args, **kwargs)

    with inject.replace(FlowMatchEulerDiscreteScheduler, "step", make):
        yield


@fault("objective", "vendor", catches=["conventions::long_sequences_follow_the_vendor"], source="diffusers #13922", ports=("ltx2",))
def the_videos_clock_ends_before_the_clip(port: Port) -> Iterator[None]:
    """The actor's video clock stops at a quarter of a second, where a table ends."""

    def make(original: Any) -> Any:
        def inputs(*args: Any) -> Any:
            arguments = original(*args)
            coords = arguments["video_coords"].clone()
            coords[:, 0] = coords[:, 0].clamp(max=0.25)
            return arguments | {"video_coords": coords}

        return inputs

    with inject.replace(port, "inputs", make):
        yield


@fault("objective", "vendor", "condition", catches=["conditions::the_vendors_loop_is_followed_with_given_frames"], ports=("ltx2",), source=CROSS)
def the_streams_are_gated_by_each_others_level(port: Port) -> Iterator[None]:
    """The attention between the streams is modulated by the other stream's level, as in later releases of the model."""

    def make(original: Any) -> Any:
        def inputs(latents: Any, sigmas: Any, *args: Any) -> Any:
            levels = {name: 1000 * sigmas[m].to(port.device)[args[1]] for name, m in (("sigma", "video"), ("audio_sigma", "audio"))}
            return original(latents, sigmas, *args) | levels | {"use_cross_timestep": True}

        return inputs

    with inject.replace(port, "inputs", make):
        yield
