"""Estimate what training costs: a step on many GPUs under each sharding, and the memory of one device.

The time of a step starts from one measured number, the share of the peak that forward and backward reach on one GPU
(MFU), and adds:

- AdamW with a moving average, limited by memory bandwidth: `OPTIMIZER_BYTES` for each parameter that a GPU holds.
- Collectives by the ring model: a reduce-scatter or all-gather of S bytes over n GPUs moves S (n - 1) / n bytes through
  the slowest link, plus `latency` for each of log2(n) hops; an all-reduce is both.
- Overlap: `overlap` of the computation that may run meanwhile hides communication; only the rest adds to the step.

It is an estimate. Stragglers, data loading, snapshots and restarts are not in it, and with less than `FILLING_BATCH`
images per GPU the matrix products no longer fill the GPU, so that a step takes longer than estimated.

`fit_to_device` chooses the parts of a batch by the memory of one device. Measured: ARPG-L on an H200 (batch 256, bf16)
takes 53.9 GiB, the formula says 57; `garden` on a CPU in float32 takes 52 MiB for each image, the formula says 51.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from arpg.config import ModelConfig
from arpg.device import available_bytes, meta_device, training_precision
from arpg.errors import InputError, require
from arpg.model import ARPG
from arpg.tables import markdown_table, significant
from arpg.train.objective import CHUNK
from arpg.train.recipe import ModelRecipe

STRATEGIES = ("ddp", "fsdp", "hsdp")
VALUE_BYTES = 4  # weights and gradients are float32, also on the network; products are bfloat16 by autocast
STATE_BYTES = 20  # of a parameter: weight, gradient, two moments, moving average
OPTIMIZER_BYTES = 40  # read and written for each parameter: clip, AdamW, moving average
ACTIVATION_BYTES = 32  # of a token, layer and channel: ARPG-L with 256 images takes 53.9 GiB (train-arpg-l.json)
FILLING_BATCH = 32  # images
LOGIT_BYTES = 12  # a logit of the chunk in work, its softmax and its gradient
CPU_BUDGET = 4 << 30  # more does not make a step on a CPU faster

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """GPUs and the links between them; bandwidths in bytes per second, one direction, for each GPU."""

    gpus: int
    flops: float  # peak of one GPU in bfloat16
    memory_bandwidth: float
    gpus_per_node: int = 8
    node_bandwidth: float = 360e9  # between the GPUs of a node
    network_bandwidth: float = 40e9  # between nodes
    latency: float = 15e-6  # seconds of one hop

    def __post_init__(self) -> None:
        for name in ("gpus", "flops", "memory_bandwidth", "gpus_per_node", "node_bandwidth", "network_bandwidth"):
            value = getattr(self, name)
            require(value > 0, f"{name} is {value}; expected more than 0")
        even = self.gpus <= self.gpus_per_node or self.gpus % self.gpus_per_node == 0
        require(even, f"gpus is {self.gpus}; expected full nodes of {self.gpus_per_node}")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def gpus_in_node(self) -> int:
        """GPUs of a node that take part."""
        return min(self.gpus, self.gpus_per_node)

    def scatter_seconds(self, size: float, *, calls: int = 1) -> float:
        """Return the seconds of `calls` reduce-scatters or all-gathers over all GPUs, of `size` bytes together."""
        link = self.node_bandwidth
        if self.nodes > 1:  # the rings of a node leave it through all its network cards
            link = min(link, self.gpus_per_node * self.network_bandwidth)
        return self._ring_seconds(size, self.gpus, link, calls)

    def scatter_seconds_in_node(self, size: float, *, calls: int = 1) -> float:
        """Return the same over the GPUs of one node."""
        return self._ring_seconds(size, self.gpus_in_node, self.node_bandwidth, calls)

    def scatter_seconds_between_nodes(self, size: float, *, calls: int = 1) -> float:
        """Return the same over one GPU of each node; all GPUs of a node do it at the same time."""
        return self._ring_seconds(size, self.nodes, self.network_bandwidth, calls)

    def _ring_seconds(self, size: float, members: int, bandwidth: float, calls: int) -> float:
        if members == 1:
            return 0.0
        return size * (members - 1) / members / bandwidth + calls * math.log2(members) * self.latency


@dataclass(frozen=True)
class StepCost:
    """One training step of a model on a cluster."""

    strategy: str
    gpus: int
    batch_per_gpu: int
    compute: float  # seconds, of forward and backward
    optimizer: float  # seconds
    exposed: float  # seconds of communication that computation does not hide
    sent: float  # bytes that each GPU sends
    memory: float  # bytes of each GPU

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.optimizer + self.exposed

    @property
    def images_per_second(self) -> float:
        """Images per second of all GPUs."""
        return self.gpus * self.batch_per_gpu / self.seconds

    @property
    def fills_gpu(self) -> bool:
        """Whether the batch of a GPU is large enough for the measured MFU to hold."""
        return self.batch_per_gpu >= FILLING_BATCH


def step_cost(
    config: ModelConfig, cluster: Cluster, strategy: str, *, batch_size: int, mfu: float, overlap: float = 0.8
) -> StepCost:
    """Estimate a step of `batch_size` images in all; `mfu` is that of forward and backward on one GPU."""
    require(strategy in STRATEGIES, f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    require(0 < mfu <= 1, f"mfu is {mfu}; expected a share of the peak, above 0 and at most 1")
    require(0 <= overlap <= 1, f"overlap is {overlap}; expected a share from 0 to 1")
    fits = batch_size >= cluster.gpus and batch_size % cluster.gpus == 0
    require(fits, f"batch_size is {batch_size}; expected a multiple of the {cluster.gpus} GPUs")
    batch = batch_size // cluster.gpus
    layers = config.pass1_layers + config.pass2_layers
    parameters = num_parameters(config)
    shards = {"ddp": 1, "fsdp": cluster.gpus, "hsdp": cluster.gpus_in_node}[strategy]
    weights = VALUE_BYTES * parameters  # as many bytes as the gradients

    compute = 3 * forward_flops(config, config.grid) * batch / (mfu * cluster.flops)
    optimizer = OPTIMIZER_BYTES * parameters / shards / cluster.memory_bandwidth
    calls = layers + 1  # one for each block, one for the rest
    hiding, gathered = compute, 0.0
    if strategy == "ddp":
        communication = 2 * cluster.scatter_seconds(weights, calls=calls)
        sent = 2 * weights * (cluster.gpus - 1) / cluster.gpus
        hiding = compute * 2 / 3  # gradients exist in the backward pass only
    else:
        # Weights are gathered for the forward and again for the backward pass; gradients are scattered once.
        scatter = cluster.scatter_seconds if strategy == "fsdp" else cluster.scatter_seconds_in_node
        communication = 3 * scatter(weights, calls=calls)
        sent = 3 * weights * (shards - 1) / shards
        if strategy == "hsdp":
            share = weights / shards  # all-reduced between nodes while the node's own links go on with other blocks
            communication = max(communication, 2 * cluster.scatter_seconds_between_nodes(share, calls=calls))
            sent += 2 * share * (cluster.nodes - 1) / cluster.nodes
        gathered = 2 * weights / calls if shards > 1 else 0.0  # the block in use and the next one
    tokens = config.grid[0] * config.grid[1]
    activations = ACTIVATION_BYTES * tokens * layers * config.width * batch
    return StepCost(
        strategy=strategy,
        gpus=cluster.gpus,
        batch_per_gpu=batch,
        compute=compute,
        optimizer=optimizer,
        exposed=max(0.0, communication - overlap * hiding),
        sent=sent,
        memory=STATE_BYTES * parameters / shards + gathered + activations,
    )


def forward_flops(config: ModelConfig, grid: tuple[int, int]) -> float:
    """Count the operations of one image in one teacher-forced pass: matrix products, and attention without causality.

    Text and control encoders are not counted.
    """
    tokens, width = grid[0] * grid[1], config.width
    ffn = 3 * width * config.ffn_width
    pass1 = config.pass1_layers * (4 * width**2 + ffn)
    pass2 = config.pass2_layers * (2 * width**2 + ffn)
    memory = 2 * width**2 * (1 if config.shared_kv else config.pass2_layers)
    attention = 2 * tokens * width * (config.pass1_layers + config.pass2_layers)
    return 2.0 * tokens * (pass1 + pass2 + memory + attention + width * config.vocab_size)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model."""
    with meta_device():
        return sum(parameter.numel() for parameter in ARPG(config).parameters())


def cost_table(costs: Sequence[StepCost], *, steps: int) -> str:
    """Return the estimates of a run of `steps` steps as a Markdown table, one row for each cost."""
    header = ("GPUs", "sharding", "images per GPU", "step, ms", "exposed network, ms", "sent, GB", "memory, GiB")
    rows = []
    for cost in costs:
        seconds = cost.seconds * steps
        rows.append(
            (
                cost.gpus,
                cost.strategy,
                f"{cost.batch_per_gpu}" if cost.fills_gpu else f"{cost.batch_per_gpu} (few)",
                significant(cost.seconds * 1e3, 3),
                significant(cost.exposed * 1e3, 3),
                significant(cost.sent / 1e9, 3),
                significant(cost.memory / 2**30, 3),
                f"{significant(cost.images_per_second, 3):,.0f}",
                significant(seconds / 86400, 3),
                f"{significant(seconds / 3600 * cost.gpus, 3):,.0f}",
            )
        )
    return markdown_table((*header, "images/s", "days", "GPU hours"), rows)


def training_bytes(config: ModelConfig, batch_size: int, *, precision: str, trained: int | None = None) -> int:
    """Estimate the bytes of a training step with `batch_size` images at once.

    Counted are the weights; the gradient, both moments and the average of those that are `trained` (None: all);
    activations, and a chunk of logits.
    """
    parameters, tokens = num_parameters(config), config.grid[0] * config.grid[1]
    state = STATE_BYTES - VALUE_BYTES
    weights = VALUE_BYTES * parameters + state * (parameters if trained is None else trained)
    size = ACTIVATION_BYTES * (1 if precision == "bf16" else 2)
    activations = batch_size * tokens * config.width * (config.pass1_layers + config.pass2_layers) * size
    return weights + activations + min(CHUNK, batch_size * tokens) * config.vocab_size * LOGIT_BYTES


def budget_bytes(device: torch.device) -> int | None:
    """Return the memory that a step may take: what is free, less a margin. None: not known."""
    free = available_bytes(device)
    if free is None:
        return None
    return int(0.9 * free) if device.type == "cuda" else min(free // 2, CPU_BUDGET)


def fit_to_device(recipe: ModelRecipe, device: torch.device, *, trained: int | None = None) -> ModelRecipe:
    """Cut the batch into the fewest equal parts that fit the memory of one device, unless the recipe cuts it itself.

    Losses do not depend on the number of parts.
    """
    run, budget = recipe.run, budget_bytes(device)
    if run.accumulate > 1 or run.parallel != "none" or budget is None:
        return recipe
    precision = training_precision(run.precision, device)
    for parts in (n for n in range(1, run.batch_size + 1) if run.batch_size % n == 0):
        needed = training_bytes(recipe.model, run.batch_size // parts, precision=precision, trained=trained)
        if needed <= budget:
            if parts > 1:
                log.info("a batch of %d images is computed in %d parts, which fit the memory", run.batch_size, parts)
            return replace(recipe, run=replace(run, accumulate=parts))
    raise InputError(
        f"training takes about {needed / 2**30:.1f} GiB with one image at a time; {device.type} has "
        f"{budget / 2**30:.1f} GiB to spare; free some memory, or train adapters (arpg finetune --lora 8)"
    )
