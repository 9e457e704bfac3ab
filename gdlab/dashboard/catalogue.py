"""What the landing page says of each lab, read from the notebooks themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NAME = re.compile(r"(?P<number>\d+)_(?P<rest>.+)\.ipynb")
HEADING = re.compile(r"^#\s+(.+?)\s*$", re.MULTILINE)
QUESTION = re.compile(r"[^.?!\n#>*][^.?!\n]*\?")


def labs_in(folder: Path) -> list[dict[str, str]]:
    """Describe the labs of a folder, in their order: path, number, title and question, all strings.

    A notebook that cannot be read is listed by its name: one broken file must not hide the others.
    """
    return [describe(path) for path in sorted(folder.glob("*.ipynb")) if NAME.fullmatch(path.name)]


def describe(path: Path) -> dict[str, str]:
    """Describe one lab from its metadata `gdlab.title` and `gdlab.question`, else from its first words."""
    name = NAME.fullmatch(path.name)
    number, rest = (name["number"], name["rest"]) if name else ("", path.stem)
    lab = {"path": path.name, "number": number, "title": rest.replace("_", " ").capitalize(), "question": ""}
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        said = notebook.get("metadata", {}).get("gdlab", {})
        lab["title"] = said.get("title") or title_of(notebook) or lab["title"]
        lab["question"] = said.get("question") or question_of(notebook)
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    return lab


def title_of(notebook: Any) -> str:
    """Return a notebook's first heading without its number, or an empty string."""
    heading = HEADING.search(markdown_of(notebook))
    return re.sub(r"^(lab\s*)?\d+\s*[:.\u2013\u2014-]*\s*", "", heading[1], flags=re.IGNORECASE) if heading else ""


def question_of(notebook: Any) -> str:
    """Return the first sentence of a notebook's text that asks something, or an empty string."""
    question = QUESTION.search(markdown_of(notebook))
    return question[0].strip() if question else ""


def markdown_of(notebook: Any) -> str:
    cells = [cell["source"] for cell in notebook.get("cells", []) if cell.get("cell_type") == "markdown"]
    return "\n\n".join(source if isinstance(source, str) else "".join(source) for source in cells)
