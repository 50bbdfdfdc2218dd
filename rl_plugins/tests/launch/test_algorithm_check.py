"""Algorithms and losses are compared with the models and the schedule of a run before a model is loaded."""

from __future__ import annotations

from rl_plugins.launch.algorithm_check import check_method
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each

FILTER = "algorithm.group_filter.oversampling=2"


@for_each(
    ("recipe", "options", "words"),
    [
        ("grpo", ["reference.update_every=50"], ["reference.update_every=50", "algorithm.kl.coefficient above 0"]),
        ("grpo", ["teacher.update_every=50"], ["teacher.update_every=50", "use algorithm=on_policy_distillation"]),
        (
            "preference_optimization",
            ["loss.name=simpo", "reference.update_every=2"],
            ["reference.update_every=2: the loss simpo needs no reference", "another loss"],
        ),
        (
            "grpo",
            ["algorithm=on_policy_distillation"],
            ["needs teacher_log_probs_BT", "with teacher.path=..."],
        ),
        ("prime", ["algorithm=grpo"], ["algorithm.advantage='grpo' does not use process rewards", "prime"]),
        ("grpo", ["algorithm=gdpo", "reward_model.path=m"], ["advantage=gdpo", "leave reward_model.path out"]),
        (
            "grpo",
            ["algorithm=dapo", FILTER, "schedule.max_staleness=1"],
            ["algorithm.group_filter.oversampling=2 cannot be combined", "schedule.max_staleness"],
        ),
        ("ppo", ["critic.warmup_steps=100"], ["critic.warmup_steps=100", "run.steps=100", "never train the policy"]),
    ],
)
def test_check_method_names_the_option_and_the_way_out(recipe: str, options: list[str], words: list[str]) -> None:
    message = message_of(lambda: check_method(configured(recipe, "model.path=m", *options)))
    assert [word for word in words if word not in message] == [], message


@for_each(
    ("recipe", "options"),
    [
        ("grpo", ["reference.update_every=50", "algorithm.kl.coefficient=0.1"]),
        ("grpo", ["algorithm=on_policy_distillation", "teacher.update_every=50"]),
        ("grpo", ["algorithm=on_policy_distillation", "++teacher.paths={default: m}"]),
        ("grpo", ["algorithm=gdpo", "algorithm.kl.coefficient=0.1"]),
        ("grpo", ["algorithm=dapo", FILTER]),
        ("grpo", ["critic.warmup_steps=100"]),
        ("ppo", ["critic.warmup_steps=99", "reward_model.path=m"]),
        ("prime", []),
        ("preference_optimization", ["reference.update_every=2"]),
        ("reward_modeling", []),
    ],
)
def test_check_method_accepts_options_with_a_use(recipe: str, options: list[str]) -> None:
    assert message_of(lambda: check_method(configured(recipe, "model.path=m", *options))) == "nothing is refused"
