"""Tunes cast lists: a cost model of a program's ops proposes changes, and runs of the program confirm them."""

from __future__ import annotations

from autoamp.tuning.metrics import METRICS_VARIABLE as METRICS_VARIABLE
from autoamp.tuning.metrics import metric_of as metric_of
from autoamp.tuning.metrics import printed_names as printed_names
from autoamp.tuning.metrics import report_metric as report_metric
from autoamp.tuning.model import Proposal as Proposal
from autoamp.tuning.model import Survey as Survey
from autoamp.tuning.model import list_text as list_text
from autoamp.tuning.model import proposals_of as proposals_of
from autoamp.tuning.model import units_of as units_of
from autoamp.tuning.search import Bisection as Bisection
from autoamp.tuning.search import Outcome as Outcome
from autoamp.tuning.search import Search as Search
from autoamp.tuning.search import Stopped as Stopped
from autoamp.tuning.survey import SurveyEnded as SurveyEnded
from autoamp.tuning.survey import Surveyor as Surveyor
from autoamp.tuning.survey import time_of as time_of
