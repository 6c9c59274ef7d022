"""What a run leaves for people: TensorBoard, media of fixed samples, the page, the reward-hacking alarm."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_report import drive, measure
from toyactor import ToyActor

from loudfail.harness.media_files import read_mp4
from loudfail.trainer import loop, run_page, train
from loudfail.trainer.config import Config, ConfigProblem, parse, read_recipe
from loudfail.trainer.logs import Board, Exhibition, find_alarms
from loudfail.trainer.rewards.monitors import trend

SMALL = (
    "steps=2", "threads=0", "algorithm.prompts=2", "algorithm.samples=2", "rollout.calls=4", "validation.samples=2", "validation.media=2",
    "checkpoints.every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of H3."""
    out = tmp_path_factory.mktemp("run") / "mine"
    assert train.train(read_recipe("h3_tiny", SMALL), out) == train.DONE
    return out


def test_validation_leaves_film_picture_and_sub_scores_of_fixed_samples(finished: Path) -> None:
    for step in (0, 2):
        folder = finished / "validation" / f"step-{step:06d}"
        assert sorted(path.name for path in folder.iterdir()) == [
            *(f"prompt-{index:03d}.{kind}" for index in (0, 1) for kind in ("json", "mp4", "png")), "scores.json",
        ]  # fmt: skip
        film = read_mp4(folder / "prompt-001.mp4")
        assert film.video.frames.shape[0] > 1 and film.audio.waveform.shape[0] == 2
        record = json.loads((folder / "prompt-001.json").read_text())
        assert record["prompt"] == "a bell rings" and set(record["scores"]) == {"total", "synthetic_text_audio", "synthetic_audio_video"}
        assert record["monitors"].keys() >= {"audio_silence", "audio_clipping", "video_motion"}
    means = [json.loads((finished / "validation" / f"step-{step:06d}" / "scores.json").read_text())["means"] for step in (0, 2)]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["validation"] == means
    assert summary["true_reward"] == [means[0]["total"], means[1]["total"]]
    assert not any(name.startswith("monitor/") for name in summary["scores"]), "media monitors are no sub-scores"


def test_tensorboard_has_every_step_once(finished: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an optional extra")
    seen = events.EventAccumulator(str(finished / "tensorboard")).Reload()
    tags = set(seen.Tags()["scalars"])
    assert tags >= {"reward/logged", "reward/true", "score/synthetic_text_audio", "prediction_gradient/audio", "monitors/velocity_replay"}
    assert tags >= {"monitors_of_bound/velocity_replay", "seconds_of/rollout", "seconds_of/update", "seconds"}
    history = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    logged = [(event.step, event.value) for event in seen.Scalars("reward/logged")]
    assert logged == [(record["step"] + 1, pytest.approx(record["logged_reward"], rel=1e-6)) for record in history]
    assert [event.step for event in seen.Scalars("validation/total")] == [0, 2]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
def test_the_page_can_be_read_on_any_screen(browser: str, finished: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = measure(browser, tmp_path, (finished / "report.html").read_text(), width, dark=dark)
    assert seen["width"] <= width and seen["unreachable"] == 0 and seen["scripts"] == 0
    assert seen["texts"] > 60 and seen["low"] == [], "text against its background, at least 4.5 to 1"
    assert seen["headline"] == "mine is done" and seen["images"] == 4


def test_the_page_shows_the_pictures_beside_it(browser: str, finished: Path, tmp_path: Path) -> None:
    from PIL import Image

    shutil.copytree(finished, tmp_path / "with")
    shutil.copytree(finished, tmp_path / "without", ignore=shutil.ignore_patterns("*.png"))
    colours = {}
    for name in ("with", "without"):
        drive(browser, tmp_path, tmp_path / name / "report.html", f"--screenshot={tmp_path / name}.png", size="1280,4500")
        colours[name] = len(Image.open(tmp_path / f"{name}.png").convert("RGB").getcolors(1 << 24) or [])
    assert colours["with"] > 3 * colours["without"] > 0


def test_a_reading_beyond_its_bound_is_drawn_above_the_line() -> None:
    """SVG's y grows downwards."""
    (curve,) = (drawn := run_page.plot("replay", {"share": [(1, 0.01), (2, 5.0), (3, math.inf), (4, 0.0), (5, math.nan)]}, of_bound=True))["curves"]
    inside, above, infinite, nothing, unknown = [y for _, y in curve["points"]]
    assert infinite == unknown < above < drawn["limit"] < inside < nothing


def toy(steps: int, **sections: Any) -> Config:
    """A run without media that takes a second."""
    model = {"port": "toyactor:ToyActor", "device": "cpu"}
    return parse({"steps": steps, "seed": 5, "model": model, "rollout": {"calls": 4}, "validation": {"samples": 2, "calls": 3}} | sections)


def test_a_resumed_run_shows_every_step_once(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an optional extra")
    config = toy(4, checkpoints={"every": 1, "keep": 9}, validation={"every": 2, "samples": 2, "calls": 3})
    train.train(config, tmp_path, port=ToyActor())
    time.sleep(1.1)  # event files are read in the order of their names, which have seconds
    train.train(config, tmp_path, resume=str(tmp_path / "checkpoints" / "step-000002"), port=ToyActor())
    seen = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in seen.Scalars("reward/logged")] == [1, 2, 3, 4]
    assert [event.step for event in seen.Scalars("validation/total")] == [0, 2, 4]


def test_what_an_earlier_start_came_to_is_not_said_of_the_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.train(toy(1), tmp_path, port=ToyActor())
    assert run_page.read(tmp_path)["status"] == "done"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train.train(toy(2), tmp_path, resume="", port=ToyActor())
    assert run_page.read(tmp_path)["status"] == "unfinished"


def test_the_page_shows_the_run_and_is_made_again_from_its_files(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (finished / "report.html").read_text()
    for what in (
        "mine <em>is done",
        "Logged against true",
        "synthetic_audio_video",
        "velocity_replay",
        "a bell rings",
        "validation/step-000002/prompt-000.mp4",
    ):
        assert what in text, what
    assert text.count("<polyline") >= 6 and "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    (finished / "report.html").unlink()
    assert train.main([str(finished), "--page"]) == train.DONE
    assert (finished / "report.html").read_text() == text


def test_the_page_of_a_killed_run_says_that_it_did_not_end(finished: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(finished, killed)
    (killed / "summary.json").unlink()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "logged_re')
    text = run_page.write(killed).read_text()
    assert "killed <em>has not ended" in text and "steps <b>2</b> of <b>2</b>" in text
    own, known = run_page.monitors_of(run_page.read(killed)), json.loads((finished / "summary.json").read_text())["monitors"]
    assert {one["name"]: (one["ran"], one["fired"], one["worst"]) for one in own} == {
        name: (count["ran"], count["fired"], count["worst"]) for name, count in known.items() if count["ran"]
    }
    record = run_page.read(finished)
    assert "UNGATED" in run_page.page(record | {"gated": "ungated"}) and "UNGATED" not in run_page.page(record)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(tmp_path), "--page"]) == train.USAGE
    assert "no folder of a run: no run.json" in capsys.readouterr().err


def test_what_was_shown_of_an_abandoned_future_is_removed(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    said: list[str] = []
    Exhibition(tmp_path, ToyActor(), 4, 10, said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000", "step-000010"]
    assert said == ["validation writes no media: port 'toy-actor' does not decode media"]


def test_tensorboard_that_is_missing_is_said_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said: list[str] = []
    board = Board(tmp_path, "auto", 0, said.append)
    board.validation(0, {"total": 1.0})
    assert len(said) == 1 and "loudfail[logs]" in said[0] and not list(tmp_path.iterdir())
    with pytest.raises(ConfigProblem, match=r"loudfail\[logs\]"):
        Board(tmp_path, "on", 0, said.append)


def test_the_line_of_progress_has_bar_time_left_and_every_sub_score() -> None:
    record = {"step": 29, "logged_reward": 0.5, "true_reward": 0.4, "score/total": 0.5, "score/audio": 0.7, "score/video": 0.3}
    assert train.progress(record, 40, 2.5) == "███████░░░ step 30/40 · 0:25 left · reward 0.500 true 0.400 · audio 0.700 video 0.300"
    assert train.progress(record | {"step": 0}, 300, 61).startswith("░░░░░░░░░░ step 1/300 · 5:03:59 left")


def history(steps: int, **slopes: float) -> list[dict[str, Any]]:
    """Records of steps whose scores move by so much a step, with a little that is not a trend."""
    return [{f"score/{name}": 0.5 + slope * step + 0.01 * math.sin(7 * step) for name, slope in slopes.items()} for step in range(steps)]


def test_the_alarm_says_what_pays_for_a_rising_total() -> None:
    hacked = find_alarms(history(20, total=0.01, audio=-0.02, video=0.04), [])
    assert len(hacked["alarms"]) == 1 and re.match(r"training: total .* while audio ", hacked["alarms"][0])
    assert find_alarms(history(20, total=0.01, audio=0.01, video=0.01), [])["alarms"] == []
    assert find_alarms(history(20, total=-0.01, audio=-0.02, video=0.0), [])["alarms"] == [], "no alarm where the total falls"
    assert find_alarms(history(11, total=0.01, audio=-0.02), []) == {"alarms": [], "steps": 11, "validations": 0}


def test_what_is_no_number_is_left_out_of_alarm_and_page(finished: Path, tmp_path: Path) -> None:
    records = [one | {"score/lost": "nan" if step == 3 else 1.0} for step, one in enumerate(history(20, total=0.01, audio=-0.02))]
    assert [alarm.split()[6] for alarm in find_alarms(records, [])["alarms"]] == ["audio"]
    shutil.copytree(finished, tmp_path / "odd")
    file = tmp_path / "odd" / "validation" / "step-000002" / "scores.json"
    written = json.loads(file.read_text())
    written["means"]["monitor/audio_loudness"] = "nan"
    file.write_text(json.dumps(written))
    assert "audio_loudness" in run_page.write(tmp_path / "odd").read_text()


def test_the_alarm_hears_what_no_scorer_measures() -> None:
    """Samples fall silent while the total rises: a media monitor of the validations says so."""
    means = [{"total": 0.5 + 0.02 * step, "audio": 0.5 + 0.02 * step, "monitor/audio_silence": 0.04 * step} for step in range(14)]
    (alarm,) = find_alarms([], means)["alarms"]
    assert alarm.startswith("validation: total") and "silence" in alarm


@pytest.mark.parametrize("hackable", [True, False])
def test_a_run_that_pays_with_a_sub_score_says_so(
    hackable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the agreement of sound and picture subtracted, the total rises by giving it up. No monitor of the loop fires: it does its work."""
    proper = train.make_score

    def subtracting(*arguments: Any) -> Any:
        score = proper(*arguments)

        def scored(latents: Any, prompts: Any) -> Any:
            scores = score(latents, prompts)
            return scores | {"total": scores["synthetic_text_audio"] - scores["synthetic_audio_video"]}

        return scored

    if hackable:
        monkeypatch.setattr(train, "make_score", subtracting)
    assert train.train(toy(40, optimizer={"learning_rate": 1e-2}), tmp_path, port=ToyActor()) == train.DONE
    summary = json.loads((tmp_path / "summary.json").read_text())
    totals = [json.loads(line)["logged_reward"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert trend(totals) > 3, "the total rises in both"
    alarms, said, text = summary["reward_hacking"]["alarms"], capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert ["while synthetic_audio_video" in alarm for alarm in alarms] == ([True] if hackable else [])
    assert ("REWARD HACKING? training: total" in said) is ("Reward hacking?" in text) is hackable


def test_an_alarm_stands_in_summary_and_page(finished: Path) -> None:
    record = run_page.read(finished)
    record["history"] = [record["history"][0] | one | {"step": step} for step, one in enumerate(history(20, total=0.01, synthetic_text_audio=-0.02))]
    text = run_page.page({**record, "reward_hacking": find_alarms(record["history"], [])})
    assert "Reward hacking?" in text and "while synthetic_text_audio" in text
    assert "Reward hacking?" not in run_page.page(run_page.read(finished))
