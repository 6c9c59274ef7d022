"""What a run leaves for people while it goes on: TensorBoard files, and at each validation the media of a few fixed samples with their sub-scores.

A folder ``validation/step-NNNNNN`` holds for each shown sample an mp4 with sound, a picture (frames, waveform, spectrogram) and a JSON with its
prompt, sub-scores and media monitors, and ``scores.json`` with the means.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loudfail.harness.port import Port, offers
from loudfail.harness.record import write_json
from loudfail.harness.violation import Unavailable, Uncovered
from loudfail.trainer.config import ConfigProblem

if TYPE_CHECKING:
    import torch

    from loudfail.trainer.rewards.monitors import Alarm

#: Prefix of the media monitors among the means of a validation.
MONITOR = "monitor/"
SCORES = "scores.json"


class Board:
    """TensorBoard files of a run.

    Args:
        folder: where the event files go.
        wanted: ``on`` refuses where TensorBoard is not installed; ``auto`` says so and does without; ``off``.
        step: steps that are finished; what an earlier start wrote after them is no longer shown.
        say: told what is missing.

    Raises:
        ConfigProblem: ``on``, and TensorBoard is not installed.
    """

    def __init__(self, folder: Path, wanted: str, step: int, say: Callable[[str], None]) -> None:
        self._writer: Any = None
        if wanted == "off":
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            if wanted == "on":
                raise ConfigProblem(f"logs.tensorboard = 'on': {error}; pip install 'loudfail[logs]'") from None
            say("no TensorBoard files: pip install 'loudfail[logs]' for them")
            return
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

    def step(self, record: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """Write the record of a step, see `loop.train_step`, and the seconds of its parts."""
        values = {"reward/logged": record["logged_reward"], "reward/true": record["true_reward"]}
        values |= {name: value for name, value in record.items() if "/" in name or name in ("gradient_norm", "advantage_spread", "seconds")}
        values |= {f"monitors/{name}": value for name, value in record["monitors"].items()}
        values |= {f"monitors_of_bound/{name}": value for name, value in record["shares"].items()}
        self._write(values | {f"seconds_of/{part}": value for part, value in seconds.items()}, record["step"] + 1)

    def validation(self, step: int, means: Mapping[str, float]) -> None:
        """Write the means of a validation after so many steps."""
        self._write({f"validation/{name}": value for name, value in means.items()}, step)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # a killed run loses nothing

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Exhibition:
    """Writes the media of validation samples.

    Args:
        folder: the run's ``validation`` folder; steps after ``step`` in it belong to a future that was given up, and are removed.
        port: decodes latents.
        count: how many prompts are shown, the first sample of each; 0 for none.
        step: steps that are finished.
        say: told once why nothing can be shown.
    """

    def __init__(self, folder: Path, port: Port, count: int, step: int, say: Callable[[str], None]) -> None:
        self.folder, self.port, self.count, self.say = folder, port, count, say
        if count and not offers(port, "media"):
            self._give_up(f"port {port.name!r} does not decode media")
        for path in sorted(folder.glob("step-*")):
            if path.name[5:].isdigit() and int(path.name[5:]) > step:
                shutil.rmtree(path, ignore_errors=True)  # every process of the run does it

    def _give_up(self, why: str) -> None:
        self.count = 0
        self.say(f"validation writes no media: {why}")

    def place(self, step: int) -> Path:
        """The folder of a validation, made if it is not there."""
        path = self.folder / f"step-{step:06d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def show(
        self, step: int, rows: Mapping[int, int], prompts: Sequence[str], latents: Mapping[str, torch.Tensor], scores: Mapping[str, torch.Tensor]
    ) -> dict[int, dict[str, float]]:
        """Write what is shown of this process's samples.

        Args:
            step: steps that are finished.
            rows: number of a prompt in the dataset → its row in the batch.
            prompts: of the rows.
            latents: clean latents, ``(batch, …)`` of each modality.
            scores: sub-scores ``(batch,)``.

        Returns:
            Number of a prompt → its sample's media monitors.
        """
        from loudfail.harness.media_files import draw_media, write_mp4
        from loudfail.trainer.rewards.monitors import SIGNAL

        shown = {index: row for index, row in rows.items() if index < self.count}
        if not shown:
            return {}
        try:
            media = self.port.decode({m: x[list(shown.values())] for m, x in latents.items()})
            seen: dict[int, dict[str, float]] = {}
            for (index, row), one in zip(shown.items(), media, strict=True):
                name = self.place(step) / f"prompt-{index:03d}"
                write_mp4(one, name.with_suffix(".mp4"))
                draw_media(one, title=prompts[row]).save(name.with_suffix(".png"))
                seen[index] = {monitor.name: float(monitor.measure(one)) for monitor in SIGNAL}
                own = {score: float(value.view(-1)[row]) for score, value in scores.items()}
                write_json(name.with_suffix(".json"), {"step": step, "prompt": prompts[row], "scores": own, "monitors": seen[index]})
            return seen
        except (Unavailable, Uncovered, ImportError) as error:
            self._give_up(str(error))
        except ValueError as error:  # samples that cannot be shown, such as those of a policy that has collapsed, are no reason to lose a run
            self.say(f"validation media of step {step}: {error}")
        return {}


def find_alarms(history: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The reward-hacking alarm over a run: the total rises while a sub-score, or a media monitor of the validations, gets worse.

    Args:
        history: records of steps, see `loop.train_step`.
        validation: means of each validation.

    Returns:
        ``alarms``, texts; ``steps`` and ``validations``, how many could be looked at; 12 of a kind are needed, see `find_reward_hacking`.
    """
    from loudfail.trainer.rewards.monitors import find_reward_hacking

    training = [{name[6:]: value for name, value in record.items() if name.startswith("score/")} for record in history]
    watched = [{name.removeprefix(MONITOR): value for name, value in means.items()} for means in validation]
    found: list[tuple[str, Alarm]] = []
    for where, records in (("training", training), ("validation", watched)):
        if len(records) >= 12:
            names = [name for name in records[0] if all(math.isfinite(float(record.get(name, math.nan))) for record in records)]
            found += [(where, alarm) for alarm in find_reward_hacking({name: [record[name] for record in records] for name in names})]
    return {"alarms": [f"{where}: {alarm}" for where, alarm in found], "steps": len(history), "validations": len(validation)}
