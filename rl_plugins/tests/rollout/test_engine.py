"""The records of the engine protocol."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import Generations, padded_routes


@pytest.mark.parametrize(
    "responses",
    [[], [[]], [[], []], [[1, 2], [], [3]], [[], [4]], [[5, 6], [7]], [[8], []]],
    ids=str,
)
def test_generations_from_responses_and_pickle_keep_the_responses(responses: list[list[int]]) -> None:
    log_probs = [[-0.5 * token for token in response] for response in responses]
    generations = Generations.from_responses(responses, log_probs, ["stop"] * len(responses), 7)
    assert generations.token_ids.dtype == np.int64
    assert generations.log_probs.dtype == np.float32
    for received in (generations, pickle.loads(pickle.dumps(generations))):
        assert received.responses() == responses
        assert received.response_log_probs() == log_probs
        assert received.lengths.tolist() == [len(response) for response in responses]
        assert received.finish_reasons == ["stop"] * len(responses)
        assert received.response_versions() == [[7] * len(response) for response in responses]


def test_generations_keep_the_experts_of_each_response_when_split_and_concatenated() -> None:
    experts = [np.full((tokens, 2, 1), tokens, dtype=np.int16) for tokens in (3, 4, 5)]
    whole = Generations.from_responses([[1], [2], [3]], [[0.0]] * 3, ["stop"] * 3, 0, experts)
    assert [part.experts[0].shape for part in whole.split([1, 1, 1])] == [(3, 2, 1), (4, 2, 1), (5, 2, 1)]
    # A conversation may end without a response, and has no experts then.
    aborted = Generations.from_responses([[]], [[]], ["abort"], 0)
    joined = Generations.concat([whole, aborted])
    assert [len(column) for column in joined.experts] == [3, 4, 5, 0]
    assert padded_routes(joined.experts[3], 2).tolist() == [[[-1], [-1]]] * 2
    assert padded_routes(np.ones((1, 2, 1), dtype=np.uint8), 2).tolist() == [[[1], [1]], [[-1], [-1]]]
    assert Generations.concat([aborted, aborted]).experts == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("num_samples", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("top_k", -2),
    ],
)
def test_sampling_config_refuses_values_out_of_range(option: str, value: float) -> None:
    arguments: dict[str, Any] = {"max_tokens": 4, option: value}
    with pytest.raises(ConfigError, match=rf"^{option}={value}: must be"):
        SamplingConfig(**arguments)


def test_sampling_config_accepts_the_limits() -> None:
    SamplingConfig(max_tokens=1, num_samples=1, temperature=0.0, top_p=1.0, top_k=-1)
    SamplingConfig(max_tokens=1, top_p=1e-9, top_k=1)
