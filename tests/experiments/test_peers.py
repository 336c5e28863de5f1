"""Peers against naive decoders without a cache, their training losses, and the paper's Insight 2."""

import dataclasses
import math

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from arpg import ARPG, InputError, SamplingSettings
from arpg.config import ModelConfig
from arpg.data.dataset import Batch
from arpg.decode import SamplePlan, make_plan
from arpg.decode.sampling import sample
from arpg.evaluation.attention_maps import attention_maps, summarize
from arpg.kernels.ops import guide
from arpg.model.condition import class_condition
from arpg.noise import Stream, gumbel, seed_keys
from arpg.train.objective import GraphedGradients
from experiments.paper.attention import attention_line, draw_last_layer, layer_attention
from experiments.paper.engine import RowEngine
from experiments.paper.orders import surest_order
from experiments.paper.peers import PEERS, Masked, NextToken, PeerObjective, known_tokens, num_known
from support.small import small_model

CONFIG = ModelConfig(32, 2, 1, 2, vocab_size=12, num_classes=3, grid=(2, 6), dropout=0.1)
NUM = 12
TRAINED = [kind for kind in PEERS if kind != "scales"]
SEEDS, LABELS = [5, 6, 9], [0, 2, 1]
GUIDED = SamplingSettings(steps=4, guidance=2.5, guidance_schedule="constant")


def make(kind, **changes):
    peer = PEERS[kind](dataclasses.replace(CONFIG, **changes)).init_weights(seed=1, std=0.3).eval()
    with torch.no_grad():
        peer.head.weight.copy_(torch.randn(peer.head.weight.shape, generator=torch.Generator().manual_seed(2)))
    return peer


def conditions(peer):
    condition = class_condition(peer, torch.tensor(LABELS))
    return torch.cat((condition.prefix_BPD, condition.null_prefix_BPD)), torch.cat((condition.pos_BP2,) * 2)


def plan_of(settings):
    plan = make_plan(CONFIG.grid, torch.zeros(len(SEEDS), NUM, dtype=torch.bool), SEEDS, settings)
    return torch.tensor([s.order for s in plan.samples]), plan.samples[0].sizes


def sampled(peer, logits, position, settings):
    scale = torch.full(position.shape, settings.guidance)
    return sample(guide(logits, scale), settings, seed_keys(SEEDS), position)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "order"), [("raster", "raster"), ("random", "random")])
def test_next_token_models_decode_as_without_a_cache(kind, order):
    peer = make(kind)
    settings = dataclasses.replace(GUIDED, order=order, steps=NUM)
    order_BN, sizes = plan_of(settings)
    assert sizes == (1,) * NUM
    prefix, prefix_pos = conditions(peer)
    pos_N2 = torch.tensor([[i // 6, i % 6] for i in range(NUM)]).float()
    ids = torch.zeros(3, NUM, dtype=torch.long)
    for k in range(NUM):  # the whole sequence again for every token
        before = order_BN[:, :k]
        tokens = peer.embedding(ids.gather(1, before)).repeat(2, 1, 1)
        pos = torch.cat((prefix_pos, pos_N2[before].repeat(2, 1, 1)), 1)
        out = peer.run(torch.cat((prefix, tokens), 1), pos, "causal")[:, -1:]
        here = order_BN[:, k : k + 1]
        ids.scatter_(1, here, sampled(peer, peer.head(out), here, settings))
    assert torch.equal(RowEngine(peer).generate(LABELS, SEEDS, settings), ids)
    assert len(ids.unique()) > 4
    with pytest.raises(InputError, match="a step has 2 tokens; this model predicts 1 at once"):
        RowEngine(peer).generate(LABELS, SEEDS, GUIDED)


@torch.no_grad()
@pytest.mark.parametrize("steps", [4, NUM])
def test_interleaved_positions_decode_as_without_a_cache(steps):
    peer = make("interleaved")
    settings = dataclasses.replace(GUIDED, steps=steps)
    order_BN, sizes = plan_of(settings)
    prefix, prefix_pos = conditions(peer)
    pos_N2 = torch.tensor([[i // 6, i % 6] for i in range(NUM)]).float()
    mask_D = peer.embedding.weight[CONFIG.mask_id]
    ids = torch.zeros(3, NUM, dtype=torch.long)
    x, pos, first = prefix, prefix_pos, 0
    for size in sizes:
        here = order_BN[:, first : first + size]
        first += size
        here_pos = pos_N2[here].repeat(2, 1, 1)
        x, pos = torch.cat((x, mask_D.expand(6, size, -1)), 1), torch.cat((pos, here_pos), 1)
        logits = peer.head(peer.run(x, pos, "causal")[:, -size:])
        ids.scatter_(1, here, sampled(peer, logits, here, settings))
        x = torch.cat((x, peer.embedding(ids.gather(1, here)).repeat(2, 1, 1)), 1)
        pos = torch.cat((pos, here_pos), 1)
    assert torch.equal(RowEngine(peer).generate(LABELS, SEEDS, settings), ids)
    if steps == NUM:  # one token per step is the sequence of training
        condition = class_condition(peer, torch.tensor(LABELS))
        teacher = peer(ids, order_BN, condition)
        unguided = dataclasses.replace(settings, guidance=1.0)
        made = RowEngine(peer).generate(LABELS, SEEDS, unguided)
        logits = peer(made, order_BN, condition)
        again = sample(logits, unguided, seed_keys(SEEDS), order_BN)
        assert torch.equal(torch.zeros_like(made).scatter(1, order_BN, again), made)
        assert not torch.equal(teacher, logits)


@torch.no_grad()
def test_regions_decode_as_without_a_cache():
    """Four single tokens, one of each region of 1 x 3, then two groups of four; each row may see where it ends."""
    peer = make("regions")
    order = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert peer.fixed_order(torch.device("cpu")).tolist() == order
    prefix, prefix_pos = conditions(peer)
    pos_N2 = torch.tensor([[i // 6, i % 6] for i in range(NUM)]).float()
    mask_D, ids = peer.embedding.weight[CONFIG.mask_id], torch.zeros(3, NUM, dtype=torch.long)
    x, pos, ends = prefix, prefix_pos, [1]
    for first, size in ((0, 1), (1, 1), (2, 1), (3, 1), (4, 4), (8, 4)):
        here = torch.tensor(order[first : first + size]).expand(3, -1)
        if first == 4:  # three [MASK]s beside the fourth token
            x = torch.cat((x, mask_D.expand(6, 3, -1)), 1)
            pos = torch.cat((pos, pos_N2[here[:, 1:]].repeat(2, 1, 1)), 1)
            ends[-1:] = [8] * 4
        out = peer.run(x, pos, torch.tensor([ends]))
        ids.scatter_(1, here, sampled(peer, peer.head(out[:, -size:]), here, GUIDED))
        x = torch.cat((x, peer.embedding(ids.gather(1, here)).repeat(2, 1, 1)), 1)
        pos = torch.cat((pos, pos_N2[here].repeat(2, 1, 1)), 1)
        ends += [len(ends) + size] * size
    assert torch.equal(RowEngine(peer).generate(LABELS, SEEDS, GUIDED), ids)
    assert len(ids.unique()) > 4
    condition = class_condition(peer, torch.tensor(LABELS))
    unguided = dataclasses.replace(GUIDED, guidance=1.0)
    made = RowEngine(peer).generate(LABELS, SEEDS, unguided)
    order_BN = torch.tensor(order).expand(3, -1)
    again = sample(peer(made, order_BN, condition), unguided, seed_keys(SEEDS), order_BN)
    assert torch.equal(torch.zeros_like(made).scatter(1, order_BN, again), made)  # the sequence of training
    with pytest.raises(InputError, match="grid is 3x4; 2 x 2 regions need multiples of 2"):
        make("regions", grid=(3, 4))


@torch.no_grad()
def test_scales_decode_as_without_a_cache():
    """Grids of side 1, 2, 3 and 4, each from the nearest tokens of the one before; each sees where it ends."""
    peer = make("scales", grid=(4, 4))
    assert peer.sides == [1, 2, 3, 4]
    prefix, _ = conditions(peer)
    ids, x, pos, ends = None, torch.empty(6, 0, 32), torch.empty(6, 0, 2), []
    for first, side in ((0, 1), (1, 2), (5, 3), (14, 4)):
        cells = [(row, column) for row in range(side) for column in range(side)]
        if ids is None:
            inputs = prefix
        else:
            nearest = [(row * (side - 1) // side) * (side - 1) + column * (side - 1) // side for row, column in cells]
            inputs = peer.embedding(ids[:, nearest]).repeat(2, 1, 1)
        at = torch.tensor([[4 / side * (cell + 0.5) - 0.5 for cell in both] for both in cells])
        x, pos = torch.cat((x, inputs), 1), torch.cat((pos, at.expand(6, -1, -1)), 1)
        ends += [len(ends) + len(cells)] * len(cells)
        logits = peer.head(peer.run(x, pos, torch.tensor([ends]))[:, -len(cells) :])
        ids = sampled(peer, logits, torch.arange(first, first + len(cells)).expand(3, -1), GUIDED)
    found = RowEngine(peer).generate(LABELS, SEEDS, GUIDED)
    assert torch.equal(found, ids)
    assert found.shape == (3, 16)
    assert len(ids.unique()) > 4
    with pytest.raises(InputError, match="grid is 2x6; scales need as many rows as columns"):
        make("scales")


@torch.no_grad()
@pytest.mark.parametrize("confidence", [None, 0.0, 3.0])
@pytest.mark.parametrize("order", ["random", "halton"])
def test_masked_models_decode_as_one_sample_at_a_time(confidence, order):
    """Each sample alone, with plain loops over positions."""
    peer = make("masked")
    settings = dataclasses.replace(GUIDED, order=order)
    order_BN, sizes = plan_of(settings)
    found = RowEngine(peer, confidence=confidence).generate(LABELS, SEEDS, settings)
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        condition = class_condition(peer, torch.tensor([label]))
        key, ids, known, first = seed_keys([seed]), [0] * NUM, [False] * NUM, 0
        for k, size in enumerate(sizes):
            seen = torch.tensor([[ids[i] if known[i] else CONFIG.mask_id for i in range(NUM)]])
            out = []
            for prefix in (condition.prefix_BPD, condition.null_prefix_BPD):
                x = torch.cat((prefix, peer.embedding(seen)), 1)
                pos = torch.tensor([[[i // 6, i % 6] for i in range(NUM)]]).float()
                out.append(peer.head(peer.run(x, torch.cat((condition.pos_BP2, pos), 1), None)[:, 1:]))
            logits = out[1] + settings.guidance * (out[0] - out[1])
            every = torch.arange(NUM)[None]
            codes = (logits + gumbel(key, Stream.TOKEN, every, CONFIG.vocab_size)).argmax(-1)[0].tolist()
            chosen = order_BN[row, first : first + size].tolist()
            first += size
            if confidence is not None:
                noise = gumbel(key, Stream.ORDER, every, 1)[0, :, 0] * confidence * (1 - (k + 1) / len(sizes))
                sure = {i: logits.log_softmax(-1)[0, i, codes[i]] + noise[i] for i in range(NUM) if not known[i]}
                chosen = sorted(sure, key=lambda i: -float(sure[i]))[:size]
            for i in chosen:
                assert not known[i]
                ids[i], known[i] = codes[i], True
        assert found[row].tolist() == ids


@torch.no_grad()
@pytest.mark.parametrize("order", ["random", "raster"])
def test_predicting_all_that_is_left_in_planned_order_is_planned_decoding(order, monkeypatch):
    """The queries of Pass 2 do not see each other: ARPG samples the same tokens, whatever else is predicted."""
    model, settings = small_model(), dataclasses.replace(GUIDED, order=order, schedule=(1, 6, 2, 7))
    engine = RowEngine(model, confidence=1.0)
    confident = engine.generate(LABELS, SEEDS, settings)
    planned = RowEngine(model).generate(LABELS, SEEDS, settings)
    assert not torch.equal(confident, planned)
    engine.confidence = None
    monkeypatch.setattr("experiments.paper.engine.Masked", type(model))  # in the plan's order
    assert torch.equal(engine.generate(LABELS, SEEDS, settings), planned)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("kind", "order", "confidence"),
    [
        *(
            ("raster", "raster", None),
            ("random", "random", None),
            ("interleaved", "random", None),
            ("regions", "random", None),
            ("scales", "random", None),
        ),
        *(("masked", "halton", None), ("masked", "random", 3.0), (None, "random", None), (None, "random", 2.0)),
    ],
)
def test_captured_graphs_sample_the_tokens_of_the_loop(kind, order, confidence):
    config = ModelConfig(128, 2, 2, 2, vocab_size=64, num_classes=3, grid=(4, 4))
    peer = (ARPG if kind is None else PEERS[kind])(config).init_weights(seed=1, std=0.1)
    with torch.no_grad():
        peer.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    peer = peer.to("cuda", torch.bfloat16).eval()
    steps = 16 if kind in ("raster", "random") else 5
    settings = SamplingSettings(steps=steps, order=order, guidance=2.5)
    eager, graph = (RowEngine(peer, mode, confidence=confidence) for mode in ("eager", "graph"))
    for first in (0, 100):  # the second time replayed with other seeds
        seeds = range(first, first + 4)
        expected = eager.generate([0, 2, 1, 1], seeds, settings)
        assert torch.equal(graph.generate([0, 2, 1, 1], seeds, settings), expected)
    assert len(graph.graphs.captured) == 1


def batch():
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(NUM, generator=generator) for _ in range(4)])
    ids = torch.randint(12, (4, NUM), generator=generator)
    keys = torch.randint(2**31, (4,), generator=generator).int()
    return Batch(ids, torch.tensor([0, 1, 2, 3]), order, keys)


@pytest.mark.parametrize("kind", TRAINED)
def test_losses_are_cross_entropies_of_what_a_peer_predicts(kind):
    peer, data = make(kind), batch()
    loss = PeerObjective(peer, CONFIG.grid)(data)
    condition = class_condition(peer, data.labels_B)
    fixed = peer.fixed_order(torch.device("cpu"))
    assert (fixed is None) == (kind not in ("raster", "regions"))
    order = data.order_BN if fixed is None else fixed.expand(4, -1)
    logits = peer(data.ids_BN, order, condition, dropout_key_B=data.dropout_key_B)
    counted = torch.ones(4, NUM, dtype=torch.bool)
    if kind == "masked":
        counted = ~known_tokens(order, data.dropout_key_B).gather(1, order)
    expected = F.cross_entropy(logits[counted], data.ids_BN.gather(1, order)[counted])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # A token never changes the prediction of itself or of what stands before it in the order.
    for slot in (0, 5, NUM - 1):
        changed = data.ids_BN.scatter(
            1, order[:, slot : slot + 1], 11 - data.ids_BN.gather(1, order[:, slot : slot + 1])
        )
        moved = (peer(changed, order, condition, dropout_key_B=data.dropout_key_B) - logits).abs().amax(-1) > 1e-6
        if kind == "masked":
            assert not moved[counted[:, slot]].any()
        elif kind == "regions":  # nor of its group
            end = slot + 1 if slot < 4 else (slot // 4 + 1) * 4
            assert not moved[:, :end].any()
            assert end == NUM or moved[:, end:].any()
        else:
            assert not moved[:, : slot + 1].any()
            assert slot == NUM - 1 or moved[:, slot + 1 :].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", TRAINED)
def test_gradients_of_peers_are_replayed_from_a_graph(kind):
    config = dataclasses.replace(CONFIG, width=128, dropout=0.0)
    peer = PEERS[kind](config).init_weights(seed=1).cuda()
    with torch.no_grad():
        peer.head.weight.normal_(std=0.1)
    peer.compile_blocks()
    data = batch()
    data = dataclasses.replace(
        data, **{f.name: x.cuda() for f in dataclasses.fields(data) if (x := getattr(data, f.name)) is not None}
    )
    objective = PeerObjective(peer, config.grid)

    def loss(batch):
        with torch.autocast("cuda", torch.bfloat16):
            return objective(batch)

    expected = loss(data)
    expected.backward()
    grads = [parameter.grad.clone() for parameter in peer.parameters()]
    graphed = GraphedGradients(loss, peer.parameters())
    values = [graphed(data).item() for _ in range(6)]  # the last ones are replayed
    assert values == pytest.approx([expected.item()] * 6, rel=1e-2)
    for parameter, grad in zip(peer.parameters(), grads, strict=True):
        assert (parameter.grad - grad).norm() <= 0.05 * grad.norm() + 1e-6


def test_how_much_is_masked_follows_the_cosine():
    keys = torch.arange(0, 2**24, 2**24 // 4096).int()
    known = num_known(256, keys)
    assert known.min() == 0
    assert known.max() < 256
    assert known.double().mean().item() / 256 == pytest.approx(1 - 2 / math.pi, abs=0.01)
    order = torch.stack([torch.randperm(12) for _ in range(5)])
    keys = torch.tensor([0, 2**22, 2**23, 2**24 - 1, 7])
    seen = known_tokens(order, keys)
    assert seen.sum(1).tolist() == num_known(12, keys).tolist()
    assert not seen.gather(1, order)[:, 0].any()  # one token is always masked


def test_24_0_is_told_nothing_about_the_next_position():
    """The logits of the next token are the same wherever it is: why the paper's 24+0 row fails."""
    peer, data = make("random"), batch()
    assert isinstance(peer, NextToken)
    condition = class_condition(peer, data.labels_B)
    other = data.order_BN.clone()
    other[:, [6, 11]] = other[:, [11, 6]]
    a, b = peer(data.ids_BN, data.order_BN, condition), peer(data.ids_BN, other, condition)
    assert torch.equal(a[:, :7], b[:, :7])


def test_unmasked_queries_of_the_last_layer_receive_no_gradient():
    """The paper's Insight 2 on the masked peer: only keys and values of known tokens are learned from there."""
    peer, data = make("masked", dropout=0.0), batch()
    seen = {}
    for i, block in enumerate(peer.pass1):
        block.attn.register_forward_pre_hook(
            lambda module, args, i=i: (args[0].retain_grad(), seen.__setitem__(i, args[0]))[0]
        )
    PeerObjective(peer, CONFIG.grid)(data).backward()
    known = known_tokens(data.order_BN, data.dropout_key_B)
    assert known.any()
    assert not known.all()
    for i, qkv in seen.items():
        query, key, value = qkv.grad[:, 1:].unflatten(-1, (3, -1)).abs().amax(-1).unbind(2)
        last = i == len(peer.pass1) - 1
        assert (query[known] == 0).all() == last, i  # in the last layer none, before it all
        assert (query[~known] > 0).all()
        assert (key[known] > 0).all()
        assert (value[known] > 0).all()
    assert isinstance(peer, Masked)


@torch.no_grad()
def test_attention_of_both_passes_is_that_of_the_decode_loop():
    """Teacher forcing in batches against the maps of one image, decoded a token at a time."""
    model, num = small_model(), 16
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(24, (2, num), generator=generator)
    order = torch.stack([torch.randperm(num, generator=generator) for _ in range(2)])
    found = {(part.rows, part.layer): part for part in layer_attention(model, ids, order, torch.tensor([1, 3]))}
    for row, label in enumerate((1, 3)):
        plan = SamplePlan(tuple(order[row].tolist()), (1,) * num, (1.0,) * num)
        maps = attention_maps(model, ids[row], class_condition(model, torch.tensor([label])), plan=plan)
        for line in summarize(maps):
            part = found[line.kind, line.layer]
            assert part.evenness()[row].item() == pytest.approx(line.evenness, rel=1e-4)


@torch.no_grad()
def test_attention_of_interleaved_positions(tmp_path):
    peer, data = make("interleaved"), batch()
    parts = list(layer_attention(peer, data.ids_BN, data.order_BN, data.labels_B))
    assert [(part.rows, part.layer) for part in parts] == [(rows, i) for i in range(3) for rows in ("masks", "tokens")]
    for part in parts:
        masks = part.rows == "masks"
        slots = torch.arange(1 if masks else 0, 2 * NUM, 2)  # class, [MASK], token, [MASK], ...
        assert torch.equal(part.seen_ST, torch.arange(2 * NUM) <= slots[:, None])
        assert torch.allclose(part.weights_BHST.sum(-1), torch.ones(1))
        assert (part.weights_BHST[..., ~part.seen_ST] == 0).all()
        assert ((part.evenness() > 0) & (part.evenness() <= 1)).all()
    even = dataclasses.replace(parts[0], weights_BHST=(part.seen_ST / part.seen_ST.sum(1, keepdim=True))[None, None])
    even = dataclasses.replace(even, seen_ST=part.seen_ST)
    assert even.evenness().tolist() == pytest.approx([1.0])
    assert even.on_masks().tolist() == pytest.approx([1.0])
    assert even.low().tolist() == [0.0]
    only = torch.zeros(2, 4).masked_fill(torch.tensor([[True, False, False, False]]), 1.0)  # all on the class
    sharp = dataclasses.replace(
        even,
        weights_BHST=only[None, None],
        seen_ST=torch.ones(2, 4, dtype=torch.bool),
        is_mask_T=torch.tensor([False, True, False, True]),
    )
    assert (sharp.evenness().item(), sharp.on_masks().item(), sharp.low().item()) == (0.25, 0.0, 0.75)
    drawn = tmp_path / "attention.png"
    assert draw_last_layer(peer, (data.ids_BN, data.order_BN, data.labels_B), drawn)
    with Image.open(drawn) as image:
        assert image.width > image.height / 2
    line = attention_line(iter([(data.ids_BN, data.order_BN, data.labels_B)]), peer)
    assert line["images"] == 4
    assert line["masks: evenness"] == pytest.approx(parts[4].evenness().mean().item(), abs=1e-5)
    assert line["tokens: on masks"] == pytest.approx(parts[5].on_masks().mean().item(), abs=1e-5)


@torch.no_grad()
def test_the_surest_order_takes_the_most_probable_token_each_time():
    model, num, labels = small_model(), 16, [1, 4]
    ids = torch.randint(24, (2, num), generator=torch.Generator().manual_seed(1))
    found = surest_order(RowEngine(model), ids, labels, steps=num)
    for row, label in enumerate(labels):
        condition, known = class_condition(model, torch.tensor([label])), []
        while len(known) < num:
            left = [i for i in range(num) if i not in known]
            sure = {}
            for i in left:
                order = torch.tensor([[*known, i, *(j for j in left if j != i)]])
                logits = model(ids[row : row + 1], order, condition)[0, len(known)]
                sure[i] = logits.log_softmax(-1)[ids[row, i]].item()
            best = max(sure.values())
            assert sure[int(found[row, len(known)])] == pytest.approx(best, abs=1e-5)
            known.append(int(found[row, len(known)]))
        assert sorted(known) == list(range(num))
