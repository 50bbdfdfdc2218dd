"""Options refused by other recipes than GRPO: the overrides, and required words of the message."""

from __future__ import annotations

from rl_plugins.tests.launch.bad_options import Case

PAIRS = "data.train_files=[pairs.parquet]"
COSTS = "cost_model.path=model"
NO_VALIDATION = "data.val_files=[]"
STEPS = ["loss.name=process_reward", "data.train_files=[steps.parquet]"]
OTHER_RECIPES: dict[str, list[Case]] = {
    "sft": [
        (["data.response_key=answer"], ["train.parquet, row 0, data.response_key='answer'", "leads nowhere"]),
        (["data.train_files=[no_truth.parquet]"], ["no_truth.parquet, row 32, data.response_key=", "not a text"]),
        (
            ["data.train_files=[pairs.parquet]"],
            ["pairs.parquet, row 0, data.response_key='reward_model.ground_truth'", "nowhere at 'reward_model'"],
        ),
        (
            ["sampling.max_tokens=2"],
            ["every row has more tokens than sampling.max_tokens=2 (the shortest 3): raise it"],
        ),
        (["data.val_files=[pairs.parquet]"], ["pairs.parquet: column 'reward_model' is missing"]),
    ],
    "preference_optimization": [
        ([], ["train.parquet, row 0, data.chosen_key='chosen'", "leads nowhere"]),
        (["data.train_files=[equal_pair.parquet]"], ["equal_pair.parquet, row 33, data.chosen_key=", "the same text"]),
        (["data.train_files=[pair_of_nulls.parquet]"], ["pair_of_nulls.parquet, row 33, data.rejected_key='rejected'"]),
        (
            ["data.train_files=[no_margin.parquet]", "data.margin_key=margin"],
            ["no_margin.parquet, row 33, data.margin_key='margin': holds inf, not a finite number"],
        ),
        (
            [PAIRS, "data.label_key=good", "data.response_key=chosen"],
            ["data.label_key=good: the loss dpo takes pairs", "loss.name=kto"],
        ),
        (
            ["data.train_files=[wrong_label.parquet]", "data.label_key=good", "data.response_key=chosen"],
            ["wrong_label.parquet, row 0, data.label_key='good': holds 1, not true"],
        ),
        ([PAIRS, "data.label_key=good", "data.margin_key=margin"], ["data.margin_key=margin is for pairs"]),
        (["data.train_files=[long_pairs.parquet]"], ["more tokens than sampling.max_tokens=6 (the shortest 61)"]),
        (
            ["data.train_files=[one_long_pair.parquet]", "data.overlong_prompts=error"],
            ["one_long_pair.parquet, row 33: 61 tokens, more than sampling.max_tokens=6"],
        ),
        (
            ["data.train_files=[few_short_pairs.parquet]"],
            ["31 of 40 rows are within data.max_prompt_tokens=26 and sampling.max_tokens=6", "prompts_per_step=32"],
        ),
        ([PAIRS, "loss.name=dpoo"], ["loss.name=dpoo: use one of dpo, ipo"]),
        (
            [PAIRS, "data.margin_key=margin"],
            ["data.margin_key=margin: the loss dpo has no margins: leave data.margin_key out, or train a reward model"],
        ),
        ([PAIRS, "loss.options.bta=1"], ["loss.options: dpo has no option 'bta'", "did you mean 'beta'"]),
        ([PAIRS, "loss.options.beta=-1"], ["loss.options: beta=-1: must be above 0"]),
        ([PAIRS, "loss.options.beta=high"], ["loss.options.beta=high: must be a finite number"]),
        ([PAIRS, "loss.options.beta=1e999"], ["loss.options.beta=inf: must be a finite number"]),
        ([PAIRS, "loss.options.chosen_lengths_N=3"], ["loss.options.chosen_lengths_N", "leave it out"]),
    ],
    "reward_modeling": [
        ([PAIRS, "data.val_files=[test.parquet]"], ["test.parquet, row 0, data.chosen_key='chosen'", "leads nowhere"]),
        ([PAIRS, NO_VALIDATION, "data.label_key=good"], ["data.label_key=good: a reward model learns from pairs"]),
        ([PAIRS, NO_VALIDATION, "loss.name=dpo"], ["loss.name=dpo: use one of bradley_terry, process_reward"]),
        ([PAIRS, NO_VALIDATION, "loss.name=process_reward"], ["pairs.parquet, row 0, data.steps_key='extra_info."]),
        (
            [*STEPS, NO_VALIDATION, "data.train_files=[label_of_2.parquet]"],
            ["label_of_2.parquet, row 32, data.labels_key='extra_info.labels': label 1 is 2.0", "between 0"],
        ),
        (
            [*STEPS, NO_VALIDATION, "data.train_files=[label_too_many.parquet]"],
            ["label_too_many.parquet, row 32", "3 labels for the 2 steps under data.steps_key="],
        ),
        ([*STEPS, NO_VALIDATION, "sampling.max_tokens=3"], ["more tokens than sampling.max_tokens=3 (the shortest 4)"]),
    ],
    "prime": [
        (["process_reward_model.beta=high"], ["process_reward_model.beta=high: must be a finite number"]),
        (["process_reward_model.beta=0"], ["process_reward_model.beta=0: must be above 0"]),
        (["process_reward_model.path=./gone"], ["process_reward_model.path=./gone: no such folder"]),
        (["process_reward_model._target_=builtins.dict"], ["process_reward_model._target_=builtins.dict gives a dict"]),
    ],
    "safe_rlhf": [
        ([], ["algorithm.constraint bounds the mean cost", "cost_model.path", "algorithm.constraint.cost"]),
        (["algorithm.constraint.cost=harm"], ["algorithm.constraint.cost names 'harm'", "returns nothing beside"]),
        (["cost_model.path=./gone"], ["cost_model.path=./gone: no such folder"]),
        (["cost_critic.path=unknown_model"], ["unknown_model/config.json: model_type is 'qwen99'"]),
        ([COSTS, "algorithm.constraint.lambda_init=0"], ["lambda_init=0: must be above 0"]),
        ([COSTS, "algorithm.constraint.lambda_init=6"], ["lambda_init=6: must be at most lambda_max=5"]),
        ([COSTS, "algorithm.constraint.threshold=1e999"], ["threshold=inf: must be a finite number"]),
        ([COSTS, "algorithm.advantage=remax"], ["constraint needs an advantage of the costs", "baseline_rewards_B"]),
        (
            [COSTS, "algorithm.group_filter={_target_: rl_plugins.algorithms.filtering.GroupFilter}"],
            ["constraint bounds the mean cost of all samples", "group_filter", "leave one of the two out"],
        ),
        (
            [COSTS, "cost_critic.optimizer.schedule=ReduceLROnPlateau"],
            ["cost_critic.optimizer.schedule=ReduceLROnPlateau", "a metric"],
        ),
        (
            [COSTS, "placement.cost_critic.actors=1", "strategy.offload.cost_critic=cpu"],
            ["placement.cost_critic.actors=1", "leave strategy.offload.cost_critic=cpu out"],
        ),
        (
            ["algorithm.constraint.cost=harm", "placement.cost_model.actors=1"],
            ["placement.cost_model.actors=1", "name it with cost_model.path"],
        ),
    ],
    "ppo": [
        ([COSTS], ["cost_model.path=", "this algorithm does not use costs: choose algorithm=safe_rlhf"]),
        (["placement.cost_critic.actors=1"], ["placement.cost_critic.actors=1: this algorithm uses no cost critic"]),
    ],
    "online_preference_optimization": [(["loss.name=dpoo"], ["loss.name=dpoo: use one of dpo"])],
}  # fmt: skip
"""Refused by the checks of `run_recipe`, by the name of the recipe."""
