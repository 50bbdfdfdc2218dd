"""A run with a wrong option ends before anything starts, with status 2 and one line: the option and its correction."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import UserError
from rl_plugins.launch import fetch, local, preflight, ray_train
from rl_plugins.launch.command_line import recipe_main, run_recipe
from rl_plugins.launch.compose import _ends_of_names, compose_config
from rl_plugins.launch.dry_run import check_data, set_steps
from rl_plugins.launch.resume import note_end
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch import own_rows
from rl_plugins.tests.launch.bad_options import CHECKS, COMPOSING
from rl_plugins.tests.launch.bad_options_of_environments import ENVIRONMENT_CHECKS
from rl_plugins.tests.launch.bad_options_of_models import MODEL_CHECKS
from rl_plugins.tests.launch.bad_options_of_recipes import OTHER_RECIPES, PAIRS, STEPS
from rl_plugins.tests.launch.bad_options_of_rewards import REWARD_CHECKS
from rl_plugins.tests.launch.bad_options_without_effect import UNUSED, UNUSED_IN_STAGES
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.patience import patient

ALL_CHECKS = CHECKS | MODEL_CHECKS | REWARD_CHECKS | ENVIRONMENT_CHECKS | UNUSED
GOOD = [
    "model.path=model", "data.train_files=[train.parquet]", "data.val_files=[test.parquet]",
    "placement.num_workers=1", "placement.device=cpu", "sampling.max_tokens=6", "data.max_prompt_tokens=26",
    f"reward.load_timeout_s={patient(60)}",
]  # fmt: skip
MIXTURE = "data.mixture={a: {files: [train.parquet]}, b: {files: [train.parquet]}}"
IN_ONE_PROCESS = ["launcher=local", "rollout.engine=transformers"]


@pytest.fixture(autouse=True)
def _in_workplace(workplace: Path, _composed_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # The variable HF_HUB_OFFLINE is read once, when the library is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # The tested functions set these variables for their process.
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu", "HYDRA_FULL_ERROR": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the called launchers. The launchers do nothing."""
    calls: list[str] = []
    monkeypatch.setattr(ray_train, "train_on_ray", lambda *_: calls.append("ray"))
    monkeypatch.setattr(local, "train_in_this_process", lambda *_: calls.append("local"))
    return calls


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """Run `python -m rl_plugins.recipes.grpo` with good options and others in this process; return the exit status."""

    def run(*overrides: str) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["grpo", *GOOD, *overrides])
        try:
            recipe_main("grpo")
        except SystemExit as exit_:
            return exit_.code
        return 0

    return run


def compose(*overrides: str) -> str:
    """Return the message of the ConfigError for the composition of the good and the given options."""
    return message_of(lambda: parse_config(compose_config("grpo", [*GOOD, *overrides])))


def check(*overrides: str, recipe: str = "grpo") -> str:
    """Return the message of `run_recipe`'s ConfigError for the good and the given options."""
    return message_of(lambda: run_recipe(configured(recipe, *GOOD, *overrides)))


def missing_words(message: str, overrides: list[str], expected: list[str]) -> list[str]:
    """Return one line for each expected text missing in the message, and one line for a message of several lines."""
    lines = [f"{overrides}: {words!r} is not in {message!r}" for words in expected if words not in message]
    return [*lines, f"{overrides}: {message!r} is of several lines"] if "\n" in message else lines


@pytest.mark.parametrize("subject", COMPOSING)
def test_compose_config_and_parse_config_name_the_option_and_the_way_out(subject):
    wrong = []
    for overrides, expected in COMPOSING[subject]:
        wrong += missing_words(compose(*overrides), overrides, expected)
    assert wrong == []


def test_parse_config_names_a_group_that_is_no_mapping() -> None:
    good = {"stage": "sft", "model": {"path": "m"}, "run": {"name": "r"}}
    for values, expected in (
        (None, "the configuration is a group of options, not 'None'"),
        ([good], "the configuration is a group of options"),
        ({**good, "data": [1]}, "option 'data' is a group of options, not '[1]'"),
        ({**good, "data": {"curriculum": ["share"]}}, "option 'data.curriculum' is a group of options"),
    ):
        assert expected in message_of(partial(parse_config, values))
    assert message_of(lambda: parse_config(good)) == "nothing is refused"


def test_explain_gives_the_same_message_under_a_debugger(monkeypatch):
    # Makes OmegaConf chain its errors, as with a debugger.
    monkeypatch.setenv("OC_CAUSE", "1")
    wrong = []
    for overrides, expected in [*COMPOSING["types and missing values"], COMPOSING["unknown options"][0]]:
        wrong += missing_words(compose(*overrides), overrides, expected)
    assert wrong == []


@pytest.mark.parametrize("subject", [*ALL_CHECKS])
def test_run_recipe_names_the_option_and_the_way_out(subject, started):
    wrong = []
    for overrides, expected in ALL_CHECKS[subject]:
        wrong += missing_words(check(*overrides), overrides, expected)
    assert wrong == [] and started == []


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
def test_run_recipe_names_the_row_or_the_option_in_other_recipes(recipe, started):
    wrong = []
    for overrides, expected in OTHER_RECIPES[recipe]:
        wrong += missing_words(check(*overrides, recipe=recipe), overrides, expected)
    assert wrong == [] and started == []


def test_run_recipe_refuses_options_without_a_use_in_the_stage(started):
    wrong = []
    for recipe, rows in UNUSED_IN_STAGES.items():
        for overrides, expected in rows:
            wrong += missing_words(check(*overrides, recipe=recipe), overrides, expected)
    assert wrong == [] and started == []


def test_run_recipe_refuses_a_collective_deadline_below_the_deadlines_of_engines(started, tmp_path):
    workers = ["placement.num_workers=2", "batch.prompts_per_step=8"]
    for options, expected in (
        (["rollout.generate_timeout_s=7200"], "strategy.collective_timeout_s=2400: make"),
        (["strategy.collective_timeout_s=600"], "rollout.generate_timeout_s=1800: while a worker waits"),
        (["rollout.ready_timeout_s=2390"], "strategy.collective_timeout_s larger than 2420"),
    ):
        assert expected in check(*workers, *options)
    one_worker = ["rollout.generate_timeout_s=7200", f"run.output_dir={tmp_path}"]
    assert check(*one_worker) == "nothing is refused" and started == ["ray"]


def test_run_recipe_checks_all_options_before_downloads(started, monkeypatch):
    monkeypatch.setattr(fetch, "fetch_data", lambda *_: pytest.fail("the data is downloaded"))
    for options, expected in (
        ([MIXTURE], "data.mixture and data.train_files both"),
        (["sampling.temperature=0"], "sampling.temperature=0 gives the same response"),
        (["batch.prompts_per_step=7", "placement.num_workers=2"], "batch.prompts_per_step=7"),
    ):
        assert expected in check("data.train_files=[hf://datasets/a/b/c.parquet]", *options)
    assert started == []


def test_run_recipe_starts_other_recipes_with_good_input(started, tmp_path):
    good: list[tuple[str, list[str]]] = [
        ("sft", []),
        ("sft", ["data.train_files=[pairs.parquet]", "data.response_key=chosen"]),
        ("preference_optimization", [PAIRS]),
        ("preference_optimization", ["data.train_files=[one_long_pair.parquet]"]),
        ("preference_optimization", [PAIRS, "loss.name=kto", "data.label_key=good", "data.response_key=chosen"]),
        ("reward_modeling", [PAIRS, "data.val_files=[pairs.parquet]"]),
        ("reward_modeling", [*STEPS, "data.val_files=[steps.parquet]"]),
        ("prime", ["process_reward_model.path=model"]),
        ("online_preference_optimization", []),
        ("grpo", ["data.train_files=[]", "data.dataset={_target_: rl_plugins.tests.launch.own_rows.Rows}"]),
        ("sft", ["data.train_files=[]", f"data.dataset={{path: {own_rows.__file__}, name: Rows, length: 32}}"]),
    ]
    # In one process, because each process for the trial of a reward takes a second.
    alone = [*IN_ONE_PROCESS, "reward.num_workers=0", "tracking.enabled=false"]
    messages = [
        check(f"run.output_dir={tmp_path}/{number}", *alone, *options, recipe=recipe)
        for number, (recipe, options) in enumerate(good)
    ]
    assert messages == ["nothing is refused"] * len(good) and started == ["local"] * len(good)


def test_run_recipe_refuses_offload_to_nvme_without_libaio(started, monkeypatch):
    # In the place of DeepSpeed's module, whose import takes seconds and whose answer is the machine's.
    builder = SimpleNamespace(is_compatible=lambda: False)
    builders = SimpleNamespace(AsyncIOBuilder=lambda: builder)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", builders)
    overrides = ["strategy.offload.policy=nvme", "strategy.offload.folder=files"]
    words = ["offload to nvme needs libaio", "libaio-dev", "offload to cpu"]
    assert missing_words(check(*overrides), overrides, words) == [] and started == []


def test_run_recipe_refuses_cuda_without_a_gpu(started, monkeypatch):
    monkeypatch.setattr(preflight, "local_gpus", lambda: 0)
    overrides = ["placement.device=cuda"]
    words = ["placement.device=cuda", "no NVIDIA GPU", "placement.device=cpu"]
    assert missing_words(check(*overrides), overrides, words) == [] and started == []


def test_check_this_machine_knows_that_the_local_launcher_runs_on_cpu_by_default(monkeypatch):
    monkeypatch.setattr(preflight, "local_gpus", lambda: 8)
    options = [*GOOD, *IN_ONE_PROCESS, "model.liger=true", "placement.device=auto"]
    message = message_of(lambda: preflight.check_this_machine(configured("grpo", *options)))
    assert "model.liger=true: the kernels of Liger run on GPUs, and the run is on CPU" in message


def test_run_recipe_refuses_a_tracking_server_that_does_not_answer(started, refused_address):
    overrides = [f"tracking.uri=http://{refused_address}"]
    words = [f"http://{refused_address}", "tracking.enabled=false"]
    assert missing_words(check(*overrides), overrides, words) == [] and started == []


def test_run_recipe_refuses_a_cluster_that_does_not_answer(started, refused_address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", refused_address)
    words = [f"RAY_ADDRESS={refused_address} does not answer (Connection refused)", "ray start --head", "unset"]
    assert missing_words(check(), [], words) == [] and started == []


def test_check_data_drops_or_names_a_prompt_of_a_million_characters(workplace, tmp_path):
    rows = pq.read_table(workplace / "train.parquet").to_pylist()
    rows.append({**rows[0], "prompt": [{"role": "user", "content": "1+" * 500_000}]})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "long.parquet")

    def said(*options: str) -> str:
        files = ["reward.num_workers=0", f"data.train_files=[{tmp_path}/long.parquet]"]
        return message_of(lambda: check_data(configured("grpo", *GOOD, *files, *options), {}))

    assert said() == "nothing is refused"
    message = said("data.overlong_prompts=error")
    assert f"{tmp_path}/long.parquet, row 64" in message and len(message) < len(str(tmp_path)) + 200


def test_check_data_tells_which_validation_rows_are_training_rows(workplace, capsys):
    def said(*options: str) -> str:
        check_data(configured("grpo", *GOOD, "reward.num_workers=0", *options), {})
        return capsys.readouterr().out

    assert said() == said("data.val_files=[]") == ""
    place = f"{workplace}/train.parquet, row 0"
    shared = f"grpo: 64 of 72 validation rows have the prompt of a training row, such as {place}, and {place}: "
    line = said("data.val_files=[test.parquet,train.parquet]")
    assert line.startswith(shared) and line.count("\n") == 1


def test_check_data_calls_rewards_without_gpus(monkeypatch):
    """A reward must not take memory of a worker's GPU in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def check(*options: str) -> str:
        reward = ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=sees_gpus"]
        return message_of(lambda: check_data(configured("grpo", *GOOD, *reward, *options), {}))

    assert "CUDA_VISIBLE_DEVICES=''" in check() and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert check("reward.gpus=0.5") == "nothing is refused"
    assert "CUDA_VISIBLE_DEVICES=''" in check(*IN_ONE_PROCESS)
    assert "CUDA_VISIBLE_DEVICES='0,1'" in check(*IN_ONE_PROCESS, "reward.gpus=0.5")
    assert "CUDA_VISIBLE_DEVICES='0,1'" in check(*IN_ONE_PROCESS, "reward.num_workers=0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES=''" in check() and "CUDA_VISIBLE_DEVICES" not in os.environ


def test_recipe_main_ends_with_one_line_of_error_and_status_2(grpo, started, capsys):
    assert grpo("modl.path=x") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert started == []


def test_recipe_main_starts_the_launcher_with_good_input(grpo, started, tmp_path, capsys):
    assert grpo(f"run.output_dir={tmp_path}") == 0
    assert started == ["ray"]
    assert "prompts x " in capsys.readouterr().out
    folder = RunFolder(tmp_path / "grpo")
    assert folder.installed_packages.is_file() and folder.config.is_file()
    assert folder.changes.read_text().startswith("# recipe: grpo\n")


def test_recipe_main_runs_the_recipe_of_config_name(grpo, started, tmp_path, capsys):
    assert grpo(f"run.output_dir={tmp_path}", "--config-name", "quickstart_grpo") == 0
    assert started == ["ray"]
    assert "prompts x " in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        IN_ONE_PROCESS,
        # A reward may fail on an empty response.
        ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=needs_text"],
        # The trial has the tokens of the right answer.
        ["reward=file", "reward.functions.default.path=rewards.py", "reward.functions.default.name=of_tokens"],
        # The long prompt is dropped.
        ["data.train_files=[one_long.parquet]"],
        ["data.max_prompt_tokens=250"],
        ["model.path=no_template", "data.chat_template=template.jinja"],
    ],
    ids=" ".join,
)
def test_run_recipe_starts_the_launcher_with_good_input(overrides, started, tmp_path, capsys):
    run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}", *overrides))
    assert started == ["local" if "launcher=local" in overrides else "ray"]
    assert "prompts x " in capsys.readouterr().out


def test_runs_of_multirun_have_names_with_their_own_overrides(grpo, started, tmp_path, capsys):
    swept = ["--multirun", "run.dry_run=true", f"run.output_dir={tmp_path}"]
    assert grpo(*swept, "optimizer.lr=1e-5,2e-5", "algorithm=grpo,rloo", "+sampling.vllm.bad_words=[a b]") == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "all checks" in line]
    rates = [f"grpo-lr={rate}-algorithm={name}" for rate in ("1e-05", "2e-05") for name in ("grpo", "rloo")]
    assert names == rates
    assert grpo(*swept, "++run.name=a,b") == 0
    assert [line[:2] for line in capsys.readouterr().out.splitlines() if "all checks" in line] == ["a:", "b:"]
    # A pipeline has a name of its own.
    assert _ends_of_names([["name=a"], ["name=b"]]) == _ends_of_names([["run.name=a"], ["run.name=b"]]) == ["", ""]


def test_recipe_main_only_checks_with_dry_run(grpo, started, tmp_path, capsys):
    assert grpo(f"run.output_dir={tmp_path}", "run.dry_run=true") == 0
    said = capsys.readouterr().out
    assert said.startswith("grpo: all checks have passed: 100 RL steps of 32 prompts x 8 samples")
    assert started == [] and not (tmp_path / "grpo").exists()
    assert grpo(f"run.output_dir={tmp_path}", "run.dry_run=true", "run.steps=0") == 2


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["run.epochs=3", "batch.prompts_per_step=16"], 12),
        (["run.epochs=0.5", "batch.prompts_per_step=16"], 2),
        (["run.epochs=3", "batch.prompts_per_step=16", "data.max_train_rows=32"], 6),
        # The rows of an incomplete step are dropped.
        (["run.epochs=2", "batch.prompts_per_step=24"], 4),
        (["run.epochs=2", "algorithm=dapo", "batch.prompts_per_step=8", "algorithm.group_filter.oversampling=2"], 8),
        (["run.epochs=3", "batch.prompts_per_step=16", "data.curriculum.share=0.5"], 12),
        (["run.epochs=2", "batch.prompts_per_step=16", "data.train_files=[]", MIXTURE], 16),
        (["run.epochs=null", "run.steps=7"], 7),
    ],
)
def test_set_steps_counts_the_steps_of_epochs(overrides, steps):
    config = configured("grpo", *GOOD, *overrides)
    set_steps(config)
    assert config.run.steps == steps


def test_run_recipe_finds_a_run_of_epochs_finished(started, tmp_path, capsys):
    config = configured("grpo", *GOOD, f"run.output_dir={tmp_path}", "run.resume=auto", "run.epochs=3")
    set_steps(config)
    folder = RunFolder(tmp_path / "grpo")
    folder.export.mkdir(parents=True)
    (folder.export / "config.json").write_text("{}")
    note_end(config, folder, config.run.steps)
    run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}", "run.resume=auto", "run.epochs=3"))
    assert started == [] and "the run is finished: step 6 was its last" in capsys.readouterr().out
    # Options of the command that a run of today refuses.
    refused = ["run.resume=auto", "run.epochs=3", "placement.num_workers=2", "strategy.collective_timeout_s=60"]
    run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}", *refused))
    assert "the run is finished" in capsys.readouterr().out
    assert "strategy.collective_timeout_s larger" in check(f"run.output_dir={tmp_path}", *refused, "run.epochs=9")


def test_run_recipe_refuses_an_exit_with_status_0_in_the_checks(started, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "preflight", lambda config: sys.exit(0))
    with pytest.raises(UserError, match="exit"):
        run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}"))
    assert started == []


def test_run_recipe_resumes_a_folder_without_a_checkpoint_from_the_beginning(started, tmp_path, capsys):
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 0.5}\n')
    run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}", "run.resume=true"))
    assert started == ["ray"]
    assert f"grpo: {tmp_path}/grpo has no checkpoint, so training starts from the beginning" in capsys.readouterr().out


def test_recipe_main_prints_the_option_that_continues_a_stopped_run(grpo, monkeypatch, tmp_path, capsys):
    def stopped(config, folder):
        folder.stopped.write_text("after step 3: SIGTERM")

    monkeypatch.setattr(local, "train_in_this_process", stopped)
    assert grpo(*IN_ONE_PROCESS, f"run.output_dir={tmp_path}") == 75
    said = "grpo: stopped after step 3: SIGTERM. To continue, repeat the command with run.resume=auto"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_recipe_main_ends_with_the_status_of_a_shell_after_ctrl_c(grpo, monkeypatch, tmp_path, capsys):
    def interrupted(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    monkeypatch.setattr("rl_plugins.launch.training.TrainingRun.call_recipe", interrupted)
    assert grpo(*IN_ONE_PROCESS, f"run.output_dir={tmp_path}") == 130
    said = "interrupted by SIGINT: grpo: there is no checkpoint. To continue, repeat the command with run.resume=auto"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_run_recipe_removes_and_names_the_lock_of_a_killed_build(started, monkeypatch, tmp_path, capsys):
    lock = tmp_path / "extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    run_recipe(configured("grpo", *GOOD, f"run.output_dir={tmp_path}/outputs"))
    assert started == ["ray"]
    assert not lock.exists()
    assert f"removed {lock}" in capsys.readouterr().out
