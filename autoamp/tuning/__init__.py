"""Tunes cast lists: a cost model of a program's ops, and runs of the program that confirm what the model promises."""

from __future__ import annotations

from autoamp.tuning.bisection import Bisection, Unit, units_of
from autoamp.tuning.costs import VARIANTS, Cost, Survey, Use
from autoamp.tuning.metrics import (
    METRICS_VARIABLE,
    number_in,
    printed_metric,
    printed_names,
    report_metric,
    reported_metric,
)
from autoamp.tuning.model import Proposal, proposals_of, totals_of
from autoamp.tuning.search import INTERRUPTED, Outcome, OutOfBudget, Search, SearchResult, Trial
from autoamp.tuning.survey import SurveyEnded, Surveyor, time_of
from autoamp.tuning.writer import list_text, summary_of, write_list

__all__ = [
    "INTERRUPTED",
    "METRICS_VARIABLE",
    "VARIANTS",
    "Bisection",
    "Cost",
    "OutOfBudget",
    "Outcome",
    "Proposal",
    "Search",
    "SearchResult",
    "Survey",
    "SurveyEnded",
    "Surveyor",
    "Trial",
    "Unit",
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
    "totals_of",
    "units_of",
    "write_list",
]
