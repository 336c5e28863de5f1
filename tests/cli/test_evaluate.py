"""Evaluating from files: npz, folder, zip; what is refused; the kept reference; both commands and their JSON."""

import json
import tracemalloc
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from arpg.errors import InputError
from arpg.evaluation.features import Features, collect, from_array, has_features, open_source, read_features
from arpg.evaluation.metrics import RunningGains, frechet_distance
from arpg.evaluation.reconstruction import reconstruction_report, ssim
from support.command import check_error
from support.features import Tiny
from support.small import noise, small_tokenizer, write_zip


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The network of every command, and an empty cache."""
    network = Tiny()
    monkeypatch.setattr("arpg.evaluation.inception.Inception.load", lambda path, device: network)
    monkeypatch.setenv("ARPG_HOME", str(tmp_path / "home"))
    return network


def pixels(n=12, side=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def write_folder(folder, images):
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:03d}.png")
    return folder


def gather(source, batch_size):
    return np.concatenate(list(source.batches(batch_size)))


def test_npz_folder_and_zip_hold_the_same_images(tmp_path):
    images = pixels()
    np.savez(tmp_path / "plain.npz", images, labels=np.arange(12))
    np.savez_compressed(tmp_path / "packed.npz", images)
    folder = write_folder(tmp_path / "folder", images)
    write_zip(folder, tmp_path / "zip.zip", prefix="a/b/")
    for name in ("plain.npz", "packed.npz", "folder", "zip.zip", "zip.zip/a/b"):
        source = open_source(tmp_path / name)
        assert source.count == 12
        for batch_size in (1, 5, 12, 100):
            assert np.array_equal(gather(source, batch_size), images), (name, batch_size)
    assert np.array_equal(gather(from_array(images), 5), images)


def test_every_source_and_batch_size_gives_the_same_metrics(tmp_path):
    images = pixels(40)
    np.savez(tmp_path / "images.npz", images)
    write_zip(write_folder(tmp_path / "folder", images), tmp_path / "zip.zip")
    whole = collect(Tiny(), [images])
    for name in ("images.npz", "folder", "zip.zip"):
        for batch_size in (1, 7, 64):
            found = collect(Tiny(), open_source(tmp_path / name).batches(batch_size))
            assert frechet_distance(found.pool, whole.pool) < 1e-6
            torch.testing.assert_close(found.spatial.cov_FF, whole.spatial.cov_FF)
            torch.testing.assert_close(found.pool_MF, whole.pool_MF, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(found.gain_M, whole.gain_M, rtol=1e-4, atol=1e-6)


def test_memory_stays_flat(tmp_path):
    """12 MB of images are walked in batches of 100 kB, packed or not."""
    images = np.zeros((4000, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "plain.npz", images)
    np.savez_compressed(tmp_path / "packed.npz", images)
    write_folder(tmp_path / "folder", images[:300])
    for name, most in (("plain.npz", 2e6), ("packed.npz", 2e6), ("folder", 0.6e6)):
        source = open_source(tmp_path / name)
        tracemalloc.start()
        count = sum(len(batch) for batch in source.batches(32))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == source.count
        assert peak < most, name


def test_sizes(tmp_path):
    (tmp_path / "mixed").mkdir()
    for i, size in enumerate([(30, 20), (30, 20), (24, 24)]):
        noise(*size, seed=i).save(tmp_path / "mixed" / f"{i}.png")
    source = open_source(tmp_path / "mixed")
    with pytest.raises(InputError, match=r"2\.png is 24x24 pixels, but 0\.png is 30x20; give a size to crop to"):
        gather(source, 2)
    assert gather(open_source(tmp_path / "mixed", size=12), 2).shape == (3, 12, 12, 3)
    np.savez(tmp_path / "images.npz", pixels())
    assert open_source(tmp_path / "images.npz", size=16).count == 12
    with pytest.raises(InputError, match="images are 16x16 pixels, not 12x12; only image files are cropped"):
        open_source(tmp_path / "images.npz", size=12)
    with pytest.raises(InputError, match="size is 0"):
        open_source(tmp_path / "mixed", size=0)


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (pixels().astype(np.float32) / 255, "float32"),
        (pixels().astype(np.int64), "int64"),
        (pixels()[..., :1], r"\[12, 16, 16, 1\]"),
        (pixels()[:0], r"\[0, 16, 16, 3\]"),
        (pixels().transpose(0, 3, 1, 2), r"\[12, 3, 16, 16\]"),
        (np.asfortranarray(pixels()), "column by column"),
        (np.array(["a", None], object), "object"),
    ],
)
def test_what_is_not_uint8_images_is_refused(array, part, tmp_path):
    np.savez(tmp_path / "bad.npz", array)
    with pytest.raises(InputError, match=f"{part}.*(expected images as uint8|ascontiguousarray)"):
        open_source(tmp_path / "bad.npz")


def test_files_that_are_damaged_or_something_else(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", pixels(200))
    data = (tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"cut\.npz is cut short or damaged"):
        open_source(cut)
    turned = bytearray(data)
    for i in range(2000, 3000):
        turned[i] ^= 255
    cut.write_bytes(turned)
    with pytest.raises(InputError, match=r"cut\.npz is damaged"):
        gather(open_source(cut), 50)
    with zipfile.ZipFile(cut, "w") as archive, zipfile.ZipFile(tmp_path / "whole.npz") as whole:
        archive.writestr("arr_0.npy", whole.read("arr_0.npy")[:100_000])
    with pytest.raises(InputError, match=r"ends after 130 of 200 images"):
        gather(open_source(cut), 10)
    np.savez(cut, other=pixels())
    with pytest.raises(InputError, match=r"has no arr_0, only other; expected images"):
        open_source(cut)
    cut.write_text("text")
    with pytest.raises(InputError, match="is a text file; expected an npz file"):
        open_source(cut)
    with pytest.raises(InputError, match="does not exist"):
        open_source(tmp_path / "nothing.npz")
    with pytest.raises(InputError, match="nothing"):
        open_source(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty"):
        open_source(tmp_path / "empty")
    broken = write_folder(tmp_path / "broken", pixels(2))
    (broken / "001.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"001\.png"):
        gather(open_source(broken), 2)
    with pytest.raises(InputError, match="batch_size is 0"):
        gather(open_source(tmp_path / "whole.npz"), 0)


def test_features_are_kept_and_statistics_are_taken(tmp_path):
    features = collect(Tiny(), [pixels(40)])
    features.save(tmp_path / "features.npz")
    again = Features.load(tmp_path / "features.npz")
    assert (again.n, again.network) == (40, "tiny")
    for name in ("pool_MF", "gain_M"):
        assert torch.equal(getattr(again, name), getattr(features, name))
    for name in ("pool", "spatial"):
        assert torch.equal(getattr(again, name).cov_FF, getattr(features, name).cov_FF)
    assert has_features(tmp_path / "features.npz")
    statistics = {"mu": features.pool.mean_F.numpy(), "sigma": features.pool.cov_FF.numpy()}
    np.savez(tmp_path / "statistics.npz", **statistics)
    alone = Features.load(tmp_path / "statistics.npz")
    assert (alone.n, alone.pool_MF, alone.spatial) == (0, None, None)
    assert frechet_distance(alone.pool, features.pool) < 1e-3
    # ADM's files hold images and the statistics of many more, which count.
    np.savez(tmp_path / "adm.npz", pixels(10, seed=1), **statistics)
    both = read_features(tmp_path / "adm.npz", Tiny())
    assert both.n == 10
    assert torch.equal(both.pool.mean_F, features.pool.mean_F)
    np.savez(tmp_path / "bad.npz", mu=np.zeros(3), sigma=np.full((3, 3), np.nan))
    with pytest.raises(InputError, match="not finite"):
        Features.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "bad.npz", mu=np.zeros(3))
    with pytest.raises(InputError, match="has no mu and sigma"):
        Features.load(tmp_path / "bad.npz")
    (tmp_path / "bad.npz").write_bytes((tmp_path / "features.npz").read_bytes()[:-500])
    with pytest.raises(InputError, match="is cut short or damaged"):
        Features.load(tmp_path / "bad.npz")


def test_an_interrupted_collection_continues(tmp_path, tiny, monkeypatch, caplog):
    """The sums go on where they were saved, so the statistics are the same bits."""
    monkeypatch.setattr("arpg.evaluation.features.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("arpg.evaluation.features.RunningGains", partial(RunningGains, split=5))
    np.savez(tmp_path / "x.npz", pixels())
    whole = collect(Tiny(), open_source(tmp_path / "x.npz").batches(4))

    class KilledError(Exception):
        pass

    def killed(done, count):
        if done == 12:
            raise KilledError

    features = tmp_path / "home" / "features"
    for expected in (4, 12):  # from the third batch on, and from the start
        with pytest.raises(KilledError):
            read_features(tmp_path / "x.npz", tiny, batch_size=4, keep=True, progress=killed)
        if expected == 12:
            for path in features.iterdir():
                path.write_bytes(path.read_bytes()[:100])
        before = tiny.seen
        found = read_features(tmp_path / "x.npz", tiny, batch_size=4, keep=True)
        assert tiny.seen - before == expected
        for ours, theirs in ((found.pool, whole.pool), (found.spatial, whole.spatial)):
            assert torch.equal(ours.mean_F, theirs.mean_F)
            assert torch.equal(ours.cov_FF, theirs.cov_FF)
        assert torch.equal(found.pool_MF, whole.pool_MF)
        assert torch.equal(found.gain_M, whole.gain_M)
        (kept,) = features.iterdir()
        assert kept.suffix == ".npz"
        kept.unlink()
    assert "computing the features from the start" in caplog.text


@pytest.mark.parametrize("form", ["npz", "folder", "zip"])
def test_the_reference_is_kept_until_it_changes(form, tmp_path, tiny, caplog):
    images = pixels()

    def write():
        path = tmp_path / f"reference.{form}"
        if form == "npz":
            np.savez(path, images)
            return path
        folder = tmp_path / "reference.folder"
        folder.mkdir(exist_ok=True)
        for i, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{i:03d}.png")
        return folder if form == "folder" else write_zip(folder, path)

    def read(network=tiny, **more):
        before = network.seen
        features = read_features(write(), network, keep=True, **more)
        return network.seen - before, features

    seen, first = read()
    assert seen == 12
    seen, again = read(batch_size=5)  # written again, with the same images
    if form != "zip":  # a zip file has dates in it
        assert seen == 0
    assert torch.equal(first.pool.mean_F, again.pool.mean_F)
    images[3, 2, 2] += 1
    seen, other = read()
    assert seen == 12
    assert not torch.equal(first.pool.mean_F, other.pool.mean_F)
    assert read()[0] == 0 or form == "zip"
    assert read(network=Tiny(identity="another"))[0] == 12
    if form != "npz":
        assert read(size=12)[0] == 12
    for path in (tmp_path / "home" / "features").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert read()[0] == 12  # a damaged file is made again
    assert form == "zip" or "computing the features again" in caplog.text


def test_evaluate_command(run, tiny, tmp_path):
    np.savez(tmp_path / "samples.npz", pixels(40))
    reference = write_folder(tmp_path / "reference", pixels(50, seed=1))
    target = tmp_path / "out.json"
    code, said, err = run(
        "evaluate", tmp_path / "samples.npz", "--reference", reference, "--json", target, "--device", "cpu"
    )
    assert code == 0, err
    for title in ("FID", "sFID", "IS", "precision", "recall", "KID x 1000"):
        assert f"\n{title} " in said
    assert "note: 40 samples are no more than the 2048 features" in said
    assert f"wrote {target}" in said
    found = json.loads(target.read_text())
    assert found["inception"] == "tiny"
    ours, theirs = collect(Tiny(), [pixels(40)]), collect(Tiny(), [pixels(50, seed=1)])
    assert found["metrics"]["fid"]["value"] == pytest.approx(frechet_distance(ours.pool, theirs.pool), rel=1e-3)
    assert found["metrics"]["fid"]["samples"] == 40
    assert found["metrics"]["fid"]["reference"] == 50
    # The reference was kept; another batch size changes nothing; only what is asked for is computed.
    seen = tiny.seen
    options = ("--metrics", "fid,kid", "--batch-size", 3, "--json", target, "--device", "cpu")
    assert run("evaluate", tmp_path / "samples.npz", "--reference", reference, *options)[0] == 0
    assert tiny.seen == seen + 40
    again = json.loads(target.read_text())["metrics"]
    assert set(again) == {"fid", "kid", "skipped", "warnings"}
    assert again["fid"]["value"] == pytest.approx(found["metrics"]["fid"]["value"], rel=1e-6)
    # Images against themselves.
    code, said, _ = run("evaluate", reference, "--reference", reference, "--device", "cpu", "--json", target)
    itself = json.loads(target.read_text())["metrics"]
    assert itself["fid"]["value"] < 1e-3
    assert itself["precision"]["value"] == itself["recall"]["value"] == 1
    # Features and statistics need no network.
    ours.save(tmp_path / "ours.npz")
    theirs.save(tmp_path / "theirs.npz")
    seen = tiny.seen
    run("evaluate", tmp_path / "ours.npz", "--reference", tmp_path / "theirs.npz", "--json", target, "--device", "cpu")
    kept = json.loads(target.read_text())
    assert kept["metrics"]["fid"]["value"] == pytest.approx(found["metrics"]["fid"]["value"], rel=1e-6)
    assert "inception" not in kept
    assert tiny.seen == seen


def test_evaluate_command_refuses(run, tiny, tmp_path):
    images = tmp_path / "images.npz"
    np.savez(images, pixels(8))
    np.savez(tmp_path / "floats.npz", pixels(8) / 255)
    np.savez(tmp_path / "one.npz", pixels(1))
    for arguments, parts in (
        ([tmp_path / "floats.npz", "--reference", images], ["float64", "expected images as uint8"]),
        ([tmp_path / "one.npz", "--reference", images], ["1 images", "2 or more"]),
        ([tmp_path / "none.npz", "--reference", images], ["does not exist"]),
        ([images, "--reference", images, "--metrics", "fid,fdi"], ["--metrics is 'fdi'", "expected one of fid, sfid"]),
        ([images, "--reference", images, "--batch-size", 0], ["--batch-size is 0"]),
        ([images, "--reference", images, "--json", tmp_path], ["is a folder"]),
        ([images, "--reference", images, "--size", 12], ["16x16 pixels, not 12x12"]),
    ):
        check_error(run("evaluate", *arguments, "--device", "cpu"), *parts)
    tiny.has_logits = False
    check_error(
        run("evaluate", images, "--reference", images, "--metrics", "is", "--device", "cpu"),
        "is cannot be computed",
        "inception-2015-12-05.pt or pt_inception-2015-12-05-6726825d.pth with --inception",
    )
    code, said, _ = run("evaluate", images, "--reference", images, "--device", "cpu")
    assert code == 0
    assert "is: skipped: these Inception weights have no logits; give inception-2015-12-05.pt" in said


def test_rfid_and_ssim_against_plain_formulas():
    tokenizer, images = small_tokenizer(), pixels(10, side=16)
    report = reconstruction_report(tokenizer, images, batch_size=4, inception=Tiny())
    with torch.no_grad():
        batch = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        again = tokenizer.decode(tokenizer.encode(batch), tokenizer.grid(16, 16))
    again = ((again.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    real, fake = collect(Tiny(), [images]), collect(Tiny(), [again])
    assert report["rfid"] == pytest.approx(frechet_distance(real.pool, fake.pool), rel=1e-2)
    # SSIM of one image by its definition: a Gaussian window of 11 x 11 at every place where it fits.
    line = np.exp(-((np.arange(11) - 5) ** 2) / 4.5)
    window = np.outer(line, line) / line.sum() ** 2
    a, b = images[0].astype(float), again[0].astype(float)
    values = []
    for c in range(3):
        for y in range(6):
            for x in range(6):
                p, q = a[y : y + 11, x : x + 11, c], b[y : y + 11, x : x + 11, c]
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                cov = (window * (p - mp) * (q - mq)).sum()
                c1, c2 = 2.55**2, 7.65**2
                values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    assert ssim(torch.from_numpy(images[:1]), torch.from_numpy(again[:1])).item() == pytest.approx(np.mean(values))


def test_evaluate_tokenizer_command(run, tiny, folder, tmp_path):
    np.savez(tmp_path / "images.npz", pixels(9))
    target = tmp_path / "out.json"
    arguments = ("evaluate-tokenizer", folder, tmp_path / "images.npz", "--device", "cpu", "--json", target)
    code, said, err = run(*arguments)
    assert code == 0, err
    found = json.loads(target.read_text())
    expected = reconstruction_report(small_tokenizer(), pixels(9), inception=tiny)
    for name in ("psnr", "ssim", "rfid", "usage", "perplexity", "n"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3)
    assert f"PSNR        {found['psnr']:.3f} dB" in said
    assert f"rFID        {found['rfid']:.3f}" in said
    code, said, _ = run(*arguments, "--no-rfid", "--batch-size", 2)
    assert "rFID" not in said
    assert json.loads(target.read_text())["psnr"] == pytest.approx(found["psnr"], rel=1e-3)
    check_error(run(*arguments, "--heads", target), "--heads belongs to --lpips")
    check_error(run("evaluate-tokenizer", folder, tmp_path / "none.npz"), "does not exist")
