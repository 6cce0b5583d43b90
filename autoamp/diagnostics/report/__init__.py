"""The report of a run: what is recorded for it, its values, and the page that shows them."""

from __future__ import annotations

from autoamp.diagnostics.report.document import failures, report_of
from autoamp.diagnostics.report.page import check_report_tools, is_page, load_report, report_page, write_report
from autoamp.diagnostics.report.recording import Recording

__all__ = [
    "Recording",
    "check_report_tools",
    "failures",
    "is_page",
    "load_report",
    "report_of",
    "report_page",
    "write_report",
]
