"""LTX-2's rollout: vLLM-Omni's transformer in vLLM-Omni's own pipeline loop, and what the port and the ranks say alike.

Three things an integration has to tell this rollout, since its defaults are not what the Diffusers actor of LTX-2.0 does (diffusers 0.40, vllm-omni
0.30). The levels: the engine's own grid has a constant shift, the vendor's one that depends on the resolution, so levels go with the request. And
the gates between the streams: the engine takes the *other* stream's level for them, LTX-2.0 the own one token by token, which differs wherever the
two levels or those of tokens do. And the sum of squares that the norms of q and k share over ranks, see `share_sums`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from loudfail.harness.case import Case
from loudfail.harness.engines.vllm_omni import FusedModel, LoRAParts, diffusion_config
from loudfail.harness.port import AdapterConfig, Conditions, Step, Trajectory

FPS = 24.0


def shifted_grid(calls: int, tokens: int) -> torch.Tensor:
    """The sigmas ``(calls + 1,)`` of the released scheduler for a clip of so many video tokens, as the vendor's pipeline sets it up."""
    import numpy as np
    from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

    walked = scheduler()
    walked.set_timesteps(sigmas=np.linspace(1.0, 1 / calls, calls), mu=calculate_shift(tokens, 1024, 4096, 0.95, 2.05))
    return walked.sigmas.clone()


def scheduler() -> Any:
    """The released scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096, shift_terminal=0.1
    )


def given_rows(condition: Conditions) -> int:
    """Rows of the video stream that are given: a row a token of each given frame ``(C, 1, h, w)``."""
    return sum(latent[0].numel() for latent in condition.given.values())


def groups(conditions: Sequence[Conditions]) -> list[list[int]]:
    """Samples that agree in what is given; all else may differ within one call."""
    found: dict[tuple[str, ...], list[int]] = {}
    for index, condition in enumerate(conditions):
        found.setdefault(tuple(condition.given), []).append(index)
    return list(found.values())


# ------------------------------------------------------------------------------------------------------- what follows runs in the ranks


@lru_cache(maxsize=1)
def _loop_class() -> Any:
    from vllm_omni.diffusion.models.ltx2.pipeline_ltx2 import LTX2Pipeline

    class Loop(LTX2Pipeline):
        """vLLM-Omni's pipeline around a transformer that is there already, for latents that are normalized already; it records its steps."""

        def __init__(self, transformer: Any, audio: tuple[int, int], image: bool) -> None:
            torch.nn.Module.__init__(self)
            channels, bins = audio
            self.transformer, self.device = transformer, next(transformer.parameters()).device
            self.scheduler = scheduler()
            self.unified_text_image_entry = not image
            plain = dict(latents_mean=torch.zeros(1), latents_std=torch.ones(1))
            self.vae = SimpleNamespace(**plain, config=SimpleNamespace(scaling_factor=1.0))
            self.audio_vae = SimpleNamespace(**plain, config=SimpleNamespace(mel_bins=4 * bins, latent_channels=channels))
            self.vae_spatial_compression_ratio, self.vae_temporal_compression_ratio = 32, 8
            self.audio_vae_mel_compression_ratio, self.audio_vae_temporal_compression_ratio = 4, 4
            self.transformer_spatial_patch_size, self.transformer_temporal_patch_size = 1, 1
            self.audio_sampling_rate, self.audio_hop_length = 16_000, 160
            self.od_config = SimpleNamespace(parallel_config=SimpleNamespace(sequence_parallel_size=1))
            self.set_progress_bar_config(disable=True)
            self.steps: list[dict[str, Any]] = []

        def _denoise_timestep_kwargs(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            told = super()._denoise_timestep_kwargs(*args, **kwargs)
            return levels(told["timestep"], told["audio_timestep"])

        def _denoise_step(self, index: int, timestep: Any, state: Any, forward_ctx: Any, denoise_ctx: Any) -> Any:
            handle = self.transformer.register_forward_hook(lambda module, args, output: self.steps.append({"raw": output}))
            try:
                after = super()._denoise_step(index, timestep, state, forward_ctx, denoise_ctx)
            finally:
                handle.remove()
            sigmas = {"video": self.scheduler.sigmas[index], "audio": forward_ctx.audio_scheduler.sigmas[index]}
            self.steps[-1] |= {"before": (state.video, state.audio), "after": (after.video, after.audio), "sigmas": sigmas}
            return after

    return Loop


def levels(video: torch.Tensor, audio: torch.Tensor) -> dict[str, torch.Tensor]:
    """Time labels of a call; the arguments named sigma feed the gates between the streams, which take the other stream's."""
    return {"timestep": video, "audio_timestep": audio, "sigma": audio, "audio_sigma": video}


def share_sums(model: Any) -> None:
    """Let the norms of q and k over the heads of all ranks have the sum that they asked for.

    vLLM-Omni 0.30's ``TensorParallelRMSNorm`` expects its sum of squares to be reduced in place. vLLM's all-reduce returns the sum and on a GPU
    leaves its argument alone, so each rank divides by its own: q and k are about √N too large at degree N, and nothing says so. See
    docs/upgrades/silent-norm.md.
    """
    from vllm.distributed import get_tp_group
    from vllm_omni.diffusion.models.ltx2.ltx2_transformer import TensorParallelRMSNorm

    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(get_tp_group().all_reduce(tensor))

    for module in model.modules():
        if isinstance(module, TensorParallelRMSNorm):
            module._all_reduce = reduce


def request(latents: Mapping[str, torch.Tensor], calls: int, contexts: Mapping[str, torch.Tensor]) -> Any:
    """A request without guidance for latents ``(B, C, F, h, w)`` and ``(B, C, L, M)`` that are normalized already, and contexts."""
    from vllm_omni.diffusion.models.ltx2.ltx2_guidance import LTXGuidanceSpec
    from vllm_omni.diffusion.models.ltx2.ltx2_latents import pack_latents
    from vllm_omni.diffusion.models.ltx2.ltx2_request import LTXRequestInputs

    _, _, frames, height, width = latents["video"].shape
    return LTXRequestInputs(
        prompt=None, negative_prompt=None, height=32 * height, width=32 * width, num_frames=8 * (frames - 1) + 1, frame_rate=FPS,
        num_inference_steps=calls, guidance=LTXGuidanceSpec.positive_only(), num_videos_per_prompt=1, generator=torch.Generator(),
        latents=pack_latents(latents["video"]), audio_latents=latents["audio"], prompt_embeds=contexts["video"], negative_prompt_embeds=None,
        prompt_attention_mask=contexts["mask"], negative_prompt_attention_mask=None, decode_timestep=0.0, decode_noise_scale=None,
        output_type="latent", max_sequence_length=contexts["mask"].shape[1], audio_latents_normalized=True,
    )  # fmt: skip


@dataclass
class LTX2Fused(FusedModel):
    """What is specific to vLLM-Omni's LTX-2.

    Attributes:
        config: the actor's.
        audio: channels and mel bins of an audio latent.
        smallest: extent for which a grid is asked without one.
    """

    config: dict[str, Any]
    audio: tuple[int, int]
    smallest: dict[str, int]

    def build(self, dtype: torch.dtype) -> Any:
        from vllm_omni.diffusion.distributed import parallel_state
        from vllm_omni.diffusion.models.ltx2.ltx2_transformer import LTX2VideoTransformer3DModel

        if not parallel_state.is_cfg_group_initialized():  # guidance asks for its group even where it is off
            ranks, own = torch.distributed.get_world_size(), torch.distributed.get_rank()
            backend = torch.distributed.get_backend()
            parallel_state._CFG = parallel_state.init_model_parallel_group([[r] for r in range(ranks)], own, backend, "classifier_free_guidance")
        with diffusion_config(dtype, self.config):
            model = LTX2VideoTransformer3DModel(**self.config).to(dtype)
        share_sums(model)
        return model

    def load(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        model.load_weights(iter(state.items()))

    def packed_modules(self) -> dict[str, list[str]]:
        return {"to_qkv": ["to_q", "to_k", "to_v"]}

    def hand_over(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, degree: int) -> dict[str, LoRAParts]:
        names = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
        return {f"transformer.{name}": LoRAParts([state[f"{name}.lora_A.weight"]], [state[f"{name}.lora_B.weight"]]) for name in names}

    def actor_names(self, module: str, slices: int) -> list[str]:
        block = module.removesuffix(".to_qkv")
        return [module] if block == module else [f"{block}.{name}" for name in ("to_q", "to_k", "to_v")]

    def sharded(self, parameter: str) -> bool:
        return parameter.endswith((".norm_q.weight", ".norm_k.weight"))

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        """What the loop's schedulers hold once the request's levels have arrived."""
        from vllm_omni.diffusion.models.ltx2.ltx2_denoise import prepare_scheduler_stage

        extent, given = (case.extent, case.given) if case else (self.smallest, ())
        frames, height, width = extent["frames"] + len(given), extent["height"], extent["width"]
        loop = SimpleNamespace(scheduler=scheduler())
        asked = SimpleNamespace(num_inference_steps=calls)
        audio, _, _ = prepare_scheduler_stage(
            loop, asked, device=torch.device("cpu"), sigmas=self.request_sigmas(calls, frames * height * width), timesteps=None,
            latent_num_frames=frames, latent_height=height, latent_width=width, use_official_sigma_schedule=True,
        )  # fmt: skip
        return {"video": loop.scheduler.sigmas.clone(), "audio": audio.sigmas.clone()}

    def velocity(
        self, model: Any, latents: dict[str, torch.Tensor], sigmas: dict[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        from vllm_omni.diffusion.models.ltx2 import ltx2_latents as layout

        results: dict[str, list[Any]] = {"video": [None] * len(conditions), "audio": [None] * len(conditions)}
        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        for members in groups(conditions):
            chosen = [conditions[i] for i in members]
            whole, contexts = _inputs({m: v[members] for m, v in latents.items()}, chosen, device, dtype)
            count, frames, height, width = whole["video"].shape[0], *whole["video"].shape[2:]
            told = {m: 1000 * s[members].to(device) for m, s in sigmas.items()}
            if chosen[0].given:
                told["video"] = told["video"][:, None] * (torch.arange(frames * height * width, device=device) >= given_rows(chosen[0]))
            video, audio = model(
                hidden_states=layout.pack_latents(whole["video"]),
                audio_hidden_states=layout.pack_audio_latents(whole["audio"]),
                encoder_hidden_states=contexts["video"],
                audio_encoder_hidden_states=contexts["audio"],
                **levels(told["video"], told["audio"]),
                video_coords=model.rope.prepare_video_coords(count, frames, height, width, device, fps=FPS),
                audio_coords=model.audio_rope.prepare_audio_coords(count, whole["audio"].shape[2], device),
                return_dict=False,
            )
            for place, result in enumerate(self._unpack(video, audio, whole["video"].shape[2:], len(chosen[0].given))):
                for modality, value in result.items():
                    results[modality][members[place]] = value
        return {m: torch.stack(values) for m, values in results.items()}

    def _unpack(self, video: torch.Tensor, audio: torch.Tensor, size: Sequence[int], given: int) -> list[dict[str, torch.Tensor]]:
        """Latents of each sample, given frames left out."""
        from vllm_omni.diffusion.models.ltx2 import ltx2_latents as layout

        clips, sounds = layout.unpack_latents(video, *size), layout.unpack_audio_latents(audio, self.audio[1])
        return [{"video": clip[:, given:], "audio": sound} for clip, sound in zip(clips, sounds, strict=True)]

    def rollout(self, model: Any, noise: dict[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        from vllm_omni.diffusion.models.ltx2.ltx2_conditioning import LTXPromptContext
        from vllm_omni.diffusion.models.ltx2.ltx2_recipes import LTX_POSITIVE_ONLY_RECIPE

        device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
        kept: list[list[dict[str, Any]]] = []
        for members in groups(conditions):
            chosen = [conditions[i] for i in members]
            whole, contexts = _inputs({m: v[members] for m, v in noise.items()}, chosen, device, dtype)
            given, size = len(chosen[0].given), whole["video"].shape[2:]
            loop = _loop_class()(model, self.audio, bool(given))
            positive = (contexts["video"], contexts["audio"], contexts["mask"])
            loop.run_phase(
                None,
                request(whole, calls, contexts),
                noise_scale=0.0,
                sigmas=self.request_sigmas(calls, whole["video"][0, 0].numel()),
                timesteps=None,
                attention_kwargs=None,
                phase_recipe=LTX_POSITIVE_ONLY_RECIPE.phases[0],
                prompt_context=LTXPromptContext(len(members), *positive, *positive, None, None, None),
            )
            kept += [[{} for _ in conditions] for _ in loop.steps[len(kept) :]]
            for step, call in zip(loop.steps, kept, strict=True):
                for name in ("before", "raw", "after"):
                    for place, value in enumerate(self._unpack(step[name][0], step[name][1], size, given)):
                        call[members[place]][name] = {m: v.float().cpu() for m, v in value.items()}
                for index in members:
                    call[index]["sigmas"] = {m: s.cpu() for m, s in step["sigmas"].items()}
        join = lambda call, name: {m: torch.stack([one[name][m] for one in call]) for m in noise}  # noqa: E731
        return Trajectory([Step(*(join(call, name) for name in ("before", "sigmas", "raw", "after"))) for call in kept])

    def request_sigmas(self, calls: int, tokens: int) -> list[float] | None:
        """The levels that go with a request; without them the engine walks its own."""
        return shifted_grid(calls, tokens).tolist()


def _inputs(
    latents: Mapping[str, torch.Tensor], conditions: Sequence[Conditions], device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Latents with the given frames in front, and the prompt's contexts."""
    given = [torch.stack([one.given[name] for one in conditions]) for name in conditions[0].given]
    whole = {"video": torch.cat([*(frame.to(latents["video"]) for frame in given), latents["video"]], dim=2), "audio": latents["audio"]}
    contexts = {m: torch.stack([one.extra[f"{m}_context"] for one in conditions]).to(device, dtype) for m in ("video", "audio")}
    contexts["mask"] = torch.stack([one.extra["mask"] for one in conditions]).to(device)
    return {m: v.to(device, dtype) for m, v in whole.items()}, contexts
