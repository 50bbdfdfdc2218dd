"""Routes of a conversation with several sequences, in the order of the rows of a forward pass."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.trajectory import Reply, ScoreWithMessages, Start, Trajectory
from rl_plugins.rollout.engine import Generations
from rl_plugins.stages.forward_passes import SequenceRows
from rl_plugins.tests.loops import for_each


def response(tokens: list[int], sequence: list[int]) -> Generations:
    """Return a response whose experts are the tokens of its sequence; the last token has no experts."""
    experts = np.array([*sequence, *tokens], dtype=np.int16)[:-1, None, None]
    return Generations.from_responses([tokens], [[0.0] * len(tokens)], ["stop"], 0, [experts])


def test_routes_of_a_trajectory_follow_the_rows_of_the_sequences() -> None:
    request = ScoringRequest(data_source="", solution_str="", ground_truth="", extra_info={}, prompt=[])
    trajectory = Trajectory([1, 2], request, SamplingConfig(max_tokens=40), (), 0)
    trajectory.respond([response([3, 4], trajectory.tokens)], [""], 9)
    # Another agent answers, and then the first sequence continues.
    trajectory.observe(Reply([], [5, 6], sequence=1))
    trajectory.respond([response([7], trajectory.tokens)], [""], 9)
    trajectory.observe(Reply([], [8, 9], sequence=0))
    trajectory.respond([response([10, 11], trajectory.tokens)], [""], 9)
    trajectory.end(Score(1.0))
    whole = trajectory.generations()
    (experts,) = whole.experts
    assert experts[:, 0, 0].tolist() == [1, 2, 3, 4, 8, 9, 10, -1, 5, 6, -1]

    samples = Experience.from_responses([[1, 2]], whole.responses(), 0)
    samples.sequences = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]])
    rows = SequenceRows.of(samples)
    assert rows.tokens_B.tolist() == [len(experts)]
    ids_N = rows.samples.input_ids[rows.samples.attention_mask]
    # In every row, the experts of all tokens but the last are those of the token.
    assert torch.where(torch.from_numpy(experts)[:, 0, 0] < 0, ids_N, torch.from_numpy(experts)[:, 0, 0]).equal(ids_N)


def test_each_turn_has_the_ids_of_all_sampled_tokens_so_far() -> None:
    request = ScoringRequest(data_source="", solution_str="", ground_truth="", extra_info={}, prompt=[])
    trajectory = Trajectory([1, 2], request, SamplingConfig(max_tokens=40), (), 0)
    first = trajectory.respond([response([3, 4], trajectory.tokens)], [""], 9)
    trajectory.observe(Reply([], [5, 6]))
    second = trajectory.respond([response([7], trajectory.tokens)], [""], 9)
    assert [turn.request.token_ids for turn in (first, second)] == [array("i", [3, 4]), array("i", [3, 4, 7])]


@for_each(("max_tokens", "reason"), [(1, "stop"), (37, "length"), (None, "length")])
def test_response_cut_by_the_environment_cuts_no_trajectory(max_tokens: int | None, reason: str) -> None:
    request = ScoringRequest(data_source="", solution_str="", ground_truth="", extra_info={}, prompt=[])
    trajectory = Trajectory([1, 2], request, SamplingConfig(max_tokens=40), (), 0)
    trajectory.respond([response([3], trajectory.tokens)], [""], 9)
    trajectory.observe(Reply([], [4, 5], max_tokens=max_tokens))
    cut = Generations.from_responses([[6]], [[0.0]], ["length"], 0)
    assert trajectory.respond([cut], [""], 9).finish_reason == "length"
    trajectory.end(Score(1.0))
    assert trajectory.generations().finish_reasons == [reason]


def test_messages_of_an_ending_have_whole_characters() -> None:
    request = ScoringRequest(data_source="", solution_str="", ground_truth="", extra_info={}, prompt=[])
    trajectory = Trajectory([1], request, SamplingConfig(max_tokens=40), (), 0)
    half = {"role": "user", "content": "a\ud83d", "name": "b"}
    trajectory.start(Start([half], [1]))
    trajectory.respond([Generations.from_responses([[3]], [[0.0]], ["stop"], 0)], ["5"], 9)
    assert trajectory.observe(Reply([half], [4]))
    turn = trajectory.respond([Generations.from_responses([[3]], [[0.0]], ["stop"], 0)], ["6"], 9)
    trajectory.end(ScoreWithMessages(Score(1.0), [half]))
    whole, ending = {**half, "content": "a\ufffd"}, trajectory.ending
    assert ending is not None and ending.prompt == turn.request.prompt == [whole]
    assert [ending.said[1], ending.said[-1], turn.request.turns[1]] == [whole] * 3
    ending.transcript().encode()


def test_trajectory_without_experts_returns_none() -> None:
    request = ScoringRequest(data_source="", solution_str="", ground_truth="", extra_info={}, prompt=[])
    trajectory = Trajectory([1, 2], request, SamplingConfig(max_tokens=40), (), 0)
    trajectory.respond([Generations.from_responses([[3]], [[0.0]], ["stop"], 0)], [""], 9)
    trajectory.end(Score(1.0))
    assert trajectory.generations().experts == []
