"""A run as one page: what is measured, the pictures, and the HTML that shows both."""

from ksm_lightning.report.measure import Report, load, measure
from ksm_lightning.report.page import render

__all__ = ["Report", "load", "measure", "render"]
