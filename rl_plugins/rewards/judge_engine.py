"""Engine of a judge: a Ray actor with vLLM's server for OpenAI's protocol in a child process.

The driver starts the engines of a run (`placement.judge`), and reward workers ask them like any other judge. If the
server ends, its actor ends, and Ray starts the actor again at the same address. Meanwhile the run waits for the judge
(`reward.judge.wait_s`). If the machine is lost, Ray starts the actor on another machine, at another address. Training
workers ask for the addresses at each of their starts.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from threading import Event, Thread
from typing import Any

from rl_plugins.addresses import free_port
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, DeadlineExceeded, user_errors_of_tasks
from rl_plugins.hub.files import model_folder
from rl_plugins.rewards.child_process import ChildProcess
from rl_plugins.rollout.vllm.config import engine_environment, executor_name

_MODULE = "rl_plugins.rewards.judge_engine"
_PATHS = ("/health", "/v1/chat/completions")
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]
_RESTARTS = 10
_PORT_TIMEOUT_S = 60.0
_PROBE_S = 0.5
# Time of the actor beyond the deadline of its server.
_GRACE_S = 60.0


@dataclass(frozen=True)
class JudgeEngineConfig:
    """Settings of an engine. The record travels to the actor.

    Attributes:
        model: folder or hub name of the model, also the name of the model in requests.
        key: key that requests need.
        device: `cpu` or `cuda`.
        threads: number of CPU threads of the engine on CPU.
        gpus: number of GPUs that share the model.
        trust_remote_code: run Python code that the model's config.json names (`auto_map`).
        start_timeout_s: deadline for the start, in seconds.
        vllm: further arguments of vLLM's engine.
    """

    model: str
    key: str = field(repr=False)
    device: str = "cpu"
    threads: int = 1
    gpus: int = 1
    trust_remote_code: bool = False
    start_timeout_s: float = 600.0
    vllm: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RecipeConfig, key: str) -> JudgeEngineConfig:
        """Return the settings of a run's engines.

        Args:
            config: options of the run, with its device.
            key: key that requests need.
        """
        place = config.placement.judge
        return cls(
            model=str(config.reward.judge.model),
            key=key,
            device=config.placement.device,
            threads=max(1, int(place.cpus)),
            gpus=max(1, int(place.gpus)),
            trust_remote_code=config.model.trust_remote_code,
            start_timeout_s=place.start_timeout_s,
            vllm=place.vllm,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's server."""
        return {
            **({"enforce_eager": True} if self.device == "cpu" else {"tensor_parallel_size": self.gpus}),
            # The model's own settings of sampling, such as a penalty of repetitions, would change scores.
            "generation_config": "vllm",
            **self.vllm,
            "model": model_folder(self.model, trust_remote_code=self.trust_remote_code),
            "served_model_name": [self.model],
            "trust_remote_code": self.trust_remote_code,
            # The engine's own process ends with the server.
            "distributed_executor_backend": executor_name(1 if self.device == "cpu" else self.gpus),
            "api_key": [self.key],
            "middleware": [f"{OnlyJudgePaths.__module__}.{OnlyJudgePaths.__name__}"],
            "use_tqdm_on_load": False,
            "uvicorn_log_level": "warning",
            "disable_uvicorn_access_log": True,
        }


class OnlyJudgePaths:
    """ASGI middleware of the server: all paths but those of a judge do not exist.

    vLLM asks for the key at some paths only. Without the key, other users of the machine could use the engine.

    Args:
        app: vLLM's application.
    """

    def __init__(self, app: _Application) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in _PATHS):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": http.client.NOT_FOUND, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close"})


class JudgeEngine:
    """Actor with the server of an engine.

    Args:
        config: settings of the engine.
        port: free port of the machine.
    """

    def __init__(self, config: JudgeEngineConfig, port: int) -> None:
        import ray

        self._config, self._host, self._port = config, ray.util.get_node_ip_address(), port
        environment = os.environ | engine_environment(config.device, config.threads)
        self._server = ChildProcess(_MODULE, environment)
        self._server.connection.send((self._host, port, config.arguments))
        self._started = Event()
        if ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed:
            self._started.set()
        Thread(target=self._end_with_server, daemon=True, name="end-with-server").start()

    def ready(self) -> str:
        """Wait for the server, and return its address.

        Raises:
            ConfigError: the server has ended.
            DeadlineExceeded: the server does not answer before the deadline.
        """
        subject, deadline = f"the judge engine with the model {self._config.model}", time.monotonic()
        deadline += self._config.start_timeout_s
        while not self._is_healthy():
            if wait([self._server.ended], _PROBE_S):
                raise ConfigError(
                    f"{subject} {self._server.describe_end()} at its start, and printed the reason above: change "
                    "reward.judge.model or placement.judge.vllm"
                )
            if time.monotonic() > deadline:
                self._server.kill()
                raise DeadlineExceeded(
                    f"{subject} did not start within placement.judge.start_timeout_s={self._config.start_timeout_s:g}"
                )
        self._started.set()
        return f"http://{self._host}:{self._port}/v1"

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_PROBE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end_with_server(self) -> None:
        wait([self._server.ended])
        # The caller of `ready` gets the reason of an end at the first start.
        if self._started.is_set():
            print(f"the judge engine {self._server.describe_end()}, and starts again", flush=True)
            os._exit(1)


def serve(connection: Connection) -> None:
    """Run vLLM's server in the child process.

    Args:
        connection: connection to the actor, which sends host, port and arguments.
    """
    host, port, arguments = connection.recv()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(options).update(host=host, port=port, **arguments)
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options))


def start_judge_engines(config: JudgeEngineConfig, places: Sequence[dict[str, Any]]) -> list[Any]:
    """Start an engine at each place, and return the actors before they are ready.

    Args:
        config: settings of the engines.
        places: Ray's options of each actor.

    Raises:
        DeadlineExceeded: Ray did not find a free port before the deadline.
    """
    import ray

    # After a restart, an actor has the same arguments, and with the arguments the same port.
    ports = [ray.remote(free_port).options(**{**place, "num_cpus": 0, "num_gpus": 0}).remote() for place in places]
    try:
        found = ray.get(ports, timeout=_PORT_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"no free port for the judge engines within {_PORT_TIMEOUT_S:g} s") from None
    actor: Any = ray.remote(JudgeEngine)
    return [
        actor.options(max_restarts=_RESTARTS, **place).remote(config, port)
        for place, port in zip(places, found, strict=True)
    ]


def addresses_of(engines: Sequence[Any], start_timeout_s: float) -> list[str]:
    """Wait for engines, and return their addresses.

    Raises:
        ConfigError: an engine has ended at its start.
        DeadlineExceeded: an engine did not start before the deadline.
    """
    import ray

    if not engines:
        return []
    try:
        with user_errors_of_tasks():
            addresses: list[str] = ray.get(
                [engine.ready.remote() for engine in engines], timeout=start_timeout_s + _GRACE_S
            )
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"Ray did not start the judge engines within {start_timeout_s + _GRACE_S:g} s") from None
    return addresses
