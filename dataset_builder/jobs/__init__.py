"""Networks that somebody hands in: what they are made of, and what training them takes on the virtual GPU."""
