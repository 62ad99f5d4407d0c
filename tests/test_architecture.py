"""What the layout promises: layers, homes of third-party packages, settings that are read, no paths of one machine."""

import ast
import configparser
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from searchrl_jax.config.overlays import settings

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("searchrl_jax", "experiments", "launch")
# Folders that hold what was made or fetched here: environments, peers, runs, build outputs.
MADE = {".git", ".venv", ".peers", "runs", "build"}

# Import names that differ from the name of the package that brings them.
PACKAGE_OF = {"Stemmer": "pystemmer", "orbax": "orbax-checkpoint"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    """Every text file of the tree that a person wrote."""
    suffixes = {".py", ".md", ".cfg", ".toml", ".txt", ".sh", ".json", ".jsonl", ".yml", ".yaml", ""}
    found = []
    for folder, folders, names in os.walk(ROOT):
        at_root = Path(folder) == ROOT
        folders[:] = [
            name
            for name in folders
            if not name.endswith(("cache", "cache__", ".egg-info")) and not (at_root and name in MADE)
        ]
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes]
    return sorted(found)


def attributes_read(source: str) -> set[str]:
    """Names that the source reads as attributes of something: `config.rl.loss_fn` reads `rl` and `loss_fn`."""
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def modules_imported(path: Path) -> set[str]:
    """First parts of the names of the modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_import_contracts_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_reading_is_told_from_naming():
    assert attributes_read("a.rl.loss_fn = b.seed; c(lr=1); d['x']; e = 'a.f'") == {"rl", "seed"}


def test_every_setting_is_read_outside_config():
    files = [path for path in python_files(*PRODUCT) if ROOT / "searchrl_jax" / "config" not in path.parents]
    read = set().union(*(attributes_read(path.read_text()) for path in files))
    unread = [name for name in settings() if not set(name.split(".")) <= read]
    assert not unread, f"settings that nothing reads: {unread}"


def test_the_package_knows_nothing_of_what_stands_above_it():
    above = {"launch", "experiments", "benchmarks", "tests"}
    assert not {path: found for path in python_files("searchrl_jax") if (found := modules_imported(path) & above)}


def test_every_third_party_import_is_declared():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    # What an extra brings is imported where it is used, with an error that names the extra's target.
    wanted = setup["options"]["install_requires"] + setup["options.extras_require"]["pretrained"]
    lines = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    declared = {re.split(r"[\[<>=;]", line)[0].strip().lower() for line in lines}
    ours = {*PRODUCT, *sys.stdlib_module_names}
    imported = set().union(*(modules_imported(path) for path in python_files(*PRODUCT))) - ours
    assert {PACKAGE_OF.get(name, name) for name in imported} <= declared


def test_pyproject_names_the_build_backend_alone():
    assert len((ROOT / "pyproject.toml").read_text().splitlines()) == 3


def test_no_file_mentions_a_path_of_one_machine():
    # Written in parts, so that this file passes too.
    machine_path = re.compile("(?<![\\w.])/(?:" + "|".join(["work", "root", "home", "Users", "tmp"]) + ")/")
    mentions = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if machine_path.search(line)
    ]
    assert not mentions


def test_test_files_have_names_of_their_own():
    names = Counter(path.name for path in python_files("tests"))
    assert not [name for name, count in names.items() if count > 1]


def test_every_module_says_what_it_is_for():
    assert not [path for path in python_files("searchrl_jax") if not ast.get_docstring(ast.parse(path.read_text()))]
