"""LTX-2: video and stereo audio as two streams that attend to each other and, each by cross attention, to a context of its own of the prompt.

What LTX-2 does its own way, and this port turns into Loudfail's convention: the time label is ``1000 · sigma``, a given first frame is a frame of the
clip and stands at label 0, both modalities walk one grid that is shifted by the number of video tokens and stretched to end at 0.1, and the raw
output is ``noise − x0`` already.

The actor is ``diffusers.LTX2VideoTransformer3DModel`` with PEFT; packing, scheduler and sampling loop are diffusers' own; the rollout is vLLM-Omni's
model of that name in vLLM-Omni's own pipeline loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from loudfail.harness.actor import FusedPort, VendorStep
from loudfail.harness.case import Case
from loudfail.harness.media import Media
from loudfail.harness.port import AdapterConfig, Conditions, RowTable
from loudfail.harness.ports import ltx2_text
from loudfail.harness.ports.ltx2_rollout import FPS, LTX2Fused, given_rows, groups, shifted_grid
from loudfail.harness.world import World

#: The suffixes that LTX-2's users adapt: all attention of both streams and between them, and both feed-forwards.
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")

#: Architecture of each scale. ``tiny`` keeps what is structural in the released model: two widths, the narrow one in the attention between the
#: streams, rotary halves, a context wider than no stream; and inner widths above those of the rows.
SCALES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        in_channels=16, out_channels=16, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64, audio_in_channels=16,
        audio_out_channels=16, audio_num_attention_heads=4, audio_attention_head_dim=8, audio_cross_attention_dim=32, caption_channels=32,
        num_layers=2, rope_type="split",
    ),
    "wide": dict(num_layers=1, rope_type="split"),
}  # fmt: skip

CHECKPOINT = Path(__file__).parents[2] / "golden" / "ltx2_tiny.safetensors"


class LTX2(FusedPort):
    """LTX-2, text to video and audio (T2V) and first frame to video and audio (I2V).

    Arguments: `FusedPort`. Scale ``wide`` has one block.
    """

    name = "ltx2"
    scales, checkpoint = SCALES, CHECKPOINT
    modalities = ("video", "audio")
    extents = {"frames": (2, 4), "height": (2, 4), "width": (4, 2), "audio": (8, 5, 13)}
    givens = ((), ("first",))
    modes = {(): "t2v", ("first",): "i2v"}
    adapter = AdapterConfig(rank=64, alpha=128.0, targets=TARGETS)
    rates = {"video": FPS, "audio": 24_000.0}
    time_axis = {"video": 1, "audio": 1}
    given_replaces = True
    least_calls = 2  # stretched to a terminal level, a grid of one call is not a number

    encoder_classes = staticmethod(ltx2_text.rollout_encoder_classes)

    def transformer(self) -> Any:
        from diffusers import LTX2VideoTransformer3DModel

        return LTX2VideoTransformer3DModel

    def fused(self, config: dict[str, Any]) -> LTX2Fused:
        return LTX2Fused(config, self.audio_shape, self.smallest)

    def shards(self) -> dict[str, int]:
        scale = SCALES[self.scale]
        return {"attention heads": scale.get("num_attention_heads", 32), "audio attention heads": scale.get("audio_num_attention_heads", 32)}

    @cached_property
    def audio_shape(self) -> tuple[int, int]:
        """Channels and mel bins of an audio latent."""
        return (2, 8) if self.scale == "tiny" and self.weights is None else (8, 16)

    @cached_property
    def width(self) -> int:
        """Width of the text encoder's hidden states."""
        return int(SCALES[self.scale].get("caption_channels", 3840))

    # -- objective ---------------------------------------------------------------------------------------------------------------------------
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        extent, (channels, bins) = case.extent, self.audio_shape
        video = SCALES[self.scale].get("in_channels", 128)
        return {"video": (video, extent["frames"], extent["height"], extent["width"]), "audio": (channels, extent["audio"], bins)}

    def conditions(self, case: Case) -> list[Conditions]:
        """Sample i has the i-th prompt and the i-th of `given_latents`."""
        return [self.condition(self.tokenize(prompt), given) for prompt, given in zip(case.prompts, self.given_latents(case), strict=True)]

    def pictured(self, case: Case, pictures: Sequence[Mapping[str, Any]]) -> list[Conditions]:
        given = [{name: self.encode_frame(picture) for name, picture in own.items()} for own in pictures]
        return [self.condition(self.tokenize(prompt), one) for prompt, one in zip(case.prompts, given, strict=True)]

    def canvas(self, case: Case) -> tuple[int, int]:
        from loudfail.harness.ports.ltx2_media import SPATIAL

        return case.extent["height"] * SPATIAL, case.extent["width"] * SPATIAL

    def condition(self, prompt_ids: Sequence[int], given: Mapping[str, torch.Tensor] | None = None, seed: int = 0) -> Conditions:
        """Conditions of one sample: token ids of the prompt, and the clean latents ``(C, 1, h, w)`` of the first frame by name; nothing is drawn."""
        context = self._encode(tuple(prompt_ids))
        return Conditions(tuple(prompt_ids), self.encode_prompt(prompt_ids), dict(given or {}), context.extra())

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        extent, given = (case.extent, case.given) if case else (self.smallest, ())
        tokens = (extent["frames"] + len(given)) * extent["height"] * extent["width"]
        return {modality: shifted_grid(calls, tokens) for modality in self.modalities}

    def predict_velocity(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]
    ) -> dict[str, torch.Tensor]:
        raw: dict[str, list[Any]] = {modality: [None] * len(conditions) for modality in self.modalities}
        for members in self.groups(sigmas, conditions):
            inputs = self.inputs(latents, sigmas, conditions, members)
            outputs = self.actor(**inputs, return_dict=False)
            for place, index in enumerate(members):
                for modality, output in zip(self.modalities, outputs, strict=True):
                    raw[modality][index] = output[place, self.first_row(conditions[index]) if modality == "video" else 0 :]
        rows = {m: torch.stack(value).float().to(latents[m].device) for m, value in raw.items()}  # the actor may be on another device
        return self.unpack_rows(rows, {modality: value.shape[1:] for modality, value in latents.items()})

    def first_row(self, condition: Conditions) -> int:
        return given_rows(condition)

    def inputs(
        self, latents: Mapping[str, torch.Tensor], sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions], members: Sequence[int]
    ) -> dict[str, Any]:
        given = [torch.stack([conditions[i].given[name] for i in members]) for name in conditions[members[0]].given]
        video = torch.cat([*(frame.to(latents["video"]) for frame in given), latents["video"][members]], dim=2)
        rows = self.pack({"video": video, "audio": latents["audio"][members]})
        told = {modality: 1000 * sigmas[modality][members] for modality in self.modalities}
        if given:  # a level a token: 0 where it is given
            anchored = torch.arange(rows["video"].shape[1], device=told["video"].device) < given_rows(conditions[members[0]])
            told["video"] = told["video"][:, None] * ~anchored
        size, model = dict(zip(("num_frames", "height", "width"), video.shape[2:], strict=True)), self.actor
        tensors = dict(
            hidden_states=rows["video"],
            audio_hidden_states=rows["audio"],
            encoder_hidden_states=torch.stack([conditions[i].extra["video_context"] for i in members]),
            audio_encoder_hidden_states=torch.stack([conditions[i].extra["audio_context"] for i in members]),
            timestep=told["video"],
            audio_timestep=told["audio"],
            encoder_attention_mask=torch.stack([conditions[i].extra["mask"] for i in members]),
            audio_encoder_attention_mask=torch.stack([conditions[i].extra["mask"] for i in members]),
            video_coords=model.rope.prepare_video_coords(len(members), *video.shape[2:], torch.device("cpu"), fps=FPS),
            audio_coords=model.audio_rope.prepare_audio_coords(len(members), rows["audio"].shape[1], torch.device("cpu")),
        )
        moved = {name: value.to(self.device) for name, value in tensors.items()}
        for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states"):
            moved[name] = moved[name].to(getattr(torch, self.dtype)).contiguous()
        return moved | size | {"audio_num_frames": rows["audio"].shape[1]}

    # -- packing -----------------------------------------------------------------------------------------------------------------------------
    def pack(self, latents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from diffusers import LTX2Pipeline

        return {"video": LTX2Pipeline._pack_latents(latents["video"]), "audio": LTX2Pipeline._pack_audio_latents(latents["audio"])}

    def unpack_rows(self, rows: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        channels, frames, height, width = shapes["video"]
        video = rows["video"].reshape(-1, frames, height, width, channels).movedim(-1, 1)
        audio = rows["audio"].unflatten(2, (shapes["audio"][0], shapes["audio"][2])).transpose(1, 2)
        return {"video": video.contiguous(), "audio": audio.contiguous()}

    def groups(self, sigmas: Mapping[str, torch.Tensor], conditions: Sequence[Conditions]) -> list[list[int]]:
        return groups(conditions)

    def row_table(self, seen: Mapping[str, Any], output: Any, place: int, rows: Mapping[str, int]) -> RowTable:
        """The video stream, then the audio stream; a row's place is where it starts: seconds, pixels down, pixels across."""
        video, audio = seen["video_coords"][place, ..., 0].T.cpu(), seen["audio_coords"][place, ..., 0].T.cpu()
        counts = {"video": len(video), "audio": len(audio)}
        told = [seen[name][place].float().cpu().expand(counts[m]) / 1000 for name, m in (("timestep", "video"), ("audio_timestep", "audio"))]
        return RowTable(
            ("video",) * counts["video"] + ("audio",) * counts["audio"],
            torch.arange(sum(counts.values())) < counts["video"] - rows["video"],
            torch.cat(told),
            torch.cat([video, torch.nn.functional.pad(audio, (0, 2))]),
            {"video": seen["hidden_states"][place].detach().cpu(), "audio": seen["audio_hidden_states"][place].detach().cpu()},
            {"video": output[0], "audio": output[1], "sample": torch.tensor(place)},
        )

    # -- vendor ------------------------------------------------------------------------------------------------------------------------------
    def vendor_grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        from loudfail.harness.ports import ltx2_vendor

        case = case or Case(extent=self.smallest)
        noise = {modality: torch.zeros(shape) for modality, shape in self.shapes(case).items()}
        given = dict.fromkeys(case.given, noise["video"][:, :1])
        return ltx2_vendor.walked(self._loop(bool(given)), noise, calls, self.condition(self.tokenize("rain"), given))

    def vendor_steps(self, noise: Mapping[str, torch.Tensor], calls: int, condition: Conditions) -> list[VendorStep]:
        from loudfail.harness.ports import ltx2_vendor

        return ltx2_vendor.denoise(self._loop(bool(condition.given)), noise, calls, condition)

    @lru_cache(maxsize=2)  # noqa: B019  a port lives as long as the run
    def _loop(self, image: bool) -> Any:
        """The vendor's pipeline for latents that are normalized already."""
        from loudfail.harness.ports import ltx2_media, ltx2_vendor

        vae, audio_vae = (ltx2_media.identity(part) for part in (self._video_autoencoder(), self._audio_autoencoder()))
        return ltx2_vendor.pipeline(image, transformer=self.actor, connectors=self.connectors, vae=vae, audio_vae=audio_vae)

    # -- prompt, reference, presentation -----------------------------------------------------------------------------------------------------
    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text.strip(), truncation=True, max_length=ltx2_text.TOKENS)["input_ids"])

    def encode_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        return self._encode(tuple(ids)).embeds

    def rollout_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], torch.Tensor]:
        context = self._encode_in_rollout(ids)
        return context.ids, context.embeds

    def reference_prompt(self, text: str) -> tuple[int, ...]:
        from loudfail.harness.ports import ltx2_vendor

        return ltx2_vendor.arrivals(self._conditioner(False), text).prompt_ids

    def reference_conditions(self, case: Case) -> list[Conditions]:
        from loudfail.harness.ports import ltx2_vendor

        size = {"frames": case.extent["frames"] + len(case.given), "height": case.extent["height"], "width": case.extent["width"]}
        pipe, images = self._conditioner(bool(case.given)), self.first_frames(case)
        return [ltx2_vendor.arrivals(pipe, prompt, image, size) for prompt, image in zip(case.prompts, images, strict=True)]

    def rollout_conditions(self, case: Case) -> list[Conditions]:
        contexts = [(ids, self._encode_in_rollout(ids)) for ids in map(self.tokenize, case.prompts)]
        return [Conditions(ids, context.embeds, {}, context.extra()) for ids, context in contexts]

    @lru_cache(maxsize=512)  # noqa: B019  a port lives as long as the run
    def _encode(self, ids: tuple[int, ...]) -> ltx2_text.Context:
        return ltx2_text.encode(self._presenter, self.connectors, ids)

    def _encode_in_rollout(self, ids: Sequence[int]) -> ltx2_text.Context:
        """Through vLLM-Omni's own prompt path, in the ranks."""

        def load(world: World) -> None:
            modules = {"text_encoder": self.text_encoder, "connectors": self.connectors}
            states = None if self.weights else {name: {k: v.cpu() for k, v in module.state_dict().items()} for name, module in modules.items()}
            world.call(ltx2_text.load_rollout_encoder, self.weights, self.width, self.dtype, states)

        context = self.encoding_world(load).call(ltx2_text.rollout_encode, tuple(ids))[0]
        assert context is not None  # rank 0 answers
        return context

    @cached_property
    def tokenizer(self) -> Any:
        return ltx2_text.tokenizer(self.weights)

    @cached_property
    def text_encoder(self) -> Any:
        return ltx2_text.encoder(self.weights, self.width, self.dtype).to(self.device)

    @cached_property
    def connectors(self) -> Any:
        return ltx2_text.connectors(self.weights, self.width, self.dtype).to(self.device)

    @cached_property
    def _presenter(self) -> Any:
        """diffusers' pipeline around an encoder that is given ids."""
        from loudfail.harness.ports import ltx2_vendor

        pipe = ltx2_vendor.pipeline(False, text_encoder=self.text_encoder)
        pipe.tokenizer = ltx2_text.IdTokenizer(ltx2_text.tokenizer(self.weights))
        return pipe

    @lru_cache(maxsize=2)  # noqa: B019  a port lives as long as the run
    def _conditioner(self, image: bool) -> Any:
        """The vendor's pipeline for strings and pictures."""
        from loudfail.harness.ports import ltx2_vendor

        text = dict(text_encoder=self.text_encoder, tokenizer=ltx2_text.tokenizer(self.weights), connectors=self.connectors)
        return ltx2_vendor.pipeline(image, transformer=self.actor, vae=self.vae, audio_vae=self.audio_vae, **text)

    # -- condition ---------------------------------------------------------------------------------------------------------------------------
    def given_latents(self, case: Case) -> list[dict[str, torch.Tensor]]:
        return [{} if image is None else {"first": self.encode_frame(image)} for image in self.first_frames(case)]

    def first_frames(self, case: Case) -> list[Any]:
        """The first frame of each sample, uint8 ``(32·h, 32·w, 3)`` noise, one of four a size, or None where none is given."""
        size = (*self.canvas(case), 3)
        return [_picture((case.seed + index) % 4, size) if case.given else None for index in range(case.batch)]

    def encode_frame(self, image: Any) -> torch.Tensor:
        """Clean latents ``(C, 1, H/32, W/32)`` of a uint8 ``(H, W, 3)`` picture."""
        from loudfail.harness.ports import ltx2_media

        return ltx2_media.encode_frame(self.vae, self._media, image)

    def latent_statistics(self) -> tuple[Any, Any]:
        """Mean and deviation of each channel of video latents."""
        return self.vae.latents_mean.cpu(), self.vae.latents_std.cpu()

    # -- media -------------------------------------------------------------------------------------------------------------------------------
    def decode(self, latents: Mapping[str, torch.Tensor]) -> list[Media]:
        """Clean latents → media of each sample: frames at 24 a second, stereo at 24 kHz."""
        from loudfail.harness.ports import ltx2_media

        return ltx2_media.decode({"vae": self.vae, "audio_vae": self.audio_vae, "vocoder": self.vocoder}, self._media, latents)

    def _video_autoencoder(self) -> Any:
        from loudfail.harness.ports import ltx2_media

        vae = ltx2_media.video_autoencoder(self.weights, SCALES[self.scale].get("in_channels", 128)).to(self.device)
        return vae.bfloat16() if self.dtype == "bfloat16" else vae  # the vendor's pipeline casts a first frame to the prompt's dtype

    def _audio_autoencoder(self) -> Any:
        from loudfail.harness.ports import ltx2_media

        return ltx2_media.audio_autoencoder(self.weights, *self.audio_shape).to(self.device)

    @cached_property
    def vae(self) -> Any:
        return self._video_autoencoder()

    @cached_property
    def audio_vae(self) -> Any:
        return self._audio_autoencoder()

    @cached_property
    def vocoder(self) -> Any:
        from loudfail.harness.ports import ltx2_media

        return ltx2_media.vocoder(self.weights, self.audio_shape[1]).to(self.device)

    @cached_property
    def _media(self) -> Any:
        from loudfail.harness.ports import ltx2_vendor

        return ltx2_vendor.pipeline(False, vae=self.vae, audio_vae=self.audio_vae, vocoder=self.vocoder)

    # -- shared ------------------------------------------------------------------------------------------------------------------------------
    def parts(self) -> list[Any]:
        made = [vars(self)[name] for name in ("vae", "audio_vae", "vocoder") if name in vars(self)]
        return [self.actor, self._presenter.scheduler, self.text_encoder, self.tokenizer, self.connectors, *made]


@lru_cache(maxsize=64)
def _picture(number: int, size: tuple[int, int, int]) -> Any:
    import numpy as np

    return np.random.default_rng([number, *size]).integers(0, 256, size, dtype=np.uint8)
