"""How fast the update is on one accelerator, against the machine's matrix-product rate and against the straightforward way. Prints a table.

    python -m loudfail.trainer.benchmark [--size mid|tiny] [--device auto|cpu|cuda] [--out FILE]

The model is MiniMax H3 of released widths with fewer blocks (`SIZES`) and seeded weights; the update is the trainer's own, `loop.improve`. One way
differs from the next by one change; all start from the same adapters, samples and noise, and are timed in turn, one after another, several times.

Counted are the operations that the mathematics of a step needs: forward and input gradient of every projection, LoRA with its weight gradients,
attention, and the forward pass of the reference policy. Not counted: what a way computes again (gradient checkpointing, flash attention's backward
pass) or needlessly (the old policy's forward pass, which on policy equals the trained one's), element-wise work, and the rows of the AdaLN tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from loudfail.harness import environment, synthetic
from loudfail.harness.port import Step, Trajectory, random_adapter
from loudfail.harness.ports import h3
from loudfail.harness.world import without_preloading
from loudfail.trainer import adapters, loop, nft, parallel, train
from loudfail.trainer.config import parse

#: Size → what differs from the released architecture, and the extent of a sample. ``mid`` has about 2 billion parameters and 4 400 rows a sample.
SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "mid": (dict(num_layers=3, num_refiner_layers=1), {"frames": 7, "height": 44, "width": 52, "audio": 192}),
    "tiny": (h3.SCALES["tiny"], {"frames": 2, "height": 4, "width": 4, "audio": 8}),
}
UNCLIPPED = 1e30
TARGETS = {"share of the matrix-product rate": 0.5, "times the straightforward way": 2.0}


@dataclass(frozen=True)
class Way:
    """One way to do the same update.

    Attributes:
        name: shown.
        micro_batch: samples of one model call.
        plain: sample by sample as one writes it down first, `straightforward`, instead of the trainer's own update.
        reuse_old: whether the old policy's pass is left out where it equals the trained one's.
        compiled: whether the blocks are compiled.
        attention: diffusers' backend.
        checkpointing: whether blocks are computed again in the backward pass.
    """

    name: str
    micro_batch: int
    plain: bool = False
    reuse_old: bool = True
    compiled: bool = True
    attention: str = "native"
    checkpointing: bool = False


class MidSize(h3.H3):
    """H3 of released widths with fewer blocks and seeded weights."""

    scales = {"wide": SIZES["mid"][0]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write a record; 0 if every target that applies is met."""
    parser = argparse.ArgumentParser(prog="python -m loudfail.trainer.benchmark", description="Speed of the update on one accelerator.")
    parser.add_argument("--size", choices=sorted(SIZES), default="mid")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt, all in one model call (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", default="native,_native_cudnn", help="diffusers' backends to try on a GPU (default %(default)s)")
    parser.add_argument("--calls", type=int, default=4, help="model calls of a rollout in the whole step that is split into its parts")
    parser.add_argument("--without-float32", action="store_true", help="do not compute the gradient in float32, which takes a second model")
    parser.add_argument("--profile", type=Path, help="write what the device spends its time on, for the fastest way")
    parser.add_argument("--out", type=Path, default=Path("out/benchmark.json"))
    options = parser.parse_args(argv)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    record = measure(options, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"record: {options.out}")
    return 1 if record["missed"] else 0


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """All figures of a machine, as they are printed."""
    begin = time.monotonic()
    torch.manual_seed(0)
    run = make_run(options, device, options.dtype)
    port = run.port
    port.load_adapter(adapters.OLD, random_adapter(port, port.adapter, 7))
    state = port.adapter_state(adapters.OLD)  # B ≠ 0, rounded as the actor stores it
    update, plain = make_updates(run)
    updates = {False: update, True: plain}
    work = operations(run)
    samples = options.prompts * options.samples
    parameters = sum(value.numel() for name, value in port.actor.named_parameters() if ".lora_" not in name)
    print(f"{environment.device_name(device)}, torch {torch.__version__}, {options.dtype}; {parameters / 1e9:.2f} billion parameters, rank")
    print(f"{port.adapter.rank}; {samples} samples of {work['rows']:.0f} rows a step", flush=True)
    print(
        f"a step must do {work['operations'] / 1e12:.4g} Tflop and move {work['bytes'] / 1e9:.4g} GB ({time.monotonic() - begin:.0f} s to set up)",
        flush=True,
    )

    rate = product_rate(device, 8192 if device == "cuda" else 512)
    ways = [
        Way("one sample a call; old, reference and trained apart", 1, plain=True, reuse_old=False, compiled=False),
        Way("all samples of a prompt in one call", options.samples, reuse_old=False, compiled=False),
        Way("+ no pass of the old policy on policy", options.samples, compiled=False),
        Way("+ compiled blocks", options.samples),
    ]
    if device == "cuda":
        ways += [Way(f"+ attention {name}", options.samples, attention=name) for name in options.attention.split(",") if name != "native"]
    ways.append(replace(ways[-1], name="+ gradient checkpointing", checkpointing=True))

    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    memory: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for way in ways:  # warm up, and the results
        start = time.monotonic()
        with going(run, way):
            gradients[way.name] = gradient_of(run, updates[way.plain], state)
        print(f"  ready in {time.monotonic() - start:5.1f} s: {way.name}", flush=True)
    for _ in range(options.repeats):
        for way in ways:
            with going(run, way):
                begin_again(run, state)
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds[way.name].append(timed(device, updates[way.plain]))
                memory[way.name] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")

    first, rows = ways[0], []
    reference = None if options.without_float32 else exact_gradient(options, device, run, state)
    for way in ways:
        time_of = statistics.median(seconds[way.name])
        rows.append(
            {
                "way": way.name,
                "seconds": time_of,
                "least": min(seconds[way.name]),
                "most": max(seconds[way.name]),
                "samples_per_second": samples / time_of,
                "rows_per_second": samples * work["rows"] / time_of,
                "tflops": work["operations"] / time_of / 1e12,
                "share": work["operations"] / time_of / rate,
                "times": statistics.median(a / b for a, b in zip(seconds[first.name], seconds[way.name], strict=True)),
                "memory_gib": memory[way.name],
                "from_float32": float("nan") if reference is None else relative(gradients[way.name], reference),
                "from_straightforward": relative(gradients[way.name], gradients[first.name]),
                "settings": asdict(way),
            }
        )
    show(rows, rate)
    best = max((row for row in rows if not row["settings"]["checkpointing"]), key=lambda row: row["samples_per_second"])
    with going(run, next(way for way in ways if way.name == best["way"])):
        if options.profile is not None:
            begin_again(run, state)
            write_profile(update, device, options.profile)
        update_only = without_reference(run, device, options.repeats, state)
        split = split_of(run, device, state)
    alone = work["trained"] / update_only / rate
    print(f"without the reference term: {update_only:.3f} s, {100 * alone:.1f} % of the rate counting forward and input gradient alone")
    print("whole step, seconds: " + ", ".join(f"{part} {value:.3f}" for part, value in split.items()))
    reached = {"share of the matrix-product rate": best["share"], "times the straightforward way": best["times"]}
    missed = [name for name, target in TARGETS.items() if reached[name] < target] if device == "cuda" and options.size == "mid" else []
    for name, target in TARGETS.items():
        print(f"{name}: {reached[name]:.3f}, target {target}" + (" MISSED" if name in missed else ""))
    return {
        "schema": "loudfail.benchmark/1", "machine": environment.describe(device), "options": {k: str(v) for k, v in vars(options).items()},
        "parameters": parameters, "work": work, "product_rate": rate, "ways": rows, "seconds": seconds, "without_reference": update_only,
        "share_without_reference": alone, "split": split, "targets": TARGETS, "reached": reached, "missed": missed, "took": time.monotonic() - begin,
    }  # fmt: skip


def make_run(options: argparse.Namespace, device: str, dtype: str) -> loop.Run:
    """The trainer's run on the model of that size. All prompts are the same text: one layout."""
    config = parse(
        {
            "micro_batch": options.samples,
            "model": {"dtype": dtype, "device": device},
            "data": {"extent": SIZES[options.size][1]},
            "rollout": {"calls": options.calls},
            "algorithm": {"prompts": options.prompts, "samples": options.samples, "sigmas": 1},
            "optimizer": {"learning_rate": 1e-5, "clip": UNCLIPPED},
            "monitors": {"policy": "warn"},
        }
    )
    kind = MidSize if options.size == "mid" else h3.H3
    with without_preloading():
        port = kind(scale="wide" if options.size == "mid" else "tiny", device=device, dtype=config.model.dtype)
    run = train.set_up(config, port)
    run.prompts = [", then ".join(synthetic.PROMPTS * 2)] * options.prompts  # of natural length
    run.score = run.score_again = loudness
    return run


def loudness(latents: Mapping[str, torch.Tensor], _: Sequence[str]) -> dict[str, torch.Tensor]:
    """A reward that costs nothing: the mean of all latents."""
    return {"total": sum(value.double().flatten(1).mean(1).cpu() for value in latents.values())}  # type: ignore[dict-item]


def begin_again(run: loop.Run, state: Mapping[str, torch.Tensor]) -> None:
    """That adapter as trained and as old policy, and an optimizer that has seen nothing."""
    for name in (adapters.TRAINED, adapters.OLD):
        run.port.load_adapter(name, state)
    with torch.no_grad():
        for name, parameter in run.port.trainable().items():
            run.parameters[name].copy_(parameter)
    run.optimizer.state.clear()


def make_updates(run: loop.Run) -> tuple[Callable[[], None], Callable[[], None]]:
    """The trainer's update and the straightforward one, on the same samples of the synthetic world, noise and levels."""
    config, port = run.config, run.port
    count = config.algorithm.prompts * config.algorithm.samples
    batch = loop.draw(run, 0)
    x0 = synthetic.sample(port.shapes(loop.case_of(config, port)), [0] * count, 1, port.time_axis["audio"])
    clean = {m: value.to(port.device) for m, value in x0.items()}
    grid = port.grid(config.rollout.calls, loop.case_of(run.config, run.port))
    steps = [Step({}, {m: grid[m][i].repeat(count) for m in grid}, {}, {}) for i in range(config.rollout.calls)]
    probability = torch.rand(count, generator=torch.Generator().manual_seed(2))

    def update() -> None:
        loop.improve(run, batch, Trajectory(steps), clean, probability)

    def plain() -> None:
        straightforward(run, loop.draw_pieces(run, 0, batch, Trajectory(steps), clean), probability)

    return update, plain


def straightforward(run: loop.Run, samples: Iterable[loop.Piece], probability: torch.Tensor) -> None:
    """The same update as one writes it down first: for each sample the old policy, the reference, the trained policy, the loss, its gradient."""
    port, algorithm = run.port, run.config.algorithm
    settings = nft.Settings(algorithm.beta, algorithm.clip, algorithm.weighting, algorithm.reference, loop.modality_weights(run))
    run.optimizer.zero_grad()
    for sample in samples:
        with torch.no_grad(), port.using(adapters.OLD):
            old = port.predict_velocity(sample.latents, sample.sigmas, sample.conditions)
        with torch.no_grad(), port.using(None):
            reference = port.predict_velocity(sample.latents, sample.sigmas, sample.conditions)
        velocity = port.predict_velocity(sample.latents, sample.sigmas, sample.conditions)
        r = probability[sample.rows].to(port.device)
        losses, _ = nft.objective(velocity, old, sample.target, sample.sigmas, r, settings, reference)
        (losses.sum() / len(probability)).backward()
    adapters.take_gradients(run.parameters, port.trainable())
    torch.nn.utils.clip_grad_norm_(run.parameters.values(), run.config.optimizer.clip)
    run.optimizer.step()
    adapters.give_values(run.parameters, port.trainable())
    run.optimizer.zero_grad()


def operations(run: loop.Run) -> dict[str, float]:
    """What a step must do, by hand: operations (a multiplication and an addition are two), and bytes.

    With P the weights of a block's projections, r the rank, S rows and D the inner width of attention, a sample and block need, forward:
    ``2·P·S + 2·r·(in + out)·S + 4·S²·D``; backward the same for inputs, twice for attention, and ``2·r·(in + out)·S`` for LoRA's weights.
    Nothing that trains is before the first refiner block, so its first projections need no input gradient. The reference policy needs the forward
    pass without LoRA. Bytes: each pass reads the base once, and what the backward pass needs of each row (inputs
    of the projections, q, k, v, the feed-forward's two halves) is written once and read once.
    """
    config, port = run.config, run.port
    count, actor = config.algorithm.prompts * config.algorithm.samples, port.actor
    shape = loop.extent_of(run)
    text = float(len(loop.condition_of(run, 0).embeds))
    rows = text + shape["frames"] * (shape["height"] // 2) * (shape["width"] // 2) + h3.STEREO * shape["audio"]
    plain = lora = first = weights = kept = 0.0
    inner = actor.config.num_attention_heads * actor.config.attention_head_dim
    for name, (out_features, in_features) in port.projections().items():
        here = text if name.startswith("token_refiner") else rows
        plain += 2 * out_features * in_features * here
        lora += 2 * port.adapter.rank * (out_features + in_features) * here
        kept += here * (in_features if not name.endswith(("to_k", "to_v")) else 0) + here * (out_features if ".to_" in name or "proj" in name else 0)
        weights += out_features * in_features
        if name.startswith("token_refiner.refiner_blocks.0.attn.to_") and ".to_out" not in name:
            first += 2 * in_features * (out_features + port.adapter.rank) * here
    attention = 4 * inner * (actor.config.num_layers * rows**2 + actor.config.num_refiner_layers * text**2)
    forward = plain + attention + lora
    backward = plain + 2 * attention + 2 * lora - first
    reference = plain + attention if config.algorithm.reference > 0 else 0.0
    width = 2 if port.dtype == "bfloat16" else 4
    return {
        "rows": rows,
        "attention": count * attention * (4 if config.algorithm.reference > 0 else 3),
        "trained": count * (forward + backward),
        "operations": count * (forward + backward + reference),
        "bytes": width * (3 * weights * config.algorithm.prompts + 2 * kept * count),
    }


def product_rate(device: str, size: int) -> float:
    """Operations a second of one large bfloat16 matrix product (float32 on a CPU), median of many, on random data."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rates = [2 * size**3 / timed(device, lambda: torch.mm(a, b)) for _ in range(30)]
    return statistics.median(rates[5:])


def timed(device: str, call: Callable[[], Any]) -> float:
    """Seconds of a call, the device's work included."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@contextlib.contextmanager
def going(run: loop.Run, way: Way) -> Iterator[None]:
    """The run as one way has it."""
    actor = run.port.actor
    run.config = replace(run.config, micro_batch=way.micro_batch)
    if way.attention != "native":
        actor.set_attention_backend(way.attention)
    if way.checkpointing:
        actor.enable_gradient_checkpointing()
    blocks = parallel.repeated_blocks(actor)
    if way.compiled and all(block._compiled_call_impl is None for block in blocks):
        parallel.compile_blocks(actor)
    old = contextlib.nullcontext() if way.reuse_old else mock.patch.object(adapters, "equal", return_value=False)
    stance = torch.compiler.set_stance("default" if way.compiled else "force_eager")
    try:
        with old, stance:
            yield
    finally:
        actor.disable_gradient_checkpointing()
        if way.attention != "native":
            actor.set_attention_backend("native")


def gradient_of(run: loop.Run, update: Callable[[], None], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The whole gradient of the first step, from the optimizer's first moment, ``(parameters,)`` float32 on the CPU."""
    begin_again(run, state)
    update()
    return torch.cat([run.optimizer.state[parameter]["exp_avg"].flatten().float().cpu() for _, parameter in sorted(run.parameters.items())])


def exact_gradient(options: argparse.Namespace, device: str, run: loop.Run, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same gradient with the same weights in float32, one sample a call."""
    if device == "cuda":
        torch.cuda.empty_cache()
    other = make_run(options, device, "float32")
    here = dict(run.port.actor.named_parameters())
    with torch.no_grad():
        for name, parameter in other.port.actor.named_parameters():
            parameter.copy_(here[name])
    with going(other, Way("float32", 1, compiled=False)):
        return gradient_of(other, make_updates(other)[1], state)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """``‖got − want‖ / ‖want‖``."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def without_reference(run: loop.Run, device: str, repeats: int, state: Mapping[str, torch.Tensor]) -> float:
    """Seconds of an update without the reference term: one forward and one backward pass."""
    config, times = run.config, []
    run.config = replace(config, algorithm=replace(config.algorithm, reference=0.0))
    update = make_updates(run)[0]
    for _ in range(repeats + 1):
        begin_again(run, state)
        times.append(timed(device, update))
    run.config = config
    return statistics.median(times[1:])


def split_of(run: loop.Run, device: str, state: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Seconds of the parts of the fastest of a few whole steps, the rollout on the actor itself; the slower ones compile."""
    begin_again(run, state)
    loop.hand_over(run)
    splits = []
    for _ in range(5):
        run.timing.clear()
        start = time.monotonic()
        loop.train_step(run)
        if device == "cuda":
            torch.cuda.synchronize()
        whole = time.monotonic() - start
        splits.append({**run.timing, "other": whole - sum(run.timing.values()), "whole": whole})
    return min(splits, key=lambda split: split["whole"])


def write_profile(update: Callable[[], None], device: str, file: Path) -> None:
    """A table of the kernels of one update by the device's time."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU]) as profile:
        update()
        if device == "cuda":
            torch.cuda.synchronize()
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    file.write_text(profile.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=110))


def show(rows: Sequence[Mapping[str, Any]], rate: float) -> None:
    print(f"matrix product: {rate / 1e12:.1f} Tflop/s")
    print("| way | s a step | samples/s | rows/s | Tflop/s | of the product's rate | × | GiB | gradient from float32's | from the first row's |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['way']} | {row['seconds']:.3f} ({row['least']:.3f}–{row['most']:.3f}) | {row['samples_per_second']:.2f} "
            f"| {row['rows_per_second']:.0f} | {row['tflops']:.1f} | {100 * row['share']:.1f} % | {row['times']:.2f} | {row['memory_gib']:.1f} "
            f"| {row['from_float32']:.2e} | {row['from_straightforward']:.2e} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
