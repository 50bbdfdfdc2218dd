"""The pages in docs/algorithms say what the code says, and their example runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def generate(root):
    spec = importlib.util.spec_from_file_location("generate", root / "docs" / "algorithms" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def texts(generate):
    return generate.pages()


def test_pages_are_current(root):
    command = [sys.executable, "docs/algorithms/generate.py", "--check"]
    outcome = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_generating_loads_no_engine(root):
    code = (
        "import runpy, sys; runpy.run_path('docs/algorithms/generate.py')['pages']();"
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


def test_every_algorithm_and_function_is_there(generate, root, texts):
    algorithms = {path.stem for path in (root / "recipes/conf/algorithm").glob("*.yaml")}
    assert {f"{name}.md" for name in algorithms} | {"README.md", "functions.md"} == set(texts)
    assert all(f"]({name}.md)" in texts["README.md"] for name in algorithms)
    functions = {*generate.ADVANTAGES.values(), *generate.POLICY_LOSSES.values(), generate.aggregate}
    assert all(f"\n### {function.__name__}\n" in texts["functions.md"] for function in functions)


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


def test_a_docstring_is_cut_into_its_sections(generate):
    def documented(values_BT, low):
        """What it does, `a < b`.

        More where x < y.

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

    found = generate.parse(documented)
    assert found.summary == "What it does, `a < b`."
    assert found.description == "What it does, `a < b`.\n\nMore where x \\< y."
    assert found.arguments == {"values_BT": "first line, and second.", "low": "a bound."}
    assert (found.returns, found.raises) == ("Something [B].", {"ValueError": "too low."})
    assert found.source == "https://example.org, eq. 1."


def test_an_algorithm_without_a_hint_when_to_use_it_is_refused(generate, tmp_path):
    (tmp_path / "grpo.yaml").write_text("# GRPO: relative rewards.\nadvantage: grpo\n")
    with pytest.raises(SystemExit, match=r"grpo\.yaml: open the file with .* '# When: when to use it.'"):
        generate.read_page(tmp_path / "grpo.yaml")


def test_an_axis_that_no_one_explains_is_refused(generate):
    with pytest.raises(SystemExit, match="axis Q of values_BQ is not explained"):
        generate._axes_of("values_BQ")
