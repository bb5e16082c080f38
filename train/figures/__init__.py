"""Pictures of a run. Each consists of two functions: one computes a table, one draws it."""

from vramcast.train.figures.confusion import confusion_table, draw_confusion
from vramcast.train.figures.curves import curves_table, draw_curves
from vramcast.train.figures.projections import draw_projections, projections_table
from vramcast.train.figures.reliability import draw_reliability, reliability_table

__all__ = [
    "confusion_table",
    "curves_table",
    "draw_confusion",
    "draw_curves",
    "draw_projections",
    "draw_reliability",
    "projections_table",
    "reliability_table",
]
