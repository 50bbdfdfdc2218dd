"""The names of `rl_plugins`."""

from __future__ import annotations

import pytest

import rl_plugins
from rl_plugins.tests.cases import case


def test_public_names_are_loaded_from_the_modules_that_define_the_names():
    for name, module in rl_plugins._MODULES.items():
        with case(name):
            found = getattr(rl_plugins, name)
            assert (found.__name__, found.__module__) == (name, f"rl_plugins.{module}")
            assert name in dir(rl_plugins)


def test_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'rl_plugins' has no attribute 'Policy'"):
        _ = rl_plugins.Policy  # type: ignore[attr-defined]
