"""`fusepatch doctor`: what is installed, what would serve here and why not, and what is wrong.

It reports what is broken and never raises for it, so nothing of ours or of others that may be broken is imported at
the top. Libraries are imported in a child process first; torch in this one only where the child survived it.
"""

from .diagnosis import Cache, CheckResult, Diagnosis, Gpu, Kernel, Setting, Version
from .examination import examine
from .findings import PROBLEM, WARNING, Finding

__all__ = (
    "PROBLEM",
    "WARNING",
    "Cache",
    "CheckResult",
    "Diagnosis",
    "Finding",
    "Gpu",
    "Kernel",
    "Setting",
    "Version",
    "examine",
)
