"""Wrong solutions of chapter 5."""

from tests.course.wrong_solutions import Edit

PARAMS = "params = seq.sampling_params"
GENERATED = "seq.num_generated_tokens == params.max_tokens"
STOPS = "in params.stop_token_ids"
CHECKER = "if seq.stop_checker is not None"
HEARS = (
    "if seq.stop_checker is not None and token_id in scheduler.eos_token_ids:\n    seq.stop_checker.append([token_id])"
)
LATE = "seq.num_generated_tokens > params.min_tokens"
FOUND = """
# Only now: allocation has set num_computed_tokens to what it found in the cache.
num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, threshold, budget)
"""
RUNS = """
if budget == 0 or seq in preempted:
    break
num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, threshold, budget)
"""
CUT = FOUND.replace(", budget)", ", budget)\nbudget = num_tokens if num_tokens == threshold else budget")
ASKS = "\nnum_tokens = scheduler.num_new_tokens(seq, budget)\n"
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

WAITS = "insort_left(scheduler.waiting, seq, key=by_priority)"
COMES_IN = "insort_right(scheduler.running, seq, key=by_priority)"

WRONG = {
    "finish_reason": [
        Edit("appends_it_again", PARAMS, f"{PARAMS}\nseq.append(token_id)", "finish_reason only answers"),
        Edit("forgets_to_return", "return None, None", "pass", "got:      None"),
        Edit("returns_a_list", "return None, None", "return [None, None]", "return a tuple"),
        Edit("names_eos", 'return "stop", None', 'return "stop", token_id', "is no stop_reason"),
        Edit("counts_the_prompt", GENERATED, "len(seq.tokens) == params.max_tokens", "max_tokens counts generated"),
        Edit("ignore_eos_ignores_all", STOPS, f"{STOPS} and not params.ignore_eos", "EOS only"),
        Edit("beyond_the_model", ">= scheduler.max_model_len", "> scheduler.max_model_len", "counts prompt and output"),
        Edit("length_first", PARAMS, f'{PARAMS}\nif {GENERATED}:\n    return "length", None', "before a length"),
        Edit(
            "model_length_first",
            PARAMS,
            f'{PARAMS}\nif len(seq.tokens) >= scheduler.max_model_len:\n    return "length", None',
            "before a length",
        ),
        Edit("tells_the_checker_of_eos", PARAMS, f"{PARAMS}\n{HEARS}", "is no part of the text"),
        Edit("min_tokens_hold_back_text", CHECKER, f"{CHECKER} and {LATE}", "so it belongs to the text"),
        Edit("length_before_strings", CHECKER, f"{CHECKER} and {GENERATED.replace('==', '!=')}", "a stop comes before"),
        Edit("no_token_no_matter", "token_id == NO_TOKEN", "False", "NO_TOKEN is no token"),
        Edit("min_tokens_one_too_few", "> params.min_tokens", ">= params.min_tokens", "the last of the first"),
    ],
    "preempt_last": [
        Edit("oldest", "running.pop()", "running.pop(0)", "the last of running is the youngest"),
        Edit("tail_of_the_queue", WAITS, "scheduler.waiting.append(seq)", "head of waiting"),
        Edit("head_of_all", WAITS, "scheduler.waiting.appendleft(seq)", "behind all that are more important"),
        Edit("behind_its_priority", "insort_left(", "insort_right(", "to the head of waiting"),
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
        Edit(
            "admits_although_preempted",
            " and not preempted",
            "",
            "a step that preempted admits nobody",
            "What beginners get wrong",
        ),
        Edit("end_of_running", COMES_IN, "scheduler.running.append(seq)", "running is sorted by priority"),
        Edit("first_of_its_priority", COMES_IN, COMES_IN.replace("_right", "_left"), "oldest first"),
        Edit(
            "threshold_for_newcomers_only", RUNS, RUNS.replace("threshold, ", ""), "are in the middle of their prompts"
        ),
        Edit("threshold_ends_the_step", FOUND, CUT, "to the next who waits"),
        Edit("ours", FOUND, ASKS, "num_new_tokens does a part of this task"),
        Edit("overtakes", STOPS_HERE, NEXT, "nobody overtakes"),
        Edit("schedules_the_preempted", GAVE_WAY, "", "whoever was preempted in this step has none"),
    ],
}
