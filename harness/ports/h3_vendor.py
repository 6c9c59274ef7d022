"""MiniMax H3's own sampling loop, diffusers' modular blocks, run on an actor. The oracle of the port; it shares no code with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from loudfail.harness.port import Conditions


@dataclass
class VendorStep:
    """Rows of one sample before and after one step of the vendor's loop, generated rows only, and the vendor's own sigmas."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    sigma: dict[str, torch.Tensor]
    sigma_after: dict[str, torch.Tensor]


@lru_cache(maxsize=1)
def _blocks() -> tuple[Any, list[VendorStep]]:
    """The vendor's blocks from layout to the end of the loop, with a recorder around its scheduler step."""
    from diffusers.modular_pipelines.minimax_h3 import denoise
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (
        MiniMaxH3FL2VAPrepareLatentsStep,
        MiniMaxH3PrepareLatentsStep,
        MiniMaxH3SetTimestepsStep,
    )

    recorded: list[VendorStep] = []

    class RecordedStep(denoise.MiniMaxH3LoopSchedulerStep):
        def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
            given = block_state.num_condition_video_rows
            before = {"video": block_state.latents[given:].clone(), "audio": block_state.audio_latents.clone()}
            components, block_state = super().__call__(components, block_state, i=i, t=t)
            after = {"video": block_state.latents[given:].clone(), "audio": block_state.audio_latents.clone()}
            grids = {"video": components.scheduler.sigmas, "audio": components.audio_scheduler.sigmas}
            recorded.append(VendorStep(before, after, {m: g[i] for m, g in grids.items()}, {m: g[i + 1] for m, g in grids.items()}))
            return components, block_state

    class Loop(denoise.MiniMaxH3DenoiseLoopWrapper):
        block_classes = [denoise.MiniMaxH3LoopDenoiser, RecordedStep]
        block_names = ["denoiser", "update"]

    loop = Loop()
    loop.set_progress_bar_config(disable=True)
    return (MiniMaxH3PrepareLatentsStep(), MiniMaxH3FL2VAPrepareLatentsStep(), MiniMaxH3SetTimestepsStep(), loop), recorded


@lru_cache(maxsize=2)
def _components(actor: Any) -> Any:
    from diffusers import MiniMaxH3Scheduler
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep
    from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseStep
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks

    class Blocks(SequentialPipelineBlocks):
        model_name = "minimax-h3"
        block_classes = [MiniMaxH3SetTimestepsStep, MiniMaxH3DenoiseStep]
        block_names = ["timesteps", "denoise"]

    pipeline = MiniMaxH3ModularPipeline(blocks=Blocks())
    pipeline.update_components(transformer=actor, scheduler=MiniMaxH3Scheduler(), audio_scheduler=MiniMaxH3Scheduler(shift=3.0))
    return pipeline


def denoise(actor: Any, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> list[VendorStep]:
    """Sample once with the vendor's blocks from the given noise; the steps, call by call."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    components = _components(actor)
    (prepare, prepend, timesteps, loop), recorded = _blocks()
    _, frames, height, width = noise["video"].shape
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    *layout, given_video, given_audio = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        condition.extra["tags"], frames, height, width, noise["audio"].shape[-1], components.patch_size, components.audio_channels,
        components.audio_tag, components.video_tag, tuple(condition.given),
    )  # fmt: skip
    state = PipelineState()
    for name, value in zip(names, layout, strict=True):
        state.set(name, value, "denoiser_input_fields")
    for name, value in {
        "num_latent_frames": frames,
        "latent_height": height,
        "latent_width": width,
        "num_audio_latents": noise["audio"].shape[-1],
        "latents": noise["video"][None],
        "audio_latents": noise["audio"],
        "prompt_embeds": condition.embeds[None],
        "num_condition_video_rows": given_video,
        "num_condition_audio_rows": given_audio,
        "num_inference_steps": calls + 1,
        "condition_rows": condition.extra["given_rows"],
    }.items():
        state.set(name, value)
    recorded.clear()
    blocks = [prepare, *([prepend] if given_video else []), timesteps, loop]
    for block in blocks:
        _, state = block(components, state)
    return list(recorded)
