"""Beam search over ordinary requests of one token each. The prefix cache makes them cheap: K/V of a beam's full blocks
is there.

As vLLM does it: each step asks for the 2 * beam_width most likely next tokens of each beam. Continuations by EOS are
complete; of the others the beam_width with the best scores are the next beams. After max_tokens steps the best of all
are the answer.
"""

from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_number, make_all
from nanovllm.features.beam_search.params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.prompts import one_per_prompt, split_prompts
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM


class Candidate(NamedTuple):
    """A beam and a token that may follow it. entries: those of all tokens that may follow."""

    score: float
    beam: BeamSearchSequence
    token_id: int
    entries: dict[int, Logprob]


class Search:
    """The search for one prompt's continuations. beams have the same number of tokens and go on; completed ones do not.

    adapter: what its lora_request stood for when it began, or None. priority: of its requests
    """

    def __init__(
        self,
        first: BeamSearchSequence,
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        adapter: Any = None,
        priority: int = 0,
    ) -> None:
        self.beams, self.completed = [first], list[BeamSearchSequence]()
        self.params, self.eos_token_ids = params, eos_token_ids
        self.adapter, self.priority = adapter, priority

    def score(self, beam: BeamSearchSequence) -> float:
        return self.score_of(beam.cum_logprob, len(beam.tokens), beam.tokens[-1])

    def score_of(self, cum_logprob: float, num_tokens: int, last_token: int) -> float:
        """EOS does not count as a token of the text."""
        return cum_logprob / max(num_tokens - (last_token in self.eos_token_ids), 1) ** self.params.length_penalty

    def best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self.score, reverse=True)[: self.params.beam_width]

    def take_in(self, outputs: list[RequestOutput]) -> None:
        """What may follow each of the beams. Tokens are copied only for those that can still be among the best."""
        going_on, ended = list[Candidate](), list[Candidate]()
        for beam, output in zip(self.beams, outputs, strict=True):
            [sample] = output.outputs
            if sample.finish_reason in ("error", "abort"):
                beam.finish_reason = sample.finish_reason
                self.completed.append(beam)
                continue
            [entries] = sample.logprobs  # pyrefly: ignore[not-iterable]
            for token_id, entry in entries.items():
                score = self.score_of(beam.cum_logprob + entry.logprob, len(beam.tokens) + 1, token_id)
                is_complete = token_id in self.eos_token_ids and not self.params.ignore_eos
                (ended if is_complete else going_on).append(Candidate(score, beam, token_id, entries))
        self.beams = self.longer(going_on)
        self.completed = self.best(self.completed + self.longer(ended))

    def longer(self, candidates: list[Candidate]) -> list[BeamSearchSequence]:
        """The best of them, as beams."""
        best = sorted(candidates, key=attrgetter("score"), reverse=True)[: self.params.beam_width]
        return [
            BeamSearchSequence(
                orig_prompt=beam.orig_prompt,
                tokens=[*beam.tokens, token_id],
                logprobs=[*beam.logprobs, entries],
                lora_request=beam.lora_request,
                cum_logprob=beam.cum_logprob + entries[token_id].logprob,
            )
            for _, beam, token_id, entries in best
        ]

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        best = self.best(self.completed + self.beams)
        for beam in best:
            beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=self.params.skip_special_tokens)
        return BeamSearchOutput(best)


def beam_search(
    llm: "LLM",
    prompts: Any,
    params: BeamSearchParams,
    lora_request: Any = None,
    priority: Any = None,
    use_tqdm: bool = False,
    concurrency_limit: int | None = None,
    **unknown: Any,
) -> list[BeamSearchOutput]:
    """See LLM.beam_search. max_model_len ends a search as max_tokens does."""
    known_names(unknown, ("lora_request", "priority", "use_tqdm", "concurrency_limit"), "beam_search")
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params must be BeamSearchParams, found {type(params).__name__}")
    engine, tokenizer, given = llm.engine, llm.get_tokenizer(), split_prompts(prompts)
    num_logprobs = min(2 * params.beam_width, engine.model_config.vocab_size)
    one_token = SamplingParams(max_tokens=1, temperature=params.temperature, logprobs=num_logprobs, detokenize=False)
    adapters = one_per_prompt("lora_request", lora_request, len(given))
    priorities = one_per_prompt("priority", priority, len(given))

    def begin(each: tuple[Any, Any, Any]) -> Search:
        prompt, adapter, priority = each
        request = engine.make_request(prompt, one_token, adapter, priority)
        seq, tokens = request.samples[0].seq, request.prompt_token_ids
        # All that its beams' requests need.
        prompt: dict[str, Any] = {"prompt": request.prompt, "prompt_token_ids": tokens, "cache_salt": seq.cache_salt}
        if (images := seq.parts.get("images")) is not None:
            prompt["multi_modal_data"] = {"image": images}
        first = BeamSearchSequence(prompt, tokens, [], adapter)
        eos_token_ids = engine.model_config.eos_token_ids | {tokenizer.eos_token_id}
        return Search(first, params, eos_token_ids, seq.parts.get("adapter"), seq.priority)

    searches = make_all("prompts", list(zip(given, adapters, priorities, strict=True)), begin)
    if concurrency_limit is not None:
        check_number("concurrency_limit", concurrency_limit, Integral, 1)
    num_at_a_time = concurrency_limit or max(len(searches), 1)
    with llm.turns.progress(len(searches), use_tqdm) as advance:
        for start in range(0, len(searches), num_at_a_time):
            active = searches[start : start + num_at_a_time]
            num_done = start + len(active)
            for _ in range(params.max_tokens):
                active = [s for s in active if s.beams and len(s.beams[0].tokens) < engine.scheduler.max_model_len]
                advance(num_done - len(active))
                if not active:
                    break
                beams = [beam for search in active for beam in search.beams]
                asked = [beam.orig_prompt | {"prompt_token_ids": beam.tokens} for beam in beams]
                adapters = [search.adapter for search in active for _ in search.beams]
                priorities = [search.priority for search in active for _ in search.beams]
                outputs = llm.generate(asked, one_token, False, adapters, priorities)
                for search in active:
                    search.take_in([outputs.pop(0) for _ in search.beams])
            advance(num_done)
    return [search.output(tokenizer) for search in searches]
