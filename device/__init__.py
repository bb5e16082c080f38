"""Profiles of devices: read by name, calibrated, and verified."""
