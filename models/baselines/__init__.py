"""Baselines: published formulas, TBEM's regressors, and the virtual GPU by itself."""
