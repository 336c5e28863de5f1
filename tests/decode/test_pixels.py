"""Images from CUDA graphs: the same as without, in chunks of few sizes. Without a GPU, captures are played."""

import threading

import pytest
import torch

from arpg import Pipeline
from arpg.config import TOKENIZERS
from arpg.decode import graphs
from arpg.decode.graphs import GraphedTokenizer, chunk_sizes, largest_chunk
from arpg.kernels.dispatch import KernelPolicy, kernel_policy
from arpg.tokenizer import PixelCodec, VQTokenizer
from support.small import small_model, small_tokenizer

GPU = torch.cuda.is_available()
GRID = (2, 3)


def ids(batch, seed=0):
    return torch.randint(24, (batch, 6), generator=torch.Generator().manual_seed(seed))


class Fake:
    """Captured pixels that a CPU can make: they run the decoder on the inputs that were copied in."""

    made, bytes = None, 0

    def __init__(self, tokenizer, ids_BN, grid, known_BN):
        self.busy = threading.Lock()
        self.made.append((len(ids_BN), known_BN is not None))
        self.decode, self.grid = tokenizer.decode, grid

    def replay(self, ids_BN, known_BN):
        assert self.busy.locked()
        return self.decode(ids_BN, self.grid, known_BN=known_BN)


@pytest.fixture
def captured(monkeypatch):
    """The captures that were made, as (images, preview or not); the tokenizer counts as one with a fused decoder."""
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setattr(graphs, "CapturedPixels", Fake)
    monkeypatch.setattr(VQTokenizer, "fused", property(lambda self: self.decoder))
    return Fake.made


def graphed_on_a_gpu(tokenizer):
    graphed = GraphedTokenizer(tokenizer)
    graphed.graphs.memory = 2**30
    return graphed


@pytest.mark.parametrize("largest", [4, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 200])
def test_chunks(count, largest):
    sizes = list(chunk_sizes(count, largest))
    assert sum(sizes) == count
    assert set(sizes) <= {1, 2, 4, 8, 16, 32, 64}
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) == 1 for size in sizes if size < largest)


@pytest.mark.parametrize(
    ("side", "gib", "images"), [(16, 17.5, 64), (32, 17.5, 16), (16, 3, 16), (16, 1, 4), (64, 1, 0), (16, 0, 0)]
)
def test_the_largest_chunk_of_vq_16(side, gib, images):
    """An H200 holds graphs of 64 images of 256 pixels; the maps of a chunk take at most half of the graphs' memory."""
    assert largest_chunk(TOKENIZERS["vq-16"], (side, side), int(gib * 2**30)) == images


@torch.no_grad()
def test_a_chunk_is_captured_when_it_comes_again(captured):
    tokenizer = small_tokenizer()
    graphed, known = graphed_on_a_gpu(tokenizer), torch.arange(6).remainder(2).bool().expand(3, -1)
    for seed in range(3):
        torch.testing.assert_close(graphed.decode(ids(3, seed), GRID), tokenizer.decode(ids(3, seed), GRID))
        torch.testing.assert_close(
            graphed.decode(ids(3, seed), GRID, known_BN=known), tokenizer.decode(ids(3, seed), GRID, known_BN=known)
        )
    assert sorted(captured) == [(1, False), (1, True), (2, False), (2, True)]
    assert graphed.decode(ids(0), GRID).shape[0] == 0
    held = next(iter(graphed.graphs.captured.values()))
    with held.busy:  # another thread replays it
        torch.testing.assert_close(graphed.decode(ids(2), GRID), tokenizer.decode(ids(2), GRID))
    tokenizer.decoder = small_tokenizer().decoder  # other weights: what was captured of the old ones is not used
    graphed.decode(ids(2), GRID)
    assert len(captured) == 4
    graphed.decode(ids(2), GRID)
    assert len(captured) == 5


@torch.no_grad()
def test_graphs_that_hold_too_much_memory_are_evicted(captured, monkeypatch):
    """Requests may have any grid: what bounds the number of captures is the memory that they hold."""
    monkeypatch.setattr(Fake, "bytes", 2**29)
    graphed = graphed_on_a_gpu(small_tokenizer())
    for wide in range(2, 7):
        for _ in range(2):
            graphed.decode(ids(1)[:, :wide], (1, wide))
    assert len(captured) == 5
    assert [key[1] for key in graphed.graphs.captured] == [(1, 5), (1, 6)]


@torch.no_grad()
def test_where_nothing_is_captured(captured, monkeypatch):
    """Without the policy, with a gradient, in compiled code, without memory for an image, and without kernels."""
    tokenizer = small_tokenizer()
    graphed = graphed_on_a_gpu(tokenizer)

    def decode_again(graphed=graphed):
        for _ in range(3):
            assert torch.equal(graphed.decode(ids(3), GRID), tokenizer.decode(ids(3), GRID))

    with kernel_policy(KernelPolicy(pixel_graphs=False)):
        decode_again()
    with torch.enable_grad():
        decode_again()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        decode_again()
    decode_again(GraphedTokenizer(tokenizer))  # on a CPU
    monkeypatch.setattr(VQTokenizer, "fused", None)  # float32, or a GPU without the kernels
    decode_again()
    assert captured == []


def test_a_moved_pipeline_captures_anew():
    pipeline = Pipeline(small_model(), small_tokenizer())
    before = pipeline.graphed_tokenizer
    assert pipeline.graphed_tokenizer is before
    assert before.tokenizer is pipeline.tokenizer
    assert pipeline.to("cpu").graphed_tokenizer is not before


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@torch.no_grad()
def test_replayed_images_are_the_images():
    """Also on another stream than that of the capture, and for other ids than those of the capture."""
    tokenizer = small_tokenizer().cuda().decode_in(torch.bfloat16)
    graphed, known = GraphedTokenizer(tokenizer), torch.rand(7, 6, device="cuda") < 0.5
    for seed in range(5):
        given = ids(7, seed).cuda()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = graphed.decode(given, GRID), graphed.decode(given, GRID, known_BN=known)
            torch.cuda.current_stream().synchronize()
        expected = tokenizer.decode(given, GRID), tokenizer.decode(given, GRID, known_BN=known)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
    assert sorted(key[0] for key in graphed.graphs.captured) == [1, 1, 2, 2, 4, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_a_server_decodes_pixels_beside_the_steps():
    """On a stream of its own, which waits for none of the kernels that were launched before."""
    from arpg.serve.server_config import Limits
    from arpg.serve.workers import TokenizerLanes

    tokenizer = small_tokenizer()
    expected = PixelCodec(tokenizer).decode(ids(5), GRID).astype(int)
    lanes = TokenizerLanes(tokenizer.to("cuda"), Limits(), max_pixels=10**6, max_batch=8, share_finished=True)
    for _ in range(2):  # compiles and tunes, which takes longer than what follows is kept waiting
        pixels_BHW3 = lanes.decode(ids(5), GRID)
        lanes.encode(pixels_BHW3)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**10)  # seconds
    busy = torch.cuda.Event()
    busy.record()
    again = lanes.decode(ids(5), GRID), lanes.encode(pixels_BHW3)
    assert not busy.query()
    torch.cuda.synchronize()
    assert (again[0] == pixels_BHW3).all()
    assert (abs(again[0] - expected) <= 1).all()
    assert again[1].device.type == "cpu"
    for lane in (lanes.small, lanes.large, lanes.preview):
        lane.close()
