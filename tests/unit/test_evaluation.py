"""PSNR, SSIM, LPIPS and code usage of a tokenizer."""

import numpy as np
import pytest
import torch

from arpg.evaluation.reconstruction import reconstruction_report
from arpg.image import to_images, to_uint8
from support.lpips import distance
from support.small import small_tokenizer


def test_pixels_survive_the_way_to_images_and_back():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    pixels.flags.writeable = False
    assert np.array_equal(to_uint8(to_images(pixels)).numpy(), pixels)


def test_reconstruction_against_numpy(textures, lpips):
    tokenizer, pixels = small_tokenizer(), textures[0][:7]
    report = reconstruction_report(tokenizer, pixels, lpips, batch_size=3)
    with torch.no_grad():
        ids = tokenizer.encode(to_images(pixels))
        again = to_uint8(tokenizer.decode(ids, (16, 16))).numpy()
    error = np.mean((pixels / 255 - again / 255) ** 2)
    assert report["psnr"] == pytest.approx(10 * np.log10(1 / error))
    distances = [distance(lpips, a, b) for a, b in zip(pixels, again, strict=True)]
    assert report["lpips"] == pytest.approx(np.mean(distances), rel=1e-4)
    shares = np.array([np.mean(ids.numpy() == code) for code in range(24)])
    assert report["usage"] == np.mean(shares > 0)
    shares = shares[shares > 0]
    assert report["perplexity"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert report["n"] == 7
    assert reconstruction_report(tokenizer, pixels, lpips, batch_size=7) == pytest.approx(report, rel=1e-4)
