"""The fused kernels against their plain twins: values and gradients. Without a GPU, Triton's interpreter runs them."""

import os

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

from arpg.kernels.rotary import split_turned, turn  # noqa: E402
from arpg.kernels.swiglu import swiglu  # noqa: E402
from arpg.model.rope import nowhere, rotate, rotation  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotation_of(batch, slots, channels):
    place = torch.rand((batch, slots, 2), generator=torch.Generator().manual_seed(1)) * 12
    place[:, 0] = nowhere(batch)  # a class slot: its rotation is zero
    return rotation(place.to(DEVICE), channels)


@pytest.mark.parametrize("shape", [(512,), (1, 512), (3, 5, 512), (9, 1536), (2, 768)])
def test_swiglu(shape):
    x, weight = draw(*shape).requires_grad_(), draw(*shape[:-1], shape[-1] // 2, seed=1)
    gate, up = x.chunk(2, -1)
    plain = F.silu(gate) * up
    fused = swiglu(x)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight)[0] for y in (fused, plain)))


@pytest.mark.parametrize(("slots", "heads", "channels"), [(1, 3, 16), (7, 3, 16), (10, 6, 64), (5, 1, 4)])
def test_rotation_of_a_fused_projection(slots, heads, channels):
    by = rotation_of(2, slots, channels)
    qkv = draw(2, slots, 3, heads, channels).requires_grad_()
    q, k, v = qkv.unbind(2)
    plain, fused = (rotate(q, by), rotate(k, by), v), split_turned(qkv, *by)
    torch.testing.assert_close(fused, plain)
    # Attention hands its gradients back with heads and slots swapped in memory.
    weights = [draw(2, heads, slots, channels, seed=i).transpose(1, 2) for i in range(3)]
    torch.testing.assert_close(*(torch.autograd.grad(y, qkv, weights)[0] for y in (fused, plain)))


def test_rotation_of_queries():
    by = rotation_of(3, 6, 32)
    x, weight = draw(3, 6, 2, 32).requires_grad_(), draw(3, 6, 2, 32, seed=1)
    fused, plain = turn(x, *by), rotate(x, by)
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight)[0] for y in (fused, plain)))
    torch.testing.assert_close(turn(fused, *by, True)[:, 1:], x[:, 1:])  # turned back: where it was


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_the_network_with_and_without_kernels(monkeypatch):
    """In bfloat16 on the GPU, the fused network is as close to float32 as the plain one."""
    from arpg import kernels
    from arpg.config import ModelConfig
    from arpg.model import ARPG, class_condition

    config = ModelConfig(width=256, num_heads=4, pass1_layers=2, pass2_layers=2, vocab_size=64, num_classes=5)
    model = ARPG(config).init_weights(seed=0).to(DEVICE).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    ids = torch.randint(64, (4, 256), device=DEVICE)
    order = torch.stack([torch.randperm(256, device=DEVICE) for _ in range(4)])
    condition = class_condition(model, torch.tensor([0, 1, 2, 5]))
    exact = model(ids, order, condition)
    with torch.autocast("cuda", torch.bfloat16):
        fused = model(ids, order, condition)
        monkeypatch.setattr(kernels, "HAS_TRITON", False)
        plain = model(ids, order, condition)
    errors = [float((x.float() - exact).norm() / exact.norm()) for x in (fused, plain)]
    assert errors[0] < 1.2 * errors[1] < 0.05
