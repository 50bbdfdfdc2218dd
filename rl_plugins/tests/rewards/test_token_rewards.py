"""Rewards of tokens: from the result of a reward function to the advantages, compared with plain loops."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig
from rl_plugins.data.experience import Experience, computed
from rl_plugins.errors import RewardError
from rl_plugins.rewards.calling import RewardFunction
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.stages.sampling import token_level_scores
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.algorithms.reference import advantages as reference
from rl_plugins.tests.patience import patient
from rl_plugins.tests.rewards.test_conversations import FIRST, SURE, Scripted, conversations, opening
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

HERE = "rl_plugins.tests.rewards.sample_rewards"
IDS = [8, 24, 4]
OF_IDS = (1.0, 3.0, 0.5)


def request(solution: str, token_ids: list[int] | None = IDS) -> ScoringRequest:
    return ScoringRequest("s", solution, "yes", {}, token_ids=token_ids)


def result_of(target: str, solution: str, token_ids: list[int] | None = IDS) -> Score:
    scores = RewardFunction({"_target_": f"{HERE}.{target}"}).score([request(solution, token_ids)], None)
    assert scores[0] is not None
    return scores[0]


@pytest.mark.parametrize("target", ["reward_tokens", "reward_tokens_of_batch"])
def test_sum_of_the_rewards_of_tokens_is_the_score(target: str) -> None:
    for solution in ("list", "array", "scalars"):
        assert result_of(target, solution) == Score(4.5, token_rewards=OF_IDS)
    assert result_of(target, "given") == Score(1.5, {"length": 3.0}, token_rewards=OF_IDS)
    assert result_of(target, "none") == Score(0.5)
    assert result_of(target, "list", []) == Score(0.0, token_rewards=())


@pytest.mark.parametrize(
    ("solution", "failure", "said"),
    [
        ("short", "raised", "'token_rewards' has 2 numbers for 3 sampled tokens: return one number for each token"),
        ("nan", "not_finite", "'token_rewards' of token 2 is nan"),
        ("huge", "not_finite", "'token_rewards' of token 2 is too large: training takes numbers up to 1e+18"),
        ("infinite", "not_finite", "'token_rewards' of token 0 is too large"),
        ("number", "raised", "'token_rewards' is of type float, not a list of numbers"),
        ("string", "raised", "'token_rewards' is of type str, not a list of numbers"),
        ("words", "raised", "'token_rewards' of token 0 is of type str, not a number"),
        (
            "reply",
            "raised",
            "a reply has 'token_rewards': return the rewards of the tokens of all turns with the score",
        ),
    ],
)
def test_wrong_rewards_of_tokens_fail_one_sample_with_one_line(solution: str, failure: str, said: str) -> None:
    score = result_of("reward_tokens", solution)
    assert (score.failure, score.value, score.token_rewards) == (failure, None, None)
    assert said in score.message and "reward_tokens" in score.message and "\n" not in score.message


def test_reward_with_token_ids_refuses_a_text_without_tokens() -> None:
    score = result_of("reward_tokens", "list", None)
    assert score.failure == "raised" and "asks for token_ids, and these responses are texts" in score.message
    # The number of tokens of a text is not known, so any number of rewards is read.
    assert result_of("everything_per_token", "ab", None) == Score(3.0, token_rewards=(1.0, 2.0))


def test_reward_gets_the_ids_in_an_array_as_a_list() -> None:
    given: list[object] = []
    for function in (lambda token_ids: given.append(token_ids), lambda token_id_lists: given.extend(token_id_lists)):
        RewardFunction({"_target_": function}).score([replace(request("list"), token_ids=array("i", IDS))], None)
    assert given == [IDS, IDS]


def test_requests_of_a_stage_have_the_ids_in_arrays() -> None:
    requests: list[ScoringRequest] = []

    class Scorer(canned.CannedScorer):
        def score(self, given: Sequence[ScoringRequest]) -> list[Score]:
            requests.extend(given)
            return super().score(given)

    stage: canned.Keeping = canned.ppo(canned.Keeping, algorithm=Algorithm(), scorer=Scorer(), max_steps=1)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    canned.quiet_trainer(strategy).fit(stage, Loader(canned.PROMPTS[:2]))
    (samples,) = stage.trained_on
    lengths = samples.response_lengths.tolist()
    rows = zip(samples.responses.tolist(), lengths, strict=True)
    assert [request.token_ids for request in requests] == [array("i", row[:length]) for row, length in rows]


def test_weighted_sum_adds_rewards_of_tokens_with_the_weights() -> None:
    parts = {name: {"_target_": f"{HERE}.{name}"} for name in ("reward_tokens", "length", "reward_tokens_of_batch")}
    weights = {"reward_tokens": 2.0, "length": 0.5, "reward_tokens_of_batch": -1.0}
    scorer = InlineScorer({"_target_": "rl_plugins.rewards.mixing.WeightedSum", "rewards": parts, "weights": weights})
    (score,) = scorer.score([request("list")])
    assert score.value == 2 * 4.5 + 0.5 * 4 - 4.5 and score.token_rewards == list(OF_IDS)


def test_reward_worker_sends_rewards_of_tokens() -> None:
    config = {"_target_": f"{HERE}.reward_tokens"}
    with RewardPool(config, num_workers=1, deadline_s=patient(60), max_failure_rate=0.5) as pool:
        good, bad = pool.score([request("list"), request("short")])
    assert (good.value, tuple(good.token_rewards or ())) == (4.5, OF_IDS) and bad.failure == "raised"


@pytest.mark.parametrize("advantage", ["gae", "reinforce_plus_plus"])
def test_advantages_of_rewards_of_tokens_agree_with_plain_loops(advantage: str) -> None:
    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.8} if advantage == "gae" else {"gamma": 0.9}
    critic = {"critic": CriticConfig(canned.other_model())} if advantage == "gae" else {}
    stage: canned.Keeping = canned.ppo(
        canned.Keeping,
        algorithm=Algorithm(advantage=advantage, advantage_options=options),
        scorer=InlineScorer({"_target_": f"{HERE}.reward_tokens"}),
        max_steps=1,
        **critic,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    canned.quiet_trainer(strategy).fit(stage, Loader(canned.PROMPTS[:2]))
    (samples,) = stage.trained_on
    rewards_BT = np.zeros(samples.responses.shape)
    for place, length in enumerate(samples.response_lengths.tolist()):
        for token in range(length):
            rewards_BT[place, token] = int(samples.responses[place, token]) / 8
    assert samples.scores is not None
    np.testing.assert_allclose(samples.scores.numpy(), rewards_BT.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(computed(samples.token_level_rewards).numpy(), rewards_BT, rtol=1e-4, atol=1e-5)
    inputs: Mapping[str, Any] = {
        "token_level_rewards_BT": rewards_BT,
        "response_mask_BT": samples.response_mask.numpy(),
        "groups_B": samples.groups.numpy(),
        "valid_B": samples.valid.numpy(),
        **({"values_BT": computed(samples.values).numpy()} if critic else {}),
    }
    expected, returns = getattr(reference, advantage)(**inputs, **options)
    np.testing.assert_allclose(computed(samples.returns).numpy(), returns, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(computed(samples.advantages).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_rest_of_a_given_score_is_at_the_last_sampled_token() -> None:
    samples = Experience.from_responses(
        [[1]] * 4, [[1, 2, 3, 4], [1, 2], [1], []], 0, response_masks=[[1, 0, 1, 0], [1, 1], [1], []]
    )
    scores = [Score(5.0, token_rewards=(1.0, 2.0)), Score(0.5), Score(None, failure="raised"), Score(2.0)]
    expected = [[1.0, 0, 4, 0], [0, 0.5, 0, 0], [0] * 4, [0] * 4]
    assert torch.equal(token_level_scores(samples, scores), torch.tensor(expected))
    with pytest.raises(RewardError, match="the scorer: 'token_rewards' has 1 numbers for 2 sampled tokens"):
        token_level_scores(samples, [Score(1.0, token_rewards=(1.0,)), *scores[1:]])


def test_rewards_of_tokens_of_a_conversation_are_for_the_tokens_of_all_turns() -> None:
    said = {
        FIRST: ["well<|end|>", "yes<|end|>", "no<|end|>"],
        f"{FIRST}well{SURE}": ["yes<|end|>"],
        f"{FIRST}no{SURE}": ["yes<|end|>"],
    }
    talk = conversations(Scripted(said), "tally")
    talk.submit([opening()], canned.SamplingConfig(max_tokens=60, num_samples=3))
    generations = talk.collect([7], 0)[7]
    long, short, both = generations.endings
    lengths = [len(canned.tokenizer.encode(text)) for text in ("well<|end|>", "yes<|end|>")]
    numbers = [1.0 + place for place in range(sum(lengths))]
    assert list(long.score.token_rewards) == numbers and long.score.value == sum(numbers)
    assert long.turn_rewards == (sum(numbers[: lengths[0]]), sum(numbers[lengths[0] :]))
    assert short.turn_rewards == (sum(numbers[: lengths[1]]),)
    assert both.score.failure == "raised" and both.score.value is None
    assert "has rewards of turns and 'token_rewards': return one of the two kinds" in both.score.message
    # The rewards skip the tokens of the environment.
    masks = generations.response_masks()
    samples = Experience.from_responses([[1]] * 3, generations.responses(), 0, response_masks=masks)
    samples.set_column("ending", generations.endings)
    scores_BT = token_level_scores(samples, [ending.score for ending in generations.endings])
    assert scores_BT[0][samples.response_mask[0].bool()].tolist() == numbers
    assert scores_BT[0].sum() == sum(numbers) and not scores_BT[2].any()
