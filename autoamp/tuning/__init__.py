"""Tunes cast lists: a cost model of a program's ops proposes changes, and runs of the program confirm them."""

from __future__ import annotations

from autoamp.tuning.metrics import METRICS_VARIABLE, metric_of, number_in, printed_names, report_metric
from autoamp.tuning.model import Proposal, Survey, list_text, proposals_of, units_of
from autoamp.tuning.search import Bisection, Outcome, Search, Stopped
from autoamp.tuning.survey import SurveyEnded, Surveyor, time_of

__all__ = [
    "METRICS_VARIABLE",
    "Bisection",
    "Outcome",
    "Proposal",
    "Search",
    "Stopped",
    "Survey",
    "SurveyEnded",
    "Surveyor",
    "list_text",
    "metric_of",
    "number_in",
    "printed_names",
    "proposals_of",
    "report_metric",
    "time_of",
    "units_of",
]
