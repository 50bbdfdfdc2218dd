"""Two steps of every recipe, on one Ray cluster, one pair of workers and a vLLM engine for each of them.

Run as a script by `test_two_steps.py`: `two_steps.py WORKPLACE FOLDER NAME...`. The runs follow each other in the same
workers, so that all of them take little longer than one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.shared_workers import train_in_turn
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import RecipeConfig, parse_config

PAIRS = "data.train_files=[WORKPLACE/data/train_pairs.parquet]"
REWARD = "reward.functions.default={_target_: integration_tests.rewards.shortness}"
# What a recipe cannot run without.
EXTRAS = {
    "gdpo": ["reward.functions.default={_target_: integration_tests.rewards.short_and_even}"],
    "on_policy_distillation": ["teacher.path=WORKPLACE/other"],
    "forward_kl_distillation": ["teacher.path=WORKPLACE/other"],
    "reinforce_plus_plus": ["algorithm.kl.coefficient=0.01", "algorithm.kl.placement=reward"],
}


# Recipes of stages, by their configuration and what they train on.
STAGES: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "prime": ("prime", []),
    "reward_modeling": ("reward_modeling", [PAIRS]),
    **{name: ("preference_optimization", [f"loss.name={name}", PAIRS]) for name in PREFERENCE_LOSSES},
    "online_dpo": ("online_preference_optimization", []),
    **{f"grpo_zero_{stage}": ("grpo", [f"strategy.zero_stage={stage}"]) for stage in (1, 2)},
    # The same file twice, as if they were two.
    "grpo_mixture": (
        "grpo",
        [
            "data.train_files=[]",
            "data.curriculum.share=0.5",
            "data.mixture={one: {files: [WORKPLACE/data/train.parquet], weight: 3}, "
            "two: {files: [WORKPLACE/data/train.parquet]}}",
        ],
    ),
    # At this rate the adapter has moved the log-probs by more than the gap that is allowed after its first step.
    "grpo_lora": ("grpo", ["model.lora.rank=4", "optimizer.lr=1e-2", "algorithm.kl.coefficient=0.01"]),
    "ppo_lora": ("ppo", ["model.lora.rank=4", "critic.lora.rank=2", "optimizer.lr=1e-2"]),
    # The policy of the tests hardly ever ends a response by itself.
    **{
        f"{name}_conversation": (
            config,
            [
                "environment.max_turns=3",
                "data.max_prompt_tokens=8",
                "sampling.max_tokens=28",
                "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]",
                "reward.functions.default._target_=integration_tests.rewards.asks_back",
            ],
        )
        for name, config in (("grpo", "grpo"), ("ppo", "ppo"), ("online_dpo", "online_preference_optimization"))
    },
    "reward_modeling_lora": ("reward_modeling", ["model.lora.rank=4", "run.export_lora=adapter", PAIRS]),
}


# Recipes that are run over FSDP2, too, with further options; all others are run over ZeRO-3 alone.
FSDP = "_fsdp"
OVER_FSDP = {
    f"grpo{FSDP}": [],
    f"rloo{FSDP}": ["strategy.sequence_parallel=2"],
    f"ppo{FSDP}": ["strategy.tensor_parallel=2"],
    f"reward_modeling_lora{FSDP}": [],
}


def recipe(run: str, workplace: Path, folder: Path) -> RecipeConfig:
    """The configuration of two steps of an algorithm or of another stage."""
    name = run.removesuffix(FSDP)
    config, extras = STAGES.get(name, ("grpo", [f"algorithm={name}", *EXTRAS.get(name, [])]))
    overrides = [
        f"run.name={run}", f"run.output_dir={folder}", "run.steps=2", "run.eval_every=0", "run.eval_before=false",
        "run.export=true", "tracking.enabled=false", f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", "data.max_prompt_tokens=28", "sampling.max_tokens=8",
        "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3",
        "placement.device=cpu", f"strategy.name={'fsdp' if run.endswith(FSDP) else 'zero'}",
        # All of them share the engines, which are made before anyone has an adapter.
        "rollout.engines=per_worker", "rollout.check_updates=1", "rollout.lora=merged",
        # Rewards that differ from sample to sample, so that there are groups and pairs to learn from.
        *(() if config == "reward_modeling" else (REWARD,)),
        *(extra.replace("WORKPLACE", str(workplace)) for extra in extras),
        *OVER_FSDP.get(run, []),
    ]  # fmt: skip
    return parse_config(compose_config(config, overrides))


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    train_in_turn([recipe(name, *folders) for name in sys.argv[3:]], folders[1] / "ray")
