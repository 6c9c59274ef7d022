"""Datasets: every row arrives, or all bad ones are named; pictures reach the model through the port's own condition path."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toyactor import ToyActor

from loudfail.harness.case import Case
from loudfail.harness.ports.h3 import H3
from loudfail.trainer import loop, train
from loudfail.trainer.config import Config, ConfigProblem, read_recipe
from loudfail.trainer.data import Row, pixels, read_rows

Image = pytest.importorskip("PIL.Image", reason="pictures are an optional extra")


def picture(path: Path, size: tuple[int, int] = (70, 50), mode: str = "RGB") -> bytes:
    """A left half in red, a right half in blue."""
    image = Image.new("RGB", size, "blue")
    image.paste("red", (0, 0, size[0] // 2, size[1]))
    image.convert(mode).save(path)
    return path.read_bytes()


def refusal(source: Path, given: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigProblem) as problem:
        read_rows(str(source), given)
    return str(problem.value)


def test_text_keeps_every_line_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffrain\r\n  two dogs bark\u2028twice\nrain".encode())
    assert [row.prompt for row in read_rows(str(file))] == ["rain", "  two dogs bark\u2028twice", "rain"]
    file.write_bytes(b"rain\n\nwind\n \nm\xfcll\n")
    text = refusal(file)
    assert "3 of 5 rows" in text and "line 2: empty" in text and "line 4: empty" in text and "line 5: byte 2 is not UTF-8" in text
    file.write_bytes(b"")
    assert "no prompts" in refusal(file)
    assert "No such file" in refusal(tmp_path / "none.txt")
    assert "text has none" in refusal(file, ("first",))


def test_every_bad_row_of_jsonl_is_named_with_its_reason(tmp_path: Path) -> None:
    picture(tmp_path / "good.png")
    picture(tmp_path / "alpha.png", mode="RGBA")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no picture")
    bad: list[tuple[Any, str]] = [
        ('{"prompt": "rain"', "not JSON"),
        ("[1]", "list; want an object"),
        ("", "empty"),
        ({"image": "good.png"}, "no prompt"),
        ({"prompt": "  ", "image": "good.png"}, "no prompt"),
        ({"prompt": 3, "image": "good.png"}, "prompt is 3; want text"),
        ({"prompt": "rain"}, "no picture first (nor image)"),
        ({"prompt": "rain", "image": "good.png", "first": "good.png"}, "both first and image"),
        ({"prompt": "rain", "image": 7}, "image is 7; want a path"),
        ({"prompt": "rain", "image": "none.png"}, "no file"),
        ({"prompt": "rain", "image": "text.png"}, "cannot be read as a picture"),
        ({"prompt": "rain", "image": "cut.png"}, "cannot be read as a picture"),
        ({"prompt": "rain", "image": "alpha.png"}, "mode RGBA"),
    ]
    lines = [json.dumps({"prompt": "rain", "image": "good.png"})]
    lines += [value if isinstance(value, str) else json.dumps(value) for value, _ in bad]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines) + "\n")
    text = refusal(file, ("first",))
    assert f"{len(bad)} of {len(bad) + 1} rows" in text
    assert "line 1:" not in text
    reasons = text.splitlines()[1:]
    assert len(reasons) == len(bad)
    for number, ((_, reason), line) in enumerate(zip(bad, reasons, strict=True), 2):
        assert line.strip().startswith(f"line {number}: ") and reason in line, line


def test_pictures_are_found_beside_the_file_and_cover_the_canvas(tmp_path: Path) -> None:
    picture(tmp_path / "wide.png", (200, 50))
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "a\u2028b", "first": "wide.png", "id": 7}, ensure_ascii=False) + "\n")
    (row,) = read_rows(str(file), ("first",))
    assert row.prompt == "a\u2028b"
    got = pixels(row, (64, 96))["first"]
    assert got.shape == (64, 96, 3) and got.dtype == "uint8"
    assert got[:, :40].reshape(-1, 3).mean(0).round().tolist() == [255, 0, 0]
    assert got[:, 56:].reshape(-1, 3).mean(0).round().tolist() == [0, 0, 255]


def test_parquet_holds_paths_or_pictures(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet is an optional extra")
    import pyarrow

    raw, file = picture(tmp_path / "one.png"), tmp_path / "data.parquet"
    parquet.write_table(
        pyarrow.table({"prompt": ["rain", "wind"], "image": [{"bytes": raw, "path": None}, {"bytes": None, "path": "one.png"}]}), file
    )
    rows = read_rows(str(file), ("first",))
    assert [row.prompt for row in rows] == ["rain", "wind"]
    assert (pixels(rows[0], (32, 32))["first"] == pixels(rows[1], (32, 32))["first"]).all()
    parquet.write_table(pyarrow.table({"prompt": ["rain", None, ""]}), file)
    text = refusal(file)
    assert "2 of 3 rows" in text and "row 2: no prompt" in text and "row 3: no prompt" in text
    parquet.write_table(pyarrow.table({"text": ["rain"]}), file)
    assert "no column prompt; it has text" in refusal(file)
    file.write_bytes(b"nothing")
    assert "data.parquet" in refusal(file)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"")
    assert "pip install 'loudfail[data]'" in refusal(tmp_path / "data.parquet")


def short(*overrides: str) -> Config:
    values = ("steps=2", "threads=0", "algorithm.prompts=2", "algorithm.samples=4", "rollout.calls=4", "validation.samples=1", 'data.given=["first"]')
    return read_recipe("h3_tiny", [*values, *overrides])


def test_a_run_trains_from_the_users_first_frames(tmp_path: Path) -> None:
    """The model is given what the port's own encoder makes of the picture, not a drawn one; no monitor objects."""
    lines = []
    for number, prompt in enumerate(("rain", "a bell rings")):
        picture(tmp_path / f"{number}.png", (64 + 30 * number, 64))
        lines.append(json.dumps({"prompt": prompt, "image": f"{number}.png"}))
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(lines))
    port = H3()
    config = short(f"data.prompts={file}")
    assert train.train(config, tmp_path / "out", port=port) == train.DONE
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {name: count["fired"] for name, count in summary["monitors"].items() if count["fired"]} == {}

    run = train.set_up(config, H3())
    case = Case(extent=loop.extent_of(run))
    for index in range(2):
        condition, drawn = loop.condition_of(run, index), run.port.conditions(Case(index, loop.extent_of(run), (run.prompts[index],), ("first",)))[0]
        want = run.port.encode_frame(pixels(Row("", {"first": tmp_path / f"{index}.png"}), run.port.canvas(case))["first"])
        assert torch.equal(condition.given["first"], want)
        assert not torch.equal(condition.given["first"], drawn.given["first"])
        assert condition.prompt_ids == drawn.prompt_ids


def test_the_synthetic_world_trains_with_drawn_first_frames(tmp_path: Path) -> None:
    assert train.train(short(), tmp_path, port=H3()) == train.DONE


@pytest.mark.parametrize("make", [ToyActor])
def test_a_port_on_which_nothing_can_be_given_says_so(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigProblem, match=r"data.given is \['first'\]; the port has \[\]"):
        train.set_up(short(), make())


def test_what_is_read_as_bytes_is_a_picture_too() -> None:
    buffer = io.BytesIO()
    Image.new("L", (40, 40), 9).save(buffer, "PNG")
    assert (pixels(Row("rain", {"first": buffer.getvalue()}), (32, 32))["first"] == 9).all()
