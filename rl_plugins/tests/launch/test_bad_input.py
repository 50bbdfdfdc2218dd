"""Whatever is wrong: one line that names it and the way out, status 2, at once, before anything heavy starts."""

from __future__ import annotations

import sys
import time
from ctypes.util import find_library

import pytest
from huggingface_hub import constants

from rl_plugins.launch import local, ray_train
from rl_plugins.launch.command_line import recipe_main
from rl_plugins.launch.resources import local_gpus

GOOD = [
    "model.path=model", "data.train_files=[train.parquet]", "data.val_files=[test.parquet]",
    "placement.num_workers=1", "placement.device=cpu", "sampling.max_tokens=6", "data.max_prompt_tokens=26",
]  # fmt: skip

MIXED = ["data.train_files=[]"]

# What is wrong, the overrides that make it so, and what the message must say.
CASES = [
    # The command line
    ("unknown key", ["modl.path=x"], ["'modl.path'", "did you mean 'model.path'"]),
    ("unknown option of a group", ["run.step=3"], ["'run.step'", "'run.steps'"]),
    ("unknown option of a node", ["algorithm.clip_hi=1"], ["algorithm.clip_hi", "policy_loss_options.clip_high"]),
    (
        "arguments of a reward", ["reward.functions.default={_target_: a.b, value: 1}"],
        ["'reward.functions.default.value'", "++reward.functions.default=..."],
    ),
    ("another reward", ["reward.functions.sums={_target_: a.b}"], ["++reward.functions.sums="]),
    ("unknown key in a mapping", ["run={stepp: 3}"], ["'run.stepp'", "'run.steps'"]),
    ("unknown key added", ["+foo.bar=1"], ["no option 'foo'", "--cfg job"]),
    ("unknown key removed", ["~algorithm.kll"], ["'algorithm.kll'", "did you mean 'algorithm.kl'"]),
    ("text for a whole number", ["run.steps=abc"], ["'run.steps'", "'abc'", "a whole number"]),
    ("nothing for a whole number", ["run.steps="], ["'run.steps'", "''", "a whole number"]),
    ("text for a number", ["optimizer.lr=fast"], ["'optimizer.lr'", "'fast'", "a number"]),
    ("text for a switch", ["run.resume=maybe"], ["'run.resume'", "'maybe'", "true or false"]),
    ("number for a list", ["optimizer.betas=3"], ["'optimizer.betas'", "a list"]),
    ("number for a group", ["run=3"], ["'run'", "is a group"]),
    ("unknown algorithm", ["algorithm=grop"], ["algorithm 'grop'", "there is: ", "grpo"]),
    ("nothing for a group", ["algorithm=null"], ["group", "--help"]),
    ("unknown reference", ["run.name='${runn.id}'"], ["'run.name'", "runn.id"]),
    ("unknown reward", ["reward=exact"], ["reward 'exact'", "exact_match"]),
    ("unknown recipe", ["--config-name", "grop"], ["recipe 'grop'", "gsm8k_grpo"]),
    ("bracket left open", ["data.train_files=[a"], ["'data.train_files=[a'", "key=value"]),
    ("no equals sign", ["foo"], ["'foo'", "key=value"]),
    ("a path with brackets", ["model.path=/a (b)"], ["'model.path=/a (b)'", "shell's: 'model.path=\"...\"'"]),
    ("a path with an umlaut", ["+a.b=/größe"], ["'+a.b=/größe'", "shell's: '+a.b=\"...\"'"]),
    ("such a path in a list", ["data.train_files=[a#b]"], ["'data.train_files=[a#b]'", "'data.train_files=[\"...\"]'"]),
    (
        "a path with a comma", ["model.path=/a,b"],
        ["'model.path'", "'/a,b' has a comma", "'model.path=\"...\"'", "'model.path=[...]'", "--multirun"],
    ),
    ("no model", ["model.path=???"], ["'model.path'", "Hugging Face name or folder", "add model.path="]),
    # Words and numbers
    ("unknown launcher", ["launcher=slurm"], ["launcher=slurm", "ray, local"]),
    ("vLLM in one process", ["launcher=local"], ["launcher=local", "rollout.engine=transformers"]),
    ("unknown strategy", ["strategy.name=ddp"], ["strategy.name=ddp", "zero, fsdp"]),
    (
        "blocks cut that have adapters",
        ["strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=2", "model.lora.rank=4"],
        ["model.lora.rank=4", "tensor_parallel=1"],
    ),
    ("blocks cut under ZeRO", ["strategy.tensor_parallel=2"], ["tensor_parallel=2", "strategy.name=fsdp"]),
    (
        "groups that are not whole", ["strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=3"],
        ["tensor_parallel=2", "num_workers=3"],
    ),
    (
        "sequences of groups that are not whole", ["strategy.sequence_parallel=2", "placement.num_workers=3"],
        ["sequence_parallel=2", "num_workers=3"],
    ),
    (
        "blocks and sequences cut",
        ["strategy.name=fsdp", "strategy.tensor_parallel=2", "strategy.sequence_parallel=2", "placement.num_workers=2"],
        ["tensor_parallel=2", "sequence_parallel=2", "set one of them to 1"],
    ),
    ("a stage of ZeRO under FSDP2", ["strategy.name=fsdp", "strategy.zero_stage=2"], ["zero_stage=2", "name=zero"]),
    ("no duration", ["run.time_limit=4 hours"], ["run.time_limit=4 hours", "3h50m"]),
    ("no time at all", ["run.time_limit=0m"], ["run.time_limit=0m", "3h50m"]),
    ("an unknown guard", ["guard.action=panic"], ["guard.action=panic", "warn, stop, roll_back"]),
    ("a bound below 0", ["guard.kl=-1"], ["guard.kl=-1", "must be above 0, or null"]),
    (
        "the best by nothing", ["run.keep_best=2", "run.eval_every=0"],
        ["run.keep_best=2", "val/reward", "nothing is validated", "run.eval_every"],
    ),
    ("an average that keeps all", ["average.keep=1"], ["average.keep=1", "from 0 to below 1"]),
    ("a replay that validates", ["debug.replay=/"], ["debug.replay=/", "run.eval_every=0"]),
    (
        "a replay of nothing", ["debug.replay=/not/there", "run.eval_every=0"],
        ["debug.replay=/not/there", "no such folder"],
    ),
    ("unknown transport", ["rollout.transport=tcp"], ["rollout.transport=tcp", "shared_memory"]),
    (
        "weights given back that adapters do not bring",
        ["model.lora.rank=4", "rollout.lora=adapter", "rollout.sleep=all"],
        ["rollout.sleep=all", "rollout.sleep=kv_cache", "rollout.lora=merged"],
    ),
    (
        "an adapter that vLLM has no room for", ["model.lora.rank=600", "rollout.lora=adapter"],
        ["rank 512 at most", "600", "rollout.lora=merged"],
    ),
    ("unknown sleep", ["rollout.sleep=deep"], ["rollout.sleep=deep", "kv_cache, all, none"]),
    (
        "no engines", ["rollout.engines=0"],
        ["rollout.engines=0", "per_worker", "at least 1"],
    ),
    ("staleness below 0", ["schedule.max_staleness=-1"], ["schedule.max_staleness=-1", "0 or more"]),
    ("more ahead than stale", ["schedule.max_staleness=1", "schedule.ahead=2"], ["schedule.ahead=2", "max_staleness"]),
    (
        "ahead of a sleeping engine", ["rollout.engine=vllm", "schedule.max_staleness=1", "rollout.sleep=all"],
        ["rollout.sleep=all", "leave rollout.sleep out"],
    ),
    (
        "ahead without a queue", ["stage=online_preference_optimization", "schedule.max_staleness=1"],
        ["schedule.max_staleness=1", "not of online_preference_optimization"],
    ),
    ("unknown engines", ["rollout.engines=many"], ["rollout.engines=many", "per_worker"]),
    ("no steps", ["run.steps=0"], ["run.steps=0", "at least 1"]),
    ("negative temperature", ["sampling.temperature=-1"], ["sampling.temperature=-1", "0 or more"]),
    (
        "the same sample many times", ["validation.samples_per_prompt=4"],
        ["validation.samples_per_prompt=4", "validation.temperature=0", "such as 1"],
    ),
    ("top_p above 1", ["sampling.top_p=1.5"], ["sampling.top_p=1.5", "at most 1"]),
    ("learning rate not a number", ["optimizer.lr=nan"], ["optimizer.lr=nan", "0 or more"]),
    ("shares of workers", ["placement.num_workers=3"], ["batch.prompts_per_step=32", "make it 33", "num_workers"]),
    ("shares of updates", ["batch.updates_per_step=5"], ["batch.updates_per_step=5", "prompts_per_step 35"]),
    # Offload
    ("unknown place", ["strategy.offload.policy=disk"], ["strategy.offload.policy=disk", "while_sampling, stay, cpu"]),
    ("no place of a frozen model", ["strategy.offload.teacher=while_sampling"], ["strategy.offload.teacher", "nvme"]),
    (
        "files without a folder", ["strategy.offload.policy=nvme"],
        ["strategy.offload.policy=nvme", "strategy.offload.folder"],
    ),
    (
        "files under stage 2", ["strategy.offload.critic=nvme", "strategy.zero_stage=2"],
        ["strategy.offload.critic=nvme", "strategy.zero_stage=3"],
    ),
    (
        "whole model on the host", ["strategy.offload.reference=cpu", "strategy.zero_stage=1"],
        ["strategy.offload.reference=cpu", "strategy.zero_stage=3"],
    ),
    (
        "offload in one process", ["launcher=local", "rollout.engine=transformers", "strategy.offload.policy=cpu"],
        ["strategy.offload.policy=cpu", "launcher=ray"],
    ),
    pytest.param(
        "files without libaio", ["strategy.offload.policy=nvme", "strategy.offload.folder=files"],
        ["offload to nvme needs libaio", "libaio-dev", "offload to cpu"],
        marks=pytest.mark.skipif(find_library("aio") is not None, reason="this machine has libaio"),
    ),
    # The machine
    (
        "too little memory", ["rollout.cpu_kv_cache_gib=100000"],
        ["need 100000 GiB", "rollout.engines=1", "rollout.cpu_kv_cache_gib=100000", "GiB of memory: lower"],
    ),
    (
        "a pool without a model", ["placement.teacher.actors=2"],
        ["placement.teacher.actors=2", "teacher.path", "leave the pool out"],
    ),
    (
        "a pool that nobody asks", ["placement.reference.actors=1", "placement.cpus_per_worker=0.01"],
        ["placement.reference.actors=1", "never asks a reference"],
    ),
    (
        "a pool for a moving reference", ["placement.reference.actors=1", "reference.update_every=2"],
        ["placement.reference.actors=1", "reference.update_every=2", "leave one out"],
    ),
    (
        "a pool in one process",
        ["launcher=local", "rollout.engine=transformers", "placement.teacher.actors=1", "teacher.path=model"],
        ["placement.teacher.actors=1", "launcher=ray"],
    ),
    (
        "a pool for a critic that nobody asks", ["placement.critic.actors=1", "placement.cpus_per_worker=0.01"],
        ["placement.critic.actors=1", "never asks a critic"],
    ),
    (
        "offload of a critic with processes of its own",
        ["algorithm=ppo", "placement.critic.actors=1", "strategy.offload.critic=cpu"],
        ["placement.critic.actors=1", "leave strategy.offload.critic=cpu out"],
    ),
    (
        "a critic in one process",
        ["algorithm=ppo", "launcher=local", "rollout.engine=transformers", "placement.critic.actors=1"],
        ["placement.critic.actors=1", "launcher=ray"],
    ),
    ("no time for a critic", ["placement.critic.deadline_s=0"], ["placement.critic.deadline_s=0", "above 0"]),
    ("unknown place of engines", ["placement.rollout=apart"], ["placement.rollout=apart", "colocated, split"]),
    ("unknown layout", ["placement.strategy=TIGHT"], ["placement.strategy=TIGHT", "PACK, SPREAD"]),
    ("too few CPUs", ["placement.cpus_per_worker=5000"], ["needs 5000 CPUs", "has ", "placement.cpus_per_worker"]),
    pytest.param(
        "no GPU", ["placement.device=cuda"], ["placement.device=cuda", "no NVIDIA GPU", "placement.device=cpu"],
        marks=pytest.mark.skipif(local_gpus() > 0, reason="this machine has a GPU"),
    ),
    # The model
    ("no model folder", ["model.path=./missing"], ["model.path=./missing", "no such folder"]),
    ("not on the hub", ["model.path=nobody/nothing"], ["model.path=nobody/nothing", "no such folder", "correct"]),
    ("no config.json", ["model.path=no_config"], ["no_config", "no config.json"]),
    ("tokenizer of another model", ["model.path=few_embeddings"], ["ids up to 256", "100 embeddings"]),
    ("no chat template", ["model.path=no_template"], ["no_template", "no chat template", "instruction-tuned"]),
    ("too long for the model", ["sampling.max_tokens=250"], ["data.max_prompt_tokens=26", "takes 256", "lower one"]),
    ("reference model", ["reference.path=./gone"], ["reference.path=./gone", "no such folder"]),
    (
        "nucleus under a correction", ["sampling.top_p=0.9", "algorithm.correction=token_tis"],
        ["sampling.top_p=0.9", "algorithm.correction", "top_p=1"],
    ),
    (
        "weights of a ratio", ["algorithm.correction=bypass_token_tis"], ["bypass_token_tis", "policy_loss=reinforce"],
    ),
    ("rank of an adapter", ["model.lora.rank=-1"], ["model.lora.rank=-1", "0 or more"]),
    ("dropout of an adapter", ["critic.lora.dropout=1"], ["critic.lora.dropout=1", "from 0 to below 1"]),
    ("layers of an adapter", ["model.lora.target_modules=[1]"], ["model.lora.target_modules=[1]", "all-linear"]),
    ("no adapter to export", ["run.export_lora=adapter"], ["run.export_lora=adapter", "model.lora.rank"]),
    (
        "adapter and moving reference", ["model.lora.rank=4", "reference.update_every=1"],
        ["reference.update_every=1", "with its adapter off"],
    ),
    # Folders and servers
    ("output below a file", ["run.output_dir=rewards.py/out"], ["run.output_dir=", "rewards.py/out", "choose another"]),
    ("run name with a slash", ["run.name=a/b"], ["run.name=a/b", "run.output_dir"]),
    ("run exists", ["run.name=old"], ["outputs/old exists", "run.resume=true", "run.name"]),
    ("nothing to resume", ["run.resume=true"], ["run.resume=true", "no folder", "outputs/grpo", "without run.resume"]),
    ("nothing left to resume", ["run.name=through", "run.resume=true"], ["outputs/through is through", "run.name"]),
    ("no tracking server", ["tracking.uri=http://127.0.0.1:1"], ["http://127.0.0.1:1", "tracking.enabled=false"]),
    ("model not registered", ["model.path=models:/nobody@champion"], ["model.path=models:/nobody", "no MLflow store"]),
    ("bad registered name", ["tracking.register_as=a/b"], ["tracking.register_as=a/b"]),
    ("no export to register", ["tracking.register_as=a", "run.export=false"], ["it needs run.export=true"]),
    ("bad port", ["tracking.uri=http://localhost:abc"], ["localhost:abc", "tracking.enabled=false"]),
    ("no folder for SQLite", ["tracking.uri=sqlite:////gone/a.db"], ["sqlite:////gone/a.db", "folder /gone"]),
    # Data
    ("no training files", ["data.train_files=[]"], ["data.train_files is empty", "parquet"]),
    ("file missing", ["data.train_files=[gone.parquet]"], ["gone.parquet", "no such file", "rl-plugins prepare"]),
    ("file not parquet", ["data.val_files=[text.parquet]"], ["text.parquet", "not a readable parquet file"]),
    ("column missing", ["data.train_files=[no_column.parquet]"], ["no_column.parquet", "'reward_model' is missing"]),
    ("bad row", ["data.train_files=[bad_row.parquet]"], ["bad_row.parquet, row 1", "'data_source'", "a string"]),
    ("too few rows", ["data.train_files=[few.parquet]"], ["has 1 rows", "batch.prompts_per_step=32", "lower it"]),
    ("all prompts too long", ["data.max_prompt_tokens=2"], ["data.max_prompt_tokens=2", "raise it"]),
    (
        "a prompt too long", ["data.train_files=[one_long.parquet]", "data.overlong_prompts=error"],
        ["one_long.parquet, row 0", "81 tokens", "data.max_prompt_tokens=26", "filter"],
    ),
    (
        "parts and files", ["data.mixture={a: {files: [train.parquet]}}"],
        ["data.mixture and data.train_files both", "leave one of them out"],
    ),
    ("part without files", [*MIXED, "data.mixture={a: {weight: 2}}"], ["data.mixture.a.files is empty", "parquet"]),
    (
        "weight of a part", [*MIXED, "data.mixture={a: {files: [train.parquet], weight: 0}}"],
        ["data.mixture.a.weight=0", "above 0"],
    ),
    ("option of a part", [*MIXED, "data.mixture={a: {file: [train.parquet]}}"], ["no option 'data.mixture.a.file'"]),
    (
        "part too small",
        [*MIXED, "data.mixture={a: {files: [train.parquet]}, b: {files: [few.parquet]}}", "batch.prompts_per_step=8"],
        ["data.mixture.b: 1 rows are too few", "lower its weight"],
    ),
    ("share of a curriculum", ["data.curriculum.share=1"], ["data.curriculum.share=1", "below 1"]),
    (
        "curriculum without groups", ["data.curriculum.share=0.5", "batch.samples_per_prompt=1"],
        ["data.curriculum.share=0.5", "batch.samples_per_prompt to 2"],
    ),
    (
        "curriculum without rewards", ["data.curriculum.share=0.5", "stage=sft"],
        ["data.curriculum.share=0.5", "stage=sft"],
    ),
    (
        "curriculum that draws nothing", ["data.curriculum.share=0.01", "batch.prompts_per_step=4"],
        ["share=0.01 of 4 prompts per step is 0"],
    ),
    ("data set missing", ["data.dataset={_target_: no_such.Rows}"], ["data.dataset", "no_such"]),
    # Rewards
    (
        "no reward for a source",
        ["~reward.functions.default", "+reward.functions.gsm8k._target_=rl_plugins.rewards.scorers.exact_match"],
        ["no reward for data_source 'addition'", "'gsm8k'", "default"],
    ),
    ("reward module", ["reward.functions.default._target_=no_such.reward"], ["no_such.reward", "no module"]),
    (
        "reward function", ["reward.functions.default._target_=rl_plugins.rewards.scorers.exact_mach"],
        ["exact_mach", "did you mean 'exact_match'"],
    ),
    ("reward file", ["reward=file", "reward.functions.default.path=gone.py"], ["gone.py", "does not exist"]),
    (
        "name in the reward file", ["reward=file", "reward.functions.default.path=rewards.py"],
        ["rewards.py", "no 'compute_score'", "half"],
    ),
    (
        "reward raises",
        ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=raises"],
        ["reward fails on a sample of data_source 'addition'", "KeyError", "rewards.py"],
    ),
    (
        "an environment without turns",
        ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=insists"],
        ["reward fails on a sample", "no turn is left", "return a score when turns_left is 0", "environment.max_turns"],
    ),
    (
        "an environment that fails in its first turn",
        [
            "reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=breaks",
            "environment.max_turns=2",
        ],
        ["reward fails on a sample", "the content of its answer is of type int, not text"],
    ),
    (
        "an environment with a role that the chat template does not know",
        [
            "reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=has_tools",
            "environment.max_turns=2", "model.path=users_only",
        ],
        ["users_only' refuses a message of the role 'tool'", "no role tool", "answer with a role that it knows"],
    ),
    (
        "a prompt with such a role", ["data.train_files=[system.parquet]", "model.path=users_only"],
        ["system.parquet, row 40", "users_only' refuses", "system, user", "no role system", "Change the messages"],
    ),
    ("no turns", ["environment.max_turns=0"], ["environment.max_turns=0", "must be at least 1"]),
    # The algorithm
    ("algorithm without target", ["~algorithm._target_"], ["algorithm: must be a mapping with _target_"]),
    ("algorithm elsewhere", ["algorithm._target_=no_such.Thing"], ["algorithm: ", "no_such"]),
    ("unknown advantage", ["algorithm.advantage=grop"], ["algorithm.advantage='grop'", "grpo"]),
    ("unknown policy loss", ["algorithm.policy_loss=ppo"], ["algorithm.policy_loss='ppo'", "ppo_clip"]),
    ("unknown aggregation", ["algorithm.aggregation=mean"], ["algorithm.aggregation='mean'", "token-mean"]),
    ("unknown estimator", ["algorithm.kl.estimator=k9"], ["algorithm.kl.estimator='k9'", "k3"]),
    ("clip a text", ["algorithm.policy_loss_options.clip_high=abc"], ["options.clip_high=abc", "a number"]),
    ("unknown scale", ["algorithm.advantage_options.scale=foo"], ["options.scale=foo", "group, batch, none"]),
    ("unknown option", ["+algorithm.advantage_options.scal=none"], ["no option 'scal'", "'scale'"]),
    ("coefficient a text", ["algorithm.kl.coefficient=abc"], ["algorithm.kl.coefficient=abc", "a number"]),
    ("dual clip too low", ["algorithm.policy_loss_options.dual_clip=0.5"], ["dual_clip=0.5", "above 1"]),
]  # fmt: skip


@pytest.fixture
def in_workplace(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # The variable HF_HUB_OFFLINE is read once, when the library is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def started(monkeypatch):
    """The launchers that were called, instead of what they do."""
    calls: list[str] = []
    monkeypatch.setattr(ray_train, "train", lambda *_: calls.append("ray"))
    monkeypatch.setattr(local, "train", lambda *_: calls.append("local"))
    return calls


@pytest.mark.parametrize(("case", "overrides", "expected"), CASES)
def test_one_message_names_the_fault_and_the_way_out(
    case, overrides, expected, in_workplace, started, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, *overrides])
    start = time.monotonic()
    with pytest.raises(SystemExit) as exit_:
        recipe_main("grpo")
    assert time.monotonic() - start < 15
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    for words in expected:
        assert words in lines[0], f"{words!r} is not in {lines[0]!r}"
    assert started == []


def test_a_hub_that_cannot_be_reached_is_asked_once(in_workplace, started, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Nothing listens on the discard port.
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}")
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, "model.path=nobody/nothing"])
    start = time.monotonic()
    with pytest.raises(SystemExit):
        recipe_main("grpo")
    assert time.monotonic() - start < 15
    error = capsys.readouterr().err
    assert error.startswith("error: model.path=nobody/nothing: there is no such folder") and "(" in error
    assert started == []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["launcher=local", "rollout.engine=transformers"],
        ["--config-name", "quickstart_grpo"],
        # A reward may well fail on an empty response.
        ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=needs_text"],
        # The long prompt is dropped.
        ["data.train_files=[one_long.parquet]"],
        ["data.max_prompt_tokens=250"],
    ],
    ids=" ".join,
)
def test_good_input_starts(overrides, in_workplace, started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, f"run.output_dir={tmp_path}", *overrides])
    recipe_main("grpo")
    assert started == ["local" if "launcher=local" in overrides else "ray"]
    assert "prompts x " in capsys.readouterr().out


def test_what_ended_before_its_first_checkpoint_begins_anew_in_its_folder(
    in_workplace, started, monkeypatch, tmp_path, capsys
):
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 0.5}\n')
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, f"run.output_dir={tmp_path}", "run.resume=true"])
    recipe_main("grpo")
    assert started == ["ray"]
    assert f"grpo: {tmp_path}/grpo has no checkpoint, so it begins anew" in capsys.readouterr().out


def test_a_run_that_was_stopped_says_how_it_goes_on(in_workplace, monkeypatch, tmp_path, capsys):
    def stopped(config, folder, checkpoint):
        folder.stopped.write_text("after step 3: SIGTERM")

    monkeypatch.setattr(local, "train", stopped)
    options = ["launcher=local", "rollout.engine=transformers", f"run.output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, *options])
    with pytest.raises(SystemExit) as exit_:
        recipe_main("grpo")
    assert exit_.value.code == 75
    said = "grpo: stopped after step 3: SIGTERM; the same command with run.resume=true goes on"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_ctrl_c_is_told_and_has_the_status_of_a_shell(in_workplace, monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    monkeypatch.setattr("rl_plugins.launch.build.fit", interrupted)
    options = ["launcher=local", "rollout.engine=transformers", f"run.output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, *options])
    with pytest.raises(SystemExit) as exit_:
        recipe_main("grpo")
    assert exit_.value.code == 130
    assert "interrupted; run.resume=true goes on" in capsys.readouterr().err


def test_a_lock_of_a_killed_build_is_removed_and_named(in_workplace, started, monkeypatch, tmp_path, capsys):
    lock = tmp_path / "extensions" / "py311_cpu" / "some_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, f"run.output_dir={tmp_path}/outputs"])
    recipe_main("grpo")
    assert started == ["ray"]
    assert not lock.exists()
    assert f"removed {lock}" in capsys.readouterr().out
