"""LTX-2's own pipelines: the loop, the grid that it walks, and what they make of a prompt and a first frame. The oracle of the port; it shares no
code with it.

Loops take latents as the transformer has them: the pipelines normalize what they are given, so theirs have autoencoders whose statistics are the
identity. The guidance is off (scale 1), as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from loudfail.harness.actor import VendorStep
from loudfail.harness.port import Conditions

#: The released scheduler.
SCHEDULER = dict(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, shift_terminal=0.1)
#: LTX-2.0: the streams' cross attention is modulated by their own levels, token by token.
OPTIONS: dict[str, Any] = dict(
    **dict.fromkeys(("guidance_scale", "audio_guidance_scale", "modality_scale", "audio_modality_scale"), 1.0),
    **dict.fromkeys(("stg_scale", "audio_stg_scale", "guidance_rescale", "audio_guidance_rescale"), 0.0),
    frame_rate=24.0,
    use_cross_timestep=False,
    output_type="latent",
    return_dict=False,
)
MODALITIES = ("video", "audio")
#: Tokens of a context.
TOKENS = 384


class _Enough(Exception):
    """What was asked for has been seen."""


@lru_cache(maxsize=2)
def _recorded(image: bool) -> Any:
    """The text or the image pipeline with a recorder where it turns velocities into clean estimates."""
    from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline

    kind = LTX2ImageToVideoPipeline if image else LTX2Pipeline

    class Recorded(kind):  # type: ignore[misc, valid-type]
        _callback_tensor_inputs = [*kind._callback_tensor_inputs, "audio_latents"]
        grids: dict[str, torch.Tensor]
        steps: list[VendorStep]
        only_grids = False
        prepared: Any = None

        def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
            self.prepared = super().prepare_latents(*args, **kwargs)
            return self.prepared

        def convert_velocity_to_x0(self, sample: Any, denoised_output: Any, step_idx: int, scheduler: Any = None) -> Any:
            if len(self.steps) == step_idx:
                self.steps.append(VendorStep({}, {}, {}, {}))
            step = self.steps[-1]
            modality = MODALITIES[len(step.before)]  # the pipeline asks for video, then for audio
            self.grids[modality] = scheduler.sigmas.clone()
            step.before[modality] = sample[0].clone()
            step.sigma[modality], step.sigma_after[modality] = scheduler.sigmas[step_idx], scheduler.sigmas[step_idx + 1]
            if self.only_grids and len(self.grids) == len(MODALITIES):
                raise _Enough
            return super().convert_velocity_to_x0(sample, denoised_output, step_idx, scheduler)

        def keep(self, _: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self.steps[-1].after.update(video=tensors["latents"][0].clone(), audio=tensors["audio_latents"][0].clone())
            return {}

    return Recorded


def pipeline(image: bool, **components: Any) -> Any:
    """One of the vendor's pipelines with the given components, the released scheduler, and nothing else."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    parts = dict.fromkeys(("vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "transformer", "vocoder"))
    pipe = _recorded(image)(scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER), **parts | components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoise(pipe: Any, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> list[VendorStep]:
    """Sample once with the vendor's loop from noise ``(C, F, H, W)`` and ``(C, L, M)``, the first frame in front if it is given."""
    _run(pipe, noise, calls, condition)
    first = sum(latent[0].numel() for latent in condition.given.values())
    for step in pipe.steps:
        for rows in (step.before, step.after):
            rows["video"] = rows["video"][first:]
    return [VendorStep(*({m: value.to(noise[m].device) for m, value in part.items()} for part in vars(step).values())) for step in pipe.steps]


def walked(pipe: Any, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> dict[str, torch.Tensor]:
    """The sigmas of each modality's scheduler once the loop of so many calls has begun."""
    pipe.only_grids = True
    try:
        _run(pipe, noise, calls, condition)
    except _Enough:
        pass
    finally:
        pipe.only_grids = False
    return {modality: grid.to(noise[modality].device) for modality, grid in pipe.grids.items()}


@torch.no_grad()
def _run(pipe: Any, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> None:
    pipe.steps, pipe.grids = [], {}
    device = pipe._execution_device
    video = torch.cat([*(frame.to(noise["video"]) for frame in condition.given.values()), noise["video"]], dim=1)[None]
    padding = TOKENS - len(condition.embeds)
    handle = pipe.transformer.register_forward_pre_hook(_contiguous, with_kwargs=True)
    call = dict(
        prompt_embeds=torch.nn.functional.pad(condition.embeds, (0, 0, padding, 0))[None].to(device, pipe.connectors.dtype),
        prompt_attention_mask=(torch.arange(TOKENS, device=device) >= padding).long()[None],
        latents=video.to(device),
        audio_latents=noise["audio"][None].to(device),
        num_frames=(video.shape[2] - 1) * pipe.vae_temporal_compression_ratio + 1,
        height=video.shape[3] * pipe.vae_spatial_compression_ratio,
        width=video.shape[4] * pipe.vae_spatial_compression_ratio,
        num_inference_steps=calls,
        generator=torch.Generator(),
        callback_on_step_end=pipe.keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    try:
        pipe(**call, **OPTIONS)
    finally:
        handle.remove()


def _contiguous(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The same values in the layout that the port has them in: another one takes another kernel, which in bfloat16 is a percent of the velocity."""
    return args, kwargs | {name: kwargs[name].contiguous() for name in ("hidden_states", "audio_hidden_states")}


@torch.no_grad()
def arrivals(pipe: Any, text: str, image: Any = None, size: Mapping[str, int] | None = None) -> Conditions:
    """What a prompt string, and a first frame uint8 ``(H, W, 3)``, are when they arrive at the encoder, the connectors and the transformer; the
    frame is read from the latents that the transformer is given, before they are cast.

    Args:
        pipe: with all components that conditioning needs, and a transformer that is not run.
        text: the prompt.
        image: the first frame.
        size: latent frames in all, height and width; nothing beyond the connectors' input is looked at without it.
    """
    from PIL import Image

    seen: dict[str, Any] = {}

    def connectors(_: Any, args: Any, kwargs: Any) -> None:
        seen["embeds"], seen["mask"] = args[:2]
        if size is None:
            raise _Enough

    def transformer(_: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)
        raise _Enough

    handles = [
        pipe.text_encoder.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.update(ids=args[0][0])),
        pipe.connectors.register_forward_pre_hook(connectors, with_kwargs=True),
        pipe.transformer.register_forward_pre_hook(transformer, with_kwargs=True),
    ]
    frames, height, width = (size or {"frames": 1, "height": 1, "width": 1}).values()
    inputs = {} if image is None else {"image": Image.fromarray(image)}
    try:
        pipe(
            prompt=text,
            num_frames=(frames - 1) * pipe.vae_temporal_compression_ratio + 1,
            height=height * pipe.vae_spatial_compression_ratio,
            width=width * pipe.vae_spatial_compression_ratio,
            num_inference_steps=2,
            max_sequence_length=TOKENS,
            generator=torch.Generator().manual_seed(0),
            **inputs,
            **OPTIONS,
        )
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    seen = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in seen.items()}
    real = seen["mask"][0].bool()
    ids = tuple(seen["ids"][real].tolist())
    if size is None:
        return Conditions(ids, seen["embeds"][0, real].float())
    extra = {
        "video_context": seen["encoder_hidden_states"][0].float(),
        "audio_context": seen["audio_encoder_hidden_states"][0].float(),
        "mask": seen["encoder_attention_mask"][0],
        "encoder_ids": ids,
    }
    # Given latents as the pipeline holds them: it casts its latents for each call, and would add what a dtype rounds.
    given = {} if image is None else {"first": pipe._unpack_latents(pipe.prepared[0][:, : height * width].cpu(), 1, height, width)[0]}
    return Conditions(ids, seen["embeds"][0, real].float(), given, extra)
