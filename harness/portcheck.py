"""The first check of all: each method of each seam that a port offers, once, on the smallest case.

It asks only for the contract of `loudfail.harness.port` (keys, shapes, dtypes, finite values, device), not whether the values are right. Where
it fails nothing else is run, since one broken primitive would fail in sixty places.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from typing import Any

from loudfail.harness.case import Case, smallest
from loudfail.harness.port import SEAMS, Conditions, Port, Rollout, RowTable, Trajectory, Update, offers, random_adapter
from loudfail.harness.violation import Unavailable, show

#: Model calls of a grid or loop, and columns of a probe, that are tried here.
CALLS, PROBES = 2, 3


class PortProblem(Exception):
    """A method of the port breaks its contract; the message names the method and what was wrong.

    Attributes:
        details: traceback of an exception that the port raised, or empty.
    """

    details: str = ""


def missing_methods(port: Port | type[Port]) -> dict[str, list[str]]:
    """Seam → the methods that the port would have to add to offer it; empty for a seam that it offers."""
    cls = port if isinstance(port, type) else type(port)
    return {seam: [m for m in methods if getattr(cls, m, None) is getattr(Port, m, None)] for seam, methods in SEAMS.items()}


def misspelt_methods(cls: type[Port]) -> list[str]:
    """What a port defines that no port has, and is spelt almost like a method that it lacks: a sentence each."""
    own = {name for one in cls.__mro__ if one not in Port.__mro__ for name, value in vars(one).items() if callable(value)} - set(dir(Port))
    lacking = dict.fromkeys(m for methods in missing_methods(cls).values() for m in methods)
    close = {method: difflib.get_close_matches(method, own, n=1, cutoff=0.85) for method in lacking}
    return [f"{cls.__name__} has {near[0]}, which no check calls, and lacks {method}" for method, near in close.items() if near]


def check_port(port: Port) -> None:
    """Check everything but the rollout's side.

    Raises:
        PortProblem: the first thing that is wrong.
    """
    cls = type(port).__name__
    with _calling(cls):
        _need(bool(port.modalities), f"{cls}.modalities is empty; name what is generated, such as ('video', 'audio')")
        _need(bool(port.givens), f"{cls}.givens is empty; () is the mode without given conditions")
        _need(all(len(sizes) for sizes in port.extents.values()), f"{cls}.extents has an axis without sizes")
    missing = missing_methods(port)
    if all(missing.values()):
        hint = f"; the objective lacks {', '.join(missing['objective'])}"
        raise PortProblem(f"{cls} offers no seam{hint}. Override the methods of one, see loudfail.harness.port.Port")
    case = smallest(port, prompts=("a bell rings twice", "rain"))
    if offers(port, "objective"):
        latents, sigmas, conditions = _check_objective(port, case)
        if offers(port, "packing"):
            _check_packing(port, case, latents, sigmas, conditions)
        if offers(port, "vendor"):
            _check_vendor(port, latents, conditions)
        if offers(port, "adapter"):
            _check_adapter(port)
    if offers(port, "prompt"):
        _check_prompt(port)
    if offers(port, "condition"):
        _check_condition(port, case)
    if offers(port, "reference"):
        with _calling("reference_prompt"):
            _check_ids("reference_prompt()", port.reference_prompt("a bell rings"))
        _check_presented(port, "reference_conditions")
    if offers(port, "trained"):
        _check_trained(port)
    if offers(port, "update"):
        _check_update(port)
    if offers(port, "media") and offers(port, "objective"):
        _check_media(port, case, latents)


def check_rollout(port: Port) -> None:
    """Check what the rollout's side makes of prompts and given conditions: apart from `check_port`, since it may have much to import first.

    Raises:
        PortProblem: the first thing that is wrong.
    """
    if offers(port, "prompt"):
        with _calling("rollout_prompt"):
            try:
                arrived, rolled = port.rollout_prompt(port.tokenize("a bell rings"))
            except Unavailable:  # no engine here: the checks that need it say so themselves
                return
            _need(isinstance(arrived, tuple), f"rollout_prompt() gave ids as {type(arrived).__name__}; want a tuple of integers")
            _check_tensor("rollout_prompt() embedding", rolled, port, shape=None, axes=2)
    if offers(port, "presentation"):
        _check_presented(port, "rollout_conditions")


def check_engine(port: Port, degree: int) -> None:
    """Check the engine at one degree; it stays built.

    Raises:
        PortProblem: the first thing that is wrong.
        Unavailable: there is no engine on this machine.
    """
    with _calling(f"engine({degree})"):
        engine = port.engine(degree)
        _need(port.engine(degree) is engine, f"engine({degree}) makes another one at each call; make it once and keep it")
    wanted = [name for name in vars(Rollout) if not name.startswith("_") and callable(getattr(Rollout, name))]
    lacking = [name for name in wanted if not callable(getattr(engine, name, None))]
    _need(not lacking, f"engine({degree}) lacks {', '.join(lacking)}; see loudfail.harness.port.Rollout")
    if not offers(port, "objective"):
        return
    case = smallest(port)
    latents, sigmas, conditions = case.normal("noise", port.shapes(case)), case.sigmas("sigma", port.modalities), port.conditions(case)
    with _calling(f"engine({degree}).velocity"):
        _check_latents(f"engine({degree}).velocity", engine.velocity(latents, sigmas, conditions), latents, port)
    if offers(port, "adapter"):
        with _calling(f"engine({degree}).set_adapter"):
            report = engine.set_adapter(random_adapter(port, port.adapter, 1), port.adapter, 1)
            _need(report.version == 1, f"engine({degree}).set_adapter(version=1) reports version {report.version}")
        added: Mapping[str, Any] = {}
        with suppress(Exception):  # an adapter that arrived in part may break it: the checks that ask it say so, the others still run
            added = engine.delta_response(PROBES, 1)
        with _calling(f"engine({degree}).delta_response"):
            for name, value in added.items():
                want = (port.projections().get(name, value.shape)[0], PROBES)
                what = f"engine({degree}).delta_response()[{name!r}]"
                _need(tuple(value.shape) == want, f"{what} has shape {tuple(value.shape)}; want {want}")
        with _calling(f"engine({degree}).remove_adapter"):
            engine.remove_adapter()


def _check_objective(port: Port, case: Case) -> tuple[dict[str, Any], dict[str, Any], list[Conditions]]:
    with _calling("shapes"):
        shapes = port.shapes(case)
        _check_keys("shapes", shapes, port.modalities)
        for modality, shape in shapes.items():
            good = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
            _need(good, f"shapes()[{modality!r}] is {show(shape)}; want a tuple of positive integers, the batch left out")
    with _calling("conditions"):
        conditions = port.conditions(case)
        _need(len(conditions) == case.batch, f"conditions() gave {len(conditions)} for {case.batch} samples")
        for index, one in enumerate(conditions):
            _need(isinstance(one, Conditions), f"conditions()[{index}] is a {type(one).__name__}; want loudfail.harness.port.Conditions")
            _check_tensor(f"conditions()[{index}].embeds", one.embeds, port, shape=None, axes=2)
    with _calling("grid"):
        grid = port.grid(CALLS)
        _check_keys("grid", grid, port.modalities)
        for modality, points in grid.items():
            _check_tensor(f"grid({CALLS})[{modality!r}]", points, port, shape=(CALLS + 1,))
    latents, sigmas = case.normal("noise", shapes), case.sigmas("sigma", port.modalities)
    with _calling("predict_velocity"):
        _check_latents("predict_velocity", port.predict_velocity(latents, sigmas, conditions), latents, port)
    return latents, sigmas, conditions


def _check_packing(port: Port, case: Case, latents: Mapping[str, Any], sigmas: Mapping[str, Any], conditions: Sequence[Conditions]) -> None:
    with _calling("pack"):
        rows = port.pack(latents)
        _check_keys("pack", rows, port.modalities)
        for modality, value in rows.items():
            _check_tensor(f"pack()[{modality!r}]", value, port, shape=None, axes=3)
            _need(value.shape[0] == case.batch, f"pack()[{modality!r}] has {value.shape[0]} samples, not {case.batch}")
    with _calling("unpack"):
        _check_latents("unpack", port.unpack(rows, case), latents, port)
    with _calling("observe"):
        velocity, tables = port.observe(latents, sigmas, conditions)
        _check_latents("observe", velocity, latents, port)
        _need(len(tables) == case.batch, f"observe() gave {len(tables)} tables for {case.batch} samples")
        for table in tables:
            _need(isinstance(table, RowTable), f"observe() gave a {type(table).__name__}; want loudfail.harness.port.RowTable")
            lengths = {"modality": len(table.modality), "given": len(table.given), "sigma": len(table.sigma), "position": len(table.position)}
            _need(len(set(lengths.values())) == 1, f"observe(): the columns of a RowTable differ in length: {lengths}")
            for modality in port.modalities:
                _need(modality in table.values, f"observe(): RowTable.values lacks {modality}")
                has, meant = len(table.values[modality]), table.modality.count(modality)
                _need(has == meant, f"observe(): RowTable.values[{modality!r}] has {has} rows, RowTable.modality {meant}, given ones counted")


def _check_vendor(port: Port, latents: Mapping[str, Any], conditions: Sequence[Conditions]) -> None:
    with _calling("vendor_grid"):
        grid = port.vendor_grid(CALLS)
        _check_keys("vendor_grid", grid, port.modalities)
        for modality, points in grid.items():
            _check_tensor(f"vendor_grid({CALLS})[{modality!r}]", points, port, shape=(CALLS + 1,), dtype=None)
    with _calling("vendor_rollout"):
        trajectory = port.vendor_rollout(latents, CALLS, conditions)
        _need(isinstance(trajectory, Trajectory), f"vendor_rollout() gave a {type(trajectory).__name__}; want loudfail.harness.port.Trajectory")
        _need(len(trajectory.steps) == CALLS, f"vendor_rollout() recorded {len(trajectory.steps)} steps for {CALLS} model calls")
        _check_latents("vendor_rollout().final", trajectory.final, latents, port)


def _check_adapter(port: Port) -> None:
    with _calling("projections"):
        projections = port.projections()
        _need(bool(projections), f"projections() is empty; nothing of the actor matches the targets {port.adapter.targets}")
    with _calling("adapter_names"):
        _need("default" in port.adapter_names(), f"adapter_names() is {port.adapter_names()}; an adapter 'default' must be there from the start")
    with _calling("adapter_state"):
        before = port.adapter_state("default")
        wanted = {f"{name}.lora_{part}.weight" for name in projections for part in "AB"}
        _check_keys("adapter_state", before, sorted(wanted))
        for name, value in before.items():
            _check_tensor(f"adapter_state()[{name!r}]", value, port, shape=None, axes=2)
    with _calling("add_adapter"):
        port.add_adapter("default", port.adapter)
        _check_keys("adapter_state", port.adapter_state("default"), sorted(wanted))
    with _calling("load_adapter"):
        port.load_adapter("default", before)
    with _calling("select_trainable"):
        port.select_trainable("default")
    with _calling("trainable"):
        names = list(port.trainable())
        _need(bool(names), "trainable() is empty after select_trainable('default')")
        factors = any(factor in name for name in names for factor in ("lora_A", "lora_B"))
        _need(factors, f"trainable() names {names[0]!r}; the factors of an adapter have lora_A or lora_B and the adapter in their names")
    with _calling("using"), port.using(None), port.using("default"):
        pass
    with _calling("base_state"):
        state = port.base_state()
        _need(bool(state), "base_state() is empty")
        lora = [name for name in state if "lora" in name.lower()]
        _need(not lora, f"base_state() has adapter weights in it: {', '.join(lora[:3])}")


def _check_prompt(port: Port) -> None:
    with _calling("tokenize"):
        ids = port.tokenize("a bell rings")
        _check_ids("tokenize()", ids)
    with _calling("encode_prompt"):
        embeds = port.encode_prompt(ids)
        _check_tensor("encode_prompt()", embeds, port, shape=None, axes=2)


def _check_condition(port: Port, case: Case) -> None:
    fullest = max(port.givens, key=len)
    with _calling("given_latents"):
        given = port.given_latents(smallest(port, prompts=case.prompts, given=fullest))
        _need(len(given) == case.batch, f"given_latents() gave {len(given)} for {case.batch} samples")
        for one in given:
            _check_keys("given_latents", one, fullest)
            for name, value in one.items():
                _check_tensor(f"given_latents()[{name!r}]", value, port, shape=None)


def _check_presented(port: Port, method: str) -> None:
    """`reference_conditions` or `rollout_conditions`, in the fullest mode."""
    case = smallest(port, prompts=("a bell rings twice", "rain"), given=max(port.givens, key=len))
    with _calling(method):
        try:
            conditions = getattr(port, method)(case)
        except Unavailable:
            return
        _need(len(conditions) == case.batch, f"{method}() gave {len(conditions)} for {case.batch} samples")
        for index, one in enumerate(conditions):
            _need(isinstance(one, Conditions), f"{method}()[{index}] is a {type(one).__name__}; want loudfail.harness.port.Conditions")
            _check_tensor(f"{method}()[{index}].embeds", one.embeds, port, shape=None, axes=2)


def _check_ids(name: str, value: Any) -> None:
    good = isinstance(value, tuple) and bool(value) and all(type(one) is int for one in value)
    _need(good, f"{name} gave {show(value)}; want a tuple of integers")


def _check_trained(port: Port) -> None:
    with _calling("trained_batch"):
        try:
            clean, conditions = port.trained_batch(0, 2)
        except Unavailable:
            return
        _check_keys("trained_batch", clean, port.modalities)
        for modality, value in clean.items():
            _check_tensor(f"trained_batch()[{modality!r}]", value, port, shape=None)
            _need(value.shape[0] == 2 == len(conditions), f"trained_batch(0, 2) gave {value.shape[0]} samples and {len(conditions)} conditions")


def _check_update(port: Port) -> None:
    with _calling("update"):
        try:
            update = port.update()
        except Unavailable:
            return
        _need(isinstance(update, Update), f"update() gave a {type(update).__name__}; want a loudfail.harness.port.Update")


def _check_media(port: Port, case: Case, latents: Mapping[str, Any]) -> None:
    with _calling("decode"):
        try:
            media = port.decode(latents)
        except Unavailable:
            return
        _need(len(media) == case.batch, f"decode() gave {len(media)} items for {case.batch} samples")
        for item in media:
            kind = type(item).__name__
            _need(is_dataclass(item) and not isinstance(item, type), f"decode() gave a {kind}; want a dataclass with a part for each modality")
            lacking = [modality for modality in port.modalities if not hasattr(item, modality)]
            _need(not lacking, f"decode(): {kind} lacks {', '.join(lacking)}")
    if offers(port, "reward"):
        with _calling("reward"):
            try:
                reward = port.reward()
            except Unavailable:
                return
            _need(port.reward() is reward, "reward() makes another one at each call; make it once and keep it")
        with _calling("reward().score"):
            scores = reward.score(media, case.prompts)
            _check_keys("reward().score", scores, list(reward.outputs))
            for name, value in scores.items():
                _check_tensor(f"reward().score()[{name!r}]", value, port, shape=(case.batch,), dtype=None)


@contextmanager
def _calling(method: str) -> Iterator[None]:
    """Turn whatever the port raises into a `PortProblem` that names the method."""
    try:
        yield
    except (PortProblem, Unavailable):
        raise
    except Exception as error:
        problem = PortProblem(f"{method if method.endswith(')') else method + '()'} raised {type(error).__name__}: {_last_line(error)}")
        problem.details = traceback.format_exc()
        raise problem from error


def _last_line(error: Exception) -> str:
    """The last line of a message: of a rank's traceback, the error itself."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return show(f"{lines[0]}: {lines[-1]}" if len(lines) > 1 else (lines[0] if lines else "(no message)"))


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise PortProblem(message)


def _check_keys(method: str, value: Any, keys: Sequence[str]) -> None:
    _need(isinstance(value, Mapping), f"{method}() gave a {type(value).__name__}; want a dictionary")
    missing, extra = [k for k in keys if k not in value], [k for k in value if k not in keys]
    wrong = "; ".join(f"{word} {', '.join(map(str, names[:3]))}" for word, names in (("lacks", missing), ("has unknown", extra)) if names)
    _need(not wrong, f"{method}() {wrong}")


def _check_latents(method: str, value: Any, like: Mapping[str, Any], port: Port) -> None:
    _check_keys(method, value, list(like))
    for modality, tensor in value.items():
        _check_tensor(f"{method}()[{modality!r}]", tensor, port, shape=tuple(like[modality].shape))


def _check_tensor(
    name: str, value: Any, port: Port, *, shape: tuple[int, ...] | None, axes: int | None = None, dtype: str | None = "float32"
) -> None:
    """``shape`` exactly or, where it is None, the number of axes; ``dtype`` None is any floating one."""
    import torch

    _need(isinstance(value, torch.Tensor), f"{name} is a {type(value).__name__}; want a tensor")
    if shape is not None:
        _need(tuple(value.shape) == shape, f"{name} has shape {tuple(value.shape)}; want {shape}")
    elif axes is not None:
        _need(value.ndim == axes, f"{name} has shape {tuple(value.shape)}; want {axes} axes")
    right = value.is_floating_point() if dtype is None else value.dtype == getattr(torch, dtype)
    _need(right, f"{name} is {value.dtype}; want {f'torch.{dtype}' if dtype else 'a floating dtype'}")
    _need(value.device.type in ("cpu", port.device), f"{name} is on {value.device}; want {' or '.join({port.device: 0, 'cpu': 0})}")
    bad = int((~torch.isfinite(value)).sum())
    _need(bad == 0, f"{name} has {bad} of {value.numel()} values that are not finite")
