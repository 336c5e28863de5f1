"""Run jobs in this process or on the actors of a Ray cluster, with the same results.

`start()` makes the work of one worker (with its model), and `work(job, report)` does one job: a pure function that
returns a value or writes files of its own. Results come in the order of the jobs, whatever worker had them. The job of
a worker that dies is done again by another one. `report(n)` says that n images of the job are done.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from arpg.errors import InputError, require, require_package

Report = Callable[[int], None]
Work = Callable[[Any, Report], Any]
AHEAD = 2  # jobs of each actor that are sent before it has finished the last one
MAX_DEATHS = 3  # of workers on one job
POLL_SECONDS = 0.5  # between two updates of the progress
OBJECT_STORE_BYTES = 1 << 30  # of a local cluster: jobs and results are small


@dataclass(frozen=True)
class RayOptions:
    """Run on the cluster of $RAY_ADDRESS, or else on a local one; `workers` 0: one per GPU, or per `threads` cores."""

    workers: int = 0
    threads: int = 1  # of each worker without a GPU; rounding may depend on it, so it is that of a single process

    def __post_init__(self) -> None:
        require(self.workers >= 0, f"workers is {self.workers}; expected 0 (as many as fit) or more")


@contextlib.contextmanager
def open_workers(start: Callable[[], Work], ray: RayOptions | None = None) -> Iterator[_LocalWorker | _RayWorkers]:
    """Start workers: one in this process, or actors of Ray, which get `start` by pickle.

    `map` yields the result of every job, in order; its `on_progress` receives the images done in all jobs.
    """
    if ray is None:
        yield _LocalWorker(start())
        return
    workers = _RayWorkers(start, ray)
    try:
        yield workers
    finally:
        workers.close()


class _LocalWorker:
    def __init__(self, work: Work) -> None:
        self.work = work

    def map(self, jobs: Iterable[Any], *, on_progress: Report | None = None) -> Iterator[Any]:
        progress = _Progress()
        for number, job in enumerate(jobs):

            def report(done: int, number: int = number) -> None:
                progress.report(number, done)
                if on_progress is not None:
                    on_progress(progress.total(progress.done))

            yield self.work(job, report)


class _Progress:
    """The images that are done of each job; an actor that all workers report to."""

    def __init__(self) -> None:
        self.done: dict[int, int] = {}

    def report(self, number: int, done: int) -> None:
        self.done[number] = done  # a job that is done again starts from 0

    def total(self, numbers: Iterable[int]) -> int:
        return sum(self.done.get(number, 0) for number in numbers)

    def clear(self) -> None:
        self.done.clear()


class _Actor:
    """One worker."""

    def __init__(self, start: Callable[[], Work], threads: int, progress: Any) -> None:
        self.work, self.progress = start(), progress
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)

    def run(self, number: int, job: Any) -> tuple[Any, int]:
        """Return the result, and the images that were done: what is reported arrives later."""
        total = 0

        def report(done: int) -> None:
            nonlocal total
            total = done
            self.progress.report.remote(number, done)

        return self.work(job, report), total


class _RayWorkers:
    def __init__(self, start: Callable[[], Work], options: RayOptions) -> None:
        self.ray = _connect()
        self.errors = self.ray.exceptions
        resources = self.ray.cluster_resources()
        gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        count = options.workers or gpus or max(1, cores // options.threads)
        needs = {"num_gpus": 1} if gpus else {"num_cpus": min(options.threads, cores)}
        self.progress: Any = self.ray.remote(num_cpus=0)(_Progress).remote()
        actor, reference = self.ray.remote(**needs)(_Actor), self.ray.put(start)
        self.make: Callable[[], Any] = lambda: actor.remote(reference, options.threads, self.progress)
        self.actors = [self.make() for _ in range(count)]

    def close(self) -> None:
        for actor in (*self.actors, self.progress):
            self.ray.kill(actor)

    def map(self, jobs: Iterable[Any], *, on_progress: Report | None = None) -> Iterator[Any]:
        self.ray.get(self.progress.clear.remote())
        source = enumerate(jobs)
        running: dict[Any, tuple[int, Any]] = {}  # result reference: job number and actor, in the order of sending
        waiting: dict[int, Any] = {}  # number: job, until its result is there
        deaths: Counter[int] = Counter()  # of workers, by job number
        ready: dict[int, Any] = {}
        turn, finished, exhausted, most = 0, 0, False, AHEAD * len(self.actors)
        while not exhausted or running or ready:
            while not exhausted and len(running) < most and len(ready) < 2 * most:
                number, job = next(source, (-1, None))
                exhausted = number < 0
                if not exhausted:
                    waiting[number] = self.ray.put(job)
                    self._send(number, waiting, running)
            done, _ = self.ray.wait(list(running), timeout=POLL_SECONDS) if running else ([], [])
            for reference in done:
                number, actor = running[reference]
                try:
                    ready[number], images = self.ray.get(reference)
                    finished += images
                    del running[reference], waiting[number]
                except self.errors.RayActorError as error:
                    self._replace(actor, error, running, deaths)
                    for each in sorted(waiting.keys() - {number for number, _ in running.values()}):
                        self._send(each, waiting, running)
                    break
                except self.errors.RayTaskError as error:
                    raise error.cause from None
            while turn in ready:
                yield ready.pop(turn)
                turn += 1
            if on_progress is not None:
                on_progress(finished + self.ray.get(self.progress.total.remote(list(waiting))))

    def _send(self, number: int, waiting: dict[int, Any], running: dict[Any, tuple[int, Any]]) -> None:
        """Send a job to the actor that has the fewest."""
        load = Counter(id(actor) for _, actor in running.values())
        actor = min(self.actors, key=lambda each: load[id(each)])
        running[actor.run.remote(number, waiting[number])] = (number, actor)

    def _replace(self, dead: Any, error: Any, running: dict[Any, tuple[int, Any]], deaths: Counter[int]) -> None:
        """Start another actor for a dead one, whose jobs are no longer running."""
        if error.actor_init_failed:
            raise InputError(f"a worker could not start: {str(error).strip().splitlines()[-1]}")
        lost = [reference for reference, (_, actor) in running.items() if actor is dead]
        numbers = [running.pop(reference)[0] for reference in lost]
        deaths[numbers[0]] += 1  # the first of them was being done
        require(
            deaths[numbers[0]] < MAX_DEATHS,
            f"job {numbers[0]} ended {MAX_DEATHS} workers ({type(error).__name__}); do they have enough memory? "
            "What is done is kept: run the command again to continue",
        )
        self.actors[self.actors.index(dead)] = self.make()


def _connect() -> Any:
    ray = require_package("ray", "--ray needs Ray; pip install 'arpg[ray]'")
    if not ray.is_initialized():
        # $RAY_ADDRESS is read by Ray itself; only a cluster that is started here takes sizes.
        sizes: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"object_store_memory": OBJECT_STORE_BYTES}
        try:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **sizes)
        except ConnectionError as error:
            address = os.environ.get("RAY_ADDRESS")
            raise InputError(f"there is no Ray cluster at RAY_ADDRESS {address}: {error}") from None
    return ray
