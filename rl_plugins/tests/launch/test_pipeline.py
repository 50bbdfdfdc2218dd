"""What is wrong with a pipeline is said before its first stage, in its own words, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.pipeline import register_schema, run_pipeline

DATA = ["model=/no/model", "data.sft=[a]", "data.pairs=[b]", "data.prompts=[c]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (DATA[:1] + DATA[2:], r"option 'data\.sft' has no value: add data\.sft=\.\.\. to the command line"),
        (DATA[1:], r"option 'model' has no value"),
        ([*DATA, "++common.run.stepz=3"], r"stage sft: there is no option 'run\.stepz'; did you mean 'run\.steps'\?"),
        (
            [*DATA, "++stages.ppo.options.guard.klx=1"],
            r"stage ppo: there is no option 'guard\.klx'; did you mean 'guard",
        ),
        (
            [*DATA, "++stages.ppo.options.tracking.upload_best=1"],
            r"stage ppo: tracking\.upload_best=1 is more than run",
        ),
    ],
)
def test_wrong_options(overrides: list[str], message: str, tmp_path: Path) -> None:
    register_schema()
    with pytest.raises(ConfigError, match=message):
        run_pipeline(compose_config("sft_rm_ppo", [*overrides, f"output_dir={tmp_path}"]))
    assert list(tmp_path.iterdir()) == []


def test_one_that_did_not_come_to_its_first_stage_may_begin_again(tmp_path: Path) -> None:
    register_schema()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"stage sft: model\.path=/no/model: "):
            run_pipeline(compose_config("sft_rm_ppo", [*DATA, f"output_dir={tmp_path}"]))
    assert [path.name for path in (tmp_path / "sft_rm_ppo").iterdir()] == ["pipeline.yaml"], "MLflow has no run of it"
    (tmp_path / "sft_rm_ppo" / "sft").mkdir()
    with pytest.raises(ConfigError, match="exists: continue it with resume=true"):
        run_pipeline(compose_config("sft_rm_ppo", [*DATA, f"output_dir={tmp_path}"]))
