"""Prompts in the network: prefix slots against the naive oracle, padding, mixed lengths, guidance, dropped prompts."""

import dataclasses
import math

import pytest
import torch

from arpg import InputError, ModelConfig, Request, SamplingSettings, decode, make_plan
from arpg.checkpoint import FolderConfig, load_model, write_folder
from arpg.config import TextConfig, from_dict, to_dict
from arpg.convert import model_to_published
from arpg.decode import likelihood
from arpg.decode.continuous import ContinuousBatch
from arpg.decode.likelihood import fill_bits, token_bits
from arpg.model import text_condition
from arpg.model.condition import training_condition
from arpg.model.rope import identity_positions, make_rope
from support import oracle
from support.small import SMALL, TEXT, small_model, text_states

GARBAGE = torch.full((TEXT.width,), 50.0)


def naive_prefix(model, states):
    """The MLP, written out in float64."""
    up, down = (layer.weight.detach().double() for layer in (model.text.up, model.text.down))
    slots = []
    for state in states.double():
        x = up @ state
        slots.append(down @ (0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))))
    return slots


def masked_logits(model, states, ids, known, plan, *, width, causal):
    """The paper's formulation: the prompt padded on the left to the most tokens, padding masked, no cache.

    A text slot is not rotated: its place is (0, 0).
    """
    published = model_to_published(dataclasses.replace(model.config, text=None, num_classes=1), model.state_dict())
    num_padding = model.config.text.max_tokens - len(states)
    content = [(GARBAGE, (0, 0))] * num_padding + [(slot, (0, 0)) for slot in naive_prefix(model, states)]
    blocks = [None] * num_padding + list(range(len(states)))  # the prompt itself is causal

    def enter(positions):
        block = max(b for b in blocks if b is not None) + 1
        for i, position in enumerate(positions):
            content.append((int(ids[position]), divmod(position, width)))
            blocks.append(block + (i if causal else 0))

    if known:
        enter(known)
    result, start = [], 0
    real = range(num_padding, num_padding + len(states) + len(ids))
    for size in plan.sizes:
        step = plan.order[start : start + size]
        start += size
        count = len(content)
        sees = [
            [a] if blocks[a] is None else [b for b in real if b < count and blocks[b] <= blocks[a]]
            for a in range(count)
        ]
        visible = [[b for b in real if b < count]] * size
        places = [divmod(position, width) for position in step]
        result.append(oracle.logits(published, model.config.num_heads, content, sees, places, visible))
        enter(step)
    return torch.cat(result)


def run(model, request, settings):
    raw = []
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    steps = decode(model, request, plan, settings, hook=lambda state, step, logits, sampled: raw.append(logits))
    last = list(steps)[-1]
    return plan, last.ids_BN, raw


@pytest.mark.parametrize("attention", ["block", "causal"])
def test_decoding_equals_the_masked_formulation(text_model, attention):
    """Prompts of 1, 4 and 7 tokens with 0, 3 and 11 known tokens in one guided batch; the null has 7 slots, or 2."""
    states = text_states(1, 4, 7)
    ids = torch.randint(24, (3, 12), generator=torch.Generator().manual_seed(3))
    known = torch.zeros(3, 12, dtype=torch.bool)
    known[1, [2, 5, 8]] = True
    known[2] = True
    known[2, 4] = False
    settings = SamplingSettings(steps=4, guidance=2.0, guidance_schedule="constant", attention=attention)
    for negative in (None, [None, *text_states(2, 5, seed=9)]):
        request = Request(text_condition(text_model, states, negative), (4, 3), ids, known, (5, 6, 7))
        plan, drawn, raw = run(text_model, request, settings)
        null = [text_model.text.null_TE if n is None else n for n in (negative or [None] * 3)]
        for b, sample in enumerate(plan.samples):
            have = known[b].nonzero().flatten().tolist()
            cond, uncond = (
                masked_logits(text_model, prompt, drawn[b], have, sample, width=3, causal=attention == "causal")
                for prompt in (states[b], null[b])
            )
            ours = torch.cat([raw[s][b, :size] for s, size in enumerate(sample.sizes)])
            assert (ours - oracle.guided(cond, uncond, sample)).abs().max() < 1e-4


def test_teacher_forcing_equals_one_token_at_a_time(text_model):
    for change in ({}, {"shared_kv": False}, {"pass1_layers": 0, "pass2_layers": 3}, {"positions": "cosine"}):
        model = small_model(dataclasses.replace(TEXT, **change))
        condition = text_condition(model, text_states(2, 6))
        request = Request.from_nothing(condition, (4, 4), (7, 8))
        plan, ids, raw = run(model, request, SamplingSettings(steps=16))
        order = torch.tensor([sample.order for sample in plan.samples])
        with torch.no_grad():
            forced = model(ids, order, condition)
        assert (torch.cat(raw, dim=1) - forced).abs().max() < 1e-4, change


def test_padding_does_not_change_logits(text_model):
    """Neither how much of it there is, nor what is in it."""
    states = text_states(3, 5)
    ids = torch.randint(24, (2, 16), generator=torch.Generator().manual_seed(1))
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(s)) for s in (1, 2)])
    compact = text_condition(text_model, states)
    padded = torch.full((2, 7, 12), 1e3)
    for i, row in enumerate(states):
        padded[i, : len(row)] = row
    wide = training_condition(text_model, padded, torch.tensor([3, 5]))
    assert wide.prefix_BPD.shape[1] == 7
    with torch.no_grad():
        one, other = (text_model(ids, order, condition) for condition in (compact, wide))
        alone = [
            text_model(ids[[i]], order[[i]], text_condition(text_model, [states[i]], [states[i]])) for i in range(2)
        ]
    assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(one, torch.cat(alone), atol=1e-5)


def test_no_gradient_comes_from_padding(text_model):
    model = small_model(TEXT)
    padded = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    condition = training_condition(model, padded, torch.tensor([3, 0]))
    ids = torch.zeros(2, 16, dtype=torch.long)
    model(ids, torch.arange(16).expand(2, 16), condition).square().sum().backward()
    assert (padded.grad[0, :3].abs().amax(1) > 0).all()
    assert not padded.grad[0, 3:].any()
    assert not padded.grad[1].any()  # dropped


def test_a_dropped_prompt_is_no_prompt(text_model):
    ids, order = torch.arange(16)[None] % 24, torch.arange(16).flip(0)[None]
    dropped = training_condition(text_model, torch.randn(1, 7, 12), torch.tensor([0]))
    with torch.no_grad():
        assert torch.allclose(
            text_model(ids, order, dropped), text_model(ids, order, text_condition(text_model, [None])), atol=1e-5
        )


@pytest.mark.parametrize("decoding", ["steps", "exact", "speculative"])
def test_a_batch_of_mixed_prompts_equals_singles(text_model, decoding):
    states, negative = text_states(1, 3, 7, 5), [None, *text_states(4, seed=2), None, *text_states(6, seed=3)]
    causal = {"attention": "causal"} if decoding != "steps" else {}
    settings = SamplingSettings(steps=5, guidance=3.0, decode=decoding, draft=4, **causal)

    def ids(rows):
        condition = text_condition(text_model, [states[r] for r in rows], [negative[r] for r in rows])
        request = Request.from_nothing(condition, (4, 4), tuple(rows))
        plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
        return list(decode(text_model, request, plan, settings))[-1].ids_BN

    together = ids([0, 1, 2, 3])
    for r in range(4):
        assert torch.equal(ids([r])[0], together[r])
    assert len(together.unique(dim=0)) == 4


def test_exact_decoding_equals_one_by_one(text_model):
    condition = text_condition(text_model, text_states(2, 6), text_states(5, 1, seed=4))
    request = Request.from_nothing(condition, (4, 4), (7, 8))
    one_by_one = SamplingSettings(steps=16, guidance=2.0, attention="causal")
    exact = dataclasses.replace(one_by_one, decode="exact", draft=5)
    plan = make_plan(request.grid, request.known_BN, request.seeds, one_by_one)
    single = dataclasses.replace(one_by_one, schedule=(1,) * 16)
    plan = make_plan(request.grid, request.known_BN, request.seeds, single)
    expected = list(decode(text_model, request, plan, single))[-1].ids_BN
    found = list(decode(text_model, request, make_plan(request.grid, request.known_BN, request.seeds, exact), exact))
    assert torch.equal(found[-1].ids_BN, expected)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_prompts_join_and_leave_a_running_batch(text_model, guidance):
    """Of different lengths, some with a negative prompt: each gets the tokens that it gets alone."""
    settings, made = SamplingSettings(steps=4, guidance=guidance), {}
    negatives = [None, text_states(6, seed=1), text_states(2, seed=2), None]
    for i, (states, negative) in enumerate(zip(text_states(3, 7, 1, 5), negatives, strict=True)):
        condition = text_condition(text_model, [states], negative)
        known = torch.rand(1, 16, generator=torch.Generator().manual_seed(i)) < 0.2 * i
        ids = torch.randint(24, (1, 16), generator=torch.Generator().manual_seed(i + 9))
        made[i] = Request(condition, (4, 4), ids, known, (100 + i,))
    plans = {i: make_plan(r.grid, r.known_BN, r.seeds, settings) for i, r in made.items()}
    expected = {i: list(decode(text_model, r, plans[i], settings))[-1].ids_BN for i, r in made.items()}
    gathered = Request.gather([(made[i], 0) for i in (2, 0, 1)])
    plan = make_plan(gathered.grid, gathered.known_BN, gathered.seeds, settings)
    together = list(decode(text_model, gathered, plan, settings))[-1].ids_BN
    assert torch.equal(together, torch.cat([expected[i] for i in (2, 0, 1)]))
    running, names, waiting, found = None, [], dict(made), {}
    while waiting or running is not None:
        if waiting:
            name = min(waiting)
            request = waiting.pop(name)
            names.append(name)
            if running is None:
                running = ContinuousBatch(text_model, request, plans[name], settings)
            else:
                running.add(request, plans[name])
        running.step()
        done = [i for i, row in enumerate(running.rows) if row.finished]
        found |= {names[i]: running.fetch([i]).wait()[0] for i in done}
        stay = [i for i in range(len(names)) if i not in done]
        names = [names[i] for i in stay]
        if done and stay:
            running.keep(stay)
        running = running if stay else None
    assert all(torch.equal(found[i], expected[i]) for i in made)


def test_guidance_with_a_negative_prompt_is_the_formula(text_model):
    """negative + s (prompt - negative), each from a run of its own without guidance."""
    prompt, negative = text_states(5), text_states(3, seed=8)
    guided = []

    def hook(state, step, logits, sampled):
        guided.append(logits)

    def first_logits(condition, settings):
        guided.clear()
        request = Request.from_nothing(condition, (4, 4), (3,))
        list(decode(text_model, request, make_plan((4, 4), request.known_BN, (3,), settings), settings, hook=hook))
        return guided[0]

    plain = SamplingSettings(steps=3)
    scaled = SamplingSettings(steps=3, guidance=4.0, guidance_schedule="constant")
    for null in (negative, [None]):
        with_prompt = first_logits(text_condition(text_model, prompt), plain)
        without = first_logits(text_condition(text_model, null), plain)
        ours = first_logits(text_condition(text_model, prompt, null), scaled)
        assert torch.allclose(ours, without + 4.0 * (with_prompt - without), atol=1e-4)
        assert (with_prompt - without).abs().max() > 0.05


def test_text_slots_are_not_rotated():
    cos, sin = make_rope(identity_positions(1, 3), 8)
    assert bool((cos == 1).all())
    assert not sin.any()


def test_likelihoods_take_prompts_in_parts(text_model, monkeypatch):
    """The best of several: the bits of a request do not depend on how it is cut into parts."""
    condition = text_condition(text_model, text_states(2, 7, 4))
    request = Request.from_nothing(condition, (4, 4), (0, 1, 2))
    ids = torch.randint(24, (3, 16), generator=torch.Generator().manual_seed(1))
    whole = fill_bits(text_model, request, ids)
    monkeypatch.setattr(likelihood, "_CHUNK_TOKENS", 16)
    assert torch.allclose(fill_bits(text_model, request, ids), whole, rtol=1e-5)
    order = torch.arange(16).expand(3, 16)
    other = text_condition(text_model, text_states(2, 7, 4, seed=5))
    assert (
        token_bits(text_model, ids, condition, order) - token_bits(text_model, ids, other, order)
    ).abs().max() > 0.01


def test_states_of_another_encoder_are_refused(text_model, model):
    for bad in (torch.zeros(3, 13), torch.zeros(8, 12), torch.zeros(0, 12)):
        with pytest.raises(InputError, match="text states have shape"):
            text_condition(text_model, [bad])
    with pytest.raises(InputError, match="takes classes, not prompts"):
        text_condition(model, text_states(3))


def test_configuration():
    with pytest.raises(InputError, match="a model that takes prompts has 0"):
        dataclasses.replace(TEXT, num_classes=5)
    with pytest.raises(InputError, match="num_classes is 0; expected 1"):
        dataclasses.replace(SMALL, num_classes=0)
    data = to_dict(TEXT)
    assert from_dict(ModelConfig, data, where="here") == TEXT
    data["text"]["depth"] = 3
    with pytest.raises(InputError, match=r"here\.text: unknown key depth"):
        from_dict(ModelConfig, data, where="here")
    with pytest.raises(InputError, match="max_tokens is 0"):
        TextConfig("minilm", 384, 0)
    with pytest.raises(InputError, match="no place for prompts"):
        model_to_published(TEXT, {})


def test_folders_keep_the_null_prompt_and_load_strictly(text_model, tmp_path):
    write_folder(tmp_path, FolderConfig(model=TEXT), model=text_model.state_dict())
    again = load_model(tmp_path)
    assert torch.equal(again.text.null_TE, text_model.text.null_TE)
    assert again.config == TEXT
    state = text_model.state_dict()
    del state["text.null_TE"]
    write_folder(tmp_path, FolderConfig(model=TEXT), model=state)
    with pytest.raises(InputError, match=r"missing keys: text\.null_TE"):
        load_model(tmp_path)
    write_folder(tmp_path, FolderConfig(model=SMALL), model=text_model.state_dict())
    with pytest.raises(InputError, match="unknown keys: text"):
        load_model(tmp_path)
