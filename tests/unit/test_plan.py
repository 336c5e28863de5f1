"""Plans: schedules, guidance and orders, for any grid and mask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpg import InputError, Plan, Request, SamplingSettings, make_plan
from arpg.decode import SamplePlan
from arpg.decode import order as order_module
from arpg.decode.engine import check
from arpg.decode.order import fill_orders
from arpg.decode.plan import guidance_scales, plan_sample, step_sizes
from arpg.decode.state import PlanCursor
from arpg.figures import draw_plans
from arpg.model import class_condition
from arpg.noise import Stream, position_words
from arpg.settings import ORDERS, SCHEDULES
from support.small import small_model

GRIDS = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(st.sampled_from(SCHEDULES), st.integers(1, 1200), st.integers(1, 1500))
@settings(max_examples=300, deadline=None)
def test_steps_are_never_empty_and_fill_everything(schedule, tokens, steps):
    sizes = step_sizes(schedule, tokens, steps)
    assert min(sizes) >= 1
    assert sum(sizes) == tokens
    assert len(sizes) == min(steps, tokens)


def test_linear_steps_are_equal():
    for tokens, steps in ((256, 32), (144, 24), (10, 4)):
        sizes = step_sizes("linear", tokens, steps)
        assert max(sizes) - min(sizes) <= 1


def test_explicit_steps():
    assert step_sizes((1, 5, 10), 16, 3) == (1, 5, 10)
    with pytest.raises(InputError, match=r"\[1, 5\] fills 6 tokens; there are 16"):
        step_sizes((1, 5), 16, 2)


def test_guidance():
    assert guidance_scales("linear", 5.0, (4, 4, 8)) == (2.0, 3.0, 5.0)
    assert guidance_scales("constant", 5.0, (4, 12)) == (5.0, 5.0)
    assert guidance_scales("cutoff", 5.0, (4, 4, 4, 2, 2)) == (5.0, 5.0, 5.0, 1.0, 1.0)
    assert guidance_scales("cutoff", 5.0, (16,)) == (1.0,)
    assert guidance_scales("cutoff", 5.0, ()) == ()
    assert guidance_scales("none", 5.0, (4, 12)) == (1.0, 1.0)
    # It ramps over the tokens to be filled, however many are known.
    plan = plan_sample((4, 4), [True] * 12 + [False] * 4, 0, SamplingSettings(steps=2, schedule="linear", guidance=3.0))
    assert plan.scales == (2.0, 3.0)


@given(st.sampled_from(ORDERS), GRIDS, st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=300, deadline=None)
def test_an_order_visits_each_open_position_once(order, grid, seed, data):
    num_tokens = grid[0] * grid[1]
    known = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    steps = data.draw(st.integers(1, 20))
    plan = plan_sample(grid, known, seed, SamplingSettings(steps=steps, order=order))
    assert sorted(plan.order) == [i for i, k in enumerate(known) if not k]
    assert plan == plan_sample(grid, known, seed, SamplingSettings(steps=steps, order=order))


def full(order, grid, seed=0, steps=1):
    num_tokens = grid[0] * grid[1]
    sizes = step_sizes("linear", num_tokens, steps)
    return fill_orders(order, grid, np.ones((1, num_tokens), dtype=bool), [seed], sizes=[sizes]).tolist()


def test_the_fixed_orders():
    grid = (3, 4)
    assert full("raster", grid) == list(range(12))
    assert full("alternate", grid) == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11]
    assert full("spiral-in", grid) == [0, 1, 2, 3, 7, 11, 10, 9, 8, 4, 5, 6]
    assert full("spiral-out", grid) == full("spiral-in", grid)[::-1]
    assert full("z-curve", grid) == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    # On a power-of-two square the Z-curve is the usual one.
    assert full("z-curve", (4, 4)) == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def sorted_words(grid, known, seed):
    """A random order by its definition: the stable argsort of the words of the seed."""
    words = position_words([seed], Stream.ORDER, grid[0] * grid[1])[0]
    return tuple(p for p in np.argsort(words, kind="stable").tolist() if not known[p])


@given(GRIDS, st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_random_orders_are_sorted_words(grid, seeds, data):
    """Of one sample, and of several that do not have the same mask."""
    num_tokens = grid[0] * grid[1]
    known = [data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)) for _ in seeds]
    plan = make_plan(grid, torch.tensor(known), seeds, SamplingSettings(steps=3))
    assert [each.order for each in plan.samples] == [
        sorted_words(grid, *each) for each in zip(known, seeds, strict=True)
    ]


def test_equal_words_keep_the_order_of_their_positions(monkeypatch):
    words = np.array([[2**32 - 1, 5, 0, 5, 2**32 - 1, 5]])
    monkeypatch.setattr(order_module, "position_words", lambda *_: words)
    assert full("random", (2, 3)) == [2, 1, 3, 5, 0, 4]


def columns_first(grid):
    """Column by column, from the right."""
    return np.arange(grid[0] * grid[1]).reshape(grid)[:, ::-1].T.ravel()


@given(GRIDS, st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_can_be_given(grid, data):
    """As a list, an array, a tensor or a function; the known positions are left out, the others keep their order."""
    num_tokens = grid[0] * grid[1]
    permutation = data.draw(st.permutations(range(num_tokens)))
    known = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    expected = tuple(p for p in permutation if not known[p])
    for order in (permutation, np.array(permutation), torch.tensor(permutation), lambda found: permutation):
        assert plan_sample(grid, known, 0, SamplingSettings(steps=3, order=order)).order == expected
    by_column = plan_sample(grid, known, 0, SamplingSettings(steps=3, order=columns_first)).order
    assert by_column == tuple(p for p in columns_first(grid).tolist() if not known[p])


def test_one_function_is_asked_once_for_each_grid():
    grids = []
    known = torch.zeros(3, 6, dtype=torch.bool)
    make_plan((2, 3), known, (1, 2, 3), SamplingSettings(order=lambda grid: grids.append(grid) or range(6)))
    assert grids == [(2, 3)]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([0, 1, 1, 3], "order has 4 positions, but 2 is not among them"),
        ([1, 2, 3, 4], "order has 4 positions, but 0 is not among them"),
        ([0, 1, 2], "order has 3 positions, but the grid has 2x2 = 4 tokens"),
        ([], "order has no positions"),
        ([0.0, 1.0, 2.0, 3.0], r"order is \[0.0, 1.0, 2.0, 3.0\], not a list of whole numbers"),
        (torch.zeros(2, 2, dtype=torch.long), "not a list of whole numbers"),
        (7, "order is 7, not a list of whole numbers"),
        (lambda grid: range(3), "order has 3 positions, but the grid has 2x2"),
        ("spirals", "order is 'spirals'; expected one of random"),
    ],
)
def test_an_order_that_is_no_permutation_of_the_grid(order, says):
    with pytest.raises(InputError, match=says):
        plan_sample((2, 2), [False] * 4, 0, SamplingSettings(order=order))


def nearest(positions, width):
    """The mean distance of each position to its nearest neighbour among them."""
    points = np.array([divmod(p, width) for p in positions], dtype=float)
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return np.where(np.eye(len(points), dtype=bool), np.inf, distance).min(1).mean()


@pytest.mark.parametrize("grid", [(16, 16), (12, 12), (9, 20)])
def test_halton_and_local_spread_a_step_apart(grid):
    """In the first steps of 12 tokens, neighbours are clearly farther apart than in random orders."""
    steps = grid[0] * grid[1] // 12
    random = np.mean([nearest(full("random", grid, seed, steps)[:12], grid[1]) for seed in range(20)])
    for order in ("halton", "local"):
        spread = np.mean([nearest(full(order, grid, seed, steps)[:12], grid[1]) for seed in range(5)])
        assert spread > 1.2 * random, order


def test_local_stays_close_to_what_is_known():
    """With the left half known, the right half is filled from the left, unlike with random."""
    grid = (12, 12)
    sizes = step_sizes("linear", 72, 12)
    order = fill_orders("local", grid, np.arange(144)[None] % 12 >= 6, [0], sizes=[sizes])
    assert max(p % 12 for p in order[:12]) <= 8
    assert min(p % 12 for p in order[-6:]) >= 9


def test_seeds_matter_only_to_the_orders_that_have_one():
    for order in ORDERS:
        same = full(order, (8, 8), 1, 8) == full(order, (8, 8), 2, 8)
        assert same == (order not in ("random", "halton", "local")), order


def test_random_orders_are_uniform():
    """Each of the 6 orders of 3 positions about equally often."""
    counts = {}
    for seed in range(6000):
        key = tuple(full("random", (1, 3), seed))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert sum((c - 1000) ** 2 / 1000 for c in counts.values()) < 30


def test_each_sample_has_its_own_order_and_mask():
    known = torch.zeros(3, 16, dtype=torch.bool)
    known[2, :10] = True
    plan = make_plan((4, 4), known, (1, 2, 3), SamplingSettings(steps=4, guidance=1.0))
    assert plan.samples[0].order != plan.samples[1].order
    assert len(plan.samples[2].order) == 6
    assert plan.num_steps == 4
    assert not plan.guided


def test_plans_are_checked():
    with pytest.raises(InputError, match="do not fit 3 positions"):
        SamplePlan((0, 1, 2), (1, 1), (1.0, 1.0))
    with pytest.raises(InputError, match="twice"):
        SamplePlan((0, 1, 1), (3,), (1.0,))
    assert Plan((SamplePlan((), (), ()),)).num_steps == 0


SAMPLES = (
    SamplePlan((3, 1, 7, 0), (1, 3), (2.0, 1.5)),
    SamplePlan((), (), ()),
    SamplePlan((5, 2, 4), (1, 1, 1), (1.0, 3.0, 4.0)),
    SamplePlan((0, 1, 2, 3, 4, 5, 6), (4, 3), (1.0, 1.1)),
)


def test_a_plan_as_arrays_is_its_samples():
    plan = Plan(SAMPLES)
    assert Plan.from_arrays(plan.order_T, plan.count_BK, plan.scale_BK).samples == SAMPLES
    assert (plan.num_steps, plan.guided) == (3, True)
    for rows in ([0], [1], [3, 3, 0], [1, 2, 0, 3, 3]):
        some, expected = plan.rows(rows), Plan([SAMPLES[row] for row in rows])
        assert some.samples == expected.samples
        assert (some.num_steps, some.guided) == (expected.num_steps, expected.guided)


def request_for(samples, grid=(2, 4)):
    """A request that leaves open what the samples fill."""
    num_tokens = grid[0] * grid[1]
    known = torch.tensor([[p not in sample.order for p in range(num_tokens)] for sample in samples])
    condition = class_condition(small_model(), torch.zeros(len(samples), dtype=torch.long))
    return Request(condition, grid, torch.zeros_like(known, dtype=torch.long), known, tuple(range(len(samples))))


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [1], [2, 3], [0, 0], [1, 3]])
def test_the_cursor_pads_each_step_to_its_longest_row(rows, lookahead):
    samples = [SAMPLES[row] for row in rows]
    cursor = PlanCursor(request_for(samples), Plan(samples), torch.device("cpu"), lookahead=lookahead)
    num_steps = max(len(sample.sizes) for sample in samples)
    padded, before = [[] for _ in samples], [8 - len(sample.order) for sample in samples]
    widths, longest = [0], [max(before), max(before)]
    for k in range(num_steps):
        counts = [sample.sizes[k] if k < len(sample.sizes) else 0 for sample in samples]
        for row, (sample, count) in enumerate(zip(samples, counts, strict=True)):
            first = sum(sample.sizes[:k])
            padded[row] += [*sample.order[first : first + count], *[8] * (max(counts) - count)]
            before[row] += count
        widths.append(max(counts))
        longest.append(max(before))
    assert cursor.widths == widths + [1] * lookahead
    assert cursor.longest == longest
    assert cursor.num_slots == max(longest[0], *(longest[k] + widths[k] for k in range(num_steps)), 0)
    assert cursor.position_BT.tolist() == [row + [8] * lookahead for row in padded]
    assert cursor.ragged == (len({(s.sizes, len(s.order)) for s in samples}) > 1)
    if any(scale != 1 for sample in samples for scale in sample.scales):
        scales = [[*sample.scales, *[1.0] * (num_steps + lookahead - len(sample.scales))] for sample in samples]
        assert torch.equal(cursor.scale_BK, torch.tensor(scales))
    else:
        assert cursor.scale_BK is None
    if cursor.ragged:
        sizes = [[*sample.sizes, *[0] * (num_steps - len(sample.sizes))] for sample in samples]
        assert cursor.count_BK.tolist() == sizes


@pytest.mark.parametrize("order", [(3, 1, 7, 2), (3, 1, 7, -1), (3, 1, 7, 8), (3, 1, 0), (3, 1, 7, 0, 2)])
def test_a_plan_must_fill_what_the_request_leaves_open(order):
    model, request = small_model(), request_for(SAMPLES)
    check(model, request, Plan(SAMPLES))
    wrong = SamplePlan(order, (len(order),), (1.0,))
    with pytest.raises(InputError, match=rf"plan fills {len(order)} positions; they are not the 4 positions"):
        check(model, request, Plan((wrong, *SAMPLES[1:])))
    with pytest.raises(InputError, match="plan is for 3 samples; the request has 4"):
        check(model, request, Plan(SAMPLES[:3]))


def test_the_figure_shows_every_order():
    image = np.asarray(draw_plans((4, 6), SamplingSettings(steps=24), seed=0)).astype(int)
    colours = {tuple(c) for c in image.reshape(-1, 3)}
    assert (38, 22, 74) in colours
    assert (252, 244, 190) in colours
    assert math.prod(image.shape[:2]) > 10_000
