"""The score: goodput, by the load generator's definitions of TTFT and TPOT, and what has to be true of any run."""

from typing import NamedTuple

from chapters.capstone.simulation import Served
from chapters.capstone.views import Setup
from nanovllm.serving.http.load_generator import Timing


class Score(NamedTuple):
    """goodput: good requests a second, from the first arrival to the last token. The shares are of all requests."""

    goodput: float
    num_requests: int
    num_good: int
    num_refused: int
    num_late: int  # too long to the first token
    num_slow: int  # in time, but too long for the tokens after it
    hit_rate: float
    seconds: float


def timings(served: Served) -> list[Timing]:
    found = []
    for client in served.clients:
        timing, times = Timing(client.arrival_s, num_prompt_tokens=client.seq.num_prompt_tokens), client.token_times
        if client.refused:
            timing.error = "refused"
        else:
            timing.ttft_s, timing.latency_s = times[0] - client.arrival_s, times[-1] - client.arrival_s
            timing.num_output_tokens = len(times)
        found.append(timing)
    return found


def score(found: list[Timing], setup: Setup, end_s: float, hit_rate: float) -> Score:
    answered = [timing for timing in found if timing.error is None]
    in_time = [timing for timing in answered if (timing.ttft_s or 0.0) <= setup.ttft_limit_s]
    good = [timing for timing in in_time if (timing.tpot_s or 0.0) <= setup.tpot_limit_s]
    first_s, last_s = found[0].arrival_s, max(end_s, found[-1].arrival_s)
    seconds = last_s - first_s
    counts = len(found), len(good), len(found) - len(answered), len(answered) - len(in_time), len(in_time) - len(good)
    return Score(len(good) / max(seconds, 1e-9), *counts, hit_rate, seconds)


def check_conservation(served: Served) -> None:
    """Whatever the policy was: all tokens of everybody who was let in, no more, and all memory is free again."""
    for client in served.clients:
        wanted = 0 if client.refused else client.seq.sampling_params.max_tokens
        found = len(client.token_times)
        assert found == wanted, f"request {client.index} has got {found} tokens of {wanted}"
        assert client.token_times == sorted(client.token_times), f"request {client.index}: tokens out of order"
