"""Reward of the project. The names of the arguments select their values: docs/rewards.md lists all names."""


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Return 1 for the right number, and at most 0.5 for the share of digits in another response."""
    if solution_str.strip() == ground_truth:
        return 1.0
    return 0.5 * sum(character in "0123456789" for character in solution_str) / max(len(solution_str), 1)
