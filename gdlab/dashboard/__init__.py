"""The labs as pages: Voila's template and landing page, and the settings that both need.

Named in `jupyter_server_config.d`, so that a plain Jupyter server (JupyterLab, Binder, a hub) gives
Voila the same settings as `gdlab dashboard` does.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gdlab.dashboard"}]


def _link_jupyter_server_extension(server: Any) -> None:
    """Give Voila our settings before any extension loads; what the server's owner has set stays."""
    from gdlab.dashboard.settings import voila_settings

    for owner, values in voila_settings().items():
        for name, value in values.items():
            if name not in server.config[owner]:
                server.config[owner][name] = value


def _load_jupyter_server_extension(server: Any) -> None:
    """Do nothing more: linking has done it all."""
