"""How metrics.json was made: other people's numbers, which test_metrics.py and test_inception.py hold ours to.

    pip install --no-deps --target others torch-fidelity==0.4.0 torchmetrics==1.9.0 lightning-utilities==0.15.3
    PYTHONPATH=others python tests/support/make_metrics.py

(torch-fidelity also imports torchvision.) The features in inception_features.npz are real: the first 256 of
Inception's, in float16, of 96 training images of `garden` and of 96 of its samples.
"""

from __future__ import annotations

import json
import zlib

import numpy as np
import torch

from support.paths import GOLDEN

FOLDER = GOLDEN


def random_sets() -> tuple[np.ndarray, np.ndarray]:
    """300 and 260 samples of 24 features."""
    random = np.random.RandomState(0)
    return random.randn(300, 24), 1.3 * random.randn(260, 24) + 0.4


def random_logits() -> np.ndarray:
    return 3 * np.random.RandomState(1).randn(200, 30)


def images() -> np.ndarray:
    return np.random.RandomState(2).randint(0, 256, (2, 40, 56, 3), dtype=np.uint8)


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of one tensor of an Inception with random weights, the same whenever and wherever it is drawn."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    drawn = random.standard_normal(shape).astype(np.float32)
    if name.endswith("conv.weight"):
        return drawn * np.float32(np.sqrt(2 / np.prod(shape[1:])))
    if name.endswith("running_var"):
        return np.abs(drawn) * np.float32(0.2) + 1
    return np.float32(0.1) * drawn + np.float32(name.endswith("bn.weight"))


def main() -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric
    from torchmetrics.image.fid import _compute_fid
    from torchmetrics.image.kid import poly_mmd

    with np.load(FOLDER / "inception_features.npz") as file:
        real, fake = (file[name].astype(np.float64) for name in ("real", "fake"))
    found: dict[str, dict[str, float]] = {}
    for name, a, b in (
        ("random", *random_sets()),
        ("real", real, fake),  # 96 samples of 256 features: singular
        ("real, 32 features", real[:, :32], fake[:, :32]),
    ):
        x, y = torch.from_numpy(a), torch.from_numpy(b)
        stats = [fid_features_to_statistics(each) for each in (x, y)]
        fid = fid_statistics_to_metric(*stats, False)["frechet_inception_distance"]
        kid = kid_features_to_metric(x, y, kid_subsets=20, kid_subset_size=50, rng_seed=2020, verbose=False)
        prc = prc_features_to_metric(y, x, prc_neighborhood=3, verbose=False)
        of = [(each.mean(0), each.T.cov()) for each in (x, y)]
        n = min(len(x), len(y))
        found[name] = {
            "torch-fidelity fid": fid,
            "torchmetrics fid": _compute_fid(*of[0], *of[1]).item(),
            "torch-fidelity kid": kid["kernel_inception_distance_mean"],
            "torch-fidelity kid std": kid["kernel_inception_distance_std"],
            "torchmetrics kid of the first samples of both": poly_mmd(x[:n], y[:n]).item(),
            "torch-fidelity precision": prc["precision"],
            "torch-fidelity recall": prc["recall"],
        }
    score = isc_features_to_metric(torch.from_numpy(random_logits()), splits=4, shuffle=False)
    found["logits"] = {
        "torch-fidelity is": score["inception_score_mean"],
        "torch-fidelity is std": score["inception_score_std"],
    }
    found["network"] = _network(FeatureExtractorInceptionV3)
    (FOLDER / "metrics.json").write_text(json.dumps(found, indent=1) + "\n")


def _network(kind: type) -> dict[str, list[float]]:
    """An Inception with random weights: what it gives for two images, as single numbers and as sums."""
    whole = kind.load_state_dict
    kind.load_state_dict = lambda self, _: None  # there is no file
    torch.load, load = (lambda *_, **__: {}), torch.load
    network = kind("inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path="none")
    torch.load, kind.load_state_dict = load, whole
    state = {
        key: torch.from_numpy(np.asarray(weights(key, tuple(tensor.shape))))
        for key, tensor in network.state_dict().items()
        if "num_batches" not in key
    }
    network.load_state_dict(state, strict=False)
    spatial = []
    network.Mixed_6d.branch1x1.register_forward_hook(lambda _, __, out: spatial.append(out[:, :7]))
    pool, logits = network(torch.from_numpy(images()).permute(0, 3, 1, 2))
    flat = spatial[0].permute(0, 2, 3, 1).flatten(1)
    return {
        "pool": [*pool[:, ::128].flatten().tolist(), *pool.sum(1).tolist()],
        "spatial": [*flat[:, ::128].flatten().tolist(), *flat.sum(1).tolist()],
        "logits": [*logits[:, ::100].flatten().tolist(), *logits.square().sum(1).tolist()],
    }


if __name__ == "__main__":
    main()
