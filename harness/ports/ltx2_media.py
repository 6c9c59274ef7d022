"""LTX-2's autoencoders and vocoder: a first frame in, video and stereo sound out, by diffusers' own pipeline parts.

Without a checkpoint they are the real classes with few channels and seeded weights; what others rely on is kept: 32× spatial and 8× temporal
compression with a first frame of its own, 4 mel frames of 10 ms a latent, a vocoder that turns 100 of them a second into 24 kHz, and latent
statistics that are not the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.violation import Unavailable

#: Pixels that one latent covers, along each side.
SPATIAL = 32


def video_autoencoder(weights: str | None, channels: int) -> Any:
    """``AutoencoderKLLTX2Video`` of a checkpoint folder, or a tiny one."""
    from diffusers import AutoencoderKLLTX2Video

    if weights is not None:
        return _load(AutoencoderKLLTX2Video, weights, "vae")
    model = AutoencoderKLLTX2Video(
        latent_channels=channels, block_out_channels=(8, 16, 32, 64), decoder_block_out_channels=(8, 16, 32), layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4, decoder_causal=False, spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    return _seed(model, 32, gain=1.3)


def audio_autoencoder(weights: str | None, channels: int, bins: int) -> Any:
    """``AutoencoderKLLTX2Audio`` of a checkpoint folder, or a tiny one for latents of so many channels and mel bins."""
    from diffusers import AutoencoderKLLTX2Audio

    if weights is not None:
        return _load(AutoencoderKLLTX2Audio, weights, "audio_vae")
    model = AutoencoderKLLTX2Audio(base_channels=channels * bins, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=channels, mel_bins=4 * bins)
    return _seed(model, 33, gain=1.5)


def vocoder(weights: str | None, bins: int) -> Any:
    """``LTX2Vocoder`` of a checkpoint folder, or a tiny one for spectrograms of so many latent mel bins."""
    from diffusers.pipelines.ltx2 import LTX2Vocoder

    if weights is not None:
        return _load(LTX2Vocoder, weights, "vocoder")
    model = LTX2Vocoder(in_channels=8 * bins, hidden_channels=64, resnet_kernel_sizes=[3], resnet_dilations=[[1]])
    return _seed(model, 34, gain=1.3)


@torch.no_grad()
def decode(parts: Mapping[str, Any], pipe: Any, latents: Mapping[str, torch.Tensor]) -> list[Media]:
    """Media of each sample from clean latents, video ``(B, C, F, H, W)`` and audio ``(B, C, L, M)``: uint8 frames at 24 a second and a stereo
    float32 waveform at the vocoder's rate.

    Args:
        parts: ``vae``, ``audio_vae`` and ``vocoder``.
        pipe: the vendor's pipeline, for its normalization, layouts and frames.

    Raises:
        ValueError: latents that are not finite.
    """
    import numpy as np

    for modality in ("video", "audio"):
        if not torch.isfinite(latents[modality]).all():
            raise ValueError(f"{modality} latents have NaN or infinite values; nothing to decode")
    vae, audio_vae, speak = parts["vae"], parts["audio_vae"], parts["vocoder"]
    result = []
    for video, audio in zip(latents["video"], latents["audio"], strict=True):
        x = pipe._denormalize_latents(video[None].to(vae.device), vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        frames = pipe.video_processor.postprocess_video(vae.decode(x.to(vae.dtype), None, return_dict=False)[0], output_type="np")[0]
        rows = pipe._denormalize_audio_latents(pipe._pack_audio_latents(audio[None].to(vae.device)), audio_vae.latents_mean, audio_vae.latents_std)
        wave = speak(audio_vae.decode(pipe._unpack_audio_latents(rows, audio.shape[1], audio.shape[2]), return_dict=False)[0])[0]
        pixels = (frames * 255).round().astype(np.uint8)
        sound = np.ascontiguousarray(wave.float().cpu().numpy(), dtype=np.float32)
        result.append(Media(Video(pixels, 24.0), Audio(sound, int(speak.config.output_sampling_rate))))
    return result


@torch.no_grad()
def encode_frame(vae: Any, pipe: Any, image: Any) -> torch.Tensor:
    """Clean latents ``(C, 1, H/32, W/32)`` float32 of a uint8 ``(H, W, 3)`` first frame: compressed as one frame of video, as in LTX-2's training,
    scaled to [-1, 1], the posterior's mode, latent statistics.

    Raises:
        ValueError: not a picture, or of sides that are no multiples of 32.
        Unavailable: no PyAV to compress with.
    """
    from diffusers.pipelines.ltx2.utils import DEFAULT_IMAGE_CRF, apply_image_conditioning_crf

    shape, dtype = tuple(getattr(image, "shape", ())), str(getattr(image, "dtype", type(image).__name__))
    if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or any(side == 0 or side % SPATIAL for side in shape[:2]):
        raise ValueError(f"first frame is {dtype} {shape}; want uint8 (H, W, 3) with sides that are multiples of {SPATIAL}")
    try:
        image = apply_image_conditioning_crf(image, DEFAULT_IMAGE_CRF)
    except ImportError as error:
        raise Unavailable(f"first frames are compressed before they are encoded: {error}") from error
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None, :, None] / 255 * 2 - 1  # on the CPU: a GPU divides otherwise
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode().float()  # what follows is float32, as in the vendor's
    return pipe._normalize_latents(latents, vae.latents_mean, vae.latents_std)[0].cpu()


def _load(kind: Any, weights: str, name: str) -> Any:
    folder = Path(weights) / name
    if not folder.is_dir():
        raise Unavailable(f"no folder {folder}; --weights wants a Diffusers checkpoint with transformer/, text_encoder/, vae/, audio_vae/ …")
    return kind.from_pretrained(folder, local_files_only=True).eval().requires_grad_(False)


@torch.no_grad()
def _seed(model: Any, seed: int, gain: float) -> Any:
    """Seeded weights that keep the size of what passes through them, and statistics that differ from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            fan = parameter[:, 0].numel() if "upsamplers" in name and parameter.ndim == 3 else parameter[0].numel()
            parameter.normal_(generator=generator).mul_(gain / fan**0.5)
        elif name.endswith("bias"):
            parameter.normal_(generator=generator).mul_(0.02)
    for name, buffer in model.named_buffers():
        places = torch.arange(buffer.numel(), dtype=torch.float64)
        if name.endswith("latents_mean"):
            buffer.copy_(0.3 * torch.sin(1 + places))
        elif name.endswith("latents_std"):
            buffer.copy_(1 + 0.4 * torch.cos(2 * places))
    return model.eval().requires_grad_(False)


def identity(model: Any) -> Any:
    """The same autoencoder with statistics that change nothing."""
    model.latents_mean.zero_()
    model.latents_std.fill_(1.0)
    return model
