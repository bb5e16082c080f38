"""Static analysis: layer tables, optimizer state, and the memory that shapes alone imply."""
