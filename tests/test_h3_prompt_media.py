"""MiniMax H3's prompts, keyframes and media: the real parts at a tiny size, trainer against rollout and against plain arithmetic."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loudfail.harness.case import PROMPTS, smallest
from loudfail.harness.compare import relative_error
from loudfail.harness.media import Audio, Media, Video
from loudfail.harness.port import Conditions, noised
from loudfail.harness.ports.h3 import H3
from loudfail.harness.world import RankError

UNICODE = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=24)
DRAWN = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def port() -> Iterator[H3]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this narrow gain nothing from more, and waiting threads take the processor from the ranks
    port = H3()
    yield port
    port.close()
    torch.set_num_threads(threads)


def picture(seed: int, height: int = 64, width: int = 64) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# -- prompts -----------------------------------------------------------------------------------------------------------------------------------


@DRAWN
@given(text=UNICODE)
def test_ids_reach_the_rollouts_encoder_bit_for_bit(port: H3, text: str) -> None:
    ids = port.tokenize(text)
    assert ids and None not in ids
    arrived, embeds = port.rollout_prompt(ids)
    assert arrived == ids
    assert relative_error(embeds, port.encode_prompt(ids)) < 1e-6


@DRAWN
@given(parts=st.lists(st.sampled_from(("the", "t", "he", "ra", "in", " a", "ll", "\U0001f680")), min_size=2, max_size=6), cut=st.integers(0, 3))
def test_ids_that_no_text_gives_arrive_too(port: H3, parts: list[str], cut: int) -> None:
    ids = tuple(token for part in parts for token in port.tokenize(part))
    ids = ids[: max(1, len(ids) - cut)]
    assert port.rollout_prompt(ids)[0] == ids


def test_a_round_trip_through_text_shows(port: H3) -> None:
    joined = (*port.tokenize("t"), *port.tokenize("he"))
    cut = port.tokenize("\U0001f680")[:-1]
    special = port.tokenize("<|im_start|> spoken literally")
    assert port.tokenize(port.tokenizer.decode(joined)) != joined
    assert port.tokenize(port.tokenizer.decode(cut)) != cut
    assert port.tokenize(port.tokenizer.decode(special, skip_special_tokens=True)) != special
    for ids in (joined, cut):
        other = port.tokenize(port.tokenizer.decode(ids))
        length = min(len(ids), len(other))
        assert relative_error(port.encode_prompt(other)[:length], port.encode_prompt(ids)[:length]) > 0.1


def test_the_embedding_is_the_50th_hidden_state(port: H3) -> None:
    ids = port.tokenize(PROMPTS[2])
    states = port.text_encoder.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(port.encode_prompt(ids), states[50][0].float())
    assert relative_error(states[49][0], states[50][0]) > 1e-3 and relative_error(states[51][0], states[50][0]) > 1e-3


def test_every_prompt_has_its_own_embedding_and_no_prompt_is_refused(port: H3) -> None:
    embeds = [port.encode_prompt(port.tokenize(prompt)) for prompt in PROMPTS]
    assert [len(one) for one in embeds] == [len(port.tokenize(prompt)) for prompt in PROMPTS]
    assert len({one.mean().item() for one in embeds}) == len(PROMPTS)
    with pytest.raises(ValueError, match="no token ids"):
        port.encode_prompt(())
    with pytest.raises(RankError, match="non-empty"):
        port.rollout_prompt(())
    assert port.rollout_prompt((1, 2))[0] == (1, 2)  # the rank lives on


# -- keyframes ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("first",), ("last",), ("first", "last")])
def test_keyframes_are_presented_as_labelled_vision_blocks(port: H3, names: tuple[str, ...]) -> None:
    ids = port.tokenize("rain")
    condition = port.condition(ids, images={name: picture(place) for place, name in enumerate(names)})
    start, end, pad = (port.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad"))
    want: list[int] = []
    tags: list[int] = []
    for place in range(len(names)):
        label = port.tokenize(f"<Picture {place + 1}>: ")
        want += [*label, start, *[pad] * 4, end]  # 64 × 64 pixels are resized to 4 × 4 patches, merged in fours
        tags += [1] * len(label) + [0] * 6
    assert condition.extra["encoder_ids"] == (*want, *ids)
    assert condition.extra["tags"].tolist() == tags + [1] * len(ids)
    assert condition.prompt_ids == ids and len(condition.embeds) == len(want) + len(ids)


def test_trainer_and_rollout_present_keyframes_alike(port: H3, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, images = port.tokenize("a bell"), {"first": picture(1, 32, 96), "last": picture(2, 32, 96)}
    trainer, rollout = port.present(ids, images), port.present_in_rollout(ids, images)
    assert rollout.ids == trainer.ids
    assert rollout.tags is not None and trainer.tags is not None and torch.equal(rollout.tags, trainer.tags)
    assert relative_error(rollout.embeds, trainer.embeds) < 2e-3
    # The rest is the rounding of pixels to bfloat16, which vLLM-Omni does whatever the encoder's dtype is.
    processor = type(port._presenter.processor.image_processor)
    original = processor.__call__

    def rounded(*args: Any, **kwargs: Any) -> Any:
        features = original(*args, **kwargs)
        features["pixel_values"] = features["pixel_values"].bfloat16().float()
        return features

    monkeypatch.setattr(processor, "__call__", rounded)
    type(port)._encode.cache_clear()
    try:
        assert relative_error(rollout.embeds, port.present(ids, images).embeds) < 1e-6
    finally:
        type(port)._encode.cache_clear()


def test_the_prompt_sees_the_keyframes_and_their_order(port: H3) -> None:
    ids, one, two = port.tokenize("rain"), picture(1), picture(2)

    def prompt(*images: Any) -> torch.Tensor:
        return port.present(ids, dict(zip(("first", "last"), images, strict=False))).embeds[-len(ids) :]

    assert relative_error(prompt(one, two), prompt(two, one)) > 1e-2
    assert relative_error(prompt(one), prompt(two)) > 1e-2
    assert relative_error(prompt(one), prompt()) > 1e-2


def test_keyframe_latents_follow_the_released_recipe(port: H3) -> None:
    image, vae = picture(3, 64, 96), port.autoencoders.vae
    pixels = (torch.from_numpy(image).permute(2, 0, 1)[None, :, None] / 255 - torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(1, 3, 1, 1, 1)
    posterior = vae.encode(pixels).latent_dist
    sample = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(42))
    mean, std = (torch.tensor(values).view(24, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    want = (sample[0].half().float() - mean) / std
    got = port.encode_frame(image)
    assert got.shape == (24, 1, 4, 6) and got.dtype == torch.float32
    assert (got - want).abs().max() < 5e-3  # one step of float16
    assert 0.3 < got.std() < 3 and relative_error(port.encode_frame(picture(4, 64, 96)), got) > 0.1
    assert relative_error(sample[0], got) > 0.1  # latent statistics that are not the identity


def test_conditions_hold_what_given_latents_says(port: H3) -> None:
    case = smallest(port, seed=5, prompts=("rain", "a bell"), given=("first", "last"))
    conditions, clean = port.conditions(case), port.given_latents(case)
    rows = 2 * 2 // 4
    for condition, latents in zip(conditions, clean, strict=True):
        assert list(condition.given) == ["first", "last"]
        for name in case.given:
            assert torch.equal(condition.given[name], latents[name])
        assert condition.extra["given_rows"].shape == (2 * rows, 96)
    assert not torch.equal(clean[0]["first"], clean[1]["first"]) and not torch.equal(clean[0]["first"], clean[0]["last"])
    again = port.conditions(case)
    assert all(
        torch.equal(a.embeds, b.embeds) and torch.equal(a.extra["given_rows"], b.extra["given_rows"]) for a, b in zip(conditions, again, strict=True)
    )


@pytest.mark.parametrize(
    "image", [picture(0).astype(np.float32), picture(0, 48, 64), picture(0)[..., :2], picture(0).transpose(2, 0, 1), torch.zeros(64, 64, 3), None]
)
def test_what_is_not_a_keyframe_is_refused(port: H3, image: Any) -> None:
    with pytest.raises(ValueError, match=r"want uint8 \(H, W, 3\)"):
        port.condition((1, 2), images={"first": image})


def test_latents_and_images_together_are_refused(port: H3) -> None:
    with pytest.raises(ValueError, match="not both"):
        port.condition((1, 2), given={"first": torch.zeros(24, 1, 4, 4)}, images={"first": picture(0)})


@pytest.mark.parametrize("names", [("first",), ("last",), ("first", "last")])
def test_vision_rows_keep_trainer_rollout_and_vendor_together(port: H3, names: tuple[str, ...]) -> None:
    case = smallest(port, seed=7, prompts=("a bell rings", "rain"), given=names)
    conditions, noise, sigmas = port.conditions(case), case.normal("noise", port.shapes(case)), case.sigmas("sigmas", port.modalities)
    latents = noised(case.normal("clean", port.shapes(case)), noise, sigmas)
    engine = port.engine(1)
    untagged = [Conditions(c.prompt_ids, c.embeds, c.given, {**c.extra, "tags": torch.ones_like(c.extra["tags"])}) for c in conditions]
    with torch.no_grad(), port.using(None):
        want = port.predict_velocity(latents, sigmas, conditions)
        wrong = port.predict_velocity(latents, sigmas, untagged)
        vendor = port.vendor_rollout(noise, 3, conditions)
        replayed = [port.predict_velocity(step.latents, step.sigmas, conditions) for step in vendor.steps]
    got = engine.velocity(latents, sigmas, conditions)
    final = engine.rollout(noise, 3, conditions).final
    for modality in port.modalities:
        assert relative_error(got[modality], want[modality]) < 2e-6
        assert relative_error(final[modality], vendor.final[modality]) < 5e-6
        assert max(relative_error(a[modality], b.velocity[modality]) for a, b in zip(replayed, vendor.steps, strict=True)) < 5e-6
        assert relative_error(wrong[modality], want[modality]) > 1e-3


# -- media -------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def clip(port: H3) -> tuple[dict[str, torch.Tensor], list[Media]]:
    generator = torch.Generator().manual_seed(0)
    latents = {"video": torch.randn(2, 24, 7, 4, 6, generator=generator), "audio": torch.randn(2, 2, 32, 8, generator=generator)}
    return latents, port.decode(latents)


def test_decoded_media_has_h3s_rates_and_layout(clip: tuple[dict[str, torch.Tensor], list[Media]]) -> None:
    _, media = clip
    assert len(media) == 2
    for one in media:
        assert one.video.frames.shape == (22, 64, 96, 3) and one.video.frames.dtype == np.uint8 and one.video.fps == 24
        assert one.audio.waveform.shape == (2, 8 * 800) and one.audio.waveform.dtype == np.float32 and one.audio.sample_rate == 32000
        assert one.video.frames.std() > 20 and one.audio.waveform.std() > 0.02 and np.abs(one.audio.waveform).max() < 1
    assert not np.array_equal(media[0].video.frames, media[1].video.frames)


def test_decoding_is_the_autoencoders_own(port: H3, clip: tuple[dict[str, torch.Tensor], list[Media]]) -> None:
    latents, media = clip
    parts = port.autoencoders
    mean, std = (torch.tensor(values).view(1, 24, 1, 1, 1) for values in (parts.vae.config.latents_mean, parts.vae.config.latents_std))
    with torch.no_grad():
        video = parts.vae.decode(latents["video"][:1] * std + mean).sample[0]
        rgb = video * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1, 1) + torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1, 1)
        mean, std = (torch.tensor(values).view(1, 32, 1) for values in (parts.audio_vae.config.latents_mean, parts.audio_vae.config.latents_std))
        sound = parts.audio_vae.decode(latents["audio"][0] * std + mean).sample[:, 0]
    want = (rgb.clamp(0, 1) * 255).permute(1, 2, 3, 0).numpy()
    assert np.abs(media[0].video.frames - want).max() <= 0.51
    assert np.abs(media[0].audio.waveform - sound.numpy()).max() < 1e-5


def test_each_modality_and_channel_is_decoded_from_its_own_latents(port: H3, clip: tuple[dict[str, torch.Tensor], list[Media]]) -> None:
    latents, media = clip
    swapped = port.decode({"video": latents["video"], "audio": latents["audio"].flip(1)})[0]
    assert np.array_equal(swapped.audio.waveform, media[0].audio.waveform[::-1]) and np.array_equal(swapped.video.frames, media[0].video.frames)
    other = port.decode({"video": latents["video"].flip(0), "audio": latents["audio"]})[0]
    assert np.array_equal(other.video.frames, media[1].video.frames) and np.array_equal(other.audio.waveform, media[0].audio.waveform)


@pytest.mark.parametrize(("latent", "frames"), [(1, 1), (2, 5), (3, 9), (7, 22), (12, 39)])
def test_latent_frames_and_frames(port: H3, latent: int, frames: int) -> None:
    video = torch.randn(1, 24, latent, 2, 2, generator=torch.Generator().manual_seed(1))
    decoded = port.decode({"video": video, "audio": torch.zeros(1, 2, 32, 5)})[0]
    assert decoded.video.frames.shape == (frames, 32, 32, 3)
    if latent == 2:  # the encoder maps 5 frames to 2 latent frames, so the way back must give 5
        pixels = torch.zeros(1, 3, frames, 32, 32)
        assert port.autoencoders.vae.encode(pixels).latent_dist.mean.shape[2] == latent


def test_latents_that_are_not_finite_are_refused(port: H3) -> None:
    audio = torch.zeros(1, 2, 32, 5)
    audio[0, 1, 3, 2] = torch.nan
    with pytest.raises(ValueError, match="audio latents have NaN"):
        port.decode({"video": torch.zeros(1, 24, 7, 2, 2), "audio": audio})


FRAMES, WAVE = np.zeros((5, 4, 6, 3), np.uint8), np.zeros((2, 100), np.float32)


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (FRAMES.astype(np.float32), 24, "float32; want uint8"),
        (FRAMES.transpose(0, 3, 1, 2), 24, "channels last"),
        (FRAMES[0], 24, r"want \(T, H, W, 3\)"),
        (FRAMES[:0], 24, "at least one frame"),
        (torch.zeros(5, 4, 6, 3, dtype=torch.uint8), 24, "Tensor; want a numpy array"),
        (FRAMES, 0, "fps is 0"),
        (FRAMES, float("nan"), "fps is nan"),
        (FRAMES, "24", "fps is '24'"),
    ],
)
def test_video_that_does_not_fit_is_refused(frames: Any, fps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Video(frames, fps)


@pytest.mark.parametrize(
    ("waveform", "rate", "message"),
    [
        (WAVE.astype(np.float64), 32000, "float64; want float32"),
        (WAVE.T, 32000, "transpose it"),
        (WAVE[0], 32000, r"want \(2, N\)"),
        (WAVE[:1], 32000, r"want \(2, N\)"),
        (WAVE[:, :0], 32000, "no samples"),
        (WAVE + np.float32(1.5), 32000, "peaks at 1.5"),
        (WAVE * np.float32(np.nan), 32000, "NaN or infinite"),
        (WAVE, 32000.0, "positive integer"),
        (WAVE, 0, "positive integer"),
        (WAVE, True, "positive integer"),
    ],
)
def test_audio_that_does_not_fit_is_refused(waveform: Any, rate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Audio(waveform, rate)


def test_media_knows_its_lengths_and_cannot_be_written_to() -> None:
    media = Media(Video(FRAMES, 24), Audio(WAVE, 32000))
    assert media.video.seconds == 5 / 24 and media.audio.seconds == 100 / 32000
    with pytest.raises(ValueError, match="read-only"):
        media.video.frames[0] = 1
    with pytest.raises(ValueError, match="want Audio"):
        Media(media.video, WAVE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="want Video"):
        Media(io.BytesIO(), media.audio)  # type: ignore[arg-type]


# -- a checkpoint folder -----------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_folder_gives_the_same_prompts_and_media(port: H3, clip: Any, tmp_path: Any) -> None:
    port.tokenizer.save_pretrained(tmp_path / "tokenizer")
    port._presenter.processor.image_processor.save_pretrained(tmp_path / "processor")
    port.text_encoder.save_pretrained(tmp_path / "text_encoder")
    port.autoencoders.vae.save_pretrained(tmp_path / "vae")
    port.autoencoders.audio_vae.save_pretrained(tmp_path / "audio_vae")
    loaded, (latents, media) = H3(weights=str(tmp_path)), clip
    ids = loaded.tokenize(PROMPTS[5])
    assert ids == port.tokenize(PROMPTS[5])
    assert torch.equal(loaded.encode_prompt(ids), port.encode_prompt(ids))
    one = loaded.decode({modality: value[:1] for modality, value in latents.items()})[0]
    assert np.array_equal(one.video.frames, media[0].video.frames) and np.array_equal(one.audio.waveform, media[0].audio.waveform)
    images = {"first": picture(1)}
    assert torch.equal(loaded.condition(ids, images=images).embeds, port.condition(ids, images=images).embeds)
