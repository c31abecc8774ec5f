"""The requests of a job ad, checked."""
