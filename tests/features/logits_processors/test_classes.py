"""LLM(logits_processors=[...]): classes in vLLM's form, written as vLLM's examples write them."""

import pytest
import torch
from nanovllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

from nanovllm import LLM, SamplingParams
from nanovllm.config import VllmConfig
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.faults import plant

PROMPT = [5, 6, 7, 8, 9]


class OnlyOneToken(LogitsProcessor):
    """Rows whose parameters name a token get no other."""

    @classmethod
    def validate_params(cls, params):
        if params.extra_args and not isinstance(params.extra_args.get("token", 0), int):
            raise ValueError(f"token must be a number, found {params.extra_args['token']}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        assert vllm_config.model_config.max_model_len == SMALL["max_model_len"] and device.type == "cpu"
        self.tokens: dict[int, int] = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.tokens, batch_update, lambda params, *_: (params.extra_args or {}).get("token"))

    def apply(self, logits):
        for row, token in self.tokens.items():
            kept = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


class CountsUp(AdapterLogitsProcessor):
    """With three arguments: the tokens behind the prompt's last one. With two: the other way, from 100."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def up(prompt, generated, row):
            return one(row, prompt[-1] + 1 + len(generated))

        def down(generated, row):
            return one(row, 100 - len(generated))

        return {"up": up, "down": down}.get((params.extra_args or {}).get("way"))


def one(row, token):
    only = torch.full_like(row, -torch.inf)
    only[token] = 0.0
    return only


class Steps(LogitsProcessor):
    """A state that grows by each step: token number N is N."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.num_steps = 0

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is not None:
            [(row, _, prompt, generated)] = batch_update.added
            assert (row, prompt, batch_update.batch_size) == (0, PROMPT, 1)
            self.num_steps, self.generated = len(generated), generated
        else:
            self.num_steps += 1
        assert self.num_steps == len(self.generated)

    def apply(self, logits):
        return one(logits[0], 10 + self.num_steps).unsqueeze(0)


@pytest.fixture
def make(checkpoint):
    return lambda *classes, **options: LLM(str(checkpoint()), **SMALL | options, logits_processors=list(classes))


def params(temperature=0.0, **extra_args):
    return SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, seed=1, extra_args=extra_args or None)


def tokens(outputs):
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_who_asks_is_served_and_nobody_else(make):
    plain = tokens(make().generate([PROMPT] * 2, [params(), params(0.9)]))
    llm = make(OnlyOneToken, f"{__name__}:CountsUp")
    given = [params(), params(token=17), params(way="up"), params(0.9), params(0.9, token=23), params(way="down")]
    one, only, up, drawn, drawn_only, down = tokens(llm.generate([PROMPT] * 6, given))
    assert [one, drawn] == plain
    assert only == [17] * 6 and drawn_only == [23] * 6
    assert up == [10, 11, 12, 13, 14, 15] and down == [100, 99, 98, 97, 96, 95]


def test_a_state_survives_preemption_and_a_failed_step(make, monkeypatch):
    llm = make(Steps, num_gpu_blocks_override=8, block_size=4, max_model_len=24)
    expected = [[10, 11, 12, 13, 14, 15]] * 3
    assert tokens(llm.generate([PROMPT] * 3, params())) == expected
    growing = llm.stream(PROMPT, params())
    next(growing)

    plant(monkeypatch, llm.engine, "update", {1}, RuntimeError("planted"), after=True)
    with pytest.raises(RuntimeError, match="planted"):
        next(growing)
    assert tokens(llm.generate([PROMPT] * 3, params())) == expected


def test_what_cannot_work_is_refused(make):
    expect("must be classes derived from", make, len)
    expect("must be classes derived from", make, OnlyOneToken.__mro__[-1])
    expect("'nowhere:X' cannot be imported", make, "nowhere:X")
    expect("token must be a number, found x", make(OnlyOneToken).generate, [PROMPT], params(token="x"))
    expect("extra_args must be a dict, found 5", SamplingParams, extra_args=5)


def test_one_that_fails_ends_its_own_request(make):
    class Fails(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, given):
            return None if given.extra_args is None else lambda generated, row: row[len(generated) :]

    good, bad = make(Fails).generate([PROMPT] * 2, [params(), params(x=1)])
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) == 1


def test_rows_that_come_go_and_move():
    def update(removed=(), added=(), moved=()):
        given = [(row, value, None, []) for row, value in added]
        return process_dict_updates(state, BatchUpdate(4, removed, given, moved), lambda value, *_: value)

    state: dict[int, str] = {}
    assert update(added=[(0, "a"), (1, None), (2, "c")]) and state == {0: "a", 2: "c"}
    assert not process_dict_updates(state, None, lambda *_: "never")
    assert update(moved=[(2, 1, MoveDirectionality.UNIDIRECTIONAL)]) and state == {0: "a", 1: "c"}
    assert update(moved=[(0, 1, MoveDirectionality.SWAP)]) and state == {0: "c", 1: "a"}
    assert update(moved=[(3, 1, MoveDirectionality.SWAP)]) and state == {0: "c", 3: "a"}
    assert update(removed=[3], added=[(0, None)]) and state == {}
