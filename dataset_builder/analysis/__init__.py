"""Static analysis: layers, totals, and what shapes alone say of memory."""
