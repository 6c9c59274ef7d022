"""MiniMax H3's own conditioning and sampling loop, diffusers' modular blocks. The oracle of the port; it shares no code with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch

from loudfail.harness.actor import VendorStep
from loudfail.harness.port import Conditions


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

    steps = {"timesteps": MiniMaxH3SetTimestepsStep, "denoise": MiniMaxH3DenoiseStep}
    return _pipeline(steps, transformer=actor, scheduler=MiniMaxH3Scheduler(), audio_scheduler=MiniMaxH3Scheduler(shift=3.0))


def _pipeline(steps: Mapping[str, Any], **components: Any) -> Any:
    """The vendor's pipeline of some of its blocks, by name, with components from memory."""
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks

    class Blocks(SequentialPipelineBlocks):
        model_name = "minimax-h3"
        block_classes = list(steps.values())
        block_names = list(steps)

    pipeline = MiniMaxH3ModularPipeline(blocks=Blocks())
    pipeline.update_components(**components)
    return pipeline


class Conditioner:
    """The vendor's way from a prompt string and keyframes to what its transformer is conditioned on.

    Args:
        vae: called for the video autoencoder when the first keyframe comes.
        encoders: ``text_encoder``, ``tokenizer`` and ``processor``.
    """

    def __init__(self, vae: Callable[[], Any], **encoders: Any) -> None:
        from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3FL2VATextEncoderStep, MiniMaxH3TextEncoderStep

        self.vae = vae
        self.text = _pipeline({"text": MiniMaxH3TextEncoderStep}, **encoders)
        self.text_and_frames = _pipeline({"text": MiniMaxH3FL2VATextEncoderStep}, **encoders)

    @cached_property
    def frames(self) -> Any:
        """Keyframes to latents to rows; a pipeline of its own, since the autoencoder may be on another device than the text encoder."""
        from diffusers import MiniMaxH3Scheduler
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareConditionLatentsStep
        from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3KeyframeVaeEncoderStep

        steps = {"latents": MiniMaxH3KeyframeVaeEncoderStep, "rows": MiniMaxH3PrepareConditionLatentsStep}
        return _pipeline(steps, vae=self.vae(), scheduler=MiniMaxH3Scheduler())

    def prompt(self, text: str) -> tuple[tuple[int, ...], Any]:
        """Text alone: the ids at the encoder's embedding, and the pipeline's state."""
        return self._encode(self.text, prompt=text)

    def conditions(self, text: str, keyframes: Mapping[str, Any], seed: int) -> Conditions:
        """Conditions of one request.

        Args:
            text: the prompt.
            keyframes: uint8 ``(H, W, 3)`` by name, in packed order, already on the target canvas.
            seed: of the request's generator.
        """
        prompt_ids, state = self.prompt(text)
        ids, given, rows = prompt_ids, {}, {}
        if keyframes:
            images = list(keyframes.values())
            ids, state = self._encode(self.text_and_frames, prompt=text, keyframes=images)
            size = 16 * self.frames.patch_size[1]  # pixels under one row, along each side
            count = sum((image.shape[0] // size) * (image.shape[1] // size) for image in images)  # what the vendor's layout reserves
            generator = torch.Generator().manual_seed(seed)
            packed = self.frames(keyframes=images, generator=generator, num_condition_video_rows=count)
            given = {name: latent[0].float().cpu() for name, latent in zip(keyframes, packed.get("condition_latents"), strict=True)}
            rows = {"given_rows": packed.get("condition_rows").float().cpu()}
        extra = {"tags": state.get("text_token_tags").cpu(), "encoder_ids": ids, **rows}
        return Conditions(prompt_ids, state.get("prompt_embeds")[0].float().cpu(), given, extra)

    def _encode(self, pipeline: Any, **inputs: Any) -> tuple[tuple[int, ...], Any]:
        """Run a pipeline; the ids are read off the text encoder's embedding."""
        seen: list[tuple[int, ...]] = []
        handle = pipeline.text_encoder.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0][0].tolist())))
        try:
            state = pipeline(**inputs)
        finally:
            handle.remove()
        return seen[0], state


def denoise(actor: Any, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> list[VendorStep]:
    """Sample once with the vendor's blocks from the given noise, on the actor's device; the steps, call by call, on the noise's."""
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
    device = actor.device
    for name, value in zip(names, layout, strict=True):
        state.set(name, value.to(device), "denoiser_input_fields")
    for name, value in {
        "num_latent_frames": frames,
        "latent_height": height,
        "latent_width": width,
        "num_audio_latents": noise["audio"].shape[-1],
        "latents": noise["video"][None].to(device),
        "audio_latents": noise["audio"].to(device),
        "prompt_embeds": condition.embeds[None].to(device),
        "num_condition_video_rows": given_video,
        "num_condition_audio_rows": given_audio,
        "num_inference_steps": calls + 1,
        "condition_rows": condition.extra["given_rows"].to(device),
    }.items():
        state.set(name, value)
    recorded.clear()
    blocks = [prepare, *([prepend] if given_video else []), timesteps, loop]
    for block in blocks:
        _, state = block(components, state)
    return [VendorStep(*({m: value.to(noise[m].device) for m, value in part.items()} for part in vars(step).values())) for step in recorded]
