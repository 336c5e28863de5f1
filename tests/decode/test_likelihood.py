"""Likelihoods: they are exact, sum to one, and tell classes apart."""

import dataclasses
import itertools
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, Request, SamplingSettings, cli, decode, make_plan
from arpg.decode.likelihood import make_orders, token_bits
from arpg.model import class_condition
from arpg.settings import ORDERS
from support.small import SMALL, small_model


@pytest.mark.parametrize("name", ["random", "raster", "halton", "local"])
def test_all_images_together_have_probability_one(name):
    """Three codes, four places: the 81 images, enumerated."""
    model = small_model(dataclasses.replace(SMALL, vocab_size=3, grid=(2, 2)))
    ids = torch.tensor(list(itertools.product(range(3), repeat=4)))
    order = make_orders(name, (2, 2), range(5, 6)).expand(81, -1)
    bits = token_bits(model, ids, class_condition(model, torch.full((81,), 2)), order)
    assert torch.exp2(-bits.sum(1)).sum().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.exp2(-bits.sum(1)).std() > 1e-4


def test_the_bits_are_those_of_sequential_decoding(model):
    """What a one-token-at-a-time decode computed for the tokens it drew."""
    seen = []

    def hook(state, step, logits, sampled):
        seen.append(logits)

    condition = class_condition(model, torch.tensor([1, 3]))
    request = Request.from_nothing(condition, (4, 4), (7, 8))
    settings = SamplingSettings(steps=16)
    plan = make_plan((4, 4), request.known_BN, request.seeds, settings)
    ids = list(decode(model, request, plan, settings, hook=hook))[-1].ids_BN
    order = torch.tensor([sample.order for sample in plan.samples])
    log2 = torch.cat(seen, dim=1).log_softmax(-1) / np.log(2)
    in_order = log2.gather(-1, ids.gather(1, order)[..., None])[..., 0]
    bits = token_bits(model, ids, condition, order)
    assert torch.allclose(bits.gather(1, order), -in_order, atol=1e-4)


def test_orders_are_whole_and_differ_where_they_should():
    for name in ORDERS:
        orders = make_orders(name, (3, 4), range(3))
        assert torch.equal(orders.sort().values, torch.arange(12).expand(3, 12))


def test_score_and_classify_agree(pipeline):
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=(11, 9, 3), dtype=np.uint8))
    classes = pipeline.classify(image, orders=3, seed=2)
    assert classes.shape == (5,)
    for label in (0, 4):
        bits = pipeline.score(image, label, orders=3, seed=2)
        assert bits.shape == (3, 4, 4)
        assert bits.mean() == pytest.approx(classes[label], abs=1e-4)
    assert pipeline.score(image).mean() != pytest.approx(pipeline.score(image, 0).mean(), abs=1e-3)
    for arguments in ({"orders": 0}, {"order": "zigzag"}, {"class_": "tiger"}):
        with pytest.raises(InputError):
            pipeline.score(image, **arguments)


def test_command_line(folder, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", *map(str, arguments), "--model", str(folder), "--device", "cpu"])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        return exited.value.code or 0, capsys.readouterr()

    Image.new("RGB", (8, 8), "red").save(tmp_path / "in.png")
    code, printed = run("score", tmp_path / "in.png", "--class", 1, "--orders", 2, "--map", tmp_path / "map.png")
    assert code == 0
    assert "bits per token (16 tokens, 2 x random" in printed.out
    assert (tmp_path / "map.png").stat().st_size > 500
    code, printed = run("classify", tmp_path / "in.png", "--top", 3)
    bits = [float(line.split()[0]) for line in printed.out.splitlines()]
    assert code == 0
    assert len(bits) == 3
    assert bits == sorted(bits)
    for arguments, part in (
        (("score", tmp_path / "no.png"), "does not exist"),
        (("score", tmp_path / "in.png", "--order", "zigzag"), "'zigzag'"),
        (("classify", tmp_path / "in.png", "--top", 0), "top is 0"),
    ):
        code, printed = run(*arguments)
        assert code == 2
        assert part in printed.err
