"""``loudfail train RECIPE``: set a run up, gate it, run it, and leave a summary behind.

Files in the output folder: ``summary.json``, ``metrics.jsonl`` (a line a step), ``checkpoints/step-NNNNNN/``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loudfail.harness.environment import world_size
from loudfail.trainer.config import RECIPES, Config, ConfigProblem, differing, read_recipe

if TYPE_CHECKING:
    from loudfail.harness.port import Port
    from loudfail.trainer.checkpoint import Checkpoint
    from loudfail.trainer.loop import Run
    from loudfail.trainer.monitor import Score
    from loudfail.trainer.parallel import Ranks
    from loudfail.trainer.sampler import Sampler

DONE, STOPPED, INTERRUPTED, USAGE = 0, 1, 2, 4
#: Configuration keys that a resumed run may change: they decide no number of a step.
MAY_CHANGE = (
    "steps", "checkpoints.every", "checkpoints.keep", "monitors.policy", "parallel.shard", "parallel.timeout", "model.gradient_checkpointing",
    "validation.media", "logs.tensorboard",
)  # fmt: skip


class Refused(Exception):
    """The run does not start; the message says why and what would do."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
    parser = _Parser(
        prog="loudfail train",
        description="The reference trainer: DiffusionNFT on joint audio and video, with monitors at every hand-over.",
        epilog="Exit codes: 0 done, 1 a monitor stopped the run, 2 interrupted (a checkpoint was saved), 4 usage or refused.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"{recipes}, or the path of a .toml file; with --page, the folder of a run")
    parser.add_argument(
        "--page", action="store_true", help="train nothing: write report.html again from the files of a run, also of one that was killed"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default runs/RECIPE)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key, such as optimizer.learning_rate=1e-3"
    )
    parser.add_argument("--resume", nargs="?", const="", metavar="CHECKPOINT", help="go on from a checkpoint; the last one of DIR if none is named")
    parser.add_argument("--certificate", type=Path, metavar="CERT", help="the gate.json that vouches for a run on more than one process")
    parser.add_argument(
        "--ungated", action="store_true", help="run on more than one process without a certificate; recorded in every checkpoint and summary"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a command; the exit code."""
    arguments = build_parser().parse_args(list(argv))
    out = arguments.out or Path("runs") / Path(arguments.recipe).stem
    try:
        if arguments.page:
            return _page(Path(arguments.recipe) if Path(arguments.recipe).is_dir() else out)
        config = read_recipe(arguments.recipe, arguments.overrides)
        return train(config, out, resume=arguments.resume, certificate=arguments.certificate, ungated=arguments.ungated)
    except (ConfigProblem, Refused) as error:
        print(f"loudfail train: error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:  # a full disk: every file is written under a temporary name, so what was there before is whole
        print(f"loudfail train: error: {error}; {_checkpoint_advice(out)}", file=sys.stderr)
        return STOPPED
    except RuntimeError as error:
        from loudfail.trainer.parallel import LostProcess

        if not isinstance(error, LostProcess):
            raise
        print(f"loudfail train: error: {error}; {_checkpoint_advice(out)}", file=sys.stderr, flush=True)
        os._exit(STOPPED)  # threads of a collective that will never end must not keep this process


def _page(out: Path) -> int:
    from loudfail.trainer import run_page

    try:
        print(f"written: {run_page.write(out)}")
    except FileNotFoundError as error:
        raise Refused(f"{out} is no folder of a run: no {Path(error.filename).name}") from None
    return DONE


def train(
    config: Config, out: Path, *, resume: str | None = None, certificate: Path | None = None, ungated: bool = False, port: Port | None = None
) -> int:
    """Train by a configuration.

    Args:
        config: the recipe.
        out: output folder; made if it is not there.
        resume: None to start afresh, ``""`` for the last checkpoint of ``out``, or the path of one.
        certificate: vouches for a run on more than one process.
        ungated: run on more than one process without.
        port: the port to train, instead of the one that the recipe names.

    Returns:
        0 done, 1 a monitor stopped the run, 2 interrupted after a checkpoint was saved.

    Raises:
        Refused, ConfigProblem, UsageProblem: the run cannot start; nothing was trained.
        OSError: a file could not be written; checkpoints that were there are whole.
        LostProcess: another process of the run is gone; likewise.
    """
    gated = check_gate(config, certificate, ungated, port)  # first, and before anything heavy is imported
    from loudfail.harness.environment import PeakMemory
    from loudfail.harness.options import prepare_folder
    from loudfail.harness.progress import StatusLine
    from loudfail.harness.record import plain, write_json
    from loudfail.harness.violation import Unavailable, Uncovered
    from loudfail.trainer import checkpoint, loop, run_page
    from loudfail.trainer.logs import SCORES, Board, Exhibition
    from loudfail.trainer.monitor import MonitorFired
    from loudfail.trainer.parallel import noticing_losses

    start, memory, line = time.monotonic(), PeakMemory(), StatusLine()
    saved = find_checkpoint(out, resume, config)
    if resume is None and checkpoint.listed(out / "checkpoints"):
        raise Refused(f"{out} holds checkpoints of an earlier run; go on with --resume, or choose another --out")
    prepare_folder(out, ())
    line.show(f"loading {config.model.port}", now=True)
    try:
        with noticing_losses():
            run = set_up(config, port, warn=line.print)
    except (Uncovered, Unavailable, ImportError) as error:
        raise Refused(str(error)) from error
    first = run.ranks.rank == 0
    status, message, history = "done", "", []
    board: Board | None = None
    try:
        step, say = saved.step if saved else 0, line.print if first else lambda _: None
        board = Board(out / "tensorboard", config.logs.tensorboard if first else "off", step, say)
        exhibition = Exhibition(out / "validation", run.port, config.validation.media, step, say)
        run.exhibit = exhibition.show
        if first:
            (out / "summary.json").unlink(missing_ok=True)  # of the start before this one; what it says is no longer so
            write_json(out / "run.json", {"config": config.plain(), "gated": gated, "processes": run.ranks.size})
        metrics = out / "metrics.jsonl"

        def validated() -> dict[str, float]:
            means = loop.validate(run)
            if first:
                write_json(exhibition.place(run.step) / SCORES, {"step": run.step, "means": means})
                board.validation(run.step, means)
            return means

        with noticing_losses(), interruption() as interrupted:
            if saved is not None:
                validation = restore(run, saved)
                history = _trim(metrics, saved.step) if first else []
                if first:
                    line.print(f"resumed after step {saved.step}")
            else:
                if first:
                    metrics.write_text("")
                validation = [validated()]
            began, at = time.monotonic(), run.step
            while run.step < config.steps:
                spent = dict(run.timing)
                try:
                    record = loop.train_step(run)
                except MonitorFired as fired:
                    status, message = "stopped", f"step {run.step}: {fired}"
                    break
                if first:
                    history.append(record)
                    with metrics.open("a") as file:
                        file.write(json.dumps(plain(record), allow_nan=False) + "\n")
                    board.step(record, {part: seconds - spent.get(part, 0.0) for part, seconds in run.timing.items()})
                    line.show(progress(record, config.steps, (time.monotonic() - began) / (run.step - at)))
                stop = run.ranks.any(bool(interrupted), run.port.device)
                last = stop or run.step == config.steps
                if (last or (config.validation.every and run.step % config.validation.every == 0)) and not stop:
                    validation.append(validated())
                if last or (config.checkpoints.every and run.step % config.checkpoints.every == 0):
                    save(run, out, gated, validation)
                if stop:
                    status, message = "interrupted", f"saved after step {run.step}; go on with --resume"
                    break
        line.clear()
        if first:
            summary = summarize(run, history, validation) | {"status": status, "message": message, "gated": gated}
            summary |= {"seconds": time.monotonic() - start, "peak_rss_bytes": memory.stop()}
            write_json(out / "summary.json", summary)
            run_page.write(out)
            _show(line.print, summary, out)
    finally:
        if board is not None:
            board.close()
        run.port.close()
    run.ranks.close()  # not after an error: it could wait for a process that is gone
    return {"done": DONE, "stopped": STOPPED, "interrupted": INTERRUPTED}[status]


def check_gate(config: Config, path: Path | None, ungated: bool, port: Port | None = None) -> str:
    """Whether this run may start: ``certified``, ``ungated``, or ``not required`` on one process without a certificate.

    Raises:
        Refused: more than one process and no certificate that fits, or one that was given does not fit.
    """
    size, tp = world_size(), config.rollout.tp if config.rollout.engine == "vllm_omni" else 1
    model = config.model
    which = f"--weights {model.weights}" if model.weights else f"--scale {model.scale}"
    command = f"loudfail gate {model.port} {which} --dtype {model.dtype} --tp {tp} --out out"
    if path is None:
        if size == 1:
            return "not required"
        if ungated:
            print(f"UNGATED: {size} processes train without a certificate; nothing has shown that this port trains what it samples", file=sys.stderr)
            return "ungated"
        raise Refused(f"a run of {size} processes needs a certificate: make one with `{command}` and give --certificate out/gate.json (or --ungated)")
    from loudfail.harness import certificate

    own = port is None
    port = port or make_port(config)
    try:
        degrees = certificate.read(path)["fingerprint"].get("degrees") or []
        if tp not in degrees:
            raise Refused(f"{path} is for tensor-parallel degrees {degrees}, this run has {tp}; make another with `{command}`")
        certificate.require(path, certificate.fingerprint(port, degrees))
    except certificate.Refused as error:
        if ungated:
            print(f"UNGATED: {error}", file=sys.stderr)
            return "ungated"
        advice = "" if not model.rank or "adapter" not in str(error) else " and leave model.rank and model.alpha out: it vouches for the port's own"
        raise Refused(f"{error}\nmake another with `{command}`{advice}") from None
    finally:
        if own:
            port.close()
    return "certified"


def make_port(config: Config) -> Port:
    """The port that the recipe names, with its adapter configuration; nothing heavy is built yet.

    Raises:
        Refused: no such port, or it does not take these arguments.
    """
    import torch

    from loudfail.harness import registry
    from loudfail.harness.port import AdapterConfig

    model = config.model
    device = model.device if model.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        port = registry.find_port(model.port)(scale=model.scale, weights=model.weights or None, device=device, dtype=model.dtype)
    except (registry.UnknownId, ImportError, ValueError) as error:
        raise Refused(str(error)) from error
    if model.rank:
        port.adapter = AdapterConfig(model.rank, model.alpha, port.adapter.targets)
    return port


def set_up(config: Config, port: Port | None = None, warn: Any = print) -> Run:
    """Everything of a run before its first step: port, adapters, rollout with the first adapter, scorers, optimizer.

    Raises:
        Refused, ConfigProblem: something that the recipe names is not there.
    """
    import torch

    from loudfail.trainer import adapters, loop, monitor
    from loudfail.trainer.data import read_rows
    from loudfail.trainer.parallel import Ranks
    from loudfail.trainer.sampler import LocalRollout

    if config.threads:
        torch.set_num_threads(config.threads)
    port = port or make_port(config)
    ranks = Ranks.start(port.device, config.parallel.timeout)
    if config.algorithm.prompts % ranks.size:
        raise ConfigProblem(f"algorithm.prompts is {config.algorithm.prompts}; it must be a multiple of the {ranks.size} processes")
    if config.algorithm.spread == "global" and ranks.size > 1:
        raise ConfigProblem("algorithm.spread = 'global' needs the rewards of all processes; use 'group', or one process")
    if unknown := set(config.algorithm.modalities) - set(port.modalities):
        raise ConfigProblem(f"algorithm.modalities names {sorted(unknown)}; the port has {', '.join(port.modalities)}")
    if unknown := set(config.data.extent) - set(port.extents):
        raise ConfigProblem(f"data.extent names {sorted(unknown)}; the port has {', '.join(port.extents)}")
    if config.data.given not in port.givens:
        raise ConfigProblem(f"data.given is {list(config.data.given)}; the port has {', '.join(str(list(one)) for one in port.givens)}")
    rows = read_rows(config.data.prompts, config.data.given)
    adapters.prepare(port, config.seed, config.model.rank, config.model.alpha)
    rollout = make_rollout(config, port, ranks)
    ranks = prepare_actor(config, port, ranks)
    if isinstance(rollout, LocalRollout):
        rollout.ranks = ranks
    parameters = adapters.masters(port.trainable())
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        fused=port.device == "cuda",
    )
    run = loop.Run(
        config, port, rollout, make_score(config, port), make_score(config, port), [row.prompt for row in rows], parameters, optimizer,
        monitor.Watch(config.monitors.policy, warn if ranks.rank == 0 else lambda _: None), ranks,
        rows=rows if any(row.pictures for row in rows) else (),
    )  # fmt: skip
    loop.hand_over(run)
    return run


def make_rollout(config: Config, port: Port, ranks: Ranks) -> Sampler:
    """The engine that samples: each process's own actor, or vLLM-Omni's ranks, shared by as many processes.

    Raises:
        ConfigProblem: the processes cannot be divided among engines.
    """
    from loudfail.trainer.loop import case_of
    from loudfail.trainer.sampler import LocalRollout, SharedRollout

    tp = config.rollout.tp
    if config.rollout.engine == "local":
        return LocalRollout(port, config.micro_batch, case_of(config, port))
    if ranks.size == 1:
        return port.engine(tp)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    team = min(tp, local)
    if local % team or ranks.size % team:
        raise ConfigProblem(f"rollout.tp is {tp}: {local} processes of a node cannot be divided into teams of {team} that share an engine")
    return SharedRollout(ranks, team, lambda: port.engine(tp))


def prepare_actor(config: Config, port: Port, ranks: Ranks) -> Ranks:
    """What speed and memory ask of the actor: attention backend, gradient checkpointing, compiled blocks, shards; the processes afterwards.

    Raises:
        ConfigProblem: the port's actor cannot do it.
    """
    from loudfail.trainer.parallel import compile_blocks, shard

    model = config.model
    try:
        if model.attention != "native":
            port.actor.set_attention_backend(model.attention)
        if model.gradient_checkpointing:
            port.actor.enable_gradient_checkpointing()
        if model.compile:
            compile_blocks(port.actor)
        if config.parallel.shard == "fsdp" and ranks.size > 1:
            return shard(port.actor, ranks, port.device)
    except (AttributeError, ValueError) as error:
        raise ConfigProblem(f"model, parallel: the actor of {config.model.port} cannot do what they ask: {error}") from error
    return ranks


def make_score(config: Config, port: Port) -> Score:
    """Latents and prompts → every sub-score and their weighted ``total``; equal weights if the recipe gives none."""
    from loudfail.trainer.rewards.build import make_scorer
    from loudfail.trainer.rewards.scorer import WeightedSum
    from loudfail.trainer.rewards.synthetic import LatentMedia

    try:
        scorers = [make_scorer(spec, port.device) for spec in config.reward.scorers]
        outputs = [name for scorer in scorers for name in scorer.outputs]
        reward = WeightedSum(scorers, config.reward.weights or {name: 1 / len(outputs) for name in outputs})
    except (ValueError, OSError) as error:
        raise ConfigProblem(f"reward: {error}") from error

    def score(latents: Any, prompts: Sequence[str]) -> Any:
        media: Any = LatentMedia.split(latents, port.time_axis.get("audio", -1)) if config.reward.on == "latents" else port.decode(latents)
        return reward.score(media, prompts)

    return score


def save(run: Run, out: Path, gated: str, validation: list[dict[str, float]]) -> None:
    """Write a checkpoint, in the first process alone.

    Raises:
        OSError: it could not be written; in every process, so that none waits for another.
    """
    from loudfail.trainer import checkpoint

    error: OSError | None = None
    if run.ranks.rank == 0:
        try:
            checkpoint.save(out / "checkpoints", snapshot(run, gated, validation), run.config.checkpoints.keep)
        except OSError as problem:
            error = problem
    if run.ranks.any(error is not None, run.port.device):
        raise error or OSError("the first process could not write a checkpoint")


def snapshot(run: Run, gated: str, validation: list[dict[str, float]]) -> Checkpoint:
    """The state of a run after a step."""
    from loudfail.trainer import adapters
    from loudfail.trainer.checkpoint import Checkpoint, optimizer_state

    tensors = {f"adapter/{name}/{key}": value for name in (adapters.TRAINED, adapters.OLD) for key, value in run.port.adapter_state(name).items()}
    tensors |= {f"adapter/{adapters.OLD}/{key}": value for key, value in (run.old or {}).items()}
    tensors |= {f"master/{name}": value for name, value in run.parameters.items() if value is not run.port.trainable()[name]}
    tensors |= optimizer_state(run.optimizer, run.parameters)
    record = {"config": run.config.plain(), "gated": gated, "version": run.version, "validation": validation, "monitors": run.watch.counts}
    return Checkpoint(run.step, tensors, record)


def restore(run: Run, saved: Checkpoint) -> list[dict[str, float]]:
    """Put a run into the state of a checkpoint; the validations until then."""
    from loudfail.trainer import adapters, loop
    from loudfail.trainer.checkpoint import restore_masters, restore_optimizer

    for name in (adapters.TRAINED, adapters.OLD):
        prefix = f"adapter/{name}/"
        run.port.load_adapter(name, {key.removeprefix(prefix): value for key, value in saved.tensors.items() if key.startswith(prefix)})
    if run.port.dtype == "bfloat16":
        run.old = {key.removeprefix(prefix): value for key, value in saved.tensors.items() if key.startswith(prefix)}
    restore_masters(run.parameters, run.port.trainable(), saved.tensors)
    restore_optimizer(run.optimizer, run.parameters, saved.tensors)
    run.step, run.version, run.watch.counts = saved.step, saved.record["version"] - 1, saved.record["monitors"]
    loop.hand_over(run)
    return saved.record["validation"]


def find_checkpoint(out: Path, resume: str | None, config: Config) -> Checkpoint | None:
    """The checkpoint to go on from, None to start afresh.

    Raises:
        Refused: there is none, it is broken, or it is of a run with another configuration.
    """
    from loudfail.trainer import checkpoint

    if resume is None:
        return None
    there = checkpoint.listed(out / "checkpoints")
    if not resume and not there:
        raise Refused(f"--resume: {out} has no checkpoint; leave --resume out to start afresh")
    path = Path(resume) if resume else there[-1]
    try:
        saved = checkpoint.load(path)
    except checkpoint.BrokenCheckpoint as error:
        raise Refused(str(error)) from None
    changed = [key for key in differing(saved.record["config"], config.plain()) if key not in MAY_CHANGE]
    if changed:
        raise Refused(f"{path} is of a run with another {', '.join(changed)}; only {', '.join(MAY_CHANGE)} may change")
    return saved


@contextmanager
def interruption() -> Iterator[list[int]]:
    """A list that gets the number of the first SIGTERM or SIGINT; the second one acts as usual."""
    seen: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, _: Any) -> None:
        seen.append(number)
        for one, handler in previous.items():
            signal.signal(one, handler)

    try:
        for one in (signal.SIGTERM, signal.SIGINT):
            previous[one] = signal.signal(one, note)
    except ValueError:  # not the main thread: signals are somebody else's
        previous.clear()
    try:
        yield seen
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


def summarize(run: Run, history: list[dict[str, Any]], validation: list[dict[str, float]]) -> dict[str, Any]:
    """What a run came to. ``[first, last]``: true reward and sub-scores of validation, through the rollout; logged reward of training."""
    from loudfail.trainer.logs import MONITOR, find_alarms

    ends = {name: [validation[0][name], validation[-1][name]] for name in validation[0] if not name.startswith(MONITOR)}
    logged = [history[0]["logged_reward"], history[-1]["logged_reward"]] if history else []
    return {
        "schema": "loudfail.train/1", "steps": run.step, "true_reward": ends.pop("total"), "logged_reward": logged, "scores": ends,
        "validation": validation, "timing": run.timing, "monitors": run.watch.counts, "config": run.config.plain(), "classes": run.port.classes(),
        "reward_hacking": find_alarms(history, validation),
    }  # fmt: skip


def _trim(metrics: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of steps that will be run again."""
    records = []
    if metrics.is_file():
        for text in metrics.read_text().splitlines():
            try:
                record = json.loads(text)
            except ValueError:  # cut by a kill
                break
            if record["step"] < step:
                records.append(record)
    part = metrics.with_suffix(".part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, metrics)
    return records


def _checkpoint_advice(out: Path) -> str:
    from loudfail.trainer import checkpoint

    there = checkpoint.listed(out / "checkpoints")
    return f"the last checkpoint, {there[-1]}, is whole: go on with --resume" if there else "no checkpoint was written yet: start again"


def progress(record: dict[str, Any], steps: int, seconds: float) -> str:
    """A line that says how far the run is: bar, time left at so many seconds a step, reward, every sub-score."""
    done = record["step"] + 1
    minutes, left = divmod(int(seconds * (steps - done)), 60)
    eta = f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d}"
    bar = "█" * (10 * done // steps) + "░" * (10 - 10 * done // steps)
    names = [name for name in record if name.startswith("score/") and name != "score/total"]
    scores = " ".join(f"{name.removeprefix('score/')} {record[name]:.3f}" for name in names)
    reward = f"reward {record['logged_reward']:.3f} true {record['true_reward']:.3f}"
    return f"{bar} step {done}/{steps} · {eta} left · {reward} · {scores}"


def _show(write: Any, summary: dict[str, Any], out: Path) -> None:
    first, last = summary["true_reward"]
    write(f"{summary['status']} after {summary['steps']} steps, {summary['seconds']:.1f} s, {summary['peak_rss_bytes'] / 2**30:.2f} GiB peak")
    write(
        f"  true reward {first:.3f} → {last:.3f}"
        + (f", logged {summary['logged_reward'][0]:.3f} → {summary['logged_reward'][1]:.3f}" if summary["logged_reward"] else "")
    )
    for name, (a, b) in summary["scores"].items():
        write(f"  {name:<24} {a:.3f} → {b:.3f}")
    fired = sum(int(count["fired"]) for count in summary["monitors"].values())
    write(f"  {len(summary['monitors'])} monitors, {fired} fired")
    for alarm in summary["reward_hacking"]["alarms"]:
        write(f"  REWARD HACKING? {alarm}")
    if summary["message"]:
        write(f"  {summary['message']}")
    write(f"  written to {out}")
