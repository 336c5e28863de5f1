"""How many tokens each step fills, and how strongly each step is guided. Plain numbers, made before the loop."""

from __future__ import annotations

import itertools
import math

from arpg.errors import require


def step_sizes(schedule: str | tuple[int, ...], num_tokens: int, steps: int) -> tuple[int, ...]:
    """Tokens per step: all at least 1, and together `num_tokens`. More steps than tokens are clamped.

    `arccos` and `cosine` are the paper's: the share still masked after step s (from 0) is
    arccos((s+1)/S) / (pi/2) or cos(pi (s+1) / 2S). `linear` makes equal steps, the larger ones last.
    """
    require(steps >= 1, f"steps is {steps}; expected 1 or more")
    if not isinstance(schedule, str):
        require(
            sum(schedule) == num_tokens,
            f"schedule {list(schedule)} fills {sum(schedule)} tokens; there are {num_tokens} to fill",
        )
        return schedule
    if num_tokens == 0:
        return ()
    steps = min(steps, num_tokens)
    if schedule == "linear":
        edges = [num_tokens * s // steps for s in range(steps + 1)]
        return tuple(b - a for a, b in itertools.pairwise(edges))
    sizes: list[int] = []
    masked = num_tokens
    for s in range(1, steps):
        ratio = math.acos(s / steps) / (math.pi / 2) if schedule == "arccos" else math.cos(math.pi / 2 * s / steps)
        # At least one token now, and one for each step still to come.
        left = max(steps - s, min(math.floor(num_tokens * ratio), masked - 1))
        sizes.append(masked - left)
        masked = left
    return (*sizes, masked)


def guidance_scales(kind: str, guidance: float, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """The scale s of each step in uncond + s (cond - uncond); 1 leaves the conditional logits as they are.

    `linear` ramps from 1 to `guidance` with the share of tokens filled after the step. `cutoff` leaves the last quarter
    of the steps (rounded up) without guidance.
    """
    if kind == "none":
        return (1.0,) * len(sizes)
    if kind == "constant":
        return (guidance,) * len(sizes)
    if kind == "cutoff":
        last = -(-len(sizes) // 4)
        return (guidance,) * (len(sizes) - last) + (1.0,) * last
    total, done, scales = sum(sizes), 0, []
    for size in sizes:
        done += size
        scales.append(1.0 + (guidance - 1.0) * done / total)
    return tuple(scales)
