"""What ImageBind is given: normalised views of a video and mel spectrograms of a waveform, in torch alone.

Written from the published protocol, not from ImageBind's code (which is CC BY-NC-SA): 2 s clips spread over the sample, two frames a clip, short
side to 224, three crops; 2 s of 16 kHz audio, 128 mel bins, 204 frames. One thing differs on purpose: channels are averaged, where the original hears
the first channel alone.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from loudfail.trainer.rewards.audio import fbank, mix_down, resample_sinc

if TYPE_CHECKING:
    from loudfail.harness.media import Audio, Video

SECONDS = 2
VIDEO_CLIPS, AUDIO_CLIPS, CROPS = 5, 3, 3
RATE, MEL_BINS, MEL_FRAMES = 16_000, 128, 204
MEL_MEAN, MEL_SPREAD = -4.268, 9.138  # of AudioSet; the spread is divided by once
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def clip_starts(duration: Fraction, clips: int) -> list[Fraction]:
    """Start times in seconds of ``clips`` clips of 2 s: multiples of the slack divided by the number of clips, all 0 if there is none."""
    return [i * max(duration - SECONDS, Fraction(0)) / clips for i in range(clips)]


def video_views(video: Video, size: int = 224) -> torch.Tensor:
    """Views of one video, clip by clip and crop by crop.

    Args:
        video: frames ``(T, H, W, 3)`` uint8, RGB.
        size: height and width of a view, a multiple of 14; 224 is what released weights saw.

    Returns:
        ``(15, 3, 2, size, size)`` float32, normalised with CLIP's mean and standard deviation.

    Raises:
        ValueError: the frames have another layout or type, or there are none.
    """
    frames = torch.tensor(video.frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != torch.uint8 or frames.shape[0] == 0:
        raise ValueError(f"frames are {tuple(frames.shape)} {frames.dtype}; want (T > 0, H, W, 3) uint8")
    fps = Fraction(video.fps)
    count, height, width = frames.shape[:3]
    picks = []
    for start in clip_starts(Fraction(count) / fps, VIDEO_CLIPS):
        first, end = math.ceil(fps * start), min(math.ceil(fps * (start + SECONDS)), count)
        picks += [first, max(first, end - 1)]
    used, where = torch.unique(torch.tensor(picks), return_inverse=True)  # clips of a short video share frames; each is resized once

    new_height, new_width = (math.floor(height / width * size), size) if width < height else (size, math.floor(width / height * size))
    pixels = frames[used].permute(0, 3, 1, 2).float() / 255.0
    pixels = F.interpolate(pixels, size=(new_height, new_width), mode="bilinear", align_corners=False)
    pixels = (pixels - torch.tensor(PIXEL_MEAN).view(1, 3, 1, 1)) / torch.tensor(PIXEL_STD).view(1, 3, 1, 1)

    slack = max(new_height, new_width) - size
    offsets = (0, math.ceil(slack / 2), slack)
    crops = [pixels[:, :, o : o + size] if new_height > new_width else pixels[:, :, :, o : o + size] for o in offsets]
    views = torch.stack(crops)[:, where].unflatten(1, (VIDEO_CLIPS, 2))  # crop, clip, frame, channel, y, x
    return views.permute(1, 0, 3, 2, 4, 5).flatten(0, 1).contiguous()


def audio_clips(audio: Audio) -> torch.Tensor:
    """Spectrograms of one waveform.

    Returns:
        ``(3, 1, 128, 204)`` float32, normalised; frames beyond the waveform's end are 0 before normalisation.

    Raises:
        ValueError: the waveform is malformed (see `mix_down`) or shorter than 25 ms.
    """
    x = resample_sinc(mix_down(audio), audio.sample_rate, RATE).clone()
    clips = []
    for start in clip_starts(Fraction(x.shape[0], RATE), AUDIO_CLIPS):
        clip = x[int(start * RATE) : int((start + SECONDS) * RATE)]
        clip -= clip.mean()  # in place, as in the original: clips overlap, so a later one starts from what an earlier one left
        mel = fbank(clip, RATE, MEL_BINS).T
        clips.append(F.pad(mel, (0, max(0, MEL_FRAMES - mel.shape[1])))[None, :, :MEL_FRAMES])
    return (torch.stack(clips) - MEL_MEAN) / MEL_SPREAD
