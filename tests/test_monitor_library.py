"""The monitors in somebody else's trainer: the example of the documentation runs on the real engine at TP = 2, and stops under its faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from loudfail.harness import registry
from loudfail.trainer.monitor import MonitorFired

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "trainer.md").read_text()
EXAMPLE = re.search(r"<!-- runs -->\n```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[dict[str, Any], str]]:
    """What the example's first two paragraphs define, and the text of the last one, which is a hand-over."""
    assert EXAMPLE is not None
    imports, setup, hand_over = EXAMPLE[1].split("\n\n")
    names: dict[str, Any] = {}
    exec(compile(f"{imports}\n{setup}", "docs/trainer.md", "exec"), names)
    yield names, hand_over
    names["port"].close()


def test_the_example_is_short() -> None:
    assert EXAMPLE is not None
    assert len([line for line in EXAMPLE[1].splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize(
    ("fault", "monitor"),
    [
        (None, ""),
        ("sync::fc1_lora_is_bound_and_not_applied_when_sharded", "adapter_delta"),
        ("sync::fc1_lora_is_skipped_when_sharded", "adapter_bound"),
        ("sync::the_adapter_registers_and_binds_to_nothing", "adapter_bound"),
        ("sync::fc1_lora_halves_are_swapped", "adapter_delta"),
        ("rollout::two_prompt_tokens_change_places", "velocity_replay"),
        ("prompts::the_rollout_wraps_the_prompt_in_a_chat_template", "prompt_ids"),
    ],
)
def test_a_hand_over_is_judged(parts: tuple[dict[str, Any], str], fault: str | None, monitor: str) -> None:
    names, hand_over = parts
    port, code = names["port"], compile(hand_over, "docs/trainer.md", "exec")
    broken = next(one for one in registry.faults() if one.id == fault).inject(port) if fault else nullcontext()
    port.engine(2).remove_adapter()
    names["watch"].counts.clear()
    if not fault:
        exec(code, names)
        assert {name: (count["ran"], count["fired"]) for name, count in names["watch"].counts.items()} == dict.fromkeys(
            ("adapter_bound", "adapter_version", "adapter_delta", "velocity_replay", "prompt_ids"), (1, 0)
        )
        return
    with broken, pytest.raises(MonitorFired) as fired:
        exec(code, names)
    assert monitor in {reading.monitor for reading in fired.value.readings}
