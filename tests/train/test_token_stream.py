"""Token sets that do not fit into memory: read in windows of shards, in an order that follows from seed and step."""

import numpy as np
import pytest
import torch

from arpg.config import TextConfig
from arpg.data import TokenWriter, open_tokens
from arpg.data.dataset import Dataset, TokenBatches, open_text_states, write_text_states
from arpg.data.tokens import CHECKED_SHARDS
from arpg.errors import InputError
from arpg.storage import as_path
from support.ray_work import FakeEncoder

NUM, SHARD = 103, 10  # the last shard has 3 images


def write(folder, *, captioned=False):
    settings = {"grid": (2, 2), "vocab_size": 128, "classes": (), "views": 2, "shard_size": SHARD}
    writer = TokenWriter(folder, **settings, captioned=captioned)
    ids = np.arange(NUM)[:, None, None].repeat(2, 1).repeat(4, 2)  # image i has the ids i
    writer.add(ids, np.zeros(NUM), [f"image {i}" for i in range(NUM)] if captioned else None)
    writer.close()
    return open_tokens(folder)


def batches(tokens, *, shuffle, parts=1, text=None, seed=5):
    dataset = Dataset(tokens, text)
    cpu = torch.device("cpu")
    return TokenBatches(
        dataset, batch_size=8, parts=parts, num_classes=1, label_drop=0.0, seed=seed, device=cpu, shuffle=shuffle
    )


def images(stream, steps, part=0):
    return np.concatenate([stream.indices(step, part) for step in steps])


@pytest.mark.parametrize("shuffle", [1, 15, 30, 102, 103, 10**6])
def test_every_epoch_has_every_image_once(tmp_path, shuffle):
    tokens = write(tmp_path)
    stream = batches(tokens, shuffle=shuffle)
    found = images(stream, range(40))[: 3 * NUM].reshape(3, NUM)
    for epoch in found:
        assert sorted(epoch) == list(range(NUM))
    assert (found[0] != found[1]).any()
    np.testing.assert_array_equal(stream.batch(2, 0).ids_BN[:, 0].numpy(), stream.indices(2, 0))


def test_the_order_is_a_function_of_seed_and_step(tmp_path):
    tokens = write(tmp_path)
    expected = images(batches(tokens, shuffle=25), range(30))
    backwards = batches(tokens, shuffle=25)
    found = [backwards.indices(step, 0) for step in reversed(range(30))]
    np.testing.assert_array_equal(np.concatenate(found[::-1]), expected)
    four = batches(tokens, shuffle=25, parts=4)  # as four processes
    found = [np.concatenate([four.indices(step, part) for part in range(4)]) for step in range(30)]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    assert (images(batches(tokens, shuffle=25, seed=6), range(30)) != expected).any()


def test_sets_of_one_window_keep_their_order(tmp_path):
    """Runs from before there were windows go on as they began."""
    found = images(batches(write(tmp_path), shuffle=NUM), range(13))
    expected = [np.random.default_rng([5, epoch]).permutation(NUM) for epoch in range(2)]
    np.testing.assert_array_equal(found, np.concatenate(expected)[: len(found)])


def test_only_two_windows_are_open(tmp_path):
    tokens = write(tmp_path / "tokens", captioned=True)
    write_text_states(tokens, TextConfig("fake", 8, 7), FakeEncoder(), shard_size=7)
    text = open_text_states(tokens)
    stream = batches(tokens, shuffle=20, text=text)
    most = 0
    for step in range(60):
        batch = stream.batch(step, 0)
        for index, states, length in zip(stream.indices(step, 0), batch.states_BTE, batch.length_B, strict=True):
            (expected,) = FakeEncoder().states([f"image {index}"])
            assert torch.equal(states[:length].float(), expected)
        stream._ahead.submit(int).result()
        if step:
            most = max(most, tokens.shards.num_open)
    assert most <= 3 * 3  # of 11: two windows of a batch, and the next, of up to three shards each
    assert tokens.captions[57] == "image 57"
    assert tokens.captions[100:] == ["image 100", "image 101", "image 102"]
    with pytest.raises(IndexError):
        tokens.captions[NUM]


def test_streaming_from_a_store_reads_every_shard_once_per_epoch(tmp_path, bucket, faults):
    local = write(tmp_path / "tokens")
    write(as_path(f"{bucket}/tokens"))
    faults.errors = 2
    tokens = open_tokens(f"{bucket}/tokens")
    expected, found = batches(local, shuffle=30), batches(tokens, shuffle=30)
    faults.requests.clear()
    faults.truncated_downloads = 1
    for step in range(NUM // 8):
        assert torch.equal(found.batch(step, 0).ids_BN, expected.batch(step, 0).ids_BN)
    found._ahead.shutdown()
    reads = [path for method, path in faults.requests if method == "GET" and "/ids-" in path]
    assert len(set(reads)) == 11
    assert len(reads) == 12  # one was cut short


def test_a_damaged_shard_of_a_large_set_is_named_when_it_is_used(tmp_path):
    count = CHECKED_SHARDS + 1
    writer = TokenWriter(tmp_path, grid=(2, 2), vocab_size=8, classes=(), views=1, shard_size=1)
    writer.add(np.zeros((count, 1, 4), np.int64), np.zeros(count))
    writer.close()
    np.save(tmp_path / "ids-00003.npy", np.full((1, 1, 4), 9, np.uint16))
    tokens = open_tokens(tmp_path)
    tokens.gather(np.array([2]), np.array([0]))
    with pytest.raises(InputError, match=r"ids-00003\.npy has 9; expected 0 to 7"):
        tokens.gather(np.array([3]), np.array([0]))
    (tmp_path / "ids-00004.npy").unlink()
    with pytest.raises(InputError, match=r"ids-00004\.npy does not exist"):
        open_tokens(tmp_path)
