"""This machine and the job's user."""
