"""Wrong solutions of chapter 16."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
delta_step
    adds_only: only what is missing up to v
        ~ beta * (wanted - found) for => beta * wanted for
    never_forgets: half of what was there, in every row
        @ Letting go, and what else a token says
        ~ decay * number => number
    forgets_last: not for what is written
        @ Letting go, and what else a token says
        - state = [[decay * number for number in row] for row in state]
        + state = [[*row] for row in state]
        = change = [beta * (wanted - found) for wanted, found in zip(v, read(state, k), strict=True)]
        = for i, row in enumerate(state):
        =     for j in range(len(row)):
        -         row[j] += k[i] * change[j]
        +         row[j] = decay * (row[j] + k[i] * change[j])
    reads_before_forgetting: is read after the decay
        @ Letting go, and what else a token says
        - state = [[decay * number for number in row] for row in state]
        = change = [beta * (wanted - found) for wanted, found in zip(v, read(state, k), strict=True)]
        + state = [[decay * number for number in row] for row in state]
    reads_before_writing: it reads the new state
        = change = [beta * (wanted - found) for wanted, found in zip(v, read(state, k), strict=True)]
        + output = read(state, q)
        = for i, row in enumerate(state):
        =     for j in range(len(row)):
        =         row[j] += k[i] * change[j]
        - return state, read(state, q)
        + return state, output
    writes_into_the_snapshot: has been changed
        - state = [[decay * number for number in row] for row in state]
        + for row in state:
        +     row[:] = [decay * number for number in row]
    one_row_for_a_key: row i's share of the value
        @ A state is a matrix
        ~ row[j] += k[i] * change[j] => row[j] += (k[i] == max(k)) * change[j]
choose_snapshots
    behind_the_last_token: a token is left to be computed
        @ Why a prefix cache cannot share a state
        ~ last = (num_tokens - 1) // block_size * block_size => last = num_tokens // block_size * block_size
    not_at_the_end: is there a snapshot at the last full block
        ~ positions[last] = True  # who continues this prompt begins here =>
    no_fork: which num_matched told the second
        ~ positions[min(num_matched, last)] = True  # a fork: who comes this way again leaves here, too =>
    only_what_is_known: is there a position that both
        ~ positions[power] = False => pass
    every_512: is there a position that both
        ~ power *= 2 => power += 16 * block_size
    guesses_are_called_wanted: must not be called wanted
        ~ positions[power] = False => positions[power] = True
    the_fork_is_called_a_guess: this is no guess
        ~ positions[min(num_matched, last)] = True => positions[min(num_matched, last)] = min(num_matched, last) == last
read_guesses
    guesses_stay: nothing gets it out again
        = memory["state"], memory["log"] = state, [*guesses]
        = for row in guesses:
        =     state, output = step(state, row)
        =     outputs.append(output)
        + memory["state"] = state
    those_that_held_are_lost: these rows do not come again
        ~ memory.get("log", [])[:num_held] => []
    all_guesses_are_read: which was refused
        ~ [:num_held] =>
    outputs_of_the_log: an output for each row of this call
        - state, _ = step(state, row)
        + state, output = step(state, row)
        + outputs.append(output)
    keeps_the_engines_list: a list of your own
        ~ [*guesses] => guesses
    a_state_for_each_guess: memory holds other states
        - memory["state"], memory["log"] = state, [*guesses]
        + memory["state"], memory["log"], memory["others"] = state, [*guesses], []
        = for row in guesses:
        =     state, output = step(state, row)
        +     memory["others"].append(state)
    keeps_all_rows: rows that are no guesses of this call
        = memory["state"], memory["log"] = state, [*guesses]
        + memory["text"] = [*memory.get("text", []), *known]
    reads_known_rows_twice: step is called once
        - for row in known:
        + memory["log"], memory["state"] = [*guesses], state
        + for row in known:
        +     memory["state"], _ = step(memory["state"], row)
        + for row in [*known, *guesses]:
        =     state, output = step(state, row)
        =     outputs.append(output)
        - memory["state"], memory["log"] = state, [*guesses]
        - for row in guesses:
        -     state, output = step(state, row)
        -     outputs.append(output)
""")
