"""A training run as a schedule over a layer table: no network is built, traced or simulated."""

from vramcast.jobs.analysis.schedule.run import Schedule, ScheduledPeak, scheduled_peak

__all__ = ["Schedule", "ScheduledPeak", "scheduled_peak"]
