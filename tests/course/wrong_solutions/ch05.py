"""Wrong solutions of chapter 5."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "finish_reason": [
        Edit("names_eos", 'return "stop", None', 'return "stop", token_id', "is no stop_reason"),
        Edit(
            "no_min_tokens",
            "if seq.num_generated_tokens > params.min_tokens:",
            "if True:",
            "one of the first min_tokens",
        ),
        Edit(
            "min_tokens_one_too_few", "> params.min_tokens", ">= params.min_tokens", "the last of the first min_tokens"
        ),
        Edit(
            "min_tokens_one_too_many",
            "> params.min_tokens",
            "> params.min_tokens + 1",
            "min_tokens have come before it",
        ),
        Edit(
            "one_token_too_many",
            "seq.num_generated_tokens == params.max_tokens",
            "seq.num_generated_tokens - 1 == params.max_tokens",
            "max_tokens counts generated tokens",
        ),
        Edit(
            "counts_the_prompt",
            "seq.num_generated_tokens == params.max_tokens",
            "len(seq.tokens) == params.max_tokens",
            "max_tokens counts generated tokens",
        ),
        Edit(
            "beyond_the_model",
            "len(seq.tokens) >= scheduler.max_model_len",
            "len(seq.tokens) > scheduler.max_model_len",
            "max_model_len counts prompt and output",
        ),
        Edit(
            "length_first",
            "params = seq.sampling_params",
            """
            params = seq.sampling_params
            if seq.num_generated_tokens == params.max_tokens:
                return "length", None
            """,
            "a stop comes before a length",
        ),
        Edit(
            "min_tokens_before_everything",
            "params = seq.sampling_params",
            """
            params = seq.sampling_params
            if seq.num_generated_tokens <= params.min_tokens:
                return None, None
            """,
            "never a length",
        ),
        Edit(
            "ignore_eos_ignores_all",
            "if token_id in params.stop_token_ids:",
            "if token_id in params.stop_token_ids and not params.ignore_eos:",
            "ignore_eos is about EOS only",
        ),
        Edit(
            "appends_it_again",
            "params = seq.sampling_params",
            "params = seq.sampling_params\nseq.append(token_id)",
            "finish_reason only answers",
        ),
    ],
    "preempt_last": [
        Edit("oldest", "running.pop()", "running.pop(0)", "the last of running is the youngest"),
        Edit("returns_nothing", "return seq", "return None", "return the sequence that you preempted"),
        Edit("tail_of_the_queue", "waiting.appendleft(seq)", "waiting.append(seq)", "head of waiting"),
        Edit("keeps_blocks", "scheduler.block_manager.free(seq)", "pass", "must go back to the pool"),
        Edit(
            "only_empties_the_table",
            "scheduler.block_manager.free(seq)",
            "seq.block_table = []",
            "must go back to the pool",
        ),
        Edit("keeps_num_computed", "seq.num_computed_tokens = seq", "seq", "must be 0"),
        Edit(
            "forgets_num_cached",
            "seq.num_computed_tokens = seq.num_cached_tokens",
            "seq.num_computed_tokens",
            "must be 0",
        ),
        Edit("keeps_status", "seq.status = SequenceStatus.WAITING", "pass", "its status must say that it waits"),
        Edit(
            "drops_what_it_generated",
            "seq.status = SequenceStatus.WAITING",
            "seq.status = SequenceStatus.WAITING\nseq.tokens = seq.tokens[: seq.num_prompt_tokens]",
            "the generated ones too, must be kept",
        ),
        Edit(
            "aborts_it",
            "seq = scheduler.running.pop()",
            """
            seq = scheduler.running[-1]
            scheduler.finish(seq, "abort")
            return seq
            """,
            "head of waiting",
        ),
        Edit("does_not_count", "scheduler.num_preemptions += 1", "pass", "num_preemptions counts"),
    ],
    "schedule": [
        Edit(
            "whole_prompt_after_a_hit",
            """
            # Only now: allocation has set num_computed_tokens to what it found in the cache.
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
            """,
            "num_tokens = min(len(seq.tokens), budget)",
            "found in the cache is computed already",
        ),
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
        Edit(
            "preempts_the_oldest",
            "preempted.append(scheduler.preempt_last())",
            """
            scheduler.running.append(scheduler.running.pop(0))
            preempted.append(scheduler.preempt_last())
            """,
            "the last of running is preempted",
        ),
        Edit("ignores_max_num_seqs", " and len(scheduler.running) < scheduler.max_num_seqs", "", "two may run"),
        Edit(
            "budget_for_prompts_only",
            """
            # Only now: allocation has set num_computed_tokens to what it found in the cache.
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
            """,
            """
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, scheduler.max_num_batched_tokens)
            """,
            "the decodes of A and B included",
        ),
        Edit(
            "schedules_the_preempted",  # chooses first, asks for blocks later, and never looks at its choice again
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
        Edit("forgets_the_state", "seq.status = SequenceStatus.PREFILL", "pass", "gets status PREFILL"),
        Edit(
            "prefill_only_steps",  # as in an engine without chunked prefill: a newcomer's step is for newcomers
            "while budget > 0 and len(chunks) < len(scheduler.running):",
            "while budget > 0 and len(chunks) < len(scheduler.running) and not scheduler.waiting:",
            "newcomers in the same step",
        ),
        Edit(
            "counts_chunks_as_tokens",
            "scheduler.max_num_batched_tokens - budget)",
            "len(chunks))",
            "num_tokens must be the number of tokens",
        ),
        Edit(
            "returns_chunks",
            "return SchedulerOutput(chunks, preempted, scheduler.max_num_batched_tokens - budget)",
            "return chunks",
            "must answer with a SchedulerOutput",
        ),
    ],
}
