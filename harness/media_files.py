"""Media on disk: an exact copy for machines, an mp4 with sound and a picture for people. Imports PyAV and Pillow only when they are needed."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.violation import Unavailable

if TYPE_CHECKING:
    from PIL import Image


def save_media(media: Any, path: str | Path) -> None:
    """Write every part of a sample with its rate to an ``.npz``, bit for bit; what a logged reward is recomputed from.

    Args:
        media: `Media`, or another dataclass whose fields are `Video` or `Audio`.
        path: of the file.
    """
    arrays: dict[str, Any] = {}
    for part in fields(media):
        value = getattr(media, part.name)
        if isinstance(value, Video):
            arrays |= {f"{part.name}/frames": value.frames, f"{part.name}/fps": np.float64(value.fps)}
        else:
            arrays |= {f"{part.name}/waveform": value.waveform, f"{part.name}/sample_rate": np.int64(value.sample_rate)}
    np.savez_compressed(path, **arrays)


def load_media(path: str | Path, kind: type = Media) -> Any:
    """Read what `save_media` wrote, as a sample of that class.

    Raises:
        KeyError: the file lacks a part.
        ValueError: a part does not fit (see `Media`).
    """
    parts: dict[str, Video | Audio] = {}
    with np.load(path, allow_pickle=False) as file:
        for part in fields(kind):
            if f"{part.name}/frames" in file:
                parts[part.name] = Video(file[f"{part.name}/frames"], float(file[f"{part.name}/fps"]))
            else:
                parts[part.name] = Audio(file[f"{part.name}/waveform"], int(file[f"{part.name}/sample_rate"]))
    return kind(**parts)


def write_mp4(media: Media, path: str | Path) -> None:
    """Write an mp4 with H.264 video and stereo AAC sound; lossy, for people. Odd heights and widths lose their last row or column.

    Raises:
        Unavailable: PyAV is not installed.
        ValueError: the video is a single pixel wide or high.
    """
    av = _import_av()
    frames, waveform = media.video.frames, media.audio.waveform
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
    if not height or not width:
        raise ValueError(f"frames are {frames.shape[1:3]}; H.264 wants at least 2 by 2 pixels")
    with av.open(str(path), "w", format="mp4") as container:
        picture = container.add_stream("libx264", rate=Fraction(media.video.fps).limit_denominator(1001), options={"crf": "16", "preset": "veryfast"})
        picture.width, picture.height, picture.pix_fmt = width, height, "yuv420p"
        sound = container.add_stream("aac", rate=media.audio.sample_rate, layout="stereo")
        for image in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), format="rgb24")
            container.mux(picture.encode(frame))
        container.mux(picture.encode())
        for start in range(0, waveform.shape[1], 1024):
            block = av.AudioFrame.from_ndarray(np.ascontiguousarray(waveform[:, start : start + 1024]), format="fltp", layout="stereo")
            block.sample_rate, block.pts, block.time_base = media.audio.sample_rate, start, Fraction(1, media.audio.sample_rate)
            container.mux(sound.encode(block))
        container.mux(sound.encode())


def read_mp4(path: str | Path) -> Media:
    """Decode an mp4 with stereo sound.

    Raises:
        Unavailable: PyAV is not installed.
        ValueError: there is no picture, or no sound.
    """
    av = _import_av()
    with av.open(str(path)) as container:
        if not container.streams.video or not container.streams.audio:
            raise ValueError(f"{path} has {len(container.streams.video)} video and {len(container.streams.audio)} audio streams; want one of each")
        fps = float(container.streams.video[0].average_rate)
        rate = int(container.streams.audio[0].rate)
        frames, blocks = [], []
        for frame in container.decode(video=0, audio=0):
            if isinstance(frame, av.VideoFrame):
                frames.append(frame.to_ndarray(format="rgb24"))
            else:
                blocks.append(frame.to_ndarray())
    return Media(Video(np.stack(frames), fps), Audio(np.clip(np.concatenate(blocks, 1).astype(np.float32), -1, 1), rate))


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise Unavailable(f"PyAV does not import ({error}): pip install av") from error
    return av


def draw_media(media: Media, *, title: str = "", width: int = 1200, frames: int = 8) -> Image.Image:
    """One sample as a picture: a strip of frames, both channels' waveform, and the spectrogram of their mean; time runs to the
    right, in each over its own length.

    Args:
        title: shown at the top.
        width: of the picture, in pixels.
        frames: how many frames the strip shows at most, evenly spaced, first and last included.

    Raises:
        Unavailable: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise Unavailable(f"Pillow does not import ({error}): pip install pillow") from error
    video, audio = media.video, media.audio
    count, height, across = video.frames.shape[:3]
    shown = np.unique(np.linspace(0, count - 1, min(frames, count)).round().astype(int))
    cell = width // len(shown)
    tall = max(1, min(round((cell - 4) * height / across), 240))
    wide = max(1, min(cell - 4, round(tall * across / height)))
    wave, spectrum, line, gap = 64, 200, 14, 6
    rows = (gap, line, tall, line, wave, wave, line, spectrum, gap)
    picture = Image.new("RGB", (width, sum(rows) + gap * (len(rows) - 1)), "white")
    draw = ImageDraw.Draw(picture)
    tops = np.cumsum([0, *(r + gap for r in rows)])
    seen = f"{count} frames {across}x{height} at {video.fps:g} fps = {video.seconds:.2f} s"
    heard = f"{audio.seconds:.2f} s of sound at {audio.sample_rate} Hz"
    draw.text((gap, tops[1]), f"{title}   {seen}, {heard}".strip(), fill="black")
    for i, index in enumerate(shown):
        image = Image.fromarray(video.frames[index]).resize((wide, tall), Image.Resampling.NEAREST if wide >= across else Image.Resampling.BOX)
        picture.paste(image, (i * cell + (cell - wide) // 2, int(tops[2])))
        draw.text((i * cell + gap, tops[3]), f"{index / video.fps:.2f} s", fill="black")
    for channel, top in enumerate(tops[4:6]):
        draw.rectangle((0, top, width - 1, top + wave), outline="lightgray")
        for x, (low, high) in enumerate(_envelope(audio.waveform[channel], width)):
            draw.line((x, top + wave * (1 - high) / 2, x, top + wave * (1 - low) / 2), fill="steelblue")
        draw.text((gap, top + 1), "LR"[channel], fill="black")
    draw.text((gap, tops[6]), f"mean of L and R, 0 to {audio.sample_rate / 2000:g} kHz, -100 to 0 dB", fill="black")
    picture.paste(Image.fromarray(_spectrogram(audio.waveform.mean(0))).resize((width, spectrum), Image.Resampling.BILINEAR), (0, int(tops[7])))
    return picture


def _envelope(x: np.ndarray, columns: int) -> list[tuple[float, float]]:
    edges = np.linspace(0, len(x), columns + 1).astype(int)
    return [(float(part.min()), float(part.max())) for a, b in pairwise(edges) for part in [x[a : max(b, a + 1)]]]


def _spectrogram(x: np.ndarray, size: int = 512) -> np.ndarray:
    """Power in dB as colours, low frequencies at the bottom, ``(size / 2, frames, 3)`` uint8."""
    x = np.pad(x, (0, max(0, size - len(x))))
    window = np.hanning(size)
    hop = max(1, (len(x) - size) // 1000 or 1, size // 4 if len(x) > 100 * size else 1)
    frames = np.lib.stride_tricks.sliding_window_view(x, size)[::hop] * window
    power = np.abs(np.fft.rfft(frames, axis=1))[:, :-1].T * 2 / window.sum()
    level = np.clip((20 * np.log10(np.maximum(power, 1e-6)) + 100) / 100, 0, 1)[::-1]
    stops = np.array([(0, 0, 4), (80, 18, 123), (182, 54, 121), (251, 136, 97), (252, 253, 191)], dtype=float)
    at = level * (len(stops) - 1)
    low = np.minimum(at.astype(int), len(stops) - 2)
    part = (at - low)[..., None]
    return (stops[low] * (1 - part) + stops[low + 1] * part).round().astype(np.uint8)
