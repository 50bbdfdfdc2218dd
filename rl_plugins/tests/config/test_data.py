from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.config.data import DataConfig
from rl_plugins.config.recipe import read_config, write_config
from rl_plugins.errors import ConfigError
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.text_file import read_yaml

TEMPLATE = "{% for m in messages %}\n{{ m['content'] }} # 'é'\n{% endfor %}<|end|>\n"


def test_chat_template_of_a_file_is_a_text_in_the_configuration_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "users.jinja"
    file.write_text(TEMPLATE)
    config = configured("grpo", "model.path=model", f"data.chat_template={file}")
    assert config.data.chat_template == TEMPLATE
    written = tmp_path / "config.yaml"
    write_config(config, written)
    file.unlink()
    assert read_config(written, "").data.chat_template == TEMPLATE


def test_chat_template_of_a_variable_is_a_text_in_the_configuration_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users.jinja").write_text(TEMPLATE)
    monkeypatch.setenv("PROJECT", str(tmp_path))
    config = configured("grpo", "model.path=model", "data.chat_template=${oc.env:PROJECT}/users.jinja")
    write_config(config, tmp_path / "config.yaml")
    assert read_yaml(tmp_path / "config.yaml", "").data.chat_template == TEMPLATE


def test_chat_template_refuses_other_files_and_texts(tmp_path: Path) -> None:
    file, missing = tmp_path / "plain.jinja", tmp_path / "no.jinja"
    file.write_text("plain")
    for value, said in (
        (str(missing), f"chat_template={missing}: there is no such file"),
        (str(file), f"chat_template={file}: a Jinja template writes messages with {{{{ ... }}}}"),
        ("chatml", "chat_template='chatml': a Jinja template"),
        ("{{ messages }}${HOME}", "has no ${ here"),
    ):
        with pytest.raises(ConfigError) as error:
            DataConfig(chat_template=value)
        assert said in str(error.value)
