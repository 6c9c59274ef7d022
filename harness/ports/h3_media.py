"""MiniMax H3's autoencoders: keyframes in, video and stereo sound out, by diffusers' own blocks.

Without a checkpoint both autoencoders are the real classes with few channels and seeded weights; what others rely on is kept: 24 and 32 latent
channels, 16× spatial compression, chunks of 17 frames, 800 samples a latent at 32 kHz, and latent statistics that are not the identity.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.violation import Unavailable

if TYPE_CHECKING:
    import numpy as np

#: Pixels that one latent covers, along each side.
SPATIAL = 16


def video_autoencoder(weights: str | None) -> Any:
    """``AutoencoderKLMiniMaxH3`` of a checkpoint folder, or the tiny one.

    Raises:
        Unavailable: the folder has no ``vae/``.
    """
    from diffusers import AutoencoderKLMiniMaxH3

    if weights is not None:
        return AutoencoderKLMiniMaxH3.from_pretrained(_folder(weights, "vae"), local_files_only=True).eval().requires_grad_(False)
    mean, std = _statistics(24)
    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(8, 8, 8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, decoder_num_layers=1, decoder_num_attention_heads=2,
        decoder_attention_head_dim=16, decoder_ffn_mult=2, latents_mean=mean, latents_std=std,
    )  # fmt: skip
    _seed(model, 24)
    with torch.no_grad():
        model.quant_conv.weight[:24] *= 2.0  # latents of unit size
        model.quant_conv.bias[24:] = -8.0  # a narrow posterior, as in a trained autoencoder: what is encoded outweighs the sampling noise
    return model.eval().requires_grad_(False)


def audio_autoencoder(weights: str | None) -> Any:
    """``AutoencoderKLMiniMaxH3Audio`` of a checkpoint folder, or the tiny one.

    Raises:
        Unavailable: the folder has no ``audio_vae/``.
    """
    from diffusers import AutoencoderKLMiniMaxH3Audio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # upstream's weight_norm
        if weights is not None:
            return AutoencoderKLMiniMaxH3Audio.from_pretrained(_folder(weights, "audio_vae"), local_files_only=True).eval().requires_grad_(False)
        mean, std = _statistics(32)
        model = AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2, latent_dim=32, num_attention_heads=2, decoder_dim=128, resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1,),),
            latents_mean=list(mean), latents_std=list(std),
        )  # fmt: skip
    _seed(model, 32)
    with torch.no_grad():
        model.decoder.conv_post.weight_g *= 0.025  # below the clamp at ±1
    return model.eval().requires_grad_(False)


def encode_keyframes(autoencoders: Autoencoders, images: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Clean conditioning latents ``(24, 1, H/16, W/16)`` float32 of uint8 ``(H, W, 3)`` keyframes: ImageNet statistics, a posterior sample under
    seed 42, float16 rounding, latent statistics.

    Raises:
        ValueError: an image that is not uint8 ``(H, W, 3)`` with sides that are multiples of 32.
    """
    for image in images:
        check_keyframe(image)
    latents = autoencoders.keyframes(keyframes=list(images), output="condition_latents")
    return [latent[0] for latent in latents]


def check_keyframe(image: Any) -> None:
    """Refuse what is not a keyframe."""
    shape, dtype = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", type(image).__name__))
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or any(side == 0 or side % (2 * SPATIAL) for side in shape[:2]):
        raise ValueError(f"keyframe is {dtype} {shape}; want uint8 (H, W, 3) with sides that are multiples of {2 * SPATIAL}")


def decode(autoencoders: Autoencoders, latents: Mapping[str, torch.Tensor]) -> list[Media]:
    """Media of each sample from clean latents, video ``(B, 24, t, h, w)`` and audio ``(B, 2, 32, n)``: uint8 frames at 24 a second (``17·k + 5`` for
    ``5·k + 2`` latent frames) and a stereo float32 waveform of ``800·n`` samples at 32 kHz.

    Raises:
        ValueError: latents that are not finite.
    """
    import numpy as np

    for modality in ("video", "audio"):
        if not torch.isfinite(latents[modality]).all():
            raise ValueError(f"{modality} latents have NaN or infinite values; nothing to decode")
    result = []
    for video, audio in zip(latents["video"], latents["audio"], strict=True):
        video, count = _whole_chunk(autoencoders.vae, video)
        state = autoencoders.media(latents=video[None].to(autoencoders.device), audio_latents=audio.to(autoencoders.device), output_type="pil")
        frames = np.stack([np.asarray(frame) for frame in state.get("videos")[0][:count]])
        waveform = np.ascontiguousarray(state.get("audio")[0].cpu().numpy(), dtype=np.float32)
        result.append(Media(Video(frames, float(autoencoders.fps)), Audio(waveform, int(state.get("sampling_rate")))))
    return result


def _whole_chunk(vae: Any, video: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """Repeat the last latent frame of a clip of one or two, and how many frames of the result are the clip's.

    Upstream pads so itself, except that its chunk count is zero for so short a clip, which the released pipeline (5 s or more) never makes.
    """
    frames = video.shape[1]
    if frames + vae.config.token_drop > vae.tokens_chunk_size:
        return video, None
    missing = 2 * vae.tokens_chunk_size - vae.config.token_drop - frames
    return torch.cat([video, video[:, -1:].repeat(1, missing, 1, 1)], dim=1), 1 + (frames - 1) * vae.temporal_compression_ratio


class Autoencoders:
    """The two autoencoders of a port, and diffusers' blocks around them.

    Args:
        weights: checkpoint folder with ``vae/`` and ``audio_vae/``, or None for the tiny ones.
        device: where they run. Both stay in float32, as upstream keeps them.
    """

    def __init__(self, weights: str | None, device: str) -> None:
        from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep, MiniMaxH3VideoDecodeStep
        from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3KeyframeVaeEncoderStep

        self.vae = video_autoencoder(weights).to(device)
        self.audio_vae = audio_autoencoder(weights).to(device)
        self.device = torch.device(device)
        self.keyframes = pipeline_of(MiniMaxH3KeyframeVaeEncoderStep, vae=self.vae)
        self.media = pipeline_of(MiniMaxH3VideoDecodeStep, MiniMaxH3AudioDecodeStep, vae=self.vae, audio_vae=self.audio_vae)
        self.fps = self.media.fps


def pipeline_of(*steps: Any, **components: Any) -> Any:
    """A ``MiniMaxH3ModularPipeline`` of some of diffusers' blocks with components from memory."""
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks

    class Blocks(SequentialPipelineBlocks):
        model_name = "minimax-h3"
        block_classes = list(steps)
        block_names = [step.__name__ for step in steps]

    pipeline = MiniMaxH3ModularPipeline(blocks=Blocks())
    pipeline.update_components(**components)
    return pipeline


def _folder(weights: str, name: str) -> Path:
    folder = Path(weights) / name
    if not folder.is_dir():
        raise Unavailable(f"no folder {folder}; --weights wants a Diffusers checkpoint with transformer/, text_encoder/, vae/, audio_vae/ …")
    return folder


def _statistics(channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Latent mean and deviation of each channel, all different, so that a skipped or doubled normalization shows."""
    return tuple(round(0.3 * math.sin(1 + c), 4) for c in range(channels)), tuple(round(1.0 + 0.4 * math.cos(2 * c), 4) for c in range(channels))


@torch.no_grad()
def _seed(model: Any, seed: int) -> None:
    """Seeded weights that keep the size of what passes through them, so that the output depends on every latent."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf == "weight_g":
            continue  # set below, from its direction
        if parameter.ndim >= 2 and leaf != "alpha":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
        elif leaf == "bias":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    for module in model.modules():
        if hasattr(module, "weight_g"):
            module.weight_g.copy_(module.weight_v.flatten(1).norm(dim=1).view_as(module.weight_g))
