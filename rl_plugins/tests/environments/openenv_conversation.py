"""Row and conversation of the guessing game, for the tests of OpenEnvText."""

from __future__ import annotations

from typing import Any

from rl_plugins.environments.openenv_text import OpenEnvText

ROW: dict[str, Any] = {
    "seed": 3, "extra_info": {"seed": 7, "low": 2}, "prompt": [{"role": "user", "content": "Find the number."}],
}  # fmt: skip


async def play(environment: OpenEnvText, *responses: str) -> list[Any]:
    """Return the first messages and the result of each response, and close the environment."""
    results: list[Any] = [await environment.reset(ROW)]
    try:
        for response in responses:
            results.append(await environment.step({"content": response}))
    finally:
        await environment.close()
    return results
