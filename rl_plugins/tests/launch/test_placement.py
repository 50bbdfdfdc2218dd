"""Requests of a run to Ray, and the messages about requests larger than every machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.util

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.placement import (
    Role,
    check_fit,
    engine_threads,
    needed,
    pool_configs,
    reserved,
    roles_of,
    table,
    weight_transport,
)
from rl_plugins.tests.launch.configurations import configured


def grpo(*overrides: str) -> RecipeConfig:
    return configured("grpo", "model.path=none", *overrides)


def grpo_roles(device: str, *overrides: str) -> dict[str, tuple[Any, ...]]:
    """Return count, CPUs, GPUs and strategy of the roles of a run, by their names."""
    roles = roles_of(grpo(f"placement.device={device}", *overrides))
    return {role.name: (role.count, role.cpus, role.gpus, role.strategy) for role in roles}


def test_roles_of_colocated_engines_share_the_devices_of_the_workers():
    assert grpo_roles("cpu") == {"training workers": (2, 1, 0, "PACK"), "rollout engines": (1, 0, 0, None)}
    assert grpo_roles("cuda", "rollout.engine=transformers") == {"training workers": (2, 1, 1, "PACK")}


def test_roles_of_colocated_engines_on_gpus_are_on_the_gpus_of_all_workers():
    workers, eight = {"training workers": (8, 1, 1, "PACK")}, "placement.num_workers=8"
    assert grpo_roles("cuda", eight) == {**workers, "rollout engines": (8, 0, 0, None)}
    assert grpo_roles("cuda", eight, "rollout.engines=8") == {**workers, "rollout engines": (8, 0, 0, None)}
    size = "rollout.tensor_parallel_size=2"
    assert grpo_roles("cuda", eight, size) == {**workers, "rollout engines": (4, 0, 0, None)}
    assert grpo_roles("cuda", eight, size, "rollout.engines=per_worker")["rollout engines"] == (4, 0, 0, None)


def test_roles_of_split_engines_have_their_own_devices():
    split = ("placement.rollout=split", "rollout.engines=2", "rollout.tensor_parallel_size=4")
    assert grpo_roles("cuda", *split)["rollout engines"] == (2, 1, 4, "PACK")
    assert grpo_roles("cpu", *split, "placement.engine_cpus=0.5")["rollout engines"] == (2, 2, 0, "PACK")


def test_roles_of_has_a_role_for_each_pool():
    pools = grpo_roles(
        "cuda", "placement.teacher.actors=3", "placement.reward_model.actors=2", "placement.teacher.gpus=0.5"
    )
    assert pools["teacher"] == (3, 1, 0.5, "PACK") and pools["reward_model"] == (2, 1, 1, "PACK")
    assert grpo_roles("cuda", "placement.critic.actors=2")["critic"] == (2, 1, 1, "PACK")


def test_pool_configs_have_the_deadline_of_the_start():
    actors = ("placement.teacher.actors=1", "placement.critic.actors=1", "placement.critic.start_timeout_s=7200")
    for gpus, seconds in ((True, 900.0), (False, 300.0)):
        pools = pool_configs(grpo(*actors), {"teacher": gpus, "critic": gpus})
        assert {pool.role: pool.ready_timeout_s for pool in pools} == {"teacher": seconds, "critic": 7200.0}


def test_roles_of_counts_the_gpus_of_reward_workers():
    assert "reward workers" not in grpo_roles("cuda", "reward.num_workers=3")
    roles = grpo_roles("cuda", "reward.num_workers=3", "reward.gpus=0.5")
    assert roles["reward workers"] == (6, 0, 0.5, None)
    config = grpo("placement.device=cuda", "reward.gpus=1", "placement.num_workers=4", "placement.cpus_per_worker=1")
    machine = {"CPU": 64.0, "GPU": 8.0}
    check_fit(roles_of(config), [machine], "this machine")
    with pytest.raises(
        ConfigError, match=r"needs 8 GPUs \(training workers 4 x 1, reward workers 4 x 1\).*reward\.gpus"
    ):
        check_fit(roles_of(config), [{**machine, "GPU": 7.0}], "this machine")


def test_reserved_has_places_for_all_roles_with_resources(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    def placement_group(bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        asked[name] = (bundles, strategy)
        return SimpleNamespace(wait=lambda timeout_s: True)

    monkeypatch.setattr(ray.util, "placement_group", placement_group)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    config = grpo("placement.device=cuda", "placement.num_workers=1", "placement.strategy=SPREAD", "reward.gpus=0.5")
    with reserved(roles_of(config), "run"):
        assert asked == {
            "run: training workers": ([{"CPU": 1.0, "GPU": 1.0}], "SPREAD"),
            "run: reward workers": ([{"GPU": 0.5}], "PACK"),
        }


def test_roles_of_a_critic_with_several_actors_need_a_gpu_each():
    with pytest.raises(ConfigError, match=r"placement\.critic\.gpus=0\.5 cannot .*Set placement\.critic\.gpus=1"):
        grpo_roles("cuda", "placement.critic.actors=2", "placement.critic.gpus=0.5")
    assert grpo_roles("cuda", "placement.critic.actors=1", "placement.critic.gpus=0.5")["critic"] == (1, 1, 0.5, "PACK")
    assert grpo_roles("cpu", "placement.critic.actors=2", "placement.critic.gpus=0.5")["critic"] == (2, 1, 0, "PACK")


@pytest.mark.parametrize("overrides", [["rollout.engines=1"], ["rollout.tensor_parallel_size=3"]])
def test_roles_of_refuses_colocated_engines_on_some_of_the_gpus(overrides: list[str]):
    with pytest.raises(ConfigError, match=r"of the 2 training workers\. Set rollout\.engines=per_worker .*split"):
        grpo_roles("cuda", *overrides)


@pytest.mark.parametrize(("place", "wrong"), [("colocated", "nccl"), ("split", "ipc"), ("split", "gloo")])
def test_roles_of_refuses_a_transport_between_other_gpus(place: str, wrong: str):
    placed = f"placement.rollout={place}"
    with pytest.raises(ConfigError, match=f"rollout.transport={wrong}: with {placed}, .*Leave rollout.transport out"):
        grpo_roles("cuda", placed, f"rollout.transport={wrong}")
    assert grpo_roles("cuda", placed, f"rollout.transport={'nccl' if place == 'split' else 'ipc'}")


@pytest.mark.parametrize(
    ("overrides", "machines", "threads"),
    [
        ([], 1, 2),
        (["rollout.engines=per_worker"], 1, 1),
        (["placement.num_workers=4", "placement.cpus_per_worker=3"], 1, 12),
        (["placement.num_workers=4", "placement.cpus_per_worker=3"], 2, 6),
        (["placement.num_workers=4", "rollout.tensor_parallel_size=2"], 1, 2),
        (["placement.cpus_per_worker=0.25"], 1, 1),
        (["schedule.max_staleness=1"], 1, 1),
        (["schedule.max_staleness=1", "rollout.sleep=kv_cache"], 1, 2),
        (["placement.rollout=split", "placement.engine_cpus=3"], 1, 3),
    ],
)
def test_engine_threads_are_the_cores_of_the_engines_or_of_the_waiting_workers(
    overrides: list[str], machines: int, threads: int
):
    assert engine_threads(grpo(*overrides), machines) == threads


WORKERS = Role("training workers", 4, 1.0, 0.0, "PACK", "placement.num_workers=4")
TEACHER = Role("teacher", 2, 3.0, 1.0, "PACK", "placement.teacher.actors=2")
ENGINES = Role("rollout engines", 1, 0.0, 0.0, None, "rollout.engines=1")


def test_check_fit_names_the_role_that_finds_no_place_beside_other_roles():
    teacher = Role("teacher", 2, 3.0, 0.0, "PACK", "placement.teacher.actors=2")
    critic = Role("critic", 1, 2.0, 0.0, "PACK", "placement.critic.actors=1")
    machines = [{"CPU": 4.0}] * 2
    for alone in (teacher, critic):
        check_fit([alone], machines, "the cluster")
    with pytest.raises(ConfigError) as refused:
        check_fit([teacher, critic, ENGINES], machines, "the cluster")
    assert str(refused.value) == (
        "critic 1 x 2 CPUs: the machines of the cluster have no place for all of them beside teacher 2 x 3 CPUs. Lower "
        "placement.teacher.actors=2; placement.critic.actors=1; or use larger machines"
    )
    check_fit([teacher, critic], [{"CPU": 4.0}, {"CPU": 5.0}], "the cluster")


def test_check_fit_counts_machines_with_room_for_a_role_that_needs_separate_machines():
    workers = Role("training workers", 2, 1.0, 0.0, "STRICT_SPREAD", "placement.num_workers=2")
    head, machine = {"memory": 1.0}, {"CPU": 16.0}
    check_fit([workers], [head, machine, machine], "the cluster")
    with pytest.raises(ConfigError) as refused:
        check_fit([workers], [head, machine], "the cluster")
    assert str(refused.value) == (
        "placement.strategy=STRICT_SPREAD needs a separate machine for each of the 2 training workers, but the cluster "
        "has 1 with 1 CPUs. Lower placement.num_workers, or set placement.strategy=SPREAD"
    )


def test_check_fit_names_the_size_of_an_engine_that_keeps_workers_together():
    workers = Role("training workers", 4, 3.0, 1.0, "PACK", "placement.num_workers=4")
    engines = Role("rollout engines", 1, 0.0, 0.0, None, "rollout.tensor_parallel_size=4", 4)
    with pytest.raises(ConfigError) as refused:
        check_fit([workers, engines], [{"CPU": 10.0, "GPU": 4.0}] * 2, "the cluster")
    assert str(refused.value) == (
        "training workers 4 x 3 CPUs and 1 GPUs: the machines of the cluster have no place for all of them. Lower "
        "placement.num_workers=4; rollout.tensor_parallel_size=4; or use larger machines"
    )


def test_check_fit_keeps_the_workers_of_an_engine_on_one_machine():
    workers = Role("training workers", 8, 1.0, 1.0, "PACK", "placement.num_workers=8")
    engines = Role("rollout engines", 2, 0.0, 0.0, None, "rollout.engines=2", 4)
    reward = Role("reward workers", 4, 0.0, 1.0, None, "reward.gpus")
    machines = [{"CPU": 8.0, "GPU": gpus} for gpus in (6.0, 6.0)]
    check_fit([workers, engines, reward], machines, "the cluster")
    with pytest.raises(
        ConfigError, match=r"reward workers 3 x 2 GPUs: .* beside training workers 8 x 1 CPUs and 1 GPUs"
    ):
        check_fit(
            [workers, engines, Role("reward workers", 3, 0.0, 2.0, None, "reward.gpus")],
            [{"CPU": 8.0, "GPU": gpus} for gpus in (7.0, 7.0)],
            "the cluster",
        )


def test_check_fit_accepts_roles_that_fit():
    assert needed([WORKERS, TEACHER]) == {"CPU": 10, "GPU": 2}
    check_fit([WORKERS, TEACHER, ENGINES], [{"CPU": 4.0, "memory": 1.0}, {"CPU": 6.0, "GPU": 2.0}], "the cluster")


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        # Every worker shares its GPU with an engine.
        ([], 2),
        (["placement.rollout=split", "rollout.tensor_parallel_size=2"], 4),
        (["placement.num_workers=1", "placement.teacher.actors=3", "placement.teacher.gpus=0.25"], 2),
        (["placement.num_workers=1", "placement.teacher.actors=2", "placement.teacher.gpus=0.6"], 3),
        # A GPU has room for two shares of 0.4, and for three of 0.3.
        (["placement.num_workers=1", "placement.teacher.actors=5", "placement.teacher.gpus=0.4"], 4),
        (["placement.num_workers=1", "placement.teacher.actors=10", "placement.teacher.gpus=0.3"], 5),
    ],
)
def test_needed_counts_the_gpus_that_shares_need(overrides: list[str], gpus: int):
    assert needed(roles_of(grpo("teacher.path=none", "placement.device=cuda", *overrides)))["GPU"] == gpus


@pytest.mark.parametrize(
    ("roles", "nodes", "said"),
    [
        (
            [WORKERS, TEACHER, ENGINES], [{"CPU": 8.0, "GPU": 2.0}],
            ["needs 10 CPUs (training workers 4 x 1, teacher 2 x 3), but the cluster has 8. Lower "
             "placement.num_workers=4; placement.teacher.actors=2", "placement.wait_for_nodes_s"],
        ),
        ([TEACHER], [{"CPU": 8.0}], ["needs 2 GPUs (teacher 2 x 1), but the cluster has 0"]),
        (
            [Role("training workers", 8, 1.0, 0.6, "PACK", "placement.num_workers=8")], [{"CPU": 8.0, "GPU": 6.0}],
            ["needs 8 GPUs (training workers 8 x 0.6 on 8 GPUs), but the cluster has 6"],
        ),
        (
            [Role("training workers", 4, 1.0, 0.6, "STRICT_PACK", "placement.num_workers=4")],
            [{"CPU": 4.0, "GPU": 3.0}] * 2, ["training workers: 4 CPUs and 4 GPUs must be on one machine"],
        ),
        (
            [Role("rollout engines", 2, 0.0, 0.0, None, "rollout.engines=2", 4)], [{"CPU": 8.0, "GPU": 2.0}] * 4,
            ["2 rollout engines with 4 GPUs of one machine each", "room for 0. Lower rollout.tensor_parallel_size"],
        ),
        (
            [Role("teacher", 3, 3.0, 0.0, "PACK", "placement.teacher.actors=3")], [{"CPU": 5.0}] * 2,
            ["3 teacher with 3 CPUs of one machine each: the machines of the cluster have room for 2. Lower "
             "placement.teacher.actors=3"],
        ),
        (
            [TEACHER], [{"CPU": 2.0, "GPU": 1.0}] * 4,
            ["teacher: 3 CPUs and 1 GPUs must be on one machine", "placement.teacher.actors=2"],
        ),
        (
            [Role("training workers", 4, 1.0, 0.0, "STRICT_PACK", "placement.num_workers=4")], [{"CPU": 3.0}] * 2,
            ["training workers: 4 CPUs must be on one machine"],
        ),
        (
            [Role("training workers", 4, 1.0, 0.0, "STRICT_SPREAD", "placement.num_workers=4")], [{"CPU": 3.0}] * 2,
            ["separate machine for each of the 4 training workers, but the cluster has 2", "placement.strategy=SPREAD"],
        ),
    ],
)  # fmt: skip
def test_check_fit_names_the_option_to_lower(roles: list[Role], nodes: list[Any], said: list[str]):
    with pytest.raises(ConfigError) as refused:
        check_fit(roles, nodes, "the cluster")
    assert all(words in str(refused.value) for words in said), refused.value


def test_table_shows_the_needed_and_the_available():
    assert table([WORKERS, TEACHER, ENGINES], [{"CPU": 4.0}, {"CPU": 6.0, "GPU": 2.0}]) == [
        "placement        count  CPUs  GPUs  machines",
        "training workers     4     1     0  PACK",
        "teacher              2     3     1  PACK",
        "rollout engines      1     0     0  with the training workers",
        "needed                    10     2",
        "available                 10     2  2 in all",
    ]


def test_weight_transport_goes_by_device_and_hosts():
    assert weight_transport("auto", "cpu", split=True, hosts=1) == "shared_memory"
    assert weight_transport("auto", "cpu", split=False, hosts=2) == "gloo"
    assert weight_transport("auto", "cuda", split=True, hosts=2) == "nccl"
    assert weight_transport("auto", "cuda", split=False, hosts=1) == "ipc"
    assert weight_transport("gloo", "cpu", split=True, hosts=1) == "gloo"
    with pytest.raises(ConfigError, match=r"the cluster has 3 machines\. Set rollout\.transport=gloo"):
        weight_transport("shared_memory", "cpu", split=True, hosts=3)
