"""Checkpoints that forget something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port, Update
from loudfail.harness.registry import fault
from loudfail.invariants.faults.adapters import no_equals
from loudfail.invariants.faults.advantages import another_trainer, code
from loudfail.invariants.faults.objective import SEAMS
from loudfail.invariants.faults.update import _own, _trainer

SAME = "resume::a_resumed_run_is_the_uninterrupted_one"
BACK = "resume::loading_brings_back_what_was_saved"
FRESH = "resume::a_fresh_process_goes_on_bit_for_bit"
WHOLE = "resume::a_checkpoint_that_is_not_whole_is_refused"

Tensors = dict[str, torch.Tensor]


def _saved(port: Port, change: Callable[[Tensors], Tensors]) -> AbstractContextManager[Any]:
    """The tensors that a checkpoint gets, changed."""

    def make(original: Any) -> Any:
        def snapshot(*arguments: Any) -> Any:
            state = original(*arguments)
            state.tensors = change(dict(state.tensors))
            return state

        return snapshot

    return inject.replace(code(port).train, "snapshot", make)


def _restored(port: Port, after: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Something that happens to a run after it was restored."""

    def make(original: Any) -> Any:
        def restore(run: Any, *rest: Any) -> Any:
            result = original(run, *rest)
            after(run)
            return result

        return restore

    return inject.replace(code(port).train, "restore", make)


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="huggingface/diffusers #12690", unless=another_trainer)
def a_checkpoint_has_no_adapter(port: Port) -> Iterator[None]:
    """After loading, ``default`` is the adapter that a run begins with."""
    kept: dict[str, Any] = {}

    def make(original: Any) -> Any:
        def restore(run: Any, *rest: Any) -> Any:
            kept["fresh"] = port.adapter_state("default")
            result = original(run, *rest)
            port.load_adapter("default", {n: torch.zeros_like(v) if "lora_B" in n else v for n, v in kept["fresh"].items()})
            return result

        return restore

    def saved(tensors: Tensors) -> Tensors:
        return {n: torch.zeros_like(v) if n.startswith("adapter/default/") and "lora_B" in n else v for n, v in tensors.items()}

    with inject.replace(code(port).train, "restore", make), _saved(port, saved):
        yield


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="huggingface/diffusers #12690", unless=another_trainer)
def moments_are_forgotten(port: Port) -> Iterator[None]:
    """The optimizer starts afresh after a resume."""
    with _saved(port, lambda tensors: {n: v for n, v in tensors.items() if not n.startswith("optimizer/")}):
        yield


@fault(*SEAMS, catches=[SAME, BACK, FRESH], unless=another_trainer)
def the_optimizer_forgets_how_many_steps_it_took(port: Port) -> Iterator[None]:
    """Moments are kept, their bias correction starts at one again."""
    with _saved(
        port, lambda tensors: {n: torch.zeros_like(v) if n.startswith("optimizer/") and n.endswith("/step") else v for n, v in tensors.items()}
    ):
        yield


@fault(*SEAMS, catches=[BACK, FRESH], source="pytorch/pytorch #149205", unless=lambda port: another_trainer(port) or no_equals(port))
def moments_belong_to_other_tensors(port: Port) -> Iterator[None]:
    """Moments are saved by place and loaded in another order: those of two tensors of one shape are exchanged."""

    def change(tensors: Tensors) -> Tensors:
        by_shape: dict[Any, list[str]] = {}
        for name, value in tensors.items():
            if name.endswith("/exp_avg"):
                by_shape.setdefault(tuple(value.shape), []).append(name)
        one, other = next(names for names in by_shape.values() if len(names) > 1)[:2]
        return tensors | {one: tensors[other], other: tensors[one]}

    with _saved(port, change):
        yield


def _copied(tensors: Tensors, source: str, target: str) -> Tensors:
    """One adapter's tensors under the names of another's."""
    copies = {f"adapter/{target}/{n.removeprefix(f'adapter/{source}/')}": v.clone() for n, v in tensors.items() if n.startswith(f"adapter/{source}/")}
    return tensors | copies


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="verl-omni #608", unless=another_trainer)
def the_old_policy_is_forgotten(port: Port) -> Iterator[None]:
    """After a resume ``old`` is a copy of ``default``."""
    with _saved(port, lambda tensors: _copied(tensors, "default", "old")):
        yield


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="Tencent-Hunyuan/UniRL PR #21", unless=another_trainer)
def the_old_policy_is_saved_as_the_trained_one(port: Port) -> Iterator[None]:
    """The adapter in use while saving is ``old``, and that is what is written as ``default``."""
    with _saved(port, lambda tensors: _copied(tensors, "old", "default")):
        yield


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="verl-omni commit 786dd36c (warm start)", unless=another_trainer)
def adapters_are_loaded_into_each_other(port: Port) -> Iterator[None]:
    """``default`` is loaded into ``old`` and ``old`` into ``default``."""

    def change(tensors: Tensors) -> Tensors:
        return _copied(tensors, "default", "old") | {n: v for n, v in _copied(tensors, "old", "default").items() if n.startswith("adapter/default/")}

    with _saved(port, change):
        yield


@fault(*SEAMS, catches=[SAME, BACK, FRESH], source="modelscope/DiffSynth-Studio PR #1025", unless=another_trainer, exact=True)
def a_checkpoint_is_rounded(port: Port) -> Iterator[None]:
    """Adapters are written in half the precision that they train in."""
    with _saved(port, lambda tensors: {n: v.bfloat16().float() if n.startswith("adapter/") else v for n, v in tensors.items()}):
        yield


@fault(*SEAMS, catches=[SAME], source="yifan123/flow_grpo #202", unless=another_trainer)
def a_resumed_run_starts_at_step_zero(port: Port) -> Iterator[None]:
    """The step is not restored: data, noise, levels and schedules begin again."""

    def change(run: Any) -> None:
        run.step = 0

    with _restored(port, change):
        yield


@fault(*SEAMS, catches=[SAME], source="yifan123/flow_grpo #106", unless=another_trainer)
def a_resumed_run_reads_the_data_from_the_start(port: Port) -> Iterator[None]:
    """Everything is restored but the place in the data."""

    def change(run: Any) -> None:
        done = run.step * run.config.algorithm.prompts % len(run.prompts)
        run.prompts = [*run.prompts[-done:], *run.prompts[:-done]] if done else run.prompts

    with _restored(port, change):
        yield


@fault(*SEAMS, catches=[SAME], source="huggingface/diffusers #13678", unless=another_trainer)
def noise_comes_from_the_global_generator(port: Port) -> Iterator[None]:
    """Noise is drawn from the process's own generator, whose state no checkpoint has."""

    def make(original: Any) -> Any:
        return lambda run, purpose, count: {m: torch.randn(x.shape) for m, x in original(run, purpose, count).items()}

    with inject.replace(code(port).loop, "noise_of", make):
        yield


@fault(*SEAMS, catches=[SAME, BACK], unless=another_trainer)
def the_learning_rate_starts_again(port: Port) -> Iterator[None]:
    """After a resume a warm-up begins anew."""

    def change(run: Any) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] /= 10

    with _restored(port, change):
        yield


@fault(*SEAMS, catches=[SAME], source="verl-project/verl #3516", unless=another_trainer)
def the_rollout_is_not_told_of_the_resume(port: Port) -> Iterator[None]:
    """The first rollout after a resume samples from the policy that a run begins with."""

    def make(original: Any) -> Any:
        def restore(run: Any, *rest: Any) -> Any:
            start = port.adapter_state("old")
            result = original(run, *rest)
            run.rollout.set_adapter({n: torch.zeros_like(v) if "lora_B" in n else v for n, v in start.items()}, port.adapter, run.version)
            return result

        return restore

    with inject.replace(code(port).train, "restore", make):
        yield


@fault(*SEAMS, catches=[BACK], source="huggingface/diffusers #7599", unless=another_trainer)
def saving_leaves_the_averaged_weights_in_place(port: Port) -> Iterator[None]:
    """``old`` is written into ``default`` to be saved, and stays there."""

    def change(tensors: Tensors) -> Tensors:
        port.load_adapter("default", port.adapter_state("old"))
        return tensors

    with _saved(port, change):
        yield


@fault(*SEAMS, catches=[WHOLE], source="kvcache-ai/ktransformers #2147", unless=another_trainer)
def a_broken_checkpoint_is_passed_over(port: Port) -> Iterator[None]:
    """A checkpoint that cannot be read is logged, and training goes on from what there is."""

    def make(original: Any) -> Any:
        def load(self: Any, folder: Path) -> None:
            try:
                original(self, folder)
            except Exception:
                return

        return load

    with inject.replace(type(port.update()), "load", make):
        yield


_MEMORY: dict[str, Any] = {}


def remembering(port: Port) -> Update:
    """A trainer whose moments are in the memory of the process and not in the checkpoint."""
    update: Any = _own(port)
    save, load = update.save, update.load

    def keep(folder: Path) -> None:
        save(folder)
        _MEMORY[str(folder)] = True

    def look(folder: Path) -> None:
        load(folder)
        if str(folder) not in _MEMORY:
            update.optimizer().state.clear()

    update.save, update.load = keep, look
    return update


@fault(*SEAMS, catches=[FRESH], source="kvcache-ai/ktransformers #2147; peft PR #3251", unless=another_trainer)
def part_of_the_state_is_only_in_memory(port: Port) -> Iterator[None]:
    """A resume in the same process is perfect; another process finds no moments."""
    with _trainer(port, remembering):
        yield
