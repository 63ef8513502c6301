"""A page about runs: one HTML file that shows what was measured, and works without a network.

`write_report` reads run directories and writes it; `python -m trainkit report` calls that.
"""

from trainkit.tools.report.describe import describe_run
from trainkit.tools.report.page import write_report
from trainkit.tools.report.read import read_run

__all__ = ["describe_run", "read_run", "write_report"]
