"""What every lab keeps to: short, gdlab only, one question, runs that are checked. (nbval runs them all.)"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from gdlab.dashboard.catalogue import labs_in

FOLDER = Path(__file__).resolve().parents[1] / "labs"
LABS = sorted(FOLDER.glob("*.ipynb"))
FULL = [path for path in LABS if path.name.startswith(("04", "05", "07"))]
THIN = [path for path in LABS if path not in FULL and not path.name.startswith("00")]
WIDGETS = ("ipywidgets", "traitlets", "anywidget", "display(", "on_click", "observe(", "go.Figure", "gdlab.panel")


def cells(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_the_series_is_there_in_its_order() -> None:
    assert [path.stem for path in LABS] == [
        "00_start", "01_workers", "02_stragglers", "03_staleness", "04_precision", "05_clipping",
        "07_autodiff"]  # fmt: skip


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_is_a_valid_notebook_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, f"strip the outputs of {path.name}"
    assert "widgets" not in notebook.metadata and path.stat().st_size < 30_000


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_imports_gdlab_only_and_defines_nothing(path: Path) -> None:
    for source in cells(path, "code"):
        lines = [line for line in source.splitlines() if not line.startswith("#")]
        assert len(lines) <= 8, f"{path.name}: a cell has more than 8 lines"
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


@pytest.mark.parametrize("path", THIN, ids=lambda path: path.stem)
def test_a_thin_lab_has_one_panel_one_run_and_one_check(path: Path) -> None:
    code = cells(path, "code")
    assert 4 <= len(cells(path, "markdown")) + len(code) <= 6
    together = "\n".join(code)
    assert together.count("gd.Playground(") == 1 and together.count(".run_once(") == 1
    assert "show=[" in together and "figures=[" in together
    asserts = [node for node in ast.walk(ast.parse(together)) if isinstance(node, ast.Assert)]
    assert asserts and "assert" in code[-1]


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_lesson_asks_runs_explains_and_checks(path: Path) -> None:
    code = cells(path, "code")
    together = "\n".join(code)
    assert 6 <= len(code) <= 10
    assert not [word for word in WIDGETS if word in together], "a lesson holds no widget code"
    assert "gd.Playground(" in together and "predict=" in together, "a reader predicts before pressing Run"
    assert together.count("gd.predict(") >= 3 and together.count(".compare(") == together.count("gd.predict(")
    assert "gd.check(" in together and "gd.progress(" in code[-1]
    assert ".commit(" not in together and ".answer(" not in together, "answering is the reader's part"


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_a_lesson_holds_what_it_says_by_asserts_and_folds_what_tells_an_answer(path: Path) -> None:
    lesson = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for cell, after in zip(lesson, [*lesson[1:], lesson[-1]], strict=True):
        near = ast.parse(f"{cell.source}\n{after.source}").body
        if "gd.run(" in cell.source:
            assert any(isinstance(node, ast.Assert) for node in near), f"nothing is asserted of\n{cell.source}"
        tells = any(word in cell.source for word in ("assert", "because=", "correct="))
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert folded == tells, f"fold what tells an answer, and only that:\n{cell.source}"
        # JupyterLab goes on showing the first line of a folded cell.
        assert cell.source.startswith("# Folded") == folded, f"say first that it is folded:\n{cell.source}"


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.stem)
def test_the_answers_to_a_lesson_lie_outside_of_it(path: Path) -> None:
    key = (FOLDER.parent / "docs" / "answers.md").read_text(encoding="utf-8")
    for source in cells(path, "code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("gd.predict", "gd.check"):
                question = node.args[0]
                parts = [question.value] if isinstance(question, ast.Constant) else [
                    part.value for part in question.values if isinstance(part, ast.Constant)]  # fmt: skip
                assert all(part.strip() in key for part in parts), f"docs/answers.md lacks: {ast.unparse(question)}"


def test_the_landing_page_can_name_every_lab() -> None:
    for lab in labs_in(FOLDER):
        assert lab["title"] and lab["question"].endswith("?")
