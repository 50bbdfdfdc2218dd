"""The pages in docs/algorithms agree with the code, their command lines are accepted, and their example runs."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.aggregation import aggregate
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.filtering import GroupFilter, Resampling
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES
from rl_plugins.algorithms.reward_shaping import OverlongPenalty
from rl_plugins.algorithms.rollout_correction import ROLLOUT_CORRECTIONS, RolloutCorrection
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config

RECIPES = (
    "grpo", "ppo", "prime", "safe_rlhf", "preference_optimization", "online_preference_optimization", "reward_modeling",
)  # fmt: skip
# Makes the pages, of one algorithm only, and prints the loaded libraries of the engines.
GENERATE = """
import sys
from types import SimpleNamespace
sys.path.insert(0, "docs/algorithms")
import generate
grpo = generate.ALGORITHMS / "grpo.yaml"
generate.ALGORITHMS = SimpleNamespace(glob=lambda pattern: [grpo])
assert {"grpo.md", "dpo.md", "functions.md", "options.md", "common_options.md", "README.md"} <= set(generate.pages())
print({"deepspeed", "lightning", "ray", "transformers", "vllm"} & set(sys.modules))
"""


@pytest.fixture(scope="module")
def generate(root):
    """The module docs/algorithms/generate.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "docs" / "algorithms")
        yield importlib.import_module("generate")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("generate", "generator")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def generator(generate):
    """Return a module of the page generator, by its name."""
    return lambda name: importlib.import_module(f"generator.{name}")


@pytest.fixture(scope="module")
def texts(root):
    """Return name and text of every page; another test compares them with the generator's output."""
    return {path.name: path.read_text(encoding="utf-8") for path in (root / "docs" / "algorithms").glob("*.md")}


def test_generate_check_finds_every_page_current(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_generate_loads_no_library_of_an_engine(root):
    # In a separate process: this process has loaded the engines' libraries.
    outcome = subprocess.run([sys.executable, "-c", GENERATE], cwd=root, capture_output=True, text=True)
    assert outcome.stdout.strip() == "set()", outcome.stdout + outcome.stderr


def test_differences_names_changed_missing_and_left_over_pages(generate, tmp_path):
    for name, text in {"same.md": "a", "changed.md": "b", "left_over.md": "c"}.items():
        (tmp_path / name).write_text(text)
    written = {"same.md": "a", "changed.md": "B", "missing.md": "d"}
    assert generate.differences(tmp_path, written) == ["changed.md", "left_over.md", "missing.md"]


def test_functions_page_example_has_gradients_in_favour_of_right_responses(texts):
    example = re.search(r"```python\n(.*?)```", texts["functions.md"], re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(compile(example[1], "functions.md", "exec"), names)
    gradient_BT, mask_BT = names["log_probs_BT"].grad, names["response_mask_BT"].bool()
    is_right_B = names["rewards_BT"].sum(dim=-1) > 0
    assert (gradient_BT[is_right_B][mask_BT[is_right_B]] < 0).all()
    assert (gradient_BT[~is_right_B][mask_BT[~is_right_B]] > 0).all()
    assert (gradient_BT[~mask_BT] == 0).all()


def test_pages_cover_every_algorithm_loss_and_function(root, texts):
    algorithms = {path.stem for path in (root / "recipes/conf/algorithm").glob("*.yaml")}
    names = {*algorithms, *PREFERENCE_LOSSES, *REWARD_MODEL_LOSSES}
    common = {"README.md", "common_options.md", "functions.md", "options.md"}
    assert {f"{name}.md" for name in names} | common == set(texts)
    assert all(f"]({name}.md)" in texts["README.md"] for name in names)
    tables = (ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, REWARD_MODEL_LOSSES)
    functions = {aggregate, *(function for known in tables for function in known.values())}
    assert all(f"\n### {function.__name__}\n" in texts["functions.md"] for function in functions)


def test_functions_page_explains_every_argument_of_the_functions_in_tables(texts):
    tables = (ADVANTAGES, POLICY_LOSSES, SELECTIONS, PREFERENCE_LOSSES, REWARD_MODEL_LOSSES)
    for function in {aggregate, *(function for known in tables for function in known.values())}:
        section = texts["functions.md"].partition(f"\n### {function.__name__}\n")[2].partition("\n### ")[0]
        arguments = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", section, re.MULTILINE)
        assert {name for name, meaning in arguments if meaning} >= set(signature(function).parameters), function


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", "policy gradient"),
        ("pf_ppo", "policy gradient with critic"),
        ("safe_rlhf", "policy gradient with critics and cost model"),
        ("prime", "policy gradient with process reward model"),
        ("forward_kl_distillation", "distillation"),
        ("kto", "preference"),
        ("bradley_terry", "reward model"),
    ],
)
def test_overview_names_the_kind_of_an_algorithm(texts, name, kind):
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
        ("safe_rlhf", "safe_rlhf cost_model.path=COST_MODEL model.path=MODEL"),
        ("on_policy_distillation", "grpo algorithm=on_policy_distillation teacher.path=TEACHER model.path=MODEL"),
        ("simpo", "online_preference_optimization loss.name=simpo model.path=MODEL"),
        ("process_reward", "reward_modeling loss.name=process_reward model.path=MODEL"),
    ],
)
def test_page_shows_the_command_of_the_most_suitable_recipe(texts, name, begin):
    assert f"\npython -m rl_plugins.recipes.{begin} \\\n" in texts[f"{name}.md"]


def commands_of(texts) -> dict[str, list[list[str]]]:
    """Return the overrides of every command line of the pages, by the recipe of the command."""
    found: dict[str, list[list[str]]] = {}
    for text in texts.values():
        for line in re.findall(r"```bash\npython -m (.*?)\n```", text, re.DOTALL):
            module, *overrides = shlex.split(line.replace("\\\n", " "))
            found.setdefault(module.removeprefix("rl_plugins.recipes."), []).append(overrides)
    return found


def test_pages_have_a_command_line_each_and_preference_losses_have_two(root, texts):
    found = commands_of(texts)
    # Four pages are about no single algorithm, and two recipes use the losses of preferences.
    assert sum(map(len, found.values())) == len(texts) - 4 + len(PREFERENCE_LOSSES)
    assert set(found) == set(RECIPES)
    assert all((root / "recipes" / f"{recipe}.py").is_file() for recipe in found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_accepts_the_command_lines_of_the_pages(texts, recipe):
    for overrides in commands_of(texts)[recipe]:
        config = parse_config(compose_config(recipe, overrides))
        if config.algorithm:
            assert instantiate(config.algorithm, _convert_="all"), overrides


def test_objects_of_common_options_can_be_set_on_the_command_line(texts):
    objects = re.findall(r"```bash\n'(algorithm\..*)'\n```", texts["common_options.md"])
    set_here = {}
    for override in objects:
        option = override.partition("=")[0].removeprefix("algorithm.")
        override = override.replace("MAX_TOKENS", "8")
        # Resampling needs an advantage without groups.
        name = "pf_ppo" if option == "resampling" else "grpo"
        overrides = [override, f"algorithm={name}", "model.path=none"]
        algorithm = instantiate(compose_config("grpo", overrides).algorithm, _convert_="all")
        for part in option.split("."):
            algorithm = getattr(algorithm, part)
        set_here[option] = algorithm
    assert set_here == {
        "correction": RolloutCorrection(),
        "shaping.overlong": OverlongPenalty(max_tokens=8),
        "group_filter": GroupFilter(),
        "constraint": CostConstraint(),
        "resampling": Resampling(),
    }


def test_common_options_page_lists_the_fields_of_the_classes(texts):
    page = texts["common_options.md"]
    assert "| `algorithm.kl.coefficient` | `0.0` | weight of the KL term; 0 needs no reference model. |" in page
    assert "| `++algorithm.entropy.rate` | `0.005` | step of the adaptation. |" in page
    assert "| `max_tokens` | needed | length at which the penalty reaches its maximum, in tokens. |" in page
    assert "\n## algorithm.correction.rules[]: Rejection\n" in page
    assert all(f"\n| `{name}` | `RolloutCorrection(" in page for name in ROLLOUT_CORRECTIONS)
    assert all(f"`algorithm.{field.name}`" in page for field in fields(Algorithm))


@pytest.mark.parametrize("name", ["grpo", "dapo", "prime", "pf_ppo", "safe_rlhf", "dpo", "simpo", "bradley_terry"])
def test_page_writes_two_plus_signs_only_before_options_that_the_recipe_lacks(texts, name):
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


def test_links_between_algorithm_pages_have_a_target(texts):
    headings = {name: re.findall(r"^#+ (.+)$", text, re.MULTILINE) for name, text in texts.items()}
    anchors = {name: {re.sub(r"[^\w-]", "", found.lower()) for found in headings[name]} for name in texts}
    for name, text in texts.items():
        for page, anchor in re.findall(r"\]\(([\w.]*\.md|)(?:#(\w+))?\)", text):
            assert not anchor or anchor in anchors[page or name], f"{name} links to {page}#{anchor}"
            assert not page or page in texts, f"{name} links to {page}"


def test_table_rows_have_as_many_cells_as_the_heading(texts):
    for name, text in texts.items():
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
            assert len(cells) == 1, f"{name}: {block}"


def test_algorithm_page_shows_values_of_the_file_and_defaults_of_the_functions(texts):
    page = texts["dr_grpo.md"]
    assert "| `algorithm.advantage_options.scale` | `none` | divide by" in page
    assert "| `algorithm.scale_factor` | `${sampling.max_tokens}` |" in page
    assert "| `++algorithm.advantage_options.eps` | `1e-06` | constant added to the standard deviation. |" in page
    assert "| `++algorithm.policy_loss_options.dual_clip` | `3.0` |" in page
    assert "algorithm.kl." not in page and "algorithm.policy_loss`" not in page  # as everywhere


def test_algorithm_page_shows_options_of_critic_and_process_reward_model(texts):
    assert "| `critic.optimizer.lr` | `1e-05` | learning rate. |" in texts["pf_ppo.md"]
    prime = texts["prime.md"]
    assert "| `process_reward_model.beta` | `0.05` | reward of one nat. |" in prime
    assert "| `++process_reward_model.normalize` | `true` |" in prime
    assert "| `++process_reward_model.optimizer` | `OptimizerConfig(gradient_clip=10.0)` |" in prime
    assert "Options of the" not in texts["grpo.md"]
    safe = texts["safe_rlhf.md"]
    assert "| `algorithm.constraint.threshold` | `0.0` | bound on the mean cost." in safe
    assert all(f"`{group}.path`" in safe for group in ("cost_model", "critic", "cost_critic"))
    assert "`log lambda += lambda_lr lambda (mean cost - threshold)`" in safe


def test_loss_page_shows_options_and_data_columns(texts):
    assert "| `++loss.options.label_smoothing` | `0.0` |" in texts["dpo.md"]
    assert "`data.label_key`" in texts["kto.md"] and "`data.label_key`" not in texts["dpo.md"]
    assert "| `data.steps_key` | `extra_info.steps` |" in texts["process_reward.md"]
    assert "| `data.margin_key` | `null` |" in texts["bradley_terry.md"]


def test_parse_splits_a_docstring_into_sections(generator):
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


def test_read_algorithm_refuses_a_file_without_a_line_when(generator, tmp_path):
    (tmp_path / "grpo.yaml").write_text("# GRPO: relative rewards.\nadvantage: grpo\n")
    with pytest.raises(SystemExit, match=r"grpo\.yaml: open the file with .* '# When: when to use it.'"):
        generator("algorithms").read_algorithm(tmp_path / "grpo.yaml")


def test_loss_page_refuses_a_docstring_without_a_line_when(generator):
    def my_loss():
        """A loss."""

    with pytest.raises(SystemExit, match=r"my_loss: .* 'When: \.\.\.'"):
        generator("losses").loss_page(generator("losses").Loss("mine", "preference", my_loss, ()))


def test_axes_of_refuses_an_unexplained_axis(generator):
    with pytest.raises(SystemExit, match="axis Q of values_BQ is not explained"):
        generator("markdown").axes_of("values_BQ")
