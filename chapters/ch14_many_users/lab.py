import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 14: Many users")

with app.setup(hide_code=True):
    import asyncio
    import os
    from importlib.util import find_spec
    from itertools import islice
    from statistics import mean
    from typing import Any
    from unittest.mock import patch

    from chapters.ch14_many_users import queues, workload
    from chapters.ch14_many_users.capacity import MACHINES, Plan, simulate
    from chapters.ch14_many_users.capacity_lab import BOUGHT, LIMITS, LOAD, OTHERS, num_seats, room, whole_ms
    from chapters.ch14_many_users.drawing import cells
    from chapters.ch14_many_users.fleet import BLOCK_SIZE, NUM_BLOCKS, Cost, Fleet, Job, percentile
    from chapters.ch14_many_users.lab_parts import ACTIONS, ms, panels
    from chapters.ch14_many_users.overload import Gate, Server, admit_all, at_most, capacity, goodput, in_time, serve
    from chapters.ch14_many_users.routing import POLICIES, least_loaded
    from chapters.ch14_many_users.server_lab import (
        ANSWER_TOKENS,
        NUM_REQUESTS,
        OPTIONS,
        PLACES,
        SEATS,
        bodies,
        tell_clients_that_leave,
        tell_full,
        tell_rates,
    )
    from chapters.ch14_many_users.sharing import GREEDY, FairServer, greedy_and_others, impatient, long_and_short
    from chapters.ch14_many_users.workload import alone, own_tokens, shared_prefixes
    from chapters.ch14_many_users.world import World, result_of
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.playing import playground, start_button, title
    from nanovllm.core.integrity.states import count_blocks
    from nanovllm.serving.http.load_generator import run_load, running_server


@app.cell(hide_code=True)
def _():
    title(14)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(World, panels, ACTIONS)
    return player, turn


@app.cell(hide_code=True, expand_output=True)
def show_it(player, turn):
    turn()
    controls = player.controls()
    player.show(controls)
    return


@app.cell(hide_code=True)
def start_it():
    start = start_button("a minute")
    start
    return (start,)


@app.cell(hide_code=True)
def begin(start):
    story = the_story(start)
    return (story,)


@app.cell
def settings():
    NUM_TOKENS = 300, 60  # prompt and answer, on average
    DEADLINE_S = 1.0
    PER_REPLICA = 30  # requests
    NUMS_REPLICAS = (1, 4, 16, 64)
    return DEADLINE_S, NUMS_REPLICAS, NUM_TOKENS, PER_REPLICA


@app.cell(expand_output=True)
def tell_server(story):
    story.part("The real server")
    if find_spec("uvicorn") is None:
        story.say('The server needs:  pip install -e ".[serve]"')
    else:
        story.say(
            f"nanovllm serve, in a process of its own: {SEATS} seats, {PLACES} places to wait, bf16, one core. Each "
            f"request has a prompt like no other and an answer of {ANSWER_TOKENS} tokens. First, {NUM_REQUESTS} come "
            "at once:"
        )
        # It computes with one thread: the clients need a core, too.
        with patch.dict(os.environ, OMP_NUM_THREADS="1"), running_server(story.model, *OPTIONS) as _url:
            asyncio.run(run_load(_url, bodies(0, SEATS), float("inf")))  # the first steps wait for memory
            _runs = [asyncio.run(run_load(_url, bodies(20 + i, NUM_REQUESTS), float("inf"))) for i in range(2)]
            _capacity = NUM_REQUESTS / min(max(timing.latency_s or 0.0 for timing in timings) for timings in _runs)
            story.say(f"{_capacity:.1f} requests a second, in the better of two runs: its capacity.", measured=True)
            tell_rates(story, _url, _capacity)
            asyncio.run(tell_clients_that_leave(story, _url))
            tell_full(story, _url)
    return


@app.cell(expand_output=True)
def tell_queue(story):
    story.part("A queue before one counter")
    story.say(
        "No engine here: customers arrive at random, one is served at a time, and it takes 1 s on average. How many "
        "seconds does one wait, before being served? Simulated, and by the formula of Pollaczek and Khinchine."
    )
    _table = make_table("busy", *(column for name in queues.SERVICES for column in (name, "formula")), width=8)
    for _rate in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        _found = [(queues.simulate(_rate, name), queues.expected_wait_s(_rate, name)) for name in queues.SERVICES]
        _table.add_row(f"{_rate:.0%}", *(f"{value:.1f}" for pair in _found for value in pair))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_engine(NUM_TOKENS, story):
    story.part("An engine near its capacity")
    _cost, (_num_prompt, _num_output) = Cost(), NUM_TOKENS
    _can_do = capacity(alone(1.0, *NUM_TOKENS, 150, seed=9))
    story.say(
        "From here on the scheduler and the block manager are the engine's, and time is simulated: a step takes "
        f"{ms(_cost.step_s)} ms, and {_cost.token_s * 1e3:g} ms for each token that it computes. Prompts of about "
        f"{_num_prompt} tokens, answers of about {_num_output}, 16 seats. All at once, it answers {_can_do:.1f} "
        "requests a second. They arrive at random; times are in ms:"
    )
    _names = "load", "tokens a step", "TTFT", "p99", "latency", "rate x latency", "counted", "TTFT"
    _table = make_table(*_names, width=6)
    _table.columns[-1].justify = "left"
    for _load in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2):
        _jobs = alone(_load * _can_do, *NUM_TOKENS, 300)
        _server = serve(_jobs)
        _ttfts, _latency = [job.ttft_s for job in _jobs], mean(job.latency_s for job in _jobs)
        _size = _server.num_computed_tokens / _server.num_steps
        _little = f"{len(_jobs) / _server.now * _latency:.1f}", f"{_server.num_in_system_s / _server.now:.1f}"
        _times = ms(mean(_ttfts)), ms(percentile(_ttfts, 99)), ms(_latency)
        _table.add_row(f"{_load:.0%}", f"{_size:.0f}", *_times, *_little, "█" * max(1, round(10 * mean(_ttfts))))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_long_prompt(story):
    story.part("A long prompt")
    _, _long, _short = long_and_short()
    story.say(
        f"Six answers are being written. Then a prompt of {len(_long.prompt)} tokens comes, and after it "
        f"{len(_short)} of {len(_short[0].prompt)}. A step may compute so many tokens (max_num_batched_tokens). In ms: "
        "the longest pause in the six answers, and how long the long one and the short ones wait for their first token."
    )
    _table = make_table("tokens a step", "pause", "TTFT, long", "TTFT, short", width=12, first=14)
    for _budget in (16384, 2048, 512, 128):
        _talking, _long, _short = long_and_short()
        serve([*_talking, _long, *_short], num_blocks=200, max_num_batched_tokens=_budget)
        _pause, _wait = max(job.longest_pause_s for job in _talking), mean(job.ttft_s for job in _short)
        _table.add_row(str(_budget), ms(_pause), ms(_long.ttft_s), ms(_wait))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_greedy(story):
    story.part("A user with sixty requests")
    story.say(
        "One user sends 60 requests at once to a server with 8 seats. Four others send 16 in the five seconds after. "
        "They are served in order of arrival, and in order of what each user has got so far. The table shows TTFT in "
        "ms, then when all were done:"
    )
    _table = make_table("queue", "the greedy one", "the others", "their worst", "all done, s", width=12, first=20)
    for _name, _kind in (("first come, first", Server), ("least served first", FairServer)):
        _jobs, _server = greedy_and_others(), _kind(max_num_seqs=8)
        for _job in _jobs:
            _server.advance(_job.arrival_s)
            _server.add(_job)
        _server.advance(float("inf"))
        _greedy, _others = [[j.ttft_s for j in _jobs if (j.user == GREEDY) is is_greedy] for is_greedy in (True, False)]
        _table.add_row(_name, ms(mean(_greedy)), ms(mean(_others)), ms(max(_others)), f"{_server.now:.1f}")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_leaving(story):
    story.part("Clients that leave")
    _server = Server(num_blocks=12, max_num_seqs=2)
    _jobs = [Job(0.0, own_tokens(3 * BLOCK_SIZE + 8), 50) for _ in range(4)]
    for _job in _jobs:
        _server.add(_job)
    _server.advance(0.2)
    _table = make_table("", "running", "waiting", "free blocks", "cached blocks", first=28)

    def _look(name: str) -> None:
        manager, scheduler = _server.manager, _server.scheduler
        counts = len(scheduler.running), len(scheduler.waiting), len(manager.free_blocks)
        _table.add_row(name, *map(str, counts), str(count_blocks(manager)["cached"]))

    _look("two run, two wait")
    _server.scheduler.abort(_jobs[3].seq.seq_id)
    _look("one that waited has left")
    _server.scheduler.abort(_jobs[0].seq.seq_id)
    _look("one that ran has left")
    _server.scheduler.schedule()
    _look("after the next schedule()")
    story.say(f"Two seats and a pool of 12 blocks of {BLOCK_SIZE} tokens; prompts of {len(_jobs[0].prompt)} tokens.")
    story.show(_table)

    _can_do = capacity(alone(1.0, 300, 120, 100, seed=9))
    story.say(
        "Longer answers, and two of five clients go away after half a second. A server that notices it, and one that "
        "does not. TTFT in ms is that of the clients that stay; the last column counts tokens sampled for nobody."
    )
    _table = make_table("load", "notices", "TTFT", "TTFT p99", "for nobody", width=10)
    for _load in (0.9, 1.1, 1.3):
        for _notices in (True, False):
            _jobs = impatient(_load * _can_do, 150)
            serve(_jobs, notices=_notices)
            _ttfts = [_job.ttft_s for _job in _jobs if _job.leaves_s == float("inf")]
            _num_wasted = sum(time_s > _job.leaves_s for _job in _jobs for time_s in _job.token_times)
            _share = _num_wasted / sum(len(_job.token_times) for _job in _jobs)
            _times = ms(mean(_ttfts)), ms(percentile(_ttfts, 99))
            _table.add_row(f"{_load:.0%}", "yes" if _notices else "no", *_times, f"{_share:.0%}")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_too_many(DEADLINE_S, NUM_TOKENS, story):
    story.part("Too many")
    _can_do = capacity(alone(1.0, *NUM_TOKENS, 150, seed=9))
    _gates: dict[str, Gate] = {"everybody": admit_all, **{f"at most {n} wait": at_most(n) for n in (2, 8, 32)}}
    _gates |= {f"wait up to {limit_s:g} s": in_time(limit_s) for limit_s in (DEADLINE_S, 0.75 * DEADLINE_S)}
    _loads = (0.8, 1.3, 2.0)
    story.say(
        f"A request is worth something if its first token comes within {DEADLINE_S:g} s. The table shows the "
        f"requests a second that were answered in time (the server can answer {_can_do:.1f}). The last two columns are "
        "for twice the load: all requests that were answered, and the share that was sent away."
    )
    _names = "who is let in", *(f"load {_load:.0%}" for _load in _loads), "answered", "sent away"
    _table = make_table(*_names, width=9, first=15)
    for _name, _gate in _gates.items():
        _cells = []
        for _load in _loads:
            _jobs = alone(_load * _can_do, *NUM_TOKENS, 240)
            _end_s = serve(_jobs, _gate).now
            _cells.append(f"{goodput(_jobs, DEADLINE_S, _end_s):.1f}")
        _refused = sum(job.refused for job in _jobs)
        _table.add_row(_name, *_cells, f"{(len(_jobs) - _refused) / _end_s:.1f}", f"{_refused / len(_jobs):.0%}")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_fleet(NUMS_REPLICAS, PER_REPLICA, story):
    story.part("One to 64 machines")
    story.say(
        f"Each replica is a real scheduler with a pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, and gets 7 "
        f"requests a second. A prompt has {workload.PREFIX_TOKENS} tokens in common with its group, and "
        f"{workload.OWN_TOKENS} of its own. There are {workload.GROUPS_PER_REPLICA} groups for each replica, and the "
        f"k-th asks 1/k times as often as the first. {PER_REPLICA} requests for each replica. TTFT in ms; "
        "busiest: what the busiest replica computes, as a multiple of the mean."
    )
    _table = make_table("replicas", "router", "blocks found", "TTFT", "TTFT p99", "busiest", width=8)
    _table.columns[1].justify = "left"
    for _num_replicas in NUMS_REPLICAS:
        for _name, _make in POLICIES.items():
            if _num_replicas == 1 and _name != "cache-aware":
                continue
            _jobs = islice(shared_prefixes(_num_replicas), PER_REPLICA * _num_replicas)
            _fleet = Fleet(_num_replicas, _make()).run(_jobs)
            _table.add_row(str(_num_replicas), "any" if _num_replicas == 1 else _name, *cells(result_of(_fleet)))
        _table.add_section()
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_loads(PER_REPLICA, story):
    story.part("What is a load?")
    story.say(
        "There are twenty replicas, and each request goes to the least loaded one. The table compares a router that "
        "counts requests with one that counts the tokens that are still to be computed:"
    )
    _table = make_table("it counts", "TTFT", "TTFT p99", "busiest", width=8, first=10)
    _kinds: dict[str, Any] = {"requests": lambda replica: len(replica.jobs), "tokens": lambda replica: replica.load}
    for _name, _load_of in _kinds.items():
        _fleet = Fleet(20, least_loaded, load_of=_load_of).run(islice(shared_prefixes(20), PER_REPLICA * 20))
        _table.add_row(_name, *cells(result_of(_fleet))[1:])
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_capacity(story):
    story.part("Machines for ten thousand users")
    story.say(
        f"Each sends a request a minute, {LOAD.requests_per_s:.0f} a second in all. A prompt has "
        f"{LOAD.num_prompt_tokens:,} tokens, of which all prompts share the first {LOAD.num_shared_tokens:,}; an "
        f"answer has {LOAD.num_output_tokens}. A token has {LOAD.kv_bytes_per_token:,} bytes of K and V. 99 of 100 "
        f"requests should have their first token within {whole_ms(LIMITS.ttft_s)} ms, and then a token every "
        f"{whole_ms(LIMITS.token_s)} ms, on average over a request. These machines are on offer:"
    )
    _names = "an hour", "step, ms", "token, ms", "GB for K/V", "K/V tokens", "seats"
    _table = make_table("machine", *_names, width=10, first=8)
    for _name, _machine in MACHINES.items():
        _step, _token = (f"{1e3 * seconds:g}" for seconds in (_machine.cost.step_s, _machine.cost.token_s))
        _memory = f"{_machine.kv_bytes / 1e9:g}", f"{room(_name):,}", str(num_seats(_name))
        _table.add_row(_name, f"{_machine.per_hour:g}", _step, _token, *_memory)
    story.show(_table)
    story.say(
        "Estimated: ρ, the share of the time in which a machine computes tokens; τ, ms of a step; N, requests inside. "
        "Simulated: the time from one token to the next in ms, as the mean of all requests and as p99; requests "
        "inside, on average; the p99 of the time to the first token, in ms."
    )
    _simulated = "an hour", "ρ", "τ", "token", "p99", "N", "inside", "TTFT p99"
    _table = make_table("machines", *_simulated, width=8, first=8)
    for _name, _num_machines in BOUGHT:
        _plan, _cost = Plan(_name, _num_machines, num_seats(_name)), MACHINES[_name].cost
        _rate, _report = LOAD.requests_per_s / _num_machines, simulate(LOAD, _plan)
        _busy = _rate * LOAD.num_own_tokens * _cost.token_s
        _step_s = _cost.step_s / (1 - _busy)
        _times = whole_ms(_step_s), whole_ms(_report.mean_token_s), whole_ms(_report.token_s)
        _inside = f"{_rate * LOAD.num_output_tokens * _step_s:.0f}", f"{_report.num_inside:.0f}"
        _table.add_row(
            f"{_num_machines} {_name}",
            f"{_plan.per_hour:g}",
            f"{_busy:.0%}",
            *_times,
            *_inside,
            whole_ms(_report.ttft_s),
        )
    story.show(_table)
    story.say("What if 14 small ones were bought, and the load is not the planned one?")
    _table = make_table("what comes", "token p99", "TTFT p99", "preempted", "waits for", width=10, first=26)
    for _name, _load in OTHERS.items():
        _report = simulate(_load, Plan("small", 14, num_seats("small")))
        _waits = "-" if _report.keeps(LIMITS) else _report.waits_for
        _table.add_row(
            _name, whole_ms(_report.token_s), whole_ms(_report.ttft_s), f"{_report.num_preemptions:.1f}", _waits
        )
    story.show(_table)
    _bytes_each = (LOAD.num_prompt_tokens - LOAD.num_shared_tokens) * LOAD.kv_bytes_per_token
    story.say(
        f"If separate machines computed the prompts, {_bytes_each / 1e6:.1f} MB of K and V would "
        f"travel for each request, {_bytes_each * LOAD.requests_per_s / 1e9:.1f} GB a second for all."
    )
    return


if __name__ == "__main__":
    app.run()
