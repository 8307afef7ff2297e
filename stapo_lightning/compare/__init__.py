"""`stapo-compare`: the TensorBoard curves of several runs side by side."""

from stapo_lightning.compare.curves import Curve, Panel, panels
from stapo_lightning.compare.page import html_page
from stapo_lightning.compare.picture import write_png
from stapo_lightning.compare.runs import Run, find_runs, method_of

__all__ = ["Curve", "Panel", "Run", "find_runs", "html_page", "method_of", "panels", "write_png"]
