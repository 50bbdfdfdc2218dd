"""The names that `rl_plugins` itself offers."""

from __future__ import annotations

import pytest

import rl_plugins


@pytest.mark.parametrize("name", sorted(rl_plugins._MODULES))
def test_a_name_is_loaded_from_its_module(name):
    found = getattr(rl_plugins, name)
    assert (found.__name__, found.__module__) == (name, f"rl_plugins.{rl_plugins._MODULES[name]}")
    assert name in dir(rl_plugins)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'rl_plugins' has no attribute 'Policy'"):
        _ = rl_plugins.Policy
