"""From clean latents to the total reward: every modality is decoded, arrives at the scorers' models, and moves the sub-scores that it must.

Weights of the scorers may be tiny and random: what is claimed is who hears what, never that a score is good. Media are edited by the kind of a
modality's part, `Audio` or `Video`, so that any set of modalities of these kinds is covered.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from loudfail.harness.case import PROMPTS, Case, smallest
from loudfail.harness.compare import note, require, require_at_least, require_close, require_equal
from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.port import Arrival, Port, Reward
from loudfail.harness.registry import invariant
from loudfail.harness.violation import Unavailable, Violation

#: Least change of a score that counts as moved (the largest of a batch), least that each sample must show, since a single one may come out close to
#: where it was by chance, and the largest change that counts as still. Measured on clean ports: at least 3e-5, above 1e-9, and at most 3e-7.
MOVED, TOUCHED, STILL = 3e-6, 1e-9, 2e-6


@dataclass(frozen=True)
class Clip:
    """A sample of media made without any model: chirping tones with noise, and a drifting coloured pattern.

    Attributes:
        seed: everything else that differs.
        seconds: duration; short ones, and ones beyond the window of a scorer.
        rate: sample rate in Hz.
        loudness: peak of the waveform.
        stereo: the channels differ; otherwise they are equal, as mono material is stored.
    """

    seed: int
    seconds: float = 0.5
    rate: int = 32_000
    loudness: float = 0.6
    stereo: bool = True

    def media(self) -> Media:
        random = np.random.default_rng(self.seed)
        t = np.arange(round(self.seconds * self.rate)) / self.rate
        tones = [np.sin(2 * np.pi * (f * t + sweep * t**2 / self.seconds)) for f, sweep in random.uniform((200, 50), (2500, 900), (2, 2))]
        rise = np.linspace(0.2, 1.0, len(t))
        left, right = tones[0] * rise, tones[1] * rise[::-1]
        x = np.stack([left, right] if self.stereo else [left, left]) + 0.02 * random.standard_normal(len(t))
        wave = (self.loudness * x / np.abs(x).max()).astype(np.float32)
        frames, fps = max(3, round(8 * self.seconds)), 8.0
        shift = np.linspace(0, 1, frames)[:, None, None, None] * random.uniform(0.3, 1)
        y, x = np.mgrid[0:32, 0:32] / 32
        turns, phase = random.integers(1, 4, (2, 3)), random.uniform(0, 1, 3)
        wavy = np.cos(2 * np.pi * (turns[0] * y[..., None] + turns[1] * x[..., None] + phase + shift))
        pixels = np.clip(60 + 90 * shift + 50 * wavy + 40 * random.random(3), 0, 255).astype(np.uint8)
        return Media(Video(pixels, fps), Audio(wave, self.rate))

    def sample(self, port: Port) -> Any:
        """`media` as a sample of the port: a part for each modality, of the kind that it decodes to; two parts of one kind differ."""
        item, places = template(port), dict[type, int]()
        for modality in port.modalities:
            kind = type(getattr(item, modality))
            place = places[kind] = places.get(kind, -1) + 1
            made = (replace(self, seed=self.seed + 7919 * place) if place else self).media()
            item = with_part(item, modality, next(part for part in (made.video, made.audio) if isinstance(part, kind)))
        return item


_templates: WeakKeyDictionary[Port, Any] = WeakKeyDictionary()


def template(port: Port) -> Any:
    """One decoded sample of the port, for the kinds of its parts; decoded once."""
    if port not in _templates:
        case = smallest(port, seed=70)
        with torch.no_grad():
            _templates[port] = port.decode(case.normal("clean", port.shapes(case)))[0]
    return _templates[port]


def clips(least: int, most: int) -> Callable[[Port], Any]:
    """Strategy of lists of different clips, unequal in duration, rate, loudness and layout."""

    def build(_: Port) -> Any:
        from hypothesis import strategies as st

        clip = st.builds(
            Clip,
            seed=st.integers(0, 2**31 - 1),
            seconds=st.sampled_from((0.5, 0.8, 0.3)),
            rate=st.sampled_from((16_000, 24_000, 32_000, 44_100, 48_000)),
            loudness=st.sampled_from((0.5, 1.0, 0.2)),
            stereo=st.booleans(),
        )
        return st.lists(clip, min_size=least, max_size=most, unique_by=lambda one: one.seed)

    return build


# -- edits of one part: name → the edited part; each must move what hears or sees it ----------------------------------------------------------------
def _sound(change: Callable[[Any], Any]) -> Callable[[Audio], Audio]:
    return lambda part: Audio(np.ascontiguousarray(change(part.waveform), dtype=np.float32), part.sample_rate)


def _picture(change: Callable[[Any], Any]) -> Callable[[Video], Video]:
    return lambda part: Video(np.ascontiguousarray(change(part.frames), dtype=np.uint8), part.fps)


def _later(x: Any) -> Any:
    gap = x.shape[1] // 3
    return np.pad(x, ((0, 0), (gap, 0)))[:, : x.shape[1]]


def _first_half(x: Any) -> Any:
    return np.concatenate([x[:, : x.shape[1] // 2], 0 * x[:, x.shape[1] // 2 :]], axis=1)


EDITS: dict[type, dict[str, Callable[[Any], Any]]] = {
    Audio: {
        "silenced": _sound(lambda x: 0 * x),
        "constant": _sound(lambda x: 0 * x + 0.1),
        "half as loud": _sound(lambda x: x / 2),
        "later by a third": _sound(_later),
        "its second half silenced": _sound(_first_half),
        "labelled with three quarters of its rate": lambda part: Audio(part.waveform, part.sample_rate * 3 // 4),
    },
    Video: {
        "frozen at its first frame": _picture(lambda x: np.repeat(x[:1], len(x), axis=0)),
        "black": _picture(lambda x: 0 * x),
        "inverted": _picture(lambda x: 255 - x),
        "played backwards": _picture(lambda x: x[::-1]),
    },
}
#: Both channels are mixed, so their order is not heard; but each of them is.
EXCHANGED = _sound(lambda x: x[::-1])
ONE_CHANNEL = {"left silenced": _sound(lambda x: x * [[0], [1]]), "right silenced": _sound(lambda x: x * [[1], [0]])}


# -- shared ------------------------------------------------------------------------------------------------------------------------------------------
def rotate(items: Sequence[Any]) -> list[Any]:
    return [*items[1:], items[0]]


def with_part(item: Any, modality: str, part: Any) -> Any:
    """The sample with another part."""
    return replace(item, **{modality: part})


def exchange(media: Sequence[Any], part: str) -> list[Any]:
    """Each sample with the next one's part."""
    return [with_part(one, part, getattr(other, part)) for one, other in zip(media, rotate(media), strict=True)]


def dependence(reward: Reward) -> dict[str, frozenset[str]]:
    """Sub-score → what it depends on; the total on what its weighted sub-scores depend on."""
    parts = {name: on for name, on in reward.outputs.items() if name != "total"}
    return parts | {"total": frozenset().union(*(on for name, on in parts.items() if reward.weights.get(name, 0) > 0))}


def require_moved(reward: Reward, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], changed: str, where: str) -> None:
    """Scores ``(samples,)`` before and after a part changed in every sample: those that depend on it moved, all others stayed."""
    still, moved, touched = [], [], []
    for name, on in dependence(reward).items():
        require(name in before and name in after, got=sorted(before), want=f"with {name}", where=where)
        change = (after[name].double() - before[name].double()).abs()
        if changed in on:
            moved.append((name, float(change.max())))
            touched.append((name, float(change.min())))
        else:
            still.append((name, float(change.max())))
    for name, size in still:
        note(size, STILL, f"{where}, {name}")
        if not size <= STILL:
            raise Violation(got=size, want=f"{name} stays: it does not depend on {changed}", bound=STILL, where=f"{where}, {name}")
    for name, size in moved:
        require_at_least(size, MOVED, where=f"{where}, {name}")
    for name, size in touched:
        require_at_least(size, TOUCHED, where=f"{where}, {name}, the sample that moved least")


def require_same(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], where: str) -> None:
    """The same sub-scores, each within `STILL`."""
    require(sorted(got) == sorted(want), got=sorted(got), want=sorted(want), where=where)
    for name in want:
        require_close(got[name].double(), want[name].double(), scale=1.0, bound=STILL, where=f"{where}, {name}")


def decoded(port: Port, seed: int, batch: int = 2) -> tuple[dict[str, torch.Tensor], list[Any], list[str]]:
    """Latents of the port's smallest case, their media, and unequal prompts."""
    case = smallest(port, seed=seed, prompts=PROMPTS[:batch])
    latents = case.normal("clean", port.shapes(case))
    with torch.no_grad():
        return latents, port.decode(latents), list(case.prompts)


# -- latents to media --------------------------------------------------------------------------------------------------------------------------------
@invariant("objective", "media")
def each_modality_is_decoded_from_its_own_latents(port: Port) -> None:
    """Exchanging the latents of one modality between two samples exchanges that part of their media, and no other; a sample alone is decoded alike.

    Sees a part that is absent, constant, of another sample, or decoded from the other modality's rows. Oracle: the exchange of two samples.
    """
    latents, media, _ = decoded(port, seed=71)
    with torch.no_grad():
        alone = port.decode({m: x[1:] for m, x in latents.items()})[0]
    for modality in port.modalities:
        require_alike(getattr(alone, modality), getattr(media[1], modality), where=f"sample 1 alone, {modality}")
    for changed in port.modalities:
        with torch.no_grad():
            after = port.decode({m: x.flip(0) if m == changed else x for m, x in latents.items()})
        for modality in port.modalities:
            want = media[::-1] if modality == changed else media
            for index in range(2):
                where = f"latents of {changed} exchanged, sample {index}, {modality}"
                require_alike(getattr(after[index], modality), getattr(want[index], modality), where)
        left, right = (content(getattr(one, changed)).double() for one in media)
        require_at_least(float((left - right).norm() / left.norm()), 1e-2, where=f"{changed}, difference of two samples")


@invariant("objective", "media")
def decoded_media_has_the_published_rate_and_fills_its_range(port: Port) -> None:
    """Decoded parts say the rate that the model publishes, change in time, and are neither silent, flat nor saturated.

    Sees a wrong rate label, an integer range that was scaled twice (then clipped) or not at all, and a part that is replaced by zeros.
    Oracle: the published rates, and the range of the type.
    """
    _, media, _ = decoded(port, seed=72)
    for modality in port.modalities:
        for index, one in enumerate(media):
            part, where = getattr(one, modality), f"sample {index}, {modality}"
            rate = float(part.sample_rate if isinstance(part, Audio) else part.fps)
            require(rate == port.rates.get(modality), got=rate, want=port.rates.get(modality), where=f"{where}, rate")
            x = content(part).double()
            time = 1 if isinstance(part, Audio) else 0
            low, high = (-1.0, 1.0) if isinstance(part, Audio) else (0.0, 255.0)
            clipped = float(((x <= low) | (x >= high)).double().mean())
            note(clipped, 0.3, f"{where}, share at the ends of the range")
            if not clipped <= 0.3:
                raise Violation(got=clipped, want="a part that is not saturated", bound=0.3, where=f"{where}, share at the ends of the range")
            spread = float((x - x.mean(time, keepdim=True)).std() / (high - low))
            require_at_least(spread, 2e-3, where=f"{where}, spread in time, as a share of the range")


def content(part: Any) -> torch.Tensor:
    return torch.tensor(part.waveform if isinstance(part, Audio) else part.frames)


def require_alike(got: Any, want: Any, where: str) -> None:
    """Two parts are the same but for rounding, of which a decoder that works on batches may have some."""
    require_close(content(got).double(), content(want).double(), bound=2e-3, where=where)


# -- media to scores ---------------------------------------------------------------------------------------------------------------------------------
@invariant("objective", "media", "reward")
def every_modality_and_the_prompt_reach_the_total(port: Port) -> None:
    """Exchanging one modality's *latents*, or the prompts, between two samples moves the total and at least one sub-score.

    The failure that this project began with: the audio of the packed latent never reaches the scorers, and the total still moves with the video.
    Measured on the whole path, whatever the scorers say that they depend on. Does not cover: how much each part counts.
    """
    reward = port.reward()
    latents, media, prompts = decoded(port, seed=73)
    before = reward.score(media, prompts)
    for part in (*port.modalities, "prompt"):
        with torch.no_grad():
            after_media = media if part == "prompt" else port.decode({m: x.flip(0) if m == part else x for m, x in latents.items()})
        after = reward.score(after_media, prompts[::-1] if part == "prompt" else prompts)
        sizes = {name: float((after[name] - before[name]).abs().max()) for name in before}
        if reward.missing and not any(part in on for on in reward.outputs.values()):
            raise Unavailable(f"{part} reaches none of the scorers that are here; missing: {dict(reward.missing)}")
        require_at_least(max((v for k, v in sizes.items() if k != "total"), default=0.0), MOVED, where=f"{part} exchanged, largest sub-score")
        require_at_least(sizes.get("total", 0.0), MOVED, where=f"{part} exchanged, total")


@invariant("objective", "media", "reward", examples=2, case=lambda port: _cases(port))
def exchanging_one_part_moves_exactly_the_scores_that_depend_on_it(port: Port, case: Case) -> None:
    """Giving every sample the next one's part (a modality, or the prompt) moves each sub-score that depends on it, and no other, on decoded media.

    Sees a sub-score that is deaf, blind or prompt-blind, one that takes its prompt from elsewhere, and one that hears what it should not.
    """
    reward = port.reward()
    latents = case.normal("clean", port.shapes(case))
    with torch.no_grad():
        media = port.decode(latents)
    prompts = list(case.prompts)
    before = reward.score(media, prompts)
    for part in (*port.modalities, "prompt"):
        after = reward.score(media, rotate(prompts)) if part == "prompt" else reward.score(exchange(media, part), prompts)
        require_moved(reward, before, after, part, where=f"{part} exchanged")


def _cases(port: Port) -> Any:
    from hypothesis import strategies as st

    prompts = st.lists(st.sampled_from(PROMPTS), min_size=2, max_size=2, unique=True).map(tuple)
    return st.builds(lambda seed, prompts: smallest(port, seed=seed, prompts=prompts), st.integers(0, 2**31 - 1), prompts)


@invariant("media", "reward", examples=2, clip=clips(2, 2))
def editing_one_part_moves_exactly_the_scores_that_depend_on_it(port: Port, clip: list[Clip]) -> None:
    """Silence, a constant, another loudness, a shift, a lost half and a wrong rate label of the sound, and a frozen, black, inverted or reversed
    picture, each move every sub-score that depends on the part, and no other.

    One batch holds two samples and all their edits. Sees a part of which only its beginning, its loudness or its first frame counts.
    """
    reward, items = port.reward(), [one.sample(port) for one in clip]
    edits = [(m, name, change) for m in port.modalities for name, change in EDITS[type(getattr(items[0], m))].items()]
    batch = [*items, *(with_part(item, m, change(getattr(item, m))) for m, _, change in edits for item in items)]
    scores, count = reward.score(batch, [PROMPTS[0]] * len(batch)), len(items)
    before, *after = [{name: value[i : i + count] for name, value in scores.items()} for i in range(0, len(batch), count)]
    for (modality, name, _), edited in zip(edits, after, strict=True):
        require_moved(reward, before, edited, modality, where=f"{modality} {name}")


@invariant("media", "reward", examples=2, clip=clips(2, 2))
def both_channels_of_the_sound_are_heard_alike(port: Port, clip: list[Clip]) -> None:
    """Exchanging left and right changes no sub-score; silencing either moves every sub-score that depends on the sound.

    Scorers here mix both channels down. One that took the first channel alone would never hear half of a stereo model's output.
    Does not cover: the stereo image, which a monitor reports.
    """
    reward, items = port.reward(), [replace(one, stereo=True).sample(port) for one in clip]
    for modality in (m for m in port.modalities if isinstance(getattr(items[0], m), Audio)):
        changes = {"both": lambda part: part, "exchanged": EXCHANGED, **ONE_CHANNEL}
        batch = [with_part(item, modality, change(getattr(item, modality))) for change in changes.values() for item in items]
        scores, count = reward.score(batch, [PROMPTS[0]] * len(batch)), len(items)
        rows = {name: {key: value[i * count :][:count] for key, value in scores.items()} for i, name in enumerate(changes)}
        require_same(rows["exchanged"], rows["both"], where=f"{modality}, left and right exchanged")
        for name in ONE_CHANNEL:
            require_moved(reward, rows["both"], rows[name], modality, where=f"{modality}, {name}")


@invariant("media", "reward", examples=2, clip=clips(2, 2))
def a_sample_scores_the_same_alone_in_any_order_and_again(port: Port, clip: list[Clip]) -> None:
    """The scores of a batch of unequal samples are those of its samples asked alone, follow a change of order, and are the same when asked again.

    Sees scores paired by position, prompts compared with the whole batch, normalization over the batch, a stale cache, padding or cutting to a common
    length, and random crops of long clips. Oracle: the same reward, sample by sample.
    """
    reward = port.reward()
    clip = [*clip, Clip(clip[0].seed + 1, seconds=2.7)]  # one is always longer than a small scorer's window
    media, prompts = [one.sample(port) for one in clip], list(PROMPTS[: len(clip)])
    whole = reward.score(media, prompts)
    require_same(reward.score(media, prompts), whole, where="asked again")
    for index, (item, prompt) in enumerate(zip(media, prompts, strict=True)):
        require_same(reward.score([item], [prompt]), {name: value[index : index + 1] for name, value in whole.items()}, where=f"sample {index} alone")
    turned = reward.score(rotate(media), rotate(prompts))
    require_same(turned, {name: torch.cat([value[1:], value[:1]]) for name, value in whole.items()}, where="in another order")
    for name, value in whole.items():
        distance = (value[:, None] - value[None]).abs() + torch.eye(len(clip), dtype=value.dtype)
        require_at_least(float(distance.min()), 1e-9, where=f"{name}, difference between samples")


def _seeds(_: Port) -> Any:
    from hypothesis import strategies as st

    return st.integers(0, 2**31 - 1)


def rustle(seed: int, rate: int, seconds: float = 0.8) -> Audio:
    """Sixty sines between 20 Hz and 10.5 kHz that fade in and out: the same band-limited sound, computed at any rate above 21 kHz."""
    random = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    fade = np.minimum(1, 10 * np.minimum(t, seconds - t))
    waves = zip(20 * 525 ** random.random(60), 2 * np.pi * random.random(60), random.uniform(0.2, 1, 60), strict=True)
    x = fade * sum(size * np.sin(2 * np.pi * hertz * t + phase) for hertz, phase, size in waves) / 40
    return Audio(np.stack([x, 0.8 * x]).astype(np.float32), rate)


@invariant("media", "reward", examples=2, seed=_seeds)
def the_same_sound_at_another_rate_scores_the_same(port: Port, seed: int) -> None:
    """A sound stored at another rate scores almost the same; with the wrong rate in its label it does not.

    A waveform at one rate passed to a model made for another gives plausible scores. Oracle: three band-limited signals, computed at each rate. Root
    mean squares over them, since the effect of a wrong label on a single one may come out small by chance.
    """
    reward, picture = port.reward(), Clip(seed).sample(port)
    rates, seeds = (32_000, 24_000, 44_100), (seed, seed + 1, seed + 2)
    for modality in (m for m in port.modalities if isinstance(getattr(picture, m), Audio)):
        honest = [with_part(picture, modality, rustle(one, rate)) for rate in rates for one in seeds]
        wrong = [with_part(picture, modality, Audio(rustle(one, 32_000).waveform, 48_000)) for one in seeds]
        scores = reward.score([*honest, *wrong], [PROMPTS[0]] * (len(honest) + len(wrong)))
        for name, on in dependence(reward).items():
            if modality in on and name != "total":
                table = scores[name].double().view(4, 3)
                spread = float((table[:3] - table[0]).square().mean(1).sqrt().max())
                bound = max(0.5 * float((table[3] - table[0]).square().mean().sqrt()), 1e-4)
                note(spread, bound, f"{modality}, {name}")
                if not spread <= bound:
                    raise Violation(got=spread, want="less than half the effect of a wrong label", bound=bound, where=f"{modality}, {name}, {rates}")


# -- at the models' own inputs -----------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tone:
    """A stereo sine whose channels have amplitudes ``(1 ± 0.2)·amplitude``: its mix-down has exactly ``amplitude``."""

    frequency: float
    amplitude: float
    seconds: float
    rate: int
    seed: int = 0

    def audio(self) -> Audio:
        t = np.arange(round(self.seconds * self.rate)) / self.rate
        x = self.amplitude * np.sin(2 * np.pi * self.frequency * t)
        return Audio(np.stack([1.2 * x, 0.8 * x]).astype(np.float32), self.rate)


def _tones() -> Any:
    from hypothesis import strategies as st

    return st.builds(
        Tone,
        frequency=st.floats(800, 4000),
        amplitude=st.floats(0.05, 0.8),
        seconds=st.sampled_from((0.3, 0.4, 0.6)),
        rate=st.sampled_from((16_000, 24_000, 32_000, 44_100, 48_000)),
        seed=st.integers(0, 1000),
    )


def _slaney(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _kaldi(hertz: float) -> float:
    return 1127 * math.log(1 + hertz / 700)


@dataclass(frozen=True)
class Spectrogram:
    """What is published about a model's mel input: its axes, scale and range, whether short clips are repeated to fill it, and its unit.

    Attributes:
        mel_axis, time_axis: which axes of the input they are.
        mel: Hz → mel.
        low, high: Hz of the outermost filters' outer feet.
        repeated: short clips fill the input by repetition; silence would not be what the model was trained on.
        level: (frequency, amplitude) → what the strongest bin of a sine should hold, and a tolerance, in the input's unit; None if not known.
    """

    mel_axis: int
    time_axis: int
    mel: Callable[[float], float]
    low: float
    high: float
    repeated: bool = False
    level: Callable[[float, float], tuple[float, float]] | None = None

    def bin_of(self, hertz: float, bins: int) -> float:
        """Position of a frequency among the filters' centres, which are even in mel."""
        low, high = self.mel(self.low), self.mel(self.high)
        return (self.mel(hertz) - low) / (high - low) * (bins + 1) - 1


def _imagebind_level(hertz: float, amplitude: float) -> tuple[float, float]:
    # A Hann window of 400 samples at 16 kHz sums to 200, a sine has half of it in one bin; pre-emphasis 0.97; then (ln + 4.268) / 9.138.
    emphasis = abs(1 - 0.97 * complex(math.cos(2 * math.pi * hertz / 16_000), -math.sin(2 * math.pi * hertz / 16_000)))
    return (2 * math.log(100 * amplitude * emphasis) + 4.268) / 9.138, 2 / 9.138


#: Where and under which argument a model takes a spectrogram → what is published about it.
SPECTROGRAMS = {
    ("ClapModel.audio_model", "input_features"): Spectrogram(-1, -2, _slaney, 50, 14_000, repeated=True),
    ("ImageBindModel", "audio"): Spectrogram(-2, -1, _kaldi, 20, 8_000, level=_imagebind_level),
}


def arrivals(reward: Reward, media: Sequence[Any], prompts: Sequence[str]) -> list[Arrival]:
    with reward.watch() as seen:
        reward.score(media, prompts)
    return list(seen)


@invariant("media", "reward", examples=4, tone=lambda port: _tones())
def a_tone_arrives_at_every_audio_model_with_its_frequency_and_level(port: Port, tone: Tone) -> None:
    """A stereo sine arrives at each audio model's own input as the same frequency and amplitude: as a mono float waveform with its rate stated, or in
    the right mel bin, repeated where the model was trained so.

    Read off by a spy at the models' inputs. Sees a skipped resampling, a wrong or missing rate, transposed or interleaved channels, an unscaled
    integer range, a window of silence. Oracle: the spectrum of a known sine, and the published mel scales.
    """
    reward, item = port.reward(), Clip(tone.seed).sample(port)
    for modality in (m for m in port.modalities if isinstance(getattr(item, m), Audio)):
        item = with_part(item, modality, tone.audio())
    heard = 0
    for one in arrivals(reward, [item], [PROMPTS[0]]):
        where = f"{one.at}, {one.name}"
        told = isinstance(one.value, torch.Tensor) and one.rate is not None  # with a rate it is a waveform, or a batch of them
        if told or isinstance(one.value, list | np.ndarray):
            heard += 1
            require(one.rate is not None, got="no rate", want="the model is told the sample rate", where=where)
            for clip in one.value if isinstance(one.value, list) or (told and one.value.ndim > 1) else [one.value]:
                _require_sine(np.asarray(clip), float(one.rate or 0), tone, where)
        elif spec := SPECTROGRAMS.get((one.at.rpartition("/")[2], one.name)):
            heard += 1
            _require_mel_sine(one.value.double(), spec, tone, where)
    if not heard:
        wanted = "waveform with its rate, nor a spectrogram of CLAP or ImageBind"
        raise Unavailable(f"no audio model among the scorers: watch() recorded no {wanted}; missing scorers: {dict(reward.missing) or 'none'}")


def _require_sine(x: Any, rate: float, tone: Tone, where: str) -> None:
    good = x.ndim == 1 and x.dtype == np.float32
    require(good, got=f"{x.dtype} {x.shape}", want="float32 (samples,), one channel", where=f"{where}, layout")
    spectrum = np.abs(np.fft.rfft(x * np.hanning(len(x)), 8 * len(x)))
    peak = int(spectrum.argmax())
    frequency, amplitude = peak * rate / (8 * len(x)), 2 * spectrum[peak] / np.hanning(len(x)).sum()
    for name, got, want, bound in (("frequency", frequency, tone.frequency, 0.02), ("amplitude", amplitude, tone.amplitude, 0.05)):
        require_close(torch.tensor([float(got)]).double(), torch.tensor([want]).double(), bound=bound, where=f"{where}, {name} of the tone")
    length = torch.tensor([len(x) / rate]).double()
    require_close(length, torch.tensor([tone.seconds]).double(), bound=0.02, where=f"{where}, seconds of the tone")


def _require_mel_sine(x: torch.Tensor, spec: Spectrogram, tone: Tone, where: str) -> None:
    require(bool(torch.isfinite(x).all()), got="not finite", want="finite", where=where)
    table = x.movedim((spec.mel_axis, spec.time_axis), (-1, -2)).flatten(0, -3)[0]  # the first window or clip: (time, mel)
    steady = table[5:20].mean(0)  # 50 to 200 ms: inside every tone
    bins = steady.shape[0]
    found, expected = float(steady.argmax()), spec.bin_of(tone.frequency, bins)
    off = abs(found - expected)
    note(off, 2.0, f"{where}, mel bin")
    if not off <= 2.0:
        raise Violation(got=off, want=f"mel bin {expected:.1f} of {bins}, not {found:.0f}", bound=2.0, where=f"{where}, mel bin")
    if spec.level is not None:
        level, tolerance = spec.level(tone.frequency, tone.amplitude)
        off = abs(float(steady.max()) - level)
        note(off, tolerance, f"{where}, level")
        if not off <= tolerance:
            raise Violation(got=off, want=f"level {level:.3f}, not {float(steady.max()):.3f}", bound=tolerance, where=f"{where}, level")
    if spec.repeated:
        track = table[:, int(found)]
        share = float((track > track.max() - 30).double().mean())  # within 30 dB
        require_at_least(share, 0.5, where=f"{where}, share of the window that holds the repeated tone")


#: CLIP's published pixel statistics, by which a model's input is normalized.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _colours(_: Port) -> Any:
    from hypothesis import strategies as st

    return st.tuples(*[st.integers(0, 180)] * 3).filter(lambda colour: max(colour) - min(colour) > 40)


@invariant("media", "reward", examples=2, colour=_colours)
def frames_arrive_at_every_video_model_unscrambled(port: Port, colour: tuple[int, int, int]) -> None:
    """A picture that is darker above than below and brightens in time arrives so at each video model's own input: axes, channels, range and time.

    Read off by a spy. Sees channels first taken for channels last, BGR, transposed or flipped pictures, pixels scaled twice or not at all, and a
    still in the place of a video. Oracle: the pixels that were put in, and the published normalization.
    """
    reward, item = port.reward(), Clip(5).sample(port)
    frames = np.zeros((8, 32, 32, 3), np.int64) + np.array(colour) + 5 * np.arange(8)[:, None, None, None]
    frames[:, 16:] += 40
    for modality in (m for m in port.modalities if isinstance(getattr(item, m), Video)):
        item = with_part(item, modality, Video(frames.astype(np.uint8), 4.0))
    seen = 0
    for one in arrivals(reward, [item], [PROMPTS[0]]):
        if (one.at.rpartition("/")[2], one.name) != ("ImageBindModel", "vision"):
            continue
        seen += 1
        where, x = f"{one.at}, {one.name}", one.value.double()  # (batch, views, channel, frame, y, x)
        require(x.ndim == 6 and x.shape[2:4] == (3, 2), got=tuple(x.shape), want="(batch, views, 3, 2, height, width)", where=f"{where}, layout")
        for frame, time in ((0, 0), (1, 7)):
            for row, place in ((0, "top"), (-1, "bottom")):
                pixels = torch.tensor(frames[time, row, 0]).double() / 255
                want = (pixels - torch.tensor(CLIP_MEAN).double()) / torch.tensor(CLIP_STD).double()
                for column, side in ((0, "left"), (-1, "right")):
                    got = x[0, 0, :, frame, row, column]
                    require_close(got, want, scale=1.0, bound=1e-4, where=f"{where}, {place} {side} of frame {time}")
    if not seen:
        raise Unavailable(
            f"no video model whose input is known among the scorers, only ImageBind's is; missing scorers: {dict(reward.missing) or 'none'}"
        )


def _texts(_: Port) -> Any:
    from hypothesis import strategies as st

    words = st.text("abcdefghijklmnopqrstuvwxyz ", min_size=1, max_size=30).map(lambda text: " ".join(text.split())).filter(bool)
    return st.lists(st.sampled_from(PROMPTS) | words, min_size=2, max_size=4, unique_by=lambda text: "".join(text.lower().split()))


@invariant("media", "reward", examples=2, prompts=_texts)
def different_prompts_arrive_as_different_ids(port: Port, prompts: list[str]) -> None:
    """Prompts that differ arrive at each text model as different rows of ids, in the order of the samples.

    A tokenizer whose files are missing gives every prompt the same two ids, without a word. Read off by a spy; oracle: the order when asked reversed.
    """
    reward, item = port.reward(), Clip(6).sample(port)
    forward, backward = (arrivals(reward, [item] * len(prompts), some) for some in (prompts, prompts[::-1]))
    seen = 0
    for one, other in zip(forward, backward, strict=True):
        if not isinstance(one.value, torch.Tensor) or one.value.is_floating_point() or one.value.ndim != 2 or "mask" in one.name:
            continue
        seen += 1
        where = f"{one.at}, {one.name}"
        require(len(one.value) == len(prompts), got=len(one.value), want=f"{len(prompts)} rows", where=where)
        rows = [tuple(row) for row in one.value.tolist()]
        require(len(set(rows)) == len(rows), got=f"{len(set(rows))} different rows", want=f"{len(rows)}", where=f"{where}, {prompts!r}")
        require_equal(other.value.flip(0), one.value, where=f"{where}, prompts reversed")
    if not seen:
        wanted = "integer ids (batch, tokens)"
        raise Unavailable(f"no text model among the scorers: watch() recorded no {wanted}; missing scorers: {dict(reward.missing) or 'none'}")


# -- the total ---------------------------------------------------------------------------------------------------------------------------------------
@invariant("media", "reward", examples=2, clip=clips(2, 3))
def the_total_is_the_weighted_sum_of_every_subscore(port: Port, clip: list[Clip]) -> None:
    """The result has every declared sub-score, finite, and a total that is their weighted sum; each has a weight that is at least 0.

    Sees a sub-score that is dropped from the log or from the sum, a lost weight, a mean in the place of a sum, a flipped sign. Oracle: the definition
    of the weighted sum, in float64.
    """
    reward = port.reward()
    scores = reward.score([one.sample(port) for one in clip], list(PROMPTS[: len(clip)]))
    require(set(scores) == set(reward.outputs), got=sorted(scores), want=sorted(reward.outputs), where="sub-scores")
    names = sorted(set(reward.outputs) - {"total"})
    require(sorted(reward.weights) == names, got=sorted(reward.weights), want=names, where="weights")
    require(all(math.isfinite(w) and w >= 0 for w in reward.weights.values()), got=dict(reward.weights), want="at least 0", where="weights")
    for name, value in scores.items():
        require(tuple(value.shape) == (len(clip),), got=tuple(value.shape), want=(len(clip),), where=name)
        require(bool(torch.isfinite(value).all()), got="not finite", want="finite", where=name)
    want = sum((reward.weights[name] * scores[name].double() for name in names), torch.zeros(len(clip), dtype=torch.float64))
    require_close(scores["total"].double(), want, bound=1e-6, where="total")


@invariant("objective", "media", "reward")
def saved_media_scores_what_was_logged(port: Port) -> None:
    """Decoded media that is saved, read again and scored again gives every logged sub-score and the total.

    A reward that cannot be recomputed from what is kept cannot be audited: it may have come from other media, other prompts or another step.
    """
    from loudfail.harness import media_files

    reward = port.reward()
    _, media, prompts = decoded(port, seed=75)
    logged, again = reward.score(media, prompts), []
    with tempfile.TemporaryDirectory() as folder:
        for index, one in enumerate(media):
            media_files.save_media(one, Path(folder) / f"{index}.npz")
            again.append(media_files.load_media(Path(folder) / f"{index}.npz", type(one)))
    require_same(reward.score(again, prompts), logged, where="saved and read again")


# -- failures ----------------------------------------------------------------------------------------------------------------------------------------
@invariant("media", "reward")
def a_model_that_fails_is_an_error_and_never_a_score(port: Port) -> None:
    """When a scorer's own model raises, or returns NaN, scoring raises; no number comes back.

    An import that fails inside a scorer, or a server that answers 500, became the reward 0, which looks like a bad sample. The models are made to
    fail by hooks on the real modules, one after the other.
    """
    reward = port.reward()
    media, prompts = [Clip(7).sample(port)], [PROMPTS[0]]
    models = reward.models()
    if not models:
        raise Unavailable(f"no model among the scorers; missing: {dict(reward.missing) or 'nothing'}")
    for name, module in models.items():
        for kind in (_raise, _to_nan):
            with hooked(module, kind):
                _require_refusal(reward, media, prompts, where=f"{name}, {kind.__name__.strip('_')}")


@invariant("media", "reward")
def what_cannot_be_scored_is_an_error_and_never_a_score(port: Port) -> None:
    """A sample without one of its parts, without a prompt, or without a partner raises; so does no sample at all.

    Silence in the place of a missing waveform, and an empty prompt, are scored by any model without complaint.
    """
    reward, item = port.reward(), Clip(9).sample(port)
    other = Clip(10).sample(port)
    needed = frozenset().union(*dependence(reward).values())
    for modality in (m for m in port.modalities if m in needed):
        lacking = _Lacking({m: None if m == modality else getattr(item, m) for m in port.modalities})
        _require_refusal(reward, [other, lacking], PROMPTS[:2], where=f"a sample without {modality}")
    if "prompt" in needed:
        _require_refusal(reward, [item, other], [PROMPTS[0], ""], where="an empty prompt")
    _require_refusal(reward, [item, other], [PROMPTS[0]], where="two samples and one prompt")
    _require_refusal(reward, [], [], where="no sample")


class _Lacking:
    """A sample that got past the types, with a part that is None."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.__dict__.update(parts)


def _require_refusal(reward: Reward, media: Sequence[Any], prompts: Sequence[str], where: str) -> None:
    try:
        result = reward.score(media, list(prompts))
    except Exception:
        note(0.0, 0.0, where)
        return
    values = {name: [round(v, 4) for v in value.tolist()] for name, value in result.items()}
    note(1.0, 0.0, where)
    raise Violation(got=f"scores {values}", want="an error", bound=0, where=where)


def _raise(output: Any) -> Any:
    raise RuntimeError("made to fail by a check")


def _to_nan(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output * math.nan
    if isinstance(output, Mapping):
        return type(output)(**{key: _to_nan(value) for key, value in output.items()})
    if isinstance(output, tuple | list):
        return type(output)(_to_nan(value) for value in output)
    return output


@contextmanager
def hooked(module: torch.nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change a module's output while inside."""
    handle = module.register_forward_hook(lambda _module, _args, output: change(output))
    try:
        yield
    finally:
        handle.remove()
