"""Decoding and the tokenizer on Apple GPUs: the tokens and images of the CPU, without the types that they lack."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arpg import SamplingSettings, make_plan, tasks
from arpg.decode import Engine
from support.small import small_model, small_tokenizer

CASES = {
    "steps": SamplingSettings(steps=5, guidance=3.0),
    "top-k and top-p": SamplingSettings(steps=5, guidance=3.0, top_k=20, top_p=0.95),
    "exact": SamplingSettings(guidance=3.0, attention="causal", decode="exact", draft=3),
    "speculative": SamplingSettings(guidance=3.0, attention="causal", decode="speculative", draft=3),
}


@torch.no_grad()
def generated(settings, device):
    """The ids of two images, one of them with known tokens, and their pixels."""
    model, tokenizer = small_model().to(device), small_tokenizer().to(device)
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, :5] = True
    request = tasks.fill(model, 2, [5, 6], ids_N=torch.arange(16) % 24, known_N=known)
    plan = make_plan((4, 4), known, request.seeds, settings)
    *_, last = Engine(model).decode(request, plan, settings)
    pixels = tokenizer.decode(last.ids_BN, (4, 4))
    return last.ids_BN.cpu(), pixels.cpu(), tokenizer.encode(pixels).cpu()


@pytest.mark.mps
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("name", CASES)
def test_an_apple_gpu_makes_what_the_cpu_makes(name):
    found, expected = (generated(CASES[name], device) for device in ("mps", "cpu"))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
    assert (found[2] == expected[2]).float().mean() > 0.9  # a code beside another may be the nearest


class NoFloat64(TorchDispatchMode):
    """Raises where an operation makes a tensor of float64, which Apple's GPUs do not have."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        assert all(x.dtype != torch.float64 for x in made), f"{func} makes float64"
        return out


@pytest.mark.parametrize("name", CASES)
def test_decoding_has_no_float64(name):
    with pytest.raises(AssertionError, match="makes float64"), NoFloat64():
        torch.zeros(2, dtype=torch.float64)
    expected = generated(CASES[name], "cpu")
    with NoFloat64():
        found = generated(CASES[name], "cpu")
    assert torch.equal(found[0], expected[0])
