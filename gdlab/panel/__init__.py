"""The panel: controls made from the Experiment's own fields, the live charts, and the link from a run to them."""

from gdlab.panel.playground import Playground

__all__ = ["Playground"]
