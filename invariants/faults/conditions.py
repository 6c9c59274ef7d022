"""Faults of given frames."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.case import smallest
from loudfail.harness.port import Port
from loudfail.harness.registry import fault

SAME, CLEAN = "conditions::given_rows_are_the_same_at_every_level_and_call", "conditions::given_rows_hold_the_clean_frames_of_their_own_sample"
TOLD, LOSS = "conditions::given_rows_are_told_that_they_are_clean", "conditions::the_loss_reaches_generated_rows_and_no_given_row"
ENDS, ANCHORS = "conditions::first_and_last_stand_at_the_ends_of_the_clip", "conditions::each_request_keeps_its_own_anchors"
HEARD, VENDOR = "conditions::the_given_frames_are_heard_in_every_modality", "conditions::the_vendors_loop_is_followed_with_given_frames"
ROLLOUT = "conditions::the_rollout_treats_given_frames_as_the_vendor_does"
AS_VENDOR = "conditions::given_frames_condition_the_model_as_in_the_vendors_pipeline"
SHOWN = "conditions::the_rollouts_encoder_is_shown_the_given_frames"
CONTRACT = "verl-project/verl-omni RFC #396, PR #401, PR #448"


#: Ports whose video input holds the given rows first.
IN_FRONT = ("h3", "ltx2")


def with_inputs(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the arguments of the transformer: ``change(arguments, given rows, sigmas, members) -> None``."""

    def make(original: Any) -> Any:
        def inputs(latents: Any, sigmas: Any, conditions: Any, members: Any) -> Any:
            arguments = original(latents, sigmas, conditions, members)
            change(arguments, port.first_row(conditions[members[0]]), sigmas, members)
            return arguments

        return inputs

    return inject.replace(port, "inputs", make)


def with_frames_of(condition: Any, other: Any) -> Any:
    """Conditions with another sample's given frames; ``given_rows`` holds them as rows where a port has such."""
    rows = {name: other.extra[name] for name in ("given_rows",) if name in other.extra}
    return replace(condition, given=other.given, extra=dict(condition.extra, **rows))


def without_frames(condition: Any) -> Any:
    """Conditions in which nothing is given."""
    rows = {name: condition.extra[name][:0] for name in ("given_rows",) if name in condition.extra}
    return replace(condition, given={}, extra=dict(condition.extra, **rows))


def with_noise(condition: Any) -> Any:
    """Conditions whose given frames are held at a level of 0.5, always with the same noise."""

    def mixed(x: Any) -> Any:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(int(1000 * float(x.abs().sum()))))
        return 0.5 * x + 0.5 * noise.to(x)

    rows = {name: mixed(condition.extra[name]) for name in ("given_rows",) if name in condition.extra}
    return replace(condition, given={n: mixed(v) for n, v in condition.given.items()}, extra=dict(condition.extra, **rows))


@contextmanager
def to_the_model(port: Port, change: Any) -> Iterator[None]:
    """Change the conditions of every call of the actor: ``change(conditions) -> conditions``, once where one method of the port calls another."""
    inside = [False]

    def make(original: Any) -> Any:
        def call(latents: Any, sigmas: Any, conditions: Any) -> Any:
            if inside[0]:
                return original(latents, sigmas, conditions)
            inside[0] = True
            try:
                return original(latents, sigmas, change(conditions))
            finally:
                inside[0] = False

        return call

    with inject.replace(port, "predict_velocity", make), inject.replace(port, "observe", make):
        yield


def other_place(port: Port) -> str:
    """Why a change of the given frames of conditions is none of what the model gets."""
    if not any(port.givens):
        return "nothing can be given to it"
    case = smallest(port, given=max(port.givens, key=len))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with torch.no_grad():
        right, noisy = (port.predict_velocity(latents, sigmas, c) for c in (conditions, [with_noise(one) for one in conditions]))
    same = all(torch.equal(right[m], noisy[m]) for m in right)
    return "the frames that its model gets are not those of Conditions.given" if same else ""


@fault("objective", "packing", "condition", catches=[CLEAN], source=CONTRACT, unless=other_place, cause="given frames noised")
def given_frames_are_held_at_a_level_of_their_own(port: Port) -> Iterator[None]:
    """Given frames are mixed with noise at one level, whatever that of the generated ones, with the same noise at every call."""
    with to_the_model(port, lambda conditions: [with_noise(one) for one in conditions]):
        yield


@fault("objective", "condition", "vendor", catches=[SAME, CLEAN, VENDOR], source=CONTRACT, ports=IN_FRONT, cause="given frames noised")
def given_frames_are_noised_with_the_rest(port: Port) -> Iterator[None]:
    """Given rows are mixed with noise at the level of the generated rows."""

    def change(arguments: dict[str, Any], given: int, sigmas: Any, members: list[int]) -> None:
        rows = arguments["hidden_states"].clone()
        sigma = float(sigmas["video"][members[0]])
        noise = torch.randn(rows[:, :given].shape, generator=torch.Generator().manual_seed(0)).to(rows)
        rows[:, :given] = (1 - sigma) * rows[:, :given] + sigma * noise
        arguments["hidden_states"] = rows

    with with_inputs(port, change):
        yield


@fault(
    "objective",
    "condition",
    "packing",
    catches=[SAME, "conventions::the_same_call_gives_the_same_velocity"],
    source=CONTRACT,
    ports=IN_FRONT,
    cause="randomness in the model",
)
def given_frames_get_new_noise_at_every_call(port: Port) -> Iterator[None]:
    """The small noise of given rows is drawn anew at every call instead of being kept."""
    generator = torch.Generator().manual_seed(0)

    def change(arguments: dict[str, Any], given: int, sigmas: Any, members: list[int]) -> None:
        rows = arguments["hidden_states"].clone()
        rows[:, :given] += 1e-3 * torch.randn(rows[:, :given].shape, generator=generator).to(rows)
        arguments["hidden_states"] = rows

    with with_inputs(port, change):
        yield


@fault(
    "objective",
    "condition",
    "vendor",
    catches=[TOLD, VENDOR],
    source="NVlabs/FastGen PR #26; " + CONTRACT,
    ports=("h3",),
    cause="given rows told the generated level",
)
def given_rows_are_told_the_level_of_generated_rows(port: Port) -> Iterator[None]:
    """The clean anchor is labelled with the noisy rows' level."""

    def change(arguments: dict[str, Any], given: int, sigmas: Any, members: list[int]) -> None:
        indices = arguments["timestep_indices"].clone()
        video = arguments["video_indices"]
        indices[video] = int(indices[video[-1]])
        arguments["timestep_indices"] = indices

    with with_inputs(port, change):
        yield


@fault(
    "objective", "condition", "packing", catches=[TOLD], source="NVlabs/FastGen PR #26", ports=("h3",), cause="given rows told the generated level"
)
def the_upstream_row_times_ignore_given_rows(port: Port) -> Iterator[None]:
    """The upstream function that assigns a time to every row gives given rows the video's, for trainer and vendor alike."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

    def make(original: Any) -> Any:
        return lambda video, audio, given_video, given_audio, text, t_video, t_audio, *given: original(
            video, audio, given_video, given_audio, text, t_video, t_audio, t_video, 1.0
        )

    with inject.replace(MiniMaxH3SetTimestepsStep, "build_row_timesteps", make):
        yield


@fault("objective", "condition", "vendor", catches=[HEARD, CLEAN, ENDS, VENDOR], source=CONTRACT, unless=other_place, cause="given frames dropped")
def given_frames_are_dropped(port: Port) -> Iterator[None]:
    """Given frames are left out of the sequence: the model generates from the prompt alone."""
    with to_the_model(port, lambda conditions: [without_frames(c) for c in conditions]):
        yield


@fault("objective", "condition", "vendor", catches=[HEARD, CLEAN, VENDOR], source=CONTRACT, ports=IN_FRONT, cause="given frames black")
def given_frames_are_black(port: Port) -> Iterator[None]:
    """Given rows have their place and label but hold zeros."""

    def change(arguments: dict[str, Any], given: int, sigmas: Any, members: list[int]) -> None:
        rows = arguments["hidden_states"].clone()
        rows[:, :given] = 0
        arguments["hidden_states"] = rows

    with with_inputs(port, change):
        yield


@fault(
    "objective",
    "condition",
    "vendor",
    catches=[CLEAN, VENDOR],
    source="verl-project/verl-omni commit 2e08eeff, #25",
    unless=other_place,
    cause="another sample's frames",
)
def given_frames_belong_to_the_next_sample(port: Port) -> Iterator[None]:
    """Inside a batch, each sample gets its neighbour's given frames."""

    def turned(conditions: Any) -> Any:
        return [with_frames_of(c, n) for c, n in zip(conditions, [*conditions[1:], conditions[0]], strict=True)]

    with to_the_model(port, turned):
        yield


def anchored(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the anchors that the upstream layout is built with."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    from loudfail.harness.ports import h3

    def make(original: Any) -> Any:
        return lambda *args: original(*args[:-1], change(args[-1]))

    return inject.replace(MiniMaxH3PrepareLayoutStep, "build_packed_sequence", make, clear=(h3.build_layout,))


@fault("objective", "condition", "packing", catches=[ENDS], source=CONTRACT, ports=("h3",), cause="frames at the wrong end")
def first_and_last_are_exchanged(port: Port) -> Iterator[None]:
    """The upstream layout anchors the first frame at the end and the last at the beginning, for trainer and vendor alike."""
    with anchored(port, lambda anchors: tuple({"first": "last", "last": "first"}[a] for a in anchors)):
        yield


@fault(
    "objective",
    "condition",
    "packing",
    catches=[ENDS, ANCHORS],
    source="AIMixer/ComfyUI_MiniMaxH3_Director#193, #215",
    ports=("h3",),
    cause="frames at the wrong end",
)
def anchors_go_by_their_index_in_the_list(port: Port) -> Iterator[None]:
    """The first entry of the list is anchored at the first frame, whatever its name: {last} alone pins the beginning."""
    with anchored(port, lambda anchors: ("first", "last")[: len(anchors)]):
        yield


@fault("objective", "condition", "packing", catches=[LOSS], source=CONTRACT, ports=IN_FRONT)
def given_rows_are_taken_for_generated_ones(port: Port) -> Iterator[None]:
    """The output is sliced from its beginning, where the given rows are, so that they are in the velocity and the last generated rows are not."""

    def cut(original: Any) -> Any:
        def unpack(rows: Any, shapes: Any) -> Any:
            wanted = torch.Size(shapes["video"]).numel() // rows["video"].shape[-1]
            return original(dict(rows, video=rows["video"][:, :wanted]), shapes)

        return unpack

    with ExitStack() as stack:
        stack.enter_context(inject.replace(port, "first_row", lambda original: lambda condition: 0))
        stack.enter_context(inject.replace(port, "unpack_rows", cut))
        yield


@fault("objective", "condition", "packing", catches=[LOSS], source=CONTRACT, ports=IN_FRONT)
def the_loss_includes_given_rows(port: Port) -> Iterator[None]:
    """The output of given rows leaks into the velocity of the generated frame beside it."""

    def mix(original: Any) -> Any:
        def predict(latents: Any, sigmas: Any, conditions: Any) -> Any:
            seen: list[torch.Tensor] = []
            handle = port.actor.register_forward_hook(lambda module, args, output: seen.append(output[0]))
            try:
                velocity = original(latents, sigmas, conditions)
            finally:
                handle.remove()
            given = torch.stack([output[:, : 1 if any(c.given for c in conditions) else 0].mean() for output in seen]).sum()
            return dict(velocity, video=velocity["video"] + 0.01 * given.to(velocity["video"].device))

        return predict

    with inject.replace(port, "predict_velocity", mix):
        yield


def _given_told_the_videos_time() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch

    def make(original: Any) -> Any:
        return lambda self, timesteps, **kwargs: original(self, timesteps, **(kwargs | {"imgvid_cond_timestep": kwargs["t_video"]}))

    return inject.replace(MiniMaxH3DenoiseBranch, "fill_timesteps", make)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source="NVlabs/FastGen PR #26", ports=("h3",))
def the_rollout_tells_given_rows_the_videos_time(port: Port) -> Iterator[None]:
    """The rollout's upstream branch labels given rows with the level of the generated ones."""
    with inject.in_ranks(port, _given_told_the_videos_time):
        yield


def _anchored_at_the_other_end() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.minimax_h3 import packed_sequence

    def make(original: Any) -> Any:
        def sequence(**arguments: Any) -> Any:
            indices = arguments.get("keyframe_frame_indices")
            return original(**(arguments | {"keyframe_frame_indices": [0, -1][: len(indices)] if indices else None}))

        return sequence

    return inject.replace(packed_sequence, "minimax_h3_packed_sequence", make)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source="NVIDIA/TensorRT-LLM PR #18733 (review)", ports=("h3",), exact=True)
def the_rollout_anchors_by_the_index_in_the_list(port: Port) -> Iterator[None]:
    """The rollout anchors a lone last frame at the beginning."""
    with inject.in_ranks(port, _anchored_at_the_other_end):
        yield


def _denoised_along() -> AbstractContextManager[Any]:
    from vllm_omni.diffusion.models.minimax_h3 import denoise_loop

    def make(original: Any) -> Any:
        def forward_kwargs(self: Any, *, video_rows: torch.Tensor, t_video: float, **kwargs: Any) -> Any:
            rows = video_rows.clone()
            rows[~self.update_mask_dev] *= t_video
            return original(self, video_rows=rows, t_video=t_video, **kwargs)

        return forward_kwargs

    return inject.replace(denoise_loop.MiniMaxH3DenoiseBranch, "forward_kwargs", make)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source=CONTRACT, ports=("h3",))
def the_rollout_does_not_restore_given_frames(port: Port) -> Iterator[None]:
    """The rollout's given rows are scaled along with the schedule instead of being restored at every step."""
    with inject.in_ranks(port, _denoised_along):
        yield


def other_pixels(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change given frames on their way into the video autoencoder, for trainer and rollout alike."""
    return inject.replace(port, "encode_frame", lambda original: lambda image: original(change(image).copy()))


@fault("objective", "condition", "reference", catches=[AS_VENDOR], ports=IN_FRONT)
def keyframes_have_red_and_blue_exchanged(port: Port) -> Iterator[None]:
    """Keyframes are read as BGR, as OpenCV gives them."""
    with other_pixels(port, lambda image: image[..., ::-1]):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], ports=IN_FRONT)
def keyframes_are_off_by_one_row(port: Port) -> Iterator[None]:
    """Keyframes are shifted by one row of pixels, as by a crop that is off by one."""
    with other_pixels(port, lambda image: image[[-1, *range(len(image) - 1)]]):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], ports=IN_FRONT)
def keyframes_are_mirrored(port: Port) -> Iterator[None]:
    """Keyframes are flipped from left to right by an augmentation that the clip does not get."""
    with other_pixels(port, lambda image: image[:, ::-1]):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], ports=IN_FRONT, cause="latents not normalized")
def keyframe_latents_are_not_normalized(port: Port) -> Iterator[None]:
    """Keyframe latents are used as the autoencoder gives them, without its latent statistics."""

    def make(original: Any) -> Any:
        def encode(image: Any) -> torch.Tensor:
            mean, std = (torch.as_tensor(values).view(-1, 1, 1, 1) for values in port.latent_statistics())
            return original(image) * std + mean

        return encode

    with inject.replace(port, "encode_frame", make):
        yield


def other_pictures(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the pictures that the trainer's text encoder is shown: ``change(name → picture)``."""

    def make(original: Any) -> Any:
        return lambda ids, images=None: original(ids, change(images) if images else images)

    return inject.replace(port, "present", make)


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source="AIMixer/ComfyUI_MiniMaxH3_Director#193, #215", ports=("h3",))
def the_encoder_is_shown_the_frames_in_another_order(port: Port) -> Iterator[None]:
    """The text encoder sees the last frame before the first."""
    with other_pictures(port, lambda images: dict(reversed(images.items()))):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source=CONTRACT, ports=("h3",))
def the_encoder_is_not_shown_the_frames(port: Port) -> Iterator[None]:
    """The prompt is presented as in text to video, though frames are given."""
    with other_pictures(port, lambda images: None):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], ports=("h3",))
def the_encoder_is_shown_mirrored_frames(port: Port) -> Iterator[None]:
    """The text encoder sees the frames flipped from left to right."""
    with other_pictures(port, _mirrored):
        yield


def _mirrored(images: Any) -> Any:
    return {name: image[:, ::-1].copy() for name, image in images.items()}


def other_conditions(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change what `H3.condition` returns, for trainer and rollout alike."""
    return inject.replace(port, "condition", lambda original: lambda *args, **kwargs: change(original(*args, **kwargs)))


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source=CONTRACT, ports=("h3",))
def vision_rows_are_tagged_as_text(port: Port) -> Iterator[None]:
    """The rows of a vision block are tagged as text, so that they get the text's modulation."""
    with other_conditions(port, lambda c: replace(c, extra=c.extra | {"tags": torch.ones_like(c.extra["tags"])})):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source=CONTRACT, ports=("h3",))
def given_frames_are_mixed_with_ten_times_the_noise(port: Port) -> Iterator[None]:
    """Given frames are held at t = 0.99 and not at 0.999."""
    with inject.replace(port.schedulers["video"], "scale_noise", lambda original: lambda sample, time, noise: original(sample, 0.99, noise)):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source=CONTRACT, ports=("h3",))
def given_frames_get_no_noise(port: Port) -> Iterator[None]:
    """Given frames are perfectly clean, though the model is told that they are not quite."""
    with inject.replace(port.schedulers["video"], "scale_noise", lambda original: lambda sample, time, noise: sample):
        yield


@fault("objective", "condition", "reference", catches=[AS_VENDOR], source=CONTRACT, ports=("h3",))
def given_frames_of_all_samples_get_the_same_noise(port: Port) -> Iterator[None]:
    """The noise of given frames is drawn from one seed, whatever the request's."""
    with inject.replace(port, "condition", lambda original: lambda ids, given=None, seed=0, images=None: original(ids, given, 7, images)):
        yield


def _rollout_shown(how: str) -> AbstractContextManager[Any]:
    from loudfail.harness.ports import h3_text

    change = {"none": lambda images: [], "mirrored": lambda images: [i[:, ::-1].copy() for i in images], "reversed": lambda images: images[::-1]}[how]
    return inject.replace(h3_text, "rollout_encode", lambda original: lambda rank, ids, images=(): original(rank, ids, change(images)))


@fault("prompt", "presentation", "reference", "engine", catches=[SHOWN], source=CONTRACT, ports=("h3",))
def the_rollout_is_not_shown_the_frames(port: Port) -> Iterator[None]:
    """The rollout's text encoder gets the prompt alone, though frames are given."""
    with inject.in_ranks(port, _rollout_shown, "none"):
        yield


@fault("prompt", "presentation", "reference", "engine", catches=[SHOWN], ports=("h3",))
def the_rollout_is_shown_mirrored_frames(port: Port) -> Iterator[None]:
    """The rollout's text encoder sees the frames flipped from left to right."""
    with inject.in_ranks(port, _rollout_shown, "mirrored"):
        yield


@fault("prompt", "presentation", "reference", "engine", catches=[SHOWN], source="AIMixer/ComfyUI_MiniMaxH3_Director#193, #215", ports=("h3",))
def the_rollout_is_shown_the_frames_in_another_order(port: Port) -> Iterator[None]:
    """The rollout's text encoder sees the last frame before the first."""
    with inject.in_ranks(port, _rollout_shown, "reversed"):
        yield


@fault(
    "objective",
    "condition",
    "vendor",
    catches=[TOLD, VENDOR],
    source="NVlabs/FastGen PR #26; " + CONTRACT,
    ports=("ltx2",),
    cause="given rows told the generated level",
)
def given_tokens_are_told_the_level_of_generated_ones(port: Port) -> Iterator[None]:
    """Every video token carries the sampling level, the clean first frame's too."""

    def change(arguments: dict[str, Any], given: int, sigmas: Any, members: list[int]) -> None:
        arguments["timestep"] = 1000 * sigmas["video"][members].to(arguments["timestep"])

    with with_inputs(port, change):
        yield


@fault(
    "objective", "condition", "reference", catches=[AS_VENDOR], source="diffusers 0.40.0 resolve_default_image_crf; vllm-omni 0.30.0", ports=("ltx2",)
)
def the_first_frame_is_not_compressed(port: Port) -> Iterator[None]:
    """The first frame goes into the autoencoder as it is; the model was trained on frames that had been compressed as video."""
    from diffusers.pipelines.ltx2 import utils

    from loudfail.harness.ports import ltx2_media

    def make(original: Any) -> Any:
        def encode(vae: Any, pipe: Any, image: Any) -> Any:
            with inject.replace(utils, "apply_image_conditioning_crf", lambda _: lambda image, crf: image):
                return original(vae, pipe, image)

        return encode

    with inject.replace(ltx2_media, "encode_frame", make):
        yield


@fault("objective", "condition", catches=[ENDS], ports=("ltx2",))
def the_given_frame_is_appended(port: Port) -> Iterator[None]:
    """The upstream clock gives the first frame of the sequence the time of the last, for trainer and vendor alike."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

    def make(original: Any) -> Any:
        def coords(self: Any, batch: int, frames: int, height: int, width: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            return original(self, batch, frames, height, width, *args, **kwargs).roll(-height * width, 2)

        return coords

    with inject.replace(LTX2AudioVideoRotaryPosEmbed, "prepare_video_coords", make):
        yield


def _conditioning() -> Any:
    from vllm_omni.diffusion.models.ltx2.ltx2_conditioning import LTXI2VConditioningMixin

    return LTXI2VConditioningMixin


def _tokens_told_the_clips_level() -> AbstractContextManager[Any]:
    def make(original: Any) -> Any:
        return lambda self, ts, *args, **kwargs: original(self, ts, *args, **kwargs) | {"timestep": ts}

    return inject.replace(_conditioning(), "_denoise_timestep_kwargs", make)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source="NVlabs/FastGen PR #26", ports=("ltx2",))
def the_rollout_tells_given_tokens_the_clips_level(port: Port) -> Iterator[None]:
    """The rollout's upstream conditioning labels the first frame with the level of the generated ones."""
    with inject.in_ranks(port, _tokens_told_the_clips_level):
        yield


def _faded() -> AbstractContextManager[Any]:
    def make(original: Any) -> Any:
        def step(self: Any, velocity: Any, latents: Any, index: int, frames: int, height: int, width: int) -> Any:
            after = original(self, velocity, latents, index, frames, height, width).clone()
            after[:, : height * width] *= self.scheduler.sigmas[index + 1] / self.scheduler.sigmas[index]
            return after

        return step

    return inject.replace(_conditioning(), "_step_video_latents_i2v", make)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source=CONTRACT, ports=("ltx2",))
def the_rollout_scales_the_given_frame(port: Port) -> Iterator[None]:
    """The rollout's upstream step scales the first frame along with the schedule instead of keeping it."""
    with inject.in_ranks(port, _faded):
        yield


def _gated_by_the_other_stream() -> AbstractContextManager[Any]:
    from loudfail.harness.ports import ltx2_rollout

    def make(original: Any) -> Any:
        return lambda video, audio: {"timestep": video, "audio_timestep": audio, "sigma": _level(video), "audio_sigma": _level(audio)}

    return inject.replace(ltx2_rollout, "levels", make)


def _level(told: torch.Tensor) -> torch.Tensor:
    return told if told.ndim == 1 else told.amax(dim=1)


@fault("objective", "engine", "condition", "vendor", catches=[ROLLOUT], source="vllm-omni 0.30.0 ltx2_transformer; diffusers 0.40.0", ports=("ltx2",))
def the_rollouts_streams_are_gated_by_each_others_level(port: Port) -> Iterator[None]:
    """The rollout's gates between the streams take the other stream's level, as the engine does by itself: the first frame is heard by it too."""
    with inject.in_ranks(port, _gated_by_the_other_stream):
        yield
