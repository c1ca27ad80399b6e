"""Lines of OpenAI's batch format, and their way through the engine. Their bodies: serving/openai/openai_request.py.

answer_lines() is the whole of a batch job apart from files: lines in, answers out, as they finish. `nanovllm run-batch`
runs it over a file, examples/ray_data_batch.py in the actors of a cluster.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from nanovllm import LLM, SamplingParams
from nanovllm.checks.names import neutral_options
from nanovllm.checks.values import HIGHEST_SEED
from nanovllm.engine import SEEDS_PER_ENGINE_SEED
from nanovllm.features.pooling.requests import make_request as make_pooling_request
from nanovllm.request import Request
from nanovllm.serving.openai.answer import Answer, response_body
from nanovllm.serving.openai.fields import INSIDE_OF_PAIRS, warning_of, without_unknown
from nanovllm.serving.openai.json_lines import explain, parse_json
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL, check_answers, translate
from nanovllm.serving.openai.pooling import BODY
from nanovllm.serving.openai.pooling import KNOWN_BY_URL as KNOWN_OF_POOLING
from nanovllm.serving.openai.pooling import URLS as POOLING_URLS
from nanovllm.serving.openai.pooling import translate as translate_pooling
from nanovllm.serving.openai.shown import Shown

Respond = Callable[[str, list[Any]], dict[str, Any]]

LINE_FIELDS = {"custom_id", "method", "url", "body"}
# Of the lines that are answered together; a line with which one of these is passed is the last of them.
WINDOW_SAMPLES = 1024
WINDOW_TOKENS = 1_000_000
WINDOW_BYTES = 8_000_000
WINDOW_IMAGE_BYTES = 1 << 29


class CustomIds:
    """The ids of a job's lines, each of which belongs to the first line that has it."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}

    def claim(self, custom_id: str, line_number: int) -> None:
        """Raises ValueError if another line has claimed it."""
        first = self.lines.setdefault(custom_id, line_number)
        if first != line_number:
            raise ValueError(f"custom_id {custom_id!r:.80} is that of line {first} already")


@dataclass(slots=True, eq=False)
class _Line:
    """A line in the engine.

    translate   makes a request for each of its prompts, and respond(id, their outputs), which makes the answer's body;
                called again for another try
    """

    number: int
    custom_id: str
    warning: str
    translate: Callable[[], tuple[Sequence[Request], Respond]]
    requests: Sequence[Request] = field(init=False)
    respond: Respond = field(init=False)
    outputs: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.requests, self.respond = self.translate()
        self.outputs = {}

    def has_started(self) -> bool:
        return any(request.metrics.first_scheduled_time is not None for request in self.requests)

    def size(self) -> tuple[int, int, int]:
        """Samples, the tokens that they hold when they begin, and the bytes of their images."""
        num_samples = sum(request.params.n for request in self.requests)
        num_tokens = sum(len(request.prompt_token_ids) * request.params.n for request in self.requests)
        num_image_bytes = sum(request.num_held_bytes for request in self.requests)
        return num_samples, num_tokens, num_image_bytes

    def answer(self) -> Answer:
        try:
            check_answers(self.requests)
            outputs = [self.outputs[request.request_id] for request in self.requests]
            return Answer(self.number, self.custom_id, self.respond(self.custom_id, outputs), warning=self.warning)
        except BaseException as error:
            return self.failed(explain(error))

    def failed(self, reason: str) -> Answer:
        return Answer(self.number, self.custom_id, None, f"line {self.number}: {reason}")


def answer_lines(
    llm: LLM,
    lines: Iterable[tuple[int, bytes]],
    served_names: tuple[str, ...] = (),
    *,
    claim_id: Callable[[str, int], None] = lambda custom_id, line_number: None,
    num_signals: Callable[[], int] = lambda: 0,
) -> Iterator[list[Answer]]:
    """Answer numbered lines; yields, after every step of the engine, the answers that it finished (perhaps none).

    Lines enter the engine a window at a time, as soon as the one before is nearly used up, so that memory stays
    bounded and the batch full. A window is admitted in prefix order (LLMEngine.enqueue). A line that cannot be run
    is answered by an error, whatever it was that failed. A prompt without a seed gets one from its line's custom_id and
    its place there, so that its answer depends neither on the lines beside it nor on where a job was interrupted.

    claim_id raises ValueError for a custom_id that an earlier line has. num_signals: 1 asks to finish what has started
    and leave the rest, 2 to drop all. Raises what `lines` raises, and RuntimeError when the engine answers nothing
    any more; the lines that have no answer then are nobody's fault.
    """
    # Read one by one: ids are claimed in the order of the lines.
    source = ((len(raw), _read_line(llm, int(number), raw, served_names, claim_id)) for number, raw in lines)
    batch = _Batch(llm)
    more = True
    try:
        while more or batch.lines():
            if num_signals() > 1:
                return
            if num_signals():
                more = False
                batch.drop_what_has_not_started()
            answers: list[Answer] = []
            if more and batch.has_room():
                window = list(_window(source))
                more = bool(window)
                answers = [line for line in window if isinstance(line, Answer)]
                batch.next = [line for line in window if isinstance(line, _Line)]
            yield answers + batch.step()
    finally:
        batch.drop(batch.lines())


def _window(source: Iterator[tuple[int, _Line | Answer]]) -> Iterator[_Line | Answer]:
    """Lines until there are so many samples, tokens or bytes, images' included; an error counts as a sample."""
    num_samples = num_tokens = num_bytes = num_image_bytes = 0
    for length, line in source:
        yield line
        samples, tokens, image_bytes = line.size() if isinstance(line, _Line) else (1, 0, 0)
        num_samples += samples
        num_tokens += tokens
        num_bytes += length
        num_image_bytes += image_bytes
        is_long = num_samples >= WINDOW_SAMPLES or num_tokens > WINDOW_TOKENS or num_bytes > WINDOW_BYTES
        if is_long or num_image_bytes > WINDOW_IMAGE_BYTES:
            return


class _Batch:
    """The lines that have been read and not answered.

    A step that fails may be the doing of one line. So those that had started are tried again, each alone, and one that
    fails alone is answered by an error: unless the engine can do nothing else either.

    in_flight   request id -> its line
    suspects    one of them has made a step fail; the first one is in flight, or the next to be
    next        wait for the suspects, or for the next step
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.in_flight: dict[str, _Line] = {}
        self.suspects: list[_Line] = []
        self.next: list[_Line] = []

    def lines(self) -> list[_Line]:
        return list(dict.fromkeys([*self.in_flight.values(), *self.suspects, *self.next]))

    def has_room(self) -> bool:
        is_full = len(self.engine.scheduler.waiting) >= self.engine.config.max_num_seqs
        return not (is_full or self.suspects or self.next)

    def step(self) -> list[Answer]:
        try:
            if not (self.suspects and self.in_flight):
                new = self.suspects[:1] or self.next
                self.engine.enqueue([request for line in new for request in line.requests])
                self.in_flight.update({request.request_id: line for line in new for request in line.requests})
                if not self.suspects:
                    self.next = []
            outputs = self.engine.step()
        except BaseException as error:
            return self._retry(error, explain(error))
        answers = []
        for output in outputs:
            if (line := self.in_flight.pop(output.request_id, None)) is None:
                continue  # somebody else's
            line.outputs[output.request_id] = output
            if len(line.outputs) == len(line.requests):
                self.suspects = [suspect for suspect in self.suspects if suspect is not line]
                answers.append(line.answer())
        return answers

    def drop(self, lines: list[_Line]) -> None:
        requests = [request for line in lines for request in line.requests]
        self.engine.abort_requests(requests)
        for request in requests:
            self.in_flight.pop(request.request_id, None)
        dropped = set(lines)
        self.suspects = [line for line in self.suspects if line not in dropped]
        self.next = [line for line in self.next if line not in dropped]

    def drop_what_has_not_started(self) -> None:
        self.drop([line for line in self.lines() if not line.has_started()])

    def _retry(self, error: BaseException, reason: str) -> list[Answer]:
        """A step has failed. Returns the answers of lines that are not tried again: one was alone in it."""
        if self.suspects:
            culprit = self.suspects[0]
            self.drop([culprit])
            self._check_engine(error, reason)
            return [culprit.failed(reason)]
        lines = self.lines()
        started = {line for line in lines if line.has_started()} or set(lines)
        self.drop(lines)
        answers = []
        for line in lines:
            try:
                line.start_over()
            except BaseException as other:  # an image that is no longer there, for example
                answers.append(line.failed(explain(other)))
            else:
                (self.suspects if line in started else self.next).append(line)
        return answers

    def _check_engine(self, error: BaseException, reason: str) -> None:
        """Raise RuntimeError unless one token can be computed: the engine has ended, or the device is lost."""
        if self.engine.model_config.pooling is not None:
            request: Request = make_pooling_request(self.engine, [0])
        else:
            request = self.engine.make_request([0], SamplingParams(max_tokens=1, temperature=0.0))
        try:
            self.engine.enqueue([request])
            while not request.finished:
                self.engine.step()
        except BaseException as other:
            explain(other)
            raise RuntimeError(f"the engine fails, whatever it is asked: {reason}") from error
        finally:
            self.engine.abort_requests([request])


# -- a line in --------------------------------------------------------------------------------------------------------


def _read_line(
    llm: LLM, number: int, raw: bytes, served_names: tuple[str, ...], claim_id: Callable[[str, int], None]
) -> _Line | Answer:
    """The line's requests, checked and not yet queued; or the error that answers it."""
    custom_id = None
    try:
        line = parse_json(raw, "a line")
        custom_id = read_custom_id(line)
        claim_id(custom_id, number)
        for name, wanted in (("method", ("POST",)), ("url", (*KNOWN_BY_URL, *POOLING_URLS))):
            if line.get(name) not in wanted:
                raise ValueError(f"{name} must be {' or '.join(wanted)}, found {line.get(name)!r:.80}")
        if unknown := line.keys() - LINE_FIELDS:
            raise ValueError(f"a line has custom_id, method, url and body, found also {', '.join(sorted(unknown))}")
        url = line["url"]
        body: Any = line.get("body")
        if not isinstance(body, dict):
            raise ValueError(f"body must be an object, found {type(body).__name__}")
        if url in POOLING_URLS:
            known = {*KNOWN_OF_POOLING[url], *neutral_options(BODY)}
            body, left_out = without_unknown(body, known, INSIDE_OF_PAIRS)
            return _Line(
                number, custom_id, warning_of(left_out), lambda: translate_pooling(llm, url, body, served_names)
            )
        body, left_out = without_unknown(body)
        prompts, params, model, adapter, reading = translate(llm, url, body, served_names)
        params_of_prompts = [params] * len(prompts)
        if params.seed is None:
            noise = xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))
            first = llm.engine.config.seed * SEEDS_PER_ENGINE_SEED + noise
            seeds = [(first + place) % (HIGHEST_SEED + 1) for place in range(len(prompts))]
            params_of_prompts = [replace(params, seed=seed) for seed in seeds]
        shown = Shown.of(llm.get_tokenizer(), url, body, params, reading=reading)

        def make_requests() -> tuple[list[Request], Respond]:
            requests = [
                llm.engine.make_request(prompt, own, adapter, body.get("priority"))
                for prompt, own in zip(prompts, params_of_prompts, strict=True)
            ]
            shown.check_size(requests)
            return requests, lambda answer_id, outputs: response_body(answer_id, url, model, shown, outputs)

        return _Line(number, custom_id, warning_of([*left_out, *reading.left_out]), make_requests)
    except BaseException as error:
        return Answer(number, custom_id, None, f"line {number}: {explain(error)}")


def read_custom_id(line: dict[str, Any]) -> str:
    """Raises ValueError."""
    if not isinstance(custom_id := line.get("custom_id"), str):
        raise ValueError(f"custom_id must be a string, found {custom_id!r:.80}")
    return custom_id
