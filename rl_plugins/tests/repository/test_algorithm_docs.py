"""The pages in docs/algorithms say what the code says, and their example runs."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.advantages.resampling import Resampling
from rl_plugins.algorithms.aggregation import aggregate
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.group_filter import GroupFilter
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES
from rl_plugins.algorithms.reward_shaping import OverlongPenalty
from rl_plugins.algorithms.rollout_correction import ROLLOUT_CORRECTIONS, RolloutCorrection
from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import parse_config


@pytest.fixture(scope="module")
def generate(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "docs" / "algorithms")
        yield importlib.import_module("generate")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("generate", "generator")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def generator(generate):
    """A module of the package that writes the pages, by its name."""
    return lambda name: importlib.import_module(f"generator.{name}")


@pytest.fixture(scope="module")
def texts(generate):
    return generate.pages()


def test_pages_are_current(root):
    command = [sys.executable, "docs/algorithms/generate.py", "--check"]
    outcome = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_generating_loads_no_engine(root):
    code = (
        "import sys; sys.path.insert(0, 'docs/algorithms'); import generate; generate.pages();"
        "print({'deepspeed', 'lightning', 'ray', 'transformers', 'vllm'} & set(sys.modules))"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert outcome.stdout.strip() == "set()", outcome.stdout + outcome.stderr


def test_changed_missing_and_left_over_pages_are_found(generate, tmp_path):
    for name, text in {"same.md": "a", "changed.md": "b", "left_over.md": "c"}.items():
        (tmp_path / name).write_text(text)
    written = {"same.md": "a", "changed.md": "B", "missing.md": "d"}
    assert generate.differences(tmp_path, written) == ["changed.md", "left_over.md", "missing.md"]


def test_the_example_teaches_what_was_right(texts):
    example = re.search(r"```python\n(.*?)```", texts["functions.md"], re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(compile(example[1], "functions.md", "exec"), names)
    gradient_BT, mask_BT = names["log_probs_BT"].grad, names["response_mask_BT"].bool()
    is_right_B = names["rewards_BT"].sum(dim=-1) > 0
    assert (gradient_BT[is_right_B][mask_BT[is_right_B]] < 0).all()
    assert (gradient_BT[~is_right_B][mask_BT[~is_right_B]] > 0).all()
    assert (gradient_BT[~mask_BT] == 0).all()


def test_every_algorithm_loss_and_function_is_there(root, texts):
    algorithms = {path.stem for path in (root / "recipes/conf/algorithm").glob("*.yaml")}
    names = {*algorithms, *PREFERENCE_LOSSES, *REWARD_MODEL_LOSSES}
    common = {"README.md", "common_options.md", "functions.md", "options.md"}
    assert {f"{name}.md" for name in names} | common == set(texts)
    assert all(f"]({name}.md)" in texts["README.md"] for name in names)
    tables = (ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, REWARD_MODEL_LOSSES)
    functions = {aggregate, *(function for known in tables for function in known.values())}
    assert all(f"\n### {function.__name__}\n" in texts["functions.md"] for function in functions)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", "policy gradient"),
        ("pf_ppo", "policy gradient with critic"),
        ("prime", "policy gradient with process reward model"),
        ("forward_kl_distillation", "distillation"),
        ("kto", "preference"),
        ("bradley_terry", "reward model"),
    ],
)
def test_the_overview_says_of_which_kind_each_is(texts, name, kind):
    row = next(line for line in texts["README.md"].splitlines() if f"]({name}.md)" in line)
    assert row.split(" | ")[1] == kind


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("grpo", "grpo model.path=MODEL"),
        ("dapo", "grpo algorithm=dapo model.path=MODEL"),
        ("ppo", "ppo model.path=MODEL"),
        ("pf_ppo", "ppo algorithm=pf_ppo model.path=MODEL"),
        ("prime", "prime model.path=MODEL"),
        ("on_policy_distillation", "grpo algorithm=on_policy_distillation teacher.path=TEACHER model.path=MODEL"),
        ("simpo", "online_preference_optimization loss.name=simpo model.path=MODEL"),
        ("process_reward", "reward_modeling loss.name=process_reward model.path=MODEL"),
    ],
)
def test_a_page_starts_the_recipe_that_suits_it_best(texts, name, begin):
    assert f"\npython -m rl_plugins.recipes.{begin} \\\n" in texts[f"{name}.md"]


def test_every_command_line_is_accepted(root, texts):
    seen = 0
    for text in texts.values():
        for line in re.findall(r"```bash\npython -m (.*?)\n```", text, re.DOTALL):
            module, *overrides = shlex.split(line.replace("\\\n", " "))
            recipe = module.removeprefix("rl_plugins.recipes.")
            assert (root / "recipes" / f"{recipe}.py").is_file()
            config = parse_config(compose_config(recipe, overrides))
            if config.algorithm:
                assert instantiate(config.algorithm, _convert_="all")
            seen += 1
    # A page each, and two recipes for the losses of preferences.
    assert seen == len(texts) - 4 + len(PREFERENCE_LOSSES)


def test_every_object_among_the_common_options_can_be_set(texts):
    objects = re.findall(r"```bash\n'(algorithm\..*)'\n```", texts["common_options.md"])
    set_here = {}
    for override in objects:
        option = override.partition("=")[0].removeprefix("algorithm.")
        override = override.replace("MAX_TOKENS", "8").replace("BUFFER_TOKENS", "2")
        algorithm = instantiate(compose_config("grpo", [override, "model.path=none"]).algorithm, _convert_="all")
        for part in option.split("."):
            algorithm = getattr(algorithm, part)
        set_here[option] = algorithm
    assert set_here == {
        "correction": RolloutCorrection(),
        "shaping.overlong": OverlongPenalty(max_tokens=8, buffer_tokens=2),
        "group_filter": GroupFilter(),
        "resampling": Resampling(),
    }


def test_the_common_options_are_those_of_the_classes(texts):
    page = texts["common_options.md"]
    assert "| `algorithm.kl.coefficient` | `0.0` | weight of the KL term; 0 needs no reference model. |" in page
    assert "| `++algorithm.entropy.rate` | `0.005` | step of the adaptation. |" in page
    assert "| `max_tokens` | needed | the length from which on the penalty is whole. |" in page
    assert "\n## algorithm.correction.rules[]: Rejection\n" in page
    assert all(f"\n| `{name}` | `RolloutCorrection(" in page for name in ROLLOUT_CORRECTIONS)
    assert all(f"`algorithm.{field.name}`" in page for field in fields(Algorithm))


@pytest.mark.parametrize("name", ["grpo", "dapo", "prime", "pf_ppo", "dpo", "simpo", "bradley_terry"])
def test_options_with_two_signs_are_accepted_and_others_need_none(texts, name):
    command = re.search(r"python -m rl_plugins\.recipes\.(\w+) (.*)model\.path", texts[f"{name}.md"])
    assert command is not None
    chosen = ["model.path=none", *shlex.split(command[2])]
    options = re.findall(r"^\| `((?:\+\+)?[a-z_]+\.[\w.]+)` \|", texts[f"{name}.md"], re.MULTILINE)
    assert options
    compose_config(command[1], [*chosen, *(f"{option}=null" for option in options if option.startswith("++"))])
    known = OmegaConf.to_container(compose_config(command[1], chosen), throw_on_missing=False)
    for option in options:
        node: Any = known
        *groups, last = option.removeprefix("++").split(".")
        for group in groups:
            node = node[group]
        assert (last not in node) == option.startswith("++"), option


def test_links_between_pages_have_a_target(texts):
    headings = {name: re.findall(r"^#+ (.+)$", text, re.MULTILINE) for name, text in texts.items()}
    anchors = {name: {re.sub(r"[^\w-]", "", found.lower()) for found in headings[name]} for name in texts}
    for name, text in texts.items():
        for page, anchor in re.findall(r"\]\(([\w.]*\.md|)(?:#(\w+))?\)", text):
            assert not anchor or anchor in anchors[page or name], f"{name} links to {page}#{anchor}"
            assert not page or page in texts, f"{name} links to {page}"


def test_rows_of_tables_have_as_many_cells_as_their_headings(texts):
    for name, text in texts.items():
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
            assert len(cells) == 1, f"{name}: {block}"


def test_options_show_the_value_of_the_algorithm_and_the_default_of_the_function(texts):
    page = texts["dr_grpo.md"]
    assert "| `algorithm.advantage_options.scale` | `none` | divide by" in page
    assert "| `algorithm.scale_factor` | `${sampling.max_tokens}` |" in page
    assert "| `++algorithm.advantage_options.eps` | `1e-06` | added to the standard deviation. |" in page
    assert "| `++algorithm.policy_loss_options.dual_clip` | `3.0` |" in page
    assert "algorithm.kl." not in page and "algorithm.policy_loss`" not in page  # as everywhere


def test_options_of_the_model_beside_the_policy_are_shown(texts):
    assert "| `critic.optimizer.lr` | `1e-05` | learning rate. |" in texts["pf_ppo.md"]
    prime = texts["prime.md"]
    assert "| `process_reward_model.beta` | `0.05` | reward of one nat. |" in prime
    assert "| `++process_reward_model.normalize` | `true` |" in prime
    assert "| `++process_reward_model.optimizer` | `OptimizerConfig(gradient_clip=10.0)` |" in prime
    assert "Options of the" not in texts["grpo.md"]


def test_options_and_columns_of_a_loss_are_shown(texts):
    assert "| `++loss.options.label_smoothing` | `0.0` |" in texts["dpo.md"]
    assert "`data.label_key`" in texts["kto.md"] and "`data.label_key`" not in texts["dpo.md"]
    assert "| `data.steps_key` | `extra_info.steps` |" in texts["process_reward.md"]
    assert "| `data.margin_key` | `null` |" in texts["bradley_terry.md"]


def test_a_docstring_is_cut_into_its_sections(generator):
    def documented(values_BT, low):
        """What it does, `a < b`.

        More where x < y.

        When: always, or
        never.

        Args:
            values_BT: first line,
                and second.
            low: a bound.

        Returns:
            Something
            [B].

        Raises:
            ValueError: too low.

        Source: https://example.org,
        eq. 1.
        """

    found = generator("docstrings").parse(documented)
    assert found.summary == "What it does, `a < b`."
    assert found.description == "What it does, `a < b`.\n\nMore where x \\< y."
    assert found.when == "always, or never."
    assert found.arguments == {"values_BT": "first line, and second.", "low": "a bound."}
    assert (found.returns, found.raises) == ("Something [B].", {"ValueError": "too low."})
    assert found.source == "https://example.org, eq. 1."


def test_an_algorithm_without_a_hint_when_to_use_it_is_refused(generator, tmp_path):
    (tmp_path / "grpo.yaml").write_text("# GRPO: relative rewards.\nadvantage: grpo\n")
    with pytest.raises(SystemExit, match=r"grpo\.yaml: open the file with .* '# When: when to use it.'"):
        generator("algorithms").read_algorithm(tmp_path / "grpo.yaml")


def test_a_loss_without_a_hint_when_to_use_it_is_refused(generator):
    def my_loss():
        """A loss."""

    with pytest.raises(SystemExit, match=r"my_loss: .* 'When: \.\.\.'"):
        generator("losses").loss_page(generator("losses").Loss("mine", "preference", my_loss, ()))


def test_an_axis_that_no_one_explains_is_refused(generator):
    with pytest.raises(SystemExit, match="axis Q of values_BQ is not explained"):
        generator("markdown").axes_of("values_BQ")
