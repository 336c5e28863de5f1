"""Tokens in and out of a step: the kernels against tensor operations. Without a GPU, Triton's interpreter runs them."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import token_io
from arpg.kernels.token_io import embed_at, rope_at, scatter_tokens
from arpg.model.rope import BASE, grid_positions, make_rope
from support.interpreted import mend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
mend()


def positions(*, batch=2, tokens=12, slots=5):
    """Some of each row, none twice, as a part of a wider tensor."""
    rows = [torch.randperm(tokens, generator=torch.Generator().manual_seed(b)) for b in range(batch)]
    return torch.stack(rows).to(DEVICE)[:, 2 : 2 + slots]


def grid(batch=2):
    """Of a grid of 3 x 4 with a column for padding; one has no position."""
    pos = torch.cat((grid_positions(3, 4), torch.zeros(1, 2))).repeat(batch, 1, 1).to(DEVICE)
    pos[0, 3] = -1
    return pos


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_rotation_at_positions(copies, static):
    pos, at = grid(), positions()
    pos_BS2 = pos.gather(1, at[..., None].expand(-1, -1, 2))
    rope = rope_at(pos, at, copies=copies, head_dim=24, base=BASE, static=static)
    for made, expected in zip(rope, make_rope(torch.cat([pos_BS2] * copies), 24), strict=True):
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("copies", [1, 2])
def test_embeddings_at_positions(copies):
    pos, at = grid(), positions()
    ids = torch.arange(26, device=DEVICE).flip(0).reshape(2, 13)
    weight = torch.randn(30, 40, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    x, *rope = embed_at(weight, ids, pos, at, copies=copies, head_dim=8, base=BASE)
    assert torch.equal(x, torch.cat([weight[ids.gather(1, at)]] * copies))
    for made, expected in zip(rope, rope_at(pos, at, copies=copies, head_dim=8, base=BASE), strict=True):
        assert torch.equal(made, expected)


def test_sampled_tokens_are_scattered():
    """What was there before stays: a step that was handed out does not change."""
    at, ids = positions(), torch.arange(26, device=DEVICE).reshape(2, 13)
    known = torch.zeros(2, 13, dtype=torch.bool, device=DEVICE)
    known[:, -1] = True
    sampled = torch.arange(100, 110, device=DEVICE).reshape(2, 5)
    before = ids.clone(), known.clone()
    new_ids, new_known = scatter_tokens(ids, known, at, sampled)
    assert torch.equal(new_ids, ids.scatter(1, at, sampled))
    assert torch.equal(new_known, known.scatter(1, at, True))
    assert torch.equal(ids, before[0])
    assert torch.equal(known, before[1])


def test_a_step_ends_with_a_kernel_that_waits_for_all(monkeypatch):
    """Others have PDL. This one must not: attention reads what earlier steps wrote before the dependency barrier."""
    launched = {}

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.update({self.name: options.get("launch_pdl", False)})

    monkeypatch.setattr(token_io, "prefetch_weights", lambda x: True)
    for name in ("_scatter_tokens", "_embed_at"):
        monkeypatch.setattr(token_io, name, Kernel(name))
    at, ids = positions(), torch.arange(26, device=DEVICE).reshape(2, 13)
    rope_at(grid(), at, copies=1, head_dim=8, base=BASE)
    scatter_tokens(ids, ids > 30, at, at)
    assert launched == {"_scatter_tokens": False, "_embed_at": True}
