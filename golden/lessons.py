"""What a tiny checkpoint is taught, model by model: inputs, targets and samples in the vendor's own terms.

Convention checks need a model that has learned something, and that was taught by somebody else than the port under test. So nothing here goes through
a port's velocity, layout or grid: inputs come from diffusers' own builders, targets are the vendor's, and samples come from the vendor's own loop. Of
the port, only prompts and given frames are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loudfail.harness import synthetic
from loudfail.harness.actor import FusedPort, VendorStep
from loudfail.harness.case import Case
from loudfail.harness.port import Conditions

Latents = Mapping[str, torch.Tensor]


@dataclass
class Batch:
    """Clean latents of samples of one layout with their conditions, and the noise levels ``(video, audio)`` at which they are trained."""

    latents: dict[str, torch.Tensor]
    conditions: list[Conditions]
    sigmas: dict[str, float]


class Lesson(Protocol):
    """One model's."""

    port: FusedPort

    def levels(self, level: float) -> list[tuple[float, float]]:
        """Noise levels of video and audio at a moment of sampling, ``level`` in [0, 1] unshifted and 1 = noise; the first pair most often."""

    def errors(self, model: Any, batch: Batch, drawn: Latents, told: Mapping[str, float], sign: float) -> dict[str, torch.Tensor]:
        """Mean squared error of the model's raw output against the vendor's target, per modality, given rows left out.

        Args:
            model: the transformer.
            batch: what to noise.
            drawn: the noise.
            told: noise levels that the model is *told*.
            sign: factor on the model's output.
        """

    def rows(self, latents: Latents) -> dict[str, torch.Tensor]:
        """Latents as the model's rows ``(B, rows, width)``, by the vendor's own functions."""

    def denoise(self, model: Any, noise: Latents, calls: int, condition: Conditions) -> list[VendorStep]:
        """One sample of the vendor's own loop."""


def latents_of(lesson: Lesson, rows: Latents, sizes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Inverse of `Lesson.rows` for latent ``sizes`` of one sample, found by sending the numbers 0, 1, 2, … through it."""
    numbers = {m: torch.arange(torch.Size(size).numel()).double().view(1, *size) for m, size in sizes.items()}
    latents = {}
    for modality, order in lesson.rows(numbers).items():
        flat = torch.empty_like(rows[modality]).flatten(1)
        flat[:, order.flatten().long()] = rows[modality].flatten(1)
        latents[modality] = flat.view(-1, *sizes[modality])
    return latents


def find(name: str) -> Lesson:
    """The lesson of a port.

    Raises:
        ValueError: there is none.
    """
    if name not in LESSONS:
        raise ValueError(f"no lesson for {name!r}; there are {', '.join(LESSONS)}")
    lesson: Lesson = LESSONS[name]()
    return lesson


class H3Lesson:
    """MiniMax H3: time ``1 − sigma``, raw output ``x0 − noise``, one packed layout a call."""

    def __init__(self) -> None:
        from loudfail.harness.ports.h3 import H3

        self.port: FusedPort = H3()

    def levels(self, level: float) -> list[tuple[float, float]]:
        from loudfail.harness.ports.h3 import SHIFT

        return [(shifted(level, SHIFT["video"]), shifted(level, SHIFT["audio"])), (shifted(level, 3.0), shifted(level, 1.5))]

    def errors(self, model: Any, batch: Batch, drawn: Latents, told: Mapping[str, float], sign: float) -> dict[str, torch.Tensor]:
        from diffusers import MiniMaxH3Scheduler

        scheduler = MiniMaxH3Scheduler()  # its forward process is t·x0 + (1 − t)·noise, whatever the shift
        mixed = {m: scheduler.scale_noise(clean, 1.0 - batch.sigmas[m], drawn[m]) for m, clean in batch.latents.items()}
        given = batch.conditions[0].extra["given_rows"].shape[0]
        video, audio = model(**self.inputs(mixed, batch.conditions, told), return_dict=False)
        target = self.rows({m: clean - drawn[m] for m, clean in batch.latents.items()})
        return {
            "video": torch.nn.functional.mse_loss(sign * video[:, given:], target["video"]),
            "audio": torch.nn.functional.mse_loss(sign * audio, target["audio"]),
        }

    def inputs(self, latents: Latents, conditions: Sequence[Conditions], sigmas: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """The transformer's arguments for samples of one layout."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep

        from loudfail.harness.ports.h3 import GIVEN_TIME, PATCH, STEREO

        first = conditions[0]
        positions, tags, video, audio, text, given_video, given_audio = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            first.extra["tags"], *latents["video"].shape[2:], latents["audio"].shape[-1], PATCH, STEREO, 2, 0, tuple(first.given)
        )
        time_video, time_audio = 1.0 - sigmas["video"], 1.0 - sigmas["audio"]
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            video, audio, given_video, given_audio, text.numel(), time_video, time_audio, max(time_video, GIVEN_TIME), 1.0
        )
        rows, given = self.rows(latents), torch.stack([condition.extra["given_rows"] for condition in conditions])
        return {
            "hidden_states": torch.cat([given, rows["video"]], dim=1),
            "audio_hidden_states": rows["audio"],
            "encoder_hidden_states": torch.stack([condition.embeds for condition in conditions]),
            "timestep": timestep,
            "timestep_indices": indices,
            "token_tags": tags,
            "position_ids": positions,
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text,
        }

    def rows(self, latents: Latents) -> dict[str, torch.Tensor]:
        """diffusers' patches for video, channel after channel for audio (as its latent step lays them out)."""
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

        from loudfail.harness.ports.h3 import PATCH

        video, audio = latents["video"], latents["audio"]
        patches = patchify_video_latents(video, PATCH)
        return {"video": patches.view(video.shape[0], -1, patches.shape[-1]), "audio": audio.transpose(-2, -1).flatten(1, 2)}

    def denoise(self, model: Any, noise: Latents, calls: int, condition: Conditions) -> list[VendorStep]:
        from loudfail.harness.ports import h3_vendor

        return h3_vendor.denoise(model, noise, calls, condition)


class LTX2Lesson:
    """LTX-2: time ``1000 · sigma``, raw output ``noise − x0``, given frames in front at time 0."""

    def __init__(self) -> None:
        from loudfail.harness.ports.ltx2 import LTX2

        self.port: FusedPort = LTX2()

    def levels(self, level: float) -> list[tuple[float, float]]:
        both = shifted(level, 1.8)  # what a clip of few tokens is shifted by
        return [(both, both), (shifted(level, 3.0), shifted(level, 1.5))]

    def errors(self, model: Any, batch: Batch, drawn: Latents, told: Mapping[str, float], sign: float) -> dict[str, torch.Tensor]:
        mixed = {m: (1 - batch.sigmas[m]) * clean + batch.sigmas[m] * drawn[m] for m, clean in batch.latents.items()}
        first = batch.conditions[0]
        frames = [torch.stack([condition.given[name] for condition in batch.conditions]) for name in first.given]
        whole = {"video": torch.cat([*frames, mixed["video"]], dim=2), "audio": mixed["audio"]}
        rows, target = self.rows(whole), self.rows({m: drawn[m] - clean for m, clean in batch.latents.items()})
        count, given = len(mixed["video"]), rows["video"].shape[1] - target["video"].shape[1]
        text = {m: first.extra[f"{m}_context"].expand(count, -1, -1) for m in ("video", "audio")}  # the samples of a batch have one prompt
        video, audio = model(
            hidden_states=rows["video"],
            audio_hidden_states=rows["audio"],
            encoder_hidden_states=text["video"],
            audio_encoder_hidden_states=text["audio"],
            timestep=1000 * told["video"] * (torch.arange(rows["video"].shape[1]) >= given).expand(count, -1),
            audio_timestep=torch.full((count,), 1000 * told["audio"]),
            num_frames=whole["video"].shape[2],
            height=whole["video"].shape[3],
            width=whole["video"].shape[4],
            audio_num_frames=rows["audio"].shape[1],
            return_dict=False,
        )
        return {
            "video": torch.nn.functional.mse_loss(sign * video[:, given:], target["video"]),
            "audio": torch.nn.functional.mse_loss(sign * audio, target["audio"]),
        }

    def rows(self, latents: Latents) -> dict[str, torch.Tensor]:
        from diffusers import LTX2Pipeline

        return {"video": LTX2Pipeline._pack_latents(latents["video"]), "audio": LTX2Pipeline._pack_audio_latents(latents["audio"])}

    def denoise(self, model: Any, noise: Latents, calls: int, condition: Conditions) -> list[VendorStep]:
        from loudfail.harness.ports import ltx2_vendor

        pipe = self.port._loop(bool(condition.given))  # type: ignore[attr-defined]
        pipe.transformer = model
        return ltx2_vendor.denoise(pipe, noise, calls, condition)


LESSONS: dict[str, Any] = {"h3": H3Lesson, "ltx2": LTX2Lesson}


def shifted(level: float, shift: float) -> float:
    """``shift · level / (1 + (shift − 1) · level)``."""
    return shift * level / (1 + (shift - 1) * level)


def draw(lesson: Lesson, extent: Mapping[str, int], kind: int, count: int, seed: int, requests: int | None) -> Batch:
    """Samples of one class, without levels.

    Args:
        lesson: of the model.
        extent: size of what is generated.
        kind: the class.
        count: samples.
        seed: of the draw.
        requests: the clean first frame is given, beside the clip or in its place as the model has it; the seed of the first sample's request. None:
            nothing is given.
    """
    port = lesson.port
    replaced = requests is not None and port.given_replaces
    shapes = port.shapes(Case(extent=dict(extent) | {"frames": extent["frames"] + replaced}))
    latents = synthetic.sample(shapes, [kind] * count, seed=seed, audio_time=port.time_axis["audio"])
    ids, frames = port.tokenize(synthetic.PROMPTS[kind]), synthetic.first_frame(latents)
    if replaced:
        latents["video"] = latents["video"][:, :, 1:].contiguous()
    if requests is None:
        return Batch(latents, [port.condition(ids)] * count, {})
    return Batch(latents, [port.condition(ids, {"first": frame}, seed=requests + place) for place, frame in enumerate(frames)], {})
