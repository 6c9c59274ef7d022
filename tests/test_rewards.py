"""Scorers, their combination, the worker process, monitors and media files, on the real classes with tiny random weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loudfail.harness import media_files, synthetic
from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.violation import Unavailable
from loudfail.trainer.rewards import audio, clap_remote, clap_worker, imagebind, imagebind_inputs, monitors
from loudfail.trainer.rewards.clap import RATE, TOKENS, WINDOW, ClapScorer
from loudfail.trainer.rewards.scorer import Scorer, ScorerFailed, WeightedSum
from loudfail.trainer.rewards.synthetic import LatentMedia, SyntheticScorer
from loudfail.trainer.rewards.worker import Worker

PROMPTS = ("a bell rings twice", "rain", "two dogs bark while a train passes", "wind")
SAME = 1e-6  # float32 in another batch: measured 6e-8


def noise(count: int, seed: int) -> np.ndarray:
    """Integer noise, the same with every version of numpy, within ±0.1."""
    return (np.random.default_rng(seed).integers(-3000, 3001, count) / 32768).astype(np.float32)


def tone(hertz: float, seconds: float, rate: int = 32000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def sound(*channels: np.ndarray, rate: int = 32000) -> Audio:
    return Audio(np.stack(channels * 2 if len(channels) == 1 else channels), rate)


def waveforms() -> list[Audio]:
    beep = tone(3000, 2.5)
    beep[16000:] = 0
    return [sound(noise(80000, 0), noise(80000, 1)), sound(tone(440, 2.5)), sound(np.zeros(80000, np.float32)), sound(beep)]


def videos(frames: int = 60) -> list[Video]:
    y, x = np.mgrid[:48, :64]
    t = np.arange(frames)[:, None, None]
    ramp = np.broadcast_to(y * 5, (frames, 48, 64))
    moving = (y * 5 + 4 * t) % 256
    stripes = (x * 40) % 256 + 0 * t
    random = np.random.default_rng(0).integers(0, 256, (frames, 48, 64, 3))
    return [Video(np.stack([v] * 3, -1).astype(np.uint8) if v.ndim == 3 else v.astype(np.uint8), 24.0) for v in (random, ramp, stripes, moving)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: threads cost more than they give, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def media() -> list[Media]:
    return [Media(v, a) for v, a in zip(videos(), waveforms(), strict=True)]


@pytest.fixture(scope="module")
def clap() -> ClapScorer:
    return ClapScorer.tiny_random()


@pytest.fixture(scope="module")
def bind() -> imagebind.ImageBindScorer:
    try:
        return imagebind.ImageBindScorer.tiny_random()
    except Unavailable as error:
        pytest.skip(f"unavailable: {error}")  # an optional package: its absence must not read as a pass


def rotate(items: list | tuple) -> list:
    return [*items[1:], items[0]]


def difference(scorer: Scorer, left: tuple, right: tuple) -> dict[str, torch.Tensor]:
    """Sub-score → absolute difference of each sample."""
    one, two = scorer.score(*left), scorer.score(*right)
    return {name: (one[name] - two[name]).abs() for name in one}


# -- what goes into the models, as recorded from torchaudio 2.11.0 and ImageBind's own data.py ----------------------------------
def picks(x: torch.Tensor) -> list[float]:
    flat = x.flatten()
    return [*(float(flat[i]) for i in np.linspace(0, flat.numel() - 1, 6).astype(int)), float(x.double().mean()), float(x.double().std())]


def test_resampling_is_torchaudios() -> None:
    y = audio.resample_sinc(torch.from_numpy(noise(44100 * 3, 1)), 44100, 16000)
    assert y.shape == (48000,)
    want = [0.01283479, 0.01177973, 0.04810726, -0.04835035, 0.04272138, 0.03778046]
    assert y[[0, 1, 1000, 20000, 47998, 47999]].tolist() == pytest.approx(want, abs=2e-8)


def test_filter_bank_is_torchaudios() -> None:
    y = audio.fbank(torch.from_numpy(noise(32000, 2)))
    assert y.shape == (198, 128)
    assert picks(y) == pytest.approx([-9.256384, -2.016174, -4.505608, 0.287935, -4.502009, 2.49012, -2.161509, 3.450707], abs=2e-5)


def test_imagebind_spectrograms_are_upstreams() -> None:
    y = imagebind_inputs.audio_clips(sound(noise(44100 * 3, 1), rate=44100))
    assert y.shape == (3, 1, 128, 204)
    assert picks(y) == pytest.approx([-0.45648, 0.404426, -0.135801, 0.400759, 0.062394, 0.467061, 0.12767, 0.366772], abs=5e-6)


def test_imagebind_views_are_upstreams() -> None:
    frames = np.random.default_rng(3).integers(0, 256, (91, 50, 66, 3), dtype=np.uint8)
    y = imagebind_inputs.video_views(Video(frames, 29.97))
    assert y.shape == (15, 3, 2, 224, 224)
    assert picks(y) == pytest.approx([1.828147, 1.477554, -1.224259, 0.098208, 0.68123, 1.292693, 0.192516, 0.73455], abs=2e-6)


@given(st.integers(1, 700), st.integers(1, 100))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_windows_cover_the_signal_without_a_gap(samples: int, length: int) -> None:
    parts = audio.windows(torch.arange(samples), length)
    assert all(0 < len(p) <= length for p in parts)
    assert torch.cat(parts).unique().tolist() == list(range(samples))
    assert len(parts) == math.ceil(samples / length)


def test_a_waveform_that_is_not_one_is_refused() -> None:
    class Bare:
        """A waveform that got past the type: what a scorer is given when a caller goes around `Audio`."""

        def __init__(self, waveform: np.ndarray) -> None:
            self.waveform, self.sample_rate = waveform, 32000

    for wrong in (
        noise(1000, 0),
        noise(1000, 0).reshape(500, 2),
        (noise(1000, 0)[None] * 32768).astype(np.int16),
        noise(1000, 0)[None] * 32768,
        np.full((2, 10), np.nan, np.float32),
        np.zeros((2, 0), np.float32),
        noise(1000, 0)[None].astype(np.float64),
    ):
        with pytest.raises(ValueError, match="waveform"):
            audio.mix_down(Bare(wrong))  # type: ignore[arg-type]


# -- CLAP --------------------------------------------------------------------------------------------------------------------------------------------
def test_clap_hears_audio_and_prompt_and_nothing_else(clap: ClapScorer, media: list[Media]) -> None:
    base = (media, PROMPTS)
    heard = [m.audio for m in media]
    swapped = difference(clap, base, ([Media(m.video, a) for m, a in zip(media, rotate(heard), strict=True)], PROMPTS))["clap"]
    permuted = difference(clap, base, (media, rotate(PROMPTS)))["clap"]
    silenced = difference(clap, base, ([Media(m.video, sound(np.zeros(80000, np.float32))) for m in media], PROMPTS))["clap"]
    unseen = difference(clap, base, ([Media(v, m.audio) for v, m in zip(rotate(videos()), media, strict=True)], PROMPTS))["clap"]
    flipped = difference(clap, base, ([Media(m.video, sound(*m.audio.waveform[::-1])) for m in media], PROMPTS))["clap"]
    assert permuted.min() > 1e-3 and swapped.max() > 0.1 and swapped.min() > 100 * SAME
    assert silenced[2] == 0 and silenced[[0, 1, 3]].min() > 100 * SAME
    assert unseen.max() == 0
    assert flipped.max() < SAME


def test_clap_notices_a_wrong_rate(clap: ClapScorer, media: list[Media]) -> None:
    mislabelled = [Media(m.video, Audio(m.audio.waveform, 44100)) for m in media]
    moved = difference(clap, (media, PROMPTS), (mislabelled, PROMPTS))["clap"]
    assert moved[1] > 1e-2  # the tone is another tone
    assert moved[2] < SAME  # silence is silence at any rate


def test_the_same_sound_at_another_rate_scores_alike(clap: ClapScorer) -> None:
    picture = videos(2)[0]
    scores = [clap.score([Media(picture, sound(tone(440, 2.0, rate), rate=rate))], PROMPTS[:1])["clap"].item() for rate in (32000, 44100, 48000)]
    assert max(scores) - min(scores) < 5e-3
    wrong = clap.score([Media(picture, sound(tone(440, 2.0, 32000), rate=48000))], PROMPTS[:1])["clap"].item()
    assert abs(wrong - scores[0]) > 10 * (max(scores) - min(scores))


def test_clap_is_independent_of_batch_and_order(clap: ClapScorer, media: list[Media]) -> None:
    whole = clap.score(media, PROMPTS)["clap"]
    assert torch.equal(whole, clap.score(media, PROMPTS)["clap"])
    alone = torch.cat([clap.score([m], [p])["clap"] for m, p in zip(media, PROMPTS, strict=True)])
    backwards = clap.score(media[::-1], PROMPTS[::-1])["clap"].flip(0)
    assert (whole - alone).abs().max() < SAME and (whole - backwards).abs().max() < SAME
    assert whole.dtype == torch.float64 and whole.shape == (4,)


def test_clap_says_that_its_weights_are_random_and_keeps_it_on_disk(clap: ClapScorer, media: list[Media], tmp_path: Path) -> None:
    clap.save(tmp_path)
    loaded = ClapScorer.load(tmp_path)
    assert "tiny random" in clap.describe() and "tiny random" in loaded.describe()
    assert torch.equal(loaded.score(media, PROMPTS)["clap"], clap.score(media, PROMPTS)["clap"])


def test_what_arrives_at_clap(clap: ClapScorer, media: list[Media]) -> None:
    picture = media[0].video
    with clap.watch() as arrivals:
        clap.score([Media(picture, sound(tone(1000, 1.5))), *media[:2]], ["a beep", *PROMPTS[:2]])
    by_name = {a.name: a for a in arrivals}
    assert len(arrivals) == 4 and set(by_name) == {"raw_speech", "input_features", "input_ids", "attention_mask"}  # one call each
    heard = by_name["raw_speech"]
    assert heard.rate == RATE and all(x.ndim == 1 and x.dtype == np.float32 and abs(x).max() <= 1.01 for x in heard.value)
    assert len(heard.value[0]) == 72000
    mel = by_name["input_features"].value
    assert mel.shape[:2] == (len(heard.value), 1)
    loudest = mel[0, 0, :100].mean(0).argmax()
    centre = clap.extractor.mel_filters_slaney[:, loudest].argmax() * RATE / 1024  # (fft bins, mel bins)
    assert abs(centre - 1000) < 60  # 1 kHz arrives as 1 kHz, to within the bands' distance
    with clap.watch() as again:
        pass
    assert again == []


def test_a_short_clip_is_repeated_as_in_training_not_padded_with_silence(clap: ClapScorer, media: list[Media]) -> None:
    with clap.watch() as arrivals:
        clap.score([Media(media[0].video, sound(tone(1000, 0.5)))], ["a beep"])
    mel = next(a.value for a in arrivals if a.name == "input_features")[0, 0]
    assert mel[150:195].max() > -30  # dB; zeros would give -100


def test_a_long_clip_is_heard_whole_and_without_chance(clap: ClapScorer, media: list[Media]) -> None:
    quiet_then_tone = np.concatenate([np.zeros(32000 * 6, np.float32), tone(700, 1.0)])
    long = [Media(media[0].video, sound(quiet_then_tone)), Media(media[0].video, sound(np.zeros(32000 * 7, np.float32)))]
    before = np.random.get_state()[1].copy()
    one, two = (clap.score(long, ["a tone", "a tone"])["clap"] for _ in range(2))
    assert torch.equal(one, two) and (np.random.get_state()[1] == before).all()
    assert (one[0] - one[1]).abs() > 1e-3  # the end was heard


def test_clap_loads_only_what_is_complete(clap: ClapScorer, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(FileNotFoundError, match="local directory"):
        ClapScorer.load("laion/larger_clap_general")
    clap.save(tmp_path)
    for name, message in (("tokenizer.json", "tokenizer.json"), ("preprocessor_config.json", "preprocessor_config")):
        path = tmp_path / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(FileNotFoundError, match=message):
            ClapScorer.load(tmp_path)
        path.write_bytes(content)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in weights if "text_projection" in key)
    save_file({key: value for key, value in weights.items() if key != lost}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="stay random"):
        ClapScorer.load(tmp_path)


def test_clap_refuses_parts_that_do_not_fit(clap: ClapScorer) -> None:
    from transformers import ClapFeatureExtractor, RobertaTokenizer

    def extractor(**changes: object) -> ClapFeatureExtractor:
        fitting = {"feature_size": 64, "sampling_rate": RATE, "max_length_s": 10, "truncation": "rand_trunc", "padding": "repeatpad"}
        return ClapFeatureExtractor(**(fitting | changes))

    def make(tokenizer: object = clap.tokenizer, extractor: object = clap.extractor, weights: str = "tiny random") -> ClapScorer:
        return ClapScorer(clap.model, tokenizer, extractor, weights=weights, source="here")  # type: ignore[arg-type]

    empty = RobertaTokenizer()  # what transformers gives, without a word, for a directory without tokenizer files
    assert empty("rain")["input_ids"] == empty("wind")["input_ids"]
    with pytest.raises(ValueError, match="tokenizer files are missing"):
        make(tokenizer=empty)
    for changes, message in (
        ({"truncation": "fusion"}, "fusion"),
        ({"padding": "pad"}, "repeatpad"),
        ({"sampling_rate": 44100}, "44100 Hz"),
        ({"feature_size": 32}, "32 mel bins"),
    ):
        with pytest.raises(ValueError, match=message):
            make(extractor=extractor(**changes))
    with pytest.raises(ValueError, match=str(WINDOW)):
        make(weights="real")
    config = clap.model.config.audio_config
    config.enable_fusion = True
    try:
        with pytest.raises(ValueError, match="fusion"):
            make()
    finally:
        config.enable_fusion = False


def test_clap_fails_when_prompts_become_the_same_ids(clap: ClapScorer, media: list[Media], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import RobertaTokenizer

    monkeypatch.setattr(clap, "tokenizer", RobertaTokenizer())
    with pytest.raises(ScorerFailed, match="4 different prompts became 1"):
        clap.score(media, PROMPTS)


def test_clap_says_when_it_does_not_hear_all_of_a_prompt(clap: ClapScorer, media: list[Media]) -> None:
    with pytest.warns(UserWarning, match=f"first {TOKENS} tokens of 1 of 2"):
        clap.score(media[:2], ["rain", "rain " * 40])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clap.score(media[:2], ["rain", "wind"])


# -- ImageBind ---------------------------------------------------------------------------------------------------------------------------------------
def test_each_imagebind_score_moves_with_its_own_two_parts(bind: imagebind.ImageBindScorer, media: list[Media]) -> None:
    base = (media, PROMPTS)
    changed = {
        "audio": ([Media(m.video, a) for m, a in zip(media, rotate([m.audio for m in media]), strict=True)], PROMPTS),
        "video": ([Media(v, m.audio) for m, v in zip(media, rotate([m.video for m in media]), strict=True)], PROMPTS),
        "prompt": (media, rotate(PROMPTS)),
    }
    for part, other in changed.items():
        for name, moved in difference(bind, base, other).items():
            if part in bind.outputs[name]:
                assert moved.max() > 5e-3, (part, name)
            else:
                assert moved.max() == 0, (part, name)


def test_imagebind_sees_motion_and_rates(bind: imagebind.ImageBindScorer, media: list[Media]) -> None:
    frozen = [Media(Video(np.repeat(m.video.frames[:1], len(m.video.frames), 0), 24.0), m.audio) for m in media]
    moved = difference(bind, (media, PROMPTS), (frozen, PROMPTS))
    assert moved["imagebind_text_video"][[0, 3]].min() > 1e-3  # noise and the moving ramp
    assert moved["imagebind_text_video"][[1, 2]].max() < SAME  # these did not move
    assert moved["imagebind_text_audio"].max() == 0
    mislabelled = [Media(m.video, Audio(m.audio.waveform, 44100)) for m in media]
    assert difference(bind, (media, PROMPTS), (mislabelled, PROMPTS))["imagebind_text_audio"][1] > 1e-4


def test_imagebind_is_independent_of_batch_and_order(bind: imagebind.ImageBindScorer, media: list[Media]) -> None:
    whole = bind.score(media, PROMPTS)
    alone = [bind.score([m], [p]) for m, p in zip(media, PROMPTS, strict=True)]
    backwards = bind.score(media[::-1], PROMPTS[::-1])
    again = bind.score(media, PROMPTS)
    for name, value in whole.items():
        assert value.abs().max() <= 1 + 1e-9  # cosines, although the model's outputs are not unit vectors
        assert torch.equal(value, again[name])
        assert (value - torch.cat([a[name] for a in alone])).abs().max() < SAME
        assert (value - backwards[name].flip(0)).abs().max() < SAME


def test_what_arrives_at_imagebind(bind: imagebind.ImageBindScorer, media: list[Media]) -> None:
    with bind.watch() as arrivals:
        bind.score(media, PROMPTS)
    shapes = {a.name: tuple(a.value.shape) for a in arrivals}
    assert len(arrivals) == 3 and shapes == {"vision": (4, 15, 3, 2, 56, 56), "audio": (4, 3, 1, 128, 204), "text": (4, 77)}
    vision = next(a.value for a in arrivals if a.name == "vision")
    assert -1.8 < vision.min() < -1.5 and 1.5 < vision.max() < 2.2  # CLIP's range: neither 0 to 255 nor scaled twice


def test_imagebind_states_its_licence_and_leaves_no_stand_in(bind: imagebind.ImageBindScorer, caplog: pytest.LogCaptureFixture) -> None:
    imagebind.ImageBindScorer.tiny_random()
    assert "CC BY-NC-SA" in caplog.text and "CC BY-NC-SA" in bind.describe() and "tiny random" in bind.describe()
    assert not [name for name in sys.modules if name.split(".")[0] == "timm"]


def test_imagebind_is_not_loaded_from_nothing(bind: imagebind.ImageBindScorer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="local checkpoint only"):
        imagebind.ImageBindScorer.load(tmp_path / "imagebind_huge.pth")


@pytest.mark.parametrize(("placeholder", "message"), [(True, "empty placeholder"), (False, "not installed")])
def test_imagebind_that_is_missing_is_unavailable(placeholder: bool, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if placeholder:
        info = tmp_path / "imagebind-0.0.1.dev0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: imagebind\nVersion: 0.0.1.dev0\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert importlib.metadata.version("imagebind") == "0.0.1.dev0"
    with pytest.raises(Unavailable, match=message) as caught:
        imagebind.import_imagebind.__wrapped__()
    assert "imagebind-unofficial==0.1.1" in str(caught.value)


# -- the weighted sum --------------------------------------------------------------------------------------------------------------------------------
class Loudness(Scorer):
    """A small honest scorer."""

    name = "loudness"
    outputs = {"loudness": frozenset({"audio"})}

    def measure(self, media: list[Media], prompts: list[str]) -> dict[str, torch.Tensor]:
        return {"loudness": torch.tensor([float(np.abs(m.audio.waveform).mean()) for m in media])}


class Broken(Scorer):
    """A scorer that fails in a given way."""

    name = "broken"
    outputs = {"broken": frozenset({"video"})}

    def __init__(self, result: object) -> None:
        self.result = result

    def measure(self, media: list[Media], prompts: list[str]) -> dict[str, torch.Tensor]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result  # type: ignore[return-value]


def test_the_total_is_the_weighted_sum_and_keeps_every_part(clap: ClapScorer, media: list[Media]) -> None:
    reward = WeightedSum([clap, Loudness()], {"clap": 2.0, "loudness": 0.5})
    scores = reward.score(media, PROMPTS)
    assert set(scores) == {"total", "clap", "loudness"}
    assert torch.equal(scores["clap"], clap.score(media, PROMPTS)["clap"])
    assert torch.allclose(scores["total"], 2 * scores["clap"] + 0.5 * scores["loudness"], atol=1e-15)
    assert torch.equal(reward.total(scores), scores["total"])
    assert reward.outputs["total"] == {"audio", "prompt"} and "tiny random" in clap.describe()
    blind = WeightedSum([clap, Loudness()], {"clap": 0.0, "loudness": 1.0})
    assert blind.outputs["total"] == {"audio"}  # what no weight reaches, the total does not depend on
    with reward.watch() as arrivals:
        reward.score(media, PROMPTS)
    assert sum(a.at == "ClapModel.audio_model" for a in arrivals) == 1  # one model call a batch


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("out of memory"), "broken: RuntimeError: out of memory"),
        (ImportError("no module"), "broken: ImportError"),
        ({"broken": torch.tensor([0.1, float("nan"), 0.3, 0.4])}, "nan for sample 1"),
        ({"broken": torch.tensor([0.1, 0.2, 0.3, float("inf")])}, "inf for sample 3"),
        ({}, r"missing \['broken'\]"),
        (None, "broken"),
        ({"broken": None}, "NoneType"),
        ({"broken": torch.zeros(3)}, r"\(3,\), want \(4,\)"),
        ({"broken": torch.zeros(4, 4)}, r"\(4, 4\), want \(4,\)"),
        ({"broken": torch.zeros(4), "other": torch.zeros(4)}, r"not declared \['other'\]"),
    ],
)
def test_a_scorer_that_fails_takes_the_total_with_it(result: object, message: str, media: list[Media]) -> None:
    with pytest.raises(ScorerFailed, match=message):
        WeightedSum([Loudness(), Broken(result)], {"loudness": 1.0, "broken": 0.0}).score(media, PROMPTS)


def test_weights_fit_the_scorers(clap: ClapScorer) -> None:
    for weights, message in (
        ({"clap": 1.0}, r"without a weight: \['loudness'\]"),
        ({"clap": 1.0, "loudness": 1.0, "imagebind_audio_video": 1.0}, r"without a scorer: \['imagebind_audio_video'\]"),
        ({"clap": -1.0, "loudness": 1.0}, "at least 0"),
        ({"clap": float("nan"), "loudness": 1.0}, "finite"),
        ({"clap": 0.0, "loudness": 0.0}, "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightedSum([clap, Loudness()], weights)
    with pytest.raises(ValueError, match="given twice"):
        WeightedSum([Loudness(), Loudness()], {"loudness": 1.0})
    with pytest.raises(ScorerFailed, match="missing"):
        WeightedSum([clap, Loudness()], {"clap": 1.0, "loudness": 1.0}).total({"clap": torch.zeros(2)})


def test_media_and_prompts_are_paired(clap: ClapScorer, media: list[Media]) -> None:
    with pytest.raises(ValueError, match="4 media and 3 prompts"):
        clap.score(media, PROMPTS[:3])
    with pytest.raises(ValueError, match="at least one"):
        clap.score([], [])
    with pytest.raises(ScorerFailed, match="prompt of sample 1"):
        clap.score(media[:2], ["rain", " "])

    class Silent:
        video, audio = media[0].video, None

    with pytest.raises(ScorerFailed, match="sample 1 has no audio"):
        clap.score([media[0], Silent()], PROMPTS[:2])  # type: ignore[list-item]


# -- the synthetic world, and a learned reward -------------------------------------------------------------------------------------------------------
def test_the_synthetic_reward_is_the_worlds_own() -> None:
    classes = [0, 3, 5, 1]
    latents = synthetic.sample({"video": (4, 2, 4, 4), "audio": (8, 6)}, classes, seed=1)
    prompts = [synthetic.PROMPTS[i] for i in classes]
    scorer, items = SyntheticScorer(), LatentMedia.split(latents)
    scores, want = scorer.score(items, prompts), synthetic.score(latents, classes)  # type: ignore[arg-type]
    assert torch.equal(scores["synthetic_text_audio"], want["clap"]) and torch.equal(scores["synthetic_audio_video"], want["av"])
    assert "synthetic weights" in scorer.describe()
    moved = difference(scorer, (items, prompts), (items, rotate(prompts)))
    assert moved["synthetic_text_audio"].max() > 0.05 and moved["synthetic_audio_video"].max() == 0
    with pytest.raises(ScorerFailed, match="no prompt 'thunder'"):
        scorer.score(items, [*prompts[:3], "thunder"])  # type: ignore[arg-type]


def chord(seconds: float = 4.0, rate: int = 32000) -> Audio:
    t = np.arange(int(rate * seconds)) / rate
    x = sum(np.sin(2 * np.pi * f * k * t) / k for f in (261.6, 329.6, 392.0) for k in (1, 2, 3)) * (0.6 + 0.4 * np.sin(2 * np.pi * 2 * t)) / 10
    return sound(x.astype(np.float32))


def test_a_learned_reward_prefers_the_prompt_that_names_what_is_heard() -> None:
    from loudfail.trainer.rewards.events import EventTextScorer

    try:
        scorer = EventTextScorer()
    except Unavailable as error:
        pytest.skip(f"unavailable: {error}")  # an optional package: its absence must not read as a pass
    picture = videos(2)[0]
    music, nothing = Media(picture, chord()), Media(picture, sound(np.zeros(64000, np.float32)))
    scores = scorer.score([music, music, nothing], ["an orchestra plays music", "a man speaking in a room", "an orchestra plays music"])["event_text"]
    assert scores[0] > scores[1] + 0.1 and scores[0] > scores[2] + 0.1
    assert "real weights" in scorer.describe()
    alone = scorer.score([music], ["an orchestra plays music"])["event_text"]
    assert (alone - scores[0]).abs().max() < SAME


# -- a process of its own ----------------------------------------------------------------------------------------------------------------------------
CHILD = f"""
import sys, os, time
sys.path.insert(0, {str(Path(clap_worker.__file__).parent)!r})
import numpy as np
from clap_worker import read_message, write_message
out = sys.stdout.buffer
"""


def child(tmp_path: Path, body: str, **limits: float) -> Worker:
    path = tmp_path / "child.py"
    path.write_text(CHILD + textwrap.dedent(body))
    return Worker([sys.executable, str(path)], name="child", **limits)


def test_a_worker_answers_and_stops(tmp_path: Path) -> None:
    worker = child(
        tmp_path,
        """
        write_message(out, {"versions": {}})
        while True:
            try: header, arrays = read_message(sys.stdin.buffer)
            except EOFError: sys.exit(0)
            write_message(out, {"was": header["call"]}, {k: v * 2 for k, v in arrays.items()})
        """,
    )
    big = np.arange(2_000_000, dtype=np.float32)  # more than a pipe holds
    header, arrays = worker.call("double", {"x": big, "y": np.zeros((2, 0), np.int64)})
    assert header == {"was": "double"} and (arrays["x"] == 2 * big).all() and arrays["y"].shape == (2, 0)
    assert worker.alive and worker.stop() == 0 and not worker.alive
    with pytest.raises(ScorerFailed, match="was stopped"):
        worker.call("double")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("write_message(out, {}); read_message(sys.stdin.buffer); print('no memory', file=sys.stderr); os._exit(7)", r"status 7 (?s:.)*no memory"),
        ("write_message(out, {}); read_message(sys.stdin.buffer); time.sleep(60)", "no answer to call 'audio' within 0.5 s"),
        ("write_message(out, {}); read_message(sys.stdin.buffer); out.write(b'\\0\\0\\0\\x09{\"arrays\"'); out.flush(); os._exit(0)", "worker ended"),
        ("write_message(out, {}); read_message(sys.stdin.buffer); write_message(out, {'error': 'ValueError: bad clip'}); time.sleep(60)", "bad clip"),
    ],
)
def test_a_worker_that_dies_hangs_or_fails_is_an_error(body: str, message: str, tmp_path: Path) -> None:
    worker = child(tmp_path, body)
    worker.call_seconds = 0.5 if "no answer" in message else 30
    with pytest.raises(ScorerFailed, match=message):
        worker.call("audio", {"0": np.zeros(10, np.float32)})
    if "bad clip" in message:
        worker._process.kill()
    worker.stop()
    assert not worker.alive


def test_a_worker_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ScorerFailed, match="cannot run"):
        Worker([str(tmp_path / "python")], name="child")
    with pytest.raises(ScorerFailed, match=r"no answer to start within 0\.3 s"):
        child(tmp_path, "time.sleep(60)", start_seconds=0.3)
    with pytest.raises(ScorerFailed, match="status 3"):
        child(tmp_path, "sys.exit(3)")


def test_laion_clap_without_its_environment_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="ci/laion-clap"):
        clap_remote.find_python(tmp_path)


def to_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A laion-clap state dict under the names of `ClapModel`."""
    names = [
        ("text_branch.", "text_model."), ("audio_branch.bn0.", "audio_model.audio_encoder.batch_norm."),
        ("audio_branch.", "audio_model.audio_encoder."), (".norm1.", ".layernorm_before."), (".norm2.", ".layernorm_after."),
        (".attn.proj.", ".attention.output.dense."), (".attn.", ".attention.self."),
        (".mlp.fc1.", ".intermediate.dense."), (".mlp.fc2.", ".output.dense."),
        ("_projection.0.", "_projection.linear1."), ("_projection.2.", "_projection.linear2."),
    ]  # fmt: skip
    renamed = {}
    for key, value in state.items():
        for old, new in names:
            key = key.replace(old, new)
        if ".qkv." in key:
            renamed |= {key.replace("qkv", part): rows for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True)}
        else:
            renamed[key] = value
    return renamed


def test_laion_clap_and_transformers_agree_on_the_same_weights(media: list[Media], tmp_path: Path) -> None:
    """Measured: 2e-4 at most, from laion-clap's 16-bit quantisation and its text encoder's other epsilon."""
    import subprocess

    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, RobertaTokenizer

    try:
        python = clap_remote.find_python()
    except Unavailable as error:
        pytest.skip(f"unavailable: {error}")  # an optional package: its absence must not read as a pass
    make = """
import runpy, sys
worker, path = sys.argv[1:]
names = runpy.run_path(worker)
names["import_laion_clap"]()
import torch
torch.manual_seed(0)
state = dict(names["build"]("HTSAT-tiny", "cpu").model.state_dict())
state["text_branch.embeddings.position_ids"] = torch.arange(514)[None]  # released checkpoints have it, and load_ckpt relies on it
torch.save({"state_dict": state}, path)
"""
    checkpoint = tmp_path / "random.pt"
    made = subprocess.run([python, "-I", "-c", make, clap_worker.__file__, checkpoint], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    model = ClapModel(ClapConfig())
    loaded = model.load_state_dict(to_transformers(torch.load(checkpoint, weights_only=True)["state_dict"]), strict=False)
    assert loaded.missing_keys == ["text_model.embeddings.token_type_ids"]  # a constant buffer
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet()), "<mask>"])}
    tokenizer = RobertaTokenizer(vocab=vocabulary | {f"<filler {i}>": i for i in range(len(vocabulary), 50265)}, merges=[])
    extractor = ClapFeatureExtractor(
        feature_size=64, sampling_rate=RATE, max_length_s=10, frequency_min=50, frequency_max=14000, truncation="rand_trunc", padding="repeatpad"
    )
    here = ClapScorer(model, tokenizer, extractor, weights="tiny random", source="laion-clap's own random weights")
    with clap_remote.LaionClapScorer(checkpoint, model="HTSAT-tiny", tokenizer=tokenizer, weights="random") as there:
        assert there.health()["versions"]["laion-clap"] == "1.1.7"
        scores, again = (there.score(media, PROMPTS)["clap"] for _ in range(2))
    assert torch.equal(scores, again)
    assert (scores - here.score(media, PROMPTS)["clap"]).abs().max() < 6e-4
    assert (scores - here.score(media, rotate(PROMPTS))["clap"]).abs().max() > 2e-3  # so the bound can tell prompts apart


# -- monitors ----------------------------------------------------------------------------------------------------------------------------------------
def measured(item: Media) -> dict[str, float]:
    return {name: value.item() for name, value in monitors.measure([item]).items()}


def test_every_signal_monitor_moves_the_right_way(media: list[Media]) -> None:
    y, x, t = np.mgrid[:48, :64][0], np.mgrid[:48, :64][1], np.arange(60)[:, None, None]
    drifting = np.stack([2 * y + x + t] * 3, -1).astype(np.uint8)
    good = Media(Video(drifting, 24.0), sound(noise(80000, 0), noise(80000, 1)))
    base = measured(good)
    assert set(base) == {m.name for m in monitors.SIGNAL}
    left, right = good.audio.waveform
    rng = np.random.default_rng(5)
    flicker = Video(rng.integers(0, 256, (60, 1, 1, 3)).repeat(48, 1).repeat(64, 2).astype(np.uint8), 24.0)
    half = good.video.frames.copy()
    half[30:] = 255 - half[30:]
    worse = {
        "audio_clipping": (Media(good.video, sound(np.clip(left * 50, -1, 1))), 0.3),
        "audio_silence": (Media(good.video, sound(np.where(np.arange(80000) < 40000, left, 0).astype(np.float32))), 0.4),
        "audio_offset": (Media(good.video, sound(left + 0.2, right)), 0.15),
        "audio_loudness": (Media(good.video, sound(left / 10, right / 10)), -19.0),
        "stereo_correlation": (Media(good.video, sound(left, -left)), -0.9),
        "stereo_level_difference": (Media(good.video, sound(left, right / 10)), 19.0),
        "video_motion": (Media(Video(np.repeat(good.video.frames[:1], 60, 0), 24.0), good.audio), -0.9 * base["video_motion"]),
        "video_smoothness": (Media(flicker, good.audio), -0.05),
        "video_consistency": (Media(Video(half, 24.0), good.audio), -0.05),
        "video_largest_cut": (Media(Video(half, 24.0), good.audio), 0.1),
    }
    assert set(worse) == set(base)
    ways = {m.name: m.worse for m in monitors.SIGNAL}
    for name, (item, change) in worse.items():
        moved = measured(item)[name] - base[name]
        assert moved <= change if change < 0 else moved >= change, (name, base[name], moved)
        assert ways[name] in ("either", "lower" if change < 0 else "higher"), name


def test_monitors_survive_the_extremes() -> None:
    empty = Media(Video(np.zeros((1, 1, 1, 3), np.uint8), 1.0), sound(np.zeros(1, np.float32)))
    values = measured(empty)
    assert all(math.isfinite(v) for v in values.values()) and values["audio_loudness"] == -120 and values["audio_silence"] == 1
    with pytest.raises(ValueError, match="no media"):
        monitors.measure([])


def learned(kind: str) -> tuple[monitors.Monitor, ...]:
    try:
        return getattr(monitors, kind)()
    except Unavailable as error:
        pytest.skip(f"unavailable: {error}")  # an optional package: its absence must not read as a pass


def test_music_is_heard_as_music() -> None:
    picture, kinds = videos(2)[0], learned("events")
    kinds_of_sound = (chord(), sound(noise(64000, 0)), sound(np.zeros(64000, np.float32)))
    music, hiss, silent = (monitors.measure([Media(picture, a)], kinds) for a in kinds_of_sound)
    assert music["presence_music"] > 0.5 > hiss["presence_music"] and silent["presence_speech"] < 0.1


def test_noise_is_rated_below_silence_as_speech() -> None:
    picture, kinds = videos(2)[0], learned("dnsmos")
    items = [Media(picture, sound(noise(64000, 0))), Media(picture, sound(np.zeros(64000, np.float32)))]
    hiss, silent = monitors.measure(items, kinds)["speech_quality"]
    assert 1 < hiss < silent - 0.2 and silent < 5


def test_the_alarm_rings_when_the_total_rises_and_something_else_gets_worse() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(60)

    def series(slope: float) -> list[float]:
        return list(slope * steps / 60 + 0.05 * rng.normal(size=60))

    healthy = {"total": series(0.5), "clap": series(0.4), "video_motion": series(0), "audio_silence": series(-0.3), "video_smoothness": series(0.2)}
    assert monitors.find_reward_hacking(healthy) == []
    hacked = healthy | {"imagebind_audio_video": series(-0.4), "audio_clipping": series(0.5), "video_motion": series(-0.3)}
    hacked["audio_offset"] = series(-0.5)  # gets better
    alarms = monitors.find_reward_hacking(hacked)
    assert {a.name for a in alarms} == {"imagebind_audio_video", "audio_clipping", "video_motion"}
    assert all(a.total_after > a.total_before for a in alarms) and "while" in str(alarms[0])
    falling = hacked | {"total": series(-0.5)}
    assert monitors.find_reward_hacking(falling) == []  # a failed run, not a hacked one
    flat = {"total": series(0.5), "audio_clipping": [0.0] * 60}
    assert monitors.find_reward_hacking(flat) == []
    for wrong, message in (({"total": [1.0] * 5}, "at least 12"), ({"total": [1.0] * 20, "clap": [float("nan")] * 20}, "not finite")):
        with pytest.raises(ValueError, match=message):
            monitors.find_reward_hacking(wrong)


def test_the_alarm_is_quiet_on_noise() -> None:
    rng = np.random.default_rng(1)
    rung = [bool(monitors.find_reward_hacking({"total": list(rng.normal(size=40)), "clap": list(rng.normal(size=40))})) for _ in range(400)]
    assert sum(rung) == 0
    assert abs(monitors.trend(list(range(26))) - 5.0) < 1e-9  # the strongest trend of 26 steps
    assert monitors.trend([1, 1, 2, 2, 1, 1]) == pytest.approx(0, abs=1e-12)  # ties


# -- files -------------------------------------------------------------------------------------------------------------------------------------------
def test_media_come_back_from_disk_bit_for_bit(media: list[Media], clap: ClapScorer, tmp_path: Path) -> None:
    path = tmp_path / "sample.npz"
    media_files.save_media(media[0], path)
    back = media_files.load_media(path)
    assert (back.video.frames == media[0].video.frames).all() and (back.audio.waveform == media[0].audio.waveform).all()
    assert (back.video.fps, back.audio.sample_rate) == (24.0, 32000)
    assert torch.equal(clap.score([back], PROMPTS[:1])["clap"], clap.score([media[0]], PROMPTS[:1])["clap"])


@pytest.mark.parametrize(("fps", "rate", "height"), [(24.0, 32000, 48), (29.97, 48000, 47)])
def test_an_mp4_has_the_picture_and_the_sound(fps: float, rate: int, height: int, tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = videos(30)[3].frames[:, :height]
    left = tone(500, 1.0, rate)
    item = Media(Video(frames, fps), sound(left, left / 4, rate=rate))
    media_files.write_mp4(item, tmp_path / "sample.mp4")
    back = media_files.read_mp4(tmp_path / "sample.mp4")
    assert back.video.frames.shape == (30, height // 2 * 2, 64, 3) and back.video.fps == pytest.approx(fps, rel=1e-3)
    assert np.abs(back.video.frames.astype(int) - frames[:, : height // 2 * 2]).mean() < 4
    assert back.audio.sample_rate == rate and 0 <= back.audio.waveform.shape[1] - rate <= 2048
    for channel in (0, 1):
        assert np.corrcoef(back.audio.waveform[channel, 2000 : rate - 2000], item.audio.waveform[channel, 2000 : rate - 2000])[0, 1] > 0.99
    assert np.abs(back.audio.waveform[0]).max() > 3 * np.abs(back.audio.waveform[1]).max()  # left stayed left


def test_the_picture_shows_what_is_seen_and_heard(media: list[Media]) -> None:
    pytest.importorskip("PIL")
    one = np.asarray(media_files.draw_media(media[1]))
    deaf = np.asarray(media_files.draw_media(Media(media[1].video, sound(np.zeros(80000, np.float32)))))
    blind = np.asarray(media_files.draw_media(Media(videos()[0], media[1].audio)))
    rows = [np.flatnonzero((one != other).any((1, 2))) for other in (deaf, blind)]
    assert one.shape[1] == 1200 and rows[0].min() > rows[1].max()  # sound is drawn below the frames, and neither touches the other
    spectrogram = one[-206:-6].astype(int).sum((1, 2))
    assert abs((len(spectrogram) - spectrogram.argmax()) / len(spectrogram) * 16000 - 440) < 120  # the 440 Hz line, counted from the bottom


def test_the_worker_file_imports_nothing_of_this_project() -> None:
    text = Path(clap_worker.__file__).read_text()
    assert "import loudfail" not in text and "from loudfail" not in text and "from ." not in text
    assert json.loads(json.dumps({"arrays": {}}))["arrays"] == {}
