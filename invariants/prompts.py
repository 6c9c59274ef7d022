"""The prompt's way from the dataset to the model: the same ids, the same embedding, and a model that hears it."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from loudfail.harness.case import Case, cases
from loudfail.harness.compare import relative_error, require, require_at_least, require_close, require_each_close
from loudfail.harness.port import Conditions, Port, no_grad
from loudfail.harness.registry import invariant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: Ends and beginnings that tokenizers merge when they are joined, and text that looks like a special token.
FRAGMENTS = (
    "the",
    "ra",
    "in",
    " the",
    "be",
    "ll",
    " a",
    "t",
    "he",
    "e\u0301",
    "\u00e9",
    "\U0001f469",
    "\u200d\U0001f680",
    "<|im_start|>",
    "\n",
    "  ",
)
#: Parts that tokenizers merge where they join, so that their ids are never those of the joined text.
SPLIT = ("t", "he", " a", "ra", "in", "be", "ll")
#: More tokens than the lengths at which prompts are cut: 77, 128.
LONG = " rain" * 140
#: Relative error of an embedding. Clean: 0 in float32.
EMBEDDING = {"float32": 1e-5, "bfloat16": 1e-1}


def texts(port: Port) -> SearchStrategy[tuple[str, ...]]:
    """Any Unicode, and fragments whose tokens, one after another, are not those of the joined text."""
    from hypothesis import strategies as st

    anything = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
    return st.one_of(
        st.lists(st.sampled_from(FRAGMENTS), min_size=2, max_size=8).map(tuple),
        anything.map(lambda text: (text,)),
        st.tuples(anything, st.sampled_from(FRAGMENTS)),
    )


def long_texts(port: Port) -> SearchStrategy[str]:
    """Prompts of up to a few hundred tokens."""
    from hypothesis import strategies as st

    return st.builds(lambda word, count: " ".join([word] * count), st.sampled_from(("rain", "a bell", "\u96e8", "thunder!")), st.integers(1, 60))


def ids_of(port: Port, parts: tuple[str, ...]) -> tuple[int, ...]:
    """The ids of the parts, one part after another."""
    return tuple(token for part in parts for token in port.tokenize(part))


def require_conditions(got: Conditions, want: Conditions, where: str) -> None:
    """Conditions hold all that the oracle states: ids, embedding, given latents in their order, and what stands in ``extra``, name by name.

    The same modules ran on the same input: integers are equal, tensors up to the last bits (clean: bitwise).
    """
    require(
        tuple(got.prompt_ids) == tuple(want.prompt_ids), got=list(got.prompt_ids), want=list(want.prompt_ids), where=f"{where}, ids of the prompt"
    )
    require(list(got.given) == list(want.given), got=list(got.given), want=list(want.given), where=f"{where}, given latents in order")
    for name, value in want.extra.items():
        require_same(got.extra.get(name), value, f"{where}, {name}")
    require_close(got.embeds.float().cpu(), want.embeds.float().cpu(), bound=1e-6, where=f"{where}, embedding")
    require_each_close({n: v.cpu() for n, v in got.given.items()}, want.given, bound=1e-6, where=f"{where}, given latents")


def require_same(got: object, want: object, where: str, bound: float = 1e-6) -> None:
    """Equal; tensors of floats up to their last bits, or to a relative error of ``bound``."""
    if not isinstance(want, torch.Tensor):
        require(got == want, got=got, want=want, where=where)
        return
    require(isinstance(got, torch.Tensor), got=type(got).__name__, want="a tensor", where=where)
    assert isinstance(got, torch.Tensor)
    if want.is_floating_point():
        require_close(got.float().cpu(), want.float().cpu(), bound=bound, where=where)
    else:
        require(torch.equal(got.cpu(), want.cpu()), got=got.tolist(), want=want.tolist(), where=where)


@invariant("prompt", "reference", examples=2, parts=texts)
def the_dataset_holds_the_ids_that_the_vendors_pipeline_encodes(port: Port, parts: tuple[str, ...]) -> None:
    """The ids of the dataset are those that the vendor's pipeline feeds its text encoder for the same string, whatever the string.

    Trainer and rollout share the ids and agree on wrong ones. Sees text that is stripped, lower-cased, normalized or cut, special tokens that are
    dropped where they are spoken, and special tokens or templates that are added. Oracle: the vendor's pipeline on the string.
    """
    text = "".join(parts)
    spoken = f"  A Bell <|im_start|>{text}<|endoftext|> Rings\t\n "
    for one in (text, unicodedata.normalize("NFD", spoken), unicodedata.normalize("NFC", spoken) + LONG):
        got, want = tuple(port.tokenize(one)), port.reference_prompt(one)
        require(got == want, got=list(got), want=list(want), where=repr(one))


@invariant("objective", "prompt", "reference", examples=2, case=cases(batch=(1, 1), given=False, text=True))
def a_prompt_conditions_the_model_as_in_the_vendors_pipeline(port: Port, case: Case) -> None:
    """Without given frames, the conditions of a prompt, short or long, are those that the vendor's pipeline makes of the string.

    Trainer and rollout are given the same conditions and cannot disagree. Sees embeddings that are cut or padded, rows with the wrong tag, another
    presentation, and frames where none are given.
    """
    case = replace(case, prompts=(*case.prompts, f" {case.prompts[0]}{LONG}"))
    for index, (got, want) in enumerate(zip(port.conditions(case), port.reference_conditions(case), strict=True)):
        require_conditions(got, want, where=f"sample {index}, {case.prompts[index]!r}")


@invariant("prompt", examples=6, parts=texts)
def the_rollouts_encoder_gets_the_ids_of_the_dataset(port: Port, parts: tuple[str, ...]) -> None:
    """The token ids at the input of the rollout's encoder are those that the dataset stores, bit for bit, for any text.

    Decoding and tokenizing again is not the identity: merges across boundaries, accents in two forms, joiners, text that spells a special token.
    Ids are read off the encoder's input. Oracle: the ids themselves.
    """
    for pieces in (parts, (*SPLIT, *parts)):
        ids = ids_of(port, pieces)
        got, _ = port.rollout_prompt(ids)
        require(tuple(got) == ids, got=list(got), want=list(ids), where=repr(pieces))


@invariant("prompt", examples=6, parts=texts)
def trainer_and_rollout_embed_a_prompt_alike(port: Port, parts: tuple[str, ...]) -> None:
    """The trainer's embedding of any ids is the one that the rollout's encoder gives.

    Sees another hidden layer, a norm too many, a template around the prompt, padding, and a different attention mask on either side.
    """
    ids = ids_of(port, parts)
    got, (_, want) = port.encode_prompt(ids), port.rollout_prompt(ids)
    require_close(got.float().cpu(), want.float().cpu(), bound=port.bound(**EMBEDDING), where=repr(parts))


@invariant("prompt", examples=4, text=long_texts)
def every_token_is_encoded(port: Port, text: str) -> None:
    """Both embeddings have one row a token, and the last token of a long prompt still changes the last row.

    A pad amount that turns negative crops: the actor saw 77 of 333 tokens.
    """
    ids = port.tokenize(text)
    other = next(token for token in port.tokenize("ab!") if token != ids[-1])
    for side, encode in (("trainer", port.encode_prompt), ("rollout", lambda tokens: port.rollout_prompt(tokens)[1])):
        rows = encode(ids)
        require(rows.shape[0] == len(ids), got=f"{rows.shape[0]} rows", want=f"{len(ids)} tokens", where=side)
        changed = encode((*ids[:-1], other))
        require_at_least(relative_error(changed[-1], rows[-1]), 1e-2, where=f"{side}, last of {len(ids)} tokens")


@invariant("prompt", examples=4, parts=texts, other=texts)
def different_prompts_have_different_embeddings(port: Port, parts: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Two prompts with different ids have embeddings of different length or different rows, on both sides.

    A constant embedding (an unloaded encoder, a cache keyed by too little) trains and samples without complaint.
    """
    first, second = ids_of(port, parts), ids_of(port, (*parts[:-1], *other))
    if first == second:
        second = (*second, second[0])
    for side, encode in (("trainer", port.encode_prompt), ("rollout", lambda tokens: port.rollout_prompt(tokens)[1])):
        length = min(len(first), len(second))
        place = next((i for i in range(length) if first[i] != second[i]), None)
        if place is None:
            a, b = encode(first).shape[0], encode(second).shape[0]
            require(a != b, got=f"{a} and {b} rows", want=f"{len(first)} and {len(second)} tokens", where=side)
        else:
            require_at_least(relative_error(encode(second)[place], encode(first)[place]), 1e-2, where=f"{side}, token {place}")


@invariant("prompt", "objective", examples=3, case=cases(batch=(1, 3), given=False, text=True))
def conditions_carry_the_embedding_of_their_own_prompt(port: Port, case: Case) -> None:
    """Each sample's conditions hold the ids of its own prompt and the embedding that the rollout's encoder gives for them.

    Sees prompts that are permuted in a batch, encoded from re-tokenized text, or wrapped in a template on their way into training.
    """
    for index, condition in enumerate(port.conditions(case)):
        where = f"sample {index}, {case.prompts[index]!r}"
        ids = port.tokenize(case.prompts[index])
        require(tuple(condition.prompt_ids) == tuple(ids), got=list(condition.prompt_ids), want=list(ids), where=where)
        require_close(condition.embeds.float().cpu(), port.rollout_prompt(ids)[1].float().cpu(), bound=port.bound(**EMBEDDING), where=where)


@invariant("objective", examples=4, case=cases(batch=(2, 2), given=False))
def swapping_two_prompts_swaps_what_is_said_of_the_same_latents(port: Port, case: Case) -> None:
    """With the same latents and levels for two samples, exchanging their prompts exchanges their velocities.

    Together with `the_prompt_is_heard_in_every_modality`: sees embeddings that belong to other samples of the batch, and prompts taken from one
    sample for all.
    """
    if case.prompts[0] == case.prompts[1]:
        case = Case(case.seed, case.extent, (case.prompts[0], case.prompts[1] + "!"), case.given)
    latents = {m: v[:1].repeat(2, *[1] * (v.ndim - 1)) for m, v in case.normal("latents", port.shapes(case)).items()}
    sigmas = {m: s[:1].repeat(2) for m, s in case.sigmas("sigmas", port.modalities).items()}
    first, second = port.conditions(case)
    with no_grad():
        got = port.predict_velocity(latents, sigmas, [second, first])
        alone = [
            port.predict_velocity({m: v[:1] for m, v in latents.items()}, {m: s[:1] for m, s in sigmas.items()}, [condition])
            for condition in (second, first)
        ]
    want = {m: torch.cat([one[m] for one in alone]) for m in got}
    scale = {m: alone[0][m] - alone[1][m] for m in got}
    require_each_close(got, want, bound=port.bound(float32=1e-3, bfloat16=5e-2), scale=scale, where=f"{case.prompts}, against the prompts' effect")


@invariant("objective", examples=4, case=cases(batch=(1, 1)))
def the_prompt_is_heard_in_every_modality(port: Port, case: Case) -> None:
    """Another prompt gives another velocity, in every modality, and so does another last token.

    A prompt without effect, or one whose tail is cut, leaves losses and rewards finite. Unheard, it changes exactly nothing; one more letter
    changed the trained model by 2e-4.
    """
    latents, sigmas, conditions = case.normal("latents", port.shapes(case)), case.sigmas("sigmas", port.modalities), port.conditions(case)
    for what, prompt in (("another prompt", "nine geese over a frozen lake"), ("another ending", case.prompts[0] + "x")):
        others = port.conditions(Case(case.seed, case.extent, (prompt,), case.given))
        with no_grad():
            first, second = port.predict_velocity(latents, sigmas, conditions), port.predict_velocity(latents, sigmas, others)
        for modality in port.modalities:
            require_at_least(relative_error(second[modality], first[modality]), 3e-6, where=f"{what}, {modality}")
