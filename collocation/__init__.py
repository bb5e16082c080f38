"""What schedulers talk to."""
