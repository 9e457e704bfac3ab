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
    import warnings

    from gdlab.dashboard.settings import voila_settings

    # Voila asks for all of traitlets' warnings; this one is Jupyter's own and nobody's here to mend.
    warnings.filterwarnings("ignore", message=r"ServerApp\.token config is deprecated")
    for owner, values in voila_settings().items():
        for name, value in values.items():
            if name not in server.config[owner]:
                server.config[owner][name] = value


def _load_jupyter_server_extension(server: Any) -> None:
    """Do nothing more: linking has done it all."""
