"""What foreign schedulers say and want to hear: pure translations, no HTTP."""
