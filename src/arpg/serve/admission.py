"""Admission: how many calls, and how much work, may be waiting or running, in all and for each tenant.

A tenant is a label of API keys: keys of one label, as while a key is rotated, count together.

The cost of a call is tokens x steps x images, twice with guidance, in images of the model's own size with its default
settings: one such image costs 1.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from arpg.pipeline import Pipeline
from arpg.serve.api_error import ApiError
from arpg.serve.auth import ApiKeys
from arpg.serve.observability import HttpMetrics, WorkerMetrics
from arpg.serve.server_config import ServeSettings
from arpg.settings import SamplingSettings
from arpg.tasks.task import ImageTask

LARGE_SHARE = 0.125  # of the budget: what costs more is a large task, with a budget of its own
LANES = ("small", "large")


def task_cost(task: ImageTask, pipeline: Pipeline) -> float:
    """Estimate the cost of a task, in images of the model's own size with its default settings."""
    unit = _sample_cost(math.prod(pipeline.model.config.grid), pipeline.sampling.settings())
    windows = ((math.prod(stage.window), len(stage.corners)) for stage in task.stages)
    settings = task.spec.settings
    return len(task.spec) * sum(count * _sample_cost(tokens, settings) for tokens, count in windows) / unit


def _sample_cost(tokens: int, settings: SamplingSettings) -> float:
    """Return the cost of a window of one image, in tokens x steps."""
    steps = settings.steps if isinstance(settings.schedule, str) else len(settings.schedule)
    steps = min(steps, tokens) if settings.decode == "steps" else tokens
    return float(tokens * steps * (1 if settings.guidance == 1 else 2))


class RetryEstimate:
    """When a refused call should be tried again: a moving average of the seconds that a cost of 1 takes."""

    def __init__(self) -> None:
        self._seconds_per_cost = 1.0

    def record(self, cost: float, seconds: float, *, in_progress: int) -> None:
        """Record that a request of `cost` took `seconds`, beside as many others as are in progress."""
        self._seconds_per_cost += 0.2 * (seconds / max(cost, 1e-3) / max(1, in_progress) - self._seconds_per_cost)

    def refuse(self, message: str, code: str, *, cost: float = 1.0) -> ApiError:
        """Return a 429 for a call of this cost."""
        return ApiError(429, message, code=code, retry_after=min(60.0, max(1.0, cost * self._seconds_per_cost)))


class AdmissionLimiter:
    """Limits the calls in progress: a 429 when there are too many, a 503 while draining.

    Where there are several tenants, one of them holds at most `key_share` of the limit. For the event loop's thread.
    """

    def __init__(self, settings: ServeSettings, keys: ApiKeys, metrics: HttpMetrics) -> None:
        self.capacity, self.key_share, self.keys = settings.max_pending_requests, settings.key_share, keys
        self.num_admitted = 0
        self.draining = False
        self._requests: Counter[str] = Counter()  # by tenant
        self._retry = RetryEstimate()
        metrics.gauge("arpg_queue_depth", "HTTP requests admitted, waiting or running", lambda: self.num_admitted)

    @property
    def share(self) -> float:
        """The share of a limit that one tenant may hold."""
        return self.key_share if self.keys.num_tenants > 1 else 1.0

    def check(self, tenant: str) -> None:
        """Raise a 503 while draining, and a 429 where there is no place for a call of this tenant."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; try again in a moment", code="draining", retry_after=5)
        if self.num_admitted >= self.capacity:
            what = f"{self.num_admitted} requests are waiting or running, which is the limit; try again later"
            raise self._retry.refuse(what, "queue_full")
        if self._requests[tenant] >= max(1.0, self.share * self.capacity):
            what = f"{self._requests[tenant]} requests waiting or running, their share; try again later"
            raise self._retry.refuse(f"keys labelled {tenant!r} have {what}", "key_quota")

    def enter(self, tenant: str) -> None:
        """Admit a call whose body has arrived, or raise a 429 or 503."""
        self.check(tenant)
        self.num_admitted += 1
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count an admitted call as answered."""
        self.num_admitted -= 1
        self._requests[tenant] -= 1
        if self._requests[tenant] <= 0:
            del self._requests[tenant]

    def record(self, cost: float, seconds: float) -> None:
        """Record that a call of `cost` took `seconds`, for Retry-After."""
        self._retry.record(cost, seconds, in_progress=self.num_admitted)


class CostLimiter:
    """Limits the cost of the work in progress: a 429 when there is too much.

    Large tasks have a budget of their own, so that they never make small ones wait for admission; one that exceeds the
    whole budget is admitted when no other large one is in progress. May be used from any thread.
    """

    def __init__(self, settings: ServeSettings, metrics: WorkerMetrics) -> None:
        self.budget = settings.max_pending_cost
        self._costs: dict[str, dict[str, float]] = {lane: {} for lane in LANES}  # by tenant
        self._num_reserved = 0
        self._lock = threading.Lock()
        self._retry = RetryEstimate()
        for lane in LANES:
            meaning = "Cost of the admitted requests, in images of the model's own size"
            metrics.gauge("arpg_pending_cost", meaning, partial(self.pending_cost, lane), lane=lane)

    def pending_cost(self, lane: str) -> float:
        """Return the cost of the admitted requests of a lane."""
        with self._lock:
            return sum(self._costs[lane].values())

    def reserve(self, tenant: str, cost: float, *, share: float, large: bool) -> Callable[[], None]:
        """Admit the work of a call, or raise a 429; return the function that gives it back.

        `share`: of the budget that the tenant may hold. `large`: the task has a grid beyond the model's own.
        """
        lane = "large" if large or cost > LARGE_SHARE * self.budget else "small"
        with self._lock:
            costs = self._costs[lane]
            total, own = sum(costs.values()), costs.get(tenant, 0.0)
            full = total > 0 and total + cost > self.budget
            over = own > 0 and own + cost > share * self.budget
            if not full and not over:
                costs[tenant] = own + cost
                self._num_reserved += 1
        if full or over:
            held, limit, whose = (
                (total, self.budget, "") if full else (own, share * self.budget, f" for keys labelled {tenant!r}")
            )
            message = (
                f"requests of a cost of {held:.1f} images are in progress{whose}; this one costs {cost:.1f} and the "
                f"limit is {limit:g}; try again later"
            )
            raise self._retry.refuse(message, "cost_limit" if full else "key_quota", cost=cost)

        def release() -> None:
            with self._lock:
                self._num_reserved -= 1
                costs[tenant] -= cost
                if costs[tenant] <= 1e-6:
                    del costs[tenant]

        return release

    def record(self, cost: float, seconds: float) -> None:
        """Record that work of `cost` took `seconds`, for Retry-After."""
        self._retry.record(cost, seconds, in_progress=self._num_reserved)
