def right_answer(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.strip() == ground_truth)
