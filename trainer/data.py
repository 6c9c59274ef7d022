"""The dataset: prompts, and the pictures that are given with them, from a text file, JSONL or parquet. No row is dropped: a bad one stops the run.

A text file has one prompt a line. A JSONL line is ``{"prompt": "...", "image": "frames/1.png"}``, a parquet row has the same columns; ``image`` is
short for ``first``, and a picture may also be named as the port names it (``first``, ``last``). Paths are relative to the file; parquet may hold the
encoded picture itself, as bytes or as ``{"bytes": ...}``. Other keys are left alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loudfail.trainer.config import ConfigProblem

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

#: Pictures that convert to RGB without a choice. Transparency and 16 bits need one, which is the owner's.
MODES = ("RGB", "L", "P", "1", "CMYK", "YCbCr")


@dataclass(frozen=True)
class Row:
    """One row of the dataset.

    Attributes:
        prompt: as it stands in the file.
        pictures: name of what is given → the picture's path, or its encoded bytes.
    """

    prompt: str
    pictures: Mapping[str, Path | bytes] = field(default_factory=dict)


def read_rows(source: str, given: Sequence[str] = ()) -> list[Row]:
    """All rows of a dataset, in order.

    Args:
        source: ``synthetic`` (the synthetic world's prompts), or a ``.txt``, ``.jsonl`` or ``.parquet`` file; any other ending is read as text.
        given: names of the pictures that every row must have; the synthetic world has none, there the port draws them.

    Raises:
        ConfigProblem: the file cannot be read, has no rows, or has bad ones: all of them are named, each with its line and the reason.
    """
    if source == "synthetic":
        from loudfail.harness import synthetic

        return [Row(prompt) for prompt in synthetic.PROMPTS]
    path = Path(source)
    kind = path.suffix.lower()
    if given and kind not in (".jsonl", ".parquet"):
        raise ConfigProblem(f"data.prompts {path}: data.given wants a picture with every prompt, and text has none; give a .jsonl or .parquet file")
    rows, problems, count = [], [], 0
    try:
        for where, value in _parquet(path) if kind == ".parquet" else _lines(path):
            count += 1
            try:
                rows.append(_row(value, path.parent, given, json_lines=kind == ".jsonl"))
            except ValueError as error:
                problems.append(f"{where}: {error}")
    except OSError as error:
        raise ConfigProblem(f"data.prompts {path}: {error}") from None
    if problems:
        raise ConfigProblem(f"data.prompts {path}: {len(problems)} of {count} rows cannot be used; mend or remove them\n  " + "\n  ".join(problems))
    if not rows:
        raise ConfigProblem(f"data.prompts {path}: no prompts")
    return rows


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Lines, by newlines alone: a JSON string may hold other characters that `str.splitlines` breaks at."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
        yield f"line {number}", line.removesuffix(b"\r")


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigProblem(f"data.prompts {path}: parquet needs pyarrow, which does not import ({error}): pip install 'loudfail[data]'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if "prompt" not in file.schema_arrow.names:
            raise ConfigProblem(f"data.prompts {path}: no column prompt; it has {', '.join(file.schema_arrow.names)}")
        number = 0
        for batch in file.iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield f"row {number}", value
    except pyarrow.ArrowInvalid as error:
        raise ConfigProblem(f"data.prompts {path}: {error}") from None


def _row(value: bytes | Mapping[str, Any], folder: Path, given: Sequence[str], *, json_lines: bool) -> Row:
    """One row.

    Raises:
        ValueError: why it cannot be used.
    """
    if isinstance(value, bytes):
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
        if not text.strip():
            raise ValueError("empty")
        if not json_lines:
            return Row(text)
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise ValueError(f"{type(value).__name__}; want an object with the key prompt")
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("no prompt" if prompt is None or prompt == "" or isinstance(prompt, str) else f"prompt is {prompt!r}; want text")
    pictures = {}
    for name in given:
        keys = [key for key in (name, *(["image"] if name == "first" else [])) if value.get(key) is not None]
        if len(keys) != 1:
            raise ValueError("both first and image; want one" if keys else f"no picture {name}" + (" (nor image)" if name == "first" else ""))
        pictures[name] = _source(value[keys[0]], keys[0], folder)
        open_picture(pictures[name])
    return Row(prompt, pictures)


def _source(value: Any, key: str, folder: Path) -> Path | bytes:
    if isinstance(value, Mapping):  # as in parquet files of picture datasets
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is {value!r}; want a path")
    return folder / value


def open_picture(source: Path | bytes) -> Image.Image:
    """A picture in RGB, turned upright as its camera recorded it.

    Raises:
        ValueError: it is not there, is no picture, is cut off, or has transparency or more than 8 bits a channel.
        ConfigProblem: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigProblem(f"data.given: pictures need Pillow, which does not import ({error}): pip install pillow") from error
    name = "the picture" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            picture = ImageOps.exif_transpose(file)
    except FileNotFoundError:
        raise ValueError(f"no file {name}") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow says so of broken PNG chunks
        raise ValueError(f"{name} cannot be read as a picture: {error}") from None
    if picture.mode not in MODES or "transparency" in picture.info:
        raise ValueError(f"{name} has mode {picture.mode}{' with transparency' if 'transparency' in picture.info else ''}; save it as 8-bit RGB")
    return picture.convert("RGB")


def pixels(row: Row, size: tuple[int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """The row's pictures by name, uint8 ``(H, W, 3)``: scaled to cover ``size`` (height, width) and cut around their middle."""
    return {name: _fitted(source, size) for name, source in row.pictures.items()}


@lru_cache(maxsize=256)
def _fitted(source: Path | bytes, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    import numpy as np
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(open_picture(source), (size[1], size[0]), Image.Resampling.BICUBIC))
