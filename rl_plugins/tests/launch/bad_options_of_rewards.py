"""Options of rewards refused by a recipe: the overrides, and required words of the message."""

from __future__ import annotations

from rl_plugins.tests.launch.bad_options import Case

FILE = ["reward=file", "reward.functions.default.path=rewards.py"]
JUDGE_ENGINE = ["reward=judge", "reward.judge.model=model", "placement.judge.actors=1"]
JUDGE = ["reward=judge", "reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=judge"]

REWARD_CHECKS: dict[str, list[Case]] = {
    "rewards": [
        (
            ["~reward.functions.default", "+reward.functions.gsm8k._target_=rl_plugins.rewards.scorers.exact_match"],
            ["no reward for data_source 'addition'", "'gsm8k'", "default"],
        ),
        (["reward.functions.default._target_=no_such.reward"], ["no_such.reward", "no module"]),
        (
            ["reward.functions.default._target_=rl_plugins.rewards.scorers.exact_mach"],
            ["exact_mach", "did you mean 'exact_match'"],
        ),
        (["reward=file", "reward.functions.default.path=gone.py"], ["gone.py", "does not exist"]),
        (["reward=judge"], ["url of JudgeConfig (in a recipe: reward.judge.url) is missing", "model, the name"]),
        (["placement.judge.actors=1"], ["placement.judge.actors=1: no reward of the run asks a judge without address"]),
        (
            [*JUDGE, "reward.judge.model=model", "placement.judge.actors=1"],
            ["no reward of the run asks a judge", "reward.judge.url"],
        ),
        (["reward=judge", "placement.judge.actors=1"], ["placement.judge.actors=1: add reward.judge.model"]),
        (
            ["reward=judge", "placement.judge.actors=1", "reward.judge.model=./no_such_folder"],
            ["no_such_folder: no such folder"],
        ),
        (
            [*JUDGE_ENGINE, "launcher=local", "rollout.engine=transformers"],
            ["placement.judge.actors=1: launcher=local runs in one process"],
        ),
        (
            [
                "placement.judge.actors=1", "reward.judge.model=model",
                "reward.functions.default={_target_: rl_plugins.Judge, config: {model: other}}",
            ],
            ["a judge without url has model=other: leave this model out"],
        ),
        (
            ["placement.judge.vllm={tensor_parallel_size: 2}"],
            ["placement.judge.vllm.tensor_parallel_size", "use placement.judge.gpus"],
        ),
        (["placement.judge.vllm={max_len: 2}"], ["placement.judge.vllm.max_len", "no such engine argument"]),
        ([*JUDGE_ENGINE, "reward.judge.template_file=gone"], ["gone: the file cannot be read"]),
        (
            [*JUDGE_ENGINE, "++reward.functions.addition={_target_: rl_plugins.tests.rewards.sample_rewards.mumbles}"],
            ["the reward fails on a sample of data_source 'addition'"],
        ),
        ([*JUDGE, "reward.judge.votes=0"], ["reward.judge.votes=0: must be from 1 to 100"]),
        (
            [*JUDGE, "reward.judge.key_variable=NO_KEY"],
            ["key_variable=NO_KEY (in a recipe: reward.judge.key_variable)", "no such variable"],
        ),
        ([*JUDGE, "reward.judge.template_file=gone.txt"], ["gone.txt", "the file cannot be read"]),
        ([*JUDGE, "reward.judge.wait_s=1000"], ["reward.deadline_s=900 is below the 1060 s"]),
        (
            [*JUDGE, "reward.judge.wait_s=0.2"],
            ["reward fails on a sample of data_source 'addition'", "127.0.0.1:9/v1/chat/completions cannot be reached"],
        ),
        (FILE, ["rewards.py", "no 'compute_score'", "half"]),
        (
            [*FILE, "reward.functions.default.name=raises"],
            ["reward fails on a sample of data_source 'addition'", "KeyError", "rewards.py"],
        ),
        # The tokenizer is read before a reward is called with tokens.
        (
            [*FILE, "reward.functions.default.name=raises", "model.path=torn_tokenizer"],
            ["torn_tokenizer: its tokenizer cannot be read"],
        ),
        (
            [*FILE, "reward.functions.default.name=of_turns"],
            ["reward fails on a sample of data_source 'addition'", "'token_rewards' has 3 numbers for 2"],
        ),
        (
            [*FILE, "reward.functions.default.name=insists"],
            [
                "reward fails on a sample", "no turn is left", "return a score when turns_left is 0",
                "environment.max_turns",
            ],
        ),
        (
            [*FILE, "reward.functions.default.name=breaks", "environment.max_turns=2"],
            ["reward fails on a sample", "the content of the reply is of type int, not text"],
        ),
        (
            [*FILE, "reward.functions.default.name=has_tools", "environment.max_turns=2", "model.path=users_only"],
            ["users_only' refuses a message of the role 'tool'", "no role tool", "change the message, or the template"],
        ),
        (
            ["data.train_files=[system.parquet]", "model.path=users_only"],
            ["system.parquet, row 40", "users_only' refuses", "system, user", "no role system", "Change the messages"],
        ),
        (["environment.max_turns=0"], ["environment.max_turns=0", "must be at least 1"]),
    ],
}  # fmt: skip
