"""Tunes cast lists: a cost model of a program's ops proposes changes, and runs of the program confirm them."""

from __future__ import annotations

from autoamp.tools.tuning.metrics import METRICS_VARIABLE as METRICS_VARIABLE
from autoamp.tools.tuning.metrics import metric_of as metric_of
from autoamp.tools.tuning.metrics import printed_names as printed_names
from autoamp.tools.tuning.metrics import report_metric as report_metric
from autoamp.tools.tuning.model import Proposal as Proposal
from autoamp.tools.tuning.model import Survey as Survey
from autoamp.tools.tuning.model import list_text as list_text
from autoamp.tools.tuning.model import proposals_of as proposals_of
from autoamp.tools.tuning.model import units_of as units_of
from autoamp.tools.tuning.search import Bisection as Bisection
from autoamp.tools.tuning.search import Outcome as Outcome
from autoamp.tools.tuning.search import Search as Search
from autoamp.tools.tuning.search import Stopped as Stopped
from autoamp.tools.tuning.survey import SurveyEnded as SurveyEnded
from autoamp.tools.tuning.survey import Surveyor as Surveyor
