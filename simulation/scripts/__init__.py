"""Training scripts on a virtual GPU: the child process that runs them, and what comes back."""
