"""What every lab keeps to: short, gdlab only, one question, one run that is checked. (nbval runs them all.)"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from gdlab.dashboard.catalogue import labs_in

FOLDER = Path(__file__).resolve().parents[1] / "labs"
LABS = sorted(FOLDER.glob("*.ipynb"))
LESSONS = [path for path in LABS if not path.name.startswith("00")]


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_the_series_is_there_in_its_order() -> None:
    assert [path.stem for path in LABS] == [
        "00_start", "01_workers", "02_stragglers", "03_staleness", "04_precision", "05_clipping"]  # fmt: skip


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_is_a_valid_notebook_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, f"strip the outputs of {path.name}"
    assert "widgets" not in notebook.metadata and path.stat().st_size < 20_000


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_imports_gdlab_only_and_defines_nothing(path: Path) -> None:
    for source in cells(path, "code"):
        assert len(source.splitlines()) <= 8, f"{path.name}: a cell has more than 8 lines"
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.ImportFrom)
            if isinstance(node, ast.Import):
                assert [(alias.name, alias.asname) for alias in node.names] == [("gdlab", "gd")]


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_opens_with_its_title_and_its_question(path: Path) -> None:
    said = nbformat.read(path, as_version=4).metadata["gdlab"]
    title, question = cells(path, "markdown")[0].splitlines()[0::2][:2]
    assert title == f"# {said['title']}" and question.startswith(f"**{said['question']}**")
    assert said["question"].endswith("?") and 1 <= said["minutes"] <= 60


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_one_panel_one_run_and_one_check(path: Path) -> None:
    code = cells(path, "code")
    assert 4 <= len(cells(path, "markdown")) + len(code) <= 6
    together = "\n".join(code)
    assert together.count("gd.Playground(") == 1 and together.count(".run_once(") == 1
    assert "show=[" in together and "figures=[" in together
    asserts = [node for node in ast.walk(ast.parse(together)) if isinstance(node, ast.Assert)]
    assert asserts and "assert" in code[-1]


def test_the_landing_page_can_name_every_lab() -> None:
    for lab in labs_in(FOLDER):
        assert lab["title"] and lab["question"].endswith("?")
