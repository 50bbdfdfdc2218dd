"""Libraries that are not in the base installation. Each is an extra of the package."""

from __future__ import annotations

from importlib.util import find_spec

from rl_plugins.errors import ConfigError


def check_installed(module: str, extra: str, option: str) -> None:
    """Check that a library is installed, without an import of the library.

    Args:
        module: name of the library for imports.
        extra: name of the extra with the library, in pyproject.toml.
        option: option or argument that needs the library, with its value, such as `model.liger=true`.

    Raises:
        ConfigError: the library is not installed.
    """
    if find_spec(module) is None:
        name = option.partition("=")[0].rpartition(" ")[2]
        raise ConfigError(
            f"{option}: {module.replace('_', '-')} is not installed: pip install 'rl-plugins[{extra}]', or leave "
            f"{name} out"
        )
