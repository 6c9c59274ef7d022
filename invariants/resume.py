"""Checkpoints of a run: everything that decides the next step is in them, bit for bit, and nothing else is ever taken for one.

The trainer is the port's own (`Port.update`); a run resumed in a process that has never seen it must be the run that was never interrupted.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from loudfail.harness.compare import require, require_equal
from loudfail.harness.port import Noised, Plan, Port, Scored, Update, random_adapter
from loudfail.harness.registry import invariant
from loudfail.harness.violation import Uncovered
from loudfail.harness.world import Rank
from loudfail.invariants.adapters import seeds
from loudfail.invariants.objective import Gradient, plan_for, watching
from loudfail.invariants.update import States, in_two_processes, require_same

Stepped = tuple[Gradient, Scored, list[Noised]]


def small(port: Port, seed: int) -> Plan:
    """A plan under which ``old`` is another policy at a checkpoint, the schedule depends on the step, and prompts do not repeat with the step."""
    return plan_for(port, seed=seed, levels=1, calls=2, old="linear_to_0_5", old_every=2)


def begin(port: Port, plan: Plan) -> Update:
    """A run that has begun from two warm policies, so that no moment of the first step is zero."""
    update = port.update()
    update.begin(plan)
    port.load_adapter("default", random_adapter(port, port.adapter, plan.seed))
    port.load_adapter("old", random_adapter(port, port.adapter, plan.seed + 1))
    return update


def held(port: Port, update: Update) -> States:
    """What a run holds: both policies, and the optimizer's tensors and numbers under their place."""
    moments = {}
    for number, group in enumerate(update.optimizer().param_groups):
        for place, parameter in enumerate(group["params"]):
            for what, value in sorted(update.optimizer().state.get(parameter, {}).items()):
                moments[f"{number}/{place}/{what}"] = torch.as_tensor(value).detach().cpu().clone()
        moments |= {f"{number}/{key}": torch.tensor(float(value)) for key, value in group.items() if isinstance(value, int | float)}
    return {"default": port.adapter_state("default"), "old": port.adapter_state("old"), "optimizer": moments}


@contextmanager
def in_fixed_order(port: Port) -> Iterator[None]:
    """On a GPU the model attends in plain products inside: fused kernels (memory-efficient attention's backward pass, in float32) add in any order
    that their threads arrive in, and two runs of one trainer would differ. What else attends, such as a text encoder, is left alone: a process that
    has its output already and one that has not would differ too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    predict = port.predict_velocity

    def plainly(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return predict(*args, **kwargs)

    on_gpu = any(value.is_cuda for value in port.trainable().values())
    with mock.patch.object(port, "predict_velocity", plainly) if on_gpu else nullcontext():
        yield


def steps(port: Port, update: Update, count: int) -> list[Stepped]:
    """So many steps, each with what it was made from."""
    with in_fixed_order(port):
        return _steps(port, update, count)


def _steps(port: Port, update: Update, count: int) -> list[Stepped]:
    result = []
    for _ in range(count):
        with watching(port, update) as seen:
            scored, calls = update.step()
        result.append((seen[-1], scored, calls))
    return result


def until_apart(port: Port, update: Update) -> int:
    """Step until ``old`` and ``default`` are two policies; the number of steps."""
    for number in range(1, 4):
        steps(port, update, 1)
        old, default = port.adapter_state("old"), port.adapter_state("default")
        if any(not torch.equal(old[name], default[name]) for name in old):
            return number
    require(False, got="old equals default after each of 3 steps", want="two policies where no refresh is due", where="before saving")
    return 0


def require_same_run(got: States, want: States, where: str) -> None:
    """Both policies and the optimizer, bit for bit."""
    for part in want:
        require_same(got[part], want[part], where=f"{where}, {part}")


def require_same_steps(got: Sequence[Stepped], want: Sequence[Stepped], where: str) -> None:
    """The same prompts, samples, rewards, noise, levels and gradients, step by step."""
    for number, ((gradient, scored, calls), (wanted, wanted_scored, wanted_calls)) in enumerate(zip(got, want, strict=True)):
        at = f"{where}, step {number + 1} after the checkpoint"
        require(scored.prompts == wanted_scored.prompts, got=scored.prompts, want=wanted_scored.prompts, where=f"{at}, place in the data")
        for m, x in wanted_scored.clean.items():
            require_equal(scored.clean[m], x, where=f"{at}, {m} samples")
        require_equal(scored.rewards, wanted_scored.rewards, where=f"{at}, rewards")
        for call, wanted_call in zip(calls, wanted_calls, strict=True):
            for m in wanted_call.noise:
                require_equal(call.noise[m], wanted_call.noise[m], where=f"{at}, {m} training noise")
                require_equal(call.sigmas[m], wanted_call.sigmas[m], where=f"{at}, {m} levels")
        require_same(gradient, wanted, where=f"{at}, gradient")


@contextmanager
def other_random_state(seed: int) -> Iterator[None]:
    """The process's global generators stand elsewhere inside, as in a process that was just started; afterwards as before."""
    import numpy as np

    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def a_resumed_run_is_the_uninterrupted_one(port: Port, seed: int) -> None:
    """k + m steps equal k steps, save, begin anew, load, and m steps: every sample, noise, gradient, both policies and the optimizer, bit for bit.

    What a checkpoint lacks starts afresh without a word: moments, the old policy, the random state, the place in the data, the step that a schedule
    depends on (diffusers #12690).
    """
    with other_random_state(seed + 7):
        plan = small(port, seed)
        update = begin(port, plan)
        first = until_apart(port, update)
        whole = steps(port, update, 2)
        want = held(port, update)
    with tempfile.TemporaryDirectory(prefix="loudfail-resume-") as folder:
        with other_random_state(seed + 7):
            update = begin(port, plan)
            steps(port, update, first)
            update.save(Path(folder))
        with other_random_state(seed + 8):
            update = port.update()
            update.begin(plan)
            update.load(Path(folder))
            rest = steps(port, update, 2)
    require_same_steps(rest, whole, "resumed")
    require_same_run(held(port, update), want, "after the last step")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def loading_brings_back_what_was_saved(port: Port, seed: int) -> None:
    """Right after loading, both policies and the optimizer are those of the moment of saving, which itself changed nothing.

    Names the part that `a_resumed_run_is_the_uninterrupted_one` finds lost: the wrong adapter saved, or loaded into the wrong one.
    """
    plan = small(port, seed)
    update = begin(port, plan)
    until_apart(port, update)
    saved = held(port, update)
    with tempfile.TemporaryDirectory(prefix="loudfail-resume-") as folder:
        update.save(Path(folder))
        require_same_run(held(port, update), saved, "after saving")
        steps(port, update, 1)
        moved = held(port, update)
        differ = any(not torch.equal(saved["default"][name], moved["default"][name]) for name in saved["default"])
        require(differ, got="default stood still", want="a step that moves it", where="after saving")
        fresh = port.update()
        fresh.begin(plan)
        fresh.load(Path(folder))
        require_same_run(held(port, fresh), saved, "after loading")


def resume_in_rank(rank: Rank, port: Port, plan: Plan, folder: str) -> tuple[States, list[Stepped]] | None:
    """In the first process: load and go on for one step."""
    if rank.rank:
        return None
    update = port.update()
    update.begin(plan)
    update.load(Path(folder))
    done = steps(port, update, 1)
    return held(port, update), done


@invariant("objective", "adapter", "update", examples=1, processes=True, seed=seeds)
def a_fresh_process_goes_on_bit_for_bit(port: Port, seed: int) -> None:
    """A process that never saw the run loads its checkpoint and takes the step that the first process takes, bit for bit.

    What lives in the memory of the process (a cache, a global generator, an adapter that is still there) hides from a resume in the same one.
    """
    plan = small(port, seed)
    update = begin(port, plan)
    steps(port, update, 1)
    with tempfile.TemporaryDirectory(prefix="loudfail-resume-") as folder:
        update.save(Path(folder))
        answer = in_two_processes(port, resume_in_rank, plan, folder)[0]
        whole = steps(port, update, 1)
    assert answer is not None  # rank 0 answers
    require_same_steps(answer[1], whole, "in a fresh process")
    require_same_run(answer[0], held(port, update), "in a fresh process")


@invariant("objective", "adapter", "update", examples=1, seed=seeds)
def a_checkpoint_that_is_not_whole_is_refused(port: Port, seed: int) -> None:
    """A checkpoint of which any file is cut in half, or gone, is an error when it is loaded; whole again, it loads.

    A process that is killed while it writes leaves just that.
    """
    plan = small(port, seed)
    update = begin(port, plan)
    steps(port, update, 1)
    with tempfile.TemporaryDirectory(prefix="loudfail-resume-") as name:
        folder = Path(name)
        update.save(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size > 1]
        require(bool(files), got="no files", want="at least one", where="the checkpoint")
        for path in files:
            content = path.read_bytes()
            for what in ("cut", "gone"):
                path.unlink()
                if what == "cut":
                    path.write_bytes(content[: len(content) // 2])
                refused(update, folder, f"{path.name} {what}")
                path.write_bytes(content)
        update.load(folder)


def refused(update: Update, folder: Path, where: str) -> None:
    """See that loading raises."""
    try:
        update.load(folder)
    except Uncovered:
        raise
    except Exception as error:
        require(True, got=type(error).__name__, want="", where=where)
        return
    require(False, got="loaded", want="an error", where=where)
