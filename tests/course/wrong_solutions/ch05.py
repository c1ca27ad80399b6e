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
FEW = "seq.num_generated_tokens <= params.min_tokens"
LAST_IS_OLDEST = "scheduler.running.append(scheduler.running.pop(0))"
PREEMPT = "preempted.append(scheduler.preempt_last())"

WRONG = {
    "finish_reason": [
        Edit("appends_it_again", PARAMS, f"{PARAMS}\nseq.append(token_id)", "finish_reason only answers"),
        Edit("names_eos", 'return "stop", None', 'return "stop", token_id', "is no stop_reason"),
        Edit("counts_the_prompt", GENERATED, "len(seq.tokens) == params.max_tokens", "max_tokens counts generated"),
        Edit("ignore_eos_ignores_all", STOPS, f"{STOPS} and not params.ignore_eos", "EOS only"),
        Edit("beyond_the_model", ">= scheduler.max_model_len", "> scheduler.max_model_len", "counts prompt and output"),
        Edit("length_first", PARAMS, f'{PARAMS}\nif {GENERATED}:\n    return "length", None', "before a length"),
        Edit("min_tokens_one_too_few", "> params.min_tokens", ">= params.min_tokens", "the last of the first"),
        Edit("min_tokens_one_too_many", "> params.min_tokens", "> params.min_tokens + 1", "have come before it"),
        Edit("no_min_tokens", "> params.min_tokens", "> 0", "one of the first min_tokens"),
        Edit("min_tokens_hold_all_back", PARAMS, f"{PARAMS}\nif {FEW}:\n    return None, None", "never a length"),
    ],
    "preempt_last": [
        Edit("oldest", "running.pop()", "running.pop(0)", "the last of running is the youngest"),
        Edit("returns_nothing", "return seq", "return None", "return the sequence that you preempted"),
        Edit("tail_of_the_queue", "waiting.appendleft(seq)", "waiting.append(seq)", "head of waiting"),
        Edit("keeps_blocks", "scheduler.block_manager.free(seq)", "seq.block_table = []", "must go back to the pool"),
        Edit("forgets_num_cached", " = seq.num_cached_tokens = 0", " = 0", "must be 0"),
        Edit("keeps_status", "seq.status = SequenceStatus.WAITING", "pass", "its status must say that it waits"),
        Edit("drops_a_token", "return seq", "del seq.tokens[-1]\nreturn seq", "the generated ones too, must be kept"),
        Edit("does_not_count", "scheduler.num_preemptions += 1", "pass", "num_preemptions counts"),
    ],
    "schedule": [
        Edit("returns_chunks", "return SchedulerOutput(", "return (", "must answer with a SchedulerOutput"),
        Edit("counts_chunks_as_tokens", f"{LIMIT} - budget)", "len(chunks))", "must be the number of tokens"),
        Edit("forgets_the_state", "seq.status = SequenceStatus.PREFILL", "pass", "gets status PREFILL"),
        Edit("prefill_only_steps", "> 0 and len", "> 0 and not scheduler.waiting and len", "newcomers in the same"),
        Edit("whole_prompt_after_a_hit", FOUND, FOUND.replace(" - seq.num_computed_tokens", ""), "is computed already"),
        Edit("budget_for_prompts_only", FOUND, FOUND.replace("budget", LIMIT), "the decodes of A and B included"),
        Edit("ignores_max_num_seqs", " and len(scheduler.running) < scheduler.max_num_seqs", "", "two may run"),
        Edit("admits_although_preempted", " and not preempted", "", "a step that preempted admits nobody"),
        Edit(
            "overtakes",
            """
            if not manager.allocate_with_prefix(seq):
                break
            scheduler.waiting.popleft()
            """,
            """
            seq = next((seq for seq in scheduler.waiting if manager.allocate_with_prefix(seq)), None)
            if seq is None:
                break
            scheduler.waiting.remove(seq)
            """,
            "nobody overtakes",
        ),
        Edit("preempts_the_oldest", PREEMPT, f"{LAST_IS_OLDEST}\n{PREEMPT}", "the last of running is preempted"),
        Edit(  # chooses first, asks for blocks later, and never looks at its choice again
            "schedules_the_preempted",
            """
            while budget > 0 and len(chunks) < len(scheduler.running):
                seq = scheduler.running[len(chunks)]
                num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
                if manager.append_slots(seq, num_tokens):
                    chunks.append(scheduler.make_chunk(seq, num_tokens))
                    budget -= num_tokens
                else:
                    preempted.append(scheduler.preempt_last())
            """,
            """
            for seq in list(scheduler.running):
                num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
                while scheduler.running and not manager.append_slots(seq, num_tokens):
                    preempted.append(scheduler.preempt_last())
                if num_tokens > 0:
                    chunks.append(scheduler.make_chunk(seq, num_tokens))
                    budget -= num_tokens
            """,
            "whoever was preempted in this step has none",
        ),
    ],
}
