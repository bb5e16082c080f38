"""Replay a trace through the allocator of a device."""
