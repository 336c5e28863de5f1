"""`arpg serve` with a model that costs nothing: what is left is the work of the server itself.

The process that `benchmarks.serve --null-model` measures: HTTP, admission, batching, PNG files and JSON are those of
`arpg serve`. A step is planned as any other, but its network takes `--step-ms`, and `--row-ms` for each image, beside
the CPU, as on a GPU. The tokenizer returns images that are made before: noise with the spectrum of photographs, whose
PNG files have about 120 kB.

`--no-png`: PNG files are made before, too. On few cores they would take most of the time.

`GET /cpu` returns the CPU seconds of each group of threads, and of the functions in `STAGES`, with
`--worker-process` in both processes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from torch import Tensor

from arpg import ARPG, ModelConfig, Pipeline, TokenizerConfig
from arpg.decode.continuous import ContinuousBatch, StepShape, TokenCopy
from arpg.image import Pixels, to_images
from arpg.serve import batcher, middleware, model_worker, native, request_body, responses, served_model
from arpg.serve.build_task import TaskBuilder
from arpg.serve.observability import WorkerMetrics, configure_logging
from arpg.serve.served_model import ServedModel
from arpg.serve.server import Server, bind
from arpg.serve.server_config import ServeSettings
from arpg.serve.service import ImageService

MODEL = ModelConfig(width=32, num_heads=1, pass1_layers=1, pass2_layers=1)
NUM_IMAGES = 16
DEVICE_CALLS = 6  # of a step: copies, a replay and events; each releases the interpreter lock, and waits for it again
SPECTRUM = 1.5  # amplitudes fall with this power of the frequency
STAGES: dict[str, tuple[Any, str]] = {  # functions whose CPU time is counted, by what they do
    "parse JSON": (request_body, "parse_json"),
    "build the task": (TaskBuilder, "from_params"),
    "plan": (model_worker, "make_plan"),
    "PNG": (responses, "to_png"),
    "response": (native, "_to_body"),
    "response JSON": (responses, "json_response"),
    "admit": (batcher.Batcher, "_admit"),
    "step and deliver": (batcher.Batcher, "_step"),
    "log and metrics": (middleware.RequestMiddleware, "_record"),
}


def photo_like(seed: int) -> Pixels:
    """Return noise with the spectrum of a photograph, uint8 `[256, 256, 3]`."""
    generator, frequency = np.random.default_rng(seed), np.fft.fftfreq(256)
    radius = np.hypot(frequency[:, None], frequency)
    radius[0, 0] = 1
    noise_3HW = generator.standard_normal((3, 256, 256))
    smooth_3HW = np.fft.ifft2(np.fft.fft2(noise_3HW) / radius**SPECTRUM).real
    mixed_3HW = smooth_3HW[:1] + 0.3 * smooth_3HW  # the channels of a photograph are alike
    scaled = 128 + 55 * (mixed_3HW - mixed_3HW.mean()) / mixed_3HW.std()
    pixels_3HW: Pixels = scaled.clip(0, 255).astype(np.uint8)
    return pixels_3HW.transpose(1, 2, 0)


class NullTokenizer:
    """A tokenizer that knows a few images."""

    def __init__(self) -> None:
        self.config, self.device = TokenizerConfig(), torch.device("cpu")
        self._images_B3HW = to_images(np.stack([photo_like(i) for i in range(NUM_IMAGES)]))

    def decode(self, ids_BN: Tensor, grid: tuple[int, int], *, known_BN: Tensor | None = None) -> Tensor:
        """Return one of the images for each row."""
        return self._images_B3HW[ids_BN[:, 0] % NUM_IMAGES]

    def encode(self, image_B3HW: Tensor) -> Tensor:
        """Return token 0."""
        return torch.zeros(len(image_B3HW), image_B3HW[0, 0].numel() // self.config.stride**2, dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        """Return no weights."""
        return {}


class NullDevice:
    """A device whose steps only take time, one after the other. Two may be in flight, as on a GPU."""

    step_s = row_s = 0.0

    def __init__(self) -> None:
        self.ends: deque[float] = deque([0.0, 0.0])  # of the last two steps

    def launch(self, num_rows: int) -> bool:
        """Launch a step; return whether the device had nothing to do."""
        idle = time.perf_counter() >= self.ends[-1]
        self.wait(self.ends.popleft())
        self.ends.append(max(self.ends[-1], time.perf_counter()) + self.step_s + self.row_s * num_rows)
        return idle

    @staticmethod
    def wait(end: float) -> None:
        """Wait for the end of a step."""
        if (seconds := end - time.perf_counter()) > 0:
            time.sleep(seconds)


class NullCopy(TokenCopy):
    """Tokens that are there when a step has ended."""

    def __init__(self, copy: TokenCopy, end: float) -> None:
        self._copy, self._end = copy, end

    @property
    def ready(self) -> bool:
        """Whether the step has ended."""
        return time.perf_counter() >= self._end

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the end of the step."""
        NullDevice.wait(self._end)
        return self._copy.wait()


class NullBatch(ContinuousBatch):
    """A batch on a `NullDevice`. Its steps are planned and its tokens delivered as in any other."""

    device = NullDevice()

    def _launch(self, shape: StepShape, flat: Tensor) -> None:
        for _ in range(DEVICE_CALLS):
            flat.clone()
        began = time.perf_counter()
        self.device_idle = self.device.launch(len(self.rows))
        self.waited_s += time.perf_counter() - began

    def fetch(self, rows: Sequence[int]) -> TokenCopy:
        """Return the tokens after the last step."""
        return NullCopy(super().fetch(rows), self.device.ends[-1])


class CpuTimes(Collector):
    """CPU seconds of a process by group of threads, and by function, as metrics."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix`: before the names, where there are several processes."""
        self.prefix = prefix
        self.stages = defaultdict[str, float](float)
        for stage, (owner, name) in STAGES.items():
            setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.stages[stage] += time.thread_time() - start

        return timed

    def read(self) -> dict[str, dict[str, float]]:
        """Return the seconds since the start."""
        groups = defaultdict[str, float](float)
        for thread in threading.enumerate():
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            groups[thread.name.split("_")[0]] += time.clock_gettime(clock)
        return {"threads": dict(groups), "stages": dict(self.stages)}

    def collect(self) -> Iterator[Metric]:
        """Yield the seconds as a metric."""
        family = GaugeMetricFamily(f"{self.prefix or 'server'}_cpu_by", "CPU seconds", labels=("kind", "name"))
        for kind, seconds in self.read().items():
            for name, value in seconds.items():
                family.add_metric((kind, f"{self.prefix} {name}".strip()), value)
        yield family


class NullModel(ServedModel):
    """A model that costs nothing, wherever it is loaded."""

    def __init__(self, step_ms: float, row_ms: float) -> None:
        super().__init__("null", null_pipeline)
        self.step_s, self.row_s = step_ms / 1000, row_ms / 1000

    def open(self, settings: ServeSettings, metrics: WorkerMetrics, num_jobs: Callable[[], int] = lambda: 0) -> None:
        """Let steps only take time, count the CPU time, and start the threads."""
        torch.set_num_threads(1)
        NullDevice.step_s, NullDevice.row_s = self.step_s, self.row_s
        batcher.start_batch = NullBatch  # type: ignore[attr-defined]
        metrics.registry.register(CpuTimes("worker" if settings.worker_process else ""))
        served_model.choose_pause = lambda model: batcher.GPU_PAUSE_S  # type: ignore[attr-defined]
        super().open(settings, metrics, num_jobs)


def null_pipeline() -> Pipeline:
    """Return a pipeline of the published grid and classes."""
    return Pipeline(ARPG(MODEL).init_weights(seed=0).eval(), NullTokenizer())


def read_cpu_times(registry: CollectorRegistry) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of all processes by thread and by function."""
    found: dict[str, dict[str, float]] = {"threads": {}, "stages": {}}
    for family in registry.collect():
        for sample in family.samples if family.name.endswith("_cpu_by") else ():
            found[sample.labels["kind"]][sample.labels["name"]] = sample.value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--row-ms", type=float, default=0.0)
    parser.add_argument("--max-batch", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True, help="requests that may be waiting")
    parser.add_argument("--no-png", action="store_true", help="make no PNG files: all images have the same one")
    parser.add_argument("--worker-process", action=argparse.BooleanOptionalAction, help="as in `arpg serve`")
    options = parser.parse_args()
    if options.no_png:
        file = responses.to_png(Image.fromarray(photo_like(0)))
        setattr(responses, "to_png", lambda image, settings=None: file)  # noqa: B010  (another type)
    settings = ServeSettings(
        max_batch=options.max_batch,
        max_pending_requests=options.clients,
        max_pending_cost=8.0 * options.clients,
        worker_process=options.worker_process,
    )
    images = ImageService([NullModel(options.step_ms, options.row_ms)], settings=settings)
    if options.worker_process:
        images.metrics.registry.register(CpuTimes("http"))
    bound = bind("127.0.0.1", options.port)
    print(f"serving at http://127.0.0.1:{bound.getsockname()[1]}", file=sys.stderr, flush=True)
    configure_logging()
    server = Server(images)
    server.config.app.get("/cpu")(functools.partial(read_cpu_times, images.metrics.registry))  # type: ignore[union-attr]
    server.run(sockets=[bound])


if __name__ == "__main__":
    main()
