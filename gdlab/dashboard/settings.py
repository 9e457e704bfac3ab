"""Voila's settings, the same for `gdlab dashboard` and for Voila inside a Jupyter server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gdlab.dashboard.catalogue import labs_in, title_of

HERE = Path(__file__).resolve().parent
START = "00_start.ipynb"

# A page that is gone says so itself; these are for one that could not (a crash, a cut line).
IDLE_KERNEL_S = 300
LOOK_FOR_IDLE_S = 30


def voila_settings() -> dict[str, dict[str, Any]]:
    """Return what the labs' pages need set, by the name of Voila's class."""
    return {
        "VoilaConfiguration": {
            "template": "gdlab",
            "classic_tree": True,
            "strip_sources": True,
            "show_tracebacks": False,
            "prelaunch_hook": before_kernel,
            "page_config_hook": list_labs,
        },
        "VoilaExecutor": {"cell_error_instruction": "Reload the page to start again."},
    }


def before_kernel(request: Any, notebook: Any, cwd: str) -> None:
    """Let a closing tab end its kernel, and name the page.

    The tab's last word is a POST that Jupyter takes only with the cross-site cookie, and Voila's page
    sets none unless asked: every closed tab would leave a kernel and its workers.
    """
    request.xsrf_token  # noqa: B018  (reading it sets the cookie)
    title = title_of(notebook)
    notebook.metadata.setdefault("title", f"{title} · gdlab" if title else "gdlab")


def list_labs(page_config: dict[str, Any], *, settings: dict[str, Any], notebook_path: str, **_: Any) -> dict[str, Any]:
    """Add the folder's labs to what the landing page's template is given."""
    root = Path(os.path.expanduser(settings["contents_manager"].root_dir))
    folder = (root / (notebook_path or "").strip("/")).resolve()
    if folder.is_relative_to(root.resolve()) and folder.is_dir():
        page_config["gdlabLabs"] = labs_in(folder)
    return page_config


def with_our_folders(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which Jupyter finds this package's own template and settings first.

    They are installed below the environment's prefix as well; this makes the ones that belong to the
    running code win, in a checkout or where two versions are installed.
    """
    places = {"JUPYTER_PATH": HERE / "share" / "jupyter", "JUPYTER_CONFIG_PATH": HERE / "etc" / "jupyter"}
    result = dict(environment)
    for name, place in places.items():
        rest = [p for p in result.get(name, "").split(os.pathsep) if p and p != str(place)]
        result[name] = os.pathsep.join([str(place), *rest])
    result.setdefault("GDLAB_RUNS", str(Path.cwd() / "runs"))
    return result
