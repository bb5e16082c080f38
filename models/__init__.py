"""Estimators, and the classification of new networks."""
