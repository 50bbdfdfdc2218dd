"""Runs of vision-language models over ZeRO-3 and FSDP2 with two workers, on rows with and without images."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.tiny_vision import EXPERTS, save_tiny_vision
from integration_tests.conftest import recipes_in
from rl_plugins.tests.pictures import encoded, picture, row

pytestmark = pytest.mark.extended


def options_of(folder: Path) -> list[str]:
    """Write rows to a folder; return the options of a run on these rows."""
    rows = [row("<image>color?", encoded(picture(n))) if n % 3 else row("no picture") for n in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return [
        f"data.train_files=[{folder / 'rows.parquet'}]", "data.val_files=[]",
        "run.eval_every=0", "run.eval_before=false", "tracking.enabled=false",
        "batch.prompts_per_step=4", "batch.samples_per_prompt=2", "batch.updates_per_step=2",
        "batch.patches_per_micro_batch=20", "placement.device=cpu", "placement.cpus_per_worker=0.5",
        "data.max_prompt_tokens=32", "sampling.max_tokens=8",
        "reward.functions.default={_target_: integration_tests.rewards.shortness}", "debug.dump_rollouts=1",
    ]  # fmt: skip


def test_ppo_trains_resumes_and_exports_a_vision_language_model(workplace: Path, tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path / "llava")
    options = [
        *options_of(tmp_path), "rollout.engine=transformers",
        *(f"{group}.path={tmp_path / 'llava'}" for group in ("model", "critic")),
    ]  # fmt: skip
    pool = ("placement.critic.actors=1", "strategy.name=zero")
    with recipes_in(tmp_path, workplace) as start:
        for name, *own in (
            ("pool", *pool, "run.steps=2"),
            ("pool", *pool, "run.steps=3", "run.resume=true"),
            ("beside", "launcher=local", "run.steps=3"),
        ):
            run = start("ppo", name, *options, *own)
            assert run.wait() == 0, run.tail()
            assert all(step["train/critic/gradient_norm"] > 0 for step in run.trained())
            assert max(step["train/rollout_gap_max"] for step in run.trained()) < 1e-3
            assert (run.run / "policy" / "processor_config.json").is_file()
            if "run.steps=3" in own:
                assert [step["step"] for step in run.trained()] == [1, 2, 3]


@pytest.mark.parametrize("source", ["recompute", "rollout"])
def test_grpo_replays_the_routes_of_rows_with_images(workplace: Path, tmp_path: Path, source: str) -> None:
    save_tiny_vision("llava", tmp_path / "mixture", **EXPERTS)
    options = [*options_of(tmp_path), "launcher=local", "rollout.engine=transformers", "run.steps=2"]
    with recipes_in(tmp_path, workplace) as start:
        # A large rate changes the choice of the routers from the first update to the second.
        replay = (f"model.path={tmp_path / 'mixture'}", f"model.router_replay={source}", "optimizer.lr=0.01")
        run = start("grpo", source, *options, *replay)
        assert run.wait() == 0, run.tail()
    assert max(step["train/rollout_gap_max"] for step in run.trained()) < 1e-3
    assert all(step["train/router_differing"] > 0 for step in run.trained())


def test_grpo_trains_an_adapter_of_a_vision_language_model_over_fsdp_and_vllm(workplace: Path, tmp_path: Path) -> None:
    # vLLM has LLaVA with torchvision only.
    save_tiny_vision("idefics3", tmp_path / "idefics3")
    with recipes_in(tmp_path, workplace) as start:
        run = start(
            "grpo", "fsdp", *options_of(tmp_path), f"model.path={tmp_path / 'idefics3'}", "strategy.name=fsdp",
            "model.lora.rank=2", "rollout.lora=merged", f"data.val_files=[{tmp_path / 'rows.parquet'}]",
            "run.eval_every=2", "run.steps=2",
        )  # fmt: skip
        assert run.wait() == 0, run.tail()
    # An untrained policy gives the token of an image some probability, and vLLM never samples the token.
    assert max(step["train/rollout_gap_max"] for step in run.trained()) < 0.05
    assert (run.run / "policy" / "processor_config.json").is_file()
