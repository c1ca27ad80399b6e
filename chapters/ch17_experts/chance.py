"""How many experts rows meet by chance; no torch, so that a page can draw it."""


def expected_met(num_rows: int, num_experts: int, num_chosen: int) -> float:
    """Distinct experts that a layer's rows meet, if each row chooses at random."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_rows)
