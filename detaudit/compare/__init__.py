"""From a trace to a report: which call is the first to differ, why, how sure that is. Never imports torch.

``analyze`` is a pure function of a trace. docs/how-it-works.md has the rules it follows; in short, a call is
accused only where two runs handed it the same bits and got different bits back.
"""

from detaudit.compare.analysis import analyze

__all__ = ["analyze"]
