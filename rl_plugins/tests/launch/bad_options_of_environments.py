"""Options of environments refused by a recipe: the overrides, and required words of the message."""

from __future__ import annotations

from rl_plugins.tests.launch.bad_options import Case

TOOLS, SAMPLE_TOOLS = ["environment=tools"], "rl_plugins.tests.environments.sample_tools"
STATEFUL, ENVIRONMENTS = ["environment=stateful"], "rl_plugins.tests.environments.sample_environments"
AGENT, AGENTS = ["environment=agent"], "rl_plugins.tests.environments.sample_agents"

ENVIRONMENT_CHECKS: dict[str, list[Case]] = {
    "tools": [
        (["environment.tools=[my.search]"], ["environment.max_turns=1", "set 2 or more", "environment=tools"]),
        (["environment.left_out=right"], ["environment.left_out=right", "use one of beginning, middle, end"]),
        ([*TOOLS, f"environment.tools=[{SAMPLE_TOOLS}.adds]"], [f"tool '{SAMPLE_TOOLS}.adds'", "did you mean 'add'"]),
        (
            [*TOOLS, f"environment.tools=[{SAMPLE_TOOLS}.add]", "environment.pass_env=[NO_SUCH_KEY]"],
            ["environment.pass_env=[NO_SUCH_KEY]: the environment has no NO_SUCH_KEY"],
        ),
        (
            [*TOOLS, "environment.tools=[{mcp: [no-such-program]}]"],
            ["no-such-program", "did not start", "or raise environment.load_timeout_s"],
        ),
        ([*TOOLS, f"environment.tools=[{SAMPLE_TOOLS}.add]"], ["model' does not show tools to the policy"]),
    ],
    "stateful": [
        (STATEFUL, ["environment.stateful: name a class"]),
        (["environment.stateful=my.Game"], ["choose reward=environment"]),
        (["reward=environment"], ["no reward is configured"]),
        ([*STATEFUL, f"environment.stateful={ENVIRONMENTS}.Cuont"], ["did you mean 'Count'"]),
        (
            [*STATEFUL, f"environment.stateful={ENVIRONMENTS}.Judge", "environment.pass_env=[NO_SUCH_KEY]"],
            ["environment.pass_env=[NO_SUCH_KEY]: the environment has no NO_SUCH_KEY"],
        ),
        ([*STATEFUL, f"environment.stateful={ENVIRONMENTS}.WithoutClose"], ["write `async def close(self)`"]),
        ([*STATEFUL, f"environment.stateful={ENVIRONMENTS}.NeedsSize"], ["missing a required argument: 'size'"]),
        (
            [*STATEFUL, f"environment.stateful={ENVIRONMENTS}.Count"],
            ["fails on a row of data_source", "raised: ", "Count: step: ValueError: invalid literal"],
        ),
        (
            [*STATEFUL, f"environment.stateful={ENVIRONMENTS}.Judge", f"environment.tools=[{SAMPLE_TOOLS}.add]"],
            ["environment.stateful and environment.tools", "leave one out"],
        ),
        (
            [*STATEFUL, f"environment.stateful={ENVIRONMENTS}.Judge", "data.max_prompt_tokens=1"],
            ["first messages of an environment have", "more than max_prompt_tokens=1"],
        ),
    ],
    "agent": [
        (AGENT, ["environment.agent: name a function of a row"]),
        (["environment.agent=my.solve"], ["choose reward=environment"]),
        ([*AGENT, f"environment.agent={AGENTS}.other_arguments"], ["takes other arguments", "solve(row, base_url"]),
        (
            [*AGENT, f"environment.agent={AGENTS}.talk", "environment.max_sequences=0"],
            ["environment.max_sequences=0", "at least 1"],
        ),
        (
            [*AGENT, f"environment.agent={AGENTS}.talk", "environment.endpoint_host=0.0.0.0"],
            ["environment.endpoint_host=0.0.0.0", "use 127.0.0.1"],
        ),
        (
            [*AGENT, f"environment.agent={AGENTS}.talk", f"environment.stateful={ENVIRONMENTS}.Judge"],
            ["environment.stateful and environment.agent", "leave one out"],
        ),
        (
            [*AGENT, f"environment.agent={AGENTS}.talk", f"environment.tools=[{SAMPLE_TOOLS}.add]"],
            ["environment.agent and environment.tools", "leave one out"],
        ),
    ],
}
