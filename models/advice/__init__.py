"""Advice about a job: other strategies, and changes that make it fit, each answered like the job itself."""
