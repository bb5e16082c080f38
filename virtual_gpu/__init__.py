"""The virtual GPU: what training would take on a card, worked out without one."""
