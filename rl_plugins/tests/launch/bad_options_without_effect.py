"""Options refused because stage, engine or device have no use for an option: the overrides, and required words."""

from __future__ import annotations

from rl_plugins.tests.launch.bad_options import Case

LOCAL = ["launcher=local", "rollout.engine=transformers"]

UNUSED: dict[str, list[Case]] = {
    "without effect": [
        (["sampling.temperature=0"], ["batch.samples_per_prompt=8", "sampling.temperature=0", "such as 1"]),
        (
            ["run.target_reward=0.5", "run.eval_every=0"],
            ["run.target_reward=0.5", "does not validate", "run.target_reward=null"],
        ),
        ([*LOCAL, "strategy.sequence_parallel=2"], ["strategy.sequence_parallel=2: launcher=local", "launcher=ray"]),
        (
            [*LOCAL, "strategy.name=fsdp", "strategy.tensor_parallel=2"],
            ["strategy.tensor_parallel=2: launcher=local", "launcher=ray"],
        ),
        (
            ["rollout.engine=transformers", "placement.rollout=split"],
            ["placement.rollout=split: rollout.engine=transformers", "rollout.engine=vllm"],
        ),
        (["rollout.engine=transformers", "rollout.engines=2"], ["rollout.engines=2", "leave rollout.engines out"]),
        (
            ["model.router_replay=rollout"],
            ["model.router_replay=rollout: vLLM returns experts on GPUs only", "rollout.engine=transformers"],
        ),
    ]
}
"""Refused by the checks of `run_recipe`."""

UNUSED_IN_STAGES: dict[str, list[Case]] = {
    "sft": [
        (["reference.update_every=5"], ["reference.update_every=5: stage=sft has no reference: leave it out"]),
        (["cost_model.path=model"], ["cost_model.path=", "not for sft: leave it out"]),
        (["++teacher.paths={a: model}"], ["teacher.paths=", "not for sft: leave it out"]),
        (["data.split_conversations=true"], ["data.split_conversations=true: splits whole", "data.messages_key"]),
        (
            ["batch.updates_per_step=4"],
            ["batch.updates_per_step=4: stage=sft takes one optimizer step", "leave batch."],
        ),
        (
            ["run.keep_best=1", "run.best_metric=val/loss", "run.best_mode=min", "run.eval_every=1"],
            ["there is no run.best_metric=val/loss with data.validate_on=prompts: use run.best_metric=val/reward"],
        ),
        (
            ["data.validate_on=responses", "run.keep_best=1", "run.eval_every=1"],
            ["data.validate_on=responses has no run.best_metric=val/reward", "run.best_metric=val/loss"],
        ),
        (
            ["data.validate_on=responses", "run.target_reward=0.5", "run.eval_every=1"],
            ["run.target_reward=0.5: data.validate_on=responses has no val/reward"],
        ),
        (["data.messages_key=messages", "data.train_files=[train.parquet]"], ["data.messages_key='messages'"]),
        (["data.train_files=[talks.parquet]"], ["column 'prompt' is missing", "For conversations, use data.messages"]),
    ],
    "grpo": [
        (["data.messages_key=messages"], ["data.messages_key=messages: is for stage=sft, not for policy_optimization"]),
        (
            ["data.validate_on=responses"],
            ["data.validate_on=responses: is for stage=sft and stage=preference_optimization, not for", "leave it out"],
        ),
        (["data.split_conversations=true"], ["data.split_conversations=true: is for stage=sft", "leave it out"]),
    ],
    "reward_modeling": [
        (
            ["data.val_files=[pairs.parquet]", "run.keep_best=1"],
            ["run.best_metric=val/reward", "run.best_metric=val/accuracy", "run.best_mode=min"],
        ),
        (["run.target_reward=0.5"], ["run.target_reward=0.5: stage=reward_modeling has no val/reward"]),
        (["batch.updates_per_step=2"], ["batch.updates_per_step=2: stage=reward_modeling takes one optimizer step"]),
    ],
    "preference_optimization": [
        (["batch.updates_per_step=2"], ["updates_per_step=2: stage=preference_optimization takes one optimizer step"]),
        (
            ["data.validate_on=responses", "run.keep_best=1", "run.eval_every=1"],
            ["data.validate_on=responses has no run.best_metric=val/reward", "run.best_metric=val/loss"],
        ),
    ],
    "online_preference_optimization": [
        (["reward_model.path=model"], ["reward_model.path=", "not for online_preference_optimization: leave it out"]),
        (["batch.passes_per_step=2"], ["batch.passes_per_step=2", "not for online_preference_optimization"]),
        (["batch.samples_per_prompt=1"], ["batch.samples_per_prompt=1", "raise it to 2 or more"]),
        (["sampling.temperature=0"], ["sampling.temperature=0", "such as 1"]),
    ],
}
"""Refused by the checks of `run_recipe`, by the name of the recipe."""
