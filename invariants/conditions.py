"""Given frames: fixed, clean, in their own place, heard, and outside loss and gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loudfail.harness.case import Case, cases, smallest
from loudfail.harness.compare import relative_error, require, require_at_least, require_close, require_each_close, require_equal
from loudfail.harness.port import Port, RowTable, no_grad, offers
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Uncovered
from loudfail.invariants.prompts import require_conditions, require_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy


def with_given(least: int, most: int) -> Callable[[Port], SearchStrategy[Case]]:
    """Strategy of cases in which something is given."""

    def build(port: Port) -> SearchStrategy[Case]:
        if not any(port.givens):
            raise Uncovered(f"port {port.name!r} has no given frames")
        return cases(batch=(least, most))(port).filter(lambda case: bool(case.given))

    return build


def inputs(port: Port, case: Case) -> tuple:
    """Latents, levels well inside (0, 1), and conditions."""
    return case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities, low=0.3, high=0.95), port.conditions(case)


def given_rows(table: RowTable) -> tuple[str, torch.Tensor]:
    """The modality that has given rows, and those rows.

    Raises:
        Violation: there are none.
    """
    found = [m for m in table.values if bool(table.given_of(m).any())]
    require(len(found) == 1, got=f"given rows in {found}", want="given rows in one modality", where="sequence")
    return found[0], table.values[found[0]][table.given_of(found[0])].float()


@invariant("objective", "packing", "condition", examples=4, case=with_given(1, 2))
def given_rows_are_the_same_at_every_level_and_call(port: Port, case: Case) -> None:
    """The given rows that enter the model are the same bits at every sigma, for any latents, call after call.

    They are restored at every step, not denoised along: sees given frames that are noised at the current level or drawn anew.
    """
    latents, sigmas, conditions = inputs(port, case)
    with no_grad():
        _, first = port.observe(latents, sigmas, conditions)
        _, second = port.observe(case.normal("other", port.shapes(case)), case.sigmas("other", port.modalities), conditions)
        _, third = port.observe(latents, sigmas, port.conditions(case))
    for index in range(case.batch):
        for when, tables in (("other latents and level", second), ("asked again", third)):
            require_equal(given_rows(tables[index])[1], given_rows(first[index])[1], where=f"sample {index}, given {case.given}, {when}")


@invariant("objective", "packing", "condition", examples=4, case=with_given(2, 2))
def given_rows_hold_the_clean_frames_of_their_own_sample(port: Port, case: Case) -> None:
    """The given rows hold the packed clean latents of that sample, frame after frame in the order of the names, up to the level of their mixing.

    Oracle: the given latents of the case. Sees frames that are dropped, zeroed, noised, exchanged with each other or with another sample's.
    """
    latents, sigmas, conditions = inputs(port, case)
    with no_grad():
        _, tables = port.observe(latents, sigmas, conditions)
    for index, clean in enumerate(port.given_latents(case)):
        modality, rows = given_rows(tables[index])
        blocks = []
        for name in conditions[index].given:
            frame = {m: v[index : index + 1] for m, v in latents.items()} | {modality: clean[name][None]}
            blocks.append(port.pack(frame)[modality][0])
        want = torch.cat(blocks).to(rows)
        bound = max(15 * 2**0.5 * port.given_sigma, port.bound(float32=1e-5, bfloat16=3e-2))  # mixing at that level moves unit latents by √2 of it
        require_close(rows, want, bound=bound, where=f"sample {index}, given {case.given}")


@invariant("objective", "packing", "condition", scales=BOTH, examples=5, case=with_given(1, 3))
def given_rows_are_told_that_they_are_clean(port: Port, case: Case) -> None:
    """Given rows are told at most the level that they are held at, never the level of the generated rows.

    Labelled with the generated rows' level, a clean frame is taken for a noisy one and the anchor fades. Oracle: the level published for given
    frames.
    """
    _, tables = _observe(port, case)
    for index, table in enumerate(tables):
        modality, _ = given_rows(table)
        told = table.sigma_of(modality)[table.given_of(modality)].double()
        excess = (told - port.given_sigma).clamp(min=0)
        require_close(excess, torch.zeros_like(excess), bound=6e-7, scale=len(told) ** 0.5, where=f"sample {index}, given {case.given}")


def _observe(port: Port, case: Case) -> tuple:
    with no_grad():
        return port.observe(*inputs(port, case))


@invariant("objective", "packing", "condition", examples=4, case=with_given(1, 2))
def the_loss_reaches_generated_rows_and_no_given_row(port: Port, case: Case) -> None:
    """The gradient of a loss on the velocity is exactly zero on the raw output of given rows and not zero on that of any generated row.

    Given frames are no prediction: in the loss they teach the model to repeat its input, and the loss falls. Sees given rows in the velocity, and a
    slice that is off by them, which also drops as many generated rows. Gradients are read off the model's raw output.
    """
    latents, sigmas, conditions = inputs(port, case)
    with torch.enable_grad():
        velocity, tables = port.observe(latents, sigmas, conditions)
        for modality, shape in port.shapes(case).items():
            want = (case.batch, *shape)
            require(tuple(velocity[modality].shape) == want, got=tuple(velocity[modality].shape), want=want, where=modality)
        if not any(v.requires_grad for v in velocity.values()) and not offers(port, "adapter"):
            raise Uncovered(f"nothing of the actor of port {port.name!r} requires a gradient; add the seam adapter")
        torch.stack([v.float().square().sum() for v in velocity.values()]).sum().backward()
    for index, table in enumerate(tables):
        for modality in port.modalities:
            output = table.output[modality]
            require(output.grad is not None, got="no gradient", want="a gradient on RowTable.output, not on a slice or copy of it", where=modality)
            grad = output.grad
            assert grad is not None  # for the type checker
            if output.ndim == 3:
                place = table.output.get("sample")
                require(place is not None or len(grad) == 1, got="none", want='the place in the batch, RowTable.output["sample"]', where=modality)
                grad = grad[0 if place is None else int(place)]
            size = grad.abs().sum(dim=-1).cpu()
            given = table.given_of(modality)
            where = f"sample {index}, {modality}, given {case.given}"
            if len(size) == int((~given).sum()):  # the model has no output for given rows
                given = given[~given]
            want_rows = f"{len(given)}, or {int((~given).sum())} without the given ones"
            require(len(size) == len(given), got=f"{len(size)} output rows", want=want_rows, where=where)
            require(int((size[given] != 0).sum()) == 0, got=f"{int((size[given] != 0).sum())} given rows in the loss", want="none", where=where)
            require(
                int((size[~given] == 0).sum()) == 0, got=f"{int((size[~given] == 0).sum())} generated rows without loss", want="none", where=where
            )
    for parameter in port.trainable().values() if hasattr(port, "trainable") else ():
        parameter.grad = None


def _blocks(port: Port, case: Case) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """For each sample: name → positions of its given rows, and the positions of the generated rows of that modality."""
    _, tables = _observe(port, case)
    result = []
    for condition, table in zip(port.conditions(case), tables, strict=True):
        modality, _ = given_rows(table)
        mine = torch.tensor([m == modality for m in table.modality])
        pieces = table.position[mine & table.given].chunk(len(condition.given))
        result.append((dict(zip(condition.given, pieces, strict=True)), table.position[mine & ~table.given]))
    return result


@invariant("objective", "packing", "condition", examples=4, case=with_given(1, 2))
def first_and_last_stand_at_the_ends_of_the_clip(port: Port, case: Case) -> None:
    """A given first frame stands where the first generated frame does, or just before it where it takes its place; a last frame at the other end.

    Oracle: the positions of the generated rows. Sees anchors that are exchanged, and a last frame that is taken for a first one because it is alone.
    """
    for index, (given, generated) in enumerate(_blocks(port, case)):
        begin, end = float(generated[:, 0].min()), float(generated[:, 0].max())
        for name, place in given.items():
            where = f"sample {index}, {name} of {case.given}"
            times = place[:, 0]
            if name == "first":
                frame = generated[generated[:, 0] == begin]
                if port.given_replaces:
                    require(bool((times < begin).all()), got=times.unique().tolist(), want=f"one time before {begin}", where=where)
                    require(times.unique().numel() == 1, got=times.unique().tolist(), want="one time", where=where)
                else:
                    require(bool((times == begin).all()), got=times.unique().tolist(), want=f"time {begin}", where=where)
                require_equal(place[:, 1:], frame[:, 1:], where=f"{where}, coordinates within the frame")
            elif name == "last":
                require(bool((times >= end).all()), got=times.unique().tolist(), want=f"time {end} or later", where=where)
                require_equal(place[:, 1:], generated[generated[:, 0] == end][:, 1:], where=f"{where}, coordinates within the frame")
            else:
                raise Uncovered(f"no end of the clip is known for a given {name!r}")


@invariant("objective", "packing", "condition", examples=3, case=with_given(1, 1))
def each_request_keeps_its_own_anchors(port: Port, case: Case) -> None:
    """A given frame stands at the same place of the clip whether it is given alone or together with others.

    Identity that is carried by the index in a list pins the wrong end when only the last frame is given.
    """
    everything = max(port.givens, key=len)
    if sum(map(bool, port.givens)) < 2:
        raise Uncovered(f"port {port.name!r} has one way to give frames; there is no other to compare with")

    def anchors(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        given, generated = _blocks(port, Case(case.seed, case.extent, case.prompts, names))[0]
        start = torch.zeros(generated.shape[1], dtype=torch.float64)
        start[0] = generated[:, 0].min()  # frames that a text encoder is shown lengthen the prompt and move the clock
        return {name: place.double() - start for name, place in given.items()}

    together = anchors(everything)
    require(set(together) == set(everything), got=sorted(together), want=sorted(everything), where="names")
    for names in port.givens:
        if names:
            for name, place in anchors(names).items():
                require_close(place, together[name], bound=1e-6, scale=1.0, where=f"{name} of {names}")


@invariant("objective", "condition", examples=4, case=with_given(1, 2))
def the_given_frames_are_heard_in_every_modality(port: Port, case: Case) -> None:
    """Other given frames give another velocity, in every modality, for each of the frames.

    A frame that is carried along but never enters the model leaves everything finite. Does not see how much it should matter: the vendor's loop does.
    """
    latents, sigmas, conditions = inputs(port, case)
    others = port.conditions(Case(case.seed + 1, case.extent, case.prompts, case.given))
    # A text encoder that is shown the frames hears them too; here only the frames in the sequence change.
    others = [replace(other, prompt_ids=mine.prompt_ids, embeds=mine.embeds) for other, mine in zip(others, conditions, strict=True)]
    with no_grad():
        first, second = port.predict_velocity(latents, sigmas, conditions), port.predict_velocity(latents, sigmas, others)
    for modality in port.modalities:
        for index in range(case.batch):
            change = relative_error(second[modality][index], first[modality][index])
            require_at_least(change, port.bound(float32=1e-4, bfloat16=1e-4), where=f"{modality}, sample {index}, given {case.given}")


@invariant("objective", "vendor", "condition", examples=3, case=with_given(2, 2))
def the_vendors_loop_is_followed_with_given_frames(port: Port, case: Case) -> None:
    """With given frames, the port's velocity moves the latents at every call as the vendor's own loop does.

    The vendor puts the frames in front, labels them and restores them itself. The same claim as for text alone, never skipped by the draw.
    """
    conditions = port.conditions(case)
    for index, step in enumerate(port.vendor_rollout(case.normal("noise", port.shapes(case)), 3, conditions).steps):
        with no_grad():
            got = port.predict_velocity(step.latents, step.sigmas, conditions)
        require_each_close(got, step.velocity, bound=port.bound(float32=2e-5, bfloat16=3e-5), where=f"call {index}, given {case.given}")


@invariant("objective", "vendor", "condition", "engine", "adapter")
def the_rollout_treats_given_frames_as_the_vendor_does(port: Port, tp: int) -> None:
    """For each condition mode, the rollout engine ends in the latents in which the vendor's loop ends, from the same noise and given frames.

    The engine has its own layout, labels and restoring of given frames. Oracle: the vendor's loop on the actor. Sees a given frame that is denoised
    along, labelled with the generated rows' level, or anchored at the other end.
    """
    if not any(port.givens):
        raise Uncovered(f"port {port.name!r} has no given frames")
    engine = port.engine(tp)
    engine.remove_adapter()
    for seed, given in enumerate(names for names in port.givens if names):
        case = smallest(port, seed=seed, given=given)
        noise, conditions = case.normal("noise", port.shapes(case)), port.conditions(case)
        with port.using(None):
            want = port.vendor_rollout(noise, 3, conditions).final
        require_each_close(
            engine.rollout(noise, 3, conditions).final, want, bound=port.bound(float32=2e-5, bfloat16=8e-2), where=f"tp {tp}, given {given}"
        )


def _given_modes(port: Port) -> list[tuple[str, ...]]:
    if not any(port.givens):
        raise Uncovered(f"port {port.name!r} has no given frames")
    return [names for names in port.givens if names]


@invariant("objective", "condition", "reference", examples=2, case=cases(batch=(2, 2), given=False))
def given_frames_condition_the_model_as_in_the_vendors_pipeline(port: Port, case: Case) -> None:
    """In each condition mode, the conditions of each sample are those that the vendor's pipeline makes of its prompt string and its frames.

    Trainer and rollout are given the same conditions and cannot disagree. Sees frames with exchanged colours, shifted, mirrored, not normalized or in
    another order, for the autoencoder or the text encoder; rows with the wrong tag; noise of given frames that is missing, too strong or the same in
    every sample. Not what puts pictures of other sizes onto the canvas: checks give frames of the right size.
    """
    for given in _given_modes(port):
        one = replace(case, given=given)
        for index, (got, want) in enumerate(zip(port.conditions(one), port.reference_conditions(one), strict=True)):
            require_conditions(got, want, where=f"sample {index}, given {given}")


@invariant("prompt", "presentation", "reference", "engine", examples=2, case=cases(batch=(1, 1), given=False))
def the_rollouts_encoder_is_shown_the_given_frames(port: Port, case: Case) -> None:
    """In each condition mode, the rollout's text encoder gets the ids, tags and pictures that the vendor's does, and embeds them alike.

    The rollout presents frames with code of its own; a rollout that ignores them samples from the prompt alone while training conditions on both.
    Ids and tags are exact. Some rollouts round pixels, so the embedding is held against the effect of another sample's frames under the same prompt:
    clean 4e-3 of it, other pictures about 1. Oracle: the vendor's pipeline on the actor's encoder.
    """
    for given in _given_modes(port):
        one = replace(case, prompts=case.prompts * 2, given=given)
        wants = port.reference_conditions(one)
        scale = wants[0].embeds.float() - wants[1].embeds.float()
        for index, (got, want) in enumerate(zip(port.rollout_conditions(one), wants, strict=True)):
            where = f"sample {index}, given {given}"
            require(tuple(got.prompt_ids) == tuple(want.prompt_ids), got=list(got.prompt_ids), want=list(want.prompt_ids), where=where)
            for name in got.extra:
                # Another process may take another attention kernel (importing vLLM turns cuDNN's off), which bfloat16 shows.
                require_same(got.extra[name], want.extra[name], f"{where}, {name}", port.bound(float32=1e-6, bfloat16=2e-2))
            effect = scale if bool(scale.any()) else want.embeds  # an encoder may not be shown the frames at all
            require_close(got.embeds.float().cpu(), want.embeds.float(), bound=port.bound(float32=2e-2, bfloat16=2e-2), scale=effect, where=where)
