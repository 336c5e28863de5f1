"""Images from CUDA graphs: the same as without, in chunks of few sizes. Without a GPU, captures are played."""

import threading

import pytest
import torch

from arpg.decode import pixels
from arpg.decode.pixels import GraphedTokenizer, chunk_sizes
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.tokenizer import VQTokenizer
from support.small import small_tokenizer

GPU = torch.cuda.is_available()
GRID = (2, 3)


def ids(batch, seed=0):
    return torch.randint(24, (batch, 6), generator=torch.Generator().manual_seed(seed))


class Fake:
    """Captured pixels that a CPU can make: they run the decoder on the inputs that were copied in."""

    made = None

    def __init__(self, tokenizer, ids_BN, grid, known_BN):
        self.busy, self.bytes = threading.Lock(), 0
        self.made.append((len(ids_BN), known_BN is not None))
        self.decode, self.grid = tokenizer.decode, grid

    def replay(self, ids_BN, known_BN):
        assert self.busy.locked()
        return self.decode(ids_BN, self.grid, known_BN=known_BN)


@pytest.fixture
def captured(monkeypatch):
    """The captures that were made, as (images, preview or not); the tokenizer counts as one with a fused decoder."""
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setattr(pixels, "CapturedPixels", Fake)
    monkeypatch.setattr(VQTokenizer, "fused", property(lambda self: self.decoder))
    return Fake.made


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 200])
def test_chunks(count):
    sizes = list(chunk_sizes(count))
    assert sum(sizes) == count
    assert set(sizes) <= {1, 2, 4, 8, 16, 32, 64}
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) == 1 for size in sizes if size < 64)


@torch.no_grad()
def test_a_chunk_is_captured_when_it_comes_again(captured):
    tokenizer = small_tokenizer()
    graphed, known = GraphedTokenizer(tokenizer), torch.arange(6).remainder(2).bool().expand(3, -1)
    with kernel_policy(KernelPolicy(pixel_graphs=True)):
        for seed in range(3):
            torch.testing.assert_close(graphed.decode(ids(3, seed), GRID), tokenizer.decode(ids(3, seed), GRID))
            torch.testing.assert_close(
                graphed.decode(ids(3, seed), GRID, known_BN=known), tokenizer.decode(ids(3, seed), GRID, known_BN=known)
            )
        assert sorted(captured) == [(1, False), (1, True), (2, False), (2, True)]
        held = next(iter(graphed.graphs.captured.values()))
        with held.busy:  # another thread replays it
            torch.testing.assert_close(graphed.decode(ids(2), GRID), tokenizer.decode(ids(2), GRID))
        tokenizer.decoder = small_tokenizer().decoder  # other weights: what was captured of the old ones is not used
        graphed.decode(ids(2), GRID)
        assert len(captured) == 4
        graphed.decode(ids(2), GRID)
        assert len(captured) == 5


@torch.no_grad()
def test_nothing_is_captured_unless_it_is_asked_for(captured):
    tokenizer = small_tokenizer()
    graphed = GraphedTokenizer(tokenizer)
    for _ in range(3):
        assert torch.equal(graphed.decode(ids(3), GRID), tokenizer.decode(ids(3), GRID))
    with kernel_policy(KernelPolicy(pixel_graphs=True)), torch.enable_grad():
        for _ in range(3):
            graphed.decode(ids(3), GRID)
    assert captured == []


def test_a_moved_pipeline_captures_anew(pipeline):
    before = pipeline.graphed_tokenizer
    assert pipeline.graphed_tokenizer is before
    assert before.tokenizer is pipeline.tokenizer
    assert pipeline.to("cpu").graphed_tokenizer is not before


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("fused_conv", ["none", "all"])
@torch.no_grad()
def test_replayed_images_are_the_images(fused_conv):
    """Also on another stream than that of the capture, and for other ids than those of the capture."""
    tokenizer = small_tokenizer().cuda().decode_in(torch.bfloat16)
    graphed, known = GraphedTokenizer(tokenizer), torch.rand(7, 6, device="cuda") < 0.5
    with kernel_policy(KernelPolicy(fused_conv=fused_conv, pixel_graphs=True)):
        for seed in range(5):
            given = ids(7, seed).cuda()
            with torch.cuda.stream(torch.cuda.Stream()):
                found = graphed.decode(given, GRID), graphed.decode(given, GRID, known_BN=known)
                torch.cuda.current_stream().synchronize()
            expected = tokenizer.decode(given, GRID), tokenizer.decode(given, GRID, known_BN=known)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
        assert sorted(key[0] for key in graphed.graphs.captured) == [1, 1, 2, 2, 4, 4]
