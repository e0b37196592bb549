"""The one scheduler, on rank 0: it decides, the ranks execute its plans. Imports no torch."""

from tpdet.scheduler.scheduler import Scheduler
from tpdet.scheduler.statistics import SchedulerStatistics

__all__ = ["Scheduler", "SchedulerStatistics"]
