"""The way from clean latents to the total reward broken on purpose: at the decoder, before, inside and after the scorers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from loudfail.harness import inject, media_files
from loudfail.harness.media import Audio, Video
from loudfail.harness.port import Port
from loudfail.harness.registry import fault
from loudfail.invariants.rewards import dependence, rotate

DECODED, RANGE = "rewards::each_modality_is_decoded_from_its_own_latents", "rewards::decoded_media_has_the_published_rate_and_fills_its_range"
REACH = "rewards::every_modality_and_the_prompt_reach_the_total"
EXCHANGE = "rewards::exchanging_one_part_moves_exactly_the_scores_that_depend_on_it"
EDIT = "rewards::editing_one_part_moves_exactly_the_scores_that_depend_on_it"
CHANNELS = "rewards::both_channels_of_the_sound_are_heard_alike"
ALONE = "rewards::a_sample_scores_the_same_alone_in_any_order_and_again"
RATE = "rewards::the_same_sound_at_another_rate_scores_the_same"
TONE = "rewards::a_tone_arrives_at_every_audio_model_with_its_frequency_and_level"
FRAMES = "rewards::frames_arrive_at_every_video_model_unscrambled"
IDS = "rewards::different_prompts_arrive_as_different_ids"
SUM, SAVED = "rewards::the_total_is_the_weighted_sum_of_every_subscore", "rewards::saved_media_scores_what_was_logged"
FAILS = "rewards::a_model_that_fails_is_an_error_and_never_a_score"
REFUSES = "rewards::what_cannot_be_scored_is_an_error_and_never_a_score"

Samples = list[Any]
Change = Callable[[Any], Any]


def another_reward(port: Port) -> str:
    """These break parts of the built-in tiny reward."""
    return "" if port.scorers == "loudfail.trainer.rewards.build:tiny_reward" else f"the port's reward is another one, {port.scorers or 'unnamed'}"


# -- where to break ----------------------------------------------------------------------------------------------------------------------------------
def decoding(port: Port, change: Callable[[Samples], Samples]) -> AbstractContextManager[Any]:
    """Change the media on their way out of the decoder."""
    return inject.replace(port, "decode", lambda original: lambda latents: change(list(original(latents))))


def before(port: Port, change: Callable[[Samples, list[str]], tuple[Samples, list[str]]]) -> AbstractContextManager[Any]:
    """Change media and prompts on their way to the scorers."""
    return inject.replace(port.reward(), "score", lambda original: lambda media, prompts: original(*change(list(media), list(prompts))))


def after(port: Port, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> AbstractContextManager[Any]:
    """Change the scores on their way out."""
    return inject.replace(port.reward(), "score", lambda original: lambda media, prompts: change(dict(original(media, prompts))))


def parts(kind: type, change: Change) -> Callable[[Samples], Samples]:
    """Change the parts of one kind of each sample."""

    def apply(media: Samples) -> Samples:
        return [replace(one, **{name: change(part) for name, part in vars(one).items() if isinstance(part, kind)}) for one in media]

    return apply


def sound(change: Change) -> Callable[[Samples], Samples]:
    """Change the waveforms."""
    return parts(Audio, lambda part: Audio(np.ascontiguousarray(change(part.waveform), dtype=np.float32), part.sample_rate))


def media_only(change: Callable[[Samples], Samples]) -> Callable[[Samples, list[str]], tuple[Samples, list[str]]]:
    return lambda media, prompts: (change(media), prompts)


def scorer(port: Port, name: str) -> Any:
    """A scorer of the port's reward."""
    reward: Any = port.reward()
    return next(one for one in reward.scorers if one.name == name)


def module(port: Port, name: str) -> ModuleType:
    """The module of a scorer, found through the scorer, since nothing here imports it."""
    return sys.modules[type(scorer(port, name)).__module__]


# -- decoder -----------------------------------------------------------------------------------------------------------------------------------------
@fault("objective", "media", "reward", catches=[DECODED, RANGE, REACH], source="verl-omni PR #368", cause="modality missing")
def the_audio_is_absent_from_the_decoded_media(port: Port) -> Iterator[None]:
    """Silence takes the place of the decoded audio, because it was looked for elsewhere."""
    with decoding(port, sound(lambda x: 0 * x)):
        yield


@fault("objective", "media", catches=[DECODED], source="own", cause="one sample's part for the batch")
def every_sample_gets_the_first_ones_audio(port: Port) -> Iterator[None]:
    """All samples of a batch carry the audio of its first."""

    def first(media: Samples) -> Samples:
        return [replace(one, **{name: getattr(media[0], name) for name, part in vars(one).items() if isinstance(part, Audio)}) for one in media]

    with decoding(port, first):
        yield


@fault("objective", "media", catches=[DECODED], source="grpo-flat #2; R1-V #67", cause="another sample's part")
def every_sample_gets_its_neighbours_audio(port: Port) -> Iterator[None]:
    """Video and audio of a batch are put together one sample off."""
    with decoding(port, neighbour):
        yield


def neighbour(media: Samples) -> Samples:
    pairs = zip(media, rotate(media), strict=True)
    return [replace(one, **{name: getattr(other, name) for name, part in vars(one).items() if isinstance(part, Audio)}) for one, other in pairs]


@fault("objective", "media", catches=[RANGE], source="mteb PR #5404; CLAP #38; audiocraft #266", cause="another rate")
def the_decoded_audio_is_labelled_with_another_rate(port: Port) -> Iterator[None]:
    """The waveform says 48 kHz, whatever the decoder's rate."""
    with decoding(port, parts(Audio, lambda part: Audio(part.waveform, 48_000))):
        yield


@fault("objective", "media", catches=[RANGE], source="verl-omni commit 57a9441d (#373)", cause="range scaled twice")
def the_pixels_are_scaled_twice_and_clipped(port: Port) -> Iterator[None]:
    """Pixels that are 0 to 255 already are multiplied by 255 and clipped."""
    with decoding(port, parts(Video, lambda part: Video(np.clip(part.frames.astype(np.int64) * 255, 0, 255).astype(np.uint8), part.fps))):
        yield


@fault("objective", "media", catches=[RANGE], source="own", cause="range divided")
def the_waveform_is_divided_by_the_integer_range(port: Port) -> Iterator[None]:
    """A float waveform is divided by 32768, as if it were int16: almost silence."""
    with decoding(port, sound(lambda x: x / 32768)):
        yield


# -- before the scorers ------------------------------------------------------------------------------------------------------------------------------
@fault("objective", "media", "reward", catches=[REACH, EXCHANGE, EDIT, TONE], source="verl-omni PR #368; ai-toolkit #701", cause="modality missing")
def the_scorers_get_silence(port: Port) -> Iterator[None]:
    """Every waveform that reaches the scorers is zero."""
    with before(port, media_only(sound(lambda x: 0 * x))):
        yield


@fault("media", "reward", catches=[TONE], source="own", cause="modality missing")
def the_scorers_get_a_constant(port: Port) -> Iterator[None]:
    """Every waveform that reaches the scorers is its own mean: the time axis was averaged away."""
    with before(port, media_only(sound(lambda x: 0 * x + x.mean(axis=1, keepdims=True)))):
        yield


@fault("media", "reward", catches=[ALONE], source="grpo-flat #2; R1-V #67", cause="another sample's part")
def the_sound_of_another_sample_is_scored(port: Port) -> Iterator[None]:
    """Each sample is scored with the sound of the next one of its batch."""
    with before(port, media_only(neighbour)):
        yield


@fault("media", "reward", catches=[ALONE], source="UniRL #326", cause="another sample's prompt")
def the_prompt_of_another_sample_is_scored(port: Port) -> Iterator[None]:
    """Each sample is scored with the prompt of the next one of its batch."""
    with before(port, lambda media, prompts: (media, rotate(prompts) if len(prompts) > 1 else prompts)):
        yield


@fault("objective", "media", "reward", catches=[REACH, EXCHANGE, IDS], source="Flow-Factory commit 724c911 (#126)", cause="prompt missing")
def the_reward_is_blind_to_the_prompt(port: Port) -> Iterator[None]:
    """Every sample is scored with the same prompt."""
    with before(port, lambda media, prompts: (media, ["a video with sound"] * len(prompts))):
        yield


@fault("media", "reward", catches=[TONE, RATE], source="mteb PR #5404; CLAP #38", cause="rate ignored")
def the_rate_of_the_sound_is_assumed(port: Port) -> Iterator[None]:
    """The scorers are told 44.1 kHz, whatever the rate of the waveform."""
    with before(port, media_only(parts(Audio, lambda part: Audio(part.waveform, 44_100)))):
        yield


@fault("media", "reward", catches=[TONE], source="verl-omni commit 786dd36c (axis guard)")
def channels_and_samples_are_exchanged(port: Port) -> Iterator[None]:
    """A channels-last waveform is read as channels-first: both channels interleaved, at half the speed."""
    with before(port, media_only(sound(lambda x: x.T.reshape(2, -1)))):
        yield


@fault("media", "reward", catches=[CHANNELS], source="own", cause="channel dropped")
def one_channel_is_dropped(port: Port) -> Iterator[None]:
    """Only the left channel is scored."""
    with before(port, media_only(sound(lambda x: x[[0, 0]]))):
        yield


@fault("media", "reward", catches=[EDIT], source="own", cause="second half not scored")
def only_the_first_half_of_the_sound_is_scored(port: Port) -> Iterator[None]:
    """The sound is cut to half of its length."""
    with before(port, media_only(sound(lambda x: x[:, : max(1, x.shape[1] // 2)]))):
        yield


@fault("media", "reward", catches=[ALONE], source="own")
def a_batch_is_cut_to_its_shortest_sound(port: Port) -> Iterator[None]:
    """Waveforms of unequal length are cut to the shortest, so that they can be stacked."""

    def cut(media: Samples) -> Samples:
        shortest = min((part.waveform.shape[1] for one in media for part in vars(one).values() if isinstance(part, Audio)), default=0)
        return sound(lambda x: x[:, :shortest])(media)

    with before(port, media_only(cut)):
        yield


@fault("media", "reward", catches=[EDIT], source="own", cause="only the first frame")
def only_the_first_frame_is_scored(port: Port) -> Iterator[None]:
    """The video is its first frame, repeated."""
    with before(port, media_only(parts(Video, lambda part: Video(np.repeat(part.frames[:1], len(part.frames), axis=0), part.fps)))):
        yield


@fault("objective", "media", "reward", catches=[REACH, EXCHANGE], source="own", cause="scores cached")
def media_is_cached_by_prompt(port: Port) -> Iterator[None]:
    """The cache of what is scored has the prompt as its key: a second sample of a prompt gets the first one's scores."""
    cache: dict[str, Any] = {}
    with before(port, lambda media, prompts: ([cache.setdefault(prompt, one) for one, prompt in zip(media, prompts, strict=True)], prompts)):
        yield


@fault("media", "reward", catches=[REFUSES], source="ai-toolkit #684; musubi-tuner #83")
def a_missing_part_is_filled_in(port: Port) -> Iterator[None]:
    """A sample without sound or picture gets those of the one before it, so that it can be scored."""

    def fill(media: Samples, prompts: list[str]) -> tuple[Samples, list[str]]:
        filled: Samples = []
        for one in media:
            lacking = any(part is None for part in vars(one).values())
            filled.append(filled[-1] if lacking and filled else one)
        return filled, prompts

    with before(port, fill):
        yield


@fault("media", "reward", catches=[REFUSES], source="verl-omni PR #368")
def samples_without_a_prompt_are_left_out(port: Port) -> Iterator[None]:
    """Media and prompts are paired as far as the shorter list goes."""

    def shorten(media: Samples, prompts: list[str]) -> tuple[Samples, list[str]]:
        count = min(len(media), len(prompts))
        return media[:count], prompts[:count]

    with before(port, shorten):
        yield


# -- inside the scorers ------------------------------------------------------------------------------------------------------------------------------
@fault("media", "reward", catches=[TONE], source="own", unless=another_reward, cause="waveform in integer range")
def clap_gets_the_integer_range(port: Port) -> Iterator[None]:
    """CLAP's waveform runs from -32768 to 32767."""
    with inject.replace(module(port, "clap"), "mix_down", lambda original: lambda audio: original(audio) * 32768):
        yield


@fault("media", "reward", catches=[TONE, RATE], source="mteb PR #5404; audiocraft #266", unless=another_reward)
def clap_gets_the_sound_at_its_own_rate(port: Port) -> Iterator[None]:
    """The resampling to 48 kHz is skipped, and 48 kHz is what the model is told."""
    with inject.replace(module(port, "clap"), "resample_soxr", lambda original: lambda x, rate, target: x):
        yield


@fault("media", "reward", catches=[TONE], source="transformers #23648, PR #26190", unless=another_reward)
def short_clips_are_padded_with_silence(port: Port) -> Iterator[None]:
    """A padding argument meant for the tokenizer reaches CLAP's feature extractor and switches repetition off."""
    kind = type(scorer(port, "clap").extractor)
    with inject.replace(kind, "__call__", lambda original: lambda *args, **kwargs: original(*args, **kwargs | {"padding": "pad"})):
        yield


@fault("media", "reward", catches=[ALONE], source="transformers, ClapFeatureExtractor rand_trunc", unless=another_reward)
def long_clips_are_cropped_at_random(port: Port) -> Iterator[None]:
    """A clip beyond the model's window goes to the feature extractor whole, which crops it at random."""
    with inject.replace(module(port, "clap"), "windows", lambda original: lambda x, length: [x]):
        yield


@fault(
    "objective",
    "media",
    "reward",
    catches=[IDS, EXCHANGE],
    source="transformers 5: tokenizers without files",
    unless=another_reward,
    cause="prompt missing",
)
def the_tokenizer_knows_five_tokens(port: Port) -> Iterator[None]:
    """CLAP's tokenizer lost its files: every prompt is the ids 2, 3, and nobody compares them."""

    def empty(prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[2, 3]] * len(prompts))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with inject.replace(scorer(port, "clap"), "tokenize", lambda original: empty):
        yield


@fault("media", "reward", catches=[ALONE], source="UniRL #326", unless=another_reward, cause="scores depend on the batch")
def a_sample_is_compared_with_every_prompt(port: Port) -> Iterator[None]:
    """CLAP's agreement is that with the mean of all prompts of the batch."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda audio, owner, text: original(audio, owner, text.mean(0, keepdim=True).expand_as(text))

    with inject.replace(module(port, "clap"), "agreement", make):
        yield


@fault("media", "reward", catches=[FAILS], source="verl-omni commits 786dd36c and 6b76ba2a (#366)", unless=another_reward)
def a_scorers_error_becomes_zero(port: Port) -> Iterator[None]:
    """Whatever a scorer raises is caught, and its scores are 0."""
    broken = scorer(port, "clap")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def score(media: Samples, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
            try:
                return original(media, prompts)
            except Exception:
                return {name: torch.zeros(len(media), dtype=torch.float64) for name in broken.outputs}

        return score

    with inject.replace(broken, "score", make):
        yield


@fault("media", "reward", catches=[FAILS], source="trl #6804, #6821; torchtune #2981", unless=another_reward)
def nan_becomes_zero(port: Port) -> Iterator[None]:
    """Scores that are not a number are replaced by 0."""
    with inject.replace(module(port, "clap"), "agreement", lambda original: lambda *args: original(*args).nan_to_num()):
        yield


# -- the total ---------------------------------------------------------------------------------------------------------------------------------------
def summed(reward: Any, scores: dict[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The scores with a total of some of them only."""
    zero = torch.zeros_like(scores["total"])
    return scores | {"total": sum((reward.weights[name] * scores[name] for name in names), zero)}


@fault("objective", "media", "reward", catches=[SUM, REACH], source="LTX-2 #94; DiffSynth-Studio #1655", cause="sub-scores missing from the total")
def the_total_is_the_videos_only(port: Port) -> Iterator[None]:
    """The total adds up only what does not depend on sound; it still moves with the video."""
    reward = port.reward()
    heard = {name for name, part in vars(port.decode(_one(port))[0]).items() if isinstance(part, Audio)}
    names = [name for name, on in dependence(reward).items() if name != "total" and not on & heard]
    with after(port, lambda scores: summed(reward, scores, names)):
        yield


def _one(port: Port) -> dict[str, torch.Tensor]:
    from loudfail.harness.case import smallest

    case = smallest(port)
    return case.normal("clean", port.shapes(case))


@fault("media", "reward", catches=[SUM], source="verl-omni commit 786dd36c (weights not renormalised)", cause="sub-scores missing from the total")
def one_weight_is_lost(port: Port) -> Iterator[None]:
    """The last sub-score is missing from the total."""
    reward = port.reward()
    with after(port, lambda scores: summed(reward, scores, sorted(reward.weights)[:-1])):
        yield


@fault("media", "reward", catches=[SUM], source="own", cause="total negated")
def the_total_has_the_other_sign(port: Port) -> Iterator[None]:
    """The total is a loss, lower is better."""
    with after(port, lambda scores: scores | {"total": -scores["total"]}):
        yield


@fault("media", "reward", catches=[SUM], source="own", cause="sub-score missing")
def a_subscore_is_not_logged(port: Port) -> Iterator[None]:
    """One sub-score is counted in the total and left out of the result."""
    lost = sorted(port.reward().weights)[0]
    with after(port, lambda scores: {name: value for name, value in scores.items() if name != lost}):
        yield


@fault("objective", "media", "reward", catches=[SUM, EXCHANGE], source="own", unless=another_reward, cause="sub-scores exchanged")
def two_subscores_have_each_others_names(port: Port) -> Iterator[None]:
    """Text-audio and audio-video agreement are logged under each other's name."""
    with after(port, lambda scores: scores | {"clap": scores["loudness_brightness"], "loudness_brightness": scores["clap"]}):
        yield


@fault("media", "reward", catches=[ALONE, SUM], source="R1-V #67", cause="total normalized over the batch")
def the_total_is_normalized_over_the_batch(port: Port) -> Iterator[None]:
    """The total of a sample depends on the others of its batch."""
    with after(port, lambda scores: scores | {"total": scores["total"] - scores["total"].mean()}):
        yield


@fault("objective", "media", "reward", catches=[SAVED], source="own")
def media_is_saved_with_eight_bits(port: Port) -> Iterator[None]:
    """What is kept of a sample is a compressed copy, not what was scored."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda one, path: original(sound(lambda x: np.round(x * 127) / 127)([one])[0], path)

    with inject.replace(media_files, "save_media", make):
        yield


# -- inside ImageBind, where it is installed ---------------------------------------------------------------------------------------------------------
def looking(port: Port, change: Change) -> AbstractContextManager[Any]:
    """Change the frames that ImageBind gets."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda video, size: original(Video(np.ascontiguousarray(change(video.frames), dtype=np.uint8), video.fps), size)

    return inject.replace(module(port, "imagebind"), "video_views", make)


if find_spec("imagebind") is not None:  # a scorer that is not here cannot be broken

    @fault("media", "reward", catches=[FRAMES], source="own", unless=another_reward)
    def imagebind_sees_blue_for_red(port: Port) -> Iterator[None]:
        """Frames are BGR."""
        with looking(port, lambda x: x[..., ::-1]):
            yield

    @fault("media", "reward", catches=[FRAMES], source="verl-omni commit 786dd36c (5-D dump)", unless=another_reward)
    def imagebind_sees_rows_as_columns(port: Port) -> Iterator[None]:
        """Height and width are exchanged."""
        with looking(port, lambda x: x.transpose(0, 2, 1, 3)):
            yield

    @fault("media", "reward", catches=[FRAMES], source="verl-omni commit 57a9441d (#373)", unless=another_reward)
    def imagebinds_pixels_are_scaled_down_twice(port: Port) -> Iterator[None]:
        """Pixels are divided by 255 before they are divided by 255: all black."""
        with looking(port, lambda x: x // 255):
            yield

    @fault("media", "reward", catches=[FRAMES, EDIT], source="own", unless=another_reward)
    def imagebind_sees_a_still(port: Port) -> Iterator[None]:
        """Both frames of a clip are its first."""
        with looking(port, lambda x: np.repeat(x[:1], len(x), axis=0)):
            yield

    @fault("media", "reward", catches=[CHANNELS], source="ImageBind data.py: fbank takes the first channel", unless=another_reward)
    def imagebind_hears_the_left_channel(port: Port) -> Iterator[None]:
        """ImageBind's spectrogram is that of the first channel alone."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda audio: original(Audio(np.ascontiguousarray(audio.waveform[[0, 0]]), audio.sample_rate))

        with inject.replace(module(port, "imagebind"), "audio_clips", make):
            yield
