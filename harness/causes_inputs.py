"""Mistakes of layout, prompts and given frames: experiments of `loudfail.harness.diagnose`."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from loudfail.harness.case import LONG_PROMPT, Case, smallest
from loudfail.harness.causes_velocity import rearrangements
from loudfail.harness.compare import relative_error
from loudfail.harness.diagnose import Diagnosis, Mistake, Trial
from loudfail.harness.port import offers

Values = Mapping[str, torch.Tensor]


# -- layout -----------------------------------------------------------------------------------------------------------------------------------------
def _moved(got: torch.Tensor, want: torch.Tensor) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """What may have happened to address-valued latents ``(B, *shape)``: cause, what, and how much of it is not explained by that."""

    def differing(x: torch.Tensor) -> float:
        return float((got != x).double().mean()) if x.shape == got.shape else math.inf

    yield "latents rounded", "rounded to bfloat16", lambda: differing(want.bfloat16().float())
    yield "one sample's rows for the batch", "those of sample 0 in every sample", lambda: differing(want[:1].expand_as(want))
    yield "samples in another order", "those of the next sample", lambda: differing(want.roll(-1, 0))
    for what, forth, _ in rearrangements(want):
        yield "layout", what, lambda forth=forth: differing(forth(want))  # type: ignore[misc]
    for axis in range(1, want.ndim):
        for other in range(1, want.ndim):
            if axis < other and want.shape[axis] % 2 == 0 and want.shape[other] % 2 == 0:
                text = f"with axes {axis - 1} and {other - 1} exchanged within patches of 2 × 2"
                yield "layout", text, lambda a=axis, b=other: differing(_patches_transposed(want, a, b))  # type: ignore[misc]
    total = sum(int(want[0].numel()) % k == 0 for k in (2, 3, 4))
    if total:
        text = "in another order within each sample"
        yield "layout", text, lambda: 0.0 if torch.equal(got.flatten(1).sort().values, want.flatten(1).sort().values) else math.inf


def _patches_transposed(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    moved = x.movedim((a, b), (-2, -1))
    *rest, h, w = moved.shape
    patches = moved.reshape(*rest, h // 2, 2, w // 2, 2).transpose(-1, -3)
    return patches.reshape(*rest, h, w).movedim((-2, -1), (a, b))


def _latents_moved(trial: Trial, got: Values, want: Values, who: str) -> Diagnosis | None:
    for modality, right in want.items():
        here = got[modality].detach().cpu().float()
        if here.shape != right.shape or torch.equal(here, right):
            continue
        found = [Mistake(cause, f"{who} {modality} {what}", error) for cause, what, error in _moved(here, right)]
        if one := trial.first(found, 0.0):
            return one
    return None


def round_trip(trial: Trial) -> Diagnosis | None:
    """Latents that were packed and unpacked, the rows between, and what the vendor makes of noise."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "packing")):
        return None
    case = Case(seed=21, extent={axis: max(sizes) for axis, sizes in port.extents.items()}, prompts=("rain", "a bell rings twice", "wind"))
    want = case.addresses(port.shapes(case))
    rows = {m: r.detach() for m, r in port.pack(want).items()}
    back = port.unpack(rows, case)
    for modality in want:
        if torch.equal(back[modality].cpu(), want[modality]):
            continue
        for shift in (1, -1, 2, -2):
            turned = port.unpack({**rows, modality: rows[modality].roll(shift, 1)}, case)[modality].cpu()
            if trial.says("rows rolled", torch.equal(turned, want[modality])):
                return trial.found(
                    "rows rolled", f"packed {modality} stands {abs(shift)} row{'s' * (abs(shift) > 1)} {'early' if shift > 0 else 'late'}"
                )
    if found := _latents_moved(trial, back, want, "packing and unpacking give"):
        return found
    if offers(port, "vendor"):
        conditions = port.conditions(case)
        first = port.vendor_rollout(want, port.least_calls, conditions).steps[0].latents
        return _latents_moved(trial, first, want, "as the port unpacks them, the vendor's rows hold")
    return None


def rows(trial: Trial) -> Diagnosis | None:
    """The rows that enter the model against the packed ones, their number, and their clocks."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "packing")):
        return None
    extent = {axis: max(sizes) for axis, sizes in port.extents.items()}
    case = Case(22, extent, ("rain", "a bell rings twice while a train passes", "wind"), max(port.givens, key=len))
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    with torch.no_grad():
        _, tables = port.observe(latents, sigmas, conditions)
    packed = port.pack(latents)
    for modality in port.modalities:
        seen = torch.stack([t.values[modality][~t.given_of(modality)].float().cpu() for t in tables])
        want = packed[modality].to(tables[0].values[modality].dtype).float().cpu()
        if torch.equal(seen, want):
            continue

        def off(change: Callable[[torch.Tensor], torch.Tensor], seen: torch.Tensor = seen, want: torch.Tensor = want) -> Callable[[], float]:
            return lambda: relative_error(seen, change(want))

        found = [
            Mistake("rows rolled", f"rows of {modality} enter the model 1 late", off(lambda x: x.roll(1, 1))),
            Mistake("rows rolled", f"rows of {modality} enter the model 1 early", off(lambda x: x.roll(-1, 1))),
            Mistake("rows rolled", f"rows of {modality} enter the model 2 late", off(lambda x: x.roll(2, 1))),
            Mistake("samples in another order", f"{modality} rows are the next sample's", off(lambda x: x.roll(-1, 0))),
            Mistake("rows reversed", f"{modality} rows enter the model in reverse", off(lambda x: x.flip(1))),
            Mistake("latents rounded", f"{modality} rows are rounded to bfloat16", off(lambda x: x.bfloat16().float())),
        ]
        if one := trial.first(found, 1e-7, relative_error(seen, want)):
            return one
        factor = float((seen * want).sum() / want.square().sum())
        if trial.fits("latents scaled", relative_error(seen, factor * want), 1e-6):
            return trial.found("latents scaled", f"{modality} rows enter the model {factor:.4g} times as large")
    for table, condition in zip(tables, conditions, strict=True):
        texts, tokens = table.modality.count("text"), len(condition.embeds)
        if texts and texts != tokens:
            cause = "prompt padded" if texts > tokens else "prompt truncated"
            if trial.says(cause, True):
                return trial.found(cause, f"the model has {texts} text rows for an embedding of {tokens}")
        if condition.given and trial.says("given frames dropped", not bool(table.given.any())):
            return trial.found("given frames dropped", f"no row of the model holds the given {', '.join(condition.given)}")
    with torch.no_grad():
        for i, condition in enumerate(conditions):
            here = slice(i, i + 1)
            _, (alone,) = port.observe({m: v[here] for m, v in latents.items()}, {m: s[here] for m, s in sigmas.items()}, [condition])
            there = tables[i].position
            if there.shape == alone.position.shape and trial.says("positions depend on the batch", not torch.equal(there, alone.position)):
                shift = (there - alone.position)[torch.tensor([m != "text" for m in alone.modality])]
                text = f"in a batch, the positions of sample {i} are moved on by up to {float(shift.abs().max()):g}"
                return trial.found("positions depend on the batch", text)
    return _clocks(trial)


def _clocks(trial: Trial) -> Diagnosis | None:
    """Times of rows against the steps of the latents that they hold."""
    port = trial.port
    if not port.time_axis:
        return None
    case = Case(seed=23, extent={axis: max(sizes) for axis, sizes in port.extents.items()})
    latents = {}
    for modality, shape in port.shapes(case).items():
        axis = port.time_axis[modality]
        steps = torch.arange(shape[axis], dtype=torch.float32).view(*[-1 if a == axis else 1 for a in range(len(shape))])
        latents[modality] = steps.expand(1, *shape).contiguous()
    with torch.no_grad():
        _, (table,) = port.observe(latents, case.sigmas("sigmas", port.modalities), port.conditions(case))
    starts: dict[str, float] = {}
    for modality in port.modalities:
        mine = torch.tensor([m == modality for m in table.modality]) & ~table.given
        times, steps = table.position[mine, 0], table.values[modality][~table.given_of(modality)].float().min(dim=1).values
        order = torch.stack([times[steps == step].min() for step in steps.unique()])
        if trial.says("time runs backwards", len(order) > 1 and bool((order[1:] < order[:-1]).all())):
            return trial.found("time runs backwards", f"the positions of {modality} descend while its frames go on")
        if trial.says("rows out of their time", any(len(times[steps == step].unique()) > 1 for step in steps.unique())):
            return trial.found("rows out of their time", f"rows of one step of {modality} have several times: rows and positions go by other axes")
        starts[modality] = float(times.min())
    first = min(starts.values())
    late = {m: t - first for m, t in starts.items() if t > first}
    if trial.says("clock starts late", bool(late)):
        return trial.found("clock starts late", f"the clock of {' and '.join(late)} starts {max(late.values()):g} after the others'")
    return None


# -- prompts ----------------------------------------------------------------------------------------------------------------------------------------
def _special_removed(text: str) -> str:
    return re.sub(r"<[|]?[a-z_]+[|]?>", "", text)


#: What is done to a text before it is tokenized: name, and the function.
EDITS: dict[str, Callable[[str], str]] = {
    "stripped": str.strip,
    "lower-cased": str.lower,
    "special tokens removed": _special_removed,
    "composed to NFC": lambda text: unicodedata.normalize("NFC", text),
    "decomposed to NFD": lambda text: unicodedata.normalize("NFD", text),
    "its white space joined": lambda text: " ".join(text.split()),
}
#: Texts in which one edit and no other shows, and one that is too long for usual windows.
TEXTS = ("  a bell rings\t\n ", "A Bell Rings", "a bell <|im_start|> rings <|endoftext|>", "cafe\u0301 and caf\u00e9", LONG_PROMPT)


def _ids(got: Sequence[int], want: Sequence[int]) -> tuple[str, str] | None:
    """What was done to ids: the cause, and a sentence; None where it is nothing known."""
    got, want = tuple(got), tuple(want)
    if len(got) < len(want):
        if got == want[: len(got)] and len(want) - len(got) == 1:
            return "last token missing", "the last token is missing"
        if got == want[1:]:
            return "first token missing", "the first token, which begins a text, is missing"
        if got == want[: len(got)]:
            return "prompt truncated", f"ids are cut at {len(got)} of {len(want)}"
        if got == want[-len(got) :]:
            return "prompt truncated", f"ids are cut to the last {len(got)} of {len(want)}"
    if len(got) > len(want):
        if got == (want[0], *want):
            return "first token doubled", "the first token stands there twice"
        if got == (*want, want[-1]):
            return "last token doubled", "the last token stands there twice"
        for start in range(len(got) - len(want) + 1):
            if got[start : start + len(want)] == want:
                if start and len(got) > start + len(want):
                    return "chat template", f"the ids stand inside {start} others before and {len(got) - start - len(want)} after: a template"
                before = start > 0
                return "tokens added", f"{len(got) - len(want)} tokens are added {'before' if before else 'after'} the ids"
    if any(got[start:] == want[: len(got) - start] for start in range(1, len(got) - len(want) // 2)):
        return "chat template", "the ids begin later, after others, and are cut: a template"
    if len(got) == len(want) and len(set(differences := [a - b for a, b in zip(got, want, strict=True)])) == 1 and differences[0]:
        return "ids shifted", f"every id is {differences[0]:+d} off"
    if got == want[::-1]:
        return "ids reversed", "the ids are in reverse"
    return None


def dataset_ids(trial: Trial) -> Diagnosis | None:
    """The dataset's ids of a text against those that the vendor's pipeline feeds its encoder, for texts that edits change differently."""
    port = trial.port
    if not (offers(port, "prompt") and offers(port, "reference")):
        return None
    got, want = {t: tuple(port.tokenize(t)) for t in TEXTS}, {t: port.reference_prompt(t) for t in TEXTS}
    wrong = [text for text in TEXTS if got[text] != want[text]]
    if not wrong:
        return None
    for what, edit in EDITS.items():
        if trial.says("text edited", all(got[t] == port.reference_prompt(edit(t)) for t in TEXTS if edit(t))):
            return trial.found("text edited", f"the dataset's ids are those of the text {what}")
        if trial.says("text not edited", all(want[t] == tuple(port.tokenize(edit(t))) for t in TEXTS if edit(t))):
            return trial.found("text not edited", f"the vendor's ids are those of the text {what}, the dataset's are not")
    return _same_for_all(trial, [_ids(got[t], want[t]) for t in wrong], "in the dataset ")


def _same_for_all(trial: Trial, found: Sequence[tuple[str, str] | None], who: str) -> Diagnosis | None:
    causes = {one[0] for one in found if one is not None}
    if None not in found and len(causes) == 1 and found[0] is not None and trial.says(cause := causes.pop(), True):
        return trial.found(cause, f"{who}{found[-1][1] if found[-1] else ''}")
    return None


def rollout_ids(trial: Trial) -> Diagnosis | None:
    """The ids at the rollout's encoder against the dataset's; ids of parts one after another are not those of the joined text."""
    port = trial.port
    if not offers(port, "prompt"):
        return None
    parts = ("t", "he", " a", "ra", "in", "be", "ll")
    long, split = tuple(port.tokenize(LONG_PROMPT))[:300], tuple(token for part in parts for token in port.tokenize(part))
    arrived = {ids: tuple(port.rollout_prompt(ids)[0]) for ids in (long, split)}
    wrong = [ids for ids, there in arrived.items() if there != ids]
    if not wrong:
        return None
    joined = tuple(port.tokenize("".join(parts)))
    if trial.says("decoded and tokenized again", wrong == [split] and arrived[split] == joined):
        return trial.found("decoded and tokenized again", "ids reach the rollout as those of the text that they spell")
    return _same_for_all(trial, [_ids(arrived[ids], ids) for ids in wrong], "at the rollout's encoder ")


def embedding(trial: Trial) -> Diagnosis | None:
    """The trainer's embedding of ids against the rollout's."""
    port = trial.port
    if not offers(port, "prompt"):
        return None
    ids = tuple(port.tokenize(LONG_PROMPT))[:40]
    got, want = port.encode_prompt(ids).float().cpu(), port.rollout_prompt(ids)[1].float().cpu()
    if got.shape == want.shape and relative_error(got, want) <= 1e-5:
        return None

    def zero_tail(longer: torch.Tensor, shorter: torch.Tensor) -> float:
        tail = longer[len(shorter) :]
        return math.inf if not len(tail) or bool(tail.any()) else relative_error(longer[: len(shorter)], shorter)

    mistakes = [
        Mistake("embedding reversed", "the trainer's embedding has its rows in reverse", lambda: relative_error(got, want.flip(0))),
        Mistake("embedding truncated", f"the trainer's embedding is cut at {len(got)} of {len(want)} rows", lambda: _prefix(got, want)),
        Mistake("embedding padded", f"the trainer's embedding has {len(got) - len(want)} rows of zeros after it", lambda: zero_tail(got, want)),
        Mistake("embedding constant", "the trainer's embedding has the same row for every token", lambda: _constant(got)),
        Mistake("embedding rounded", "the trainer's embedding is rounded to bfloat16", lambda: relative_error(got, want.bfloat16().float())),
        Mistake("embedding normalized", "the trainer's embedding is the rollout's, normalized row by row", lambda: _normalized(got, want)),
    ]
    return trial.first(mistakes, 1e-5, relative_error(got, want) if got.shape == want.shape else math.inf)


def _prefix(got: torch.Tensor, want: torch.Tensor) -> float:
    return relative_error(got, want[: len(got)]) if len(got) < len(want) else math.inf


def _constant(x: torch.Tensor) -> float:
    return float((x - x[:1]).norm() / x.norm()) if float(x.norm()) else math.inf


def _normalized(got: torch.Tensor, want: torch.Tensor) -> float:
    def rows(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / x.norm(dim=-1, keepdim=True)

    return relative_error(rows(got), rows(want)) if got.shape == want.shape else math.inf


def conditions(trial: Trial) -> Diagnosis | None:
    """The conditions of a batch against the embeddings of its prompts."""
    port = trial.port
    if not (offers(port, "prompt") and offers(port, "objective")):
        return None
    prompts = ("  Rain on the caf\u00e9's roof ", "a bell rings twice", "wind", LONG_PROMPT)
    case = smallest(port, seed=24, prompts=prompts)
    got = [c.embeds.float().cpu() for c in port.conditions(case)]

    def embeds(text: str) -> torch.Tensor:
        return port.encode_prompt(port.tokenize(text)).float().cpu()

    want = [embeds(prompt) for prompt in prompts]

    def error(others: Sequence[torch.Tensor]) -> float:
        return max(relative_error(g, o) if g.shape == o.shape else math.inf for g, o in zip(got, others, strict=True))

    if error(want) <= 1e-6:
        return None
    lengths = {len(g) for g, w in zip(got, want, strict=True) if len(g) < len(w)}
    mistakes = [
        Mistake("another sample's conditions", "the conditions of a batch are in reverse order", lambda: error(want[::-1])),
        Mistake("another sample's conditions", "samples get the next one's conditions", lambda: error([*want[1:], want[0]])),
        Mistake("another sample's conditions", "samples get the last one's conditions", lambda: error([want[-1], *want[:-1]])),
        Mistake("one sample's conditions for the batch", "every sample gets sample 0's conditions", lambda: error([want[0]] * len(want))),
    ]
    if len(lengths) == 1:
        cut = lengths.pop()
        text = f"conditions keep the first {cut} rows of an embedding"
        mistakes.append(Mistake("prompt truncated", text, lambda: error([w[:cut] for w in want])))

    def edited(edit: Callable[[str], str]) -> Callable[[], float]:
        return lambda: error([embeds(edit(prompt)) for prompt in prompts])

    mistakes += [Mistake("text edited", f"conditions are those of the text {what}", edited(edit)) for what, edit in EDITS.items()]
    return trial.first(mistakes, 1e-6)


def hearing(trial: Trial) -> Diagnosis | None:
    """Whether the prompt changes the velocity."""
    port = trial.port
    if not offers(port, "objective"):
        return None
    one, other = (smallest(port, seed=29, prompts=(prompt,)) for prompt in ("rain", "a bell rings twice"))
    latents, sigmas = one.normal("latents", port.shapes(one)), one.sigmas("sigmas", port.modalities)
    with torch.no_grad():
        first, second = (port.predict_velocity(latents, sigmas, port.conditions(case)) for case in (one, other))
    deaf = [m for m in first if torch.equal(first[m], second[m])]
    if trial.says("prompt missing", bool(deaf)):
        return trial.found("prompt missing", f"another prompt leaves the velocity of {' and '.join(deaf)} as it was")
    return None


# -- given frames -----------------------------------------------------------------------------------------------------------------------------
def given(trial: Trial) -> Diagnosis | None:
    """Given rows, read off the model's input, against the clean frames; and frames against the vendor's pipeline."""
    port = trial.port
    if not (offers(port, "objective") and offers(port, "packing") and offers(port, "condition") and any(port.givens)):
        return None
    case = smallest(port, seed=25, prompts=("rain", "a bell rings twice"), given=max(port.givens, key=len))
    latents, conditions_ = case.normal("latents", port.shapes(case)), port.conditions(case)
    low, high = (dict.fromkeys(port.modalities, torch.full((case.batch,), level)) for level in (0.3, 0.8))
    with torch.no_grad():
        tables, again = port.observe(latents, low, conditions_)[1], port.observe(latents, low, conditions_)[1]
        noisier = port.observe(latents, high, conditions_)[1]
    modality = next((m for m in port.modalities if bool(tables[0].given_of(m).any())), "")
    if trial.says("given frames dropped", not modality):
        return trial.found("given frames dropped", "no row of the model holds a given frame")

    def held(tables: Sequence[object]) -> list[torch.Tensor]:
        return [t.values[modality][t.given_of(modality)].float().cpu() for t in tables]  # type: ignore[attr-defined]

    rows_, told_ = held(tables), [t.sigma_of(modality)[t.given_of(modality)] for t in tables]
    if trial.says("given frames black", all(not bool(r.any()) for r in rows_)):
        return trial.found("given frames black", "given rows hold zeros")
    if trial.says("given frames noised anew", any(not torch.equal(a, b) for a, b in zip(rows_, held(again), strict=True))):
        return trial.found("given frames noised anew", "two equal calls hold other given rows: noise is drawn in the call")
    if trial.says("given frames noised", any(not torch.equal(a, b) for a, b in zip(rows_, held(noisier), strict=True))):
        return trial.found("given frames noised", "given rows change with the level of the generated ones: they are noised with the rest")
    if trial.says("given rows told the generated level", all(bool((t - 0.3).abs().max() < 1e-3) for t in told_)):
        return trial.found("given rows told the generated level", "given rows are told the level of the generated ones, 0.3, and are held clean")
    want = []
    for index, clean in enumerate(port.given_latents(case)):
        blocks = [{m: v[index : index + 1] for m, v in latents.items()} | {modality: clean[name][None]} for name in conditions_[index].given]
        want.append(torch.cat([port.pack(block)[modality][0] for block in blocks]).float().cpu())
    bound = max(15 * 2**0.5 * port.given_sigma, 1e-5)

    def error(others: Sequence[torch.Tensor]) -> float:
        return max(relative_error(a, b) if a.shape == b.shape else math.inf for a, b in zip(rows_, others, strict=True))

    if error(want) > bound:
        swapped = [torch.cat(w.chunk(len(case.given))[::-1]) for w in want]
        found = trial.first(
            [
                Mistake("another sample's frames", "samples hold each other's given frames", lambda: error(want[::-1])),
                Mistake("given frames exchanged", f"the given {' and '.join(case.given)} hold each other's frames", lambda: error(swapped)),
            ],
            bound,
        )
        if found or (found := _mixed(trial, modality)):
            return found
    return _ends(trial) or _referenced(trial)


def _mixed(trial: Trial, modality: str) -> Diagnosis | None:
    """Whether given rows are the clean frames and noise at one level, of which the share of the frames and the spread of the rest say the same."""
    port, held, clean = trial.port, list[torch.Tensor](), list[torch.Tensor]()
    for seed in range(16):
        case = Case(seed, {axis: max(sizes) for axis, sizes in port.extents.items()}, ("rain", "wind"), max(port.givens, key=len))
        latents, conditions_ = case.normal("latents", port.shapes(case)), port.conditions(case)
        with torch.no_grad():
            tables = port.observe(latents, case.sigmas("sigmas", port.modalities), conditions_)[1]
        for i, frames in enumerate(port.given_latents(case)):
            held.append(tables[i].values[modality][tables[i].given_of(modality)].double().cpu().flatten())
            blocks = [{m: v[i : i + 1] for m, v in latents.items()} | {modality: frames[name][None]} for name in conditions_[i].given]
            clean.append(torch.cat([port.pack(block)[modality][0] for block in blocks]).double().cpu().flatten())
    got, want = torch.cat(held), torch.cat(clean)
    share = float(got @ want / want.square().sum())
    spread = float((got - share * want).square().mean().sqrt())
    error = abs(1 - share - spread)
    chance = spread * (1 + float(want.square().mean()) ** -0.5) * got.numel() ** -0.5
    if 0.05 < share < 0.95 and trial.fits("given frames noised", error, 5 * chance):
        return trial.found("given frames noised", f"given rows hold {share:.2g} of the clean frames and noise beside them, of {spread:.2g}", error)
    return None


def _ends(trial: Trial) -> Diagnosis | None:
    """Whether a first and a last frame stand at each other's ends of the clip."""
    port = trial.port
    for mode in (names for names in port.givens if names):
        case = Case(seed=26, extent={axis: max(sizes) for axis, sizes in port.extents.items()}, given=mode)
        conditions_ = port.conditions(case)
        with torch.no_grad():
            _, (table,) = port.observe(case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), conditions_)
        modality = next(m for m in port.modalities if bool(table.given_of(m).any()))
        mine = torch.tensor([m == modality for m in table.modality])
        generated = table.position[mine & ~table.given][:, 0]
        for name, place in zip(conditions_[0].given, table.position[mine & table.given].chunk(len(conditions_[0].given)), strict=True):
            middle, time_ = float(generated.min() + generated.max()) / 2, float(place[:, 0].mean())
            if generated.min() == generated.max():
                continue
            if trial.says("frames at the wrong end", (name == "first" and time_ > middle) or (name == "last" and time_ < middle)):
                alone = " when it is given alone" if len(mode) == 1 and len(max(port.givens, key=len)) > 1 else ""
                return trial.found("frames at the wrong end", f"the given {name} frame stands at the other end of the clip{alone}")
    return None


def _referenced(trial: Trial) -> Diagnosis | None:
    """Given latents against those of the vendor's pipeline."""
    port = trial.port
    if not offers(port, "reference"):
        return None
    case = smallest(port, seed=27, prompts=("rain", "wind"), given=max(port.givens, key=len))
    mine, theirs = port.conditions(case), port.reference_conditions(case)
    for name in theirs[0].given:
        got = torch.stack([c.given[name].double().cpu() for c in mine]).transpose(0, 1).flatten(1)  # (channels, all else)
        want = torch.stack([c.given[name].double().cpu() for c in theirs]).transpose(0, 1).flatten(1)
        if relative_error(got, want) <= 1e-4:  # ten times what a scale and a shift may leave below
            continue
        centred = want - want.mean(1, keepdim=True)
        slope = (got * centred).sum(1, keepdim=True) / centred.square().sum(1, keepdim=True)
        fitted = got.mean(1, keepdim=True) + slope * centred
        if want.shape[1] > 4 and trial.fits("latents not normalized", relative_error(got, fitted), 1e-5):
            low, high = float(slope.min()), float(slope.max())
            return trial.found("latents not normalized", f"given {name} is the vendor's up to a scale ({low:.3g} to {high:.3g}) and shift a channel")
    return None
