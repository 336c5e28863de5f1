"""Inpainting and editing: what is not masked never changes, what is masked is sampled anew, at any size."""

import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from arpg import InputError, cli
from arpg.image import open_image
from arpg.tasks.stages import Canvas, box_mask, plan_windows


def noise(width, height, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))


def mask_image(size, box):
    return Image.fromarray(box_mask(size, box).astype(np.uint8) * 255)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_a_token_is_masked_when_its_patch_touches_the_mask(width, height, rows, columns, seed):
    """Against the definition, patch by patch, in exact arithmetic."""
    rng = np.random.default_rng(seed)
    mask = rng.random((height, width)) < rng.random() ** 3
    canvas = Canvas.fit(Image.new("RGB", (width, height)), mask, grid=(rows, columns), stride=8)
    left, top, right, bottom = canvas.view
    assert not mask.any() or mask[top:bottom, left:right].any()
    assert mask.sum() == mask[top:bottom, left:right].sum(), "the view holds the whole mask"
    known = canvas.known().reshape(rows, columns)
    for i in range(rows):
        for j in range(columns):
            touches = any(
                mask[top + y, left + x]
                and y * rows < (i + 1) * (bottom - top)
                and (y + 1) * rows > i * (bottom - top)
                and x * columns < (j + 1) * (right - left)
                and (x + 1) * columns > j * (right - left)
                for y, x in np.argwhere(mask[top:bottom, left:right])
            )
            assert known[i, j] == (not touches)


@pytest.mark.parametrize("size", [(8, 8), (20, 20), (33, 17), (9, 50), (3, 3), (64, 8)])
@pytest.mark.parametrize("feather", [0, 2])
def test_pixels_outside_the_mask_are_identical(pipeline, size, feather):
    image = noise(*size)
    box = (size[0] // 3, size[1] // 3, max(size[0] // 3 + 1, size[0] * 3 // 4), max(size[1] // 3 + 1, size[1] * 3 // 4))
    mask = mask_image(size, box)
    (result,) = pipeline.inpaint(image, mask, 2, feather=feather, steps=4)
    assert result.size == image.size
    inside = np.asarray(mask) > 0
    before, after = np.asarray(image), np.asarray(result)
    assert np.array_equal(before[~inside], after[~inside])
    if not feather:
        assert not np.array_equal(before[inside], after[inside])


def test_a_wide_mask_is_seen_with_the_whole_image(pipeline):
    image, mask = noise(64, 16), mask_image((64, 16), (2, 3, 60, 9))
    canvas = Canvas.fit(image, np.asarray(mask) > 0, grid=(4, 4), stride=2)
    assert canvas.view == (0, 0, 64, 16)
    narrow = Canvas.fit(image, box_mask((64, 16), (40, 2, 50, 12)), grid=(4, 4), stride=2)
    assert narrow.view == (37, 0, 53, 16)
    (result,) = pipeline.inpaint(image, mask, 2, steps=4)
    assert np.array_equal(np.asarray(result)[9:], np.asarray(image)[9:])


def test_an_empty_mask_returns_the_image(pipeline):
    image = noise(31, 22)
    (result,) = pipeline.inpaint(image, Image.new("L", image.size, 0), 1, steps=4)
    assert np.array_equal(np.asarray(result), np.asarray(image))


@pytest.mark.parametrize("options", [{}, {"order": "halton", "attention": "causal"}, {"guidance": 1.0, "steps": 9}])
def test_a_full_mask_is_plain_generation(pipeline, options):
    options = {"steps": 5, "guidance": 3.0, **options}
    results = pipeline.inpaint(noise(8, 8), Image.new("L", (8, 8), 255), 3, num_images=3, seed=7, **options)
    expected = pipeline.generate(3, num_images=3, seed=7, **options)
    for a, b in zip(results, expected, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_known_tokens_are_the_images_own_and_orders_fill_the_rest(pipeline):
    seen = []
    image, mask = noise(8, 8), mask_image((8, 8), (0, 0, 4, 8))
    pipeline.inpaint(image, mask, 3, steps=3, order="raster", on_step=seen.append)
    from arpg.image import to_images

    with torch.no_grad():
        ids = pipeline.tokenizer.encode(to_images(np.asarray(image)[None]))
    right = torch.tensor([False, False, True, True]).repeat(4)
    assert torch.equal(seen[-1].ids_BN[:, right], ids[:, right])
    assert seen[0].known_BN[0].sum() == 8 + 2
    assert [step.index for step in seen] == [0, 1, 2]
    assert seen[0].known_BN[0, :2].all(), "raster order begins at the first masked token"


def test_the_surroundings_and_the_class_matter(pipeline):
    mask = mask_image((8, 8), (0, 0, 8, 6))
    base = pipeline.inpaint(noise(8, 8), mask, 0, steps=4, guidance=5.0)[0]
    for image, class_ in ((noise(8, 8, seed=1), 0), (noise(8, 8), 4), (noise(8, 8), None)):
        other = pipeline.inpaint(image, mask, class_, steps=4, guidance=5.0)[0]
        assert not np.array_equal(np.asarray(other)[:6], np.asarray(base)[:6])


def test_an_edit_is_an_inpainting_of_a_box(pipeline):
    image = noise(16, 16)
    a = pipeline.edit(image, (4, 4, 12, 10), 1, steps=4, seed=3)
    b = pipeline.inpaint(image, mask_image((16, 16), (4, 4, 12, 10)), 1, steps=4, seed=3)
    assert np.array_equal(np.asarray(a[0]), np.asarray(b[0]))
    for box in ((4, 4, 4, 10), (-1, 0, 5, 5), (0, 0, 17, 5), (9, 0, 3, 5)):
        with pytest.raises(InputError, match="inside 16x16 pixels"):
            pipeline.edit(image, box, 1)


def test_feathering_fades_in_from_the_seam():
    white, black = Image.new("RGB", (40, 40), "white"), Image.new("RGB", (40, 40), "black")
    canvas = Canvas.fit(white, box_mask((40, 40), (10, 0, 40, 40)), grid=(4, 4), stride=10)
    row = np.asarray(canvas.paste(black, feather=6))[20, :, 0].astype(int)
    assert (row[:10] == 255).all()
    assert row[10] > 200
    assert (np.diff(row[10:]) <= 0).all()
    assert row[18] == 0


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_feathering_fills_the_middle_of_thin_masks(width):
    """A brush stroke thinner than the feather must still be replaced."""
    white, black = Image.new("RGB", (40, 40), "white"), Image.new("RGB", (40, 40), "black")
    canvas = Canvas.fit(white, box_mask((40, 40), (10, 0, 10 + width, 40)), grid=(4, 4), stride=10)
    row = np.asarray(canvas.paste(black, feather=6))[20, :, 0].astype(int)
    assert row[10 + width // 2] == 0
    assert (np.delete(row, range(10, 10 + width)) == 255).all()
    assert (row[10 : 10 + width] == row[10 : 10 + width][::-1]).all()


def test_feathering_is_only_at_seams_inside_the_image():
    white, black = Image.new("RGB", (40, 40), "white"), Image.new("RGB", (40, 40), "black")
    whole = Canvas.fit(white, box_mask((40, 40), (0, 0, 40, 40)), grid=(4, 4), stride=10)
    assert not np.asarray(whole.paste(black, feather=6)).any()


def test_bad_calls(pipeline):
    image = noise(8, 8)
    with pytest.raises(InputError, match="the mask is 9x8 pixels, the image 8x8"):
        pipeline.inpaint(image, Image.new("L", (9, 8)), 1)
    with pytest.raises(InputError, match="feather is -1"):
        pipeline.inpaint(image, Image.new("L", (8, 8), 255), 1, feather=-1)
    with pytest.raises(InputError, match="'tiger' is unknown"):
        pipeline.inpaint(image, Image.new("L", (8, 8), 255), "tiger")
    with pytest.raises(InputError, match="num_images is 0"):
        pipeline.inpaint(image, Image.new("L", (8, 8), 255), 1, num_images=0)


def test_images_of_every_kind(pipeline, tmp_path):
    """Alpha, greyscale, 16 bits, palette, CMYK and a rotated photograph are taken as what they show."""
    image = noise(12, 8)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    image.convert("L").save(tmp_path / "grey.png")
    image.quantize(16).save(tmp_path / "palette.png")
    Image.fromarray(np.full((8, 12), 65535, np.uint16)).save(tmp_path / "deep.png")
    clear = image.convert("RGBA")
    clear.putalpha(0)
    clear.save(tmp_path / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    for path in sorted(tmp_path.iterdir()):
        opened = open_image(path)
        assert opened.mode == "RGB"
        assert opened.size == ((8, 12) if path.stem == "turned" else (12, 8))
        assert pipeline.inpaint(opened, Image.new("L", opened.size, 255), 1, steps=2)[0].size == opened.size
    assert np.asarray(open_image(tmp_path / "clear.png")).min() == 255
    assert np.asarray(open_image(tmp_path / "deep.png")).min() == 255


def test_images_show_what_they_should(tmp_path):
    """Turned the right way round, 16 bits scaled (not clipped), half-transparent on white, colours kept."""
    image = noise(12, 8)
    pixels = np.asarray(image)
    for turn, expected in ((6, np.rot90(pixels, -1)), (8, np.rot90(pixels)), (3, pixels[::-1, ::-1])):
        exif = Image.Exif()
        exif[0x0112] = turn
        image.save(tmp_path / "turned.png", exif=exif)
        assert np.array_equal(np.asarray(open_image(tmp_path / "turned.png")), expected)
    deep = np.arange(96, dtype=np.uint16).reshape(8, 12) * 257
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "deep.png"))[..., 0], deep // 257)
    grey = image.convert("L")
    for mode in ("L", "LA", "1", "P"):
        grey.convert(mode).save(tmp_path / "grey.png")
        shown = np.asarray(open_image(tmp_path / "grey.png"))
        assert np.array_equal(shown[..., 0], np.asarray(grey.convert(mode).convert("L"))), mode
    half = image.convert("RGBA")
    half.putalpha(128)
    half.save(tmp_path / "half.png")
    expected = pixels * (128 / 255) + 255 * (127 / 255)
    assert abs(np.asarray(open_image(tmp_path / "half.png")) - expected).max() <= 1.01
    few = image.quantize(16)
    few.save(tmp_path / "few.png", transparency=3)
    shown, hidden = np.asarray(open_image(tmp_path / "few.png")), np.asarray(few) == 3
    assert (shown[hidden] == 255).all()
    assert np.array_equal(shown[~hidden], np.asarray(few.convert("RGB"))[~hidden])
    flat = Image.new("RGB", (16, 16), (200, 40, 90))
    flat.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100)
    assert abs(np.asarray(open_image(tmp_path / "cmyk.jpg")).astype(int) - (200, 40, 90)).max() <= 8


def png(width, height, *, bits=8, data=b""):
    """A PNG; without data, one that claims a size and has next to nothing in it."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, 2 if bits == 8 else 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data or zlib.compress(b"")) + chunk(b"IEND", b"")
    )


def test_a_bomb_is_refused_before_a_pixel_is_decoded(tmp_path, monkeypatch, folder, capsys):
    """Whole files of 400 and of 100 million pixels, a few kilobytes each; the second is below Pillow's own limit."""

    def fail(*_, **__):
        raise AssertionError("decoded")

    for side in (20_000, 10_000):
        path = tmp_path / f"{side}.png"
        row = b"\0" * (side // 8 + 1)
        path.write_bytes(png(side, side, bits=1, data=zlib.compress(row * side, 1)))
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    for side in (20_000, 10_000):
        with pytest.raises(InputError, match="at most 64 million pixels"):
            open_image(tmp_path / f"{side}.png")
        arguments = ["inpaint", str(tmp_path / f"{side}.png"), "--mask", str(tmp_path / "20000.png")]
        monkeypatch.setattr(sys, "argv", ["arpg", *arguments, "--model", str(folder)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert exited.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_bad_files(tmp_path, monkeypatch):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "noise.png").write_bytes(bytes(range(256)))
    (tmp_path / "folder.png").mkdir()
    noise(32, 32).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:200])
    (tmp_path / "bomb.png").write_bytes(png(20_000, 20_000))
    (tmp_path / "large.png").write_bytes(png(9_000, 9_000))
    for name, message in (
        ("none.png", "does not exist"),
        ("text.png", "text.png is a text file; expected an image file"),
        ("noise.png", "noise.png is not an image file"),
        ("folder.png", "folder.png is a folder"),
        ("cut.png", "cut.png is cut short or damaged"),
        ("bomb.png", "at most 64 million pixels"),
        ("large.png", "9000x9000 pixels; at most 64 million"),
    ):
        with pytest.raises(InputError, match=message):
            open_image(tmp_path / name)


@given(st.integers(4, 14), st.integers(4, 14), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_windows_cover_everything_and_lean_on_what_is_known(height, width, seed):
    rng = np.random.default_rng(seed)
    known = np.zeros((height, width), dtype=bool)
    top, left = rng.integers(height - 3), rng.integers(width - 3)
    known[top : top + 4, left : left + 4] = True
    covered = known.copy()
    for row, column in plan_windows(known, (4, 4)):
        part = covered[row : row + 4, column : column + 4]
        assert part.shape == (4, 4)
        assert not part.all(), "a window with nothing to do"
        assert part.any(), "a window that sees nothing"
        part[:] = True
    assert covered.all()


@pytest.mark.parametrize(
    "sides", [{"left": 8}, {"right": 5, "bottom": 11}, {"top": 1}, {"left": 9, "top": 7, "right": 3}]
)
@pytest.mark.parametrize("size", [(8, 8), (20, 12)])
def test_outpainting_leaves_the_image_as_it_is(pipeline, size, sides):
    image = noise(*size)
    results = pipeline.outpaint(image, 2, **sides, num_images=2, steps=4)
    left, top, right, bottom = (sides.get(side, 0) for side in ("left", "top", "right", "bottom"))
    for result in results:
        assert result.size == (size[0] + left + right, size[1] + top + bottom)
        inside = np.asarray(result)[top : top + size[1], left : left + size[0]]
        assert np.array_equal(inside, np.asarray(image))
    assert not np.array_equal(np.asarray(results[0]), np.asarray(results[1]))
    again = pipeline.outpaint(image, 2, **sides, seed=1, steps=4)[0]
    assert np.array_equal(np.asarray(again), np.asarray(results[1])), "a picture depends on its seed alone"


def test_outpainting_draws_each_window_anew(pipeline):
    """Far out, two windows with the same surroundings do not repeat each other."""
    result = np.asarray(pipeline.outpaint(Image.new("RGB", (8, 8), "white"), 2, right=64, steps=4)[0])
    tiles = [result[:, 8 + 8 * k : 16 + 8 * k] for k in range(8)]
    assert not any(np.array_equal(a, b) for i, a in enumerate(tiles) for b in tiles[i + 1 :])


@pytest.mark.parametrize("sides", [{}, {"left": -1}, {"left": 4, "right": -2}, {"right": 10**9}])
def test_bad_sides(pipeline, sides):
    with pytest.raises(InputError, match=r"expected 0 or more|choose fewer"):
        pipeline.outpaint(noise(8, 8), 1, **sides)


def test_command_line(folder, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", *map(str, arguments), "--model", str(folder), "--steps", "3"])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code or 0, capsys.readouterr()

    noise(20, 12).save(tmp_path / "in.png")
    mask_image((20, 12), (5, 2, 12, 9)).save(tmp_path / "mask.png")
    source, mask, out = tmp_path / "in.png", tmp_path / "mask.png", tmp_path / "out.png"
    assert run("inpaint", source, "--mask", mask, "--class", 2, "-o", out)[0] == 0
    inside = np.asarray(Image.open(mask)) > 0
    assert np.array_equal(np.asarray(Image.open(out))[~inside], np.asarray(Image.open(source))[~inside])
    assert run("edit", source, "--box", "5,2,12,9", "--class", 2, "-o", tmp_path / "edit.png")[0] == 0
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(Image.open(tmp_path / "edit.png")))
    assert run("inpaint", source, "--mask", mask, "-n", 3, "-o", tmp_path / "many")[0] == 0
    assert sorted(p.name for p in (tmp_path / "many").iterdir()) == [f"0000{i}-in-seed{i}.png" for i in range(3)]
    assert run("outpaint", source, "--right", 9, "--top", 3, "-o", tmp_path / "wide.png")[0] == 0
    with Image.open(tmp_path / "wide.png") as wide:
        assert wide.size == (29, 15)
    for arguments, part in (
        (("outpaint", source), "expected 0 or more"),
        (("edit", source, "--box", "5,2,12", "--class", 2), "box is '5,2,12'"),
        (("edit", source, "--box", "5,2,50,9", "--class", 2), "inside 20x12 pixels"),
        (("inpaint", source, "--mask", out.with_name("no.png")), "no.png does not exist"),
        (("inpaint", source, "--mask", folder / "config.json"), "is a text file; expected an image file"),
    ):
        code, printed = run(*arguments, "-o", tmp_path / "bad.png")
        assert code == 2
        assert part in printed.err
        assert printed.err.count("\n") == 1
    assert not (tmp_path / "bad.png").exists()
