"""The decoder's kernels against the plain layers, on odd sizes. Without a GPU, Triton's interpreter runs them."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from arpg import TokenizerConfig, VQTokenizer
from arpg.config import DEFAULT_MODEL
from arpg.kernels import group_norm as groupnorm
from arpg.tokenizer.fused import FusedDecoder, small_weights
from support.small import small_tokenizer

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def all_digits():
    """A GPU's convolutions in float32, not in TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def norm_of(channels, groups):
    norm = torch.nn.GroupNorm(groups, channels, eps=1e-6).to(DEVICE).requires_grad_(False)
    norm.weight.copy_(draw(channels, seed=8))
    norm.bias.copy_(draw(channels, seed=9))
    return norm


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"), [((1, 32, 1, 1), 4), ((2, 96, 5, 7), 32), ((3, 64, 9, 4), 32), ((2, 8, 16, 16), 2)]
)
def test_norm(shape, groups, silu, monkeypatch):
    """Several parts and one, a mean far from zero, channels that are no power of two, and a bias that comes later."""
    monkeypatch.setattr(groupnorm, "_NUMBERS", 512)
    x, norm, bias = draw(*shape) + 30, norm_of(shape[1], groups), draw(shape[1], seed=1)
    for added in (None, bias):
        expected = norm(x if added is None else x + added[:, None, None])
        expected = F.silu(expected) if silu else expected
        found = groupnorm.norm(x, groupnorm.moments(x), added, norm, silu=silu)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("shape", [(1, 32, 1, 1), (2, 96, 5, 7)])
def test_residual(shape, monkeypatch):
    monkeypatch.setattr(groupnorm, "_NUMBERS", 512)
    x, y, bias = draw(*shape), draw(*shape, seed=1), draw(shape[1], seed=2)
    total, found = groupnorm.add(x, y, bias)
    torch.testing.assert_close(total, x + y + bias[:, None, None])
    torch.testing.assert_close(found.sums_BPC2, groupnorm.moments(total).sums_BPC2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("batch", "high", "wide"), [(1, 1, 1), (2, 3, 5), (1, 4, 4)])
def test_upsampling_on_the_small_grid(batch, high, wide):
    conv = torch.nn.Conv2d(6, 10, 3, padding=1).to(DEVICE).requires_grad_(False)
    x = draw(batch, 6, high, wide)
    expected = conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
    made, found = groupnorm.spread(F.conv2d(x, small_weights(conv.weight), padding=1), conv.bias)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.sums_BPC2, groupnorm.moments(expected).sums_BPC2, atol=1e-3, rtol=1e-3)


def test_the_whole_decoder():
    tokenizer = small_tokenizer().to(DEVICE)
    for parameter in tokenizer.decoder.parameters():  # norms that do something
        torch.nn.init.normal_(parameter, std=0.2)
    fused = FusedDecoder(tokenizer.decoder, torch.float32)
    z = draw(1, 8, 1, 2)
    with torch.no_grad():
        expected = tokenizer.decoder(z)
    torch.testing.assert_close(fused(z), expected, atol=1e-3, rtol=1e-3)
    assert all(parameter.requires_grad for parameter in tokenizer.decoder.parameters())


@pytest.mark.slow
def test_a_decoder_with_changes_of_width():
    config = TokenizerConfig(
        channels=32, multipliers=(1, 2, 2), res_blocks=1, z_channels=8, codebook_size=24, codebook_dim=4
    )
    torch.manual_seed(0)
    tokenizer = VQTokenizer(config).eval().to(DEVICE)
    z = draw(1, 8, 1, 2)
    with torch.no_grad():
        torch.testing.assert_close(
            FusedDecoder(tokenizer.decoder, torch.float32)(z), tokenizer.decoder(z), atol=1e-3, rtol=1e-3
        )


def test_pixels_take_the_kernels_where_they_can(monkeypatch):
    """In half precision on a GPU; what they are made from may change."""
    monkeypatch.setattr("arpg.tokenizer.vq.can_fuse", lambda x: True)
    tokenizer, ids = small_tokenizer().to(DEVICE), torch.arange(2, device=DEVICE)[None]
    state = list(tokenizer.state_dict())
    with torch.no_grad():
        expected = tokenizer.decode(ids, (1, 2))
        assert tokenizer.fused is None  # float32: as it always was
        tokenizer.pixel_dtype = torch.float32  # the interpreter has no convolution in bfloat16 of its own
        torch.testing.assert_close(tokenizer.decode(ids, (1, 2)), expected, atol=1e-3, rtol=1e-3)
    assert tokenizer.fused is not None
    assert list(tokenizer.state_dict()) == state
    assert tokenizer.double().fused is None
    tokenizer.float().decode_in(torch.float32)
    assert tokenizer.pixel_dtype is None
    tokenizer.decode_in(torch.bfloat16).decode(ids, (1, 2)).sum().backward()  # with a gradient: the plain layers
    assert tokenizer.fused is None


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_pixels_in_bfloat16_on_a_gpu():
    """As close to float32 as the plain layers in bfloat16 are."""
    from arpg import Pipeline

    tokenizer = Pipeline.from_pretrained(DEFAULT_MODEL, precision="float32").tokenizer
    ids = torch.randint(8192, (5, 144), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        exact = tokenizer.decode(ids, (12, 12))
        fused = tokenizer.decode_in(torch.bfloat16).decode(ids, (12, 12))
        assert tokenizer.fused is not None
        with torch.autocast("cuda", torch.bfloat16):
            plain = tokenizer.decoder(
                tokenizer.post_quant_conv(tokenizer.quantize.look_up(ids).mT.reshape(5, -1, 12, 12))
            )
    errors = [float((x.float() - exact).norm() / exact.norm()) for x in (fused, plain)]
    assert errors[0] < 1.3 * errors[1] < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_convolutions_are_tuned_when_a_size_comes_again(dtype):
    """The images are those of convolutions that are not tuned, up to rounding."""
    tokenizer, seen = small_tokenizer().to(DEVICE).decode_in(dtype), []
    tokenizer.post_quant_conv.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    ids = torch.arange(3 * 16, device=DEVICE).reshape(3, 16) % tokenizer.config.codebook_size
    images = [tokenizer.decode(ids, (4, 4)) for _ in range(3)]
    tokenizer.decode(ids[:1], (4, 4))
    assert seen == [False, True, True, False]
    assert not torch.backends.cudnn.benchmark
    close = 1e-4 if dtype == torch.float32 else 0.05
    for image in images[1:]:
        torch.testing.assert_close(image, images[0], atol=close, rtol=close)
