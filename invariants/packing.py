"""From latents to the rows that the model consumes, and back: values keep their place, their modality and their time."""

from __future__ import annotations

import torch

from loudfail.harness.case import Case, cases
from loudfail.harness.compare import require, require_equal
from loudfail.harness.port import Port, no_grad
from loudfail.harness.registry import BOTH, invariant
from loudfail.harness.violation import Uncovered


@invariant("objective", "packing", scales=BOTH, examples=10, case=cases(batch=(1, 3), given=False))
def unpacking_restores_every_value(port: Port, case: Case) -> None:
    """Unpacking what was packed gives the same latents, bit for bit, for any extent and batch.

    Address-valued latents: a transposed patch, a swapped axis or a row that moved shows at once, while normal noise would look plausible.
    Does not see packing and unpacking that are wrong in the same way: `the_vendors_loop_starts_from_the_noise_it_was_given` does.
    """
    latents = case.addresses(port.shapes(case))
    got = port.unpack(port.pack(latents), case)
    require(sorted(got) == sorted(latents), got=sorted(got), want=sorted(latents), where="modalities")
    for modality in latents:
        require_equal(got[modality], latents[modality], where=f"{modality}, {dict(case.extent)}")


@invariant("objective", "packing", scales=BOTH, examples=8, case=cases(batch=(1, 3), given=False))
def packing_moves_values_and_makes_none(port: Port, case: Case) -> None:
    """The rows of a sample hold exactly the values of that sample's latents, each once, in its own modality.

    Sees values that are rounded, scaled, padded, repeated, lost, or taken from another sample or modality.
    """
    latents = case.addresses(port.shapes(case))
    for modality, rows in port.pack(latents).items():
        require(rows.ndim == 3 and rows.shape[0] == case.batch, got=tuple(rows.shape), want="(batch, rows, width)", where=modality)
        for index in range(case.batch):
            got, want = rows[index].flatten().sort().values, latents[modality][index].flatten().sort().values
            require_equal(got, want, where=f"{modality}, sample {index} of {case.batch}")


@invariant("objective", "packing", "vendor", examples=6, case=cases(batch=(1, 2)))
def the_vendors_loop_starts_from_the_noise_it_was_given(port: Port, case: Case) -> None:
    """What the port unpacks from the rows that the vendor made of some noise is that noise, bit for bit.

    The vendor's own packing is the oracle of the port's unpacking, so that a round trip of two equal mistakes is seen: transposed patches,
    channel-major against time-major audio.
    """
    noise = case.addresses(port.shapes(case))
    first = port.vendor_rollout(noise, port.least_calls, port.conditions(case)).steps[0]
    for modality in port.modalities:
        require_equal(first.latents[modality].cpu(), noise[modality], where=f"{modality}, {dict(case.extent)}, given {case.given}")


@invariant("objective", "packing", scales=BOTH, examples=6, case=cases(batch=(1, 3)))
def the_model_sees_the_packed_rows_and_nothing_else(port: Port, case: Case) -> None:
    """The generated rows that enter the model are the packed latents of that sample, bit for bit and in order.

    Read off the model's input. Sees rows rolled or reordered after packing, another sample's rows, latents scaled on the way in.
    """
    latents = case.normal("latents", port.shapes(case))
    with no_grad():
        _, tables = port.observe(latents, case.sigmas("sigmas", port.modalities), port.conditions(case))
    packed = port.pack(latents)
    for index, table in enumerate(tables):
        for modality in port.modalities:
            seen = table.values[modality][~table.given_of(modality)]  # in the dtype in which the model is given it
            require_equal(seen, packed[modality][index].to(seen), where=f"{modality}, sample {index} of {case.batch}, given {case.given}")


@invariant("objective", "packing", scales=BOTH, examples=6, case=cases(batch=(1, 3)))
def every_row_is_counted_under_its_modality(port: Port, case: Case) -> None:
    """The sequence has a text row for each row of the embedding, the packed rows of each modality, and the given rows that their frames need.

    Sees prompts that are cut or padded, rows that are dropped or doubled, and given frames that were left out.
    """
    latents = case.normal("latents", port.shapes(case))
    conditions = port.conditions(case)
    with no_grad():
        _, tables = port.observe(latents, case.sigmas("sigmas", port.modalities), conditions)
    packed = port.pack(latents)
    for index, (table, condition) in enumerate(zip(tables, conditions, strict=True)):
        where = f"sample {index} of {case.batch}, given {case.given}"
        if "text" in table.modality:
            tokens = len(condition.embeds)
            require(table.modality.count("text") == tokens, got=f"{table.modality.count('text')} text rows", want=f"{tokens} rows", where=where)
        given = sum(latent.numel() for latent in condition.given.values())
        for modality in port.modalities:
            generated = int((~table.given_of(modality)).sum())
            require(
                generated == packed[modality].shape[1],
                got=f"{generated} rows",
                want=f"{packed[modality].shape[1]} rows",
                where=f"{where}, {modality}",
            )
            given -= int(table.given_of(modality).sum()) * packed[modality].shape[2]
        require(given == 0, got=f"{given} given values that no row holds", want="all of them", where=where)


@invariant("objective", "packing", examples=6, case=cases(batch=(1, 2)))
def rows_stand_in_the_order_of_their_time(port: Port, case: Case) -> None:
    """A row's time grows with the frame or audio step whose values it holds, is the same for rows of one step, and starts alike in all modalities.

    The latents hold the index of their step, so each row says itself when it is. Sees reversed or shuffled positions, audio rows ordered by another
    axis than their positions, and two modalities whose clocks start apart. Does not see a wrong pace: the other framework's velocity does.
    """
    if not port.time_axis:
        raise Uncovered(f"port {port.name!r} does not state the time axis of its latents")
    latents = {}
    for modality, shape in port.shapes(case).items():
        axis = port.time_axis[modality]
        steps = torch.arange(shape[axis], dtype=torch.float32).view(*[-1 if a == axis else 1 for a in range(len(shape))])
        latents[modality] = steps.expand(case.batch, *shape).contiguous()
    with no_grad():
        _, tables = port.observe(latents, case.sigmas("sigmas", port.modalities), port.conditions(case))
    for table in tables:
        starts = {}
        for modality in port.modalities:
            generated = torch.tensor([m == modality for m in table.modality]) & ~table.given
            times = table.position[generated, 0]
            values = table.values[modality][~table.given_of(modality)].float()
            step = values.min(dim=1).values
            for index in step.unique().tolist():
                spread = times[step == index]
                require(float(spread.max() - spread.min()) == 0, got=spread.unique().tolist(), want="one time", where=f"{modality}, step {index}")
            order = torch.stack([times[step == index][0] for index in step.unique().tolist()])
            require(bool((order[1:] > order[:-1]).all()), got=order.tolist(), want="ascending with the steps", where=modality)
            if port.given_replaces:  # a given first frame is the first of the clip
                times = table.position[torch.tensor([m == modality for m in table.modality]), 0]
            starts[modality] = float(times.min())
        require(len(set(starts.values())) == 1, got=starts, want="all modalities start at one time", where="clocks")


@invariant("objective", "packing", examples=4, case=cases(batch=(2, 3)))
def a_samples_layout_does_not_depend_on_its_neighbours(port: Port, case: Case) -> None:
    """Positions, modalities, given flags and levels of a sample's rows are the same alone as in a batch with longer and shorter prompts.

    Sees rotary positions that start after the longest prompt of the batch or go on counting from the sample before, and tables in another order.
    """
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with no_grad():
        _, together = port.observe(latents, sigmas, conditions)
        for index in range(case.batch):
            one = slice(index, index + 1)
            _, (alone,) = port.observe({m: v[one] for m, v in latents.items()}, {m: s[one] for m, s in sigmas.items()}, [conditions[index]])
            where = f"sample {index} of {case.batch}, {case.prompts}"
            require(together[index].modality == alone.modality, got=together[index].modality, want=alone.modality, where=where)
            require_equal(together[index].position, alone.position, where=f"{where}, positions")
            require_equal(together[index].given, alone.given, where=f"{where}, given")
            got, want = together[index].sigma.nan_to_num(nan=-1.0), alone.sigma.nan_to_num(nan=-1.0)  # NaN: a row that is told none
            require_equal(got, want, where=f"{where}, levels")
