"""MiniMax H3: video and stereo audio from one packed sequence ``[text | given frames | audio | video]``.

What H3 does its own way, and this port turns into Loudfail's convention: the time label is a data fraction ``t = 1 - sigma``, the raw output is
``x0 - noise``, video and audio walk two schedules (shift 12 and 3), one call serves one packed layout, and given frames sit at ``t = 0.999``.

The actor is ``diffusers.MiniMaxH3Transformer3DModel`` with PEFT; layouts, row timesteps, scheduler and sampling loop are diffusers' own; the
rollout is vLLM-Omni's ``MiniMaxH3DiTModel`` with vLLM-Omni's own layout builder and denoising loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from loudfail.harness.actor import FusedPort, VendorStep
from loudfail.harness.case import Case
from loudfail.harness.engines.vllm_omni import FusedModel, LoRAParts, diffusion_config
from loudfail.harness.media import Media
from loudfail.harness.port import AdapterConfig, Conditions, RowTable, Step, Trajectory
from loudfail.harness.ports import h3_native
from loudfail.harness.ports.h3_media import SPATIAL, Autoencoders, check_keyframe, decode, encode_keyframes
from loudfail.harness.ports.h3_text import Presentation, rollout_encoder_classes
from loudfail.harness.world import World

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
SHIFT = {"video": 12.0, "audio": 3.0}
#: The noise level at which H3 holds given frames (``t = max(t, 0.999)``), and with which it mixes them.
GIVEN_TIME = 0.999
VIDEO_CHANNELS, AUDIO_CHANNELS, STEREO, PATCH = 24, 32, 2, (1, 2, 2)

#: Architecture of each scale. ``tiny`` keeps what is structural in the released model: inner width ≠ hidden, partial rotary, two AdaLN widths,
#: row widths.
#: Its hidden width is above the 96 of a video row: below, no model of this shape could tell all the noise of a row.
SCALES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        num_attention_heads=8, attention_head_dim=16, hidden_size=112, num_layers=2, num_refiner_layers=1, ffn_dim=96, text_dim=32, freq_dim=32,
        time_embed_hidden_dim=64, time_embed_dim=24, rope_freq_dim=2,
    ),
    "wide": dict(num_layers=1, num_refiner_layers=1),
}  # fmt: skip

CHECKPOINT = Path(__file__).parents[2] / "golden" / "h3_tiny.safetensors"


class H3(FusedPort):
    """MiniMax H3, text to video and audio (T2VA) and first / last frame (FL2VA).

    Arguments: `FusedPort`. Scale ``wide`` has one block and one refiner block.
    """

    name = "h3"
    scales, checkpoint = SCALES, CHECKPOINT
    modalities = ("video", "audio")
    extents = {"frames": (2, 7), "height": (4, 6, 2), "width": (4, 2, 8), "audio": (8, 5, 13)}
    givens = ((), ("first",), ("last",), ("first", "last"))
    modes = {(): "t2va", ("first", "last"): "fl2va"}
    adapter = AdapterConfig(rank=64, alpha=128.0, targets=TARGETS)
    given_sigma = 1 - GIVEN_TIME
    shift = SHIFT
    rates = {"video": 24.0, "audio": 32_000.0}
    time_axis = {"video": 1, "audio": 2}
    encoder_classes = staticmethod(rollout_encoder_classes)

    def transformer(self) -> Any:
        from diffusers import MiniMaxH3Transformer3DModel

        return MiniMaxH3Transformer3DModel

    def fused(self, config: dict[str, Any]) -> H3Fused:
        hidden = config["hidden_size"]  # the engine's configuration has these two widths as constants of the released model
        return H3Fused(config | {"adaln_out_features": 18 * hidden, "final_adaln_out_features": 2 * hidden})

    def shards(self) -> dict[str, int]:
        scale = SCALES[self.scale]
        return {"attention heads": scale.get("num_attention_heads", 56), "feed-forward width": scale.get("ffn_dim", 14336)}

    # -- objective ---------------------------------------------------------------------------------------------------------------------------
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        extent = case.extent
        return {
            "video": (VIDEO_CHANNELS, extent["frames"], extent["height"], extent["width"]),
            "audio": (STEREO, AUDIO_CHANNELS, extent["audio"]),
        }

    def conditions(self, case: Case) -> list[Conditions]:
        """Sample i has the i-th prompt, the i-th `keyframes`, and ``case.seed + i`` as the seed of its request."""
        return self.pictured(case, self.keyframes(case))

    def pictured(self, case: Case, pictures: Sequence[Mapping[str, Any]]) -> list[Conditions]:
        return [self.condition(self.tokenize(prompt), None, case.seed + index, pictures[index]) for index, prompt in enumerate(case.prompts)]

    def canvas(self, case: Case) -> tuple[int, int]:
        return case.extent["height"] * SPATIAL, case.extent["width"] * SPATIAL

    def condition(
        self, prompt_ids: Sequence[int], given: Mapping[str, torch.Tensor] | None = None, seed: int = 0, images: Mapping[str, Any] | None = None
    ) -> Conditions:
        """Conditions of one sample.

        Args:
            prompt_ids: token ids of the prompt.
            given: clean given latents ``(24, 1, h, w)`` by name, with a text-only presentation.
            seed: draws the 0.001 of noise that given latents get.
            images: keyframes instead, uint8 ``(16·h, 16·w, 3)`` by name: encoded by the video autoencoder, and shown to the text encoder.

        Raises:
            ValueError: both latents and images, no token ids, or an image of another type or size.
        """
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

        if given and images:
            raise ValueError("given frames come as latents or as images, not both")
        given = {name: self.encode_frame(image) for name, image in images.items()} if images else given
        presentation = self.present(prompt_ids, images)
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for latent in (given or {}).values():
            noise = torch.randn(latent[None].shape, generator=generator)
            rows.append(patchify_video_latents(self.schedulers["video"].scale_noise(latent[None], GIVEN_TIME, noise), PATCH))
        return Conditions(
            tuple(prompt_ids),
            presentation.embeds if images else self.encode_prompt(prompt_ids),
            dict(given or {}),
            {
                "given_rows": torch.cat(rows) if rows else torch.zeros(0, VIDEO_CHANNELS * 4),
                "tags": presentation.tags,
                "encoder_ids": presentation.ids,
            },
        )

    def given_latents(self, case: Case) -> list[dict[str, torch.Tensor]]:
        return [{name: self.encode_frame(image) for name, image in images.items()} for images in self.keyframes(case)]

    def keyframes(self, case: Case) -> list[dict[str, Any]]:
        """The keyframes of each sample by name, uint8 ``(16·h, 16·w, 3)`` noise: one of four a name and size, so that encodings are cached."""
        size = (*self.canvas(case), 3)
        return [{name: _picture(name, (case.seed + index) % 4, size) for name in case.given} for index in range(case.batch)]

    def encode_frame(self, image: Any) -> torch.Tensor:
        """Clean latents ``(24, 1, H/16, W/16)`` of a uint8 ``(H, W, 3)`` keyframe, by diffusers' own recipe."""
        check_keyframe(image)
        return self._encode_keyframe(image.tobytes(), image.shape).clone()

    def latent_statistics(self) -> tuple[Any, Any]:
        """Mean and deviation of each channel of video latents."""
        config = self.autoencoders.vae.config
        return config.latents_mean, config.latents_std

    @lru_cache(maxsize=256)  # noqa: B019  a port lives as long as the run
    def _encode_keyframe(self, pixels: bytes, shape: tuple[int, ...]) -> torch.Tensor:
        return encode_keyframes(self.autoencoders, [_image(pixels, shape)])[0].cpu()

    @cached_property
    def schedulers(self) -> dict[str, Any]:
        from diffusers import MiniMaxH3Scheduler

        return {modality: MiniMaxH3Scheduler(shift=shift) for modality, shift in SHIFT.items()}

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        grids = {}
        for modality, scheduler in self.schedulers.items():
            scheduler.set_timesteps(calls + 1)  # H3 counts grid points, the terminal 0 included
            grids[modality] = scheduler.sigmas.clone()
        return grids

    def predict_velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        raw: dict[str, list[Any]] = {modality: [None] * len(conditions) for modality in self.modalities}
        for members in self.groups(sigmas, conditions):
            video, audio = self.actor(**self.inputs(latents, sigmas, conditions, members), return_dict=False)
            for place, index in enumerate(members):
                raw["video"][index] = video[place, self.first_row(conditions[index]) :]
                raw["audio"][index] = audio[place]
        shapes = {modality: value.shape[1:] for modality, value in latents.items()}
        # On the latents' device; the actor may be on another.
        return self.unpack_rows({m: -torch.stack(value).float().to(latents[m].device) for m, value in raw.items()}, shapes)

    def groups(self, sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]) -> list[list[int]]:
        """Samples that share a layout and both noise levels: H3's batch axis only repeats one packed layout."""
        groups: dict[Any, list[int]] = {}
        for index, condition in enumerate(conditions):
            key = (tuple(condition.given), condition.extra["tags"].tolist().__str__(), *(float(sigmas[m][index]) for m in self.modalities))
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def first_row(self, condition: Conditions) -> int:
        return int(condition.extra["given_rows"].shape[0])

    def inputs(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions], members: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

        first = conditions[members[0]]
        layout = build_layout(tuple(first.extra["tags"].tolist()), tuple(latents["video"].shape[2:]), latents["audio"].shape[-1], tuple(first.given))
        times = {modality: float(1.0 - sigmas[modality][members[0]]) for modality in self.modalities}
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            layout.video,
            layout.audio,
            layout.given_rows,
            0,
            layout.text.numel(),
            times["video"],
            times["audio"],
            max(times["video"], GIVEN_TIME),
            1.0,
        )
        given, rows = torch.stack([conditions[i].extra["given_rows"] for i in members]), self.pack({m: v[members] for m, v in latents.items()})
        inputs = dict(
            hidden_states=torch.cat([given.to(rows["video"]), rows["video"]], dim=1),
            audio_hidden_states=rows["audio"],
            encoder_hidden_states=torch.stack([conditions[i].embeds for i in members]),
            timestep=timestep,
            timestep_indices=indices,
            token_tags=layout.tags,
            position_ids=layout.positions,
            video_indices=layout.video,
            audio_indices=layout.audio,
            text_indices=layout.text,
        )
        return {name: value.to(self.device) for name, value in inputs.items()}

    # -- packing -----------------------------------------------------------------------------------------------------------------------------
    def pack(self, latents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

        video, audio = latents["video"], latents["audio"]
        return {
            "video": patchify_video_latents(video, PATCH).view(video.shape[0], -1, VIDEO_CHANNELS * 4),
            "audio": audio.permute(0, 1, 3, 2).reshape(audio.shape[0], -1, AUDIO_CHANNELS),
        }

    def unpack_rows(self, rows: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        channels, frames, height, width = shapes["video"]
        video = rows["video"].reshape(-1, frames, height // 2, width // 2, channels, *PATCH).permute(0, 4, 1, 5, 2, 6, 3, 7)
        audio = rows["audio"].reshape(-1, STEREO, shapes["audio"][2], AUDIO_CHANNELS).permute(0, 1, 3, 2)
        return {"video": video.reshape(-1, channels, frames, height, width), "audio": audio}

    def row_table(self, seen: Mapping[str, Any], output: Any, place: int, rows: Mapping[str, int]) -> RowTable:
        """A `RowTable` from the arguments that the transformer really got."""
        total = seen["position_ids"].shape[0]
        modality = ["?"] * total
        for name, indices in (("text", seen["text_indices"]), ("video", seen["video_indices"]), ("audio", seen["audio_indices"])):
            for row in indices.tolist():
                modality[row] = name
        given = torch.zeros(total, dtype=torch.bool)
        given[seen["video_indices"][: seen["video_indices"].numel() - rows["video"]].cpu()] = True
        return RowTable(
            tuple(modality),
            given,
            (1.0 - seen["timestep"][seen["timestep_indices"]]).float().cpu(),
            seen["position_ids"].cpu(),
            {"video": seen["hidden_states"][place].detach().cpu(), "audio": seen["audio_hidden_states"][place].detach().cpu()},
            {"video": output[0], "audio": output[1], "sample": torch.tensor(place)},
        )

    # -- vendor ------------------------------------------------------------------------------------------------------------------------------
    def vendor_grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        from diffusers import MiniMaxH3Scheduler

        grids = {}
        for modality, scheduler in (("video", MiniMaxH3Scheduler()), ("audio", MiniMaxH3Scheduler(shift=3.0))):
            scheduler.set_timesteps(calls + 1)
            grids[modality] = scheduler.sigmas
        return grids

    def vendor_steps(self, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> list[VendorStep]:
        from loudfail.harness.ports import h3_vendor

        return h3_vendor.denoise(self.actor, noise, calls, condition)

    # -- engine ------------------------------------------------------------------------------------------------------------------------------
    def computed_buffers(self) -> dict[str, torch.Tensor]:
        return {"rope.inv_freq": self.actor.rope.inv_freq.float().cpu()}

    # -- prompt ------------------------------------------------------------------------------------------------------------------------------
    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        return self.present(ids).embeds

    def rollout_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], torch.Tensor]:
        presentation = self.present_in_rollout(ids)
        return presentation.ids, presentation.embeds

    def present(self, ids: Sequence[int], images: Mapping[str, Any] | None = None) -> Presentation:
        """The prompt, with keyframes (uint8 ``(H, W, 3)`` by name, in packed order) before it, through the trainer's encoder."""
        for image in (images or {}).values():
            check_keyframe(image)
        pictures = tuple((image.tobytes(), image.shape) for image in (images or {}).values())
        return self._encode(tuple(ids), pictures)

    def present_in_rollout(self, ids: Sequence[int], images: Mapping[str, Any] | None = None) -> Presentation:
        """The same through vLLM-Omni's presentation and text encoder, in the ranks of an engine that is there (degree 1 if none is).

        Raises:
            Unavailable: no engine on this machine.
            RankError: the rollout refuses the prompt, for example one without ids.
        """
        from loudfail.harness.ports import h3_text

        def load(world: World) -> None:
            state = None if self.weights else {name: value.cpu() for name, value in self.text_encoder.state_dict().items()}
            dtype = str(self.text_encoder.dtype).removeprefix("torch.")
            world.call(h3_text.load_rollout_encoder, self.weights, self.text_encoder.config.to_dict(), state, dtype)

        world = self.encoding_world(load)
        result = world.call(h3_text.rollout_encode, tuple(ids), list((images or {}).values()))[0]
        assert result is not None  # rank 0 answers
        return result

    @cached_property
    def tokenizer(self) -> Any:
        from loudfail.harness.ports import h3_text

        return h3_text.tokenizer(self.weights)

    @cached_property
    def text_encoder(self) -> Any:
        from loudfail.harness.ports import h3_text

        return h3_text.encoder(self.weights, SCALES[self.scale].get("text_dim", 5120))

    @cached_property
    def processor(self) -> Any:
        from loudfail.harness.ports import h3_text

        return h3_text.processor(self.weights, self.tokenizer)

    @cached_property
    def _presenter(self) -> Any:
        from loudfail.harness.ports import h3_text

        return h3_text.pipeline(self.text_encoder, self.tokenizer, self.processor)

    @lru_cache(maxsize=512)  # noqa: B019  a port lives as long as the run
    def _encode(self, ids: tuple[int, ...], pictures: tuple[tuple[bytes, tuple[int, ...]], ...]) -> Presentation:
        from loudfail.harness.ports import h3_text

        return h3_text.present(self._presenter, ids, [_image(*picture) for picture in pictures])

    # -- reference, presentation -------------------------------------------------------------------------------------------------------------
    def reference_prompt(self, text: str) -> tuple[int, ...]:
        return self._conditioner.prompt(text)[0]

    def reference_conditions(self, case: Case) -> list[Conditions]:
        requests = zip(case.prompts, self.keyframes(case), strict=True)
        return [self._conditioner.conditions(prompt, images, case.seed + index) for index, (prompt, images) in enumerate(requests)]

    def rollout_conditions(self, case: Case) -> list[Conditions]:
        conditions = []
        for prompt, images in zip(case.prompts, self.keyframes(case), strict=True):
            ids = self.tokenize(prompt)
            presented = self.present_in_rollout(ids, images)
            conditions.append(Conditions(ids, presented.embeds, {}, {"tags": presented.tags, "encoder_ids": presented.ids}))
        return conditions

    @cached_property
    def _conditioner(self) -> Any:
        from loudfail.harness.ports.h3_vendor import Conditioner

        return Conditioner(lambda: self.autoencoders.vae, text_encoder=self.text_encoder, tokenizer=self.tokenizer, processor=self.processor)

    # -- media, reward ---------------------------------------------------------------------------------------------------------------------------
    def decode(self, latents: Mapping[str, torch.Tensor]) -> list[Media]:
        """Clean latents → media of each sample: frames at 24 a second, stereo at 32 kHz."""
        return decode(self.autoencoders, latents)

    @cached_property
    def autoencoders(self) -> Autoencoders:
        return Autoencoders(self.weights, self.device)

    # -- shared ------------------------------------------------------------------------------------------------------------------------------
    def parts(self) -> list[Any]:
        coders = [self.autoencoders.vae, self.autoencoders.audio_vae] if "autoencoders" in vars(self) else []
        return [self.actor, self.schedulers["video"], self.text_encoder, self.tokenizer, *coders]


@lru_cache(maxsize=256)
def _picture(name: str, number: int, size: tuple[int, int, int]) -> Any:
    import numpy as np

    return np.random.default_rng([number, *name.encode()]).integers(0, 256, size, dtype=np.uint8)


def _image(pixels: bytes, shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.frombuffer(pixels, np.uint8).reshape(shape).copy()


@dataclass(frozen=True)
class Layout:
    """One packed layout as diffusers builds it."""

    positions: torch.Tensor
    tags: torch.Tensor
    video: torch.Tensor
    audio: torch.Tensor
    text: torch.Tensor
    given_rows: int


@lru_cache(maxsize=256)
def build_layout(text_tags: tuple[int, ...], video: tuple[int, int, int], audio: int, given: tuple[str, ...]) -> Layout:
    """``MiniMaxH3PrepareLayoutStep.build_packed_sequence``: text tags, video latent size ``(t, h, w)``, audio latents a channel, given frames."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    positions, tags, video_rows, audio_rows, text_rows, given_rows, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.tensor(text_tags), *video, audio, PATCH, STEREO, 2, 0, given
    )
    return Layout(positions, tags, video_rows, audio_rows, text_rows, given_rows)


# ------------------------------------------------------------------------------------------------------- what follows runs in the ranks

_BLOCKS = (("token_refiner.blocks.", "token_refiner.refiner_blocks."), ("blocks.", "transformer_blocks."))
_LEAVES = {
    "attn.qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.out_proj": ("attn.to_out.0",),
    # The engine's fc1 is [gate; value], diffusers' ff.net.0.proj is [value; gate].
    "mlp.fc1": ("ff.net.0.proj#1/2", "ff.net.0.proj#0/2"),
    "mlp.fc2": ("ff.net.2",),
    "attn.q_norm": ("attn.norm_q",),
    "attn.k_norm": ("attn.norm_k",),
    "adaln_proj.linear": ("adaln_proj.linear",),
    "norm1": ("norm1",),
    "norm2": ("norm2",),
}
_OUTSIDE = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}


@dataclass
class H3Fused(FusedModel):
    """What is specific to vLLM-Omni's MiniMax H3."""

    config: dict[str, Any]

    def build(self, dtype: torch.dtype) -> Any:
        from vllm_omni.diffusion.models.minimax_h3 import minimax_h3_transformer as upstream

        upstream._BF16_DTYPE = dtype  # the constant that every parameter and cast of the model uses
        if dtype == torch.float32 and torch.cuda.is_available():  # the fused kernel rounds to bfloat16 whatever it is given; its two halves do not
            upstream.indexed_gate_rms_norm_scale_shift = _gate_then_norm
        of_diffusers = "diffusers_weights" in inspect.signature(upstream.MiniMaxH3DiTModel).parameters  # since vLLM-Omni 0.30
        with diffusion_config(dtype, self.config if of_diffusers else h3_native.native_config(self.config)) as config:
            model = upstream.MiniMaxH3DiTModel(config, **({"diffusers_weights": True} if of_diffusers else {}))
        return model.float() if dtype == torch.float32 else model

    def load(self, model: Any, state: Mapping[str, torch.Tensor]) -> None:
        if not hasattr(model, "_diffusers_weights"):
            names = [name for name, _ in model.named_parameters()]
            state = h3_native.native_state(names, state, self.config, lambda module: self.actor_names(module, 0))
        model.load_weights(iter(state.items()))
        model.post_load_weights()

    def packed_modules(self) -> dict[str, list[str]]:
        return {"qkv_proj": ["to_q", "to_k", "to_v"], "fc1": ["fc1_0", "fc1_1"]}

    def hand_over(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, degree: int) -> dict[str, LoRAParts]:
        result: dict[str, LoRAParts] = {}
        for name in state:
            if not name.endswith(".lora_A.weight"):
                continue
            projection = name.removesuffix(".lora_A.weight")
            a, b = state[name], state[f"{projection}.lora_B.weight"]
            block, leaf = _to_engine(projection)
            if leaf == "ff.net.0.proj":
                value, gate = b.chunk(2)
                result[f"{block}.mlp.fc1_0"] = LoRAParts([a], [gate.contiguous()])
                result[f"{block}.mlp.fc1_1"] = LoRAParts([a], [value.contiguous()])
            else:
                target = {"attn.to_out.0": "attn.out_proj", "ff.net.2": "mlp.fc2"}.get(leaf, leaf)
                result[f"{block}.{target}"] = LoRAParts([a], [b])
        return {f"transformer.{module}": parts for module, parts in result.items()}

    def actor_names(self, module: str, slices: int) -> list[str]:
        if module in _OUTSIDE:
            return [_OUTSIDE[module]]
        for engine, actor in _BLOCKS:
            if module.startswith(engine):
                index, _, leaf = module.removeprefix(engine).partition(".")
                return [f"{actor}{index}.{name}" for name in _LEAVES[leaf]]
        return [module]

    def buffers(self, model: Any) -> dict[str, torch.Tensor]:
        return {"rope.inv_freq": model.rope.inv_freq}

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        from vllm_omni.diffusion.models.minimax_h3.time_request import minimax_h3_time_shift_sigmas

        # A step is a model call since vLLM-Omni 0.30 and a point of the grid before, so that the same number of them samples one call less.
        steps = calls + (len(minimax_h3_time_shift_sigmas(num_steps=calls)) == calls)
        return {m: torch.tensor(minimax_h3_time_shift_sigmas(num_steps=steps, shift_scale=SHIFT[m])) for m in SHIFT}

    def velocity(
        self, model: Any, latents: dict[str, torch.Tensor], sigmas: dict[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        results: dict[str, list[torch.Tensor]] = {"video": [], "audio": []}
        for index, condition in enumerate(conditions):
            branch, video, audio = self._branch(latents["video"][index], latents["audio"][index], condition)
            time = {m: float(1.0 - sigmas[m][index]) for m in sigmas}
            rows = torch.cat([condition.extra["given_rows"].to(video), video])
            arguments = branch.forward_kwargs(
                video_rows=rows,
                audio_rows=audio,
                t_video=time["video"],
                t_audio=time["audio"],
                imgvid_cond_timestep=max(time["video"], GIVEN_TIME),
                audio_ref_cond_timestep=1.0,
            )
            raw_video, raw_audio = model(**arguments)
            results["video"].append(-_unpack_video(raw_video[branch.update_mask_dev], latents["video"].shape[1:]))
            results["audio"].append(-_unpack_audio(raw_audio))
        return {m: torch.stack(values) for m, values in results.items()}

    def rollout(self, model: Any, noise: dict[str, torch.Tensor], calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        from vllm_omni.diffusion.models.minimax_h3.denoise_loop import minimax_h3_denoise_loop

        grid = self.grid(calls)
        samples: list[list[tuple[Any, ...]]] = []
        for index, condition in enumerate(conditions):
            branch, video, audio = self._branch(noise["video"][index], noise["audio"][index], condition)
            given = condition.extra["given_rows"]
            calls_seen: list[tuple[torch.Tensor, torch.Tensor]] = []
            after: list[tuple[torch.Tensor, torch.Tensor]] = []

            def spy(calls_seen: list[Any] = calls_seen, **arguments: Any) -> Any:
                output = model(**arguments)
                calls_seen.append(output)
                return output

            def keep(step: int, video: torch.Tensor, audio: torch.Tensor, after: list[Any] = after) -> None:
                after.append((video, audio))

            start = (torch.cat([given.to(video), video]), audio)
            minimax_h3_denoise_loop(
                model=spy,
                positive=branch,
                initial_video_rows=start[0],
                initial_audio_rows=start[1],
                keyframe_cond_rows=given.to(video) if len(given) else None,
                sigmas_video=grid["video"].double().tolist(),
                sigmas_audio=grid["audio"].double().tolist(),
                device=video.device,
                on_step=keep,
            )
            samples.append([(before, raw, done, len(given)) for before, raw, done in zip([start, *after], calls_seen, after, strict=False)])
        shape = noise["video"].shape[1:]
        steps = []
        for call, parts in enumerate(zip(*samples, strict=True)):
            steps.append(
                Step(
                    {
                        "video": torch.stack([_unpack_video(before[0][n:], shape) for before, _, _, n in parts]).cpu(),
                        "audio": torch.stack([_unpack_audio(before[1]) for before, _, _, _ in parts]).cpu(),
                    },
                    {m: grid[m][call].repeat(len(conditions)).float() for m in grid},
                    {
                        "video": torch.stack([-_unpack_video(raw[0][n:], shape).float() for _, raw, _, n in parts]).cpu(),
                        "audio": torch.stack([-_unpack_audio(raw[1]).float() for _, raw, _, _ in parts]).cpu(),
                    },
                    {
                        "video": torch.stack([_unpack_video(done[0][n:], shape) for _, _, done, n in parts]).cpu(),
                        "audio": torch.stack([_unpack_audio(done[1]) for _, _, done, _ in parts]).cpu(),
                    },
                )
            )
        return Trajectory(steps)

    def _branch(self, video: torch.Tensor, audio: torch.Tensor, condition: Conditions) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """vLLM-Omni's own packed layout and static call arguments for one sample, and the sample's generated rows."""
        from vllm_omni.diffusion.models.minimax_h3.denoise_loop import MiniMaxH3DenoiseBranch
        from vllm_omni.diffusion.models.minimax_h3.packed_sequence import minimax_h3_packed_sequence
        from vllm_omni.diffusion.models.minimax_h3.packed_tokens import minimax_h3_pack_audio_latent, minimax_h3_patchify_video_latent

        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
        _, frames, height, width = video.shape
        indices = [{"first": 0, "last": -1}[name] for name in condition.given]
        packed = minimax_h3_packed_sequence(
            text_len=len(condition.embeds),
            latent_t=frames,
            latent_h=height,
            latent_w=width,
            audio_t=audio.shape[-1],
            include_keyframe_cond=bool(indices),
            keyframe_frame_indices=indices or None,
            frame_count=(frames - 2) // 5 * 17 + 5,
        )
        tags = packed["token_tags"].clone()
        tags[: len(condition.embeds)] = condition.extra["tags"]
        branch = MiniMaxH3DenoiseBranch(packed=packed, text_embeddings=condition.embeds, token_tags=tags, device=device)
        return branch, minimax_h3_patchify_video_latent(video[None], patch_size=PATCH).to(device), minimax_h3_pack_audio_latent(audio).to(device)


def _gate_then_norm(residual: Any, gate: Any, branch: Any, weight: Any, shift: Any, scale: Any, indices: Any, eps: float) -> tuple[Any, Any]:
    """``indexed_gate_rms_norm_scale_shift`` as vLLM-Omni's own two kernels, one after the other, which keep float32."""
    from vllm_omni.diffusion.layers.indexed_modulation import indexed_gate, rms_norm_indexed_scale_shift

    residual = indexed_gate(residual, gate, branch, indices)
    return residual, rms_norm_indexed_scale_shift(residual, weight, shift, scale, indices, eps)


def _to_engine(projection: str) -> tuple[str, str]:
    """Actor projection → engine block and the actor's leaf name."""
    for engine, actor in _BLOCKS:
        if projection.startswith(actor):
            index, _, leaf = projection.removeprefix(actor).partition(".")
            return f"{engine}{index}", leaf
    raise ValueError(f"{projection} is in none of H3's blocks; its adapter cannot be handed to the rollout")


def _unpack_video(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    from vllm_omni.diffusion.models.minimax_h3.packed_tokens import minimax_h3_unpatchify_video_tokens

    channels, frames, height, width = shape
    return minimax_h3_unpatchify_video_tokens(rows, latent_shape=(frames, height // 2, width // 2, channels), patch_size=PATCH)[0]


def _unpack_audio(rows: torch.Tensor) -> torch.Tensor:
    from vllm_omni.diffusion.models.minimax_h3.packed_tokens import minimax_h3_unpack_audio_tokens

    return minimax_h3_unpack_audio_tokens(rows, audio_t=rows.shape[0], audio_channel=STEREO)
