"""Ray of a run's own: closed to other users of the machine and to the network, with room for the samples of a run.

Without an address, a run starts Ray on its machine. Ray then listens on the loopback address, and asks for the token in
`~/.ray/auth_token`. The token and the folder of Ray's sessions are for the user of the run alone: Ray by itself
writes the token with the rights of all new files, and opens its folder to all users.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, RayLost
from rl_plugins.hub.files import model_folder
from rl_plugins.model_json import chosen_experts, read_model_config
from rl_plugins.owned_folder import remove_ownerless
from rl_plugins.rollout.vllm.engine_files import ENGINE_FOLDERS

_TOKEN_BYTES = 32
TASK_REPORTS = "RAY_task_events_report_interval_ms"
"""Variable of Ray: milliseconds between two reports of a process about its tasks. Ray distinguishes small letters."""
GCS_WAIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable of Ray: seconds until a process ends that has lost the GCS."""
LEAST_BYTES = 512 * 2**20
_SAMPLE_BYTES = 32
"""Bytes of a token between sampler, rewards and workers: id, log-prob and text, pickled."""
_POOL_BYTES = 48
"""Bytes of a token between workers and a model in actors: ids, positions, masks and the result."""
_LIKELIEST_BYTES = 12
"""Bytes of one of the teacher's most likely tokens: id and log-prob."""
_END_S = 5.0
"""Seconds for the workers of Ray to end."""
_SOCKET_BYTES = 107
"""Longest path of a socket, in bytes."""
_LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_{}/sockets/plasma_store"
"""Path of Ray's socket with the longest name in the folder of sessions, with a place for the number of this process."""
_CLOSED = f"ray-{os.geteuid()}"
"""Name of the folder around the sessions of Ray."""
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_OF_SHARED, _SHARE_OF_MEMORY = 0.8, 0.3


def set_own_ray_up() -> None:
    """Let a Ray that this process starts listen on the loopback address, keep no list of finished tasks, and end early.

    Ray's GCS would keep 100,000 tasks for `ray list tasks`. Each step has many tasks, so the memory of the GCS would
    grow by megabytes every 100 steps. Nobody starts the GCS of a run's own Ray again, but Ray would wait a minute for
    a GCS that has ended. Call the function before the first import of Ray. Variables of the user stay.
    """
    # Ray's only switch: Ray replaces `_node_ip_address="127.0.0.1"` by an outside address.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # 0 is never: processes do not report their tasks to the GCS.
    os.environ.setdefault(TASK_REPORTS, "0")
    os.environ.setdefault(GCS_WAIT, "10")


def start_own_ray(**options: Any) -> None:
    """Start Ray on this machine, without a dashboard.

    Args:
        options: further arguments of `ray.init`.

    Raises:
        ConfigError: the folder or the token belongs to another user, or cannot be written, or the path is too long.
        RayLost: Ray's processes did not start.
    """
    set_own_ray_up()
    import ray

    protect_token()
    sessions = str(session_folder())
    # Without the address, Ray would connect to a cluster that already runs on this machine.
    fixed: dict[str, Any] = {"address": "local", "include_dashboard": False, "logging_level": logging.ERROR}
    try:
        ray.init(**fixed, _temp_dir=sessions, **options)
    except Exception as error:
        # Ray raises a plain Exception if its processes do not answer in time.
        reason = " ".join(str(error).split())
        raise RayLost(
            f"Ray did not start ({reason}): end other programs on this machine, or see the logs in "
            f"{sessions}/session_latest/logs"
        ) from error
    # Exit handlers run in reverse order, so this one runs before the handler of Ray.
    atexit.register(_end_own_ray)


def _end_own_ray() -> None:
    """End Ray with all of its processes. A worker can hang in Ray's own exit handlers, and would stay for ever."""
    import ray

    workers: list[psutil.Process] = []
    for child in psutil.Process().children():
        # Helper processes of Ray end at any time.
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                workers += child.children(recursive=True)
    ray.shutdown()
    hanging = psutil.wait_procs(workers, timeout=_END_S)[1]
    for worker in hanging:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(hanging, timeout=_END_S)
    remove_left_folders()


def remove_left_folders() -> None:
    """Remove the temporary folders of engines that killed runs have left on this machine."""
    remove_ownerless(ENGINE_FOLDERS)


def session_folder() -> Path:
    """Return the folder for Ray's sessions, inside a folder that only this user can enter.

    Raises:
        ConfigError: another user owns the folder, the folder cannot be made, or its path is too long.
    """
    sessions = path_of_sessions()
    closed = sessions.parent
    try:
        closed.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Ray's folder {closed} cannot be made ({error.strerror}): set RAY_TMPDIR") from error
    status = closed.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(
            f"Ray's folder {closed} is a link or belongs to another user (uid {status.st_uid}): delete it, or set "
            "RAY_TMPDIR to a folder of your own"
        )
    closed.chmod(0o700)
    return sessions


def path_of_sessions() -> Path:
    """Return the path of `session_folder`. The folder need not exist.

    Raises:
        ConfigError: the path of a socket of Ray would be longer than the operating system allows.
    """
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    temporary = _temporary_folder()
    # Ray opens its folder to all users, so the folder around it is closed.
    sessions = temporary / _CLOSED / "ray"
    length = len(os.fsencode(temporary))
    most = length + _SOCKET_BYTES - len(os.fsencode(sessions / _LONGEST_SOCKET.format(os.getpid())))
    if length > most:
        raise ConfigError(
            f"{variable}={temporary}: the path has {length} bytes, and names of Ray's sockets leave {most} bytes: set "
            f"{variable} to a shorter path, such as /tmp"
        )
    return sessions


def _temporary_folder() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def protect_token() -> None:
    """Make the token of this user's Rays if there is none, and let no other user read the token.

    A token from the variables of Ray stays as the user gave the token.

    Raises:
        ConfigError: another user owns the token, or the token cannot be written.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    token = Path.home() / ".ray" / "auth_token"
    try:
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not token.exists():
            # Another run may start at the same moment: each makes a whole file, and the first file stays.
            new = token.with_name(f"auth_token-{os.getpid()}")
            new.touch(mode=0o600)
            new.write_text(secrets.token_hex(_TOKEN_BYTES))
            try:
                os.link(new, token)
            except FileExistsError:
                pass
            finally:
                new.unlink()
        if token.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            token.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"Ray's token {token} cannot be made private ({error.strerror}): give {token.parent} to your user, or set "
            "HOME to a folder of your own"
        ) from error


def _route_bytes(config: RecipeConfig) -> int:
    """Return the size of the experts of a token, which the engine returns for `model.router_replay=rollout`."""
    if config.model.router_replay != "rollout":
        return 0
    model = read_model_config(Path(model_folder(config.model.path, weights=False), "config.json"))
    text = model.get("text_config") or model
    layers = text.get("num_hidden_layers") or len(text.get("layers_block_type") or ())
    return 2 * layers * max(chosen_experts(model), 1)


def object_store_bytes(config: RecipeConfig) -> int:
    """Return the size for `ray.init`: what the samples of the steps in flight need, as far as this machine has it.

    Ray takes the memory when objects need it, and writes further objects to the disk.
    """
    pools = config.placement.pools
    per_token = _SAMPLE_BYTES + _POOL_BYTES * len(pools) + _route_bytes(config)
    if "teacher" in pools and isinstance(config.algorithm, dict):
        per_token += _LIKELIEST_BYTES * int(config.algorithm.get("teacher_top_k", 0))
    longest = config.data.max_prompt_tokens + max(config.environment.max_turns, 1) * config.sampling.max_tokens
    samples = config.schedule.in_flight(config.prompts_drawn) * config.batch.samples_per_prompt
    room = _SHARE_OF_MEMORY * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        room = min(room, _SHARE_OF_SHARED * psutil.disk_usage(str(_SHARED_MEMORY)).free)
    return max(LEAST_BYTES, min(samples * longest * per_token, int(room)))
