"""Attention maps: the weights are those the network used, they stand where they belong, and the figures show them."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from arpg import InputError, SamplingSettings, cli, decode, make_plan, tasks
from arpg.evaluation.attention_maps import (
    AttentionMaps,
    AttentionRecorder,
    attention_maps,
    choose_columns,
    default_queries,
    draw_matrices,
    draw_on_image,
    image_attention,
    summarize,
)
from arpg.figures import ramp
from arpg.model import class_condition
from support.small import SMALL, small_model

IDS = torch.arange(16) % 24
NOTHING = torch.zeros(1, 16, dtype=torch.bool)


def planned(seed=3, **settings):
    return make_plan((4, 4), NOTHING, [seed], SamplingSettings(**settings)).samples[0]


def check_calls(recorder):
    assert recorder.calls
    for call in recorder.calls:
        assert torch.allclose(call.weights() @ call.value, call.out, atol=1e-6)


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, shared_kv=False, positions="cosine")])
def test_weights_times_values_are_what_the_layers_computed(config):
    """Teacher forcing, and a ragged, guided decode: every kind of mask there is."""
    model = small_model(config)
    ids, order = torch.stack([IDS, IDS.flip(0)]), torch.stack([torch.randperm(16), torch.arange(16)])
    condition = class_condition(model, torch.tensor([1, 3]))
    with torch.no_grad(), AttentionRecorder(model) as recorder:
        inside = model(ids, order, condition)
    assert [(call.kind, call.layer) for call in recorder.calls] == [(f"pass{p}", i) for p in (1, 2) for i in (0, 1)]
    check_calls(recorder)
    with torch.no_grad():
        assert torch.equal(inside, model(ids, order, condition))  # listening changes nothing
        assert len(recorder.calls) == 4  # and it is over

    known = torch.zeros(2, 16, dtype=torch.bool)
    known[0, :5] = True
    for attention in ("block", "causal"):
        settings = SamplingSettings(steps=4, guidance=3.0, attention=attention)
        request = tasks.fill(model, 2, [5, 6], ids_N=ids, known_N=known)
        with AttentionRecorder(model) as recorder:
            list(decode(model, request, make_plan((4, 4), known, request.seeds, settings), settings))
        check_calls(recorder)
        assert any(call.mask is not None for call in recorder.calls)


def test_one_token_per_step_is_teacher_forcing(model):
    condition = class_condition(model, torch.tensor([2]))
    plan = planned(steps=16)
    maps = attention_maps(model, IDS, condition, plan=plan)
    with torch.no_grad(), AttentionRecorder(model) as recorder:
        model(IDS[None], torch.tensor(plan.order)[None], condition)
    for call in recorder.calls:
        found = (maps.pass1_LHTT if call.kind == "pass1" else maps.pass2_LHNT)[call.layer]
        assert found == pytest.approx(call.weights()[0].numpy(), abs=1e-6)
    assert np.array_equal(maps.seen1_TT, np.tri(16, dtype=bool))
    assert np.array_equal(maps.seen2_NT, np.tri(16, dtype=bool))  # the class alone, then one token more each time


@pytest.mark.parametrize("attention", ["block", "causal"])
def test_the_maps_of_a_decode_are_what_the_decode_saw(model, attention):
    settings = SamplingSettings(steps=5, order="halton", attention=attention)
    request = tasks.generate(model, [4], [9])
    plan = make_plan((4, 4), request.known_BN, request.seeds, settings)
    with AttentionRecorder(model) as recorder:
        ids = list(decode(model, request, plan, settings))[-1].ids_BN[0]
    maps = attention_maps(model, ids, request.condition, plan=plan.samples[0], attention=attention)
    for kind, weights, seen in (("pass1", maps.pass1_LHTT, maps.seen1_TT), ("pass2", maps.pass2_LHNT, maps.seen2_NT)):
        assert weights.sum(-1) == pytest.approx(np.ones(weights.shape[:-1]), abs=1e-5)
        assert not weights[:, :, ~seen].any()
        for layer in (0, 1):
            calls = [call.weights()[0] for call in recorder.calls if (call.kind, call.layer) == (kind, layer)]
            if kind == "pass2":  # in the first step, one position is asked for all
                calls[0] = calls[0].expand(-1, plan.samples[0].sizes[0], -1)
            first = 0
            for call in calls:
                _, rows, columns = call.shape
                part = weights[layer, :, first : first + rows]
                assert part[..., :columns] == pytest.approx(call.numpy(), abs=1e-5)
                assert not part[..., columns:].any()
                first += rows
            assert first == weights.shape[2]
    sizes = plan.samples[0].sizes
    ends = 1 + np.cumsum(sizes)
    block = np.repeat([1, *ends[:-1]], [1, *sizes[:-1]])  # a slot sees its own step
    expected = np.arange(1, 1 + len(block)) if attention == "causal" else block
    assert maps.seen1_TT.sum(1).tolist() == expected.tolist()
    assert maps.seen2_NT.sum(1).tolist() == np.repeat([1, *ends[:-1]], sizes).tolist()


def test_uniform_attention_is_even_and_reaches_everywhere():
    model = small_model()
    with torch.no_grad():
        for block in model.pass1:
            block.attn.qkv.weight.zero_()
        for block in model.pass2:
            block.attn.q.weight.zero_()
    maps = attention_maps(model, IDS, class_condition(model, torch.tensor([0])), plan=planned(steps=6))
    for line in summarize(maps):
        assert line.evenness == pytest.approx(1.0, abs=1e-4)
        assert line.reach == pytest.approx(1.0, abs=1e-4)
        assert 0.05 < line.on_prefix < 0.34


def made_up():
    """Four tokens on 2 x 2, one after the other; every query looks at the first token, and little at the rest."""
    seen = np.tri(4, dtype=bool)
    weights = np.where(seen, 0.001, 0.0).astype(np.float32)
    weights[1:, 1] = 0.997
    weights /= weights.sum(1, keepdims=True)
    return AttentionMaps(weights[None, None], weights[None, None], seen, seen, (2, 0, 3, 1), 1, (2, 2))


def test_weights_stand_at_their_tokens():
    maps = made_up()
    on_grid = maps.on_grid(maps.pass2_LHNT[0, 0, 3])
    assert on_grid[1, 0] == on_grid[~np.isnan(on_grid)].max() > 0.9  # position 2 was first
    assert np.isnan(on_grid[0, 1])  # position 1 comes last: it is not there
    few = [line for line in summarize(maps) if line.kind == "pass2"]
    assert few[0].evenness < 0.5


def test_the_figure_is_brightest_where_the_attention_is():
    maps = made_up()
    columns = [column for column in choose_columns(maps) if column.kind == "pass2"]
    white = Image.new("RGB", (8, 8), "white")
    drawn = np.asarray(draw_on_image(maps, white, columns, queries=[1])).astype(int)
    four_times, nothing = ramp(np.array([0.75, 0.0])).astype(int)  # an even share of four slots, or less than a 16th
    bright = (np.abs(drawn - (0.72 * four_times + 0.28 * 255)).sum(-1) < 6).nonzero()
    dark = (np.abs(drawn - (0.72 * nothing + 0.28 * 255)).sum(-1) < 6).nonzero()
    assert len(bright[0]) > 5000  # one token of 96 x 96 pixels, at the lower left
    assert len(dark[0]) > 10000  # two tokens
    assert bright[0].mean() > dark[0].mean() - 1
    assert bright[1].mean() < dark[1].mean()
    matrix = np.asarray(draw_matrices(maps, columns)).astype(int)
    column = ((np.abs(matrix - four_times).sum(-1) < 6) & (np.arange(len(matrix))[:, None] > 60)).nonzero()
    assert np.ptp(column[0]) < np.ptp(column[1]) + 2  # the last row's first token, the only one with four slots


def test_columns_and_queries(model):
    maps = attention_maps(model, IDS, class_condition(model, torch.tensor([0])), plan=planned(steps=6))
    assert [c.caption for c in choose_columns(maps)] == ["layer 1", "layer 2"] * 2
    last = choose_columns(maps, layers="last", heads="all")
    assert [(c.kind, c.caption) for c in last][-1] == ("pass2", "layer 2, head 2")
    assert len(last) == 4
    assert [c.caption for c in choose_columns(maps, layers=[1], heads=[2])] == ["layer 1, head 2"] * 2
    with pytest.raises(InputError, match="layer 3 does not exist; expected 1 to 2"):
        choose_columns(maps, layers=[3])
    with pytest.raises(InputError, match="outside the grid"):
        draw_on_image(maps, Image.new("RGB", (8, 8)), choose_columns(maps), queries=[16])
    assert default_queries(maps)[-1] == maps.order[maps.pass1_LHTT.shape[-1] - 2]
    with pytest.raises(InputError, match="one image of 16 tokens"):
        attention_maps(model, IDS[:9], class_condition(model, torch.tensor([0])), plan=planned(steps=6))


def test_a_generated_picture_and_the_same_given_again(pipeline):
    maps, drawn = image_attention(pipeline, None, 3, seed=4, steps=5)
    assert np.array_equal(np.asarray(drawn), np.asarray(pipeline.generate(3, seed=4, steps=5)[0]))
    with pytest.raises(InputError, match="neither an image nor a class"):
        image_attention(pipeline, None, None)
    given, _ = image_attention(pipeline, drawn, None, seed=4, steps=5)
    assert given.order == maps.order
    assert given.pass2_LHNT.shape == maps.pass2_LHNT.shape


def test_command(folder, tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arpg", "attention", "-m", str(folder), "--device", "cpu", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out + captured.err

    target = tmp_path / "a.png"
    code, said = run("-c", "class 1", "--steps", "5", "--query", "2,3", "-o", str(target))
    assert code == 0
    assert "Pass 2, layer 2" in said
    with Image.open(target) as image:
        assert image.height > 800
        assert '"class": "class 1"' in image.text["arpg"]
    assert run(str(target), "--layers", "last", "--heads", "all", "-o", str(tmp_path / "maps"))[0] == 0
    assert {path.name for path in (tmp_path / "maps").iterdir()} == {"matrices.png", "image.png"}
    for arguments, part in (
        (["-c", "1", "--query", "5,1"], "expected a row from 1 to 4"),
        (["-c", "1", "--layers", "x"], "layers is 'x'"),
        (["-c", "1", "--heads", "7"], "head 7 does not exist"),
        ([], "neither an image nor a --class"),
    ):
        code, said = run(*arguments, "-o", str(target))
        assert code == 2
        assert part in said
        assert said.count("\n") == 1
