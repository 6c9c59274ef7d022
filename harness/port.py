"""The port: everything that is specific to a model, behind one convention.

A port is one class in one file. It speaks Loudfail's convention to the outside; the model's own signs, time labels and layouts stay inside it,
which is what is being proved. The convention, for every modality on its own::

    sigma in [0, 1], 1 = noise        x_sigma = (1 - sigma) * x0 + sigma * noise
    velocity v = noise - x0           x0 = x_sigma - sigma * v

Latents are dictionaries from modality to ``(B, *shape)`` float32; sigmas are dictionaries from modality to ``(B,)`` float32: one sigma a sample
*and* a modality. The samples of one batch share their extent and nothing else: prompts, conditions and sigmas may all differ.

Seams are groups of methods. A port that does not override all methods of a seam does not offer it: checks that need it are *uncovered*, which
is counted and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from loudfail.harness.case import Case
from loudfail.harness.violation import Unavailable, Uncovered

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    Latents = Mapping[str, torch.Tensor]
    Sigmas = Mapping[str, torch.Tensor]

#: Seam → the methods that make it up.
SEAMS: dict[str, tuple[str, ...]] = {
    "objective": ("shapes", "conditions", "grid", "predict_velocity"),
    "packing": ("pack", "unpack", "observe"),
    "vendor": ("vendor_rollout", "vendor_grid"),
    "adapter": (
        "projections",
        "add_adapter",
        "adapter_names",
        "adapter_state",
        "load_adapter",
        "using",
        "select_trainable",
        "trainable",
        "base_state",
    ),
    "engine": ("engine",),
    "prompt": ("tokenize", "encode_prompt", "rollout_prompt"),
    "media": ("decode",),
    "reward": ("reward",),
    "condition": ("given_latents", "observe"),
    "reference": ("reference_prompt", "reference_conditions"),
    "presentation": ("rollout_conditions",),
    "trained": ("trained_batch",),
    "update": ("update",),
}


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA configuration: rank r, alpha (the effective scale is alpha / r), and the suffixes of the projections that it adapts; empty where a port
    adapts the same projections whatever is configured."""

    rank: int = 64
    alpha: float = 128.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass
class Conditions:
    """What one sample is conditioned on.

    Attributes:
        prompt_ids: token ids of the prompt, as the dataset stores them.
        embeds: prompt embedding ``(tokens, width)`` as the encoder gave it.
        given: name of a condition (``first``, ``last``) → its clean latents.
        extra: what else the port needs, opaque to everybody else.
    """

    prompt_ids: tuple[int, ...]
    embeds: torch.Tensor
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """One model call of a rollout: latents and sigmas that went in, velocity that came out, latents after the step."""

    latents: dict[str, torch.Tensor]
    sigmas: dict[str, torch.Tensor]
    velocity: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@dataclass
class Trajectory:
    """A rollout, call by call."""

    steps: list[Step]

    @property
    def final(self) -> dict[str, torch.Tensor]:
        return self.steps[-1].after


@dataclass
class RowTable:
    """What really enters the model for one sample, read off its own input, row by row of its sequence (or of its streams, one after another).

    Attributes:
        modality: modality of each row, ``"text"`` for text, in the model's order.
        given: true for rows that are given, not generated.
        sigma: the noise level that the model is told for each row, in this convention; NaN where it is told none.
        position: rotary or positional coordinates, ``(rows, axes)``, time first.
        values: modality → the row contents that enter the model, ``(rows of that modality, width)``, in row order; text excluded.
        output: modality → the raw output rows of the model for the same rows, without the port's sign; gradients are retained if they are on. Of
            the generated rows alone where the model has no output for given ones. The velocity must be made of these tensors, which a slice of the
            output is not: where modalities share one output, the hook returns it put together from them. Of a batch, the whole output
            ``(B, rows, width)``, and under ``"sample"`` a tensor with this sample's place in it.
    """

    modality: tuple[str, ...]
    given: torch.Tensor
    sigma: torch.Tensor
    position: torch.Tensor
    values: dict[str, torch.Tensor]
    output: dict[str, torch.Tensor] = field(default_factory=dict)

    def given_of(self, modality: str) -> torch.Tensor:
        """The ``given`` flags of the rows of one modality."""
        import torch

        return self.given[torch.tensor([m == modality for m in self.modality], dtype=torch.bool)]

    def sigma_of(self, modality: str) -> torch.Tensor:
        import torch

        return self.sigma[torch.tensor([m == modality for m in self.modality], dtype=torch.bool)]


@dataclass
class BindReport:
    """What one adapter hand-over did, summed over ranks only where they agree: numbers of adapter tensors pairs registered and bound to a layer."""

    version: int
    registered: int
    bound: int


def probe(in_features: int, count: int, seed: int) -> torch.Tensor:
    """The seeded inputs ``(count, in_features)`` on which engines measure what their layers do."""
    import torch

    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(seed)) / in_features**0.5


class Rollout(Protocol):
    """The rollout engine of one tensor-parallel degree. Names of projections and parameters are the *actor's*; tensors are full, not shards.

    One that can set its adapter aside for a request and take it up again, without a hand-over, also has ``suspend_adapter()`` and
    ``resume_adapter(version)``.
    """

    degree: int

    def load_base(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the actor's base weights (full reload; what the engine computes itself, such as a rotary table, must be right afterwards too)."""

    def base_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        """What the engine's base weights do, under the *actor's* parameter names: for each linear ``W @ x`` ``(out, count)`` on the seeded inputs of
        `probe`, reassembled over ranks, and so for every other matrix, such as the table of an embedding; every other parameter as it is; and the
        buffers that the engine computes itself under ``buffer:<name>``."""

    def set_adapter(self, state: Mapping[str, torch.Tensor], config: AdapterConfig, version: int) -> BindReport:
        """Hand an adapter over in memory under a new version, replacing the active one.

        Raises:
            RuntimeError: the engine refuses it.
        """

    def remove_adapter(self) -> None:
        """Back to the base model."""

    def adapter_version(self) -> int | None:
        """The version that is active in every rank; None when there is none.

        Raises:
            Violation: the ranks disagree.
        """

    def delta_response(self, count: int, seed: int) -> dict[str, torch.Tensor]:
        """Projection → what its layer really adds for the active adapter, ``scale · B @ A @ x`` ``(out, count)`` on the seeded inputs of `probe`,
        measured by running the engine's layer, reassembled over ranks. Projections without a LoRA layer are missing."""

    def replicated(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions]) -> list[dict[str, torch.Tensor]]:
        """`velocity` as each rank returned it, for the check that ranks agree."""

    def velocity(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        """One model call, in Loudfail's convention, with the active adapter."""

    def rollout(self, noise: Latents, calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """The engine's own sampling loop from the given noise."""

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        """The sigma grid that the engine's own loop walks for that many model calls, per modality, terminal 0 included; see `Port.grid`."""

    def classes(self) -> list[str]:
        """Qualified names of the upstream classes that ran."""


class Arrival(Protocol):
    """One thing that arrived at a scorer's own model.

    Attributes:
        at: the module or function, such as ``ClapModel.audio_model``.
        name: the argument.
        value: a copy; a tensor, or a list of waveforms ``(samples,)``. A tensor with a rate is a waveform, or a batch of them; token ids are integers
            ``(batch, tokens)``, one arrival a batch.
        rate: the sample rate in Hz that the callee was told; None where it is told none.
    """

    at: str
    name: str
    value: Any
    rate: int | None


class Reward(Protocol):
    """What scores media: named sub-scores and their weighted sum ``total``.

    Attributes:
        outputs: sub-score → what it depends on, out of the port's modalities and ``prompt``; a change of anything else must leave it as it was.
            ``total`` is one of them.
        weights: sub-score → its weight in the total; one for each, all finite and at least 0.
        missing: scorers that belong to this reward but are not here → why; empty if none. Their sub-scores are in neither of the two above.
    """

    outputs: Mapping[str, frozenset[str]]
    weights: Mapping[str, float]
    missing: Mapping[str, str]

    def score(self, media: Sequence[Any], prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Score a batch.

        Args:
            media: one item a sample, as `Port.decode` gives them: an attribute for each modality.
            prompts: the prompt of the sample at the same position.

        Returns:
            Every sub-score and ``total``, each ``(batch,)`` floating, finite, higher is better.

        Raises:
            Exception: any sample could not be scored by any scorer; no error becomes a number.
        """

    def watch(self) -> AbstractContextManager[Sequence[Arrival]]:
        """Record what arrives at the scorers' own models while inside."""

    def models(self) -> Mapping[str, torch.nn.Module]:
        """The real modules that score, by name, so that checks can make them fail."""

    def origins(self) -> Mapping[str, str]:
        """Qualified name of each class that scores → which weights it has: real, tiny random, or none because the scorer is synthetic."""


def find_reward(target: str) -> Reward:
    """Call the function ``package.module:function`` that makes a reward. It is found by name, as ports are, since the harness knows no reward.

    Raises:
        Unavailable: it is not installed.
    """
    from pkgutil import resolve_name

    try:
        make = resolve_name(target)
    except ImportError as error:
        raise Unavailable(f"no reward {target}: {error}") from error
    reward: Reward = make()
    return reward


@dataclass(frozen=True)
class Plan:
    """What a check asks of a trainer: the settings of a run that decide its numbers.

    The objective of a sample is, summed over modalities with the weight of each, the mean over the elements of ``r·(v⁺ − v)² + (1 − r)·(v⁻ − v)²``
    times `Update.policy_scale`, plus ``reference`` times the mean of ``(v_θ − v_base)²``. A step's loss is the mean over its samples and levels.

    Attributes:
        prompts: the dataset; a step draws from it in order, round and round.
        reward: clean latents and their prompts → ``(B,)`` float64, higher is better; a module-level function.
        seed: everything random of the run comes from it.
        extent: size per axis of every sample.
        given: names of the given conditions of every sample.
        groups: draws of a prompt in one step, each with ``samples`` samples; of all processes together.
        samples: samples of a draw.
        levels: noise levels at which each sample is trained in a step.
        calls: model calls of a rollout.
        micro_batch: samples of one model call at most.
        spread: divide by the standard deviation within a ``group`` (population), or by one number for the whole batch (``global``).
        beta, clip: β and Z of DiffusionNFT.
        weighting: ``none``; or ``adaptive``: each of the two squared errors, of x0, divided by that sample's and modality's mean absolute one.
        reference: coefficient of the reference term.
        modalities: modality → its weight.
        old: schedule of the old policy, by its published name: ``copy``, ``linear_to_0_5`` or ``delayed_linear_to_0_999``.
        old_every: steps between two refreshes of the old policy.
        learning_rate: of the optimizer; a gradient is not clipped.
    """

    prompts: tuple[str, ...]
    reward: Callable[[Latents, Sequence[str]], torch.Tensor]
    modalities: Mapping[str, float]
    extent: Mapping[str, int]
    given: tuple[str, ...] = ()
    seed: int = 0
    groups: int = 2
    samples: int = 3
    levels: int = 2
    calls: int = 4
    micro_batch: int = 64
    spread: Literal["group", "global"] = "group"
    beta: float = 0.5
    clip: float = 1.0
    weighting: Literal["none", "adaptive"] = "none"
    reference: float = 0.0
    old: Literal["copy", "linear_to_0_5", "delayed_linear_to_0_999"] = "copy"
    old_every: int = 1
    learning_rate: float = 1e-3


@dataclass
class Scored:
    """Samples of one step of this process, the samples of a draw side by side.

    Attributes:
        clean: modality → ``(B, *shape)``.
        conditions, prompts: of each sample.
        draws: the draw that each sample belongs to: not its text, since a prompt may be drawn twice.
        rewards: ``(B,)``.
    """

    clean: dict[str, torch.Tensor]
    conditions: list[Conditions]
    prompts: list[str]
    draws: list[int]
    rewards: torch.Tensor


@dataclass
class Noised:
    """One model call of an update: which samples, with which noise, at which levels.

    Attributes:
        rows: places of the samples in `Scored`.
        noise: modality → ``(b, *shape)``.
        sigmas: modality → ``(b,)``.
    """

    rows: list[int]
    noise: dict[str, torch.Tensor]
    sigmas: dict[str, torch.Tensor]


class Update:
    """A trainer's own code behind one signature, so that checks can drive it. Subclasses override what their trainer has.

    The trained policy is the port's adapter ``default``, the old one its adapter ``old``; checks read and write both through the port. What is not
    overridden, and any `Plan` that a trainer cannot follow, raises `Uncovered`: it is counted as not checked, never as right. Where
    ``torch.distributed`` is initialized, its processes are those of the run.
    """

    def begin(self, plan: Plan) -> None:
        """Start a run afresh on the port: adapters ``default`` and ``old``, optimizer, rollout, step 0. What was begun before is dropped."""
        raise self._lacks("begin")

    def advantages(self, rewards: torch.Tensor, draws: Sequence[int], prompts: Sequence[str], spread: str) -> torch.Tensor:
        """Group advantages ``(B,)`` of rewards ``(B,)``; needs no `begin`.

        Raises:
            Exception: they cannot be told, as for a reward that is not finite or a draw of one sample.
        """
        raise self._lacks("advantages")

    def optimality(self, advantages: torch.Tensor, clip: float) -> torch.Tensor:
        """The optimality probability ``r`` ``(B,)`` in [0, 1]; needs no `begin`."""
        raise self._lacks("optimality")

    def policy_scale(self, plan: Plan) -> float:
        """The constant by which this trainer multiplies the policy term of the paper's objective."""
        return 1.0

    def learn(self, scored: Scored) -> list[Noised]:
        """One update of ``default`` from scored samples, up to and with the optimizer's step; the model calls that were trained on."""
        raise self._lacks("learn")

    def refresh(self, step: int) -> None:
        """What happens to the old policy after the update of step ``step`` (from 0), whether due or not."""
        raise self._lacks("refresh")

    def step(self) -> tuple[Scored, list[Noised]]:
        """One whole step: rollout, reward, update, refresh, hand-over; this process's samples and the model calls that were trained on."""
        raise self._lacks("step")

    def sample(self, noise: Latents, calls: int, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        """Clean latents from the trainer's rollout with the policy that it holds."""
        raise self._lacks("sample")

    def evaluate(self) -> float:
        """The trainer's own validation: a mean reward of samples that do not depend on the step."""
        raise self._lacks("evaluate")

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the run."""
        raise self._lacks("optimizer")

    def parameters(self) -> Mapping[str, torch.Tensor] | None:
        """What the optimizer steps, by the names of `Port.trainable`, where it is not the model's own tensors but wider copies of them."""
        return None

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the run into an empty folder."""
        raise self._lacks("save")

    def load(self, folder: Path) -> None:
        """Put a run that was begun with the same plan into the state of the checkpoint.

        Raises:
            Exception: the checkpoint is not whole.
        """
        raise self._lacks("load")

    def _lacks(self, method: str) -> Uncovered:
        return Uncovered(f"the trainer {type(self).__module__}:{type(self).__qualname__} does not offer {method}")


def find_trainer(target: str) -> Callable[[Port], Update]:
    """The function ``package.module:function`` that wraps a trainer for a port. It is found by name, since the harness knows no trainer.

    Raises:
        Unavailable: it is not installed.
    """
    from pkgutil import resolve_name

    try:
        make: Callable[[Port], Update] = resolve_name(target)
    except ImportError as error:
        raise Unavailable(f"no trainer {target}: {error}") from error
    return make


class Port:
    """Base class of ports. Subclasses override the methods of the seams that they offer.

    Class attributes:
        name: short name, shown in reports.
        modalities: generated modalities, in the order in which noise is drawn.
        extents: axis → sizes that checks may draw, smallest first.
        givens: condition modes that checks may draw; ``()`` is none.
        adapter: the LoRA configuration under test.
        given_sigma: noise level at which given rows are held and that the model is told for them; 0 where they are clean.
        given_replaces: a given frame takes the place of a frame of the clip, and the generated ones come after it; otherwise it stands beside them.
        modes: condition mode → its published name, for goldens; ``plain`` and ``given`` where there is none.
        least_calls: the fewest model calls that the schedule has a grid for.
        shift: the published shift s of each modality's even sigma grid, ``s·u / (1 + (s − 1)·u)``; empty where the schedule is of another kind.
        rates: the published rate of each decoded modality: frames or samples a second; empty where nothing is decoded.
        scorers: ``package.module:function`` that makes the `Reward`, for `find_reward`; a subclass names another one.
        trainer: ``package.module:function`` that wraps a trainer for a port, for `find_trainer`; a subclass names another one.
        attention: the attention backend of the rollout engine, by the engine's own name; empty for its plainest.
        time_axis: the axis of one sample's latents, per modality, that is time; empty where none is. `RowTable.position` has time as its first axis.
    """

    name: str = "unnamed"
    modalities: tuple[str, ...] = ()
    extents: Mapping[str, Sequence[int]] = {}
    givens: tuple[tuple[str, ...], ...] = ((),)
    adapter: AdapterConfig = AdapterConfig()
    #: The real module that trains. Checks do not touch it; faults in upstream classes may.
    actor: Any
    given_sigma: float = 0.0
    given_replaces: bool = False
    modes: Mapping[tuple[str, ...], str] = {}
    least_calls: int = 1
    shift: Mapping[str, float] = {}
    rates: Mapping[str, float] = {}
    scorers: str = ""
    attention: str = ""
    trainer: str = ""
    time_axis: Mapping[str, int] = {}

    def __init__(self, *, scale: str = "tiny", weights: str | None = None, device: str = "cpu", dtype: str = "float32") -> None:
        self.scale, self.weights, self.device, self.dtype = scale, weights, device, dtype

    # -- objective ---------------------------------------------------------------------------------------------------------------------------
    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """Latent shape of one sample per modality."""
        raise NotImplementedError

    def conditions(self, case: Case) -> list[Conditions]:
        """Conditions of each sample, a pure function of the case."""
        raise NotImplementedError

    def canvas(self, case: Case) -> tuple[int, int]:
        """Height and width in pixels of the pictures that `pictured` takes. Only for ports on which something can be given."""
        raise NotImplementedError

    def pictured(self, case: Case, pictures: Sequence[Mapping[str, Any]]) -> list[Conditions]:
        """`conditions` with the user's pictures in the place of drawn ones: for each sample by name, uint8 ``(*canvas, 3)``."""
        raise NotImplementedError

    def grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        """The sigma grid that training and rollout walk for ``calls`` model calls.

        Per modality ``(calls + 1,)`` float32, descending from 1, ending in 0. A schedule may depend on the size of what is sampled: ``case`` says its
        extent and what is given; without it, the smallest extent and nothing given.
        """
        raise NotImplementedError

    def predict_velocity(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions]) -> dict[str, torch.Tensor]:
        """Velocity of the actor with the adapter that is in use, on the device of the latents; differentiable. Given rows are not part of the
        result."""
        raise NotImplementedError

    # -- packing -----------------------------------------------------------------------------------------------------------------------------
    def pack(self, latents: Latents) -> dict[str, torch.Tensor]:
        """Latents as the rows (or tokens) that the model consumes: modality → ``(B, rows, width)``, given rows left out."""
        raise NotImplementedError

    def unpack(self, rows: Mapping[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
        """Inverse of `pack`."""
        raise NotImplementedError

    def observe(self, latents: Latents, sigmas: Sigmas, conditions: Sequence[Conditions]) -> tuple[dict[str, torch.Tensor], list[RowTable]]:
        """`predict_velocity`, with what entered the real model read off by hooks: one table a sample."""
        raise NotImplementedError

    # -- vendor ------------------------------------------------------------------------------------------------------------------------------
    def vendor_rollout(self, noise: Latents, calls: int, conditions: Sequence[Conditions]) -> Trajectory:
        """The vendor's own sampling loop on the actor, from upstream parts only; ``velocity`` is derived from the steps, not asked of the model."""
        raise NotImplementedError

    def vendor_grid(self, calls: int, case: Case | None = None) -> dict[str, torch.Tensor]:
        """The grid of the vendor's own scheduler, terminal included."""
        raise NotImplementedError

    # -- adapter -----------------------------------------------------------------------------------------------------------------------------
    def projections(self) -> dict[str, tuple[int, int]]:
        """Every actor projection that the configured adapter must reach → ``(out, in)``."""
        raise NotImplementedError

    def add_adapter(self, name: str, config: AdapterConfig) -> None:
        """Add a LoRA adapter in PEFT's default initialization; replaces one of that name. Which adapter trains must not change."""
        raise NotImplementedError

    def adapter_names(self) -> list[str]:
        """The adapters that are there. ``default`` is from the start, in use and the only one that trains."""
        raise NotImplementedError

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        """``<projection>.lora_A.weight`` ``(r, in)`` and ``<projection>.lora_B.weight`` ``(out, r)``, copies, adapter name left out."""
        raise NotImplementedError

    def load_adapter(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        """Write a state into an existing adapter.

        Raises:
            ValueError: names or shapes do not match.
        """
        raise NotImplementedError

    def using(self, name: str | None) -> AbstractContextManager[None]:
        """Use an adapter (None: the base model) for the calls inside; afterwards everything, trainability included, is as before."""
        raise NotImplementedError

    def select_trainable(self, name: str) -> None:
        """Make this adapter the one in use and the only one that trains."""
        raise NotImplementedError

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that require a gradient, by name: ``<projection>.lora_A.<adapter>.weight`` and ``….lora_B.…`` for the factors of an adapter,
        whatever the actor calls them; anything else by its own name."""
        raise NotImplementedError

    def base_state(self) -> dict[str, torch.Tensor]:
        """The actor's base weights under the vendor's names, adapters left out."""
        raise NotImplementedError

    # -- engine ------------------------------------------------------------------------------------------------------------------------------
    def engine(self, degree: int) -> Rollout:
        """The rollout engine at a tensor-parallel degree, with the actor's base weights and no adapter. Built once, then reused.

        Raises:
            Unavailable: no engine on this machine.
        """
        raise NotImplementedError

    def check_degree(self, degree: int) -> None:
        """See, before any rank is started, that the model can be split that way.

        Raises:
            ValueError: it cannot; the message says why.
        """

    def collectives(self, degree: int) -> str:
        """What the ranks of a degree talk through, such as ``nccl`` or ``gloo, shared device``; empty without an engine."""
        return ""

    def computed_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that the engine must compute itself because the actor's state dict lacks them, by the engine's name, as the actor computes them."""
        return {}

    # -- prompt ------------------------------------------------------------------------------------------------------------------------------
    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids as the dataset stores them."""
        raise NotImplementedError

    def encode_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        """The trainer's prompt embedding ``(tokens, width)`` from ids."""
        raise NotImplementedError

    def rollout_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], torch.Tensor]:
        """The ids that really arrive at the rollout's encoder (read off its input by a hook) and the embedding it gives."""
        raise NotImplementedError

    # -- media, reward -----------------------------------------------------------------------------------------------------------------------
    def decode(self, latents: Latents) -> Any:
        """Clean latents → media with rates and layout: one item a sample, a dataclass with a `Video` or `Audio` of `loudfail.harness.media` for each
        modality, under its name."""
        raise NotImplementedError

    def reward(self) -> Reward:
        """What scores the decoded media. Made once, then reused.

        Raises:
            Unavailable: not installed.
        """
        raise NotImplementedError

    # -- condition ---------------------------------------------------------------------------------------------------------------------------
    def given_latents(self, case: Case) -> list[dict[str, torch.Tensor]]:
        """The clean given latents of each sample, by name, independent of `conditions`."""
        raise NotImplementedError

    # -- reference, presentation -------------------------------------------------------------------------------------------------------------
    def reference_prompt(self, text: str) -> tuple[int, ...]:
        """The ids that the vendor's own pipeline feeds its text encoder for a prompt string, read off the encoder's input by a hook."""
        raise NotImplementedError

    def reference_conditions(self, case: Case) -> list[Conditions]:
        """What the vendor's own pipeline makes of the case's prompt strings and given frames, with the seeds that `conditions` documents.

        Shares with `conditions` the models (text encoder, tokenizer, autoencoder) and nothing else. `Conditions.extra` holds, under the names that
        `conditions` uses, what else of the pipeline's results belongs to the conditions; what stands there is compared name by name.
        """
        raise NotImplementedError

    def rollout_conditions(self, case: Case) -> list[Conditions]:
        """What the rollout's own presentation and encoder make of the dataset's ids and the given frames: ``prompt_ids``, ``embeds`` and, under the
        names of `reference_conditions`, integers such as the ids at the encoder's input or tags of rows; ``given`` is empty."""
        raise NotImplementedError

    # -- trained -----------------------------------------------------------------------------------------------------------------------------
    def trained_batch(self, seed: int, count: int) -> tuple[dict[str, torch.Tensor], list[Conditions]]:
        """Clean samples of the world that the checkpoint was really trained on, with their conditions.

        Raises:
            Unavailable: this checkpoint was not trained on such a world.
        """
        raise NotImplementedError

    # -- update ------------------------------------------------------------------------------------------------------------------------------
    def update(self) -> Update:
        """The trainer that trains this port, usually ``find_trainer(self.trainer)(self)``; nothing has begun.

        Raises:
            Unavailable: not installed.
        """
        raise NotImplementedError

    # -- shared ------------------------------------------------------------------------------------------------------------------------------
    def classes(self) -> list[str]:
        """Qualified names of the upstream classes that run."""
        return []

    def close(self) -> None:
        """Release engines and memory. Idempotent."""

    def bound(self, *, float32: float, bfloat16: float) -> float:
        """The bound that belongs to the dtype the port runs in; both come from measured spread."""
        return float32 if self.dtype == "float32" else bfloat16

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class that make an equal port in another process."""
        return {"scale": self.scale, "weights": self.weights, "device": self.device, "dtype": self.dtype}

    def describe(self) -> dict[str, Any]:
        """What identifies this port in a certificate."""
        return {
            "port": self.name,
            "class": f"{type(self).__module__}:{type(self).__qualname__}",
            "scale": self.arguments()["scale"],
            "weights": self.weights or "built-in",
            "dtype": self.dtype,
            "device": self.device,
            "attention": self.attention or "plainest",
            "scorers": self.scorers,
            "trainer": self.trainer,
            "adapter": {"rank": self.adapter.rank, "alpha": self.adapter.alpha, "targets": list(self.adapter.targets)},
        }


def offers(port: Port | type[Port], seam: str) -> bool:
    """Whether a port overrides every method of a seam."""
    cls = port if isinstance(port, type) else type(port)
    return all(getattr(cls, method, None) is not getattr(Port, method, None) for method in SEAMS[seam])


def need(port: Port, *seams: str) -> None:
    """Raise `Uncovered` unless the port offers all the seams."""
    missing = [seam for seam in seams if not offers(port, seam)]
    if missing:
        methods = [m for seam in missing for m in SEAMS[seam] if getattr(type(port), m, None) is getattr(Port, m, None)]
        raise Uncovered(f"port {port.name!r} does not offer {', '.join(missing)} (missing: {', '.join(dict.fromkeys(methods))})")


def targets(port: Port) -> tuple[str, ...]:
    """The suffixes of the projections that the adapter reaches: the configured ones, or the last names of the projections where none are."""
    return port.adapter.targets or tuple(dict.fromkeys(name.rsplit(".", 1)[-1] for name in port.projections()))


def base_parameters(port: Port) -> dict[str, torch.nn.Parameter]:
    """The parameters of the actor that belong to no adapter, by the actor's names; which do, the port says itself. ``default`` trains afterwards."""
    factors = set()
    for adapter in port.adapter_names():
        port.select_trainable(adapter)
        factors |= {id(parameter) for parameter in port.trainable().values()}
    port.select_trainable("default")
    return {name: parameter for name, parameter in port.actor.named_parameters() if id(parameter) not in factors}


def noised(x0: Latents, noise: Latents, sigmas: Sigmas) -> dict[str, torch.Tensor]:
    """``(1 − sigma)·x0 + sigma·noise`` per modality."""
    result = {}
    for modality, clean in x0.items():
        sigma = sigmas[modality].view(-1, *[1] * (clean.ndim - 1)).to(clean)
        result[modality] = (1 - sigma) * clean + sigma * noise[modality]
    return result


def random_adapter(port: Port, config: AdapterConfig, seed: int, size: float = 0.15) -> dict[str, torch.Tensor]:
    """A LoRA state for parity checks: normal A and B, B ≠ 0, every row different; ``size`` is the strength, whatever the rank and alpha."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, (out_features, in_features) in port.projections().items():
        state[f"{name}.lora_A.weight"] = (torch.randn(config.rank, in_features, generator=generator, dtype=torch.float64) / in_features**0.5).float()
        b = torch.randn(out_features, config.rank, generator=generator, dtype=torch.float64)
        state[f"{name}.lora_B.weight"] = (b * size * (config.rank**0.5 / config.alpha) * 8).float()
    return state


@contextmanager
def no_grad() -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield
