"""What estimators are held against: published formulas, TBEM's regressors, and the virtual GPU by itself."""
