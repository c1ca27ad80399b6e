"""Lab of chapter 14: the real server under load, then queues and fleets in virtual time, on the real scheduler."""

from itertools import islice
from statistics import mean
from typing import Any

from rich.console import RenderableType

from chapters.app import explorer
from chapters.ch14_many_users import queues, workload
from chapters.ch14_many_users.capacity_lab import tell_capacity
from chapters.ch14_many_users.drawing import cells, draw_last, draw_replicas, draw_results
from chapters.ch14_many_users.fleet import BLOCK_SIZE, NUM_BLOCKS, Cost, Fleet, Job, percentile
from chapters.ch14_many_users.overload import Gate, Server, admit_all, at_most, capacity, goodput, in_time, serve
from chapters.ch14_many_users.routing import POLICIES, least_loaded
from chapters.ch14_many_users.server_lab import tell_server
from chapters.ch14_many_users.sharing import GREEDY, FairServer, greedy_and_others, impatient, long_and_short
from chapters.ch14_many_users.workload import alone, own_tokens, shared_prefixes
from chapters.ch14_many_users.world import World, result_of
from chapters.draw import make_table
from chapters.play import actions
from chapters.story import Story
from nanovllm.core.integrity.states import count_blocks

NUM_TOKENS = 300, 60  # prompt and answer, on average
DEADLINE_S = 1.0
PER_REPLICA = 30  # requests
NUMS_REPLICAS = (1, 4, 16, 64)


def panels(world: World) -> list[tuple[str, RenderableType]]:
    fleet, last = world.fleet, world.fleet.jobs[-1:]
    now = last[0].arrival_s if last else 0.0
    shown = f"{min(len(fleet.replicas), 16)} of {len(fleet.replicas)} replicas"
    return [
        (f"{world.policy}: {shown}, {now:.2f} s, {world.rate:g} requests/s each", draw_replicas(fleet)),
        ("the last requests", draw_last(fleet)),
        (f"the same requests, skew {world.skew:g}: TTFT in ms, busiest as a multiple", draw_results(world.results)),
    ]


ACTIONS = actions(
    "n|request|send, e|200 requests|send_many, b|burst|burst, p|router|next_policy, g|replicas|next_number, "
    "k|skew|next_skew, l|load|next_rate, r|reset|reset"
)


def make_app(model: str | None) -> Any:
    return explorer("Many users", World(), panels, ACTIONS)


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    tell_server(story)
    tell_queue(story)
    tell_engine(story)
    tell_long_prompt(story)
    tell_greedy(story)
    tell_leaving(story)
    tell_too_many(story)
    tell_fleet(story)
    tell_loads(story)
    tell_capacity(story)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def tell_queue(story: Story) -> None:
    story.part("A queue before one counter")
    story.say(
        "No engine here: customers arrive at random, one is served at a time, and it takes 1 s on average. How many "
        "seconds does one wait, before being served? Simulated, and by the formula of Pollaczek and Khinchine."
    )
    table = make_table("busy", *(column for name in queues.SERVICES for column in (name, "formula")), width=8)
    for rate in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        found = [(queues.simulate(rate, name).mean_s, queues.expected_wait_s(rate, name)) for name in queues.SERVICES]
        table.add_row(f"{rate:.0%}", *(f"{value:.1f}" for pair in found for value in pair))
    story.show(table)


def tell_engine(story: Story) -> None:
    story.part("An engine near its capacity")
    cost, (num_prompt, num_output) = Cost(), NUM_TOKENS
    can_do = capacity(alone(1.0, *NUM_TOKENS, 150, seed=9))
    story.say(
        "From here on the scheduler and the block manager are the engine's, and time is played: a step takes "
        f"{ms(cost.step_s)} ms, and {cost.token_s * 1e3:g} ms for each token that it computes. Prompts of about "
        f"{num_prompt} tokens, answers of about {num_output}, 16 seats. All at once, it answers {can_do:.1f} requests "
        "a second. They arrive at random; times are in ms:"
    )
    names = "load", "tokens a step", "TTFT", "p99", "latency", "rate x latency", "counted", "TTFT"
    table = make_table(*names, width=6)
    table.columns[-1].justify = "left"
    for load in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2):
        jobs = alone(load * can_do, *NUM_TOKENS, 300)
        server = serve(jobs)
        ttfts, latency = [job.ttft_s for job in jobs], mean(job.latency_s for job in jobs)
        size = server.num_computed_tokens / server.num_steps
        little = f"{len(jobs) / server.now * latency:.1f}", f"{server.num_in_system_s / server.now:.1f}"
        times = ms(mean(ttfts)), ms(percentile(ttfts, 99)), ms(latency)
        table.add_row(f"{load:.0%}", f"{size:.0f}", *times, *little, "█" * max(1, round(10 * mean(ttfts))))
    story.show(table)


def tell_long_prompt(story: Story) -> None:
    story.part("A long prompt")
    _, long, short = long_and_short()
    story.say(
        f"Six answers are being written. Then a prompt of {len(long.prompt)} tokens comes, and after it "
        f"{len(short)} of {len(short[0].prompt)}. A step may compute so many tokens (max_num_batched_tokens). In ms: "
        "the longest pause in the six answers, and how long the long one and the short ones wait for their first token."
    )
    table = make_table("tokens a step", "pause", "TTFT, long", "TTFT, short", width=12, first=14)
    for budget in (16384, 2048, 512, 128):
        talking, long, short = long_and_short()
        serve([*talking, long, *short], num_blocks=200, max_num_batched_tokens=budget)
        pause, wait = max(job.longest_pause_s for job in talking), mean(job.ttft_s for job in short)
        table.add_row(str(budget), ms(pause), ms(long.ttft_s), ms(wait))
    story.show(table)


def tell_greedy(story: Story) -> None:
    story.part("A user with sixty requests")
    story.say(
        "One user sends 60 requests at once to a server with 8 seats. Four others send 16 in the five seconds after. "
        "They are served in order of arrival, and in order of what each user has got so far. The table shows TTFT in "
        "ms, then when all were done:"
    )
    table = make_table("queue", "the greedy one", "the others", "their worst", "all done, s", width=12, first=20)
    for name, kind in (("first come, first", Server), ("least served first", FairServer)):
        jobs, server = greedy_and_others(), kind(max_num_seqs=8)
        for job in jobs:
            server.advance(job.arrival_s)
            server.add(job)
        server.advance(float("inf"))
        greedy, others = [[j.ttft_s for j in jobs if (j.user == GREEDY) is is_greedy] for is_greedy in (True, False)]
        table.add_row(name, ms(mean(greedy)), ms(mean(others)), ms(max(others)), f"{server.now:.1f}")
    story.show(table)


def tell_leaving(story: Story) -> None:
    story.part("Clients that leave")
    server = Server(num_blocks=12, max_num_seqs=2)
    jobs = [Job(0.0, own_tokens(3 * BLOCK_SIZE + 8), 50) for _ in range(4)]
    for job in jobs:
        server.add(job)
    server.advance(0.2)
    table = make_table("", "running", "waiting", "free blocks", "cached blocks", first=28)

    def look(name: str) -> None:
        manager, scheduler = server.manager, server.scheduler
        counts = len(scheduler.running), len(scheduler.waiting), len(manager.free_blocks)
        table.add_row(name, *map(str, counts), str(count_blocks(manager)["cached"]))

    look("two run, two wait")
    server.scheduler.abort(jobs[3].seq.seq_id)
    look("one that waited has left")
    server.scheduler.abort(jobs[0].seq.seq_id)
    look("one that ran has left")
    server.scheduler.schedule()
    look("after the next schedule()")
    story.say(f"Two seats and a pool of 12 blocks of {BLOCK_SIZE} tokens; prompts of {len(jobs[0].prompt)} tokens.")
    story.show(table)

    can_do = capacity(alone(1.0, 300, 120, 100, seed=9))
    story.say(
        "Longer answers, and two of five clients go away after half a second. A server that notices it, and one that "
        "does not. TTFT in ms is that of the clients that stay; the last column counts tokens sampled for nobody."
    )
    table = make_table("load", "notices", "TTFT", "TTFT p99", "for nobody", width=10)
    for load in (0.9, 1.1, 1.3):
        for notices in (True, False):
            jobs = impatient(load * can_do, 150)
            serve(jobs, notices=notices)
            ttfts = [job.ttft_s for job in jobs if job.leaves_s == float("inf")]
            num_wasted = sum(time_s > job.leaves_s for job in jobs for time_s in job.token_times)
            share = num_wasted / sum(len(job.token_times) for job in jobs)
            times = ms(mean(ttfts)), ms(percentile(ttfts, 99))
            table.add_row(f"{load:.0%}", "yes" if notices else "no", *times, f"{share:.0%}")
    story.show(table)


def tell_too_many(story: Story) -> None:
    story.part("Too many")
    can_do = capacity(alone(1.0, *NUM_TOKENS, 150, seed=9))
    gates: dict[str, Gate] = {"everybody": admit_all, **{f"at most {n} wait": at_most(n) for n in (2, 8, 32)}}
    gates |= {f"wait up to {limit_s:g} s": in_time(limit_s) for limit_s in (DEADLINE_S, 0.75 * DEADLINE_S)}
    loads = (0.8, 1.3, 2.0)
    story.say(
        f"A request is worth something if its first token comes within {DEADLINE_S:g} s. Requests answered in time, a "
        f"second, of {can_do:.1f} that the server can do; then, for twice the load, all that were answered, and the "
        "share that was sent away."
    )
    names = "who is let in", *(f"load {load:.0%}" for load in loads), "answered", "sent away"
    table = make_table(*names, width=9, first=15)
    for name, gate in gates.items():
        cells = []
        for load in loads:
            jobs = alone(load * can_do, *NUM_TOKENS, 240)
            end_s = serve(jobs, gate).now
            cells.append(f"{goodput(jobs, DEADLINE_S, end_s):.1f}")
        refused = sum(job.refused for job in jobs)
        table.add_row(name, *cells, f"{(len(jobs) - refused) / end_s:.1f}", f"{refused / len(jobs):.0%}")
    story.show(table)


def tell_fleet(story: Story) -> None:
    story.part("One to 64 machines")
    story.say(
        f"Each replica is a real scheduler with a pool of {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens, and gets 7 "
        f"requests a second. A prompt has {workload.PREFIX_TOKENS} tokens in common with its group, and "
        f"{workload.OWN_TOKENS} of its own. There are {workload.GROUPS_PER_REPLICA} groups for each replica, and the "
        f"k-th asks 1/k times as often as the first. {PER_REPLICA} requests for each replica. TTFT in ms; "
        "busiest: what the busiest replica computes, as a multiple of the mean."
    )
    table = make_table("replicas", "router", "blocks found", "TTFT", "TTFT p99", "busiest", width=8)
    table.columns[1].justify = "left"
    for num_replicas in NUMS_REPLICAS:
        for name, make in POLICIES.items():
            if num_replicas == 1 and name != "cache-aware":
                continue
            jobs = islice(shared_prefixes(num_replicas), PER_REPLICA * num_replicas)
            fleet = Fleet(num_replicas, make()).run(jobs)
            table.add_row(str(num_replicas), "any" if num_replicas == 1 else name, *cells(result_of(fleet)))
        table.add_section()
    story.show(table)


def tell_loads(story: Story) -> None:
    story.part("What is a load?")
    story.say(
        "There are twenty replicas, and each request goes to the least loaded one. The table compares a router that "
        "counts requests with one that counts the tokens that are still to be computed:"
    )
    table = make_table("it counts", "TTFT", "TTFT p99", "busiest", width=8, first=10)
    kinds: dict[str, Any] = {"requests": lambda replica: len(replica.jobs), "tokens": lambda replica: replica.load}
    for name, load_of in kinds.items():
        fleet = Fleet(20, least_loaded, load_of=load_of).run(islice(shared_prefixes(20), PER_REPLICA * 20))
        table.add_row(name, *cells(result_of(fleet))[1:])
    story.show(table)
