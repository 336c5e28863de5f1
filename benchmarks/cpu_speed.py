"""Compare our loop on a CPU with a plain loop written like the published code, alternating in one run; ratios only.

The plain loop has separate projections, grows its cache by concatenation, rotates queries and keys as complex numbers
(cast to float32 and back) and samples by `multinomial`, all in float32. Before anything is timed, both are checked to
compute the same: with our noise the plain loop must sample the same tokens. bfloat16 is compared on the same context,
step by step. Tokens only; the split of the time includes pixels.

Where the model has weights, also the times a user sees: to import and load it in a new process, and for an image with
the model's defaults, from class to pixels. CPU time is that of all threads; on a busy machine it is the better measure.

python -m benchmarks.cpu_speed --model arpg-l --rounds 3 --out benchmarks/results/cpu-speed-arpg-l.json
python -m benchmarks.cpu_speed --model garden --rounds 9 --out benchmarks/results/cpu-speed-garden.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpg.bench.case import Case, open_pipeline
from arpg.bench.profile import split_time
from arpg.bench.record import environment
from arpg.config import MODELS
from arpg.decode import Engine
from arpg.decode.sampling import sample
from arpg.device import has_bfloat16, set_threads
from arpg.files import write_json
from arpg.model import ARPG
from arpg.noise import seed_keys
from arpg.pipeline import Pipeline
from arpg.quantization.packed import unpack_linears
from benchmarks.measures import agreement, on_context, relative_error, tokens_of

Sample = Callable[[Tensor, Tensor], Tensor]  # logits_BSV, position_BS


class PlainLoop:
    """The same network and steps without any optimisation. Rows: conditional, then unconditional."""

    def __init__(self, model: ARPG) -> None:
        config = model.config
        assert (config.shared_kv, config.positions) == (True, "rope")
        self.config, self.heads, self.grid = config, config.num_heads, config.grid
        self.table, self.head = model.embedding.weight, model.head.weight
        self.pass1, self.pass2 = ([self._layer(block) for block in blocks] for blocks in (model.pass1, model.pass2))
        self.memory_norm, self.norm = model.memory_norm.weight, model.norm.weight
        memory_kv: Any = model.memory_kv[0]
        self.to_k, self.to_v = (part.contiguous() for part in memory_kv.weight.chunk(2))
        self.rotations_N = self._rotations()

    @staticmethod
    def _layer(block: Any) -> dict[str, Tensor]:
        attention, ffn = block.attn, block.ffn
        own = attention.qkv.weight.chunk(3) if hasattr(attention, "qkv") else (attention.q.weight,)
        gate, up = ffn.gate_up.weight.chunk(2)
        weights = dict(zip("qkv", own, strict=False)) | {"out": attention.out.weight, "down": ffn.down.weight}
        weights |= {"gate": gate, "up": up, "norm1": block.attn_norm.weight, "norm2": block.ffn_norm.weight}
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def _rotations(self) -> Tensor:
        """Return the rotations `[1 + N, K / 2]`, complex: zero for the class, then the grid."""
        quarter = self.config.head_dim // 4
        exponents = torch.arange(quarter) / quarter
        rows, columns = torch.meshgrid(torch.arange(self.grid[0]), torch.arange(self.grid[1]), indexing="ij")
        angles = torch.cat([place.reshape(-1, 1) * 10000.0**-exponents for place in (rows, columns)], dim=-1)
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.cat((torch.zeros_like(turns[:1]), turns))

    def _rotate(self, x_BSD: Tensor, rotation_BSK: Tensor) -> Tensor:
        x = x_BSD.unflatten(-1, (self.heads, -1))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotation_BSK.unsqueeze(2)).flatten(3).type_as(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return F.linear(mixed.transpose(1, 2).flatten(2), out)

    def _ffn(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        x = self._norm(x, w["norm2"])
        return F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])

    @torch.no_grad()
    def run(
        self, labels_B: Tensor, order_BN: Tensor, sizes: list[int], scales: list[float], sample_ids: Sample
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the ids in raster order, and the guided logits of each step."""
        config, batch = self.config, len(labels_B)
        rows_B = torch.cat((config.first_class_id + labels_B, torch.full((batch,), config.null_class_id)))
        ids_BN = torch.zeros_like(order_BN)
        cache: list[tuple[Tensor, Tensor] | None] = [None] * (len(self.pass1) + 1)
        x, turn = F.embedding(rows_B[:, None], self.table), self.rotations_N[:1].expand(2 * batch, 1, -1)
        logits, done = [], 0
        for size, scale in zip(sizes, scales, strict=True):
            for i, w in enumerate(self.pass1):
                normed = self._norm(x, w["norm1"])
                q, k = (self._rotate(F.linear(normed, w[name]), turn) for name in "qk")
                cache[i] = known = self._grow(cache[i], k, F.linear(normed, w["v"]).unflatten(-1, (self.heads, -1)))
                x = x + self._attend(q, *known, w["out"])
                x = x + self._ffn(x, w)
            x = self._norm(x, self.memory_norm)
            key = self._rotate(F.linear(x, self.to_k), turn)
            cache[-1] = memory = self._grow(cache[-1], key, F.linear(x, self.to_v).unflatten(-1, (self.heads, -1)))

            position_BS = order_BN[:, done : done + size]
            turn = self.rotations_N[1 + position_BS].repeat(2, 1, 1)
            x = self.table[config.mask_id].expand(2 * batch, size, -1)
            for w in self.pass2:
                q = self._rotate(F.linear(self._norm(x, w["norm1"]), w["q"]), turn)
                x = x + self._attend(q, *memory, w["out"])
                x = x + self._ffn(x, w)
            cond, uncond = F.linear(self._norm(x, self.norm), self.head).chunk(2)
            logits.append(uncond + scale * (cond - uncond))
            sampled_BS = sample_ids(logits[-1], position_BS)
            ids_BN = ids_BN.scatter(1, position_BS, sampled_BS)
            x, done = F.embedding(sampled_BS, self.table).repeat(2, 1, 1), done + size
        return ids_BN, logits

    @staticmethod
    def _grow(old: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (key, value) if old is None else (torch.cat((old[0], key), 1), torch.cat((old[1], value), 1))


def multinomial(logits_BSV: Tensor, position_BS: Tensor) -> Tensor:
    return torch.multinomial(logits_BSV.softmax(-1).flatten(0, 1), 1).reshape(position_BS.shape)


LOADING = """
import json, sys, time
marks = [(time.perf_counter(), time.process_time())]
from arpg import Pipeline
marks.append((time.perf_counter(), time.process_time()))
Pipeline.from_pretrained(sys.argv[1], device="cpu", precision=sys.argv[2])
marks.append((time.perf_counter(), time.process_time()))
print(json.dumps(marks))
"""


def time_loading(model: str, dtype: str, *, rounds: int) -> dict[str, dict[str, float]]:
    """Return the best times of importing the package and of loading the model, each in a new process."""
    found = []
    for _ in range(rounds):
        run = subprocess.run([sys.executable, "-c", LOADING, model, dtype], check=True, capture_output=True, text=True)
        marks = json.loads(run.stdout)
        found.append([[b - a for a, b in zip(marks[i], marks[i + 1], strict=True)] for i in (0, 1)])
    return {
        name: {kind: round(min(times[i][k] for times in found), 2) for k, kind in enumerate(("wall", "CPU"))}
        for i, name in enumerate(("import", "load"))
    }


def time_image(pipe: Pipeline, *, rounds: int) -> dict[str, float]:
    """Return the median and the least seconds of an image with the model's defaults, after a first one."""
    pipe.generate(0, seed=0)
    wall, busy = [], []
    for seed in range(rounds):
        began, began_busy = time.perf_counter(), time.process_time()
        pipe.generate(0, seed=seed)
        wall.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    times = {"wall": statistics.median(wall), "least wall": min(wall), "CPU": statistics.median(busy)}
    return {name: round(seconds, 2) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="arpg-l", help="a preset (random weights), an installed name or a folder")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    threads = set_threads(options.threads)
    random = options.model in MODELS
    pipes = {
        dtype: open_pipeline(options.model, random=random, device="cpu", dtype=dtype)
        for dtype in ("float32", *(["bfloat16"] if has_bfloat16() else []))
    }
    model = pipes["float32"].model
    case = Case(
        options.model, options.batch, pipes["float32"].sampling.settings(steps=options.steps), model.config.grid
    )
    request, plan = case.request(model, 0)
    labels = torch.arange(options.batch) % model.config.num_classes
    order = torch.tensor([sample_plan.order for sample_plan in plan.samples])
    sizes, scales = list(plan.samples[0].sizes), list(plan.samples[0].scales)
    loose = unpack_linears(open_pipeline(options.model, random=random, device="cpu", dtype="float32").model)
    plain = PlainLoop(loose)

    # The same tokens, and the same logits on the way.
    ids = tokens_of(Engine(model, "eager"), case)
    keys = seed_keys(request.seeds).to(model.device)
    theirs, logits = plain.run(labels, order, sizes, scales, lambda x, at: sample(x, case.settings, keys, at))
    context = on_context(model, case, ids)
    error = max(relative_error(a, b) for (a, _), b in zip(context, logits, strict=True))
    assert torch.equal(ids, theirs), "the plain loop samples other tokens"
    assert error < 1e-3, f"the plain loop has other logits: {error}"
    about = {"same tokens": True, "logit error": float(f"{error:.2g}")}
    if "bfloat16" in pipes:
        half = agreement(on_context(pipes["bfloat16"].model, case, ids), context)
        about |= {f"bfloat16 {name}": value for name, value in half.items()}

    runs: dict[str, Callable[[], object]] = {"plain": lambda: plain.run(labels, order, sizes, scales, multinomial)}
    runs["float32, not packed"] = lambda: tokens_of(Engine(loose, "eager"), case)
    runs |= {name: partial(tokens_of, Engine(pipe.model, "eager"), case) for name, pipe in pipes.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    busy: dict[str, list[float]] = {name: [] for name in runs}  # CPU time: without that of other processes
    for _ in range(options.rounds):
        for name, run in runs.items():
            began, began_busy = time.perf_counter(), time.process_time()
            run()
            times[name].append(time.perf_counter() - began)
            busy[name].append(time.process_time() - began_busy)
    ratios = {
        name: {
            "by medians": round(statistics.median(times["plain"]) / statistics.median(times[name]), 2),
            "by minima": round(min(times["plain"]) / min(times[name]), 2),
            "by CPU time": round(statistics.median(busy["plain"]) / statistics.median(busy[name]), 2),
        }
        for name in list(runs)[1:]
    }
    tokenizer = pipes["float32"].tokenizer
    named = {"float32, not packed": Pipeline(loose, tokenizer), **pipes}
    split = {name: split_time(pipe, case, seed=0) for name, pipe in named.items()}
    settings = {"model": options.model, "batch": options.batch, "steps": case.settings.steps, "threads": threads}
    seen: dict[str, Any] = {}
    if not random:
        seen["loading in a new process, seconds"] = {
            name: time_loading(options.model, name, rounds=options.rounds) for name in pipes
        }
        seen[f"an image in {case.settings.steps} steps, seconds"] = {
            name: time_image(pipe, rounds=options.rounds) for name, pipe in pipes.items()
        }
    result = {
        "benchmark": "cpu_speed",
        **settings,
        **seen,
        "times faster than the plain loop": ratios,
        "where the time goes, %": {
            name: {part: round(100 * seconds / sum(parts.values()), 1) for part, seconds in parts.items()}
            for name, parts in split.items()
        },
        "check": about,
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "where": environment(torch.device("cpu")),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
