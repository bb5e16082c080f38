"""Child processes that run the code of a user, and what keeps it in bounds."""
