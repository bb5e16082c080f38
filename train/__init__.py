"""Training of estimators."""
