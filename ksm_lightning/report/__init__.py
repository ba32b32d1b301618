"""The HTML report of a run: measurements, pictures and the page."""

from ksm_lightning.report.measure import Report, load, measure
from ksm_lightning.report.page import render

__all__ = ["Report", "load", "measure", "render"]
