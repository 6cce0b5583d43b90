"""Tunes cast lists: a cost model of a program's ops, and runs of the program that confirm what the model promises."""

from __future__ import annotations

from autoamp.tuning.bisection import Bisection, units_of
from autoamp.tuning.costs import Cost, Survey, Use
from autoamp.tuning.metrics import (
    METRICS_VARIABLE,
    number_in,
    printed_metric,
    printed_names,
    report_metric,
    reported_metric,
)
from autoamp.tuning.model import Proposal, proposals_of
from autoamp.tuning.search import INTERRUPTED, Outcome, OutOfBudget, Search, Trial
from autoamp.tuning.survey import SurveyEnded, Surveyor, time_of
from autoamp.tuning.writer import list_text, summary_of, write_list

__all__ = [
    "INTERRUPTED",
    "METRICS_VARIABLE",
    "Bisection",
    "Cost",
    "OutOfBudget",
    "Outcome",
    "Proposal",
    "Search",
    "Survey",
    "SurveyEnded",
    "Surveyor",
    "Trial",
    "Use",
    "list_text",
    "number_in",
    "printed_metric",
    "printed_names",
    "proposals_of",
    "report_metric",
    "reported_metric",
    "summary_of",
    "time_of",
    "units_of",
    "write_list",
]
