"""Wrong solutions of chapter 2."""

from tests.course.wrong_solutions import Edit

ROLL_BACK = "engine.scheduler.roll_back(output)"
EACH = "for request in progressed.values() if request.finished or request.stream]"
NEWEST = "engine.tokenizer.decode(output.outputs[0].token_ids[-1:]), text"

WRONG = {
    "engine_step": [
        Edit("counts_idle_steps", "return []", "engine.stats.num_steps += 1\nreturn []", "is not counted"),
        Edit("never_finishes", "engine.forget(finished)", "pass", "engine.forget for every request that is finished"),
        Edit("finishes_once_a_sample", "[request.request_id] =", "[chunk.seq.seq_id] =", "make one output"),
        Edit("shows_all_streams", EACH, EACH.replace("progressed", "engine.requests"), "only requests that got one"),
        Edit("ignores_stop_strings", 'engine.scheduler.finish(chunk.seq, "stop", stop)', "pass", "after its stop"),
        Edit("never_rolls_back", ROLL_BACK, "pass", "after RuntimeError the sequences"),
        Edit("swallows_the_error", "raise", "return []", "must reach its caller"),
        Edit("catches_exception_only", "BaseException:", "Exception:", "after KeyboardInterrupt the sequences"),
    ],
    "stream_text": [
        Edit("cumulative", "text[len(shown) :], text", "text, text", "only what is new"),
        Edit("all_at_the_end", "if delta:", "if finished:\n    yield from text\nif False:", "whole text was there"),
        Edit("token_by_token", "text[len(shown) :], text", NEWEST, "half a character"),
        Edit("checks_at_first_next", "return _deltas", "yield from _deltas", "runs nothing before the"),
        Edit("aborts_at_close_only", "finally:", "except GeneratorExit:", "after a step that failed"),
        Edit("takes_any_output", "if output.request_id != request_id:", "if False:", "with your request_id only"),
    ],
}
