"""Wrong solutions of chapter 16."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
delta_chunk
    adds_only: only what is missing up to v
        @ The delta rule
        ~ beta[t] * (wanted - number) for wanted => beta[t] * wanted for wanted
    the_state_never_fades: half of what was there
        @ Letting go, and what else a token says
        ~ left *= decay[t] => pass
    fades_last: for what was there before the token wrote
        @ Letting go, and what else a token says
        - left *= decay[t]
        - lines = [[decay[t] * number for number in line] for line in lines]
        = found = look_up(k[t], in_state[t])
        = lines.append([beta[t] * (wanted - number) for wanted, number in zip(v[t], found, strict=True)])
        + left *= decay[t]
        + lines = [[decay[t] * number for number in line] for line in lines]
    looks_up_before_fading: is read after the decay
        @ Letting go, and what else a token says
        + found = look_up(k[t], in_state[t])
        = left *= decay[t]
        = lines = [[decay[t] * number for number in line] for line in lines]
        - found = look_up(k[t], in_state[t])
    does_not_see_its_own_line: a token sees its own line
        @ A state is a matrix
        + outputs.append(look_up(q[t], in_state[num_tokens + t]))
        = lines.append([beta[t] * (wanted - number) for wanted, number in zip(v[t], found, strict=True)])
        - outputs.append(look_up(q[t], in_state[num_tokens + t]))
    writes_as_if_alone: in the lines of the tokens before it
        @ The delta rule
        ~ found = look_up(k[t], in_state[t]) => found = [left * number for number in in_state[t]]
    only_equal_keys_meet: their dot product
        @ A state is a matrix
        ~ sum(a * b for a, b in zip(x, key, strict=True)) => float(x == key)
    lines_never_fade: the first line has faded once
        @ Letting go, and what else a token says
        ~ lines = [[decay[t] * number for number in line] for line in lines] => pass
    divides_by_the_product: no product of decays to divide by
        @ Letting go, and what else a token says
        + scaled = []
        = for t in range(num_tokens):
        =     left *= decay[t]
        -     lines = [[decay[t] * number for number in line] for line in lines]
        +     lines = [[left * number for number in line] for line in scaled]
        =     found = look_up(k[t], in_state[t])
        =     lines.append([beta[t] * (wanted - number) for wanted, number in zip(v[t], found, strict=True)])
        +     scaled.append([number / max(left, 1e-300) for number in lines[-1]])
    returns_lines_as_written: and a line with every token after its own
        @ Letting go, and what else a token says
        + written = []
        = for t in range(num_tokens):
        =     left *= decay[t]
        =     lines = [[decay[t] * number for number in line] for line in lines]
        =     found = look_up(k[t], in_state[t])
        =     lines.append([beta[t] * (wanted - number) for wanted, number in zip(v[t], found, strict=True)])
        +     written.append(lines[-1])
        =     outputs.append(look_up(q[t], in_state[num_tokens + t]))
        - return outputs, left, lines
        + return outputs, left, written
    asks_for_every_token: read is called a second time
        @ Token by token
        - in_state = read([*k, *q])
        + in_state = [read([x])[0] for x in [*k, *q]]
    asks_for_the_state: ask for the state itself
        @ Token by token
        - in_state = read([*k, *q])
        + size = len(k[0])
        + rows = read([[float(i == j) for j in range(size)] for i in range(size)])
        + in_state = [[sum(a * row[j] for a, row in zip(x, rows)) for j in range(len(v[0]))] for x in [*k, *q]]
    changes_the_keys: has been changed
        @ A state is a matrix
        = in_state = read([*k, *q])
        + k.append(k.pop(0))
        + v[0] = [2 * number for number in v[0]]
plan_snapshots
    behind_the_last_token: a token is left to compute
        @ Why a prefix cache cannot share a state
        ~ if end < len(prompts[number]): => if end <= len(prompts[number]):
    one_too_many: too many snapshots
        @ Why a prefix cache cannot share a state
        ~ best_plans(roots, 0, room)[room] => best_plans(roots, 0, room + 1)[room + 1]
    the_last_one_takes_it: which is the first that passes
        @ Why a prefix cache cannot share a state
        ~ fork.passing[0] => fork.passing[-1]
    at_the_first_shared_block: they share more than that
        @ Why a prefix cache cannot share a state
        ~ Fork(end, group => Fork(start + block_size, group
    counts_the_first: gains nothing from the snapshot there
        ~ (len(fork.passing) - 1) => len(fork.passing)
    the_deepest_places: a single prompt at the other
        ~ (len(fork.passing) - 1) => 1
    forgets_what_is_above: only the tokens between the two
        ~ (fork.position - above) => fork.position
    never_two_on_one_way: for those prompts that go on together
        ~ best_plans(fork.deeper, fork.position, room) => [(0, [])] * (room + 1)
    from_the_top: need not be in the best plan for two
        ~ max(without[num], (gain + saved, [fork, *taken]), key=num_saved) => (gain + saved, [fork, *taken])
read_guesses
    guesses_stay: nothing gets it out again
        = memory["state"], memory["log"] = state, [*guesses]
        = for row in guesses:
        =     state, output = step(state, row)
        =     outputs.append(output)
        + memory["state"] = state
    those_that_held_are_lost: these rows do not come again
        ~ memory.get("log", [])[:num_held] => []
    all_guesses_are_read: which was rejected
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
    keeps_all_rows: rows besides this call's draft tokens
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
