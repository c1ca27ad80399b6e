"""Wrong solutions of chapter 13."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
guess
    shortest_first: counts more than
        - for n in range(min(longest, len(tokens)), shortest - 1, -1):
        + for n in range(shortest, min(longest, len(tokens)) + 1):
    stops_at_the_end: again and again
        ~ [tokens[place + i % period] for i in range(num_draft_tokens)] => tokens[place : place + num_draft_tokens]
    begins_one_late: was followed by
        ~ place + i % period => place + (i + 1) % period
    reads_all_again: does not go through the text again
        ~ range(memory.get("num_tokens", 0), len(tokens)): => range(len(tokens)):
    ignores_failed_steps: forget what was noted
        ~ if len(tokens) < memory.get("num_tokens", 0): => if False:
    keeps_what_is_gone: forget what was noted
        ~ memory.clear() => memory["num_tokens"] = 0
accept_tokens
    takes_all: the tokens appended
        - if row == len(chunk.draft_token_ids) or token_id != chunk.draft_token_ids[row]:
        -     break
    forgets_the_last_row: the last row gives a token
        ~ enumerate(token_ids): => enumerate(token_ids[: len(chunk.draft_token_ids)] or token_ids):
    refused_kv_counts: num_computed_tokens
        @ What a cache must not keep
        - seq.num_computed_tokens = len(seq.tokens) - 1  # all but the token sampled last
        + seq.num_computed_tokens = min(chunk.end, len(seq.tokens))
    registers_nothing: blocks that are cached
        @ What a cache must not keep
        ~ scheduler.block_manager.register_prefix(seq) =>
    registers_before_it_counts: goes by num_computed_tokens
        @ What a cache must not keep
        - seq.num_computed_tokens = len(seq.tokens) - 1  # all but the token sampled last
        - scheduler.block_manager.register_prefix(seq)
        + scheduler.block_manager.register_prefix(seq)
        + seq.num_computed_tokens = len(seq.tokens) - 1
    no_stop_reason: the stop reason
        ~ scheduler.finish(seq, reason, stop_reason) => scheduler.finish(seq, reason, None)
    never_finishes: the finish reason
        ~ scheduler.finish(seq, reason, stop_reason) => pass
    blocks_back_first: registered before the sequence gives them back
        ~ if chunk.draft_token_ids: => if chunk.draft_token_ids and reason is None:
    appends_no_token: NO_TOKEN is not appended
        ~ if token_id != NO_TOKEN: => if True:
    tells_of_every_row: what the stop checker has heard
        - if row == len(chunk.draft_token_ids) or token_id != chunk.draft_token_ids[row]:
        + if row == len(chunk.draft_token_ids) or token_id != chunk.draft_token_ids[row]:
        +     for later in token_ids[row + 1 :] if seq.stop_checker is not None else []:
        +         scheduler.check_stop(seq, later)
        =     break
    compares_before_it_asks: what the stop checker has heard
        - if token_id != NO_TOKEN:
        -     seq.append(token_id)
        - reason, stop_reason = scheduler.check_stop(seq, token_id)
        + if token_id != NO_TOKEN:
        +     seq.append(token_id)
        + if row < len(chunk.draft_token_ids) and token_id != chunk.draft_token_ids[row] and seq.stop_checker:
        +     reason = None
        +     break
        + reason, stop_reason = scheduler.check_stop(seq, token_id)
share_guesses
    stops_at_the_first_fall: look at all
        - rate = num_tokens / (step_s[num] + depth * draft_s)
        + rate = num_tokens / (step_s[num] + depth * draft_s)
        + if rate < (num_tokens - chance) / (step_s[num - 1] + depth * draft_s):
        +     break
    one_after_another: take the largest first
        ~ chances.sort(reverse=True)  # those of one sequence stay in order: each is at most the one before =>
    counts_draft_tokens_alone: expected tokens
        ~ num_tokens = float(len(acceptances)) => num_tokens = 0.0
    equally_good: as good with fewer draft tokens
        ~ rate > best_rate or => rate >= best_rate or
    ignores_limits: above its limit
        ~ range(1, limits[i] + 1) => range(1, max(limits) + 2)
    drafts_for_nothing: as many as the longest draft has tokens
        ~ + depth * draft_s =>
    pays_for_each: decide how many steps it takes
        ~ depth * draft_s => num * draft_s
    as_deep_as_it_may: as many as the longest draft has tokens
        ~ for depth in range(1, max(limits, default=0) + 1): => for depth in [max(limits, default=0)]:
resume
    begins_the_answer_anew: clients have the generated tokens already
        ~ in seq.generated_token_ids: => in []:
    one_long_prompt: the number of another position
        - for token_id in seq.generated_token_ids:  # after the prompt: positions in the output stay what they were
        -     there.append(token_id)
        + there.tokens, there.num_prompt_tokens = list(seq.tokens), len(seq.tokens)
    tokens_with_kv: all tokens are kept
        ~ in seq.generated_token_ids: => in seq.tokens[seq.num_prompt_tokens : seq.num_computed_tokens]:
    a_new_seed: a new Sequence has another one
        ~ there.seed, there.sample_index = seq.seed, seq.sample_index => there.sample_index = seq.sample_index
    the_first_sample: the sample index tells their numbers apart
        ~ there.seed, there.sample_index = seq.seed, seq.sample_index => there.seed = seq.seed
    no_salt: what the hashes of its blocks are made of
        ~ cache_salt=seq.cache_salt, =>
    keeps_the_count: its blocks belong to others by now
        = there.seed, there.sample_index = seq.seed, seq.sample_index
        + there.num_computed_tokens = seq.num_computed_tokens
    the_old_one: return a new Sequence
        ~ return there => return seq
""")
