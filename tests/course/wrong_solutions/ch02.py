"""Wrong solutions of chapter 2."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "engine_step": [
        Edit(
            "counts_idle_steps",
            """
            if not output.chunks:
                return []
            """,
            """
            if not output.chunks:
                engine.stats.num_steps += 1
                return []
            """,
            "a step without chunks is not counted",
        ),
        Edit(
            "finds_out_too_late_who_sampled",  # update() has made the sequences a token longer
            "if chunk.samples]",
            "if chunk.end == len(chunk.seq.tokens)]",
            "logprobs has an entry for each chunk whose samples is True",
        ),
        Edit("never_finishes", "engine.forget(finished)", "pass", "engine.forget for every request that is finished"),
        Edit("returns_one_output", "return outputs", "return outputs[0] if outputs else []", "a step returns a list"),
        Edit(
            "notes_after_update",
            """
            engine.note_scheduled(output, started)
            token_ids, logprobs = engine.model_runner.run(output)
            engine.scheduler.update(output, token_ids)
            """,
            """
            token_ids, logprobs = engine.model_runner.run(output)
            engine.scheduler.update(output, token_ids)
            engine.note_scheduled(output, started)
            """,
            "before update(), counts the prefill",
        ),
        Edit(
            "forgets_the_counters",
            "engine.stats.num_output_tokens += len(sampling)",
            "",
            "the counters of two requests",
        ),
        Edit(
            "ends_with_the_first_sample",
            "finished = [request for request in progressed.values() if request.finished]",
            'finished = [r for r in progressed.values() if any(s.seq.status.name == "FINISHED" for s in r.samples)]',
            "a request is finished when all",
        ),
        Edit(
            "finishes_once_a_sample",
            "progressed[request.request_id] = request",
            "progressed[chunk.seq.seq_id] = request",
            "two samples of a request that end in one step make one output",
        ),
        Edit(
            "forgets_logprobs",
            "request.take_tokens(chunk, [token_logprobs], now)",
            "request.take_tokens(chunk, [None], now)",
            "go through request.take_tokens",
        ),
        Edit(
            "forgets_streams",
            " if request.finished or request.stream]",
            " if request.finished]",
            "what the steps returned",
        ),
        Edit(
            "shows_all_streams",
            "for request in progressed.values() if request.finished or request.stream]",
            "for request in engine.requests.values() if request.finished or request.stream]",
            "only requests that got one have an output",
        ),
        Edit(
            "asks_before_taking",  # stop strings end a request later
            """
            for chunk, token_logprobs in zip(sampling, logprobs, strict=True):
                request = engine.request_of_seq[chunk.seq.seq_id]
                progressed[request.request_id] = request
                stop = request.take_tokens(chunk, [token_logprobs], now)
                if stop is not None:
                    engine.scheduler.finish(chunk.seq, "stop", stop)

            # Only now, when stop strings have been looked for in every sample.
            finished = [request for request in progressed.values() if request.finished]
            """,
            """
            finished = []
            for chunk, token_logprobs in zip(sampling, logprobs, strict=True):
                request = engine.request_of_seq[chunk.seq.seq_id]
                progressed[request.request_id] = request
                finished += [request] if request.finished else []
                stop = request.take_tokens(chunk, [token_logprobs], now)
                if stop is not None:
                    engine.scheduler.finish(chunk.seq, "stop", stop)
            """,
            "ask request.finished after the stop ",
        ),
        Edit(
            "schedules_outside_of_try",
            """
            try:
                output = engine.scheduler.schedule()
                if not output.chunks:
            """,
            """
            output = engine.scheduler.schedule()
            try:
                if not output.chunks:
            """,
            "after RuntimeError the sequences",
        ),
        Edit("never_rolls_back", "engine.scheduler.roll_back(output)", "pass", "call scheduler.roll_back"),
        Edit("swallows_the_error", "raise", "return []", "must reach its caller"),
        Edit(
            "catches_exception_only",
            "except BaseException:",
            "except Exception:",
            "after KeyboardInterrupt the sequences",
        ),
        Edit(
            "updates_outside_of_try",
            """
                engine.scheduler.update(output, token_ids)
            except BaseException:  # KeyboardInterrupt is not an Exception
                engine.scheduler.roll_back(output)
                raise
            """,
            """
            except BaseException:  # KeyboardInterrupt is not an Exception
                engine.scheduler.roll_back(output)
                raise
            engine.scheduler.update(output, token_ids)
            """,
            "after AssertionError the sequences",
        ),
    ],
    "stream_text": [
        Edit("cumulative", "delta, shown = text[len(shown) :], text", "delta = text", "only what is new"),
        Edit(
            "empty_pieces",
            """
            if delta:
                yield delta
            """,
            "\nyield delta\n",
            "never the empty string",
        ),
        Edit(
            "all_at_the_end",
            """
            if delta:
                yield delta
            """,
            """
            if finished:
                yield from text
            """,
            "came when the whole text was there",
        ),
        Edit(
            "token_by_token",
            "delta, shown = text[len(shown) :], text",
            "delta = engine.tokenizer.decode(output.outputs[0].token_ids[-1:])",
            "half a character",
        ),
        Edit(
            "checks_at_first_next",
            "return _deltas(llm.engine, request)",
            "yield from _deltas(llm.engine, request)",
            "runs nothing before the",
        ),
        Edit(
            "queues_at_the_call",
            """
                return _deltas(llm.engine, request)


            def _deltas(engine: LLMEngine, request: Request) -> Iterator[str]:
                try:
                    [request_id] = engine.enqueue([request])
            """,
            """
                [request_id] = llm.engine.enqueue([request])
                return _deltas(llm.engine, request, request_id)


            def _deltas(engine: LLMEngine, request: Request, request_id: str) -> Iterator[str]:
                try:
            """,
            "queue at the first",
        ),
        Edit(
            "never_aborts",
            "engine.abort_request(request.request_id)",
            "pass",
            "after the caller stopped early, the engine still has the request",
        ),
        Edit(
            "aborts_at_close_only",
            "finally:",
            "except GeneratorExit:",
            "after a step that failed, the engine still has the request",
        ),
        Edit(
            "takes_any_output",
            """
            if output.request_id != request_id:
                continue
            """,
            "",
            "take the outputs with your request_id only",
        ),
        Edit(
            "aborts_everybody",
            "engine.abort_request(request.request_id)",
            """
            for request_id in list(engine.requests):
                engine.abort_request(request_id)
            """,
            "is gone",
        ),
    ],
}
