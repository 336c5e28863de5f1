"""What the tokenizer is trained with, against formulas written out and plain re-computation."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from arpg.errors import InputError
from arpg.tokenizer.losses import (
    LPIPS,
    PatchDiscriminator,
    balance,
    hinge_discriminator_loss,
    hinge_generator_loss,
    restart_dead_codes,
    vector_quantize,
)
from support.lpips import CHANNELS
from support.small import small_tokenizer

TORCHVISION = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)


def lpips_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    state, previous = {}, 3
    for i, width in enumerate(CHANNELS):
        state[f"vgg.{i}.weight"] = torch.randn(width, previous, 3, 3, generator=generator) * (2 / previous / 9) ** 0.5
        state[f"vgg.{i}.bias"] = torch.randn(width, generator=generator) * 0.1
        previous = width
    for i, tap in enumerate((1, 3, 6, 9, 12)):
        state[f"lin.{i}.weight"] = torch.rand(1, CHANNELS[tap], 1, 1, generator=generator)
    return state


def torchvision_states(state):
    convs = {
        f"features.{j}.{kind}": state[f"vgg.{i}.{kind}"]
        for i, j in enumerate(TORCHVISION)
        for kind in ("weight", "bias")
    }
    heads = {f"lin{i}.model.1.weight": state[f"lin.{i}.weight"] for i in range(5)}
    return {**convs, "classifier.0.weight": torch.zeros(2, 2), "classifier.0.bias": torch.zeros(2)}, heads


def plain_lpips(state, a, b):
    """The README's words, one image at a time, in double precision."""
    state = {key: value.double() for key, value in state.items()}

    def features(x):
        x = (x - torch.tensor([-0.030, -0.088, -0.188]).double().view(3, 1, 1)) / torch.tensor(
            [0.458, 0.448, 0.450]
        ).double().view(3, 1, 1)
        found = []
        for number in range(1, 14):
            if number in (3, 5, 8, 11):
                x = F.max_pool2d(x, 2)
            x = F.conv2d(x, state[f"vgg.{number - 1}.weight"], state[f"vgg.{number - 1}.bias"], padding=1).clamp(min=0)
            if number in (2, 4, 7, 10, 13):
                found.append(x / (x.norm(dim=0) + 1e-10))
        return found

    distances = []
    for one, other in zip(a.double(), b.double(), strict=True):
        pairs = zip(features(one), features(other), strict=True)
        distances.append(sum(F.conv2d((f - g) ** 2, state[f"lin.{i}.weight"]).mean() for i, (f, g) in enumerate(pairs)))
    return torch.stack(distances)


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(5)
    return torch.rand(2, 3, 3, 32, 40, generator=generator) * 2 - 1


@pytest.fixture
def lpips(tmp_path):
    save_file(lpips_state(), tmp_path / "lpips.safetensors")
    return LPIPS.load(tmp_path / "lpips.safetensors")


def test_balanced_losses_pull_equally_hard_at_the_pixels():
    pixels = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    first, second = 5 * pixels.square().sum(), 0.01 * pixels.sum()
    gradients = [torch.autograd.grad(loss, pixels)[0] for loss in (first, second)]
    found = balance(*gradients)
    assert found.item() == pytest.approx((10 * pixels).norm().item() / (0.01 * 96**0.5), rel=1e-5)
    assert (found * gradients[1]).norm().item() == pytest.approx(gradients[0].norm().item(), rel=1e-5)
    assert balance(gradients[0], torch.zeros(2, 3, 4, 4)).item() == 1e4


def test_lpips_is_the_formula(lpips, images):
    a, b = images
    expected = plain_lpips(lpips_state(), a, b)
    assert expected.min() > 0.01
    torch.testing.assert_close(lpips(a, b).double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lpips(a, b), lpips(b, a))
    assert lpips(a, a).tolist() == [0, 0, 0]


def test_lpips_is_frozen_and_passes_finite_gradients_to_both(lpips, images):
    assert not any(p.requires_grad for p in lpips.parameters())
    assert all(p.dtype == torch.float32 for p in lpips.parameters())
    assert not lpips.train().training
    a, b = (image.clone().requires_grad_() for image in images)
    lpips(a, b).sum().backward()
    assert a.grad.abs().sum() > 0
    assert b.grad.abs().sum() > 0
    with torch.no_grad():
        for conv in lpips.vgg:
            conv.bias.fill_(-100.0)  # every feature is 0: the root's derivative must not be infinite
    a.grad = None
    lpips(a, b).sum().backward()
    assert torch.isfinite(a.grad).all()


def test_lpips_under_autocast_stays_near(lpips, images):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = lpips(*images)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, lpips(*images), rtol=0.05, atol=0)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_published_files_give_the_same(lpips, images, tmp_path, ending):
    convs, heads = torchvision_states(lpips_state())
    for name, state in (("vgg16", convs), ("vgg", heads)):
        (torch.save if ending == "pth" else save_file)(state, tmp_path / f"{name}.{ending}")
    published = LPIPS.load(tmp_path / f"vgg16.{ending}", heads=tmp_path / f"vgg.{ending}")
    assert torch.equal(published(*images), lpips(*images))
    with pytest.raises(InputError, match=r"vgg16\.\w+ holds VGG16 without the linear heads.*heads="):
        LPIPS.load(tmp_path / f"vgg16.{ending}")


def test_half_precision_becomes_float32(tmp_path, images):
    half = {key: tensor.half() for key, tensor in lpips_state().items()}
    save_file(half, tmp_path / "half.safetensors")
    module = LPIPS.load(tmp_path / "half.safetensors")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    torch.testing.assert_close(module(*images).double(), plain_lpips(half, *images), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("vgg.12.bias"), r"missing keys: vgg\.12\.bias"),
        (lambda s: s.update({"vgg.13.bias": torch.zeros(20)}), r"unknown keys: vgg\.13\.bias"),
        (
            lambda s: s.update({"vgg.0.weight": torch.zeros(4, 1, 3, 3)}),
            r"shapes do not fit .*: vgg\.0\.weight is \[4, 1, 3, 3\], not",
        ),
        (lambda s: s.update({"vgg.4.bias": torch.zeros(8)}), r".*: vgg\.4\.weight is \[12, 8, 3, 3\], not \[8, 8"),
        (
            lambda s: s.update({"lin.2.weight": torch.zeros(1, 8, 1, 1)}),
            r"shapes do not fit .*: lin\.2\.weight is \[1, 8, 1, 1\], not",
        ),
    ],
)
def test_bad_lpips_weights_are_named(tmp_path, change, message):
    state = lpips_state()
    change(state)
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(InputError, match=rf"bad\.safetensors: {message}"):
        LPIPS.load(tmp_path / "bad.safetensors")


def test_bad_lpips_files_are_named(tmp_path):
    convs, heads = torchvision_states(lpips_state())
    torch.save(convs, tmp_path / "vgg16.pth")
    torch.save({"lin0.model.1.weight": heads["lin0.model.1.weight"]}, tmp_path / "one.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "vgg16.pth").read_bytes()[:500])
    (tmp_path / "cut.safetensors").write_bytes(b"12345678901234567890")
    save_file(lpips_state(), tmp_path / "ours.safetensors")
    for path, more, message in [
        ("absent.pth", None, "does not exist"),
        ("list.pth", None, "holds no plain dictionary of tensors"),
        ("cut.pth", None, "cut.pth"),
        ("cut.safetensors", None, "is a text file; expected a safetensors file"),
        ("vgg16.pth", "one.pth", r"one\.pth: missing keys: lin1"),
        ("ours.safetensors", "one.pth", "do not belong"),
        ("one.pth", None, r"one\.pth: missing keys: lin\.0\.weight"),
    ]:
        with pytest.raises(InputError, match=message):
            LPIPS.load(tmp_path / path, heads=tmp_path / more if more else None)


def test_lpips_refuses_images_that_do_not_match(lpips):
    for a, b in [((1, 3, 32, 32), (1, 3, 32, 16)), ((1, 3, 8, 32), (1, 3, 8, 32))]:
        with pytest.raises(InputError, match="16 pixels"):
            lpips(torch.zeros(a), torch.zeros(b))


def test_discriminator_shape_start_and_gradient():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator()
    weights = torch.cat([p.flatten() for n, p in discriminator.named_parameters() if p.ndim == 4])
    assert abs(weights.mean()) < 1e-4
    assert abs(weights.std() - 0.02) < 1e-4
    image = torch.randn(2, 3, 64, 64, requires_grad=True)
    logits = discriminator(image)
    assert logits.shape == (2, 1, 6, 6)  # 64 / 8, less one for each of two 4x4 convolutions without stride
    logits.sum().backward()
    assert (image.grad.abs().sum((1, 2, 3)) > 0).all()
    # No image sees another: ranks need not agree on statistics.
    torch.testing.assert_close(discriminator(image[:1]), logits[:1])


def test_hinge_losses_are_the_formulas():
    real, fake = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-3.0, 0.0, 1.0])
    assert hinge_discriminator_loss(real, fake).item() == pytest.approx(0.5 * ((0 + 0.5 + 2) / 3 + (0 + 1 + 2) / 3))
    assert hinge_generator_loss(fake).item() == pytest.approx(2 / 3)


@pytest.fixture
def quantizing():
    quantizer = small_tokenizer().quantize
    torch.manual_seed(1)
    return quantizer, torch.randn(2, 4, 3, 5, requires_grad=True)


def test_quantized_is_the_nearest_code(quantizing):
    quantizer, z = quantizing
    found = vector_quantize(z, quantizer.codes())
    assert torch.equal(found.ids_BN, quantizer.nearest(z))
    codes = quantizer.look_up(found.ids_BN).transpose(1, 2).reshape(z.shape)
    torch.testing.assert_close(found.codes_BEhw, codes)
    mean_square = ((F.normalize(z, dim=1) - codes) ** 2).mean()
    torch.testing.assert_close(found.codebook_loss, mean_square)
    torch.testing.assert_close(found.commitment_loss, mean_square)


def test_quantized_gradients_go_where_they_should(quantizing):
    quantizer, z = quantizing
    weight = quantizer.embedding.weight

    def gradients(value):
        return torch.autograd.grad(value, (z, weight), allow_unused=True)

    pull = torch.randn(z.shape)
    through_z, through_codes = gradients((vector_quantize(z, quantizer.codes()).codes_BEhw * pull).sum())
    torch.testing.assert_close(through_z, torch.autograd.grad((F.normalize(z, dim=1) * pull).sum(), z)[0])
    assert through_codes is None

    found = vector_quantize(z, quantizer.codes())
    by_z, by_codes = gradients(found.codebook_loss)
    assert by_z is None
    assert by_codes.abs().sum() > 0
    used = torch.zeros(len(weight), dtype=torch.bool).index_fill(0, found.ids_BN.flatten(), True)
    assert torch.equal(by_codes.abs().sum(1) > 0, used)

    by_z, by_codes = gradients(vector_quantize(z, quantizer.codes()).commitment_loss)
    assert by_codes is None
    assert by_z.abs().sum() > 0


def test_quantized_in_float32_under_autocast(quantizing):
    quantizer, z = quantizing
    exact = vector_quantize(z, quantizer.codes())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = vector_quantize(z, quantizer.codes())
    assert torch.equal(found.ids_BN, exact.ids_BN)
    assert torch.equal(found.codes_BEhw, exact.codes_BEhw)
    assert vector_quantize(z.bfloat16(), quantizer.codes().bfloat16()).codes_BEhw.dtype == torch.float32


def test_dead_codes_restart_from_different_candidates():
    generator = torch.Generator().manual_seed(3)
    before, candidates = torch.randn(8, 4, generator=generator), torch.randn(6, 4, generator=generator) * 5
    count = torch.tensor([3, 0, 1, 0, 0, 2, 0, 0])

    def restart(count, candidates=candidates):
        weight = before.clone()
        return weight, restart_dead_codes(weight, count, candidates, generator=torch.Generator().manual_seed(7))

    weight, mask = restart(count)
    assert torch.equal(mask, count == 0)
    assert torch.equal(weight[~mask], before[~mask])
    distance = torch.cdist(weight[mask], F.normalize(candidates, dim=1))
    assert (distance.min(1).values < 0.01).all()
    assert len(set(distance.argmin(1).tolist())) == 5
    assert torch.equal(restart(count)[0], weight)

    # More dead codes than candidates: each is used about equally often, and no two codes are the same.
    weight, _ = restart(torch.zeros(8), candidates[:3])
    near = torch.cdist(weight, F.normalize(candidates[:3], dim=1)).argmin(1)
    assert sorted(torch.bincount(near).tolist()) == [2, 3, 3]
    assert len(weight.unique(dim=0)) == 8
    assert not restart(torch.ones(8))[1].any()
    with pytest.raises(InputError, match="0 candidates"):
        restart(count, candidates[:0])
