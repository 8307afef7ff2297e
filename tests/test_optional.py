"""Packages that only some runs need."""

import json
import subprocess
import sys

import pytest

from stapo_lightning.errors import ConfigError
from stapo_lightning.optional import optional, require


def test_what_is_installed_is_imported():
    assert optional("json", "data", "X") is json
    require("json", "data", "X")


@pytest.mark.parametrize("ask", [optional, require])
def test_what_is_missing_is_named_with_the_command_that_installs_it(ask):
    with pytest.raises(
        ConfigError, match=r'X needs the package no_such_package: pip install "stapo-lightning\[data\]"'
    ):
        ask("no_such_package", "data", "X")


def test_math_verify_is_asked_for_before_anything_runs():
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'math_verify':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "from stapo_lightning.errors import ConfigError\n"
        "from stapo_lightning.rewards import MathVerify\n"
        "try:\n"
        "    MathVerify()\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'the reward MathVerify needs the package math_verify: pip install "stapo-lightning[math]"' in done.stdout
