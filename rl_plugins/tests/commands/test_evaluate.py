"""`rl-plugins evaluate` on files of samples: tables, JSON, comparison, and each kind of --reward."""

from __future__ import annotations

import json
import os
import signal

import pytest

from rl_plugins.commands import evaluate
from rl_plugins.commands.evaluate import reward_config
from rl_plugins.commands.main import main
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import ConfigError
from rl_plugins.tests.rewards.judge_stub import Said, judge_stub

FIRST = {
    ("sums", "1+1=", "2"): ["2", "3", "2", "2"],
    ("sums", "2+2=", "4"): ["5", "5", "4", "5"],
    ("words", "capital", "Paris"): ["Rome", "Paris", "Oslo", "Bern"],
}


def test_evaluate_prints_and_writes_measures_by_data_source(write_samples, capsys):
    path = write_samples("samples.parquet", FIRST)
    assert main(["evaluate", str(path), "--reward", "exact_match"]) == 0
    shown = capsys.readouterr().out
    assert "3 prompts x 4 samples" in shown and "25.0% cut off" in shown and "failed rewards: none" in shown
    measures = json.loads(path.with_suffix(".evaluation.json").read_text())["measures"]
    assert set(measures) == {"sums", "words", "all"}
    values = {name: of["value"] for name, of in measures["sums"].items()}
    assert values["mean@4"] == values["pass@1"] == pytest.approx(0.5)
    assert values["pass@4"] == values["best@4"] == 1.0 and values["maj@4"] == 0.5
    assert values["best@2"] == pytest.approx((1.0 + 0.5) / 2)
    assert measures["words"]["maj@4"]["value"] == pytest.approx(0.25)
    assert measures["all"]["mean@4"]["prompts"] == 3


def test_evaluate_compares_the_second_file_with_the_first_prompt_by_prompt(write_samples, capsys):
    many = {("sums", f"{n}+0=", str(n)): [str(n), "x"] for n in range(40)}
    better = {key: [key[2], key[2]] if int(key[2]) % 2 else value for key, value in many.items()}
    # Another order, and a prompt in one file only.
    better = {("sums", "9+9=", "18"): ["18", "18"], **dict(reversed(better.items()))}
    paths = [write_samples("first.parquet", many), write_samples("second.parquet", better)]
    assert main(["evaluate", *map(str, paths), "--reward", "exact_match"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{paths[1]} is better than {paths[0]}: mean score +0.250 (95 % interval +0.1" in shown
    assert "1 prompts are in only one of the two files" in shown
    against = json.loads(paths[1].with_suffix(".evaluation.json").read_text())["against"]
    assert against["difference"]["mean"]["value"] == 0.25 and against["unpaired"] == 1
    assert "against" not in json.loads(paths[0].with_suffix(".evaluation.json").read_text())
    assert main(["evaluate", str(paths[0]), str(paths[0]), "--reward", "exact_match"]) == 0
    assert "no difference between" in capsys.readouterr().out


def test_evaluate_prints_markup_and_control_characters_of_data_as_text(write_samples, capsys):
    path = write_samples("samples.parquet", {("[/red]\x1b[2J", "1+1=", "2"): ["2", "3"]})
    assert main(["evaluate", str(path), "--reward", "exact_match"]) == 0
    shown = capsys.readouterr().out
    assert "[/red]␛[2J" in shown and "\x1b" not in shown and path.with_suffix(".evaluation.json").is_file()


def test_evaluate_names_a_file_that_cannot_be_written(write_samples, capsys):
    path = write_samples("samples.parquet", FIRST)
    path.with_suffix(".evaluation.json").mkdir()
    assert main(["evaluate", str(path), "--reward", "exact_match"]) == 2
    assert "samples.evaluation.json cannot be written" in capsys.readouterr().err


def test_evaluate_refuses_files_without_a_prompt_in_common(write_samples, capsys):
    other = write_samples("other.parquet", {("sums", "5+5=", "10"): ["10"]})
    assert main(["evaluate", str(write_samples("one.parquet", FIRST)), str(other), "--reward", "exact_match"]) == 2
    assert "have no prompt in common" in capsys.readouterr().err


REWARDS = """
def score(solution_str, ground_truth):
    if solution_str == "Bern":
        raise ValueError("not Bern")
    return float(solution_str == ground_truth)

def last_letter(response):
    return response[-1]
"""


def test_evaluate_counts_failed_rewards_and_refuses_too_many(write_samples, tmp_path, capsys):
    path, rewards = write_samples("samples.parquet", FIRST), tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    command = ["evaluate", str(path), "--reward", f"{rewards}:score", "--answer", f"{rewards}:last_letter"]
    assert main(command) == 0
    assert "failed rewards: 1 raised" in capsys.readouterr().out
    measures = json.loads(path.with_suffix(".evaluation.json").read_text())["measures"]
    # No measure of four samples exists for three scores; the mean is the mean of the three scores.
    assert "maj@4" not in measures["words"] and measures["words"]["mean@4"]["value"] == pytest.approx(1 / 3)
    assert main([*command, "--max-failure-rate", "0"]) == 2
    assert "1 of 12 rewards failed" in capsys.readouterr().err


def test_evaluate_names_a_data_source_without_a_reward(write_samples, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("reward: {functions: {sums: {_target_: rl_plugins.rewards.scorers.exact_match}}}")
    assert main(["evaluate", str(write_samples("samples.parquet", FIRST)), "--reward", str(config)]) == 2
    assert "no reward for data_source 'words'" in capsys.readouterr().err


def test_evaluate_checks_the_reward_before_sampling_from_a_policy(tmp_path, monkeypatch, capsys):
    def sample(command):
        raise AssertionError(command)

    monkeypatch.setattr(evaluate.subprocess, "run", sample)
    write_splits(addition_rows(below=9, num_train=2, num_test=1, seed=0), tmp_path / "data")
    command = ["evaluate", "policy", "--data", str(tmp_path / "data/test.parquet"), "--output", str(tmp_path / "out")]
    rewards, config = tmp_path / "rewards.py", tmp_path / "config.yaml"
    rewards.write_text("def score(reply):\n    return 0.0\n")
    config.write_text("reward: {functions: {sums: {_target_: rl_plugins.rewards.scorers.exact_match}}}")
    for reward, message in ((config, "no reward for data_source 'addition'"), (f"{rewards}:score", "asks for 'reply'")):
        assert main([*command, "--workers", "0", "--reward", str(reward)]) == 2
        assert message in capsys.readouterr().err


def test_evaluate_samples_a_policy_without_a_run_like_the_other_policy(tmp_path, monkeypatch):
    commands = []

    def sample(command):
        commands.append(command)
        pytest.fail("enough")

    monkeypatch.setattr(evaluate.subprocess, "run", sample)
    write_splits(addition_rows(below=9, num_train=2, num_test=1, seed=0), tmp_path / "data")
    for name in ("first", "second"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("stage: sft\n")
    command = ["--data", str(tmp_path / "data/test.parquet"), "--output", str(tmp_path / "out"), "--workers", "0"]

    def sampled_like(name, other, *options):
        with pytest.raises(pytest.fail.Exception):
            main(["evaluate", name, other, *command, "--reward", "exact_match", *options])
        return commands[-1][commands[-1].index("--like") + 1 :] if "--like" in commands[-1] else []

    trained, second = str(tmp_path / "first/policy"), str(tmp_path / "second/policy")
    assert sampled_like("base", trained) == [str(tmp_path / "first/config.yaml")]
    assert sampled_like(trained, second) == sampled_like("base", "other") == []
    assert sampled_like("base", trained, "--like", "a.yaml") == ["a.yaml"]


def test_evaluate_ends_sampling_at_a_signal(tmp_path, monkeypatch, capsys):
    """`subprocess.run` kills the child at an exception."""

    def sample(command):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("no KeyboardInterrupt")

    def ended(*_):
        pytest.fail("the handler of the caller")

    monkeypatch.setattr(evaluate.subprocess, "run", sample)
    write_splits(addition_rows(below=9, num_train=2, num_test=1, seed=0), tmp_path / "data")
    command = ["evaluate", "policy", "--data", str(tmp_path / "data/test.parquet"), "--output", str(tmp_path / "out")]
    before = signal.signal(signal.SIGTERM, ended)
    try:
        with pytest.raises(SystemExit) as end:
            main([*command, "--workers", "0", "--reward", "exact_match"])
        assert end.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is ended
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted by SIGTERM"


def test_evaluate_samples_two_policies_with_equal_ends_of_their_paths_into_two_files():
    one, two = "/a/outputs/first/policy", "/b/outputs/first/policy"
    names = evaluate._sample_names([one, two])
    assert len(set(names.values())) == 2 and all(name.startswith("outputs-first-policy-") for name in names.values())
    assert evaluate._sample_names(["../policy", one]) == {"../policy": "policy", one: "outputs-first-policy"}


def test_evaluate_refuses_a_data_source_of_prompts_before_sampling(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "_sampled_file", lambda name, _: pytest.fail(f"{name} is sampled"))
    rows = addition_rows(below=9, num_train=2, num_test=2, seed=0)
    rows["test"][0]["data_source"] = "all"
    write_splits(rows, tmp_path / "data")
    test = tmp_path / "data/test.parquet"
    command = ["evaluate", "policy", "--data", str(test), "--output", str(tmp_path / "out")]
    for options in (["--reward", "exact_match"], ["--recipe", "config.yaml"]):
        assert main([*command, *options]) == 2
        assert f"--data {test}: the data source 'all' has the name of all prompts" in capsys.readouterr().err


def test_evaluate_refuses_rows_with_different_numbers_of_responses(write_samples, capsys):
    rows = {("s", "a", "1"): ["1", "2"], ("s", "b", "1"): ["1"]}
    assert main(["evaluate", str(write_samples("uneven.parquet", rows)), "--reward", "exact_match"]) == 2
    assert "uneven.parquet, row 1: every row must have as many responses as the first, 2" in capsys.readouterr().err


def test_evaluate_refuses_a_data_source_with_the_name_of_all_prompts(write_samples, capsys):
    one = {("all", "1+1=", "2"): ["2", "3"]}
    assert main(["evaluate", str(write_samples("one.parquet", one)), "--reward", "exact_match"]) == 0
    two = write_samples("two.parquet", {**one, ("sums", "2+2=", "4"): ["5", "4"]})
    assert main(["evaluate", str(two), "--reward", "exact_match"]) == 2
    assert "the data source 'all' has the name of all prompts together" in capsys.readouterr().err


def test_reward_config_takes_every_kind_of_name(tmp_path):
    assert reward_config("gsm8k")["default"]["_target_"] == "rl_plugins.rewards.scorers.final_answer"
    assert reward_config("my/file.py:score") == {"path": "my/file.py", "name": "score"}
    assert reward_config("package.module.score") == {"_target_": "package.module.score"}
    empty = tmp_path / "empty.yaml"
    empty.write_text("run: {name: x}")
    with pytest.raises(ConfigError, match=r"the file has no `reward.functions`"):
        reward_config(str(empty))
    empty.write_text("[1")
    with pytest.raises(
        ConfigError, match=r"^--reward .*empty\.yaml: not valid YAML .*: name a file with `reward\.func"
    ):
        reward_config(str(empty))


def test_reward_config_reads_secrets_from_the_environment(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text("reward: {functions: {default: {_target_: judge.score, api_key: '${oc.env:JUDGE_KEY}'}}}")
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    assert reward_config(str(config))["default"]["api_key"] == "sk-1"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"reward\.functions\.default\.api_key.*'JUDGE_KEY' not found"):
        reward_config(str(config))
    config.write_text("reward: {functions: {default: {_target_: judge.score, api_key: '***'}}}")
    with pytest.raises(ConfigError, match=r"\*\*\* in place of a secret.*name the variable"):
        reward_config(str(config))


def test_evaluate_asks_the_judge_of_a_run(write_samples, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config, target = tmp_path / "config.yaml", "rl_plugins.rewards.judge.Judge"
    words = ["evaluate", str(write_samples("samples.parquet", FIRST)), "--reward", str(config)]
    with judge_stub() as stub:
        stub.answer = lambda number, body: Said(f"Score: {10 if 'Paris' in body['messages'][0]['content'] else 0}")
        judge = f"{{url: '{stub.url}', model: judge, template: '{{response}}'}}"
        config.write_text(f"reward: {{functions: {{default: {{_target_: {target}}}}}, judge: {judge}}}")
        assert main(words) == 2
        assert "--deadline=30 is below the 660 s" in capsys.readouterr().err
        assert main([*words, "--deadline", "900"]) == 0
    assert "failed rewards: none" in capsys.readouterr().out
    measures = json.loads((tmp_path / "samples.evaluation.json").read_text())["measures"]
    assert measures["words"]["mean@4"]["value"] == 0.25 and measures["sums"]["mean@4"]["value"] == 0.0


def test_reward_config_names_a_wrong_option_of_a_judge(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("reward: {functions: {default: {_target_: rl_plugins.Judge}}, judge: {voes: 1}}")
    with pytest.raises(ConfigError, match=r"judge\.voes: a judge has no such option: did you mean votes\?"):
        reward_config(str(config))


def test_reward_config_refuses_the_reward_of_a_conversation(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("reward: {functions: {default: {_target_: game.play}}}\nenvironment: {max_turns: 4}")
    with pytest.raises(ConfigError, match=r"environment.max_turns=4\): sample them with --recipe"):
        reward_config(str(config))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("reward: text", "the file has no `reward.functions`"),
        ("reward: {functions: text}", "the file has no `reward.functions`"),
        ("reward: {functions: {default: {_target_: a.b}}, judge: text}", "reward.judge is a group of options"),
        ("reward: {functions: '${nothing}'}", "Interpolation key 'nothing' not found"),
        ("reward: {functions: {default: {_target_: a.b}}}\nenvironment: {max_turns: two}", "environment.max_turns=two"),
    ],
)
def test_reward_config_names_a_value_of_another_kind_in_one_line(content, fault, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(content)
    with pytest.raises(ConfigError) as refused:
        reward_config(str(config))
    message = str(refused.value)
    assert message.startswith(f"--reward {config}: ") and fault in message and "\n" not in message
