"""Condition images: extraction from images, and clear errors."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cv2
import numpy as np
import pytest
from PIL import Image

from arpg import InputError, extractors
from arpg.extractors import (
    FastDepth,
    TransformersDepth,
    extract,
    open_depth,
    soft_edges,
    stretch_to_grey,
    to_condition,
)
from arpg.settings import CONTROL_KINDS
from support.small import noise

# ONNX is protobuf: a tag (field number and type), then the value. Enough of it for one node.


def number(field, value):
    return bytes([field << 3]) + varint(value)


def part(field, data):
    data = data.encode() if isinstance(data, str) else data
    return bytes([field << 3 | 2]) + varint(len(data)) + data


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def tensor(name, shape):
    dims = b"".join(part(1, number(1, n)) for n in shape)
    return part(1, name) + part(2, part(1, number(1, 1) + part(2, dims)))


def tiny_onnx(path, side=8, channels=1):
    """The mean over the channels: a white pixel is as far away as can be."""
    axes = part(5, part(1, "axes") + number(8, 1) + bytes([20 << 3 & 127 | 128, 1]) + varint(7))
    node = part(1, "x") + part(2, "y") + part(4, "ReduceMean") + axes
    graph = part(1, node) + part(2, "tiny") + part(11, tensor("x", (1, 3, side, side)))
    graph += part(12, tensor("y", (1, channels, side, side)))
    path.write_bytes(number(1, 3) + part(7, graph) + part(8, part(1, "") + number(2, 7)))
    return path


def half(width=40, height=24):
    """Black on the left, white on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels)


def test_canny_is_opencvs_at_the_papers_thresholds():
    picture = Image.fromarray(cv2.GaussianBlur(np.asarray(noise(50, 40)), (0, 0), 1.5))
    found = np.asarray(extract("canny", picture))
    assert np.array_equal(found, cv2.Canny(np.asarray(picture), 100, 200))
    assert set(np.unique(found)) == {0, 255}
    columns = np.flatnonzero(np.asarray(extract("canny", half())).any(0))
    assert len(columns) >= 1
    assert abs(columns - 19.5).max() <= 1


def test_soft_edges_are_ridges_that_follow_the_contrast():
    found = soft_edges(np.asarray(half()))
    assert np.average(np.arange(40), weights=found[12]) == pytest.approx(19.5)
    assert found[12].max() == 255
    assert (found[12, :8] == 0).all()
    faint = Image.eval(half(), lambda value: value // 8)
    weak = soft_edges(np.asarray(faint))
    assert 0 < weak.max() < 128  # no threshold: a faint edge is a faint line
    assert soft_edges(np.asarray(Image.eval(half(), lambda value: value // 3)))[12].max() > 128
    assert not np.asarray(extract("soft", Image.new("RGB", (30, 20), "grey"))).any()


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (37, 5), (96, 96)])
@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_the_size_stays(kind, size, tmp_path):
    depth = tiny_onnx(tmp_path / "tiny.onnx")
    for picture in (noise(*size), noise(*size).convert("L"), noise(*size).convert("RGBA")):
        found = extract(kind, picture, depth=depth)
        assert (found.size, found.mode) == (size, "L")


def test_depth_by_onnx(tmp_path, monkeypatch):
    """The tiny network says how far: so dark is near, and near is white."""
    path = tiny_onnx(tmp_path / "tiny.onnx")
    found = np.asarray(extract("depth", half(), depth=path))
    assert (found[:, :12] == 255).all()
    assert (found[:, -12:] == 0).all()
    assert open_depth(path) is open_depth(str(path))
    picture = noise(8, 8)
    assert open_depth(path)(picture) == pytest.approx(-np.asarray(picture, np.float32).mean(-1) / 255, abs=1e-6)
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    with pytest.raises(InputError, match=r"fastdepth.onnx does not exist.*name a depth model of transformers"):
        extract("depth", half())
    (tmp_path / "home").mkdir()
    tiny_onnx(tmp_path / "home" / "fastdepth.onnx")
    assert np.array_equal(np.asarray(extract("depth", half())), found)


def test_threads_share_a_depth_model(tmp_path, monkeypatch):
    opened = []

    def slowly(path, open_session):
        opened.append(path)
        time.sleep(0.01)  # the others get their chance
        return open_session(path)

    path = tiny_onnx(tmp_path / "tiny.onnx")
    monkeypatch.setattr(extractors, "open_session", partial(slowly, open_session=extractors.open_session))
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: open_depth(path), range(8)))
    assert len(opened) == 1
    assert all(model is models[0] for model in models)


def test_bad_networks(tmp_path, monkeypatch):
    (tmp_path / "bad.onnx").write_bytes(b"no network")
    with pytest.raises(InputError, match="is not an ONNX network"):
        open_depth(tmp_path / "bad.onnx")
    session = open_depth(tiny_onnx(tmp_path / "tiny.onnx")).session

    class Two:
        get_inputs = session.get_inputs

        def get_outputs(self):
            return session.get_inputs()

    with pytest.raises(InputError, match=r"from \[1, 3, 8, 8\] to \[1, 3, 8, 8\]; expected"):
        FastDepth(Two(), where="it")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="could not be loaded"):
        open_depth(tmp_path / "folder")
    for module, call in (("cv2", lambda: extract("canny", half())), ("onnxruntime", lambda: open_depth("x.onnx"))):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("pathlib.Path.is_file", lambda self: True)
        with pytest.raises(InputError, match=r"pip install 'arpg\[control\]'"):
            call()


def test_depth_by_transformers(tmp_path):
    """A tiny DPT: the map of the network, at the image's size, larger is nearer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        use_batch_norm_in_fusion_residual=False,
    )
    network = transformers.DPTForDepthEstimation(config)
    network.save_pretrained(tmp_path / "dpt")
    transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "dpt")
    model = open_depth(tmp_path / "dpt")
    assert isinstance(model, TransformersDepth)
    near = model(half(40, 24))
    assert near.shape == (24, 40)
    assert np.ptp(near) > 0
    assert extract("depth", half(40, 24), depth=model).size == (40, 24)


def test_grey_from_depth():
    assert stretch_to_grey(np.array([[2.0, 4.0], [3.0, 2.0]])).tolist() == [[0, 255], [128, 0]]
    assert (stretch_to_grey(np.full((2, 2), 7.0)) == 128).all()
    with pytest.raises(InputError, match="not numbers"):
        stretch_to_grey(np.array([[np.nan]]))


def test_ready_made_conditions_stay():
    drawn = np.asarray(noise(9, 7).convert("L"))
    assert np.array_equal(np.asarray(to_condition(Image.fromarray(drawn))), drawn)
    assert to_condition(Image.new("RGBA", (3, 3), (255, 255, 255, 0))).getextrema() == (0, 0)
    assert to_condition(Image.fromarray(np.full((2, 2), 65535, np.uint16))).getextrema() == (255, 255)


def test_bad_kind():
    with pytest.raises(InputError, match="kind is 'hed'; expected one of canny, soft, depth"):
        extract("hed", half())
