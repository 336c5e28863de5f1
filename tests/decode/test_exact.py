"""Exact and speculative decoding: the same tokens, or the same distribution, as one token at a time, in fewer calls."""

import dataclasses
import itertools
from collections import defaultdict

import pytest
import torch

from arpg import InputError, ModelConfig, Request, SamplingDefaults, SamplingSettings, decode, make_plan, tasks
from arpg.decode import drafting, engine
from arpg.decode.drafting import Exact, Speculative, TokenCursor
from arpg.decode.sampling import probs
from arpg.kernels.ops import guide
from arpg.model import Condition, class_condition
from support.small import small_model

STRATEGIES = ("exact", "speculative")
BASE = SamplingSettings(guidance=3.0, order="halton", attention="causal")
TINY = ModelConfig(width=16, num_heads=2, pass1_layers=1, pass2_layers=1, vocab_size=3, num_classes=2, grid=(2, 2))


def run(model, request, settings):
    return list(decode(model, request, make_plan(request.grid, request.known_BN, request.seeds, settings), settings))


def sequential(settings):
    """One token after the other, in planned steps."""
    return dataclasses.replace(settings, decode="steps", steps=1000, schedule="arccos")


def by(strategy, draft, settings=BASE):
    return dataclasses.replace(settings, decode=strategy, draft=draft)


def masked_request(model, rows=(0, 1, 2, 3)):
    """Samples with 0, about a third, two thirds and all of their tokens known."""
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(4, 16, generator=generator) < torch.tensor([0.0, 0.3, 0.6, 1.0])[:, None]
    ids = torch.randint(24, (4, 16), generator=generator)
    rows = list(rows)
    return Request(class_condition(model, torch.tensor(rows)), (4, 4), ids[rows], known[rows], tuple(rows))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"guidance": 1.0, "order": "raster"},
        {"temperature": 0.0, "guidance_schedule": "constant"},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "order": "random"},
        {"order": "local"},
    ],
)
def test_exact_decoding_draws_the_very_tokens_for_every_draft(model, change):
    settings = dataclasses.replace(BASE, **change)
    request = tasks.generate(model, [0, 1, 2, 3, 4], range(5))
    expected = run(model, request, sequential(settings))[-1].ids_BN
    for draft in (1, 2, 3, 7, 16, 40):
        steps = run(model, request, by("exact", draft, settings))
        assert torch.equal(steps[-1].ids_BN, expected), draft
        assert len(steps) < 16


@pytest.mark.parametrize("draft", [1, 2, 3, 7, 16, 40])
def test_greedy_speculation_is_greedy_decoding(model, draft):
    settings = dataclasses.replace(BASE, temperature=0.0)
    request = tasks.generate(model, [0, 1, 2, 3, 4], range(5))
    expected = run(model, request, sequential(settings))[-1].ids_BN
    assert torch.equal(run(model, request, by("speculative", draft, settings))[-1].ids_BN, expected)


# The distribution, by enumeration: every way the noise can fall, with its probability.


class Fork:
    """Runs of a batch in which every row makes its own choices; each choice not made yet also starts a new row."""

    def __init__(self, scripts):
        self.scripts, self.made = scripts, [[] for _ in scripts]
        self.weight = [1.0] * len(scripts)
        self.spawned = []

    def choose(self, row, shares):
        """One of the options, which have these shares of the probability."""
        made, script = self.made[row], self.scripts[row]
        options = [i for i, share in enumerate(shares) if share > 1e-15]
        if len(made) < len(script):
            choice = script[len(made)]
        else:
            choice = options[0]
            self.spawned += [(*made, other) for other in options[1:]]
        made.append(choice)
        self.weight[row] *= shares[choice]
        return choice


def enumerate_distribution(model, settings, play, monkeypatch):
    """The probability of every image: `play(fork)` puts the fork's choices in the place of all randomness."""
    found, scripts, rows = defaultdict(float), [()], 0
    while scripts:
        fork = Fork(scripts)
        with monkeypatch.context() as patch:
            play(fork, patch)
            ids = run(model, tasks.generate(model, [1] * len(scripts), [0] * len(scripts)), settings)[-1].ids_BN
        for image, weight in zip(ids.tolist(), fork.weight, strict=True):
            found[tuple(image)] += weight
        rows, scripts = rows + len(scripts), fork.spawned
    return found, rows


def clip(polygon, weights):
    """The part of a polygon in the triangle where the weighted sum of the coordinates is not negative."""
    kept = []
    for here, there in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        a, b = (sum(w * x for w, x in zip(weights, point, strict=True)) for point in (here, there))
        if a >= 0:
            kept.append(here)
        if (a < 0) != (b < 0):
            kept.append(tuple(x + (y - x) * a / (a - b) for x, y in zip(here, there, strict=True)))
    return kept


def area(polygon):
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) if polygon else 0.0


def play_exact(fork, patch):
    """The noise of three codes is a uniform point of a triangle, and a draw says in which part of it the point lies.

    Gumbel noise is -log of exponential numbers e, so a draw is the least e / p; only the shares of the e count.
    """
    corners = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    where = defaultdict(lambda: corners)

    def cell(polygon, chances, code):
        for other in range(3):
            if other != code:
                weights = [0.0] * 3
                weights[other], weights[code] = chances[code], -chances[other]
                polygon = clip(polygon, weights)
        return polygon if chances[code] > 0 else []

    def sample(logits, settings, _, position, *, static):
        drawn = torch.zeros_like(position)
        for row, s in itertools.product(*map(range, position.shape)):
            p = int(position[row, s])
            if p == 4:  # padding
                continue
            chances = probs(logits[row, s], settings).tolist()
            cells = [cell(where[row, p], chances, code) for code in range(3)]
            total = sum(map(area, cells))
            drawn[row, s] = code = fork.choose(row, [area(c) / total for c in cells])
            where[row, p] = cells[code]
        return drawn

    patch.setattr(engine, "sample", sample)


def play_speculative(fork, patch):
    """Drafts, acceptances and replacements are independent choices."""
    calls = itertools.count()

    def choose(chances, position):
        rows = zip(chances.tolist(), position.tolist(), strict=True)
        return torch.tensor(
            [[0 if p == 4 else fork.choose(b, c) for c, p in zip(*row, strict=True)] for b, row in enumerate(rows)]
        )

    def sample(logits, settings, _, position, *, static):
        if next(calls) % 2:  # a turn that checks uses none of these draws
            return torch.zeros_like(position)
        return choose(probs(logits, settings), position)

    class Uniform:
        """u, of which only `u * q < p` is ever asked."""

        def __init__(self, position):
            self.position = position

        def __getitem__(self, _):
            return self

        def __mul__(self, q_BS):
            self.q_BS = q_BS
            return self

        def __lt__(self, p_BS):
            accepted = torch.zeros_like(p_BS, dtype=torch.bool)
            for b, (ps, qs, positions) in enumerate(zip(p_BS, self.q_BS, self.position.tolist(), strict=True)):
                for s, (p, q, position) in enumerate(zip(ps.tolist(), qs.tolist(), positions, strict=True)):
                    if position == 4 or q == 0:
                        break
                    chance = min(1.0, p / q)
                    accepted[b, s] = fork.choose(b, [chance, 1 - chance]) == 0
                    if not accepted[b, s]:
                        break  # what comes behind it does not matter
            return accepted

    patch.setattr(engine, "sample", sample)
    patch.setattr(drafting, "uniform", lambda key, stream, position, num: Uniform(position))
    patch.setattr(drafting, "gumbel_argmax", lambda logits, key, stream, position: choose(logits.softmax(-1), position))


def sequential_distribution(model, settings):
    """Of every image, from teacher forcing: the product of its tokens' probabilities, raster order."""
    images = torch.tensor(list(itertools.product(range(3), repeat=4)))
    order = torch.arange(4).expand(81, 4)
    with torch.no_grad():
        logits = [model(images, order, class_condition(model, torch.full((81,), label))) for label in (1, 2)]
    plan = make_plan((2, 2), torch.zeros(1, 4, dtype=torch.bool), [0], sequential(settings))
    scale = torch.tensor([plan.samples[0].scales], dtype=torch.float64).expand(81, 4)
    found = probs(guide(torch.cat(logits), scale), settings)
    chances = found.gather(2, images[..., None])[..., 0].prod(1)
    return {tuple(image): chance for image, chance in zip(images.tolist(), chances.tolist(), strict=True)}


def tiny_model(dtype=torch.float64):
    """Its tokens depend on each other strongly, or all would be accepted."""
    model = small_model(TINY, seed=2).to(dtype)
    with torch.no_grad():
        model.head.weight *= 1.5
        model.embedding.weight *= 3
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "change",
    [
        {"guidance": 1.0},
        {"guidance": 3.0},
        {"guidance": 3.0, "temperature": 0.5},
        {"guidance": 3.0, "top_k": 2},
        {"guidance": 3.0, "temperature": 2.0, "top_p": 0.9},
    ],
)
def test_the_enumerated_distribution_is_that_of_one_token_at_a_time(strategy, change, monkeypatch):
    model = tiny_model()
    settings = SamplingSettings(order="raster", attention="causal", **change)
    expected = sequential_distribution(model, settings)
    for draft in (1, 3):
        play = {"exact": play_exact, "speculative": play_speculative}[strategy]
        found, rows = enumerate_distribution(model, by(strategy, draft, settings), play, monkeypatch)
        assert rows > len(found) or (strategy, draft) == ("speculative", 1)  # many an image comes about in several ways
        assert sum(found.values()) == pytest.approx(1, abs=1e-12)
        assert max(abs(found[image] - chance) for image, chance in expected.items()) < 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_sampled_distribution_is_at_the_noise_floor(strategy, guidance):
    """Chi-square of 10,000 images over the possible ones, the rare ones together; p about 1e-5."""
    model, num = tiny_model(torch.float32), 10_000
    settings = SamplingSettings(order="raster", attention="causal", guidance=guidance, temperature=2.0)
    ids = run(model, tasks.generate(model, [1] * num, range(num)), by(strategy, 3, settings))[-1].ids_BN
    expected = torch.tensor(list(sequential_distribution(model.double(), settings).values())) * num
    count = torch.bincount((ids * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81)
    often = expected > 5
    expected, count = (torch.cat((x[often], x[~often].sum()[None])) for x in (expected, count))
    free = len(count) - 1
    assert free > 30
    assert ((count - expected) ** 2 / expected).sum() < free + 4.3 * (2 * free) ** 0.5 + 10


# What the distributions are made of.


def recorded(model, request, settings, monkeypatch):
    """The final ids, and for each turn its positions, guided logits and which draws were kept."""
    calls = []
    for strategy in (Exact, Speculative):

        def accept(self, state, logits, sampled, plain=strategy.accept):
            position = self._position_BS
            ids, kept = plain(self, state, logits, sampled)
            calls.append((position, logits, kept))
            return ids, kept

        monkeypatch.setattr(strategy, "accept", accept)
    steps = run(model, request, settings)
    return steps[-1].ids_BN, calls


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("draft", [3, 8])
def test_every_distribution_that_decides_is_the_teacher_forced_one(model, strategy, draft, monkeypatch):
    """Whatever the draft, and whatever was guessed behind: the logits of what is kept are those of the final image."""
    labels, seeds = [1, 4, 2], (7, 8, 9)
    request = tasks.generate(model, labels, seeds)
    ids, calls = recorded(model, request, by(strategy, draft), monkeypatch)
    plan = make_plan(request.grid, request.known_BN, seeds, sequential(BASE))
    order = torch.tensor([sample.order for sample in plan.samples])
    null = torch.full((3,), 5)
    with torch.no_grad():
        forced = [model(ids, order, class_condition(model, label)) for label in (torch.tensor(labels), null)]
    expected = guide(torch.cat(forced), torch.tensor([sample.scales for sample in plan.samples]))
    place = order.argsort(1)
    times = torch.zeros(3, 17, dtype=torch.long)
    for position, logits, kept in calls:
        for b, s in kept.nonzero().tolist():
            p = int(position[b, s])
            times[b, p] += 1
            if p < 16:
                assert (logits[b, s] - expected[b, place[b, p]]).abs().max() < 1e-4
    assert (times[:, :16] == 1).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_garbage_behind_what_is_decided_changes_nothing(model, strategy, monkeypatch):
    request = masked_request(model)
    expected = run(model, request, by(strategy, 4))[-1].ids_BN
    advance = TokenCursor.advance
    poisoned = []

    def poison(self, state, count):
        advance(self, state, count)
        for row, length in enumerate(state.cache.length_B.tolist()):
            state.cache.key_LBTHK[:, row, length:] = 50.0
            state.cache.value_LBTHK[:, row, length:] = -1e4
            poisoned.append(length)

    monkeypatch.setattr(TokenCursor, "advance", poison)
    assert torch.equal(run(model, request, by(strategy, 4))[-1].ids_BN, expected)
    assert len(set(poisoned)) > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("draft", [1, 4, 30])
def test_never_more_calls_than_places_and_nothing_is_taken_back(model, strategy, draft):
    """Every call decides at least one place of each sample that has any left."""
    request = tasks.generate(model, [1, 2, 3], [0, 1, 2])
    before = request.known_BN
    steps = run(model, request, by(strategy, draft))
    for i, step in enumerate(steps):
        assert (step.index, step.num_steps == i + 1) == (i, i == len(steps) - 1)
        new = (step.known_BN & ~before).sum(1)
        assert (before.all(1) | (new >= 1)).all()
        assert (new <= draft + 1).all()
        assert (step.known_BN | ~before).all()
        if i:
            assert torch.equal(step.ids_BN[before], steps[i - 1].ids_BN[before])
        before = step.known_BN
    assert before.all()
    assert len(steps) <= 16
    assert steps[-1].num_steps == len(steps)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("draft", [2, 5])
def test_a_ragged_batch_with_known_tokens_gives_what_its_samples_give_alone(model, strategy, draft):
    request = masked_request(model)
    together = run(model, request, by(strategy, draft))[-1].ids_BN
    assert torch.equal(together[request.known_BN], request.ids_BN[request.known_BN])
    for r in range(4):
        assert torch.equal(run(model, masked_request(model, [r]), by(strategy, draft))[-1].ids_BN[0], together[r]), r
    if strategy == "exact":
        assert torch.equal(together, run(model, request, sequential(BASE))[-1].ids_BN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_the_same_tokens_on_the_gpu():
    cpu, gpu = small_model(), small_model().cuda()
    for strategy in STRATEGIES:
        expected = run(cpu, masked_request(cpu), by(strategy, 4))[-1].ids_BN
        assert torch.equal(run(gpu, masked_request(gpu), by(strategy, 4))[-1].ids_BN.cpu(), expected)


def test_a_condition_with_queries_of_its_own(model):
    """Two prefix slots and a query for each position: what text and control conditions bring."""
    generator = torch.Generator().manual_seed(1)
    prefix, null = torch.randn(2, 3, 2, 32, generator=generator) * 0.3
    queries = torch.randn(3, 16, 32, generator=generator) * 0.3
    place = torch.full((3, 2, 2), -1.0)
    condition = Condition(prefix, null, place, queries)
    request = dataclasses.replace(masked_request(model, [0, 1, 2]), condition=condition)
    expected = run(model, request, sequential(BASE))[-1].ids_BN
    assert torch.equal(run(model, request, by("exact", 4))[-1].ids_BN, expected)
    plain = dataclasses.replace(request, condition=Condition(prefix, null, place))
    assert not torch.equal(run(model, plain, by("exact", 4))[-1].ids_BN, expected)


def test_settings(model, pipeline):
    defaults = SamplingDefaults(guidance_by_steps=((8, 2.0), (64, 5.0)), steps=8)
    resolved = defaults.settings(decode="exact")
    assert (resolved.attention, resolved.guidance) == ("causal", 5.0)
    assert defaults.settings().guidance == 2.0
    with pytest.raises(InputError, match="exact decoding finds its own steps; leave steps out"):
        defaults.settings(decode="exact", steps=12)
    with pytest.raises(InputError, match="attention is 'block', but speculative decoding is causal"):
        defaults.settings(decode="speculative", attention="block")
    with pytest.raises(InputError, match="draft is 0; expected 1 or more"):
        defaults.settings(decode="exact", draft=0)
    with pytest.raises(InputError, match="decode is 'exactly'; expected one of steps, exact, speculative"):
        defaults.settings(decode="exactly")
    request = tasks.generate(model, [1], [0])
    plan = make_plan(request.grid, request.known_BN, request.seeds, SamplingSettings(steps=4))
    with pytest.raises(InputError, match="several tokens at once"):
        list(decode(model, request, plan, by("exact", 4)))
    one_by_one = pipeline.generate([1, 2], seed=3, steps=16, attention="causal", guidance=4.0)
    at_once = pipeline.generate([1, 2], seed=3, decode="exact", guidance=4.0)
    assert [image.tobytes() for image in at_once] == [image.tobytes() for image in one_by_one]
