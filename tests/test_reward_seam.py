"""The reward seam: a stranger's reward and modalities under the same invariants, what is said of scorers that are missing, and who scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from toyports import Toy

from loudfail.harness import portcheck, registry, runner
from loudfail.harness.case import PROMPTS, Case
from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.port import find_reward, offers
from loudfail.harness.ports.h3 import H3
from loudfail.harness.violation import Unavailable
from loudfail.invariants.rewards import Clip
from loudfail.trainer.rewards import build
from loudfail.trainer.rewards.synthetic import LoudnessBrightnessScorer

Scores = dict[str, torch.Tensor]


def run(port: Any, name: str) -> Any:
    """The result of one invariant of the reward link."""
    found = {one.id: one for one in registry.invariants()}
    return runner.run(found[f"rewards::{name}"], port, shrink=False)


# -- a model of sound alone, and a reward without any model ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sound:
    """A sample that has no video."""

    audio: Audio


class Moment:
    """``moment``: when the sound's energy comes, in seconds, so that its rate does not matter; ``asked``: that times the length of the prompt."""

    outputs = {"moment": frozenset({"audio"}), "asked": frozenset({"audio", "prompt"}), "total": frozenset({"audio", "prompt"})}
    weights = {"moment": 0.25, "asked": 0.5}
    missing: Mapping[str, str] = {}

    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        if not media or len(media) != len(prompts) or not all(prompts):
            raise ValueError("give as many prompts as media")
        moment = torch.tensor([self.moment(one.audio) for one in media], dtype=torch.float64)
        asked = moment * torch.tensor([len(prompt) for prompt in prompts])
        return {"moment": moment, "asked": asked, "total": 0.25 * moment + 0.5 * asked}

    def moment(self, audio: Audio) -> float:
        x = audio.waveform.astype(np.float64).mean(0)
        return float((x**2 * (1 + np.arange(len(x)) / audio.sample_rate)).sum() / audio.sample_rate)

    @contextmanager
    def watch(self) -> Iterator[list[Any]]:
        yield []

    def models(self) -> dict[str, torch.nn.Module]:
        return {}

    def origins(self) -> dict[str, str]:
        return {"test_reward_seam.Moment": "no model"}


class SoundPort(Toy):
    """Latents are the waveform before a squashing function."""

    name = "sound"
    modalities = ("audio",)
    extents = {"samples": (2000, 3000)}
    rates = {"audio": 16_000.0}
    made: Callable[[], Any] = Moment

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        return {"audio": (2, case.extent["samples"])}

    def decode(self, latents: Mapping[str, torch.Tensor]) -> list[Sound]:
        return [Sound(Audio(torch.tanh(0.3 * one).numpy(), 16_000)) for one in latents["audio"]]

    def reward(self) -> Any:
        self.__dict__.setdefault("kept", type(self).made())
        return self.kept


HOLD = (
    "each_modality_is_decoded_from_its_own_latents",
    "decoded_media_has_the_published_rate_and_fills_its_range",
    "every_modality_and_the_prompt_reach_the_total",
    "exchanging_one_part_moves_exactly_the_scores_that_depend_on_it",
    "editing_one_part_moves_exactly_the_scores_that_depend_on_it",
    "both_channels_of_the_sound_are_heard_alike",
    "a_sample_scores_the_same_alone_in_any_order_and_again",
    "the_same_sound_at_another_rate_scores_the_same",
    "the_total_is_the_weighted_sum_of_every_subscore",
    "what_cannot_be_scored_is_an_error_and_never_a_score",
)
#: What looks into the scorers' own models, of which this reward has none.
LOOK_INSIDE = (
    "a_tone_arrives_at_every_audio_model_with_its_frequency_and_level",
    "frames_arrive_at_every_video_model_unscrambled",
    "different_prompts_arrive_as_different_ids",
    "a_model_that_fails_is_an_error_and_never_a_score",
)


@pytest.mark.parametrize("name", HOLD)
def test_the_invariants_hold_for_other_modalities_and_another_reward(name: str) -> None:
    result = run(SoundPort(), name)
    assert result.status == "holds", result.violation or result.traceback or result.message


@pytest.mark.parametrize("name", LOOK_INSIDE)
def test_a_reward_without_models_has_nothing_to_look_into(name: str) -> None:
    assert run(SoundPort(), name).status == "unavailable"


class Deaf(Moment):
    def moment(self, audio: Audio) -> float:
        return 1.0


class FirstPrompt(Moment):
    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        return super().score(media, [prompts[0]] * len(media))


class Loss(Moment):
    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        scores = super().score(media, prompts)
        return scores | {"total": -scores["total"]}


class Forgiving(Moment):
    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
        try:
            return super().score(media, prompts)
        except Exception:
            return {name: torch.zeros(len(media), dtype=torch.float64) for name in self.outputs}


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (Deaf, "every_modality_and_the_prompt_reach_the_total"),
        (Deaf, "editing_one_part_moves_exactly_the_scores_that_depend_on_it"),
        (FirstPrompt, "a_sample_scores_the_same_alone_in_any_order_and_again"),
        (Loss, "the_total_is_the_weighted_sum_of_every_subscore"),
        (Forgiving, "what_cannot_be_scored_is_an_error_and_never_a_score"),
    ],
)
def test_a_strangers_broken_reward_is_violated(reward: type, name: str) -> None:
    class Broken(SoundPort):
        made = reward

    assert run(Broken(), name).status == "violated"


def test_the_first_check_names_a_subscore_that_is_not_there() -> None:
    class Short(Moment):
        def score(self, media: Sequence[Any], prompts: Sequence[str]) -> Scores:
            return {"total": super().score(media, prompts)["total"]}

    class Lacking(SoundPort):
        made = Short

    with pytest.raises(portcheck.PortProblem, match=r"reward\(\)\.score\(\) lacks moment, asked"):
        portcheck.check_port(Lacking())
    portcheck.check_port(SoundPort())


def test_a_port_without_a_reward_is_uncovered() -> None:
    assert offers(SoundPort, "reward") and not offers(Toy, "reward")
    assert run(Toy(), "the_total_is_the_weighted_sum_of_every_subscore").status == "uncovered"


# -- the reward of the gate --------------------------------------------------------------------------------------------------------------------------
def test_a_reward_that_is_not_installed_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no reward loudfail_nowhere:make"):
        find_reward("loudfail_nowhere:make")


def without_imagebind() -> Any:
    """The gate's reward where ImageBind's package is missing."""

    def absent(source: str, device: str) -> Any:
        raise Unavailable("ImageBind is not installed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.SCORERS, "imagebind", (absent, True))
        return build.tiny_reward()


class WithoutImageBind(H3):
    scorers = "test_reward_seam:without_imagebind"


def test_without_imagebind_every_part_is_still_scored_and_its_absence_is_named() -> None:
    port = WithoutImageBind()
    reward: Any = port.reward()
    assert reward.missing == {"imagebind": "ImageBind is not installed"} and "imagebind: missing" in reward.describe()
    assert set(reward.outputs) == {"total", "clap", "loudness_brightness"}
    for name in ("every_modality_and_the_prompt_reach_the_total", "exchanging_one_part_moves_exactly_the_scores_that_depend_on_it"):
        result = run(port, name)
        assert result.status == "holds", result.violation or result.traceback or result.message
    looked = run(port, "frames_arrive_at_every_video_model_unscrambled")
    assert looked.status == "unavailable" and "ImageBind is not installed" in looked.message


def test_a_certificate_names_who_scored_on_which_weights() -> None:
    port = WithoutImageBind()
    assert port.describe()["scorers"] == "test_reward_seam:without_imagebind"
    port.reward()
    names = port.classes()
    assert "transformers.models.clap.modeling_clap.ClapModel (reward: clap, tiny random weights)" in names
    assert "imagebind (reward: missing, ImageBind is not installed)" in names
    assert any("LoudnessBrightnessScorer (reward: loudness_brightness, synthetic weights)" in name for name in names)


# -- media and scores without a model ----------------------------------------------------------------------------------------------------------------
def grey(level: int, loudness: float, seconds: float = 1.0, rate: int = 8_000) -> Media:
    """A grey picture for one second and a sound of a root mean square."""
    wave = np.full((2, round(seconds * rate)), loudness, np.float32) * np.where(np.arange(round(seconds * rate)) % 2, 1, -1).astype(np.float32)
    return Media(Video(np.full((4, 2, 2, 3), level, np.uint8), 4.0), Audio(wave, rate))


def test_loudness_and_brightness_agree_as_the_formula_says() -> None:
    scorer = LoudnessBrightnessScorer()
    scores = scorer.score([grey(255, 0.5), grey(0, 0.5), grey(0, 0.0), grey(255, 0.5, seconds=0.5)], list(PROMPTS[:4]))["loudness_brightness"]
    lost = float(np.exp(-2))
    assert torch.allclose(scores, torch.tensor([1.0, lost, 1.0, (1 + lost) / 2], dtype=torch.float64), atol=1e-6)
    assert "synthetic" in scorer.describe()


def test_a_clip_is_a_function_of_its_numbers() -> None:
    one, again, other = Clip(1).media(), Clip(1).media(), Clip(2).media()
    assert np.array_equal(one.audio.waveform, again.audio.waveform) and np.array_equal(one.video.frames, again.video.frames)
    assert not np.array_equal(one.audio.waveform, other.audio.waveform) and not np.array_equal(one.video.frames, other.video.frames)
    mono = Clip(1, stereo=False, loudness=0.2, rate=16_000, seconds=0.8).media().audio
    assert np.array_equal(mono.waveform[0], mono.waveform[1]) or np.abs(mono.waveform[0] - mono.waveform[1]).max() < 0.1
    assert mono.seconds == pytest.approx(0.8) and np.abs(mono.waveform).max() == pytest.approx(0.2)
