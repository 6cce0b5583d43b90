"""Tunes cast lists: a cost model of a program's ops proposes changes, and runs of the program confirm them."""

from __future__ import annotations

from autoamp.tuning.bisection import Bisection, units_of
from autoamp.tuning.metrics import METRICS_VARIABLE, metric_of, number_in, printed_names, report_metric
from autoamp.tuning.model import Proposal, Survey, Use, proposals_of
from autoamp.tuning.search import Outcome, Search, Stopped
from autoamp.tuning.survey import SurveyEnded, Surveyor, time_of
from autoamp.tuning.writer import figures_of, list_text, summary_of

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
    "Use",
    "figures_of",
    "list_text",
    "metric_of",
    "number_in",
    "printed_names",
    "proposals_of",
    "report_metric",
    "summary_of",
    "time_of",
    "units_of",
]
