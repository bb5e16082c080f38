"""The values of a job that can be left open, as requests and commands name them. Imports nothing."""

UNKNOWNS = ("batch_size", "length", "lora_rank", "world_size", "device")
