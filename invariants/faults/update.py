"""A training step broken on purpose: who moves, the old policy, what is sampled, and how processes share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace as with_fields
from typing import Any

import torch

from loudfail.harness import inject
from loudfail.harness.port import Port, Update, base_parameters, find_trainer
from loudfail.harness.registry import fault
from loudfail.invariants.faults.adapters import no_module
from loudfail.invariants.faults.advantages import LEARNS, STEP, another_trainer, code
from loudfail.invariants.faults.objective import SEAMS

OPTIMIZER = "update::the_optimizer_holds_exactly_the_training_adapter"
MOVES = "update::an_update_moves_every_factor_of_default_and_nothing_else"
DOWN = "update::an_update_goes_down_its_gradient_at_the_planned_rate"
SCHEDULE = "update::the_old_policy_follows_its_schedule"
TRACE = "update::evaluation_leaves_no_trace"
SAMPLED = "update::the_rollout_samples_the_old_policy_of_the_last_step"
PROCESSES = "update::two_processes_train_as_one"


def _run(port: Port, change: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Every run that begins is changed before its first step."""

    def make(original: Any) -> Any:
        def set_up(*arguments: Any, **keywords: Any) -> Any:
            run = original(*arguments, **keywords)
            change(run)
            return run

        return set_up

    return inject.replace(code(port).train, "set_up", make)


@contextmanager
def mended(port: Port) -> Iterator[None]:
    """The base weights afterwards as they were, ``default`` in use and the only one that trains."""
    weights = [(p, p.detach().clone()) for p in base_parameters(port).values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in weights:
                parameter.requires_grad_(False).copy_(value)
                parameter.grad = None
        port.select_trainable("default")


def no_parts(port: Port) -> str:
    """Why nothing of the actor can be broken while the reference trainer runs."""
    return another_trainer(port) or no_module(port)


def _factors(port: Port, name: str) -> list[torch.nn.Parameter]:
    """The tensors of an adapter."""
    port.select_trainable(name)
    tensors = list(port.trainable().values())
    port.select_trainable("default")
    return tensors


# -- the optimizer -----------------------------------------------------------------------------------------------------------------------------------
@fault(
    *SEAMS,
    catches=[OPTIMIZER, MOVES],
    source="pytorch/pytorch #149205; accelerate #3256",
    unless=another_trainer,
    cause="optimizer holds other tensors",
)
def the_optimizer_steps_tensors_of_before(port: Port) -> Iterator[None]:
    """The optimizer was built before the model was wrapped: it steps copies that nobody runs."""

    def change(run: Any) -> None:
        for group in run.optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]

    with _run(port, change):
        yield


@fault(*SEAMS, catches=[OPTIMIZER], source="peft #3580, #2759", unless=another_trainer, cause="optimizer holds too much")
def the_optimizer_also_holds_the_old_policy(port: Port) -> Iterator[None]:
    """The optimizer was given the tensors of every adapter."""
    with _run(port, lambda run: run.optimizer.add_param_group({"params": _factors(port, "old")})):
        yield


@fault(*SEAMS, catches=[OPTIMIZER], source="Flow-Factory commit 3990abb (#56)", unless=no_parts, cause="optimizer holds too much")
def the_optimizer_also_holds_the_base(port: Port) -> Iterator[None]:
    """The optimizer was given every parameter of the model."""
    with _run(port, lambda run: run.optimizer.add_param_group({"params": list(base_parameters(port).values())})):
        yield


@fault(*SEAMS, catches=[OPTIMIZER, MOVES], source="diffusers #11832", unless=another_trainer, cause="optimizer misses tensors")
def the_optimizer_misses_one_tensor(port: Port) -> Iterator[None]:
    """The last tensor of the adapter was never given to the optimizer."""

    def change(run: Any) -> None:
        run.optimizer.param_groups[0]["params"].pop()

    with _run(port, change):
        yield


@fault(*SEAMS, catches=[MOVES], source="cloneofsimo/lora #26", unless=another_trainer)
def the_factors_a_never_move(port: Port) -> Iterator[None]:
    """Gradients of A are dropped before the step."""

    def change(run: Any) -> None:
        def drop(*_: Any) -> None:
            for name, parameter in run.parameters.items():
                if "lora_A" in name:
                    parameter.grad = None

        run.optimizer.register_step_pre_hook(drop)

    with _run(port, change):
        yield


@fault(*SEAMS, catches=[DOWN, LEARNS], unless=another_trainer, cause="optimizer climbs")
def the_optimizer_climbs(port: Port) -> Iterator[None]:
    """The optimizer maximizes the loss."""

    def change(run: Any) -> None:
        run.optimizer.param_groups[0]["maximize"] = True

    with _run(port, change):
        yield


@fault(*SEAMS, catches=[DOWN], unless=another_trainer, cause="another learning rate")
def the_learning_rate_of_the_recipe_is_ignored(port: Port) -> Iterator[None]:
    """The optimizer has its default learning rate."""

    def change(run: Any) -> None:
        run.optimizer.param_groups[0]["lr"] = 1e-3 / 3

    with _run(port, change):
        yield


@fault(*SEAMS, catches=[DOWN, MOVES], unless=another_trainer, cause="another learning rate")
def a_warm_up_stands_at_zero(port: Port) -> Iterator[None]:
    """A schedule multiplies the learning rate with 0, and nobody steps the schedule."""

    def change(run: Any) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.0

    with _run(port, change):
        yield


def _improve(port: Port, before: Callable[[Any], None] = lambda run: None, after: Callable[[Any], None] = lambda run: None) -> Any:
    """Something that happens around each update."""

    def make(original: Any) -> Any:
        def improve(run: Any, *rest: Any) -> Any:
            before(run)
            result = original(run, *rest)
            after(run)
            return result

        return improve

    return inject.replace(code(port).loop, "improve", make)


@fault(*SEAMS, catches=[MOVES], source="huggingface/trl #3926", unless=no_parts)
def a_base_weight_decays(port: Port) -> Iterator[None]:
    """Each update shrinks one frozen weight by weight decay alone."""

    one = next(p for p in base_parameters(port).values() if p.ndim == 2)

    def decay(run: Any) -> None:
        with torch.no_grad():
            one.mul_(1 - max(1e-5, torch.finfo(one.dtype).eps))  # what the weight can hold

    with mended(port), _improve(port, after=decay):
        yield


@fault(*SEAMS, catches=[MOVES], unless=another_trainer)
def old_moves_with_the_update(port: Port) -> Iterator[None]:
    """``old`` shares its storage with ``default``, as a shallow copy does."""
    with _improve(port, after=lambda run: port.load_adapter("old", port.adapter_state("default"))):
        yield


# -- the old policy ----------------------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[SCHEDULE, STEP], source="huggingface/diffusers #7048", unless=another_trainer, cause="old policy never refreshed")
def old_is_never_refreshed(port: Port) -> Iterator[None]:
    """The refresh is never called."""
    with inject.replace(code(port).loop, "refresh_old", lambda original: lambda *arguments: None):
        yield


@fault(*SEAMS, catches=[SCHEDULE, SAMPLED], unless=another_trainer, cause="refresh interval ignored")
def old_is_refreshed_at_every_step(port: Port) -> Iterator[None]:
    """The interval of the recipe is ignored."""

    def make(original: Any) -> Any:
        def refresh_old(run: Any, *rest: Any) -> Any:
            kept = run.config
            run.config = with_fields(kept, algorithm=with_fields(kept.algorithm, old_every=1))
            try:
                return original(run, *rest)
            finally:
                run.config = kept

        return refresh_old

    with inject.replace(code(port).loop, "refresh_old", make):
        yield


@fault(*SEAMS, catches=[STEP], unless=another_trainer)
def old_is_refreshed_before_the_update(port: Port) -> Iterator[None]:
    """The old policy is the policy before the step, one step behind what the schedule says, in whole steps only."""
    kept: dict[str, Any] = {}

    def make(original: Any) -> Any:
        def train_step(run: Any) -> Any:
            kept["theta"] = port.adapter_state("default")
            return original(run)

        return train_step

    def late(original: Any) -> Any:
        def refreshed(old: Any, current: Any, decay: float) -> Any:
            return original(old, kept.pop("theta", current), decay)

        return refreshed

    with inject.replace(code(port).loop, "train_step", make), inject.replace(code(port).nft, "refreshed", late):
        yield


@fault(*SEAMS, catches=[SCHEDULE, STEP], source="huggingface/diffusers #7599", unless=another_trainer, cause="decay reversed")
def decay_and_its_complement_are_exchanged(port: Port) -> Iterator[None]:
    """old ← (1 − d)·old + d·θ."""
    with inject.replace(code(port).nft, "refreshed", lambda original: lambda old, current, decay: original(old, current, 1 - decay)):
        yield


@fault(*SEAMS, catches=[SCHEDULE], unless=another_trainer, cause="old policy is a copy")
def the_decay_forgets_the_step(port: Port) -> Iterator[None]:
    """The schedule is asked for step 0 every time."""
    with inject.replace(code(port).nft, "old_decay", lambda original: lambda schedule, step: original(schedule, 0)):
        yield


@fault(*SEAMS, catches=[SCHEDULE], unless=another_trainer, cause="old policy is a copy")
def every_schedule_is_a_copy(port: Port) -> Iterator[None]:
    """The recipe's schedule is ignored."""
    with inject.replace(code(port).nft, "old_decay", lambda original: lambda schedule, step: 0.0):
        yield


@fault(*SEAMS, catches=[SCHEDULE], unless=another_trainer, cause="old policy refreshed in part")
def only_the_factors_b_follow(port: Port) -> Iterator[None]:
    """The refresh moves B and leaves A where it was."""

    def make(original: Any) -> Any:
        def refreshed(old: Any, current: Any, decay: float) -> Any:
            return {name: old[name].clone() if "lora_A" in name else value for name, value in original(old, current, decay).items()}

        return refreshed

    with inject.replace(code(port).nft, "refreshed", make):
        yield


# -- what is sampled and scored ----------------------------------------------------------------------------------------------------------------------
@fault(*SEAMS, catches=[SAMPLED], source="Tencent-Hunyuan/UniRL PR #21", unless=another_trainer)
def the_rollout_gets_the_training_policy(port: Port) -> Iterator[None]:
    """The hand-over reads ``default`` where it should read ``old``."""

    def make(original: Any) -> Any:
        def hand_over(run: Any) -> None:
            original(run)
            run.bound = run.rollout.set_adapter(port.adapter_state("default"), port.adapter, run.version)

        return hand_over

    with inject.replace(code(port).loop, "hand_over", make):
        yield


@fault(*SEAMS, catches=[SAMPLED, LEARNS], source="verl-omni #552; verl-project/verl #7495", unless=another_trainer)
def the_rollout_keeps_the_first_policy(port: Port) -> Iterator[None]:
    """Nothing is handed over after the start of the run."""

    def make(original: Any) -> Any:
        return lambda run: original(run) if run.bound is None else None

    with inject.replace(code(port).loop, "hand_over", make):
        yield


@fault(*SEAMS, catches=[SAMPLED], source="verl-omni #552", unless=another_trainer)
def the_hand_over_comes_before_the_refresh(port: Port) -> Iterator[None]:
    """The rollout is always one refresh behind."""

    def make(original: Any) -> Any:
        def refresh_old(run: Any, *rest: Any) -> Any:
            behind = port.adapter_state("old")
            result = original(run, *rest)
            run.rollout.behind = behind
            return result

        return refresh_old

    def late(original: Any) -> Any:
        def hand_over(run: Any) -> None:
            original(run)
            if hasattr(run.rollout, "behind"):
                run.bound = run.rollout.set_adapter(run.rollout.behind, port.adapter, run.version)

        return hand_over

    with inject.replace(code(port).loop, "refresh_old", make), inject.replace(code(port).loop, "hand_over", late):
        yield


@fault(*SEAMS, catches=[STEP], source="StarsfieldAI/R1-V #67", unless=another_trainer)
def samples_and_rewards_are_in_another_order(port: Port) -> Iterator[None]:
    """The update trains on the samples in the order in which they came back, the rewards are in the order in which they were asked for."""

    def make(original: Any) -> Any:
        def improve(run: Any, batch: Any, trajectory: Any, x0: Any, *rest: Any) -> Any:
            return original(run, batch, trajectory, {m: x.roll(1, 0) for m, x in x0.items()}, *rest)

        return improve

    with inject.replace(code(port).loop, "improve", make):
        yield


@fault(*SEAMS, catches=[STEP, LEARNS], unless=another_trainer)
def the_reward_is_a_cost(port: Port) -> Iterator[None]:
    """The loop is given the negated reward; it rises."""

    def make(original: Any) -> Any:
        def begin(self: Any, plan: Any) -> None:
            original(self, plan)
            score = self.run.score
            self.run.score = lambda *arguments: {"total": -score(*arguments)["total"]}

        return begin

    with inject.replace(type(port.update()), "begin", make):
        yield


@fault(*SEAMS, catches=[STEP], source="verl-omni commit e71e6579 (#60)", unless=another_trainer)
def the_samples_of_a_draw_are_the_same(port: Port) -> Iterator[None]:
    """The seed of the rollout's noise depends on the prompt only."""

    def make(original: Any) -> Any:
        def noise_of(run: Any, purpose: str, count: int) -> Any:
            noise = original(run, purpose, count)
            return {m: x[:1].expand_as(x).clone() for m, x in noise.items()} if purpose.startswith("rollout/") else noise

        return noise_of

    with inject.replace(code(port).loop, "noise_of", make):
        yield


@fault(*SEAMS, catches=[STEP], source="verl-omni commits 6f8f830c (#358)", unless=another_trainer)
def a_draw_is_incomplete(port: Port) -> Iterator[None]:
    """One sample of the last draw counts for the first."""

    def make(original: Any) -> Any:
        def draw(*arguments: Any) -> Any:
            batch = original(*arguments)
            batch.groups[-1] = batch.groups[0]
            return batch

        return draw

    with inject.replace(code(port).loop, "draw", make):
        yield


# -- what evaluation leaves behind -------------------------------------------------------------------------------------------------------------------
def _validate(port: Port, leave: Callable[[], None]) -> AbstractContextManager[Any]:
    """Evaluation that leaves something behind."""

    def make(original: Any) -> Any:
        def validate(run: Any) -> Any:
            result = original(run)
            leave()
            return result

        return validate

    return inject.replace(code(port).loop, "validate", make)


@fault(*SEAMS, catches=[TRACE], source="huggingface/diffusers #7048; StableTuner #126", unless=another_trainer)
def evaluation_leaves_old_in_use(port: Port) -> Iterator[None]:
    """After an evaluation the model runs ``old``; what trains is as it was."""
    with ExitStack() as stack, _validate(port, lambda: stack.enter_context(port.using("old"))):
        yield


@fault(*SEAMS, catches=[TRACE], source="peft #3580", unless=no_parts)
def evaluation_leaves_old_trainable(port: Port) -> Iterator[None]:
    """After an evaluation ``old`` is the adapter that trains."""
    with mended(port), _validate(port, lambda: port.select_trainable("old")):
        yield


@fault(*SEAMS, catches=[TRACE], source="huggingface/trl #3926", unless=no_parts)
def evaluation_freezes_the_adapter(port: Port) -> Iterator[None]:
    """After an evaluation nothing trains."""

    def freeze() -> None:
        for parameter in port.trainable().values():
            parameter.requires_grad_(False)

    with mended(port), _validate(port, freeze):
        yield


@fault(*SEAMS, catches=[TRACE], source="huggingface/trl #3234, #3500", unless=no_parts)
def evaluation_ends_in_another_mode(port: Port) -> Iterator[None]:
    """After an evaluation a model that was in evaluation mode is in training mode, or the reverse, and with it its dropout."""
    mode = port.actor.training
    try:
        with _validate(port, lambda: port.actor.train(not mode)):
            yield
    finally:
        port.actor.train(mode)


@fault(*SEAMS, catches=[TRACE], source="huggingface/diffusers #7599", unless=another_trainer)
def evaluation_keeps_the_averaged_weights(port: Port) -> Iterator[None]:
    """Evaluation writes ``old`` into ``default`` and does not write back."""
    with _validate(port, lambda: port.load_adapter("default", port.adapter_state("old"))):
        yield


@fault(*SEAMS, catches=[SAMPLED], source="StableTuner #126", unless=another_trainer)
def sampling_leaves_its_adapter_in_use(port: Port) -> Iterator[None]:
    """After sampling the model still runs the adapter that it sampled with."""
    with ExitStack() as stack:

        def make(original: Any) -> Any:
            def sample(self: Any, *arguments: Any) -> Any:
                result = original(self, *arguments)
                stack.enter_context(port.using("old"))
                return result

            return sample

        with inject.replace(type(port.update()), "sample", make):
            yield


# -- processes ---------------------------------------------------------------------------------------------------------------------------------------
def _own(port: Port) -> Update:
    """The trainer that the port's class names; here it runs in another process."""
    return find_trainer(type(port).trainer)(port)


def _with_ranks(port: Port, **methods: Any) -> Update:
    """The port's trainer with some methods of its processes replaced in every run."""
    update: Any = _own(port)
    begin = update.begin

    def broken(plan: Any) -> None:
        begin(plan)
        ranks = update.run.ranks
        kind = type("Broken", (type(ranks),), methods)
        update.run.ranks = kind(ranks.rank, ranks.size)

    update.begin = broken
    return update


def summing(port: Port) -> Update:
    """A trainer whose processes add their gradients up."""

    def average_gradients(self: Any, parameters: Any) -> None:
        parameters = list(parameters)
        super(type(self), self).average_gradients(parameters)
        for parameter in parameters:
            parameter.grad *= self.size

    return _with_ranks(port, average_gradients=average_gradients)


def lonely(port: Port) -> Update:
    """A trainer whose processes keep their gradients to themselves."""
    return _with_ranks(port, average_gradients=lambda self, parameters: None)


def repeating(port: Port) -> Update:
    """A trainer each of whose processes takes the first share."""
    return _with_ranks(port, share=lambda self, count: range(0, count, self.size))


def alike(port: Port) -> Update:
    """A trainer whose processes draw the same noise for different prompts."""
    update: Any = _own(port)
    learn = update.begin

    def begin(plan: Any) -> None:
        learn(plan)
        loop = code(port).loop
        if not hasattr(loop, "_noise_of"):
            loop._noise_of = loop.noise_of
        size, proper = update.run.ranks.size, loop._noise_of

        def noise_of(run: Any, purpose: str, count: int) -> Any:
            head, _, place = purpose.rpartition("/")
            return proper(run, f"{head}/{int(place) // size}" if head.startswith("train/") else purpose, count)

        loop.noise_of = noise_of

    update.begin = begin
    return update


def _trainer(port: Port, make: Callable[[Port], Update]) -> AbstractContextManager[Any]:
    return inject.assign(port, "trainer", f"{make.__module__}:{make.__name__}")


@fault(*SEAMS, catches=[PROCESSES], unless=another_trainer)
def gradients_of_processes_are_summed(port: Port) -> Iterator[None]:
    """Gradients are added up over processes and not divided: the step grows with their number."""
    with _trainer(port, summing):
        yield


@fault(*SEAMS, catches=[PROCESSES], source="huggingface/accelerate #3256", unless=another_trainer)
def processes_keep_their_gradients(port: Port) -> Iterator[None]:
    """Gradients are not exchanged: every process trains a policy of its own."""
    with _trainer(port, lonely):
        yield


@fault(*SEAMS, catches=[PROCESSES], source="lingbot-vla-v2 #41", unless=another_trainer)
def processes_train_on_the_same_draws(port: Port) -> Iterator[None]:
    """Every process takes the first process's share of the prompts, with the same noise."""
    with _trainer(port, repeating):
        yield


@fault(*SEAMS, catches=[PROCESSES], source="verl-omni commit e71e6579 (#60); lingbot-vla-v2 #41", unless=another_trainer)
def processes_draw_the_same_noise(port: Port) -> Iterator[None]:
    """The training noise of every process comes from the same seed."""
    with _trainer(port, alike):
        yield
