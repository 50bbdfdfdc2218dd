"""A tool that runs Python: `environment=tools 'environment.tools=[rl_plugins.environments.python_tool.RunPython]'`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_plugins.sandbox.sandbox import CodeSandbox

_WALL_S = 8.0
"""Less than the deadline of a call, so that the policy reads the output so far."""


class RunPython:
    """Tool `run_python`: a program of the policy runs in a CodeSandbox, and the policy reads the output.

    Args:
        sandbox: way to isolate programs; see CodeSandbox.
        limits: limits of a program; see SandboxLimits.
        headers: headers of requests to a server with the sandbox.
        folders: further folders that programs may read.

    Attributes:
        calls_at_once: largest number of programs at once; see `tool_of`.

    Raises:
        ConfigError: an option is wrong, or there is no such sandbox on this machine.
    """

    name = "run_python"

    def __init__(
        self,
        sandbox: str | Sequence[str] = "auto",
        limits: Mapping[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
        folders: Sequence[str] = (),
    ) -> None:
        self._sandbox = CodeSandbox(
            sandbox, limits={"wall_s": _WALL_S, **(limits or {})}, headers=headers, folders=folders
        )
        self.calls_at_once = self._sandbox.parallel

    def __call__(self, code: str) -> str:
        """Run a Python program in a new process, and return the printed text.

        Args:
            code: the program. A result is shown only if the program prints it.
        """
        result = self._sandbox.run(code)
        texts = [result.stdout, result.stderr]
        if result.limit:
            texts.append(f"[ended by the limit: {result.limit}]")
        elif result.exit_status:
            texts.append(f"[exit status {result.exit_status}]")
        return "\n".join(text.rstrip("\n") for text in texts if text) or "[no output]"
