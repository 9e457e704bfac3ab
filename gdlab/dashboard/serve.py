"""Start JupyterLab or the dashboard on this machine, and say where."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from gdlab.dashboard.settings import HERE, IDLE_KERNEL_S, LOOK_FOR_IDLE_S, START, voila_settings, with_our_folders

ADDRESS = "127.0.0.1"
LAB_PORT, DASHBOARD_PORT = 8888, 8866


class ServeError(RuntimeError):
    """One sentence on why nothing can be served here."""


def labs_folder() -> Path:
    """Return the folder of the notebooks: the checkout's, else the installed one.

    Raises ServeError where neither is found.
    """
    beside = HERE.parents[1] / "labs"
    if (beside / START).is_file():
        return beside
    from jupyter_core.paths import jupyter_path

    for folder in map(Path, jupyter_path("gdlab", "labs")):
        if (folder / START).is_file():
            return folder
    raise ServeError("gdlab's notebooks are not installed: run `pip install --force-reinstall 'gdlab[lab]'`.")


def notebooks_to_edit() -> Path:
    """Return a folder of notebooks that the reader may change: the checkout's, else a copy in ./gdlab-labs."""
    labs = labs_folder()
    if labs.parent == HERE.parents[1]:
        return labs
    copy = Path.cwd() / "gdlab-labs"
    copy.mkdir(exist_ok=True)
    for notebook in labs.glob("*.ipynb"):
        if not (copy / notebook.name).exists():
            shutil.copyfile(notebook, copy / notebook.name)
    return copy


def free_port(asked: int | None, first: int) -> int:
    """Return the port asked for if it can be had, else the first free one from `first` on.

    Raises ServeError where the one asked for is taken.
    """
    for port in [asked] if asked is not None else range(first, first + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, port))
            except (OSError, OverflowError):
                continue
            return probe.getsockname()[1]
    raise ServeError(
        f"Port {asked} on {ADDRESS} cannot be used: another program has it or it is not allowed; try another."
        if asked is not None
        else f"No port from {first} to {first + 99} on {ADDRESS} is free: name one with --port."
    )


def has_screen() -> bool:
    """Tell whether opening a browser makes sense here."""
    if sys.platform != "linux":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def serve_lab(port: int | None = None, browser: bool | None = None, notebooks: str | None = None) -> None:
    """Become a JupyterLab server that opens on the first lab; does not return."""
    _need("jupyterlab")
    port = free_port(port, LAB_PORT)
    folder = _folder(notebooks) or notebooks_to_edit()
    words = [
        sys.executable, "-m", "jupyterlab",
        f"--ServerApp.ip={ADDRESS}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{START}",
        "--Application.log_level=WARN",
    ]  # fmt: skip
    if not (has_screen() if browser is None else browser):
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")
    print(f"JupyterLab starts on {folder}; its address follows. Ctrl-C ends it.", flush=True)
    environment = with_our_folders(dict(os.environ))
    # JupyterLab's question whether to fetch its makers' news would come before the first lab does.
    environment["JUPYTER_CONFIG_PATH"] += os.pathsep + str(HERE / "jupyterlab")
    os.execve(sys.executable, words, environment)


def serve_dashboard(port: int | None = None, browser: bool | None = None, notebooks: str | None = None) -> None:
    """Serve the labs as pages until interrupted."""
    _need("voila")
    os.environ.update(with_our_folders(dict(os.environ)))
    from tornado.ioloop import IOLoop
    from traitlets.config import Config
    from voila.app import Voila

    settings = Config(voila_settings())
    settings.Voila.ip = ADDRESS
    settings.Voila.port = free_port(port, DASHBOARD_PORT)
    settings.Voila.port_retries = 0
    settings.Voila.root_dir = str(_folder(notebooks) or labs_folder())
    settings.Voila.open_browser = has_screen() if browser is None else browser
    settings.Voila.log_level = "ERROR"
    # Answer to this machine's own names only, so that no other site can reach it through the browser.
    settings.Voila.tornado_settings = {"allow_remote_access": False, "local_hostnames": ["localhost"]}
    settings.MappingKernelManager.cull_idle_timeout = IDLE_KERNEL_S
    settings.MappingKernelManager.cull_interval = LOOK_FOR_IDLE_S
    settings.MappingKernelManager.cull_connected = False

    IOLoop.current().add_callback(
        print, f"gdlab's dashboard is at http://{ADDRESS}:{settings.Voila.port}/ (Ctrl-C ends it)", flush=True
    )
    Voila.launch_instance(argv=[], config=settings)


def _folder(name: str | None) -> Path | None:
    if name is None:
        return None
    if not Path(name).is_dir():
        raise ServeError(f"{name!r} is not a folder: give one that holds notebooks, or none for gdlab's own.")
    return Path(name).resolve()


def _need(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ServeError(f"{package} is not installed: run `pip install 'gdlab[lab]'`.")
