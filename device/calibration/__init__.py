"""Calibration: find the constants and workspace rules of a device profile from measurements."""
