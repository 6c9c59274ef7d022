"""Media: what a port decodes latents to and what rewards score. Plain arrays with their rates, refused at once when they do not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Video:
    """Frames and their rate.

    Attributes:
        frames: uint8 RGB ``(T, H, W, 3)``, 0 to 255; kept as a read-only view.
        fps: frames a second, positive.

    Raises:
        ValueError: another type, dtype, layout or rate.
    """

    frames: np.ndarray[Any, Any]
    fps: float

    def __post_init__(self) -> None:
        _check_array(self.frames, "frames", "uint8", "(T, H, W, 3)")
        shape = self.frames.shape
        if len(shape) != 4 or shape[-1] != 3:
            hint = ", channels last" if 3 in shape[:-1] else ""
            raise ValueError(f"frames are {shape}; want (T, H, W, 3){hint}")
        if 0 in shape:
            raise ValueError(f"frames are {shape}; want at least one frame of at least one pixel")
        if isinstance(self.fps, bool) or not isinstance(self.fps, int | float) or not (math.isfinite(self.fps) and self.fps > 0):
            raise ValueError(f"fps is {self.fps!r}; want a positive number")
        object.__setattr__(self, "frames", _read_only(self.frames))

    @property
    def seconds(self) -> float:
        return self.frames.shape[0] / self.fps


@dataclass(frozen=True, eq=False)
class Audio:
    """A stereo waveform and its rate.

    Attributes:
        waveform: float32 ``(2, N)``, finite, in [-1, 1]; kept as a read-only view.
        sample_rate: samples a second, a positive integer.

    Raises:
        ValueError: another type, dtype, layout, range or rate.
    """

    waveform: np.ndarray[Any, Any]
    sample_rate: int

    def __post_init__(self) -> None:
        import numpy as np

        _check_array(self.waveform, "waveform", "float32", "(2, N)")
        shape = self.waveform.shape
        if len(shape) != 2 or shape[0] != 2:
            hint = "; transpose it" if len(shape) == 2 and shape[1] == 2 else ""
            raise ValueError(f"waveform is {shape}; want (2, N){hint}")
        if shape[1] == 0:
            raise ValueError("waveform has no samples")
        if not np.isfinite(self.waveform).all():
            raise ValueError("waveform has NaN or infinite samples")
        peak = float(np.abs(self.waveform).max())
        if peak > 1.0:
            raise ValueError(f"waveform peaks at {peak:.4g}; want samples in [-1, 1]")
        if isinstance(self.sample_rate, bool) or not isinstance(self.sample_rate, int) or self.sample_rate <= 0:
            raise ValueError(f"sample_rate is {self.sample_rate!r}; want a positive integer")
        object.__setattr__(self, "waveform", _read_only(self.waveform))

    @property
    def seconds(self) -> float:
        return self.waveform.shape[1] / self.sample_rate


@dataclass(frozen=True, eq=False)
class Media:
    """Video and audio of one sample.

    Raises:
        ValueError: a part is not a `Video` or an `Audio`.
    """

    video: Video
    audio: Audio

    def __post_init__(self) -> None:
        if not isinstance(self.video, Video):
            raise ValueError(f"video is {type(self.video).__name__}; want Video(frames, fps)")
        if not isinstance(self.audio, Audio):
            raise ValueError(f"audio is {type(self.audio).__name__}; want Audio(waveform, sample_rate)")


def _check_array(value: object, name: str, dtype: str, layout: str) -> None:
    import numpy as np

    if not isinstance(value, np.ndarray):
        raise ValueError(f"{name}: {type(value).__name__}; want a numpy array {dtype} {layout}")
    if value.dtype != np.dtype(dtype):
        raise ValueError(f"{name}: {value.dtype}; want {dtype}")


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = array.view()
    view.flags.writeable = False
    return view
