"""Conversations with an environment: tokens, masks, ends and scores, and turns lost with an engine."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig, Schedule
from rl_plugins.errors import ConfigError, EngineLost, RewardError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rewards import conversations as conversations_module
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.replies import ReplyingReward
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.rewards import sample_rewards
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

tokenizer = canned.tokenizer
SAMPLING = SamplingConfig(max_tokens=60, num_samples=2)
FIRST = "<|user|>guess<|assistant|>"
SURE = "<|end|><|user|>sure?<|assistant|>"
SAID: dict[str, list[str]] = {
    FIRST: ["no<|end|>", "yes<|end|>"],
    f"{FIRST}no{SURE}": ["well<|end|>"],
    f"{FIRST}no{SURE}well<|end|><|tool|>WELL<|assistant|>": ["yes<|end|>"],
}
"""Prompt -> responses. A response without `<|end|>` was cut off."""


class Scripted(canned.CannedRollout):
    """A rollout engine with a script.

    Args:
        said: prompt to responses.
        loses: requests, counted from 1, that the engine loses by its death.
    """

    def __init__(self, said: dict[str, list[str]] = SAID, loses: Sequence[int] = ()) -> None:
        super().__init__()
        self.said, self.loses = said, loses
        self.asked: list[tuple[str, int, int]] = []
        self.dropped: list[int] = []
        self._gone: list[int] = []

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        for one in requests:
            self.asked.append((tokenizer.decode(one.prompt), one.shortened(sampling).max_tokens, one.seed))
            if len(self.asked) in self.loses:
                self._gone.append(one.ticket)
            else:
                super().submit([one], sampling)

    @override
    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        if self._gone and not self._finished:
            raise EngineLost("gone")
        return super().collect(required, count)

    @override
    def drop(self, tickets: Sequence[int]) -> None:
        self.dropped += tickets
        super().drop(tickets)

    @override
    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        gone, self._gone = self._gone, []
        return gone

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        (prompt,) = map(tokenizer.decode, prompts)
        texts = self.said[prompt][: sampling.num_samples]
        responses = [tokenizer.encode(text) for text in texts]
        log_probs = [[-float(len(response))] * len(response) for response in responses]
        reasons = ["stop" if text.endswith("<|end|>") else "length" for text in texts]
        return Generations.from_responses(responses, log_probs, reasons, len(self.asked))


def conversations(engine: Scripted, target: str = "haggle", failures: float = 0.0, **config: Any) -> Conversations:
    scorer = InlineScorer({"_target_": f"rl_plugins.tests.rewards.sample_rewards.{target}"}, max_failure_rate=failures)
    limits = EnvironmentConfig(**{"max_turns": 3, **config})
    return Conversations(ReplyingReward(scorer, tokenizer, limits), tokenizer, limits.max_turns).by(engine)


def opening(ticket: int = 7) -> Opening:
    about = ScoringRequest("s", "", None, {}, [{"role": "user", "content": "guess"}])
    return Opening(ticket, tokenizer.encode(FIRST), 5, about=about)


class Remote(Scripted):
    """A rollout engine that keeps the responses, as engine 3."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[int | None] = []
        self._kept: dict[int, Generations] = {}

    @override
    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        self.engines += [request.engine for request in requests]
        super().submit(requests, sampling, together=together)

    @override
    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        collected: Any = super().collect(required, count)
        self._kept |= collected
        return {ticket: RemoteSamples(3, 0, ticket, samples.lengths) for ticket, samples in collected.items()}

    @override
    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        return [self._kept.pop(samples.ticket) for samples in finished if isinstance(samples, RemoteSamples)]


def test_later_turns_name_the_engine_of_the_turn_before() -> None:
    engine = Remote()
    talk = conversations(engine)
    talk.submit([opening()], SAMPLING)
    talk.collect([7], 0)
    assert len(engine.engines) > 1 and engine.engines == [None, *[3] * (len(engine.engines) - 1)]


def test_collect_returns_sampled_and_environment_tokens_with_masks_and_versions() -> None:
    engine = Scripted()
    talk = conversations(engine)
    talk.submit([opening()], SAMPLING)
    generations = talk.collect([7], 0)[7]
    long, short = generations.responses()
    text = f"no{SURE}well<|end|><|tool|>WELL<|assistant|>yes<|end|>"
    assert tokenizer.decode(long) == text and tokenizer.decode(short) == "yes<|end|>"
    mask, short_mask = generations.response_masks() or []
    assert tokenizer.decode(np.array(long)[np.array(mask) == 1]) == "no<|end|>well<|end|>yes<|end|>"
    assert short_mask == [1.0] * len(short)
    # Each token has the log-prob and the policy version of its turn; tokens of the environment have 0.
    log_probs, _ = generations.response_log_probs()
    assert sorted(set(zip(mask, log_probs, strict=True))) == [(0, 0), (1, -5), (1, -4), (1, -3)]
    versions, _ = generations.response_versions()
    assert sorted(set(versions)) == [1, 2, 3]
    assert generations.finish_reasons == ["stop", "stop"]
    first, second = generations.endings
    assert (first.score.value, first.turns, first.score.details) == (1.0, 3, {"said": 6.0})
    assert (second.score.value, second.turns) == (1.0, 1)
    assert first.transcript() == "no\n[user] sure?\n[assistant] well\n[tool] WELL\n[assistant] yes"
    # The second turn has the rest of the tokens. No two turns have the same seed.
    assert engine.asked[1][1] == 60 - len(tokenizer.encode(f"no{SURE}"))
    assert len({seed for _, _, seed in engine.asked}) == 3


@pytest.mark.parametrize(
    ("said", "config", "turns", "reason"),
    [
        (SAID, {"max_turns": 2}, 2, "stop"),
        ({FIRST: ["no", "yes<|end|>"]}, {}, 1, "length"),
        (SAID, {"sampling": SamplingConfig(max_tokens=10, num_samples=2)}, 1, "length"),
    ],
    ids=["no turn is left", "the response was cut off", "no room is left"],
)
def test_conversation_without_room_for_another_turn_asks_the_environment_for_a_score(
    said: dict[str, list[str]], config: dict[str, Any], turns: int, reason: str
) -> None:
    sampling = config.get("sampling", SAMPLING)
    talk = conversations(Scripted(said), **{key: value for key, value in config.items() if key != "sampling"})
    talk.submit([opening()], sampling)
    generations = talk.collect([7], 0)[7]
    first, _ = generations.endings
    assert (first.turns, first.score.value, generations.finish_reasons[0]) == (turns, 0.0, reason)
    # No token of the environment follows the last response.
    assert all(mask[-1] == 1 for mask in generations.response_masks() or [])


def test_observation_over_max_observation_tokens_is_cut_and_counted() -> None:
    said = {FIRST: ["no<|end|>", "yes<|end|>"], f"{FIRST}no<|end|><|user|>su<|assistant|>": ["yes<|end|>"]}
    talk = conversations(Scripted(said), max_observation_tokens=2)
    talk.submit([opening()], SAMPLING)
    first, second = talk.collect([7], 0)[7].endings
    assert (first.cut, second.cut) == (1, 0)


def test_reward_of_a_reply_is_the_reward_of_the_turn_and_part_of_the_score() -> None:
    said = {
        FIRST: ["no<|end|>", "yes<|end|>", "nan<|end|>", "text<|end|>"],
        f"{FIRST}no{SURE}": ["well<|end|>"],
        f"{FIRST}no{SURE}well{SURE}": ["yes<|end|>"],
    }
    talk = conversations(Scripted(said), "coach")
    talk.submit([opening()], replace(SAMPLING, num_samples=4))
    long, short, infinite, text = talk.collect([7], 0)[7].endings
    assert long.turn_rewards == (0.25, 0.5, 1.0) and long.score.value == 1.75
    assert short.turn_rewards == (1.0,) and short.score.value == 1.0
    assert (infinite.score.failure, text.score.failure) == ("not_finite", "raised")
    assert "reward: 'score' is of type str" in text.score.message


@for_each("lost", [1, 2, 3])
def test_lost_engine_costs_only_the_turn_in_flight(lost: int) -> None:
    engine = Scripted(loses=[lost])
    talk = conversations(engine)
    talk.submit([opening()], SAMPLING)
    with pytest.raises(EngineLost):
        talk.collect([7], 0)
    assert talk.lost_tickets() == []
    (generations,) = talk.collect([7], 0).values()
    assert [ending.score.value for ending in generations.endings] == [1.0, 1.0]
    assert [prompt for prompt, _, _ in engine.asked].count(engine.asked[lost - 1][0]) == 2 and len(engine.asked) == 4


def test_scores_checks_the_failure_rate_after_all_conversations() -> None:
    said = {FIRST: ["yes<|end|>", "yes<|end|>"]}
    talk = conversations(Scripted(said), "mumbles")
    talk.submit([opening()], SAMPLING)
    generations = talk.collect([7], 0)[7]
    with pytest.raises(RewardError, match="2 of 2 rewards failed"):
        talk.scores(generations.endings)


def test_majority_vote_of_validation_counts_the_last_response() -> None:
    said = {
        "1+1": ["no<|end|>", "yes<|end|>", "hm<|end|>"],
        f"1+1no{SURE}": ["yes<|end|>"],
        "1+1hm<|end|><|tool|>HM<|assistant|>": ["well<|end|>"],
    }
    stage = PolicyOptimization(
        canned.OwnPolicy(),
        tokenizer=tokenizer,
        scorer=InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.haggle"}),
        sampling=SAMPLING,
        eval_sampling=SamplingConfig(max_tokens=60, num_samples=3),
        environment=EnvironmentConfig(max_turns=2),
    )
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=Scripted(said)), precision="64-true")
    trainer.validate(stage, canned.loader([canned.prompt_batch(["1+1"])]), verbose=False)
    assert float(trainer.callback_metrics["val/canned/mean_at_3"]) == pytest.approx(2 / 3)
    assert float(trainer.callback_metrics["val/canned/maj_at_3"]) == 1.0


def test_drop_forgets_a_conversation() -> None:
    engine = Scripted()
    talk = conversations(engine)
    talk.submit([opening(7), opening(8)], SAMPLING)
    talk.drop([7])
    assert engine.dropped == [1] and list(talk.collect((), 1)) == [8]
    assert talk.collect((), 0) == {}


def test_collect_without_awaited_groups_returns_although_each_pass_finds_a_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count()
    # Each look at the clock takes a second.
    monkeypatch.setattr(conversations_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    engine = Scripted()
    talk = conversations(engine)
    talk.submit([opening()], SAMPLING)
    assert talk.collect((), 0) == {} and len(engine.asked) == 2
    # The next calls go on.
    assert talk.collect((), 0) == {} and len(engine.asked) == 3
    assert list(talk.collect((), 0)) == [7]


def test_collect_returns_only_the_required_tickets() -> None:
    talk = conversations(Scripted())
    talk.submit([opening(7), opening(-1)], SAMPLING)
    assert list(talk.collect([-1], 0)) == [-1] and list(talk.collect((), 0)) == [7]


def test_replying_reward_refuses_a_scorer_without_replies() -> None:
    with pytest.raises(ConfigError, match="the scorer CannedScorer cannot answer: use RewardPool or InlineScorer"):
        ReplyingReward(canned.CannedScorer(), tokenizer, EnvironmentConfig(max_turns=2))


@pytest.mark.parametrize("staleness", [0, 1])
def test_policy_learns_from_the_sampled_tokens_of_a_conversation(staleness: int, tmp_path: Path) -> None:
    save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48, initializer_range=0.2)
    policy = build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2)
    stage = canned.Keeping(
        policy,
        tokenizer=tokenizer,
        scorer=InlineScorer({"_target_": f"{sample_rewards.__name__}.coach"}),
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=30, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        environment=EnvironmentConfig(max_turns=4),
        schedule=Schedule(staleness),
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=2,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(tmp_path), dtype=torch.float32))
    canned.quiet_trainer(strategy).fit(stage, Loader(["1+1", "12+30"]))
    for step, experience in enumerate(stage.trained_on):
        mask_BT = experience.response_mask.bool()
        assert (experience.response_lengths > mask_BT.sum(dim=1)).any() and mask_BT.any(dim=1).all()
        # A reply rewards its turn with 0.5, and the score is 1. A reply without room is not read, but rewards its turn.
        assert experience.token_level_scores is not None and experience.token_level_rewards is not None
        torch.testing.assert_close(experience.token_level_rewards, experience.token_level_scores)
        torch.testing.assert_close(experience.token_level_rewards.sum(dim=1), experience.scores)
        assert {0.5, 1.0} < set(experience.token_level_scores.unique().tolist()) <= {0.0, 0.5, 1.0, 1.5}
        metrics = stage.metrics[step]
        assert metrics["train/turns"] > 1 and metrics["train/reward"] > 0
        if not staleness:
            # The trainer gives each token the log-prob from its sampling.
            assert metrics["train/rollout_gap_max"] < 1e-4
