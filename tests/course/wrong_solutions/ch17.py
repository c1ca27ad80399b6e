"""Wrong solutions of chapter 17."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
assign_experts
    always_scales: without normalize
        @ An expert for every token
        ~ if normalize: => if True:
    softmax_of_the_chosen: without normalize
        @ An expert for every token
        = if normalize:
        =     total = weights.sum(-1, keepdim=True)
        -     weights = torch.where(total > 0, weights / total, weights)
        + total = weights.sum(-1, keepdim=True)
        + weights = torch.where(total > 0, weights / total, weights)
    one_sum_for_all_rows: whatever the other rows have
        @ An expert for every token
        ~ weights.sum(-1, keepdim=True) => weights.sum()
    probabilities_in_bf16: then it is the wrong experts
        ~ scores.float().softmax(-1) => scores.softmax(-1).float()
    as_the_engine: expert 0 takes too many rows
        = probabilities = scores.float().softmax(-1)
        + best, numbers = probabilities.topk(num_chosen)
        + return (best / best.sum(-1, keepdim=True) if normalize else best), numbers
    first_come_first_served: and expert 0 has taken row 0
        - for pair in probabilities.flatten().argsort(descending=True, stable=True).tolist():
        -     row, expert = divmod(pair, num_experts)
        + orders = probabilities.argsort(descending=True, stable=True).tolist()
        + for row, expert in ((row, expert) for row in range(num_rows) for expert in orders[row]):
        =     if num_met[row] < num_chosen and num_taken[expert] < capacity:
    compares_scores: scores say nothing from row to row
        ~ probabilities.flatten().argsort => scores.flatten().argsort
    gives_up: although expert 1 has room
        = row, expert = divmod(pair, num_experts)
        + if probabilities[row, expert] < probabilities[row].topk(num_chosen).values[-1]:
        +     continue
    first_choices_first: and then row 2 yields to row 0
        - for pair in probabilities.flatten().argsort(descending=True, stable=True).tolist():
        -     row, expert = divmod(pair, num_experts)
        + orders = probabilities.argsort(descending=True, stable=True).tolist()
        + pairs = []
        + for choice in range(num_experts):
        +     wish = [(row, orders[row][choice]) for row in range(num_rows)]
        +     pairs += sorted(wish, key=lambda pair: -float(probabilities[pair]))
        + for row, expert in pairs:
        =     if num_met[row] < num_chosen and num_taken[expert] < capacity:
    scaled_by_what_it_wanted: not of what it wanted
        ~ total = weights.sum(-1, keepdim=True) => total = probabilities.topk(num_chosen).values.sum(-1, keepdim=True)
    nothing_by_nothing: but 0 / 0 is no number
        ~ torch.where(total > 0, weights / total, weights) => weights / total
    empty_places_are_expert_0: meets an expert twice
        ~ torch.full((num_rows, num_chosen), -1) => torch.zeros(num_rows, num_chosen, dtype=torch.int64)
meet_experts
    weighs_the_input: weigh its output, not its input
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] += expert(weights[rows, places, None] * hidden[rows]).float()
    last_expert_wins: expert 3 0.375
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] = weights[rows, places, None] * expert(hidden[rows]).float()
    scales_again: as they are
        = out = torch.zeros(hidden.shape)
        + weights = weights / weights.sum(-1, keepdim=True)
    stays_grouped: go back to the places
        @ One batch, many weights
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[: len(rows)] += weights[rows, places, None] * expert(hidden[rows]).float()
    row_by_row: how often is it called
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + for row, place in zip(rows, places):
        +     out[row] += weights[row, place] * expert(hidden[row : row + 1])[0].float()
    changes_hidden: have been changed
        ~ torch.zeros(hidden.shape) => hidden.zero_()
    weights_in_bf16: multiply in float32
        ~ weights[rows, places, None] * => weights.to(hidden.dtype)[rows, places, None] *
    products_in_bf16: multiply in float32
        - out[rows] += weights[rows, places, None] * expert(hidden[rows]).float()
        + out[rows] += (weights[rows, places, None].to(hidden.dtype) * expert(hidden[rows])).float()
    minus_one_is_the_last: -1 is no expert
        - for e, expert in enumerate(experts):
        -     rows, places = (chosen == e).nonzero(as_tuple=True)
        + for e in chosen.unique().tolist():
        +     expert = experts[e]
        +     rows, places = (chosen == e).nonzero(as_tuple=True)
    sums_in_bf16: so sum up in float32
        ~ torch.zeros(hidden.shape) => torch.zeros_like(hidden)
""")
