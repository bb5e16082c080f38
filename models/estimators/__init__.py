"""Estimators: what is fitted to rows and predicts memory."""
