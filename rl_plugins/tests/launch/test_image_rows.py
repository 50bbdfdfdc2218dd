"""Rows with images in the checks before a run: models, engines and limits that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.tiny_vision import EXPERTS, save_tiny_vision
from rl_plugins.launch.dry_run import check_data
from rl_plugins.launch.preflight import check_models
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.patience import patient
from rl_plugins.tests.pictures import encoded, picture, row

Check = Callable[..., str]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return the message of the checks of a run on four rows."""
    save_tiny_vision("llava", tmp_path / "llava")
    save_tiny_policy(tmp_path / "text", hidden_size=128, num_heads=4)

    def check(rows: list[dict[str, Any]], *overrides: str, model: str = "llava") -> str:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        config = configured(
            "grpo", f"model.path={tmp_path / model}", f"data.train_files=[{tmp_path / 'rows.parquet'}]",
            "launcher=local", "rollout.engine=transformers", "batch.prompts_per_step=4", "data.max_prompt_tokens=32",
            "sampling.max_tokens=8", f"reward.load_timeout_s={patient(30)}", *overrides,
        )  # fmt: skip
        return message_of(lambda: check_data(config, check_models(config)))

    return check


def rows_of(*images: Any) -> list[dict[str, Any]]:
    return [row("<image>color?", encoded(picture(number))) for number in range(3)] + [row("<image>?", *images)]


def test_check_data_accepts_rows_with_images(check: Check) -> None:
    assert check([*rows_of(encoded(picture())), row("no picture")]) == "nothing is refused"


def test_check_data_refuses_images_for_a_model_of_text(check: Check) -> None:
    assert "row 0, column 'images': the row has images, which a vision-language" in check(
        rows_of(encoded(picture())), model="text"
    )


def test_check_data_refuses_images_for_an_environment_that_begins_by_itself(check: Check) -> None:
    environment = "rl_plugins.tests.environments.sample_environments.Even"
    options = (f"environment.stateful={environment}", "environment.max_turns=1", "environment.max_objects=4")
    found = check(rows_of(encoded(picture())), *options)
    assert "a stateful environment or an agent begins with messages of text alone" in found


@pytest.mark.parametrize("option", ["critic.path", "reward_model.path", "teacher.path"])
def test_check_data_refuses_another_model_of_text_for_rows_with_images(
    check: Check, option: str, tmp_path: Path
) -> None:
    found = check(rows_of(encoded(picture())), f"{option}={tmp_path / 'text'}")
    assert f"{option}={tmp_path / 'text'}: the rows have images, and this model reads text alone" in found
    assert check([row("no picture")] * 4, f"{option}={tmp_path / 'text'}") == "nothing is refused"


def test_check_data_accepts_a_replay_of_routes_for_rows_with_images(check: Check, tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path / "mixture", **EXPERTS)
    for source in ("recompute", "rollout"):
        found = check(rows_of(encoded(picture())), f"model.router_replay={source}", model="mixture")
        assert found == "nothing is refused"


def test_check_models_refuses_vision_lr_for_a_critic_of_text(check: Check, tmp_path: Path) -> None:
    for path in (tmp_path / "text", "null"):
        found = check([row("no picture")] * 4, f"critic.path={path}", "critic.optimizer.vision_lr=0", model="text")
        assert f"critic.optimizer.vision_lr=0: {tmp_path / 'text'} has no vision tower: leave the option out" in found


def test_check_data_refuses_a_row_with_a_bad_image(check: Check) -> None:
    assert "rows.parquet, row 3, column 'images': image 0 is no image that PIL knows" in check(rows_of(b"text"))
    two = check(rows_of(encoded(picture()), encoded(picture())))
    assert "row 3, column 'images': the row has 2 images, and its messages have <image> 1 times" in two


def test_check_data_leaves_out_rows_with_bad_images_on_request(check: Check) -> None:
    rows = [*rows_of(b"text"), row("<image>color?", encoded(picture()))]
    for overlong in ("filter", "error"):
        options = ("data.bad_images=filter", f"data.overlong_prompts={overlong}")
        assert check(rows, *options) == "nothing is refused"
    assert "3 of 4 rows are within data.max_prompt_tokens=32" in check(rows_of(b"text"), "data.bad_images=filter")


def test_check_data_counts_the_tokens_of_images(check: Check) -> None:
    message = check(rows_of(encoded(picture())), "data.max_prompt_tokens=16")
    assert "more tokens than data.max_prompt_tokens=16 (the shortest 19)" in message


def test_check_models_refuses_a_rate_for_a_tower_that_the_model_does_not_have(check: Check) -> None:
    found = check([row("a")] * 4, "optimizer.vision_lr=0", model="text")
    assert found.startswith("optimizer.vision_lr=0: ") and "text has no vision tower: leave the option out" in found
    assert check(rows_of(encoded(picture())), "optimizer.vision_lr=1e-6") == "nothing is refused"
    found = check([row("a")] * 4, "batch.patches_per_micro_batch=64", model="text")
    assert "batch.patches_per_micro_batch=64: " in found and "text has no vision tower: leave the option out" in found
    adapter = ("model.lora.rank=2", "model.lora.target_modules=language-model")
    found = check(rows_of(encoded(picture())), "optimizer.vision_lr=1e-6", *adapter)
    assert "vision_lr=1e-06: the vision tower has no adapter (model.lora.target_modules=language-model)" in found


def test_check_models_refuses_an_adapter_that_vllm_would_apply_in_part(check: Check) -> None:
    options = ("launcher=ray", "rollout.engine=vllm", "model.lora.rank=2")
    message = check(rows_of(encoded(picture())), *options)
    wanted = "alone: use model.lora.target_modules=language-model or rollout.lora=merged"
    assert f"vLLM applies adapters to the language model of a vision-language model {wanted}" in message
    for option in ("model.lora.target_modules=language-model", "rollout.lora=merged"):
        assert check(rows_of(encoded(picture())), *options, option) == "nothing is refused"
