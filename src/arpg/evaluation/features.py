"""Features of a set of images: what all metrics are computed from, collected batch by batch and kept in one npz file.

Shapes: B batch, M images, F features.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpg.errors import InputError, require
from arpg.evaluation.frechet import Moments, Statistics
from arpg.evaluation.inception import Inception
from arpg.evaluation.inception_score import RunningGains
from arpg.files import write_whole
from arpg.image import Pixels

FORMAT = "arpg features 1"
KEYS = ("network", "n", "mu", "sigma", "mu_s", "sigma_s", "pool", "gains")


@dataclass(frozen=True, eq=False)
class Features:
    """Statistics in float64, from float32 features; the pooled features themselves are kept in float16, on the CPU.

    A file of statistics alone (`mu`, `sigma`) has no features, so only distances of Gaussians can be had from it.
    """

    pool: Statistics
    spatial: Statistics | None
    pool_MF: Tensor | None
    gain_M: Tensor | None  # of the Inception Score; None where the network has no logits
    network: str  # the identity of the network; empty where a file does not say

    def __post_init__(self) -> None:
        for name, x in (("features", self.pool_MF), ("gains", self.gain_M)):
            require(
                x is None or bool(torch.isfinite(x).all()), f"{name} hold numbers that are not finite; make them again"
            )

    @property
    def n(self) -> int:
        """How many images there are features of."""
        return self.pool.n if self.pool_MF is None else len(self.pool_MF)

    def save(self, path: Path) -> None:
        """`mu`, `sigma`, `mu_s` and `sigma_s` are where ADM's reference files have them."""
        arrays: dict[str, Any] = {"format": FORMAT, "network": self.network, "n": self.pool.n}
        arrays |= {"mu": self.pool.mean_F, "sigma": self.pool.cov_FF}
        if self.spatial is not None:
            arrays |= {"mu_s": self.spatial.mean_F, "sigma_s": self.spatial.cov_FF}
        if self.pool_MF is not None:
            arrays["pool"] = self.pool_MF
        if self.gain_M is not None:
            arrays["gains"] = self.gain_M
        plain: Any = {key: value.cpu().numpy() if isinstance(value, Tensor) else value for key, value in arrays.items()}

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez(file, **plain)

        write_whole(path, write)

    @staticmethod
    def load(path: Path) -> Features:
        """A file of ours, or one of statistics (`mu`, `sigma`, and for sFID `mu_s`, `sigma_s`)."""
        require(path.is_file(), f"{path} does not exist; expected an npz file of features or statistics")
        try:
            # Opened here: np.load leaves a damaged file open.
            with path.open("rb") as stream, np.load(stream) as file:
                arrays = {key: file[key] for key in file.files if key in KEYS}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is not a whole npz file ({error}); make it again") from None
        network = str(arrays.pop("network", ""))
        found = {key: torch.from_numpy(np.asarray(array)) for key, array in arrays.items()}
        require("mu" in found and "sigma" in found, f"{path} has no mu and sigma; expected features or statistics")
        n = int(found["n"]) if "n" in found else 0

        def statistics(suffix: str) -> Statistics | None:
            if f"mu{suffix}" not in found or f"sigma{suffix}" not in found:
                return None
            return Statistics(found[f"mu{suffix}"].double(), found[f"sigma{suffix}"].double(), n)

        pool = statistics("")
        assert pool is not None
        return Features(pool, statistics("_s"), found.get("pool"), found.get("gains"), network)


class Collector:
    """Takes uint8 images [B, H, W, 3] batch by batch; memory grows by 4 kB per image."""

    def __init__(self, inception: Inception) -> None:
        # Sums in double precision: on a GPU where there is one, but not every accelerator has float64.
        exact = inception.device if inception.device.type == "cuda" else torch.device("cpu")
        self.inception = inception
        self.pool, self.spatial = Moments(device=exact), Moments(device=exact)
        self.gains = RunningGains() if inception.has_logits else None
        self.kept: list[Tensor] = []

    def add(self, pixels_BHW3: Pixels | Tensor) -> None:
        found = self.inception.features(pixels_BHW3)
        self.pool.add(found.pool)
        self.spatial.add(found.spatial)
        self.kept.append(found.pool.half().cpu())
        if self.gains is not None and found.logits is not None:
            self.gains.add(found.logits)

    def features(self) -> Features:
        require(self.pool.n >= 2, f"there are {self.pool.n} images; a covariance needs 2 or more")
        return Features(
            self.pool.statistics().to("cpu"),
            self.spatial.statistics().to("cpu"),
            torch.cat(self.kept),
            None if self.gains is None else self.gains.gains(),
            self.inception.identity,
        )


def collect(
    inception: Inception, batches: Iterable[Pixels | Tensor], *, progress: Callable[[int], None] | None = None
) -> Features:
    """Features of all batches; `progress(images done)` is called after each."""
    collector = Collector(inception)
    for pixels_BHW3 in batches:
        collector.add(pixels_BHW3)
        if progress is not None:
            progress(collector.pool.n)
    return collector.features()
