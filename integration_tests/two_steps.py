"""Two steps of every recipe, in the same workers and engines."""

from __future__ import annotations

from pathlib import Path

from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE

PAIRS = "data.train_files=[FOLDER/train_pairs.parquet]"
SAMPLE_TOOLS = "rl_plugins.tests.environments.sample_tools"
REWARD = "reward.functions.default={_target_: integration_tests.rewards.shortness}"
# Required options of each recipe.
EXTRAS = {
    "gdpo": ["reward.functions.default={_target_: integration_tests.rewards.short_and_even}"],
    "on_policy_distillation": ["teacher.path=FOLDER/other"],
    "forward_kl_distillation": ["teacher.path=FOLDER/other"],
    "reinforce_plus_plus": ["algorithm.kl.coefficient=0.01", "algorithm.kl.placement=reward"],
}


# The policy of the tests almost never ends a response.
SEVERAL_TURNS = [
    "environment.max_turns=3",
    "data.max_prompt_tokens=8",
    "sampling.max_tokens=28",
    "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]",
]


# Recipes of stages, by their configuration and data.
STAGES: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "prime": ("prime", []),
    # All models of the algorithm: two critics, a reference, a reward model and a cost model.
    "safe_rlhf": (
        "safe_rlhf",
        [
            "reward_model.path=FOLDER/scores",
            "cost_model.path=FOLDER/scores",
            "algorithm.constraint.cost=harm",
            "reward.functions.default={_target_: integration_tests.rewards.short_and_harmful}",
        ],
    ),
    "reward_modeling": ("reward_modeling", [PAIRS]),
    **{name: ("preference_optimization", [f"loss.name={name}", PAIRS]) for name in PREFERENCE_LOSSES},
    "dpo_validated": (
        "preference_optimization",
        [PAIRS, "data.val_files=[FOLDER/train_pairs.parquet]", "data.validate_on=responses", "run.eval_every=1"],
    ),
    "online_dpo": ("online_preference_optimization", []),
    **{f"grpo_zero_{stage}": ("grpo", [f"strategy.zero_stage={stage}"]) for stage in (1, 2)},
    # The engines pause the groups of the next step while the workers train.
    "grpo_partial": (
        "grpo",
        ["schedule.max_staleness=1", "schedule.ahead=0.5", "rollout.sleep=kv_cache"],
    ),
    # The same file twice, in place of two files.
    "grpo_mixture": (
        "grpo",
        [
            "data.train_files=[]",
            "data.curriculum.share=0.5",
            "data.mixture={one: {files: [WORKPLACE/data/train.parquet], weight: 3}, "
            "two: {files: [WORKPLACE/data/train.parquet]}}",
        ],
    ),
    # No sample has the teacher `default`.
    "two_teachers": (
        "grpo",
        [
            "algorithm=on_policy_distillation",
            "++teacher.paths={addition: FOLDER/other, default: WORKPLACE/tiny}",
            "strategy.offload.teacher=cpu",
        ],
    ),
    "weighted_teachers": (
        "grpo",
        [
            "algorithm=forward_kl_distillation",
            "++teacher.paths={other: FOLDER/other, same: WORKPLACE/tiny}",
            "++teacher.weights={other: 0.75, same: 0.25}",
        ],
    ),
    "own_earlier_self": (
        "grpo",
        ["algorithm=on_policy_distillation", "algorithm.advantage_options.reward_weight=1", "teacher.update_every=1"],
    ),
    # At this rate, the adapter has moved the log-probs by more than the allowed gap after its first step.
    "grpo_lora": ("grpo", ["model.lora.rank=4", "optimizer.lr=1e-2", "algorithm.kl.coefficient=0.01"]),
    "ppo_lora": ("ppo", ["model.lora.rank=4", "critic.lora.rank=2", "optimizer.lr=1e-2"]),
    **{
        f"{name}_conversation": (
            config,
            [*SEVERAL_TURNS, "reward.functions.default._target_=integration_tests.rewards.asks_back"],
        )
        for name, config in (("grpo", "grpo"), ("ppo", "ppo"), ("online_dpo", "online_preference_optimization"))
    },
    # Rewards of turns reach the critic.
    "ppo_stateful": (
        "ppo",
        [
            *SEVERAL_TURNS,
            # The object adds a message to the prompt.
            "data.max_prompt_tokens=12",
            "sampling.max_tokens=24",
            "environment=stateful",
            "environment.stateful=rl_plugins.tests.environments.sample_environments.Lengths",
        ],
    ),
    # Each response calls a tool twice, in the process of the worker's tools.
    "grpo_tools": (
        "grpo",
        [
            *SEVERAL_TURNS,
            f"data.max_prompt_tokens={28 + len('<|system|>add(a,b)')}",
            "sampling.max_tokens=100",
            "environment=tools",
            f"environment.tools=[{SAMPLE_TOOLS}.add]",
            f"environment.parser={SAMPLE_TOOLS}.add_to_every_response",
            f'data.chat_template="{TOOL_CHAT_TEMPLATE}"',
        ],
    ),
    # The client of OpenAI calls the policy from processes of each worker, in three sequences.
    "grpo_agent": (
        "grpo",
        [
            "environment=agent",
            "environment.agent={_target_: rl_plugins.tests.environments.sample_agents.delegate, max_tokens: 6}",
            "sampling.max_tokens=120",
        ],
    ),
    "reward_modeling_lora": ("reward_modeling", ["model.lora.rank=4", "run.export_lora=adapter", PAIRS]),
}


# Recipes without sampling take one optimizer step of all rows.
GIVEN_RESPONSES = ("sft", "preference_optimization", "reward_modeling")


# Recipes for runs over FSDP2, too, with further options; all other recipes run over ZeRO-3 alone.
FSDP = "_fsdp"
OVER_FSDP = {
    # Two copies of the models, which stay in host memory.
    f"grpo{FSDP}": ["strategy.workers_per_copy=1", "strategy.offload.policy=cpu", "strategy.offload.reference=cpu"],
    f"rloo{FSDP}": ["strategy.sequence_parallel=2"],
    f"ppo{FSDP}": ["strategy.tensor_parallel=2"],
    f"reward_modeling_lora{FSDP}": [],
}


def recipe(run: str, workplace: Path, folder: Path) -> list[str]:
    """Name and overrides of the recipe for two steps of an algorithm or of another stage."""
    name = run.removesuffix(FSDP)
    config, extras = STAGES.get(name, ("grpo", [f"algorithm={name}", *EXTRAS.get(name, [])]))
    return [
        config, f"run.name={run}", f"run.output_dir={folder}", "run.steps=2", "run.eval_every=0",
        "run.eval_before=false", "run.export=true", "tracking.enabled=false", f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", "data.max_prompt_tokens=28", "sampling.max_tokens=8",
        "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "optimizer.lr=1e-3",
        "placement.device=cpu", f"strategy.name={'fsdp' if run.endswith(FSDP) else 'zero'}",
        *(() if config in GIVEN_RESPONSES else ("batch.updates_per_step=2",)),
        # All runs share the engines, and the engines exist before the first run with an adapter.
        "rollout.engines=per_worker", "rollout.check_updates=1", "rollout.lora=merged",
        # Rewards differ from sample to sample: the groups and pairs have something to teach.
        *(() if config == "reward_modeling" or name.endswith(("_stateful", "_agent")) else (REWARD,)),
        *(extra.replace("WORKPLACE", str(workplace)).replace("FOLDER", str(folder)) for extra in extras),
        *OVER_FSDP.get(run, []),
    ]  # fmt: skip
