"""Checkpoints: the files that come back with a job, and whether a VM can be restarted from them."""
