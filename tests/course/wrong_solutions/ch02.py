"""Wrong solutions of chapter 2."""

from tests.course.wrong_solutions import Edit

SEQS = "sample.seq for request in engine.requests.values() for sample in request.samples if not sample.finished"
COUNT = "engine.stats.count_step(scheduled, len(finished), time.perf_counter() - started)"
EACH = "for request in progressed.values() if request.finished or request.stream]"
NEWEST = "engine.tokenizer.decode(output.outputs[0].token_ids[-1:]), text"

WRONG = {
    "engine_step": [
        Edit("counts_idle_steps", COUNT, f"{COUNT}\nengine.stats.num_steps += not scheduled.chunks", "is not counted"),
        Edit("counts_outputs", COUNT, COUNT.replace("finished", "outputs"), "that goes on is no finished request"),
        Edit(
            "never_finishes", "del engine.requests[request.request_id]", "pass", "delete every request that is finished"
        ),
        Edit(
            "finishes_once_a_sample",
            "progressed[request.request_id] =",
            "progressed[str(chunk.seq.seq_id)] =",
            "each request is deleted once",
        ),
        Edit("shows_all_streams", EACH, EACH.replace("progressed", "engine.requests"), "only requests that got one"),
        Edit("takes_prompts_for_tokens", "if chunk.reaches_end:", "if True:", "whose reaches_end is True"),
        Edit(
            "lets_us_do_it", "engine.scheduler.update(", "engine.update(scheduled, result) or (", "you write yourself"
        ),
        Edit("never_restarts", "engine.restart()", "pass", "after RuntimeError the sequences"),
        Edit(
            "keeps_the_tokens",
            "engine.restart()",
            f"engine.scheduler.restart({SEQS})",
            "that the failed step had ended",
        ),
        Edit("swallows_the_error", "raise", "return []", "must reach its caller"),
        Edit("catches_exception_only", "BaseException:", "Exception:", "after KeyboardInterrupt the sequences"),
    ],
    "stream_text": [
        Edit("cumulative", "text[len(shown) :], text", "text, text", "only what is new"),
        Edit("all_at_the_end", "if delta:", "if finished:\n    yield from text\nif False:", "whole text was there"),
        Edit("token_by_token", "text[len(shown) :], text", NEWEST, "half a character"),
        Edit("empty_pieces", "if delta:", "if True:", "never the empty string"),
        Edit("checks_at_first_next", "return _deltas", "yield from _deltas", "runs nothing before the"),
        Edit("aborts_at_close_only", "finally:", "except GeneratorExit:", "after a step that failed"),
        Edit("takes_any_output", "if output.request_id != request_id:", "if False:", "with your request_id only"),
    ],
}
