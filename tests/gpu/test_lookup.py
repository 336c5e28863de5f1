"""The kernels around the layers of a step against tensor operations. Without a GPU, Triton's interpreter runs them."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from arpg.kernels import lookup
from arpg.kernels.lookup import embedded_at, put, turned_at
from arpg.model.rope import BASE, grid_places, rotation
from support.interpreted import mend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
mend()


def positions(*, batch=2, tokens=12, slots=5):
    """Some of each row, none twice, as a part of a wider tensor."""
    rows = [torch.randperm(tokens, generator=torch.Generator().manual_seed(b)) for b in range(batch)]
    return torch.stack(rows).to(DEVICE)[:, 2 : 2 + slots]


def places(batch=2):
    """Of a grid of 3 x 4 with a column for padding; one place is nowhere."""
    place = torch.cat((grid_places(3, 4), torch.zeros(1, 2))).repeat(batch, 1, 1).to(DEVICE)
    place[0, 3] = -1
    return place


@pytest.mark.parametrize("copies", [1, 2])
def test_places_are_looked_up_and_turned(copies):
    place, at = places(), positions()
    place_BS2 = place.gather(1, at[..., None].expand(-1, -1, 2))
    by = turned_at(place, at, copies=copies, head_dim=24, base=BASE)
    for made, expected in zip(by, rotation(torch.cat([place_BS2] * copies), 24), strict=True):
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("copies", [1, 2])
def test_tokens_are_looked_up_and_embedded(copies):
    place, at = places(), positions()
    ids = torch.arange(26, device=DEVICE).flip(0).reshape(2, 13)
    weight = torch.randn(30, 40, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    x, *by = embedded_at(weight, ids, place, at, copies=copies, head_dim=8, base=BASE)
    assert torch.equal(x, torch.cat([weight[ids.gather(1, at)]] * copies))
    for made, expected in zip(by, turned_at(place, at, copies=copies, head_dim=8, base=BASE), strict=True):
        assert torch.equal(made, expected)


def test_what_is_drawn_is_put_down():
    """What was there before stays: a step that was handed out does not change."""
    at, ids = positions(), torch.arange(26, device=DEVICE).reshape(2, 13)
    known = torch.zeros(2, 13, dtype=torch.bool, device=DEVICE)
    known[:, -1] = True
    drawn = torch.arange(100, 110, device=DEVICE).reshape(2, 5)
    before = ids.clone(), known.clone()
    new_ids, new_known = put(ids, known, at, drawn)
    assert torch.equal(new_ids, ids.scatter(1, at, drawn))
    assert torch.equal(new_known, known.scatter(1, at, True))
    assert torch.equal(ids, before[0])
    assert torch.equal(known, before[1])


def test_a_step_ends_with_a_kernel_that_waits_for_all(monkeypatch):
    """Others are launched ahead. This one must not be: attention reads what earlier steps wrote without a wait."""
    launched = {}

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.update({self.name: options.get("launch_pdl", False)})

    monkeypatch.setattr(lookup, "ahead", lambda x: True)
    for name in ("_put", "_look_up"):
        monkeypatch.setattr(lookup, name, Kernel(name))
    at, ids = positions(), torch.arange(26, device=DEVICE).reshape(2, 13)
    turned_at(places(), at, copies=1, head_dim=8, base=BASE)
    put(ids, ids > 30, at, at)
    assert launched == {"_put": False, "_look_up": True}
