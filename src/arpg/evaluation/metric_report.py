"""All metrics of a set of samples against a reference, as one dictionary and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from arpg.errors import InputError, one_of, require
from arpg.evaluation.features import Features
from arpg.evaluation.inception import POOL, WITH_LOGITS
from arpg.evaluation.metrics import (
    NEIGHBOURS,
    Statistics,
    bootstrap,
    frechet_distance,
    frechet_influence,
    inception_score,
    kernel_distance,
    precision_recall,
    statistics,
    wilson,
)
from arpg.tables import text_table

METRICS = ("fid", "sfid", "is", "precision", "recall", "kid")
USUAL = 10_000  # below this the bias of FID is large enough to be reported
INTERVAL = 30  # fewer samples say nothing about their own noise

Report = dict[str, Any]


def evaluate(
    samples: Features,
    reference: Features,
    *,
    metrics: Iterable[str] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    bias: bool = True,
) -> Report:
    """Return `{metric: {"value", "samples", "reference", "interval", ...}, "skipped": {...}, "warnings": [...]}`.

    Without `metrics`, all that the features allow; a metric that is requested and cannot be computed is an error.
    `bias`: estimate that of FID.
    """
    require(
        samples.network == reference.network or "" in (samples.network, reference.network),
        f"the samples' features come from network {samples.network[:12]}..., the reference's from "
        f"{reference.network[:12]}...; compute both with one file",
    )
    wanted = METRICS if metrics is None else tuple(metrics)
    for metric in wanted:
        one_of("metric", metric, METRICS)
    missing = _missing(samples, reference)
    if metrics is not None:
        for metric in wanted:
            if metric in missing:
                raise InputError(f"{metric} cannot be computed: {missing[metric]}")
    skipped = {metric: missing[metric] for metric in wanted if metric in missing}
    report: Report = {"skipped": skipped, "warnings": _warnings(samples, reference)}
    todo = [metric for metric in wanted if metric not in missing]
    if "fid" in todo:
        report["fid"] = _fid(samples, reference, device=device, seed=seed, bias=bias)
    if "sfid" in todo:
        assert samples.spatial is not None
        assert reference.spatial is not None
        value = frechet_distance(samples.spatial.to(device), reference.spatial)
        report["sfid"] = _entry(value, samples.spatial.n, reference.spatial.n)
    if "is" in todo:
        assert samples.gain_M is not None
        score = inception_score(samples.gain_M)
        report["is"] = _entry(score.mean, samples.n, None, std=score.std, splits=score.splits)
        if samples.n >= INTERVAL:
            # d score = score * (gain - mean gain), to first order and split by split alike
            report["is"]["interval"] = bootstrap(score.mean, (score.mean * samples.gain_M).numpy(), seed=seed)
    if "precision" in todo or "recall" in todo:
        report |= _manifold(samples, reference, todo, device=device)
    if "kid" in todo:
        kid = kernel_distance(_rows(samples).to(device), _rows(reference).to(device), seed=seed)
        report["kid"] = _entry(kid.mean, samples.n, reference.n, std=kid.std, subsets=kid.subsets, subset_size=kid.size)
    return {key: report[key] for key in (*METRICS, "skipped", "warnings") if key in report}


def _entry(value: float, samples: int, reference: int | None, **more: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"value": value, "samples": samples}
    if reference is not None:
        entry["reference"] = reference or "unknown"
    return entry | more


def _rows(features: Features) -> Tensor:
    assert features.pool_MF is not None  # else the metric is missing
    return features.pool_MF


def _fid(
    samples: Features, reference: Features, *, device: torch.device | str, seed: int, bias: bool
) -> dict[str, Any]:
    ours, theirs = samples.pool.to(device), reference.pool.to(device)
    entry = _entry(frechet_distance(ours, theirs), samples.pool.n, reference.pool.n)
    if samples.pool_MF is None:
        return entry
    if samples.n >= INTERVAL:
        influence = frechet_influence(ours, theirs, samples.pool_MF)
        low, high = bootstrap(entry["value"], influence.cpu().numpy(), seed=seed)
        entry["interval"] = (max(low, 0.0), high)
    if bias and INTERVAL <= samples.n < USUAL:
        entry["bias"] = _bias(entry["value"], samples, theirs, device=device)
    return entry


def _bias(value: float, samples: Features, reference: Statistics, *, device: torch.device | str) -> float:
    """Estimate the bias of FID: it is about c / n for n samples, so it equals what halving the samples adds."""
    rows_MF = _rows(samples).to(device)
    halves = [frechet_distance(statistics(rows_MF[i::2]), reference) for i in range(2)]
    return min(max(sum(halves) / 2 - value, 0.0), value)


def _manifold(
    samples: Features, reference: Features, todo: list[str], *, device: torch.device | str
) -> dict[str, dict[str, Any]]:
    found = precision_recall(_rows(reference).to(device), _rows(samples).to(device))
    entries = {}
    for metric, hits_M in (("precision", found.realistic_M), ("recall", found.covered_M)):
        if metric in todo:
            hits, n = int(hits_M.sum()), len(hits_M)
            entries[metric] = _entry(hits / n, samples.n, reference.n, interval=wilson(hits, n), k=NEIGHBOURS)
    return entries


def _missing(samples: Features, reference: Features) -> dict[str, str]:
    """Return the metrics that these features do not allow, with the reason."""
    missing: dict[str, str] = {}
    if samples.spatial is None or reference.spatial is None:
        which = "samples" if samples.spatial is None else "reference"
        missing["sfid"] = f"the {which} have no spatial statistics (mu_s, sigma_s); give the images instead"
    if samples.gain_M is None:
        missing["is"] = f"these Inception weights have no logits; give {WITH_LOGITS} with --inception"
    for metric, fewest in (("precision", NEIGHBOURS + 1), ("recall", NEIGHBOURS + 1), ("kid", 2)):
        for name, features in (("samples", samples), ("reference", reference)):
            if features.pool_MF is None:
                missing[metric] = f"the {name} are statistics only, without features; give the images instead"
            elif features.n < fewest:
                missing[metric] = f"the {name} are {features.n} images; {fewest} or more are needed"
    return missing


def _warnings(samples: Features, reference: Features) -> list[str]:
    warnings = []
    for name, n in (("samples", samples.pool.n), ("reference images", reference.pool.n)):
        if 0 < n <= POOL:
            warnings.append(
                f"{n} {name} are no more than the {POOL} features: the covariance is singular, FID is biased up"
            )
        elif 0 < n < USUAL:
            warnings.append(f"{n} {name} are few: FID is biased up; published numbers use 50,000")
    return warnings


def table(report: Report) -> str:
    """Return one line per metric: the value, how sure it is, and of how many images."""
    rows = []
    for metric, title in zip(METRICS, ("FID", "sFID", "IS", "precision", "recall", "KID x 1000"), strict=True):
        if (entry := report.get(metric)) is None:
            continue
        scale, digits = (1000, 3) if metric == "kid" else (1, 4 if metric in ("precision", "recall") else 3)
        interval = " to ".join(f"{end * scale:.{digits}f}" for end in entry.get("interval", ())) or None
        value = f"{entry['value'] * scale:.{digits}f}"
        rows.append([title, value, interval, entry["samples"], entry.get("reference"), _notes(metric, entry)])
    lines = [text_table(["", "value", "95% interval", "samples", "reference", "notes"], rows, align="lrlrrl")]
    lines += [f"{metric}: skipped: {why}" for metric, why in report["skipped"].items()]
    lines += [f"note: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def _notes(metric: str, entry: dict[str, Any]) -> str:
    if metric == "fid" and "bias" in entry:
        return f"about {entry['bias']:.3f} or more of it because the samples are few"
    if metric == "is" and entry["splits"] > 1:
        return f"std {entry['std']:.3f} over {entry['splits']} splits"
    if metric == "kid" and entry["subsets"] > 1:
        return f"std {entry['std'] * 1000:.3f} over {entry['subsets']} subsets of {entry['subset_size']}"
    return ""
