"""``loudfail demo``: the right run beside faulty ones that look healthy too, with what the gate and the monitors say of each. One picture.

Every run is the recipe ``h3_tiny`` with monitors that only warn. A faulty run has one thing broken around the trainer; for the gate, the fault of
that kind is injected from the catalogue and the checks that it names are run. Finished runs are kept in the output folder, so an interrupted demo
goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loudfail.trainer.config import Config, read_recipe

if TYPE_CHECKING:
    import torch

    from loudfail.harness.port import Port
    from loudfail.harness.progress import StatusLine
    from loudfail.trainer.loop import Run

RIGHT = "right"


@contextmanager
def nothing_broken(run: Run) -> Iterator[None]:
    yield


@contextmanager
def sigma_as_data_fraction(run: Run) -> Iterator[None]:
    """The trainer tells the model 1 − sigma; the rollout, another code base, tells it sigma."""
    from loudfail.harness import inject

    sampling = False

    def flagged(sample: Callable[..., Any]) -> Callable[..., Any]:
        def rollout(*arguments: Any) -> Any:
            nonlocal sampling
            sampling = True
            try:
                return sample(*arguments)
            finally:
                sampling = False

        return rollout

    def mirrored(predict: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, sigmas, conditions: predict(x, sigmas if sampling else {m: 1 - s for m, s in sigmas.items()}, conditions)

    with inject.replace(run.rollout, "rollout", flagged), inject.replace(run.port, "predict_velocity", mirrored):
        yield


@contextmanager
def adapter_binds_to_nothing(run: Run) -> Iterator[None]:
    """The hand-over reports success, and the rollout goes on with the adapter that it began with."""
    from loudfail.harness import inject
    from loudfail.harness.port import BindReport

    def empty(set_adapter: Callable[..., Any]) -> Callable[..., Any]:
        def report(state: Any, config: Any, version: int) -> BindReport:
            run.rollout.version = version  # type: ignore[attr-defined]
            return BindReport(version, len(state) // 2, len(state) // 2)

        return report

    with inject.replace(run.rollout, "set_adapter", empty):
        yield


def rewarded(change: Callable[[Run, Callable[..., Any], Any, Sequence[str]], Any]) -> Callable[[Run], Any]:
    """A fault of what the loop rewards; the scorer that monitors and validation use stays right."""

    @contextmanager
    def broken(run: Run) -> Iterator[None]:
        score = run.score
        run.score = lambda latents, prompts: change(run, score, latents, prompts)
        try:
            yield
        finally:
            run.score = score

    return broken


def _silence(run: Run, score: Callable[..., Any], latents: Any, prompts: Sequence[str]) -> Any:
    return score(latents | {"audio": latents["audio"] * 1e-3}, prompts)


def _reference_sound(run: Run, score: Callable[..., Any], latents: Any, prompts: Sequence[str]) -> Any:
    from loudfail.harness import synthetic

    shapes = {m: tuple(x.shape[1:]) for m, x in latents.items()}
    sounds = synthetic.sample(shapes, [synthetic.PROMPTS.index(prompt) for prompt in prompts], run.step)["audio"]
    return score(latents | {"audio": sounds.to(latents["audio"])}, prompts)


def _negated(run: Run, score: Callable[..., Any], latents: Any, prompts: Sequence[str]) -> Any:
    scores = score(latents, prompts)
    return scores | {"total": -scores["total"]}


@contextmanager
def prompts_drift(run: Run) -> Iterator[None]:
    """The rollout samples every other group under the prompt of the group before, as ids do that shift when text is tokenized again."""
    from loudfail.harness import inject

    count = run.config.algorithm.samples

    def drifted(sample: Callable[..., Any]) -> Callable[..., Any]:
        def rollout(noise: Any, calls: int, conditions: Sequence[Any]) -> Any:
            if len(conditions) != count * run.config.algorithm.prompts:  # validation
                return sample(noise, calls, conditions)
            return sample(noise, calls, [conditions[i - count if i // count % 2 else i] for i in range(len(conditions))])

        return rollout

    with inject.replace(run.rollout, "rollout", drifted):
        yield


@contextmanager
def audio_left_out_of_the_loss(run: Run) -> Iterator[None]:
    from loudfail.harness import inject
    from loudfail.trainer import nft

    def deaf(objective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda velocity, *rest: objective(velocity | {"audio": velocity["audio"].detach()}, *rest)

    with inject.replace(nft, "objective", deaf):
        yield


@dataclass(frozen=True)
class Variant:
    """One run of the demo.

    Attributes:
        name: of its files.
        title: what is broken, in the picture.
        broken: breaks the run while inside.
        fault: id of the fault of that kind in the catalogue, for the gate; empty for the right run.
    """

    name: str
    title: str
    broken: Callable[[Run], Any]
    fault: str = ""


VARIANTS = (
    Variant(RIGHT, "nothing is broken", nothing_broken),
    Variant("time", "sigma passed as data fraction", sigma_as_data_fraction, "conventions::sigma_is_passed_as_the_data_fraction"),
    Variant("reference", "scorer hears the prompt's\nreference sound", rewarded(_reference_sound), "rewards::the_total_is_the_videos_only"),
    Variant("silence", "scorer hears silence", rewarded(_silence), "rewards::the_scorers_get_silence"),
    Variant("sign", "reward has the other sign", rewarded(_negated), "rewards::the_total_has_the_other_sign"),
    Variant("prompts", "rollout has other prompt ids", prompts_drift, "prompts::the_rollout_tokenizes_the_decoded_prompt"),
    Variant("adapter", "adapter binds to nothing", adapter_binds_to_nothing, "sync::the_adapter_registers_and_binds_to_nothing"),
    Variant("loss", "audio left out of the loss", audio_left_out_of_the_loss, "objective::one_modality_is_left_out"),
)


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, or 4 for a usage error."""
    parser = argparse.ArgumentParser(
        prog="loudfail demo",
        description="The right run beside faulty ones that look healthy too, and what the gate and the monitors say. One picture.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="output folder (default %(default)s); a second call goes on"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default %(default)s)")
    parser.add_argument("--only", default=",".join(v.name for v in VARIANTS), metavar="NAME,...", help="some of: %(default)s")
    options = parser.parse_args(list(argv))
    names = options.only.split(",")
    if unknown := sorted(set(names) - {v.name for v in VARIANTS}):
        print(f"loudfail demo: error: no run {unknown[0]!r}; there are {', '.join(v.name for v in VARIANTS)}", file=sys.stderr)
        return 4
    if options.steps < 2:
        print(f"loudfail demo: error: --steps {options.steps}; at least 2 make a curve", file=sys.stderr)
        return 4
    chosen = [v for v in VARIANTS if v.name in names]
    records = collect(chosen, options.steps, options.out)
    for variant, record in zip(chosen, records, strict=True):
        print(describe(variant, record))
    try:
        draw(chosen, records, options.out / "demo.png")
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed; pip install 'loudfail[demo]' and call again (what was run is kept)", file=sys.stderr)
        return 0
    print(f"{options.out / 'demo.png'}")
    return 0


def collect(variants: Sequence[Variant], steps: int, out: Path) -> list[dict[str, Any]]:
    """Records of the runs, from the folder where they are there, else trained now and written there.

    Returns:
        For each: ``logged`` (the training samples' reward as the loop has it), ``true`` (of fixed samples of the trainer's policy, after the step),
        ``fired`` (the first step after which a monitor fired, and which; None), ``gate``.
    """
    from loudfail.harness.options import prepare_folder
    from loudfail.harness.progress import StatusLine
    from loudfail.harness.record import write_json

    prepare_folder(out, ())
    line, records, port = StatusLine(), [], None
    config = read_recipe("h3_tiny", [f"steps={steps}", "monitors.policy=warn"])
    for number, variant in enumerate(variants, 1):
        file = out / f"{variant.name}.json"
        if file.is_file() and (kept := json.loads(file.read_text())).get("steps") == steps:
            records.append(kept)
            continue
        if port is None:
            from loudfail.trainer.train import make_port

            line.show("loading", now=True)
            port = make_port(config)
        where = f"{number} of {len(variants)}, {variant.name}"
        record = {"steps": steps, **train(variant, config, port, line, where)}
        line.show(f"{where}: gate", now=True)
        record["gate"] = ask_gate(variant, port)
        write_json(file, record)
        records.append(record)
    line.clear()
    if port is not None:
        port.close()
    return records


def train(variant: Variant, config: Config, port: Port, line: StatusLine, where: str) -> dict[str, Any]:
    """One run under its fault."""
    from loudfail.trainer import loop
    from loudfail.trainer.train import set_up

    fired: list[tuple[int, str]] = []
    run: Run = set_up(config, port, warn=lambda text: fired.append((run.step + 1, text.removeprefix("MONITOR "))))
    logged, true, start = [], [], time.monotonic()
    with variant.broken(run):
        for step in range(config.steps):
            logged.append(float(loop.train_step(run)["logged_reward"]))
            true.append(float(run.score_again(*fixed_samples(run))["total"].mean()))
            line.show(f"{where}: step {step + 1} of {config.steps}, {(time.monotonic() - start) / (step + 1):.1f} s a step")
    return {"logged": logged, "true": true, "fired": list(fired[0]) if fired else None, "seconds": time.monotonic() - start}


def fixed_samples(run: Run) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Samples of the policy that the *trainer* has now, of each prompt from the same noise at every step."""
    import torch

    from loudfail.trainer import adapters, loop

    count = 8
    prompts = [prompt for prompt in run.prompts for _ in range(count)]
    conditions = [condition for index in range(len(run.prompts)) for condition in [loop.condition_of(run, index)] * count]
    noises = [loop.noise_of(run, f"demo/{index}", count) for index in range(len(run.prompts))]
    x = {m: torch.cat([noise[m] for noise in noises]) for m in noises[0]}
    grid = run.port.grid(run.config.validation.calls)
    # The class's own method: what is broken around the trainer must not reach the judge.
    predict = type(run.port).predict_velocity
    with torch.no_grad(), run.port.using(adapters.TRAINED):
        for call in range(len(grid["video"]) - 1):
            v = predict(run.port, x, {m: grid[m][call].repeat(len(prompts)) for m in x}, conditions)
            x = {m: x[m] + (grid[m][call + 1] - grid[m][call]) * v[m] for m in x}
    return x, prompts


def ask_gate(variant: Variant, port: Port) -> dict[str, Any]:
    """What the gate says under the fault of the variant's kind; of the right run, what it says of the clean port under all of those checks."""
    from loudfail.harness import killmatrix, registry, runner

    invariants = registry.invariants()
    if not variant.fault:
        named = {check for one in registry.faults() if one.id in {v.fault for v in VARIANTS} for check in one.catches}
        checks = [i for i in invariants if i.id in named]
        results = [runner.run(i, port, 2 if i.per_degree else None, shrink=False) for i in checks]
        return {"verdict": "holds" if all(r.status == "holds" for r in results) else "violated", "checks": len(results)}
    fault = next(one for one in registry.faults() if one.id == variant.fault)
    kill = killmatrix.kill(fault, port, invariants, (2,))
    caught = next((r for r in kill.results if r.status == "violated"), None)
    violation = (caught.violation if caught else None) or {}
    return {
        "verdict": "violated" if kill.outcome == "caught" else kill.outcome, "check": caught.id if caught else "", "got": violation.get("got"),
        "bound": violation.get("bound"), "message": kill.message,
    }  # fmt: skip


def describe(variant: Variant, record: dict[str, Any]) -> str:
    """One line for a terminal."""
    gate = record["gate"]
    said = f"gate: {gate['verdict']}" + (f" ({gate['check']})" if gate.get("check") else f" ({gate['checks']} checks)" if "checks" in gate else "")
    monitor = f"monitor after step {record['fired'][0]} ({record['fired'][1].partition(':')[0]})" if record["fired"] else "monitors silent"
    curves = " ".join(f"{name} {record[name][0]:.2f} → {record[name][-1]:.2f}" for name in ("logged", "true"))
    return f"{variant.name:<10} {curves}   {said} · {monitor}"


def draw(variants: Sequence[Variant], records: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a run: what was logged, what is true, and below it what the gate and the monitors say.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(variants))
    rows = -(-len(variants) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.1 * columns, 3.3 * rows), squeeze=False, facecolor="white")
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(variants) :]:
        axis.axis("off")
    for axis, variant, record in zip(flat, variants, records, strict=False):
        right, steps = variant.name == RIGHT, range(1, len(record["true"]) + 1)
        axis.plot(steps, record["logged"], color="#9aa0a6", linewidth=3.2, alpha=0.8, label="logged reward")
        axis.plot(steps, record["true"], color="#188038" if right else "#d93025", linewidth=1.8, label="true reward")
        # A negated reward lives elsewhere: its curve keeps its shape on an axis of the same span.
        low = -1.0 if min(record["logged"]) < 0 else 0.0
        axis.set_ylim(low, 1.05)
        axis.set_title(variant.title, fontsize=10.5, fontweight="bold", color="#188038" if right else "#202124")
        gate = record["gate"]
        says = f"gate: {gate['checks']} checks hold" if right and gate["verdict"] == "holds" else f"gate: {gate['verdict'].upper()}"
        says += "\n" + textwrap.fill(gate.get("check", "").partition("::")[2].replace("_", " "), 40)
        says += f"\nmonitor stops it after step {record['fired'][0]}" if record["fired"] else "\nmonitors silent"
        axis.set_xlabel(says, fontsize=8.5, color="#188038" if right else "#a50e0e")
        axis.tick_params(labelsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles, _ = flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        ["logged reward, by training step", "true reward (green: the right run, red: a faulty one)"],
        loc="lower center",
        ncols=2,
        frameon=False,
        fontsize=9.5,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
