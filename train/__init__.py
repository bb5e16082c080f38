"""Trains, evaluates and releases estimators (`vramcast train`)."""
