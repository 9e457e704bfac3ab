"""The files around the code agree with each other, and the wheel carries what it must."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import gdlab
from gdlab.dashboard.catalogue import labs_in

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ON_CONDA = {"pytorch": "torch", "pytorch-cpu": "torch"}


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [r for lines in lists for r in map(Requirement, lines) if r.name != "gdlab"]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def conda(path: str) -> dict[str, Requirement]:
    said = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    found = [Requirement(line) for line in said["dependencies"] if isinstance(line, str)]
    return {canonicalize_name(ON_CONDA.get(r.name, r.name)): r for r in found}


@pytest.mark.parametrize("path", ["environment.yml", "binder/environment.yml"])
def test_conda_installs_what_pip_does(path: str) -> None:
    theirs = conda(path)
    assert str(theirs.pop("python").specifier) == PROJECT["requires-python"]
    assert theirs.pop("pip") is not None
    ours = {canonicalize_name(r.name): str(r.specifier) for r in requirements("lab")}
    assert {name: str(r.specifier) for name, r in theirs.items()} == ours


def test_binder_takes_the_cpu_build_and_a_single_channel() -> None:
    said = yaml.safe_load((ROOT / "binder/environment.yml").read_text(encoding="utf-8"))
    assert any(str(line).startswith("pytorch-cpu") for line in said["dependencies"])
    assert said["channels"] == ["conda-forge", "nodefaults"]


@pytest.mark.parametrize("requirement", requirements("lab", "test"), ids=lambda r: r.name)
def test_each_dependency_is_pinned_to_a_version_that_the_project_admits(requirement: Requirement) -> None:
    pin = constraints()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin, prereleases=True)


def test_the_pins_name_torch_exactly_and_no_installer() -> None:
    pins = constraints()
    assert str(pins["torch"]) == "2.13.0"
    assert not {"pip", "setuptools", "wheel", "gdlab"} & set(pins)


def test_the_pins_hold_all_that_the_dependencies_need_in_turn() -> None:
    pins, todo, seen = constraints(), [r.name for r in requirements("lab", "test")], set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [r.name for r in map(Requirement, needed) if r.marker is None or r.marker.evaluate({"extra": ""})]
    unpinned = {name for name in seen - set(pins) if _is_installed(name)} - {"setuptools", "pip", "wheel"}
    assert not {name for name in unpinned if not name.startswith(("nvidia-", "cuda-", "triton"))}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_version_is_stated_alike_everywhere() -> None:
    assert PROJECT["version"] == gdlab.__version__


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        said = set(re.findall(r"`(?:\w+=\S+ )*make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8")))
        assert said <= targets, f"{name} names make targets that do not exist"


def test_every_folder_and_file_that_the_map_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"^\s*\| `([\w./-]+)`", text, re.MULTILINE)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_lists_each_lab_as_the_landing_page_does() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for lab in labs_in(ROOT / "labs"):
        row = f"| [{lab['number']} {lab['title']}](labs/{lab['path']}) | {lab['question']} |"
        assert row in text, f"README.md lacks the row {row}"


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    shorter = code[1].replace("workers=4,", "workers=4, updates=30,")
    done = subprocess.run([sys.executable, "-c", shorter], cwd=tmp_path, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)]  # fmt: skip
    subprocess.run(words, check=True, timeout=55, cwd=folder)
    with zipfile.ZipFile(next(folder.glob("gdlab-*.whl"))) as opened:
        yield opened


def test_the_wheel_carries_the_template_the_settings_and_the_labs(wheel: zipfile.ZipFile) -> None:
    data = f"gdlab-{gdlab.__version__}.data/data/"
    names = {name.removeprefix(data) for name in wheel.namelist() if name.startswith(data)}
    template = ROOT / "gdlab/dashboard/share/jupyter/voila/templates/gdlab"
    assert {f"share/jupyter/voila/templates/gdlab/{path.name}" for path in template.iterdir()} <= names
    assert "etc/jupyter/jupyter_server_config.d/gdlab.json" in names
    assert {f"share/jupyter/gdlab/labs/{path.name}" for path in (ROOT / "labs").glob("*.ipynb")} <= names


def test_the_wheel_carries_every_file_of_the_package_that_code_reads(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    read = [p for p in (ROOT / "gdlab").rglob("*") if p.suffix in {".py", ".js", ".css", ".npz", ".json", ".html"}]
    assert [str(p.relative_to(ROOT)) for p in read if str(p.relative_to(ROOT)) not in names] == []


def test_the_wheel_carries_neither_tests_nor_runs(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"gdlab", f"gdlab-{gdlab.__version__}.dist-info", f"gdlab-{gdlab.__version__}.data"}
    assert not [name for name in wheel.namelist() if "__pycache__" in name or "/runs/" in name]


def test_a_jupyter_server_is_told_of_the_dashboard(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"gdlab-{gdlab.__version__}.data/data/etc/jupyter/jupyter_server_config.d/gdlab.json")
    assert json.loads(text) == {"ServerApp": {"jpserver_extensions": {"gdlab.dashboard": True}}}
