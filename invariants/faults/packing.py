"""Faults of the packed layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port
from loudfail.harness.registry import fault
from loudfail.invariants.faults.conditions import other_place, to_the_model, without_frames

TRIP, MOVES = "packing::unpacking_restores_every_value", "packing::packing_moves_values_and_makes_none"
VENDOR, SEEN = "packing::the_vendors_loop_starts_from_the_noise_it_was_given", "packing::the_model_sees_the_packed_rows_and_nothing_else"
COUNTED, ORDER = "packing::every_row_is_counted_under_its_modality", "packing::rows_stand_in_the_order_of_their_time"
ALONE = "packing::a_samples_layout_does_not_depend_on_its_neighbours"
LOOP = "conventions::the_velocity_is_that_of_the_vendors_loop"


def packed(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the rows after packing."""
    return inject.replace(port, "pack", lambda original: lambda latents: change(original(latents)))


def unpacked(port: Port, change: Any) -> AbstractContextManager[Any]:
    """Change the rows before unpacking."""
    return inject.replace(port, "unpack_rows", lambda original: lambda rows, shapes: original(change(rows), shapes))


def transposed_patch(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exchange the two spatial axes inside each H3 patch: ``[channel, 2, 2]``. Its own inverse."""
    video = rows["video"]
    return dict(rows) | {"video": video.reshape(*video.shape[:-1], -1, 2, 2).transpose(-1, -2).reshape(video.shape)}


@fault("objective", "packing", "vendor", catches=[TRIP, LOOP], ports=("h3",), cause="layout")
def patches_are_packed_with_their_axes_exchanged(port: Port) -> Iterator[None]:
    """Height and width are exchanged inside each patch when packing; shapes agree."""
    with packed(port, transposed_patch):
        yield


@fault("objective", "packing", "vendor", catches=[VENDOR], ports=("h3",), cause="layout")
def patches_are_packed_and_unpacked_with_their_axes_exchanged(port: Port) -> Iterator[None]:
    """Packing and unpacking exchange height and width inside each patch alike, so that the round trip is clean and the model sees another layout."""
    with ExitStack() as stack:
        stack.enter_context(packed(port, transposed_patch))
        stack.enter_context(unpacked(port, transposed_patch))
        yield


@fault("objective", "packing", "vendor", catches=[TRIP], ports=("h3",), cause="layout")
def the_upstream_patchifier_puts_channels_last(port: Port) -> Iterator[None]:
    """An upgraded upstream packing function orders a patch as ``[h, w, channel]``; the port's unpacking does not follow."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    def make(original: Any) -> Any:
        def patchify(latents: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
            rows = original(latents, patch)
            return rows.reshape(rows.shape[0], latents.shape[1], -1).transpose(1, 2).reshape(rows.shape)

        return patchify

    with inject.replace(before_denoise, "patchify_video_latents", make):
        yield


@fault("objective", "packing", "vendor", catches=[VENDOR, ORDER], ports=("h3",), cause="layout")
def audio_rows_are_time_major(port: Port) -> Iterator[None]:
    """Audio rows alternate between the stereo channels, in packing and unpacking alike, while the layout has one channel after the other."""

    def interleave(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        audio = rows["audio"]
        return dict(rows) | {"audio": audio.view(audio.shape[0], 2, -1, audio.shape[-1]).transpose(1, 2).reshape(audio.shape)}

    def separate(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        audio = rows["audio"]
        return dict(rows) | {"audio": audio.reshape(audio.shape[0], -1, 2, audio.shape[-1]).transpose(1, 2).reshape(audio.shape)}

    with ExitStack() as stack:
        stack.enter_context(packed(port, interleave))
        stack.enter_context(unpacked(port, separate))
        yield


@fault("objective", "packing", catches=[TRIP], cause="rows rolled")
def rows_are_rolled_by_one_when_packed(port: Port) -> Iterator[None]:
    """Every row of a modality holds what belongs to its neighbour."""
    with packed(port, lambda rows: {m: r.roll(1, 1) for m, r in rows.items()}):
        yield


@fault("objective", "packing", "vendor", catches=[SEEN, LOOP], ports=("h3", "ltx2"), cause="rows rolled")
def rows_enter_the_model_off_by_one(port: Port) -> Iterator[None]:
    """The packed video rows are right, but enter the model one place later."""

    def make(original: Any) -> Any:
        def inputs(latents: Any, sigmas: Any, conditions: Any, members: Any) -> Any:
            arguments = original(latents, sigmas, conditions, members)
            rows, given = arguments["hidden_states"], port.first_row(conditions[members[0]])
            return arguments | {"hidden_states": torch.cat([rows[:, :given], rows[:, given:].roll(1, 1)], dim=1)}

        return inputs

    with inject.replace(port, "inputs", make):
        yield


@fault("objective", "packing", catches=[TRIP, MOVES], cause="latents rounded")
def packing_rounds_values(port: Port) -> Iterator[None]:
    """Latents are rounded to bfloat16 on their way into rows."""
    with packed(port, lambda rows: {m: r.bfloat16().float() for m, r in rows.items()}):
        yield


@fault("objective", "packing", catches=[TRIP, MOVES], source="verl-project/verl-omni PR #568, RFC #551", cause="one sample's rows for the batch")
def every_sample_is_packed_from_the_first(port: Port) -> Iterator[None]:
    """All samples of a batch get the rows of sample 0."""
    with packed(port, lambda rows: {m: r[:1].expand_as(r).contiguous() for m, r in rows.items()}):
        yield


@fault("objective", "packing", catches=[ORDER], ports=("h3",), cause="time runs backwards")
def the_layout_runs_backwards_in_time(port: Port) -> Iterator[None]:
    """The upstream layout gives video frames their times in reverse order, for trainer and vendor alike."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    from loudfail.harness.ports import h3

    def make(original: Any) -> Any:
        return lambda frames, origin: original(frames, origin).flip(0)

    with inject.replace(before_denoise, "_temporal_position_grid", make, clear=(h3.build_layout,)):
        yield


@fault("objective", "packing", catches=[ORDER], ports=("h3",), cause="clock starts late")
def the_videos_clock_starts_after_the_audio(port: Port) -> Iterator[None]:
    """Video frames are placed one unit later than the audio that belongs to them."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    from loudfail.harness.ports import h3

    def make(original: Any) -> Any:
        return lambda frames, origin: original(frames, origin + 1)

    with inject.replace(before_denoise, "_temporal_position_grid", make, clear=(h3.build_layout,)):
        yield


@fault("objective", "packing", catches=[ALONE], source="vllm-project/vllm-omni#4443, PR #4474", ports=("h3",), cause="positions depend on the batch")
def media_positions_start_after_the_longest_prompt(port: Port) -> Iterator[None]:
    """Rotary times of audio and video start after the longest prompt of the batch, not after the sample's own."""

    def make(original: Any) -> Any:
        def inputs(latents: Any, sigmas: Any, conditions: Any, members: list[int]) -> Any:
            arguments = original(latents, sigmas, conditions, members)
            own = arguments["text_indices"].numel()
            arguments["position_ids"] = arguments["position_ids"].clone()
            arguments["position_ids"][own:, 0] += max(len(c.embeds) for c in conditions) - own
            return arguments

        return inputs

    with inject.replace(port, "inputs", make):
        yield


@fault("objective", "packing", catches=[COUNTED], source="mosaicml/diffusion PR #147, #149", ports=("h3",), cause="prompt padded")
def prompts_are_padded_to_a_fixed_width(port: Port) -> Iterator[None]:
    """Prompt embeddings are padded with zero rows, which the model, having no mask, takes for text."""

    def make(original: Any) -> Any:
        def predict(latents: Any, sigmas: Any, conditions: Any) -> Any:
            from dataclasses import replace

            padded = []
            for c in conditions:
                zeros = c.embeds.new_zeros(3, c.embeds.shape[1])
                padded.append(
                    replace(
                        c,
                        embeds=torch.cat([c.embeds, zeros]),
                        extra=dict(c.extra, tags=torch.cat([c.extra["tags"], torch.ones(3, dtype=torch.long)])),
                    )
                )
            return original(latents, sigmas, padded)

        return predict

    with inject.replace(port, "predict_velocity", make):
        yield


@fault("objective", "packing", catches=[COUNTED], source="verl-project/verl-omni commit b6cd74b4, PR #357", ports=("h3",), cause="prompt truncated")
def the_actor_sees_the_prompt_without_its_tail(port: Port) -> Iterator[None]:
    """A pad amount that turns negative crops the embeddings that the actor sees."""

    def make(original: Any) -> Any:
        def predict(latents: Any, sigmas: Any, conditions: Any) -> Any:
            from dataclasses import replace

            cut = [replace(c, embeds=c.embeds[:3], extra=dict(c.extra, tags=c.extra["tags"][:3])) for c in conditions]
            return original(latents, sigmas, cut)

        return predict

    with inject.replace(port, "predict_velocity", make):
        yield


def _video_rows(change: Any) -> AbstractContextManager[Any]:
    """Change what the upstream pipelines pack video latents ``(B, C, F, H, W)`` from, for trainer and vendor alike."""
    from diffusers import LTX2Pipeline

    return inject.replace(LTX2Pipeline, "_pack_latents", lambda original: lambda latents, *args: original(change(latents), *args))


@fault("objective", "packing", "vendor", catches=[TRIP], ports=("ltx2",), cause="layout")
def the_upstream_packing_exchanges_height_and_width(port: Port) -> Iterator[None]:
    """An upgraded upstream packing function goes down the columns of a frame; the port's unpacking does not follow."""
    with _video_rows(lambda latents: latents.transpose(-1, -2)):
        yield


@fault("objective", "packing", "vendor", catches=[TRIP, LOOP], ports=("ltx2",), cause="layout")
def frames_are_packed_down_their_columns(port: Port) -> Iterator[None]:
    """Video rows go down the columns of a frame when packing; shapes agree."""

    def make(original: Any) -> Any:
        return lambda latents: original(dict(latents, video=latents["video"].transpose(-1, -2)))

    with inject.replace(port, "pack", make):
        yield


@fault("objective", "packing", "vendor", catches=[VENDOR], ports=("ltx2",), cause="layout")
def mel_bins_come_before_channels(port: Port) -> Iterator[None]:
    """Packing and unpacking put an audio row's mel bins before its channels alike, so that the round trip is clean and the model sees another row."""
    channels, bins = port.audio_shape

    def turn(first: int) -> Any:
        return lambda rows: dict(rows, audio=rows["audio"].unflatten(2, (first, -1)).transpose(2, 3).flatten(2))

    with ExitStack() as stack:
        stack.enter_context(packed(port, turn(channels)))
        stack.enter_context(unpacked(port, turn(bins)))
        yield


def _clock(stream: str, change: Any) -> Any:
    """Change a stream's times in the upstream model's own clock, for trainer and vendor alike."""
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

    def make(original: Any) -> Any:
        def coords(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = original(*args, **kwargs).clone()
            result[:, 0] = change(result[:, 0])
            return result

        return coords

    return inject.replace(LTX2AudioVideoRotaryPosEmbed, f"prepare_{stream}_coords", make)


@fault("objective", "packing", catches=[ORDER], ports=("ltx2",), cause="time runs backwards")
def the_videos_clock_runs_backwards(port: Port) -> Iterator[None]:
    """The upstream model gives video frames their times in reverse order, for trainer and vendor alike."""
    with _clock("video", lambda times: times.flip(1)):
        yield


@fault("objective", "packing", catches=[ORDER], ports=("ltx2",), cause="clock starts late")
def the_audios_clock_starts_late(port: Port) -> Iterator[None]:
    """Audio is placed a tenth of a second later than the video that belongs to it."""
    with _clock("audio", lambda times: times + 0.1):
        yield


@fault(
    "objective",
    "packing",
    "condition",
    catches=[COUNTED],
    source="verl-project/verl-omni RFC #396",
    unless=other_place,
    cause="given frames dropped",
)
def given_frames_have_no_rows(port: Port) -> Iterator[None]:
    """Given frames are part of the conditions and of no row."""
    with to_the_model(port, lambda conditions: [without_frames(one) for one in conditions]):
        yield


@fault(
    "objective", "packing", catches=[ALONE], source="vllm-project/vllm-omni#4443, PR #4474", ports=("ltx2",), cause="positions depend on the batch"
)
def clocks_go_on_from_sample_to_sample(port: Port) -> Iterator[None]:
    """The audio of each sample of a batch begins a second after that of the sample before."""

    def make(original: Any) -> Any:
        def inputs(*args: Any) -> Any:
            arguments = original(*args)
            coords = arguments["audio_coords"]
            return arguments | {"audio_coords": coords + torch.arange(len(coords)).view(-1, 1, 1, 1).to(coords)}

        return inputs

    with inject.replace(port, "inputs", make):
        yield
