"""The README's examples run, and its numbers are those of the code."""

import re
from pathlib import Path

import pytest

from tests.cli import ROOT, parse, stapo

README = (ROOT / "README.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, re.DOTALL))


def test_the_two_commands_stand_at_the_top():
    head = README[: README.index("## ")]
    assert "pip install -e . && stapo fit --config configs/quickstart.yaml" in head
    assert 'pip install -e ".[test]" && pytest' in head


def test_each_example_is_about_ten_lines():
    assert set(EXAMPLES) == {"my_reward.py", "my_selector.py", "my_callback.py", "my_engine.py"}
    for name, code in EXAMPLES.items():
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(lines) <= 12, name


def test_the_examples_train(tmp_path):
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    for folder in ("configs", "stapo_lightning"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    flags = [
        flag for line in re.findall(r"^(    stapo fit .*my_.*)$", README, re.MULTILINE) for flag in line.split()[4:]
    ]
    assert len(flags) == 8, flags  # one option and its value for each example
    done = stapo(
        "fit", "--config", "configs/quickstart.yaml", "--config", "configs/debug.yaml", *flags, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tokens sampled so far" in done.stdout
    assert re.search(r"update \d: '.*' p=", done.stdout)


def test_links_and_files_exist():
    for target in re.findall(r"\]\((?!http|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:configs|callbacks|tests|stapo_lightning)/[\w./]+\.(?:py|yaml))`", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^    stapo \w+ --config .*$", README, re.MULTILINE))))
def test_every_command_parses(command, monkeypatch, tmp_path):
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    subcommand, *args = command.split("#")[0].split()[1:]
    parse(flags=tuple(arg.strip("'\"") for arg in args), subcommand=subcommand)


def test_the_package_has_what_the_file_map_names():
    section = README[README.index("## File map") : README.index("## Measured")]
    for name in re.findall(r"^\s+(\w+\.py)\b", section, re.MULTILINE):
        assert list(Path(ROOT).glob(f"**/{name}")), name
