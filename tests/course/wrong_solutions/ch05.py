"""Wrong solutions of chapter 5."""

from tests.course.wrong_solutions import Edit

PARAMS = "params = seq.sampling_params"
GENERATED = "seq.num_generated_tokens == params.max_tokens"
STOPS = "in params.stop_token_ids"
FOUND = """
# Only now: allocation has set num_computed_tokens to what it found in the cache.
num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
"""
LIMIT = "scheduler.max_num_batched_tokens"
# These go on without a second look: after a request that does not fit, and with one that was preempted.
STOPS_HERE = """
if not manager.allocate_with_prefix(seq):
    break
"""
NEXT = """
if not manager.allocate_with_prefix(seq):
    scheduler.waiting.rotate(-1)
    if not manager.allocate_with_prefix(seq := scheduler.waiting[0]):
        break
"""
GAVE_WAY = """
if seq in preempted:
    break
"""

WRONG = {
    "finish_reason": [
        Edit("appends_it_again", PARAMS, f"{PARAMS}\nseq.append(token_id)", "finish_reason only answers"),
        Edit("names_eos", 'return "stop", None', 'return "stop", token_id', "is no stop_reason"),
        Edit("counts_the_prompt", GENERATED, "len(seq.tokens) == params.max_tokens", "max_tokens counts generated"),
        Edit("ignore_eos_ignores_all", STOPS, f"{STOPS} and not params.ignore_eos", "EOS only"),
        Edit("beyond_the_model", ">= scheduler.max_model_len", "> scheduler.max_model_len", "counts prompt and output"),
        Edit("length_first", PARAMS, f'{PARAMS}\nif {GENERATED}:\n    return "length", None', "before a length"),
        Edit("min_tokens_one_too_few", "> params.min_tokens", ">= params.min_tokens", "the last of the first"),
    ],
    "preempt_last": [
        Edit("oldest", "running.pop()", "running.pop(0)", "the last of running is the youngest"),
        Edit("tail_of_the_queue", "waiting.appendleft(seq)", "waiting.append(seq)", "head of waiting"),
        Edit("keeps_blocks", "scheduler.block_manager.free(seq)", "seq.block_table = []", "must go back to the pool"),
        Edit("forgets_num_cached", " = seq.num_cached_tokens = 0", " = 0", "must be 0"),
        Edit("does_not_count", "scheduler.num_preemptions += 1", "pass", "num_preemptions counts"),
    ],
    "schedule": [
        Edit("forgets_the_state", "seq.status = SequenceStatus.PREFILL", "pass", "gets status PREFILL"),
        Edit("prefill_only_steps", "budget == 0 or", "budget == 0 or scheduler.waiting or", "newcomers in the same"),
        Edit("whole_prompt_after_a_hit", FOUND, FOUND.replace(" - seq.num_computed_tokens", ""), "is computed already"),
        Edit("budget_for_prompts_only", FOUND, FOUND.replace("budget", LIMIT), "the decodes of A and B included"),
        Edit("ignores_max_num_seqs", " and len(scheduler.running) < scheduler.max_num_seqs", "", "two may run"),
        Edit("admits_although_preempted", " and not preempted", "", "a step that preempted admits nobody"),
        Edit("overtakes", STOPS_HERE, NEXT, "nobody overtakes"),
        Edit("schedules_the_preempted", GAVE_WAY, "", "whoever was preempted in this step has none"),
    ],
}
