"""The ablations' differences: the paper's findings beside what was measured, and which differences exceed the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ablation_lines import FEW_STEPS, ORDER_STEPS, SEARCH, STEPS, final, matching, noise, of_order, unguided

from arpg.evaluation.sweep import Line
from arpg.settings import ORDERS, SCHEDULES
from arpg.tables import markdown_table

PAPER_ORDERS = ("random", "raster", "spiral-in", "spiral-out", "z-curve", "alternate")


def verdicts(lines: Sequence[Line]) -> str:
    """The paper's findings, each with what was measured here; differences count where they exceed the noise."""
    few, many = min(STEPS), max(STEPS)
    of = {(s, a): final(lines, steps=s, attention=a) for s in STEPS for a in ("block", "causal")}
    rows: list[list[Any]] = []
    pairs = [(s, block, causal) for s in STEPS if (block := of[s, "block"]) and (causal := of[s, "causal"])]
    if len(pairs) == len(STEPS):
        better = [s for s, block, causal in pairs if causal["fid"] - block["fid"] > noise(causal, block)]
        s, block, causal = max(pairs, key=lambda pair: float(pair[2]["fid"] - pair[1]["fid"]))
        apart_most = f"{causal['fid'] - block['fid']:+.2f} ± {noise(causal, block):.2f}"
        text = f"causal less block-wise is at most {apart_most}, at {s} steps"
        rows.append(["With few steps block-wise is better than causal", text, bool(better)])
    ends = [of[s, a] for s in (few, many) for a in ("block", "causal")]
    if None not in ends:
        block_few, causal_few, block_many, causal_many = (line for line in ends if line)
        apart = [causal["fid"] - block["fid"] for block, causal in ((block_few, causal_few), (block_many, causal_many))]
        noises = [noise(causal_few, block_few), noise(causal_many, block_many)]
        shown = [f"{d:+.2f} ± {n:.2f} at {s} steps" for d, n, s in zip(apart, noises, (few, many), strict=True)]
        rows.append(
            [
                "Fewer steps hurt causal decoding more than block-wise",
                ", ".join(shown),
                apart[0] - apart[1] > sum(noises),
            ]
        )
        rows.append([f"With one token per step ({many}) both are the same", shown[1], abs(apart[1]) <= noises[1]])
        scales = [line["settings"]["guidance"] for line in (block_few, block_many)]
        text = f"{scales[0]:g} at {few} steps, {scales[1]:g} at {many}"
        rows.append(["The best guidance falls with the number of steps", text, scales[0] > scales[1]])
    blocks = [line for s in sorted(STEPS) if (line := of[s, "block"])]
    if len(blocks) == len(STEPS):
        best, most = min(blocks[:-1], key=lambda line: float(line["fid"])), blocks[-1]
        text = f"{best['fid']:.2f} at {best['settings']['steps']} steps, {most['fid']:.2f} at {many}"
        better = most["fid"] - best["fid"] > noise(most, best)
        rows.append(["Block-wise, some steps are better than one token per step", text, better])
    orders = {order: line for order in PAPER_ORDERS if (line := of_order(lines, order, many))}
    if len(orders) == len(PAPER_ORDERS):
        ranked = sorted(orders, key=lambda order: float(orders[order]["fid"]))
        text = ", ".join(f"{order} {orders[order]['fid']:.2f}" for order in ranked)
        first = orders["random"]["fid"] - orders[ranked[0]]["fid"] <= noise(orders["random"], orders[ranked[0]])
        rows.append([f"No order is better than random ({many} steps)", text, first])
        rows.append([f"Spirals are worst ({many} steps)", text, set(ranked[-2:]) == {"spiral-in", "spiral-out"}])
    header = ["the paper", "here", "agrees"]
    return markdown_table(header, [[*row[:2], "yes" if row[2] else "no"] for row in rows]) if rows else ""


def gap(lines: Sequence[Line]) -> str:
    """Causal less block-wise, and what fewer steps cost block-wise; then the same pairs in the search."""
    most, rows, pairs = final(lines, steps=max(STEPS)), [], []
    for steps in sorted(STEPS):
        block, causal = (final(lines, steps=steps, attention=attention) for attention in ("block", "causal"))
        if block is None or causal is None:
            continue
        share, apart, half = 100 / block["fid"], causal["fid"] - block["fid"], noise(causal, block)
        cost = None if most in (None, block) else _difference(block, most)
        rows.append([steps, f"{apart:+.2f} ± {half:.2f}", f"{share * apart:+.1f} ± {share * half:.1f}%", cost])
        if steps != max(STEPS):
            for searched in matching(lines, SEARCH, steps=steps):
                scale = searched["settings"]["guidance"]
                others = matching(lines, SEARCH, steps=steps, attention="causal", guidance=scale)
                pairs += [other["fid"] - searched["fid"] for other in others]
    if not rows:
        return ""
    header = ["steps", "FID, causal less block-wise", "of block-wise", f"block-wise, less that of {max(STEPS)} steps"]
    if not pairs:
        return markdown_table(header, rows)
    return markdown_table(header, rows) + (
        f"\nIn the search ({SEARCH:,} images; the same scale, fewer than {max(STEPS)} steps) causal is higher in "
        f"{sum(apart > 0 for apart in pairs)} of {len(pairs)} pairs, by {sum(pairs) / len(pairs):.2f} on average.\n"
    )


def differences(lines: Sequence[Line]) -> str:
    """FID less that of the model's own way with as many steps; in bold where it exceeds the noise."""
    columns = sorted(ORDER_STEPS)
    plain = {steps: final(lines, steps=steps) for steps in columns}
    changed: dict[str, dict[int, Line | None]] = {}
    for order in ORDERS[1:]:
        changed[f"order {order}, not random"] = {steps: of_order(lines, order, steps) for steps in columns}
    for schedule in SCHEDULES[1:]:
        found = {steps: final(lines, steps=steps, schedule=schedule) for steps in FEW_STEPS}
        changed[f"{schedule} steps, not arccos"] = found
    constant = {steps: final(lines, steps=steps, guidance_schedule="constant") for steps in FEW_STEPS}
    changed["constant guidance, not linear"] = constant
    changed["no guidance"] = {steps: unguided(lines, steps) for steps in FEW_STEPS}
    rows = []
    for name, of in changed.items():
        cells = [_difference(of.get(steps), plain[steps]) for steps in columns]
        if any(cells):
            rows.append([name, *cells])
    return markdown_table(["FID, changed less plain", *(f"{steps} steps" for steps in columns)], rows) if rows else ""


def _difference(line: Line | None, plain: Line | None) -> str | None:
    if line is None or plain is None:
        return None
    apart, half = line["fid"] - plain["fid"], noise(line, plain)
    text = f"{apart:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(apart) > half else text
