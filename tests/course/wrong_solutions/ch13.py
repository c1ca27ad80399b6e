"""Wrong solutions of chapter 13."""

from tests.course.wrong_solutions import Edit

LOOKS_UP = "for n in range(min(longest, len(tokens)), shortest - 1, -1):"
STOPS = """
if row == len(chunk.guesses) or token_id != chunk.guesses[row]:
    break
"""
COUNTS = "seq.num_computed_tokens = len(seq.tokens) - 1  # all but the token sampled last"
BETTER = "if num_tokens / step_s[num] > best_rate:"

WRONG = {
    "guess": [
        Edit(
            "shortest_first", LOOKS_UP, "for n in range(shortest, min(longest, len(tokens)) + 1):", "counts more than"
        ),
        Edit(
            "oldest_place",
            "followers[tuple(tokens[place - n : place])] = place",
            "followers.setdefault(tuple(tokens[place - n : place]), place)",
            "the newest",
        ),
        Edit(
            "finds_itself",
            'range(memory.get("num_tokens", 0), len(tokens)):',
            'range(memory.get("num_tokens", 0), len(tokens) + 1):',
            "integer modulo by zero",
        ),
        Edit(
            "stops_at_the_end",
            "[tokens[place + i % period] for i in range(num_guesses)]",
            "tokens[place : place + num_guesses]",
            "again and again",
        ),
        Edit(
            "repeats_the_last_token",
            "tokens[place + i % period]",
            "tokens[min(place + i, len(tokens) - 1)]",
            "again and again",
        ),
        Edit("begins_one_late", "place + i % period", "place + (i + 1) % period", "was followed by"),
        Edit(
            "reads_all_again",
            'range(memory.get("num_tokens", 0), len(tokens)):',
            "range(len(tokens)):",
            "does not go through the text again",
        ),
        Edit(
            "ignores_failed_steps",
            'if len(tokens) < memory.get("num_tokens", 0):',
            "if False:",
            "forget what was noted",
        ),
        Edit(
            "shortest_not_noted",
            "for n in range(shortest, min(longest, place) + 1):",
            "for n in range(shortest + 1, min(longest, place) + 1):",
            "the newest counts",
        ),
    ],
    "take_tokens": [
        Edit(
            "compares_before",
            STOPS,
            "\nif row and token_id != chunk.guesses[row - 1]:\n    break\n",
            "the tokens appended",
        ),
        Edit(
            "drops_the_refused_row",
            """
                seq.append(token_id)
                reason, stop_reason = scheduler.finish_reason_of(seq, token_id)
            """,
            """
                if row < len(chunk.guesses) and token_id != chunk.guesses[row]:
                    break
                seq.append(token_id)
                reason, stop_reason = scheduler.finish_reason_of(seq, token_id)
            """,
            "in place of the refused guess stands what was sampled",
        ),
        Edit("takes_all", STOPS, "", "the tokens appended"),
        Edit(
            "forgets_the_last_row",
            "enumerate(token_ids):",
            "enumerate(token_ids[: len(chunk.guesses)] or token_ids):",
            "the last row gives a token",
        ),
        Edit(
            "refused_kv_counts",
            COUNTS,
            "seq.num_computed_tokens = min(chunk.end, len(seq.tokens))",
            "num_computed_tokens",
            "What a cache must not keep",
        ),
        Edit("count_stays", COUNTS, "pass", "num_computed_tokens", "What a cache must not keep"),
        Edit(
            "no_names",
            "scheduler.block_manager.register_prefix(seq)",
            "pass",
            "blocks that have a name",
            "What a cache must not keep",
        ),
        Edit("goes_on_behind_the_end", "\nif reason is not None:\n    break\n", "", "EOS ends the sequence"),
        Edit("never_finishes", "scheduler.finish(seq, reason, stop_reason)", "pass", "the finish reason"),
        Edit("status_stays", "seq.status = SequenceStatus.DECODE", "pass", "status"),
        Edit("returns_nothing", "return reason is not None", "return None", "returned nothing"),
        Edit(
            "blocks_back_first",
            """
                if chunk.guesses:
                    seq.num_computed_tokens = len(seq.tokens) - 1  # all but the token sampled last
                    scheduler.block_manager.register_prefix(seq)
                if reason is not None:
                    scheduler.finish(seq, reason, stop_reason)
            """,
            """
                if reason is not None:
                    scheduler.finish(seq, reason, stop_reason)
                elif chunk.guesses:
                    seq.num_computed_tokens = len(seq.tokens) - 1
                    scheduler.block_manager.register_prefix(seq)
            """,
            "named before the sequence gives them back",
        ),
    ],
    "share_guesses": [
        Edit("counts_guesses_alone", "num_tokens = float(len(acceptances))", "num_tokens = 0.0", "expected tokens"),
        Edit("all_guesses_alike", "(a**j, i)", "(a, i)", "expected tokens"),
        Edit("as_many_as_possible", BETTER, "if True:", "and the seconds of that step"),
        Edit(
            "stops_at_the_first_fall",
            BETTER,
            "if num_tokens / step_s[num] <= best_rate:\n    break\nif True:",
            "look at all",
        ),
        Edit("ascending", "chances.sort(reverse=True)", "chances.sort()", "expected tokens"),
        Edit(
            "one_after_another",
            "chances.sort(reverse=True)  # those of one sequence stay in order: each is at most the one before",
            "pass",
            "take the largest of these first",
        ),
        Edit("equally_good", "num] > best_rate", "num] >= best_rate", "as good with fewer guesses"),
        Edit("beyond_the_list", "chances[: len(step_s) - 1]", "chances", "IndexError"),
        Edit("ignores_limits", "range(1, limits[i] + 1)", "range(1, max(limits) + 2)", "above its limit"),
    ],
}
