"""StatefulEnvironment: first messages, turns with rewards, endings, failures, and training on the rewards of turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.environments.object_conversations import StatefulConversations
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.errors import ConfigError, EngineLost, RewardError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rewards.conversations import Conversations, Opening
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.trajectory import Ending, EnvironmentAnswer
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.data.test_tokenization import digits_tokenizer
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import kept_by, patient, wait_until
from rl_plugins.tests.rewards.test_conversations import Scripted
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.test_scheduled_sampler import Loader

HERE = "rl_plugins.tests.environments.sample_environments"
tokenizer = canned.tokenizer
SAMPLING = SamplingConfig(max_tokens=400)
START = "<|user|>count<|user|>5<|assistant|>"


def environment_of(target: Any, **options: Any) -> StatefulEnvironment:
    return StatefulEnvironment(target, **{"max_turns": 3, "deadline_s": patient(60), **options})


@pytest.fixture(scope="module")
def counting() -> Iterator[StatefulEnvironment]:
    with closing(environment_of(f"{HERE}.Count")) as made:
        yield made


def talk_with(environment: StatefulEnvironment, engine: Scripted) -> Conversations:
    objects = StatefulConversations(environment.host, tokenizer, environment)
    return Conversations(objects, tokenizer, environment.max_turns).by(engine)


def opening(ground_truth: str) -> Opening:
    about = ScoringRequest("s", "", ground_truth, {}, [{"role": "user", "content": "count"}])
    return Opening(7, tokenizer.encode("row"), 5, about=about)


def converse(
    environment: StatefulEnvironment,
    said: dict[str, list[str]],
    *,
    ground_truth: str = "5",
    num_samples: int = 1,
    max_tokens: int = 60,
) -> Generations:
    """Run conversations with a script: text so far to responses."""
    talk = talk_with(environment, Scripted(said))
    talk.submit([opening(ground_truth)], SamplingConfig(max_tokens=max_tokens, num_samples=num_samples))
    generations = talk.collect([7], 0)[7]
    talk.scores(generations.endings)
    return generations


def ending_of(environment: StatefulEnvironment, said: dict[str, list[str]], **options: Any) -> Ending:
    ending: Ending = converse(environment, said, **options).endings[0]
    return ending


COUNTING = {
    START: ["2<|end|>"],
    f"{START}2<|end|><|user|>7<|assistant|>": ["3<|end|>"],
    f"{START}2<|end|><|user|>7<|assistant|>3<|end|><|user|>10<|assistant|>": ["0<|end|>"],
}


def test_object_starts_the_conversation_rewards_turns_and_scores(counting: StatefulEnvironment) -> None:
    generations = converse(counting, COUNTING)
    ending: Ending = generations.endings[0]
    assert ending.prompt == [{"role": "user", "content": "count"}, {"role": "user", "content": "5"}]
    assert tokenizer.decode(list(ending.prompt_ids)) == START
    (response,), (mask,) = generations.responses(), generations.response_masks() or []
    assert tokenizer.decode(np.array(response)[np.array(mask) == 1]) == "2<|end|>3<|end|>0<|end|>"
    assert (ending.turns, ending.score.details, ending.last) == (3, {"last": 0.0}, "0")
    assert ending.turn_rewards == pytest.approx((0.2, 0.3, 10.0)) and ending.score.value == pytest.approx(10.5)
    # The reward of a turn belongs to the last token that the policy sampled in the turn.
    assert [tokenizer.decode(response[: end + 1]).count("<|end|>") for end in ending.turn_ends] == [1, 2, 3]
    assert {response[end] for end in ending.turn_ends} == {tokenizer.eos_token_id}
    assert ending.transcript() == "2\n[user] 7\n[assistant] 3\n[user] 10\n[assistant] 0\n[user] bye"


@for_each("lost", [1, 2, 3])
def test_lost_engine_costs_only_the_turn_in_flight_and_repeats_no_step(
    counting: StatefulEnvironment, lost: int
) -> None:
    engine = Scripted(COUNTING, loses=[lost])
    talk = talk_with(counting, engine)
    talk.submit([opening("5")], SAMPLING)
    with pytest.raises(EngineLost):
        talk.collect([7], 0)
    assert talk.lost_tickets() == []
    (generations,) = talk.collect([7], 0).values()
    # A step that was made twice would add its number twice.
    assert generations.endings[0].turn_rewards == pytest.approx((0.2, 0.3, 10.0)) and len(engine.asked) == 4


@pytest.mark.parametrize(
    ("target", "options", "said", "rewards"),
    [
        ("Count", {"max_turns": 1}, COUNTING, (0.2,)),
        ("Count", {"max_tokens": 4}, COUNTING, (0.2,)),
        ("Judge", {"max_turns": 2}, {}, (0.0, 2.0)),
        ("Judge", {"max_tokens": 4}, {}, (1.0,)),
    ],
    ids=["rewards at the bound", "rewards without room", "score at the bound", "score without room"],
)
def test_conversation_that_the_object_does_not_end_has_the_rewards_so_far_or_the_score(
    target: str, options: dict[str, Any], said: dict[str, list[str]], rewards: tuple[float, ...]
) -> None:
    if target == "Judge":
        start = "<|user|>talk<|assistant|>"
        said = {start: ["a<|end|>"], f"{start}a<|end|><|user|>and?<|assistant|>": ["b<|end|>"]}
    tokens = {"max_tokens": options.pop("max_tokens")} if "max_tokens" in options else {}
    with closing(environment_of(f"{HERE}.{target}", **options)) as environment:
        ending = ending_of(environment, said, **tokens)
    assert ending.turn_rewards == pytest.approx(rewards) and ending.score.value == pytest.approx(sum(rewards))


def test_rewards_of_tokens_end_the_conversation_and_are_for_the_tokens_of_all_responses() -> None:
    start = "<|user|>talk<|assistant|>"
    said = {start: ["a<|end|>"], f"{start}a<|end|><|user|>and?<|assistant|>": ["bc<|end|>"]}
    numbers = (1.0, 2.0, 3.0, 4.0, 5.0)

    def with_fault(fault: str) -> Ending:
        target = {"_target_": f"{HERE}.Tokens", "fault": fault}
        with closing(environment_of(target, max_failure_rate=1.0)) as environment:
            return ending_of(environment, said)

    ending = with_fault("")
    assert (ending.score.value, tuple(ending.score.token_rewards or ())) == (15.0, numbers)
    assert ending.turn_rewards == (3.0, 12.0) and ending.score.details == {"n": 5.0}
    ending = with_fault("score")
    assert (ending.score.value, tuple(ending.score.token_rewards or ())) == (1.0, numbers)
    assert ending.turn_rewards == (3.0, -2.0) and ending.transcript().endswith("[user] bye")
    for fault, words in {
        "short": "'token_rewards' has 4 numbers for 5 sampled tokens",
        "same": "has rewards of turns and 'token_rewards'",
        "earlier": "has rewards of turns and 'token_rewards'",
    }.items():
        score = with_fault(fault).score
        assert score.failure == "raised" and words in score.message and score.token_rewards is None


class Acts(Scripted):
    """A script in which each request gets the next response."""

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        (prompt,) = map(tokenizer.decode, prompts)
        self.said[prompt] = self.said[prompt][1:] + self.said[prompt][:1]
        return super().generate(prompts, sampling, seeds)


def test_failed_objects_end_one_conversation_each_and_are_counted() -> None:
    acts = {"<|user|>go<|assistant|>": [f"{act}<|end|>" for act in ("die", "raise", "nan", "end")]}
    with closing(environment_of(f"{HERE}.Obey", max_failure_rate=0.9)) as environment:
        talk = talk_with(environment, Acts(acts))
        about = ScoringRequest("s", "", "", {}, [])
        talk.submit([Opening(7, [1], 5, about=about)], SamplingConfig(num_samples=4))
        endings: list[Ending] = talk.collect([7], 0)[7].endings
        of_act = {ending.last: talk.scores(endings)[place] for place, ending in enumerate(endings)}
        with pytest.raises(RewardError, match=r"49 of 52 rewards failed, more than max_failure_rate=0.9"):
            talk.scores([ending for ending in endings if ending.last == "die"] * 40)
    assert {act: score.failure for act, score in of_act.items()} == {
        "die": "died", "raise": "raised", "nan": "not_finite", "end": None
    }  # fmt: skip
    assert {score.value for score in of_act.values()} == {None, 0.5}


def test_conversation_whose_object_fails_at_the_start_has_no_response() -> None:
    with closing(environment_of(f"{HERE}.Obey", max_failure_rate=1.0)) as environment:
        generations = converse(environment, {}, ground_truth="raise", num_samples=2)
    assert generations.responses() == [[], []] and generations.finish_reasons == ["abort", "abort"]
    assert [ending.score.failure for ending in generations.endings] == ["raised"] * 2
    assert generations.endings[0].transcript() == generations.endings[0].last == ""


def test_conversation_without_any_reward_is_a_failure_and_no_zero() -> None:
    start = "<|user|>talk<|assistant|>"
    with closing(environment_of(f"{HERE}.Endless", max_turns=1, max_failure_rate=1.0)) as environment:
        ending = ending_of(environment, {start: ["a<|end|>"]})
    assert ending.score.failure == "raised" and ending.score.value is None
    assert "ended after 1 turns without a reward: write `async def score(self)`" in ending.score.message


@for_each("name", ["Points", "Delegates"])
def test_score_is_a_method_of_the_object_or_of_the_class_behind_an_attribute(name: str) -> None:
    start = "<|user|>talk<|assistant|>"
    with closing(environment_of(f"{HERE}.{name}", max_turns=1)) as environment:
        assert ending_of(environment, {start: ["a<|end|>"]}).score.value == 1.0


def test_first_messages_beyond_the_limit_are_a_failure() -> None:
    with closing(environment_of(f"{HERE}.Count", max_prompt_tokens=4, max_failure_rate=1.0)) as environment:
        ending = ending_of(environment, {})
    assert "first messages of an environment have 9 tokens, more than max_prompt_tokens=4" in ending.score.message


def test_first_messages_for_which_the_chat_template_raises_any_exception_are_a_failure() -> None:
    each = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template = each + "{{ messages[0].content + 1 if messages | length < 3 }}"
    with closing(
        environment_of(f"{HERE}.Count", template_options={"chat_template": template}, max_failure_rate=1.0)
    ) as environment:
        ending = ending_of(environment, {})
    assert ending.score.failure == "raised"
    assert "refuses messages of the roles user, user: can only" in ending.score.message


def test_first_messages_that_the_tokenizer_cannot_encode_are_a_failure(counting: StatefulEnvironment) -> None:
    objects = StatefulConversations(counting.host, digits_tokenizer(), counting)
    objects.start(0, opening("5").about, 5)
    answers: dict[int, EnvironmentAnswer] = {}

    def has_answer() -> bool:
        answers.update(objects.answers(0.1))
        return bool(answers)

    wait_until(has_answer, "the object has answered")
    score = answers[0]
    assert isinstance(score, Score) and score.failure == "raised" and "cannot encode the text" in score.message


def test_drop_closes_the_objects_of_conversations() -> None:
    with closing(environment_of(f"{HERE}.Count")) as environment:
        talk = talk_with(environment, Scripted(COUNTING))
        talk.submit([opening("5")], SamplingConfig(num_samples=3))
        loader = kept_by(environment.host.pid)
        wait_until(lambda: len(loader.children()) == 3, "all objects have started")
        talk.drop([7])
        while loader.children():
            assert environment.host.answers(0.1) == {}
        assert talk.collect((), 0) == {}


@pytest.mark.parametrize("advantage", ["gigpo", "bilevel_gae"])
def test_policy_learns_from_rewards_at_the_last_tokens_of_turns(tmp_path: Any, advantage: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    save_tiny_policy(tmp_path, **sizes)
    environment = environment_of(f"{HERE}.Lengths", max_turns=2)
    stage = canned.Keeping(
        build_model(**sizes),
        tokenizer=tokenizer,
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=60, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        algorithm=Algorithm(advantage=advantage),
        critic=CriticConfig(path=str(tmp_path)),
        environment=environment,
        optimizer=OptimizerConfig(lr=0.01),
        max_steps=1,
    )
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(tmp_path)))
    canned.quiet_trainer(strategy).fit(stage, Loader(["1+1", "12+30"]))
    environment.close()
    (samples,), (metrics,) = stage.trained_on, stage.metrics
    assert samples.token_level_scores is not None and samples.token_level_rewards is not None
    torch.testing.assert_close(samples.token_level_rewards, samples.token_level_scores)
    torch.testing.assert_close(samples.token_level_rewards.sum(dim=1), samples.scores)
    assert metrics["train/turns"] > 1
    assert (samples.token_level_scores > 0).sum() == metrics["train/turns"] * len(samples)
    assert samples.response_mask[samples.token_level_scores > 0].all()
    # Each turn ends at the token with its reward, and the second begins in the same state in all samples.
    assert samples.turns is not None and samples.states is not None and samples.advantages is not None
    ends = (samples.token_level_scores > 0).long()
    sampled = samples.response_mask.bool()
    assert torch.equal(samples.turns[sampled], (ends.cumsum(dim=1) - ends)[sampled])
    assert len(samples.states[sampled & (samples.turns == 1)].unique()) == 1
    assert len(samples.states[sampled & (samples.turns == 0)].unique()) == 2
    for advantages, turns, learned in zip(samples.advantages, samples.turns, sampled, strict=True):
        numbers = [len(advantages[learned & (turns == turn)].unique()) for turn in turns[learned].unique()]
        assert numbers == [1] * len(numbers) or advantage == "bilevel_gae"
    # The trainer gives each token the log-prob from its sampling, after the prompt of the object.
    assert metrics["train/rollout_gap_max"] < 1e-4
    assert all(len(messages) == 2 for messages in samples.columns["prompt"])
    prompts = [tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in samples.prompts]
    assert len(set(prompts)) == 2 and "12+30<|user|>" in prompts[-1]


def test_stage_needs_a_scorer_or_a_stateful_environment(counting: StatefulEnvironment) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "sampling": SamplingConfig(max_tokens=8), "max_steps": 1}
    with pytest.raises(ConfigError, match=r"scorer=None: name a reward function, or an environment="):
        PolicyOptimization(build_model(), **options)
    scorer = InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"})
    with pytest.raises(ConfigError, match="a stateful environment scores its conversations by itself"):
        PolicyOptimization(build_model(), scorer=scorer, environment=counting, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 0}, "max_turns=0: must be at least 1"),
        ({"max_objects": 0}, "max_objects=0: must be at least 1"),
        ({"deadline_s": 0.0}, "deadline_s=0.0: must be above 0"),
        ({"max_failure_rate": 2.0}, "max_failure_rate=2.0: must be between 0 and 1"),
        ({"pass_env": ["NO_SUCH_KEY"]}, "pass_env=[NO_SUCH_KEY]"),
        ({"environment": f"{HERE}.Cuont"}, "did you mean 'Count'"),
        ({"environment": {"path": "no_such_file.py", "name": "Game"}}, "environment file 'no_such_file.py' does not"),
        ({"environment": {"size": 3}}, "names no function: give `_target_`, or `path` and `name`"),
    ],
)
def test_environment_refuses_bad_options_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StatefulEnvironment(**{"environment": f"{HERE}.Count", **options})
    assert said in str(refused.value) and "\n" not in str(refused.value)
