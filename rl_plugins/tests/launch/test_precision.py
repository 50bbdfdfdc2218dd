"""The default of `model.precision` follows from the device, wherever the precision is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import OmegaConf

from rl_plugins.config.checks import check_device
from rl_plugins.config.precision import PRECISIONS
from rl_plugins.config.recipe import RecipeConfig, parse_config, write_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch import ray_train
from rl_plugins.launch.local import train_in_this_process
from rl_plugins.launch.placement import pool_configs
from rl_plugins.launch.training import TrainingRun
from rl_plugins.models.pool_actor import ModelActor, PoolConfig
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages import critic_pool
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.fake_cuda import FakeCuda
from rl_plugins.tests.launch.configurations import configured


@pytest.fixture
def _precision_of_products() -> Iterator[None]:
    """Restore the precision of float32 products, a setting of the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def on(device: str, *options: str) -> RecipeConfig:
    return configured("grpo", "model.path=model", f"placement.device={device}", *options)


def test_precision_is_bf16_mixed_on_gpus_and_32_true_on_cpu() -> None:
    pools = ("placement.teacher.actors=1", "teacher.path=model")
    for device, precision, dtype in (
        ("cpu", "32-true", "float32"),
        ("auto", "32-true", "float32"),
        ("cuda", "bf16-mixed", "bfloat16"),
    ):
        config = on(device, *pools)
        assert (config.model.precision, config.precision, config.rollout_dtype) == (None, precision, dtype)
        assert [pool.dtype for pool in pool_configs(config, {"teacher": False})] == [dtype]
        assert on(device, "model.precision=bf16-true").precision == "bf16-true"
        assert on(device, "model.precision=32-true").rollout_dtype == "float32"


def test_engine_and_pools_follow_16_mixed_in_float16_without_a_correction() -> None:
    options = ("model.precision=16-mixed", "placement.teacher.actors=1", "teacher.path=model")
    config = on("cuda", *options)
    config.set_device("cuda")
    assert (config.precision, config.rollout_dtype, config.algorithm["correction"]) == ("16-mixed", "float16", "none")
    assert [pool.dtype for pool in pool_configs(config, {"teacher": True})] == ["float16"]
    assert on("cuda", *options, "rollout.dtype=bfloat16").algorithm["correction"] == "token_tis"


def test_float16_under_zero_runs_on_gpus() -> None:
    config = on("auto", "model.precision=16-mixed")
    check_device(config, "cuda")
    message = r"model.precision=16-mixed: DeepSpeed trains in float16 on GPUs, and the run is on CPU: add strategy.name"
    with pytest.raises(ConfigError, match=message):
        check_device(config, "cpu")
    for other in (("strategy.name=fsdp",), ("launcher=local", "rollout.engine=transformers")):
        check_device(on("cpu", "model.precision=16-mixed", *other), "cpu")


@pytest.mark.parametrize("strategy", [SingleDeviceRolloutStrategy, FSDPStrategy, ZeroStrategy])
def test_trainer_of_a_run_has_the_precision_of_the_run(tmp_path: Path, strategy: Any) -> None:
    """Lightning refuses 16-mixed for FSDP2, and takes bf16-mixed in its place on CPU."""
    environment = LightningEnvironment()
    for precision in PRECISIONS:
        config = on("cpu", f"model.precision={precision}", f"run.output_dir={tmp_path}")
        run = TrainingRun(
            config,
            RunFolder(tmp_path / "run"),
            strategy(),
            scorer=None,
            checkpoint=None,
            in_ray=False,
            redraw_s=1.0,
            started=0.0,
            trainer_options={"accelerator": "cpu", "devices": 1, "plugins": [environment]},
        )
        trainer = run.trainer()
        assert trainer.precision == precision
        assert getattr(trainer.strategy, "cluster_environment", environment) is environment


def test_set_device_keeps_the_precision_for_the_record_of_the_run(tmp_path: Path) -> None:
    config = on("auto")
    config.set_device("cuda")
    write_config(config, tmp_path / "config.yaml")
    written = parse_config(OmegaConf.load(tmp_path / "config.yaml"))
    assert written == config
    assert (written.placement.device, written.model.precision) == ("cuda", "bf16-mixed")


class _Started(Exception):
    """Error of a launcher at its first heavy step."""


@pytest.mark.parametrize(("device", "precision"), [("cpu", "32-true"), ("cuda", "bf16-mixed")])
def test_ray_launcher_records_the_precision_of_the_resolved_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, precision: str
) -> None:
    def start(name: str) -> dict[str, str]:
        raise _Started(name)

    monkeypatch.setattr(ray_train, "resolve_device", lambda config: device)
    monkeypatch.setattr(ray_train, "worker_environment", start)
    folder = RunFolder(tmp_path)
    with pytest.raises(_Started, match=device):
        ray_train.train_on_ray(on("auto"), folder)
    assert OmegaConf.load(folder.config).model.precision == precision


def test_local_launcher_on_a_gpu_uses_tensor_cores_and_records_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _precision_of_products: None
) -> None:
    runs: list[TrainingRun] = []
    monkeypatch.setattr("rl_plugins.launch.training.import_module", lambda name: _Recipe(runs))
    monkeypatch.setattr("rl_plugins.launch.local.transformers_rollout", lambda config, device: None)
    monkeypatch.setattr("rl_plugins.launch.local.scorer_of", lambda config: None)
    folder = RunFolder(tmp_path)
    for device, precision, products in (("cpu", "32-true", "highest"), ("cuda", "bf16-mixed", "high")):
        train_in_this_process(on(device, "launcher=local", "rollout.engine=transformers"), folder)
        assert runs[-1].config.precision == OmegaConf.load(folder.config).model.precision == precision
        assert torch.get_float32_matmul_precision() == products


class _Recipe:
    def __init__(self, runs: list[TrainingRun]) -> None:
        self.train = runs.append


def test_pool_actor_on_a_gpu_uses_tensor_cores(tmp_path: Path, _precision_of_products: None) -> None:
    path = str(save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48))
    pool: dict[str, Any] = {"role": "teacher", "model": path, "head": "causal_lm"}
    ModelActor(PoolConfig(**pool))
    assert torch.get_float32_matmul_precision() == "highest"
    with FakeCuda():
        ModelActor(PoolConfig(**pool, device="cuda"))
    assert torch.get_float32_matmul_precision() == "high"


def test_critic_actor_on_a_gpu_uses_tensor_cores(monkeypatch: pytest.MonkeyPatch, _precision_of_products: None) -> None:
    monkeypatch.setattr(critic_pool, "CriticLearner", lambda training, device: device)
    settings: Any = None
    for device, products in (("cpu", "highest"), ("cuda", "high")):
        pool = PoolConfig("critic", "", "scalar", device=device, threads=torch.get_num_threads())
        learner: Any = critic_pool.CriticActor(pool, settings, 0)._learner.result()
        assert (learner, torch.get_float32_matmul_precision()) == (device, products)
