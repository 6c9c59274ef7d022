"""Waveforms as scorers want them: mono, at their rate, in windows, and as Kaldi filter-bank features.

The resampler and the filter bank follow the published formulas of torchaudio (`functional.resample`, BSD-2) and Kaldi (`compute-fbank-feats`), and
agree with torchaudio bit for bit; torchaudio itself is not needed, since its wheels do not import beside every torch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from loudfail.harness.media import Audio


def mix_down(audio: Audio) -> torch.Tensor:
    """The mean over channels, ``(samples,)`` float32 in [-1, 1].

    All channels are heard alike, so a score does not depend on their order. What differs in sign between them cancels; the stereo monitor shows that.

    Raises:
        ValueError: the waveform is not ``(channels, samples)`` float32, is empty, or leaves [-1, 1]. `Audio` refuses that already; here it is asked
            again, because a scorer that is given integers, a transposed or an unscaled waveform answers with a plausible number.
    """
    x = torch.tensor(audio.waveform)
    if x.ndim != 2 or x.dtype != torch.float32 or not 1 <= x.shape[0] <= 8 or x.shape[1] == 0:
        raise ValueError(f"waveform is {tuple(x.shape)} {x.dtype}; want (channels <= 8, samples > 0) float32")
    peak = float(x.abs().max())
    if not peak <= 1.0:
        raise ValueError(f"waveform's peak is {peak:.4g}; want finite samples in [-1, 1]")
    return x.mean(0)


def resample_soxr(x: torch.Tensor, rate: int, target: int) -> torch.Tensor:
    """Resample ``(samples,)`` with soxr in its high quality, what audio loaders use by default."""
    if rate == target:
        return x
    import soxr

    return torch.from_numpy(np.ascontiguousarray(soxr.resample(x.numpy(), rate, target, quality="HQ"), dtype=np.float32))


@lru_cache(maxsize=16)
def _sinc_kernel(up: int, down: int, width: int = 6, rolloff: float = 0.99) -> tuple[torch.Tensor, int]:
    cutoff = min(up, down) * rolloff
    half = math.ceil(width * down / cutoff)
    t = torch.arange(0, -up, -1, dtype=torch.float32)[:, None, None] / up + torch.arange(-half, half + down, dtype=torch.float32)[None, None] / down
    t = (t * cutoff).clamp(-width, width)
    window = torch.cos(t * math.pi / width / 2) ** 2
    t = t * math.pi
    return torch.where(t == 0, torch.tensor(1.0), t.sin() / t) * (window * (cutoff / down)), half


def resample_sinc(x: torch.Tensor, rate: int, target: int) -> torch.Tensor:
    """Resample ``(samples,)`` float32 by windowed-sinc interpolation (Hann, 6 zero crossings, rolloff 0.99), torchaudio's default."""
    if rate == target:
        return x
    common = math.gcd(rate, target)
    down, up = rate // common, target // common
    kernel, half = _sinc_kernel(up, down)
    y = F.conv1d(F.pad(x[None, None], (half, half + down)), kernel, stride=down)
    length = math.ceil(up * x.shape[0] / down)
    return y.transpose(1, 2).reshape(-1)[:length]


def windows(x: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Cut ``(samples,)`` into as few windows of at most ``length`` samples as cover it, evenly spaced, the last one ending with the signal."""
    n = x.shape[0]
    count = max(1, math.ceil(n / length))
    starts = [round(i * (n - length) / (count - 1)) for i in range(count)] if count > 1 else [0]
    return [x[s : s + length] for s in starts]


def _mel(hz: torch.Tensor | float) -> torch.Tensor:
    return 1127.0 * (1.0 + torch.as_tensor(hz) / 700.0).log()


@lru_cache(maxsize=4)
def _mel_filters(rate: int, bins: int, fft: int, low: float) -> torch.Tensor:
    low_mel, high_mel = 1127.0 * math.log(1.0 + low / 700.0), 1127.0 * math.log(1.0 + 0.5 * rate / 700.0)
    step = (high_mel - low_mel) / (bins + 1)
    index = torch.arange(bins)[:, None]
    left, centre, right = low_mel + index * step, low_mel + (index + 1.0) * step, low_mel + (index + 2.0) * step
    mel = _mel(rate / fft * torch.arange(fft / 2))[None]
    triangle = torch.min((mel - left) / (centre - left), (right - mel) / (right - centre)).clamp(min=0.0)
    return F.pad(triangle, (0, 1))


def fbank(x: torch.Tensor, rate: int = 16000, bins: int = 128) -> torch.Tensor:
    """Kaldi log mel energies with the settings of ImageBind: 25 ms Hann frames every 10 ms, pre-emphasis 0.97, DC removed, no dither, from 20 Hz.

    Args:
        x: ``(samples,)`` float32 in [-1, 1].

    Returns:
        ``(frames, bins)`` float32, natural logarithm, floor at the logarithm of float32's epsilon.

    Raises:
        ValueError: shorter than one frame.
    """
    size, hop, fft = rate * 25 // 1000, rate * 10 // 1000, 512
    if x.shape[0] < size:
        raise ValueError(f"{x.shape[0]} samples at {rate} Hz are less than one frame of {size}")
    frames = x.unfold(0, size, hop)
    frames = frames - frames.mean(1, keepdim=True)
    frames = frames - 0.97 * F.pad(frames[None], (1, 0), mode="replicate")[0, :, :-1]
    frames = frames * torch.hann_window(size, periodic=False)
    power = torch.fft.rfft(F.pad(frames, (0, fft - size))).abs().pow(2.0)
    energy = torch.mm(power, _mel_filters(rate, bins, fft, 20.0).T)
    return energy.clamp(min=torch.finfo(torch.float32).eps).log()
