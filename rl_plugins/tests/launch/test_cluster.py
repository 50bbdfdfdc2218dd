"""A cluster that does not answer, or that a run cannot join, is one line before anything heavy."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
from ray._private import services
from ray.exceptions import AuthenticationError

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch import ray_train
from rl_plugins.launch.cluster import check_cluster, join_cluster
from rl_plugins.launch.preflight import check_this_machine
from rl_plugins.launch.ray_train import start_ray
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each


@pytest.fixture
def head() -> Iterator[str]:
    """An address where a process listens, in the place of the head of a cluster."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of the clusters with a node on this machine."""
    found: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: found)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    return found


def test_check_cluster_accepts_an_address_where_a_process_listens(head: str, nodes: list[str]) -> None:
    nodes.append(head)
    for address in (head, head.replace("127.0.0.1", "localhost"), "auto"):
        check_cluster(address)


@for_each(
    ("address", "message"),
    [
        ("local", "names no cluster: unset the variable"),
        ("ray://head:10001", "a run joins a cluster on one of its machines, by HOST:PORT .*rl-plugins submit"),
        ("http://head:8265", "a run joins a cluster on one of its machines, by HOST:PORT .*rl-plugins submit"),
        ("head", "this is no HOST:PORT, such as head:6379"),
        (":6379", "this is no HOST:PORT"),
        ("127.0.0.1:99999", "ports end at 65535"),
        ("head..example:6379", r"does not answer \(.+\): start the cluster"),
        ("auto", "no Ray runs on this machine: start the cluster"),
    ],
)
def test_check_cluster_names_the_way_out_of_other_addresses(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS={address}:? {message}"):
        check_cluster(address)


def test_check_cluster_names_an_address_that_refuses_connections(refused_address: str, nodes: list[str]) -> None:
    nodes.append(refused_address)
    for address in (refused_address, "auto"):
        with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS={address} does not answer \(Connection refused\): start"):
            check_cluster(address)


def test_check_this_machine_asks_the_cluster_of_a_run_on_ray(
    refused_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", refused_address)
    on_ray = configured("grpo", "model.path=model")
    assert f"RAY_ADDRESS={refused_address} does not answer" in message_of(partial(check_this_machine, on_ray))
    check_this_machine(configured("grpo", "model.path=model", "launcher=local", "rollout.engine=transformers"))


def test_join_cluster_tells_in_one_line_why_ray_cannot_join(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head)
    failed = ConnectionError("Failed to connect to Ray cluster")
    failed.__cause__ = RuntimeError("Version mismatch:\n  The cluster was started with Ray 2.9")
    with mock.patch("ray.init", side_effect=failed):
        said = message_of(partial(join_cluster, runtime_env={}))
    reason = "Version mismatch: The cluster was started with Ray 2.9"
    assert said.startswith(f"RAY_ADDRESS={head}: this process cannot join the cluster ({reason}): start the cluster")
    with mock.patch("ray.init", side_effect=AuthenticationError("Token authentication is enabled")):
        said = message_of(partial(join_cluster, runtime_env={}))
    assert said.startswith(f"RAY_ADDRESS={head}: the cluster wants its token: put the token into ~/.ray/auth_token")


def test_start_ray_leaves_the_variables_of_a_job_to_the_job(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head)
    environment = {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": "/mine"}
    for runtime_env, left in (
        ({"env_vars": {"TORCH_EXTENSIONS_DIR": "/of/the/job"}}, {"OMP_NUM_THREADS": "1"}),
        ({"working_dir": "gcs://project.zip"}, environment),
    ):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": runtime_env}))
        with mock.patch("ray.init") as init:
            start_ray(environment)
        assert init.call_args.kwargs["runtime_env"]["env_vars"] == left


def test_resolve_device_keeps_the_handlers_of_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray replaces the handler of SIGTERM when a driver joins a cluster."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(ray_train, "join_cluster", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    try:
        assert ray_train.resolve_device(RecipeConfig(stage="sft")) == "cuda"
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
