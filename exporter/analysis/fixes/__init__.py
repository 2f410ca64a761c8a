"""What to change, in numbers and in order of rank, and what will not help, with the reason. Pure."""

from exporter.analysis.fixes.advise import BALANCE, advise
from exporter.analysis.fixes.case import Advice, FixAdvice, RejectedFix

__all__ = ["BALANCE", "Advice", "FixAdvice", "RejectedFix", "advise"]
