"""The lab of chapter 16: its notebook computes what the engine's layers compute, its shelf what the scheduler does."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from chapters.ch16_fixed_memory import notebook, page, placing
from chapters.ch16_fixed_memory.checks_plan import BLOCK, large_jobs, policy_saves, starts_of
from chapters.ch16_fixed_memory.notebook import (
    ADD_UP,
    DELTA,
    PEOPLE,
    RULES,
    Notebook,
    Rule,
    num_right,
    read,
    write,
    zeros,
)
from chapters.ch16_fixed_memory.recall import new_day, once_each, rewritten
from chapters.ch16_fixed_memory.shelf import BOUNDS, Shelf, workloads
from chapters.ch16_fixed_memory.solution import plan_snapshots
from chapters.ch16_fixed_memory.world import World
from chapters.player import Player
from nanovllm.core.snapshots.policy import snapshot_positions
from nanovllm.features.hybrid.delta_rule import read_rows, to_length_one
from nanovllm.features.hybrid.hybrid_config import HybridConfig
from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet


def test_the_notebook_writes_and_reads_as_the_engine_does():
    """One head, a convolution that sees the newest token only: state and outputs are those of read_rows()."""
    sizes = HybridConfig(frozenset(), num_key_heads=1, num_value_heads=1, key_dim=5, value_dim=3, kernel_size=2)
    torch.manual_seed(0)
    net = GatedDeltaNet(SimpleNamespace(hidden_size=4, rms_norm_eps=1e-6, hybrid=sizes)).requires_grad_(False)
    net.conv.weight.copy_(torch.tensor([0.0, 1.0]))
    net.A_log.fill_(0.3)
    net.dt_bias.fill_(-1.0)
    x, gates = torch.randn(9, sizes.conv_size), torch.randn(9, 2)
    outputs, states = read_rows(torch.cat((torch.zeros(1, sizes.conv_size), x)), gates, None, net)

    q, k, v = F.silu(x).split((5, 5, 3), dim=1)
    q, k, state = to_length_one(q) * 5**-0.5, to_length_one(k), zeros(5, 3)
    decays = (-net.A_log.exp() * F.softplus(gates[:, 1] + net.dt_bias)).exp()
    for t in range(9):
        rule = Rule("", True, gates[t, 0].sigmoid().item())
        state = write(state, k[t].tolist(), v[t].tolist(), rule, decays[t].item())
        torch.testing.assert_close(torch.tensor(read(state, q[t].tolist())), outputs[t, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(state), states[0], atol=1e-5, rtol=1e-5)


def test_adding_up_fails_where_lines_change_and_the_delta_rule_does_not():
    assert rewritten(16, 4, ADD_UP) < 0.3 and rewritten(16, 4, DELTA) > 0.7
    assert once_each(16, DELTA, [12, 13, 14, 15]) > once_each(16, ADD_UP, [12, 13, 14, 15]) + 0.2
    assert once_each(16, DELTA, [0, 1, 2, 3]) < once_each(16, ADD_UP, [0, 1, 2, 3]), "somebody pays for it"
    assert new_day(12, 4, ADD_UP, 0.0) > new_day(12, 4, ADD_UP, 1.0) + 0.3


def test_a_line_that_was_just_written_by_the_delta_rule_is_read_exactly():
    book = Notebook()
    book.rule = DELTA
    for _ in PEOPLE:
        name, _ = book.come_in()
        [answer] = [answer for answer in book.answers if answer.name == name]
        assert answer.is_right and answer.strength == pytest.approx(1)
    with pytest.raises(ValueError, match="All sixteen"):
        book.come_in()
    assert num_right(book.lines, DELTA) == book.right_so_far(DELTA)[-1]


@pytest.mark.parametrize("rule", RULES)
def test_each_line_is_written_once_for_the_curve_of_a_rule(rule, monkeypatch):
    book, written = Notebook(), []
    for act in [book.come_in] * 4 + [book.move] * 8:
        act()
    expected = [num_right(book.lines[:n], rule) for n in range(1, 13)]
    monkeypatch.setattr(notebook, "write", lambda *given: written.append(given) or write(*given))
    assert book.right_so_far(rule) == expected and len(written) == 12


@pytest.mark.parametrize("name", workloads())
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_policys_places_give_the_policys_starts(name, bound):
    shelf = Shelf(name, bound)
    while not shelf.is_over:
        shelf.mark_as_policy()
        assert shelf.marks == snapshot_positions(len(shelf.prompt), shelf.num_matched, 16)
        begins = shelf.begins
        sent = shelf.send()
        assert begins == sent.yours == sent.policy <= sent.unbounded <= sent.matched
    starts = placing.play(workloads()[name], snapshot_positions, bound)
    assert [sent.policy for sent in shelf.sent] == starts


def test_a_shelf_without_snapshots_finds_nothing():
    shelf = Shelf("1,500 shared, 700 own")
    assert not any(shelf.send().yours for _ in range(4)) and shelf.num_matched == 1488
    assert shelf.mark([1500, 3, 2200]) == [1488, 2192], "the last ends that are not after them; before 3 there is none"
    with pytest.raises(ValueError, match="9,999 is no position of this prompt, which has 2,200 tokens"):
        shelf.mark([9999])


def test_the_last_scene_says_which_requests_of_the_policy_begin_deeper():
    [scene] = [scene for scene in page.SCENES if scene.title == "Shared lengths vary"]
    player = Player(page, scene.link)
    while player.ahead:
        player.forward()
    deeper = [number for number, sent in enumerate(player.world.shelf.sent, start=1) if sent.policy > sent.yours]
    assert deeper == [3, 4, 5] and "its requests 3 to 5 begin deeper" in scene.text


@pytest.mark.parametrize("name", large_jobs())
def test_prompts_begin_where_a_plan_is_graded_to_let_them(name):
    """The real scheduler takes the planned snapshots, and evicts none of them."""
    prompts, room = large_jobs()[name]
    plan = plan_snapshots(prompts, BLOCK, room)
    positions = iter(plan)
    starts = placing.play(
        [(prompt, [7]) for prompt in prompts], lambda *_: dict.fromkeys(next(positions), True), max_snapshots=room
    )
    assert starts == starts_of(prompts, plan, BLOCK)
    assert sum(starts) > policy_saves(name), "who knows all prompts does better"


@pytest.mark.nightly
def test_whatever_one_does_there_is_something_to_see():
    """Any order of actions: no error but those that say what to do, and all of it is drawn."""
    rng, world = random.Random(0), World()
    actions = [world.write, world.move, world.next_rule, world.send, world.mark_end, world.mark_fork, world.mark_ours]
    actions += [world.next_workload, world.next_bound, lambda: world.typed("100 300"), world.next_decay]
    for _ in range(150):
        try:
            said = rng.choice(actions)()
        except ValueError as error:
            said = str(error)
        assert said and len(page.panels(world)) == 3
    with pytest.raises(ValueError, match="Found 'so many'"):
        world.typed("so many")
