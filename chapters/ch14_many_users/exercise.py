"""Exercises of chapter 14. Edit this file, then:  python -m chapters check 14

Four functions: what a client that leaves gives back, who is let in, which machine a request is sent to, and how many
machines there should be. The real scheduler runs with each of them. Tasks are independent of each other.
"""

from collections.abc import Callable
from typing import Any

from chapters.ch14_many_users.capacity import Limits, Load, Machine, Plan, Report
from chapters.ch14_many_users.overload import State
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import SequenceStatus  # noqa: F401 (you will need it, and the three kinds of events)
from nanovllm.features.cache_reports.events import (
    AllBlocksCleared,  # noqa: F401
    BlockRemoved,  # noqa: F401
    BlockStored,  # noqa: F401
    KVCacheEvent,
)


def abort(scheduler: Scheduler, *seq_ids: int) -> None:
    """Their clients have left: drop these sequences, between two steps.

        scheduler.seqs           seq_id -> Sequence, for all that were added and have not ended
        scheduler.waiting        a deque of those that have no seat, in their order
        scheduler.running        a list of those that have one, in their order
        scheduler.block_manager  .free(seq) drops a sequence's references to its blocks; one without blocks may be freed

    Each of these sequences leaves `seqs` and the queue it is in, waiting or running; the others keep their order. Its
    status becomes FINISHED, its finish_reason "abort", and its references to blocks are dropped: blocks that nobody
    else uses go to the free queue, and what is cached in them stays findable.

    An id may be unknown, or given twice, or belong to a sequence that ended in the last step. Nothing is done for such
    an id. It is not an error either, because a client may leave while the last token is on its way. Do not raise.
    """
    raise NotImplementedError


def admit(state: State, deadline_s: float) -> bool:
    """A request has come. Should it be let in (True), or sent away at once (False)?

        state.num_waiting        sequences that wait for a seat; a newcomer waits behind them
        state.num_running        sequences that have one
        state.max_num_seqs       seats
        state.num_free_blocks    blocks that nobody uses
        state.num_blocks_needed  blocks that this request needs for its prompt
        state.requests_per_s     how many requests a second have got a seat lately, while somebody waited for one.
                                 0: nobody has had to wait since the server started
        deadline_s               a request is worth something if its first token comes within so many seconds. After
                                 that it is worth nothing, and what was computed for it is wasted

    Make the number of requests that are answered in time as large as you can. A request that is let in stays until its
    answer is complete.

    A request that finds nobody waiting, a free seat, and enough free blocks is always let in. As long as nothing has
    been measured, let as many requests wait as there are seats, and no more.

    The time in the queue is not the whole time to the first token: when a request gets its seat, its prompt still has
    to be computed. And the near future may differ from what was measured.
    """
    raise NotImplementedError


def route(
    memory: dict[Any, Any], block_hashes: list[bytes], loads: list[int], events: list[tuple[int, KVCacheEvent]]
) -> int:
    """Which replica gets this request? Return its index in `loads`.

        memory        yours, a dict that is empty at first. What you put into it is there at the next call
        block_hashes  the hashes of the prompt's full blocks, from the first to the last; a block has 64 tokens. A hash
                      stands for the block and for all blocks before it (chapter 7), so two prompts with the same hash
                      in place 5 begin with the same six blocks. May be empty
        loads         for each replica, how many tokens it still has to compute for requests that were sent to it
        events        what replicas have announced since the last call, as (index of the replica, event), oldest first:
                      BlockStored       from now on it has the blocks with the hashes event.block_hashes
                      BlockRemoved      it no longer has those with the hashes event.block_hashes
                      AllBlocksCleared  it no longer has any blocks

    A replica has what it has announced, and nothing else: what you have sent to it has to be computed first, and may
    have been evicted since. It does not have to compute the leading blocks that it has. An event may be reported twice.

    Send a request where it has the fewest tokens before its first token: those that the replica has to compute, and
    those of its own prompt's blocks that the replica does not have. Of replicas that are equally good, take the first.
    Do not keep hashes that no replica has any more.

    The same calls always give the same answers: no clock, no random numbers. `block_hashes`, `loads` and `events` stay
    as they are.
    """
    raise NotImplementedError


def provision(load: Load, limits: Limits, machines: dict[str, Machine], ask: Callable[[Plan], Report]) -> Plan:
    """Which machines does this load need, and how many of them? Return a Plan that keeps both limits and costs little.

        load.requests_per_s        they arrive at random, and each goes to a machine drawn at random
        load.num_prompt_tokens     of a prompt, on average; of these,
        load.num_shared_tokens     are the beginning that all prompts share
        load.num_output_tokens     of an answer, on average
        load.kv_bytes_per_token    of the model
        limits.ttft_s              99 of 100 requests must have their first token by then
        limits.token_s             and then a token every so many seconds, on average over a request
        machines                   name -> Machine
            .per_hour              its price
            .cost.step_s, .token_s seconds that every step takes, and that each of its tokens adds
            .num_blocks(kv_bytes_per_token)    that its memory has room for; a block has 64 tokens
        ask(plan)                  what the simulator says about a plan: .ttft_s, .token_s, .keeps(limits), and more
                                   (Report in capacity.py). You may ask ten times

    A Plan has the name of one kind of machine, their number, and max_num_seqs, the seats of each. It is refused if the
    simulator shows that it breaks a limit, or if it costs more than 1.5 times what a good plan does. Lengths are from
    half of the mean to 1.5 times the mean, except for the shared beginning. A step computes at most 512 tokens.

    Begin with an estimate for each kind of machine, as the chapter does. Does the longest prompt get its first token in
    time if it has a machine to itself? How busy may a machine be if steps are to stay short enough? How many requests
    are in it then, and how many does its memory hold? An estimate is about means, and the limits are about 99 of 100.
    Leave room for that, or ask.
    """
    raise NotImplementedError
