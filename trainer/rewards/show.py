"""One sample for people: an mp4 with sound, a picture, an exact copy, and its sub-scores and monitors.

python -m loudfail.trainer.rewards.show h3 --prompt "a bell rings twice" --scorer clap=DIR --scorer imagebind=FILE --out sample
python -m loudfail.trainer.rewards.show sample/sample.npz --prompt "a bell rings twice" --scorer event_text --out again
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from loudfail.harness.media import Media


def sample(port_name: str, prompt: str, *, seed: int, calls: int, weights: str | None) -> Media:
    """Media of one sample that a port generates from noise: the vendor's own sampling loop at the port's smallest extent, decoded."""
    import torch

    from loudfail.harness.case import smallest
    from loudfail.harness.registry import find_port

    port = find_port(port_name)(weights=weights)
    try:
        case = smallest(port, seed=seed, prompts=(prompt,))
        with torch.no_grad():
            trajectory = port.vendor_rollout(case.normal("noise", port.shapes(case)), calls, port.conditions(case))
            return port.decode(trajectory.final)[0]
    finally:
        if hasattr(port, "close"):
            port.close()


def main(arguments: Sequence[str] | None = None) -> int:
    from loudfail.harness.media_files import draw_media, load_media, save_media, write_mp4
    from loudfail.trainer.rewards import monitors
    from loudfail.trainer.rewards.build import SCORERS, TINY, make_scorer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="PORT|FILE.npz", help="a port that generates the sample, or a saved one")
    parser.add_argument("--prompt", required=True)
    known = f"one of {', '.join(SCORERS)}; {TINY} as the source for tests"
    parser.add_argument("--scorer", action="append", default=[], metavar="NAME[=SOURCE]", help=known)
    parser.add_argument("--out", type=Path, default=Path("sample"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=8, help="model calls of the sampling loop")
    parser.add_argument("--weights", help="the port's checkpoint folder; tiny random weights without")
    options = parser.parse_args(arguments)

    if options.source.endswith(".npz"):
        media = load_media(options.source)
    else:
        media = sample(options.source, options.prompt, seed=options.seed, calls=options.calls, weights=options.weights)
    options.out.mkdir(parents=True, exist_ok=True)
    save_media(media, options.out / "sample.npz")
    write_mp4(media, options.out / "sample.mp4")
    draw_media(media, title=options.prompt).save(options.out / "sample.png")

    frames = media.video.frames.shape
    print(f"video   {frames[0]} frames {frames[2]}x{frames[1]} at {media.video.fps:g} fps, {media.video.seconds:.3f} s")
    print(f"audio   stereo, {media.audio.waveform.shape[1]} samples at {media.audio.sample_rate} Hz, {media.audio.seconds:.3f} s")
    print(f"files   {', '.join(str(options.out / name) for name in ('sample.mp4', 'sample.png', 'sample.npz'))}")
    for spec in options.scorer:
        scorer = make_scorer(spec)
        for key, value in scorer.score([media], [options.prompt]).items():
            print(f"score   {key:<26}{value.item():+.6f}")
        print(f"        by {scorer.describe()}")
    for monitor in monitors.SIGNAL:
        print(f"monitor {monitor.name:<26}{monitor.measure(media):+.4f}   {monitor.unit}; worse when {monitor.worse}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
