"""Published runs on several GPUs, rebuilt: one module per source, and the networks that the sources trained."""
